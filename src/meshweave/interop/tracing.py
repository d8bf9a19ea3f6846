"""What torch's utilities ask about the tracer that they run under."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# In this context selective checkpointing does under make_fx what it does in eager PyTorch. Without it, it takes the
# tracer for torch.compile's, keeps the result of every op and leaves the choice to a later pass. Since torch 2.13
# (torch/compiler/__init__.py, torch/utils/checkpoint.py).
as_eager: Callable[[], AbstractContextManager[Any]] = getattr(
    torch.compiler, "_non_strict_tracing_context", nullcontext
)


def check_checkpoints(value: torch.Tensor) -> None:
    """RuntimeError where a value comes of a checkpoint of the reentrant kind, whose parameters `gradients` misses."""
    nodes, seen = [value.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "CheckpointFunctionBackward":
            raise RuntimeError("torch.utils.checkpoint.checkpoint was called with use_reentrant=True")
        nodes += [following for following, _ in node.next_functions]


def gradients(value: torch.Tensor, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """As `torch.autograd.grad(value, leaves, allow_unused=True)`, in the function modes that are active.

    `grad` itself is a function to them, so that a mode would miss what backward runs again: while it handles a
    function it is not active (torch/overrides.py).
    """
    run: Any = torch.autograd.graph._engine_run_backward
    return tuple(run((value,), (torch.ones_like(value),), False, False, tuple(leaves), True, accumulate_grad=False))
