"""replay: what the steps of a plan do to every element, over tables and without the planner's layouts.

Every device holds an array of element numbers of the global tensor and, for each element, the set of contributions
(coordinates along the partial axes of the source) that its value sums up. Steps cut, join and unite these arrays by
their own definition; nothing is looked up in the layouts between the first and the last. Only a transfer's messages
name boxes of the global index space: there the step's layouts say where a device's array should lie in it, and the
element numbers whether it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isclose, prod

import numpy as np
from numpy.typing import NDArray

from meshweave.errors import MeshweaveError, VerifyError
from meshweave.ir.layout import Layout
from meshweave.ir.pieces import Box, nested_chunk
from meshweave.ir.routes import Routes, routes
from meshweave.movement.plan import MovePlan
from meshweave.movement.steps import REDUCTIONS, Kind, Step, apply


@dataclass(frozen=True, slots=True)
class _Held:
    """What one device holds: element numbers, and as Python integers the bit set of contributions of each."""

    elements: NDArray[np.int64]
    contributions: NDArray[np.object_]

    def cut(self, dim: int, start: int, size: int) -> _Held:
        index = (slice(None),) * dim + (slice(start, start + size),)
        return _Held(self.elements[index], self.contributions[index])

    @staticmethod
    def join(parts: Sequence[_Held], dim: int) -> _Held:
        return _Held(
            np.concatenate([p.elements for p in parts], dim), np.concatenate([p.contributions for p in parts], dim)
        )


_Group = list[_Held]  # what the devices of one group hold, in its order
_HeldBy = dict[int, _Held]  # by device; a device that is not of the mesh holds nothing
FindRoutes = Callable[[Layout, Layout, tuple[int, ...]], Routes]


def replay(plan: MovePlan, shape: Sequence[int], find_routes: FindRoutes = routes) -> None:
    """Raise VerifyError unless the steps take every element from the source's pieces to the target's.

    At the end each device must hold its piece of the target in order; over every group of the target's partial axes
    each contribution to each element must be there exactly once, and once on every device when nothing is partial.
    The steps must also be order-sound, scale by 1 / the axes averaged, and state the layouts that they lead through.
    The messages of a transfer (`find_routes` gives them) must bring each device of the target every element of its
    piece once, complete, from a device that holds it.
    For small shapes: it holds every element of every device.
    """
    shape, mesh = tuple(shape), plan.source.mesh
    source, target = plan.source.normalized(shape), plan.target.normalized(shape)
    held = _start(source, shape)
    for number, step in enumerate(plan.steps, 1):
        where = f"step {number}: {step}"
        try:
            if step.kind == "transfer":
                made = find_routes(step.source, step.target, shape)
                held, mesh = _transfer(step, held, made, shape, _every(source)), step.target.mesh
                continue
            for group in mesh.groups(step.axes):
                sizes = [mesh.size(axis) for axis in step.axes]
                held.update(zip(group, _RUN[step.kind](step, [held[d] for d in group], sizes), strict=True))
        except (ValueError, IndexError, MeshweaveError) as error:
            raise VerifyError("the step cannot run on what the devices hold", where=where, got=str(error)) from error
    _check_end(held, source, target, shape)
    _check_scale(plan.steps, source, target)
    _check_order(plan.steps, source)
    _check_layouts(plan.steps, source, target, shape)


def _every(source: Layout) -> int:
    """The bit set of all contributions."""
    return (1 << source.mesh.flat_size(source.partial_axes)) - 1


def _transfer(step: Step, held: _HeldBy, made: Routes, shape: tuple[int, ...], every: int) -> _HeldBy:
    """What the devices of the target's mesh hold when all messages have arrived."""
    numbers = np.arange(prod(shape)).reshape(shape)
    before, after = step.source.pieces(shape), step.target.pieces(shape)
    arrived = {device: np.full(box.size, -1) for device, box in after.items()}
    for message in made.messages:
        sender, receiver, name = message.sender, message.receiver, f"{message.sender} -> {message.receiver}"
        if sender not in held or sender not in before:
            raise ValueError(f"message {name}: device {sender} holds nothing")
        part = _part(held[sender], before[sender], message.box)
        if part is None or not np.array_equal(part.elements, numbers[message.box.slices()]):
            raise ValueError(f"message {name}: device {sender} does not hold {_text(message.box)}")
        if np.any(part.contributions != every):
            raise ValueError(f"message {name}: a contribution is missing on device {sender}")
        at = _relative(message.box, after[receiver]) if receiver in after else None
        if at is None:
            raise ValueError(f"message {name}: {_text(message.box)} are not of the piece of device {receiver}")
        if np.any(arrived[receiver][at] >= 0):
            raise ValueError(f"message {name}: {_text(message.box)} arrive twice")
        arrived[receiver][at] = part.elements
    for device, elements in arrived.items():
        if np.any(elements < 0):
            missing = numbers[after[device].slices()][elements < 0]
            raise ValueError(f"device {device} does not receive elements {missing.tolist()}")
    return {
        device: _Held(elements, np.full(elements.shape, every, dtype=object)) for device, elements in arrived.items()
    }


