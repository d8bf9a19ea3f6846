"""Parameters that the model sees in another dtype than that in which they are stored and updated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshweave.capture.trace import Provenance
from meshweave.ir import ops
from meshweave.ir.graph import StepGraph


class _Cast(torch.autograd.Function):
    """A cast whose gradient's parts are cast back, to the stored dtype, before they are summed over devices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return x.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ops.round_parts(grad, ctx.dtype), None


def cast_parameters(params: Mapping[str, Tensor], dtype: torch.dtype | None, tracker: Provenance) -> dict[str, Tensor]:
    """Floating-point parameters in `dtype`, others unchanged. Each cast is attributed to the module that owns the
    parameter."""
    cast = dict(params)
    for name, value in params.items():
        if dtype is not None and value.is_floating_point() and value.dtype != dtype:
            tracker.modules = [name.rpartition(".")[0]]
            cast[name] = _Cast.apply(value, dtype)  # type: ignore[no-untyped-call]
    tracker.modules = []
    return cast


def cast_gradients_early(step: StepGraph) -> StepGraph:
    """The step, changed in place: a gradient is cast, and so reduced, as soon as it is computed.

    Autograd runs backward in the reverse order of forward, and the casts of all parameters came first: otherwise
    unreduced gradients of the whole model would live until the end of the backward pass.
    """
    for node in step.graph.find_nodes(op="call_function", target=torch.ops.meshweave.round_parts.default):
        (gradient,) = node.all_input_nodes
        gradient.append(node)
    return step
