"""Parameters that the model sees in another dtype than that in which they are stored and updated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from meshweave.capture.trace import Provenance
from meshweave.errors import PlanError
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


ParamDtype = torch.dtype | Mapping[str, torch.dtype | None] | None


def dtypes_of(names: Collection[str], dtype: ParamDtype) -> dict[str, torch.dtype | None]:
    """The dtype to which each parameter is cast; None: it keeps its own. Of a mapping of globs over parameters and
    modules the last that matches counts. Raises PlanError for a glob that matches nothing."""
    if not isinstance(dtype, Mapping):
        return dict.fromkeys(names, dtype)
    chosen: dict[str, torch.dtype | None] = dict.fromkeys(names)
    for glob, value in dtype.items():
        matching = [name for name in names if any(_matches(part, glob) for part in _with_modules(name))]
        if not matching:
            raise PlanError("param_dtype names no parameter and no module that has some", got=glob)
        chosen.update(dict.fromkeys(matching, value))
    return chosen


def _with_modules(name: str) -> list[str]:
    """A parameter's name, and those of the modules around it."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _matches(name: str, glob: str) -> bool:
    return fnmatchcase(name, glob) or fnmatchcase(name, f"*.{glob}")


def cast_parameters(params: Mapping[str, Tensor], dtype: ParamDtype, tracker: Provenance) -> dict[str, Tensor]:
    """Floating-point parameters in `dtype`, others unchanged. Each cast is attributed to the module that owns the
    parameter."""
    cast, wanted = dict(params), dtypes_of(params, dtype)
    for name, value in params.items():
        if wanted[name] is not None and value.is_floating_point() and value.dtype != wanted[name]:
            tracker.modules = [name.rpartition(".")[0]]
            cast[name] = _Cast.apply(value, wanted[name])  # type: ignore[no-untyped-call]
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