def _part(held: _Held, piece: Box, box: Box) -> _Held | None:
    """The part of a device's array that is `box`, if the array is `piece`; None where it reaches beyond."""
    at = _relative(box, piece)
    if at is None or held.elements.shape != piece.size:
        return None
    return _Held(held.elements[at], np.asarray(held.contributions, dtype=object)[at])


def _relative(box: Box, piece: Box) -> tuple[slice, ...] | None:
    """The index of `box` in the array of `piece`; None where it reaches beyond."""
    if box.intersect(piece) != box:
        return None
    return Box(tuple(o - p for o, p in zip(box.offset, piece.offset, strict=True)), box.size).slices()


def _text(box: Box) -> str:
    return f"elements [{', '.join(f'{o}:{o + s}' for o, s in zip(box.offset, box.size, strict=True))}]"


def _start(source: Layout, shape: Sequence[int]) -> dict[int, _Held]:
    elements, boxes = np.arange(prod(shape)).reshape(tuple(shape)), source.pieces(shape)
    held = {}
    for group in source.mesh.groups(source.partial_axes):
        for bit, device in enumerate(group):
            piece = elements[boxes[device].slices()]
            held[device] = _Held(piece, np.full(piece.shape, 1 << bit, dtype=object))
    return held


def _cuts(held: _Held, dim: int, unit: int, sizes: Sequence[int]) -> _Group:
    """The parts of one device's array for each member of a group."""
    extent = held.elements.shape[dim]
    spans = [nested_chunk(extent, list(zip(sizes, index, strict=True)), unit) for index in np.ndindex(*sizes)]
    return [held.cut(dim, start, size) for start, size in spans]


def _slice(step: Step, group: _Group, sizes: Sequence[int]) -> _Group:
    return [_cuts(held, step.dim, step.unit, sizes)[i] for i, held in enumerate(group)]


def _all_gather(step: Step, group: _Group, sizes: Sequence[int]) -> _Group:
    return [_Held.join(group, step.dim)] * len(group)


def _all_to_all(step: Step, group: _Group, sizes: Sequence[int]) -> _Group:
    if step.to_dim is None:
        raise ValueError("there is no dim to scatter")
    dealt = [_cuts(held, step.to_dim, step.unit, sizes) for held in group]
    return [_Held.join(parts, step.dim) for parts in zip(*dealt, strict=True)]


def _all_reduce(step: Step, group: _Group, sizes: Sequence[int]) -> _Group:
    return [_unite(group)] * len(group)


def _reduce_scatter(step: Step, group: _Group, sizes: Sequence[int]) -> _Group:
    return _cuts(_unite(group), step.dim, step.unit, sizes)


def _unite(group: _Group) -> _Held:
    contributions = np.zeros_like(group[0].contributions)
    for held in group:
        if not np.array_equal(held.elements, group[0].elements):
            raise ValueError("the devices that reduce hold different elements")
        if np.any(contributions & held.contributions):
            raise ValueError("a contribution is counted twice")
        contributions = contributions | held.contributions
    return _Held(group[0].elements, contributions)


def _to_partial(step: Step, group: _Group, sizes: Sequence[int]) -> _Group:
    return [group[0], *(_Held(held.elements, np.zeros_like(held.contributions)) for held in group[1:])]


