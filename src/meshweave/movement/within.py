"""Steps within one mesh: the cheapest sound sequence, found by A* over layouts."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch

from meshweave.errors import LayoutError
from meshweave.hardware.alpha_beta import AlphaBeta
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.pieces import largest_chunk, unit_matters
from meshweave.movement.steps import REDUCTIONS, Kind, Step, apply

# Ties of cost and length fall to the first kind here: shrink first, grow last.
_KINDS: tuple[Kind, ...] = ("slice", "reduce_scatter", "all_reduce", "all_to_all", "all_gather")
_TICKS_PER_SECOND = 10**15


def to_ticks(seconds: float) -> int:
    """Whole femtoseconds, in which costs are compared, so that sums taken in another order are still ties."""
    return round(seconds * _TICKS_PER_SECOND)


@lru_cache(maxsize=16384)
def steps_within(
    source: Layout, target: Layout, shape: tuple[int, ...], dtype: torch.dtype, profile: AlphaBeta
) -> tuple[Step, ...]:
    """The steps of the cheapest plan from one normal form to another on the same mesh, as `plan_move` says.

    Raises LayoutError for reduce ops that do not commute (sum and max in one value that must be reduced), for an
    average of integers, and for a target that is partial(avg) where the source is not.
    """
    ops = _Ops.of(source, target, dtype)
    space = _Space(source, target, ops.pending, shape, dtype.itemsize, profile)
    return _steps(space, source, ops, _search(space))


@dataclass(frozen=True, slots=True)
class _Ops:
    """What happens to the partial axes. `pending` are reduced with `op`, `added` become partial with their op, over
    `averaged` the value is scaled once (they are reduced as sums, or stay partial as sums)."""

    pending: tuple[str, ...]
    op: str
    added: tuple[tuple[str, str], ...]
    averaged: tuple[str, ...]

    @staticmethod
    def of(source: Layout, target: Layout, dtype: torch.dtype) -> _Ops:
        before, after = dict(source.partial), dict(target.partial)
        as_sum = {axis: "sum" if op == "avg" else op for axis, op in before.items()}
        kept = {axis for axis, op in after.items() if op == before.get(axis) or op == as_sum.get(axis)}
        averaged = tuple(axis for axis, op in before.items() if op == "avg" and after.get(axis) != "avg")
        pending = tuple(axis for axis in before if axis not in kept)
        added = tuple((axis, op) for axis, op in target.partial if axis not in kept)
        where = f"{source} -> {target}"
        if any(op == "avg" for _, op in added):
            raise LayoutError(
                "a move cannot make a value partial(avg)",
                where=where,
                got=str(target),
                expected="partial(avg) only over axes where the source has it",
                hint="ask for partial(sum)",
            )
        if pending and len(set(as_sum.values())) > 1:
            raise LayoutError(
                "a value that is partial with several reduce ops cannot be reduced",
                where=where,
                got=str(source),
                expected="one reduce op, for the result depends on which comes first",
                hint="reduce the inner one where the value is made",
            )
        if averaged and not (dtype.is_floating_point or dtype.is_complex):
            raise LayoutError(
                "the average of integers would be truncated",
                where=where,
                got=f"{dtype} partial(avg: {','.join(averaged)})",
                expected="a floating dtype",
                hint="make the value floating, or partial(sum)",
            )
        return _Ops(pending, as_sum[pending[0]] if pending else "", added, averaged)


_Dims = tuple[tuple[tuple[str, ...], int], ...]  # per dim its axes and its unit, in normal form


class _State(NamedTuple):
    """A point of the search: how the dims are cut, and the partial axes that are still to be reduced."""

    dims: _Dims
    pending: tuple[str, ...]


class _Edge(NamedTuple):
    """A step of the search, as plain values that order ties: index in _KINDS, axes, dim, to_dim, unit."""

    rank: int
    axes: tuple[str, ...]
    dim: int = -1
    to_dim: int = -1
    unit: int = 1


def _dims_of(layout: Layout) -> _Dims:
    return tuple((dim.axes, dim.unit) for dim in layout.dims)


class _Space:
    """The layouts that a plan may pass through, the steps between them and what they cost."""

    def __init__(
        self,
        source: Layout,
        target: Layout,
        pending: tuple[str, ...],
        shape: tuple[int, ...],
        itemsize: int,
        profile: AlphaBeta,
    ) -> None:
        self.mesh, self.shape, self.itemsize, self.profile = source.mesh, shape, itemsize, profile
        self.sizes = dict(zip(source.mesh.axis_names, source.mesh.shape, strict=True))
        self._units: dict[tuple[int, tuple[str, ...], int], int] = {}
        self._extents: dict[tuple[int, tuple[str, ...], int], int] = {}
        self._ticks: dict[tuple[int, tuple[str, ...], int], int] = {}
        self.start = _State(_dims_of(source), pending)
        self.goal = _State(_dims_of(target), ())
        self.kept = tuple(self._common(d, a, b) for d, (a, b) in enumerate(zip(source.dims, target.dims, strict=True)))
        self.wanted = [axis for dim, kept in zip(target.dims, self.kept, strict=True) for axis in dim.axes[kept:]]
        self.startup = to_ticks(profile.alpha_s)
        self.not_replicated = {*source.sharded_axes, *pending}

    def _common(self, d: int, a: DimSharding, b: DimSharding) -> int:
        """How many outermost axes of dim d, cut alike, both layouts have."""
        count = 0
        while count < min(len(a.axes), len(b.axes)) and a.axes[count] == b.axes[count]:
            count += 1
        while count and self._unit(d, a.axes[:count], a.unit) != self._unit(d, a.axes[:count], b.unit):
            count -= 1
        return count

    def _unit(self, d: int, axes: tuple[str, ...], unit: int) -> int:
        """The unit in normal form: 1 where it changes no piece."""
        if unit == 1 or not axes:
            return 1
        key = (d, axes, unit)
        if key not in self._units:
            self._units[key] = unit if unit_matters(self.shape[d], [self.sizes[a] for a in axes], unit) else 1
        return self._units[key]

    def local_bytes(self, dims: _Dims) -> int:
        """Bytes of the largest piece."""
        total = self.itemsize
        for d, (axes, unit) in enumerate(dims):
            key = (d, axes, unit)
            if key not in self._extents:
                self._extents[key] = largest_chunk(self.shape[d], [self.sizes[a] for a in axes], unit)
            total *= self._extents[key]
        return total

    def ticks(self, rank: int, axes: tuple[str, ...], local_bytes: int) -> int:
        """Duration of a step of the search in femtoseconds."""
        key = (rank, axes, local_bytes)
        if key not in self._ticks:
            self._ticks[key] = to_ticks(self.seconds(_KINDS[rank], axes, local_bytes))
        return self._ticks[key]

    def at_least(self, state: _State) -> int:
        """A lower bound of the ticks from `state` to the goal: the start-up time of one collective per axis that is
        not where the target has it, for only slices are free and each other step takes one such axis away."""
        misplaced = 1 if state.pending else 0
        for (axes, _), (wanted, _) in zip(state.dims, self.goal.dims, strict=True):
            if axes != wanted[: len(axes)]:
                same = next(i for i, axis in enumerate(axes) if wanted[i : i + 1] != (axis,))
                misplaced += len(axes) - same
        return misplaced * self.startup

    def seconds(self, kind: Kind, axes: tuple[str, ...], local_bytes: int) -> float:
        return self.profile.seconds(kind, self.mesh, axes, local_bytes)

    def _append(self, dims: _Dims, d: int, axis: str) -> tuple[_Dims, int]:
        """The dims with `axis` innermost on dim d, and the unit that it is cut in.

        That is the unit of the target if the axes before it are cut alike under it, else the one they have.
        """
        axes, unit = dims[d]
        wish = self.goal.dims[d][1]
        if self._unit(d, axes, wish) == unit:
            unit = wish
        longer = (*axes, axis)
        return (*dims[:d], (longer, self._unit(d, longer, unit)), *dims[d + 1 :]), unit

    def _pop(self, dims: _Dims, d: int) -> _Dims:
        axes, unit = dims[d]
        return (*dims[:d], (axes[:-1], self._unit(d, axes[:-1], unit)), *dims[d + 1 :])

    def edges(self, state: _State) -> Iterator[tuple[_Edge, _State]]:
        """Every step from `state`, with where it leads."""
        dims, pending = state
        used = {axis for axes, _ in dims for axis in axes}.union(pending)
        every = range(len(dims))
        for axis in self.wanted:
            if axis not in used:
                for d in every:
                    after, unit = self._append(dims, d, axis)
                    yield _Edge(0, (axis,), d, unit=unit), _State(after, pending)
        if pending and self.not_replicated <= used:
            yield _Edge(2, pending), _State(dims, ())
            for axis in pending:
                rest = tuple(a for a in pending if a != axis)
                for d in every:
                    after, unit = self._append(dims, d, axis)
                    yield _Edge(1, (axis,), d, unit=unit), _State(after, rest)
        for d in every:
            if len(dims[d][0]) > self.kept[d]:
                yield from self._moves_off(state, d)

    def _moves_off(self, state: _State, d: int) -> Iterator[tuple[_Edge, _State]]:
        """The all_gather and the all_to_alls that take the innermost axis from dim d."""
        axis, popped = state.dims[d][0][-1], self._pop(state.dims, d)
        yield _Edge(4, (axis,), d), _State(popped, state.pending)
        for e in range(len(popped)):
            if e != d:
                after, unit = self._append(popped, e, axis)
                yield _Edge(3, (axis,), d, e, unit), _State(after, state.pending)


def _search(space: _Space) -> tuple[_Edge, ...]:
    """A* over layouts. Of equally cheap paths the one with fewer steps, then the first in order of its edges."""
    best: dict[_State, tuple[int, int, tuple[_Edge, ...]]] = {space.start: (0, 0, ())}
    heap: list[tuple[int, int, tuple[_Edge, ...], _State]] = [(0, 0, (), space.start)]
    while heap:
        _, length, path, state = heapq.heappop(heap)
        if state == space.goal:
            return path
        ticks, *rest = best[state]
        if rest != [length, path]:
            continue
        local_bytes = space.local_bytes(state.dims)
        for edge, after in space.edges(state):
            total = ticks + space.ticks(edge.rank, edge.axes, local_bytes)
            known = best.get(after)
            if known is None or total <= known[0]:
                found = (total, length + 1, (*path, edge))
                if known is None or found < known:
                    best[after] = found
                    heapq.heappush(heap, (total + space.at_least(after), *found[1:], after))
    raise AssertionError(f"no path to {space.goal}")


def _steps(space: _Space, source: Layout, ops: _Ops, path: tuple[_Edge, ...]) -> tuple[Step, ...]:
    """The edges as steps from layout to layout, with the scale after the last reduction and to_partial at the end."""
    drafts = [_draft(edge, source, ops.op) for edge in path]
    if ops.averaged:
        at = max((i for i, step in enumerate(drafts, 1) if step.kind in REDUCTIONS), default=0)
        factor = 1 / space.mesh.flat_size(ops.averaged)
        drafts.insert(at, Step("scale", ops.averaged, source, source, factor=factor))
    for op in dict.fromkeys(op for _, op in ops.added):
        axes = tuple(axis for axis, its_op in ops.added if its_op == op)
        drafts.append(Step("to_partial", axes, source, source, op=op))
    steps: list[Step] = []
    for draft in drafts:
        before = steps[-1].target if steps else source
        local_bytes, group_size = space.local_bytes(_dims_of(before)), space.mesh.flat_size(draft.axes)
        steps.append(
            replace(
                draft,
                source=before,
                target=apply(before, draft).normalized(space.shape),
                seconds=space.seconds(draft.kind, draft.axes, local_bytes),
                bytes_received=space.profile.bytes_received(draft.kind, group_size, local_bytes),
            )
        )
    return tuple(steps)


def _draft(edge: _Edge, anywhere: Layout, op: str) -> Step:
    kind = _KINDS[edge.rank]
    to_dim = None if edge.to_dim < 0 else edge.to_dim
    to_axes = edge.axes if kind == "all_to_all" else ()
    return Step(
        kind, edge.axes, anywhere, anywhere, edge.dim, to_dim, to_axes, edge.unit, op if kind in REDUCTIONS else ""
    )
