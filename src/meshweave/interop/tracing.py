"""Decompositions, autograd's sequence numbers, and settings that a trace must not depend on.

Holds for torch 2.11 to 2.13 (torch/autograd, torch/_decomp, torch/utils/_python_dispatch.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._decomp import get_decompositions as get_decompositions
from torch.utils._python_dispatch import autograd_would_have_decomposed

from meshweave.interop import pytree


@contextmanager
def without_onednn() -> Iterator[None]:
    """A context in which PyTorch uses no ops of oneDNN. (`torch.backends.mkldnn.flags` sets the precision of TF32 too,
    and warns.)"""
    before: bool = torch._C._get_mkldnn_enabled()  # type: ignore[attr-defined]
    torch._C._set_mkldnn_enabled(False)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)  # type: ignore[attr-defined]


def check_checkpoints(value: torch.Tensor) -> None:
    """RuntimeError if a value depends on a checkpoint of the reentrant kind, whose parameters `gradients` misses."""
    if any(node.name() == "CheckpointFunctionBackward" for node in _backward_nodes(value)):
        raise RuntimeError("torch.utils.checkpoint.checkpoint was called with use_reentrant=True")


def leaves(value: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors in which gradients of a value would be accumulated."""
    return (node.variable for node in _backward_nodes(value) if hasattr(node, "variable"))


def _backward_nodes(value: torch.Tensor) -> Iterator[Any]:
    nodes, seen = [value.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes += [following for following, _ in node.next_functions]


def gradients(
    value: torch.Tensor, leaves: Sequence[torch.Tensor], scale: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, ...]:
    """Like `torch.autograd.grad(value, leaves, scale, allow_unused=True)`, in the active function modes. `grad` itself
    is a function to them, so a mode would miss what backward recomputes: a mode is not active while it handles a
    function (torch/overrides.py).
    """
    run: Any = torch.autograd.graph._engine_run_backward
    first = torch.ones_like(value) if scale is None else scale
    return tuple(run((value,), (first,), False, False, tuple(leaves), True, accumulate_grad=False))


def next_sequence_number() -> int:
    """The sequence number of the next op that autograd records in this thread."""
    return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def running_sequence_number() -> int | None:
    """The sequence number of the op whose gradient autograd is computing in this thread; None if there is none."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


@cache
def is_composite(func: Any) -> bool:
    """Whether an op consists of other ops, below which autograd works."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def decomposes_itself(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether autograd would have run an op as the ops that it consists of. In inference mode it is not involved, and
    the op comes whole."""
    return is_composite(func) and autograd_would_have_decomposed(func, pytree.tree_leaves((args, kwargs)))


@contextmanager
def recording_gradients() -> Iterator[None]:
    """A context in which autograd records, also in the kernel of an op, below autograd (torch/csrc/autograd)."""
    key = torch._C.DispatchKey.AutogradFunctionality  # type: ignore[attr-defined]
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(key, False):  # type: ignore[attr-defined]
        yield
