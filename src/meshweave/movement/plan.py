"""plan_move: the cheapest sound sequence of steps from one layout to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Literal

import torch

from meshweave.hardware.alpha_beta import AlphaBeta
from meshweave.ir.layout import Layout
from meshweave.movement.across import steps_across
from meshweave.movement.steps import Kind, Step
from meshweave.movement.within import steps_within

_WORDS: dict[Kind, str] = {
    "slice": "slice",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "reduce",
    "scale": "scale",
    "all_to_all": "all-to-all",
    "permute": "permute",
    "all_gather": "gather",
    "to_partial": "replicate",
    "transfer": "transfer",
}


@dataclass(frozen=True, slots=True)
class MovePlan:
    """The steps of a move and their price, for the largest piece under one profile.

    `source` and `target` are as the caller wrote them; the steps lead from the normal form of one to the normal form
    of the other. `peak_bytes` is the most that the input and output of one step hold on a device (without steps: the
    value itself). `numerics` is "exact" when every element keeps its bits, whatever the groups, and "reassociates"
    when floating sums or an average depend on their order.
    """

    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    seconds: float
    bytes_received: float
    peak_bytes: int
    numerics: Literal["exact", "reassociates"]

    @property
    def kind(self) -> str:
        """The kinds of its steps as words, each once, in order and joined by "+"; "none" without steps."""
        return "+".join(dict.fromkeys(_WORDS[step.kind] for step in self.steps)) or "none"

    def __str__(self) -> str:
        head = f"{self.source} -> {self.target}: "
        if not self.steps:
            return head + "nothing to do"
        count = f"{len(self.steps)} step" + "s" * (len(self.steps) > 1)
        costs = f"{_microseconds(self.seconds)}, {_bytes(self.bytes_received)} received, peak {_bytes(self.peak_bytes)}"
        texts = [str(step) for step in self.steps]
        layouts = [str(step.target) for step in self.steps]
        wide, wider = max(map(len, texts)), max(map(len, layouts))
        lines = [
            f"  {i}. {text:<{wide}}  -> {layout:<{wider}}  "
            f"{_microseconds(step.seconds)}, {_bytes(step.bytes_received)} received"
            for i, (text, layout, step) in enumerate(zip(texts, layouts, self.steps, strict=True), 1)
        ]
        return "\n".join([f"{head}{count}, {costs}, {self.numerics}", *lines])


def _bytes(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.4g} {unit}"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} us"


_DEFAULT_PROFILE = AlphaBeta()


def plan_move(
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    dtype: torch.dtype,
    profile: AlphaBeta = _DEFAULT_PROFILE,
) -> MovePlan:
    """The cheapest plan of single-axis steps (all_reduce and to_partial: sets of axes) that is order-sound.

    A reduction runs only while every axis that is replicated now was replicated in `source`; one all_reduce at most,
    last among the reductions. Then replicas that should be equal are equal to the bit. Axes that both layouts
    replicate, and the axes that a dim has in common from the outside in, are left alone. Equal arguments give the
    same plan, which is cached.

    Between two meshes (other devices, or the same in another order or under other axes) the plan has exactly one
    transfer, with steps on the source's mesh before it and on the target's after it; see `movement.across`.

    Raises LayoutError for a number of dims that is not the shape's, for reduce ops that do not commute (sum and max in
    one value that must be reduced), for an average of integers, and for a target that is partial(avg) where the source
    is not, or is on another mesh.
    """
    return _plan(source, target, tuple(int(size) for size in shape), dtype, profile)


def classify(source: Layout, target: Layout) -> str:
    """One word for the move, such as "gather" or "reduce-scatter+gather", on a tensor that all axes divide evenly.

    The words: none, slice, gather, reduce, reduce-scatter, all-to-all, scale, replicate (to partial), transfer.
    Raises LayoutError as `plan_move` does.
    """
    units = [dim.unit for layout in (source, target) for dim in layout.dims]
    size = prod(mesh.num_devices for mesh in {source.mesh, target.mesh}) * prod(units)
    return plan_move(source, target, (size,) * len(source.dims), torch.float32).kind


@lru_cache(maxsize=16384)
def _plan(source: Layout, target: Layout, shape: tuple[int, ...], dtype: torch.dtype, profile: AlphaBeta) -> MovePlan:
    start, goal = source.normalized(shape), target.normalized(shape)
    find = steps_within if start.mesh == goal.mesh else steps_across
    steps = find(start, goal, shape, dtype, profile)
    inexact = dtype.is_floating_point or dtype.is_complex
    rounds = inexact and any(step.kind == "scale" or step.op == "sum" for step in steps if step.kind != "to_partial")
    return MovePlan(
        source=source,
        target=target,
        steps=steps,
        seconds=sum((step.seconds for step in steps), 0.0),
        bytes_received=sum((step.bytes_received for step in steps), 0.0),
        peak_bytes=max((_held(step, shape, dtype) for step in steps), default=_bytes_of(start, shape, dtype)),
        numerics="reassociates" if rounds else "exact",
    )


def _held(step: Step, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The most bytes of the input and output of a step that one device may hold."""
    before, after = _bytes_of(step.source, shape, dtype), _bytes_of(step.target, shape, dtype)
    apart = step.kind == "transfer" and set(step.source.mesh.devices).isdisjoint(step.target.mesh.devices)
    return max(before, after) if apart else before + after


def _bytes_of(layout: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return dtype.itemsize * prod(layout.local_shape(shape))