def _scale(step: Step, group: _Group, sizes: Sequence[int]) -> _Group:
    return group


_RUN: dict[Kind, Callable[[Step, _Group, Sequence[int]], _Group]] = {
    "slice": _slice,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "scale": _scale,
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "to_partial": _to_partial,
}


def _check_end(held: dict[int, _Held], source: Layout, target: Layout, shape: Sequence[int]) -> None:
    elements, boxes = np.arange(prod(shape)).reshape(tuple(shape)), target.pieces(shape)
    every = _every(source)
    if set(held) != set(boxes):
        raise VerifyError(
            "the steps do not lead to the devices of the target",
            where=f"{source} -> {target}",
            got=f"devices {sorted(held)}",
            expected=f"devices {sorted(boxes)}",
        )
    for device, box in boxes.items():
        if not np.array_equal(held[device].elements, elements[box.slices()]):
            raise VerifyError(
                "the steps do not lead to the pieces of the target",
                where=f"device {device}, {source} -> {target}",
                got=f"elements {held[device].elements.tolist()}",
                expected=f"elements {elements[box.slices()].tolist()}",
            )
    for group in target.mesh.groups(target.partial_axes):
        try:
            union = _unite([held[device] for device in group])
        except ValueError as error:
            raise _wrong_value(group, source, target, str(error)) from error
        if np.any(union.contributions != every):
            raise _wrong_value(group, source, target, "a contribution is missing")


def _wrong_value(group: Sequence[int], source: Layout, target: Layout, got: str) -> VerifyError:
    return VerifyError(
        "the steps do not keep the value",
        where=f"devices {list(group)}, {source} -> {target}",
        got=got,
        expected="every contribution to every element once",
    )


def _check_scale(steps: Sequence[Step], source: Layout, target: Layout) -> None:
    kept = [axis for axis, op in target.partial if op == "avg" and target.mesh == source.mesh]
    averaged = [axis for axis, op in source.partial if op == "avg" and axis not in kept]
    scales = [step for step in steps if step.kind == "scale"]
    factor, expected = prod(step.factor for step in scales), 1 / source.mesh.flat_size(averaged)
    axes = [axis for step in scales for axis in step.axes]
    if sorted(axes) != sorted(averaged) or not isclose(factor, expected):
        raise VerifyError(
            "the average is scaled wrongly",
            where=f"{source} -> {target}",
            got=f"{factor:g} over {', '.join(axes) or 'no axis'}",
            expected=f"{expected:g} over {', '.join(averaged) or 'no axis'}",
        )


def _check_order(steps: Sequence[Step], source: Layout) -> None:
    """A reduction runs only while every axis replicated now was replicated in the source, the all_reduce last."""
    reductions = [step for step in steps if step.kind in REDUCTIONS]
    for step in reductions:
        if step.source.mesh != source.mesh:
            raise VerifyError(
                "a value is reduced on another mesh than its own",
                where=str(step),
                got=f"mesh {step.source.mesh}",
                expected=f"mesh {source.mesh}",
            )
        lost = set(step.source.replicated_axes) - set(source.replicated_axes)
        if lost:
            raise VerifyError(
                "a reduction runs where replicas would add in different orders",
                where=str(step),
                got=f"{', '.join(sorted(lost))} replicated before it",
                expected=f"only axes replicated in {source}",
            )
    if any(step.kind == "all_reduce" for step in reductions[:-1]):
        raise VerifyError(
            "an all_reduce is not the last reduction",
            where=str(source),
            got=" ".join(step.kind for step in reductions),
            expected="at most one all_reduce, and nothing reduced after it",
        )


def _check_layouts(steps: Sequence[Step], source: Layout, target: Layout, shape: Sequence[int]) -> None:
    layout = source
    for step in steps:
        after = apply(layout, step).normalized(shape)
        if (step.source, step.target) != (layout, after):
            raise VerifyError(
                "the step states other layouts than it has",
                where=str(step),
                got=f"{step.source} -> {step.target}",
                expected=f"{layout} -> {after}",
            )
        layout = after
    if layout != target:
        raise VerifyError("the steps end elsewhere", where=str(source), got=str(layout), expected=str(target))
