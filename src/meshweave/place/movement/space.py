"""The graph of layouts that a move within a mesh may pass through, and of steps between them, as small numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain, combinations, permutations
from math import prod
from typing import NamedTuple

from meshweave.ir.pieces import largest_chunk
from meshweave.place.movement.steps import Kind

Axes = tuple[int, ...]  # indices of active axes (those that take part in a move)
LOCAL: frozenset[Kind] = frozenset({"slice", "to_partial"})
REPLICATED, PARTIAL = -1, -2  # where an axis is if it cuts no dim


class MoveState(NamedTuple):
    """A layout: `cuts` are the active axes that cut each dim, outermost first; `partial` the bit set of those over
    which the value is partial; the other active axes are replicated. The bit set `old` has the dims that are still cut
    in the source's unit if the target has another."""

    cuts: tuple[Axes, ...]
    partial: int = 0
    old: int = 0


class Edge(NamedTuple):
    """A step between two states: the fields of `Step`, with indices instead of axes."""

    kind: Kind
    axes: Axes
    dim: int = -1
    to_dim: int = -1
    to_axes: Axes = ()


_Edge = tuple[Edge, int, "MoveState"]  # with its bit set of axes, and the state that it leads to


class Fan(NamedTuple):
    """Steps from a state with the same cost and piece size: their kind and bit set of axes, and `work`, the size of a
    device's operand, with padding."""

    kind: Kind
    mask: int
    work: int
    size: int
    ends: list[tuple[int, Edge]]


@dataclass(frozen=True, slots=True)
class Extent:
    """A dim of `size` that is always cut by `before`, then by active axes: in blocks of `old_unit` while it is cut as
    in the source, else of `unit`."""

    size: int
    before: tuple[int, ...] = ()
    old_unit: int = 1
    unit: int = 1


class Space:
    """The graph of all states over axes of `sizes` and a number of dims; built lazily.

    If everything divides evenly (`extents` is None) it is the same for all shapes, and the size of a state is the
    number of its pieces; else it is the number of elements of its largest piece. The search selects the steps that a
    move allows: reductions, pads and spreads are listed for all axes for which they are possible.

    Axes go to a dim in every order; with `goal` (the cuts of the target) only in the target's order, axes that the
    target does not have on that dim last. Then each target has its own, much smaller graph."""

    def __init__(
        self, sizes: tuple[int, ...], extents: tuple[Extent, ...] | None, goal: tuple[Axes, ...] | None
    ) -> None:
        self.sizes, self.extents, self.goal = sizes, extents, goal
        self.states: list[MoveState] = []
        self.places: list[list[int]] = []  # for each state where each axis is: a dim, or a constant above
        self._numbers: dict[MoveState, int] = {}
        self._piece = cache(self._largest_piece)
        # by number of a state
        edges = (self._moves, self._reductions, self._pads, self._spreads)
        self.moves, self.reductions, self.pads, self.spreads = map(self._listed, edges)

    def number(self, state: MoveState) -> int:
        number = self._numbers.get(state)
        if number is None:
            number = self._numbers[state] = len(self.states)
            self.states.append(state)
            self.places.append(self._places(state))
        return number

    def _places(self, state: MoveState) -> list[int]:
        places = [PARTIAL if state.partial >> axis & 1 else REPLICATED for axis in range(len(self.sizes))]
        for d, cut in enumerate(state.cuts):
            for axis in cut:
                places[axis] = d
        return places

    def replicated(self, state: MoveState) -> int:
        """Bit set of the active axes along which all devices have the same."""
        used = state.partial
        for cut in state.cuts:
            used |= bits(cut)
        return ((1 << len(self.sizes)) - 1) & ~used

    def size(self, state: MoveState) -> int:
        """See the class."""
        if self.extents is None:
            return prod(self.sizes[axis] for cut in state.cuts for axis in cut)
        return prod(self._piece(d, cut, state.old >> d & 1) for d, cut in enumerate(state.cuts))

    def _largest_piece(self, d: int, cut: Axes, old: int) -> int:
        assert self.extents is not None
        extent = self.extents[d]
        parts = [*extent.before, *(self.sizes[axis] for axis in cut)]
        return largest_chunk(extent.size, parts, extent.old_unit if old else extent.unit)

    def _listed(self, edges: Callable[[MoveState], Iterable[_Edge]]) -> Callable[[int], list[Fan]]:
        """The fans of a state, each listed once."""
        return cache(lambda number: self._fans(self.states[number], edges(self.states[number])))

    def _fans(self, state: MoveState, edges: Iterable[_Edge]) -> list[Fan]:
        fans: dict[tuple[Kind, int, int, int], Fan] = {}
        for edge, mask, after in edges:
            key = (edge.kind, mask, self._work(state, edge, after), self.size(after))
            if key not in fans:
                fans[key] = Fan(*key, [])
            fans[key].ends.append((self.number(after), edge))
        return list(fans.values())

    def _work(self, state: MoveState, edge: Edge, after: MoveState) -> int:
        """The size of a device's operand: a block per member of the group, all as large as the largest."""
        if self.extents is None or edge.kind not in ("reduce_scatter", "all_to_all", "permute"):
            return self.size(state)
        if edge.kind == "permute":
            return max(self.size(state), self.size(after))
        blocks = prod(self.sizes[axis] for axis in edge.axes)
        if edge.kind == "reduce_scatter":
            return blocks * self.size(after)
        dealt = (*state.cuts[: edge.to_dim], after.cuts[edge.to_dim], *state.cuts[edge.to_dim + 1 :])
        old = state.old & ~(1 << edge.to_dim) | after.old & 1 << edge.to_dim
        return blocks * self.size(MoveState(dealt, state.partial, old))

    def _with(self, state: MoveState, d: int, cut: Axes) -> MoveState:
        """The state with another cut of dim d. A dim that no axis cut gets the target's unit."""
        fresh = not cut or not state.cuts[d]
        return MoveState(
            (*state.cuts[:d], cut, *state.cuts[d + 1 :]), state.partial, state.old & ~(1 << d) if fresh else state.old
        )

    def _moves(self, state: MoveState) -> Iterator[_Edge]:
        """Slices, gathers, all-to-alls and permutes."""
        return chain(self._slices(state), self._gathers(state), self._deals(state), self._permutes(state))

    def _slices(self, state: MoveState) -> Iterator[_Edge]:
        free = _axes_of(self.replicated(state))
        for axes in _subsets(free):
            for d, cut in enumerate(state.cuts):
                for order in self._orders(axes, d):
                    yield Edge("slice", order, d), 0, self._with(state, d, (*cut, *order))

    def _gathers(self, state: MoveState) -> Iterator[_Edge]:
        for d, kept, axes in _suffixes(state):
            yield Edge("all_gather", axes, d), bits(axes), self._with(state, d, kept)

    def _deals(self, state: MoveState) -> Iterator[_Edge]:
        for d, kept, axes in _suffixes(state):
            popped, mask = self._with(state, d, kept), bits(axes)
            for e, cut in enumerate(state.cuts):
                if e != d:
                    for order in self._orders(axes, e):
                        yield Edge("all_to_all", axes, d, e, order), mask, self._with(popped, e, (*cut, *order))

    def _permutes(self, state: MoveState) -> Iterator[_Edge]:
        usable = ((1 << len(self.sizes)) - 1) & ~state.partial
        wanted = [prod(self.sizes[axis] for axis in cut) for cut in state.cuts]
        for cuts in self._arrangements(wanted, usable):
            mask = 0
            for d, (before, after) in enumerate(zip(state.cuts, cuts, strict=True)):
                mask |= bits(before) if state.old >> d & 1 else 0
                mask |= self._changed(before, after)
            if mask:
                yield Edge("permute", _axes_of(mask)), mask, MoveState(cuts, state.partial)

    def _orders(self, axes: Axes, d: int) -> Iterable[Axes]:
        """The orders in which axes may go to dim d."""
        if self.goal is None:
            return permutations(axes)
        first = self.goal[d]
        return (tuple(sorted(axes, key=lambda axis: (first.index(axis) if axis in first else len(first), axis))),)

    def _arrangements(self, wanted: list[int], usable: int, d: int = 0) -> Iterator[tuple[Axes, ...]]:
        """Every way to cut the dims from d on into the required numbers of pieces."""
        if d == len(wanted):
            yield ()
            return
        for axes in _subsets(_axes_of(usable)) if wanted[d] > 1 else [()]:
            if prod(self.sizes[axis] for axis in axes) == wanted[d]:
                for cut in self._orders(axes, d):
                    for rest in self._arrangements(wanted, usable & ~bits(cut), d + 1):
                        yield (cut, *rest)

    def _changed(self, before: Axes, after: Axes) -> int:
        """The axes in which two cuts into as many pieces differ, aligned block by aligned block."""
        mask = i = j = start = begin = 0
        left = right = 1
        while i < len(before) or j < len(after):
            if left <= right and i < len(before):
                left, i = left * self.sizes[before[i]], i + 1
            else:
                right, j = right * self.sizes[after[j]], j + 1
            if left == right:
                if before[start:i] != after[begin:j]:
                    mask |= bits(before[start:i]) | bits(after[begin:j])
                start, begin = i, j
        return mask

    def _reductions(self, state: MoveState) -> Iterator[_Edge]:
        """Every reduction over a subset of the partial axes, each set of axes in its own fans."""
        for axes in _subsets(_axes_of(state.partial)):
            mask = bits(axes)
            rest = state._replace(partial=state.partial & ~mask)
            yield Edge("all_reduce", axes), mask, rest
            for d, cut in enumerate(state.cuts):
                for order in self._orders(axes, d):
                    yield Edge("reduce_scatter", order, d), mask, self._with(rest, d, (*cut, *order))

    def _pads(self, state: MoveState) -> Iterator[_Edge]:
        """Every way to become partial over innermost axes of a dim, each set of axes in its own fans."""
        for d, kept, axes in _suffixes(state):
            after = self._with(state, d, kept)._replace(partial=state.partial | bits(axes))
            yield Edge("to_partial", axes, d), bits(axes), after

    def _spreads(self, state: MoveState) -> Iterator[_Edge]:
        """Every way to become partial over replicated axes: a single device of each group keeps the value."""
        for axes in _subsets(_axes_of(self.replicated(state))):
            yield Edge("to_partial", axes), bits(axes), state._replace(partial=state.partial | bits(axes))


def bits(axes: Iterable[int]) -> int:
    mask = 0
    for axis in axes:
        mask |= 1 << axis
    return mask


def _axes_of(mask: int) -> Axes:
    return tuple(axis for axis in range(mask.bit_length()) if mask >> axis & 1)


def _subsets(axes: Axes) -> Iterator[Axes]:
    """Every nonempty subset of the axes."""
    return (some for count in range(1, len(axes) + 1) for some in combinations(axes, count))


def _suffixes(state: MoveState) -> Iterator[tuple[int, Axes, Axes]]:
    """(dim, remaining axes, innermost axes) for every way to remove axes from a dim."""
    for d, cut in enumerate(state.cuts):
        for kept in reversed(range(len(cut))):
            yield d, cut[:kept], cut[kept:]


@lru_cache(maxsize=64)
def space_of(
    sizes: tuple[int, ...], num_dims: int, extents: tuple[Extent, ...] | None, goal: tuple[Axes, ...] | None
) -> Space:
    return Space(sizes, extents, goal)
