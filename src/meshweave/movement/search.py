"""The cheapest path through the layouts of a mesh, by Dijkstra's algorithm."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Literal

from meshweave.hardware.costs import Costs
from meshweave.ir.mesh import Mesh
from meshweave.movement.space import LOCAL, Edge, Fan, Space, State
from meshweave.movement.steps import Kind

Order = Literal["sound", "strict", "any"]
Link = tuple[int, Edge]  # the number of the state that a step starts from, and the step
_TICKS_PER_SECOND = 10**12
_LENGTHS = 64  # a key is ticks * _LENGTHS + steps: of equally cheap paths the one with fewer steps


def to_ticks(seconds: float) -> int:
    """Whole picoseconds, in which costs are compared, so that sums taken in another order are still ties."""
    return round(seconds * _TICKS_PER_SECOND)


class Prices:
    """Ticks of steps over sets of axes (bit sets of `axes`) of a mesh under a profile, each asked for once."""

    def __init__(self, profile: Costs, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self.profile, self.mesh, self.axes = profile, mesh, axes
        self._tables: dict[int, dict[tuple[Kind, int], int]] = {}

    def table(self, local_bytes: int) -> dict[tuple[Kind, int], int]:
        """The prices known for local inputs of a size; `add` completes it."""
        table = self._tables.get(local_bytes)
        if table is None:
            table = self._tables[local_bytes] = {}
        return table

    def add(self, kind: Kind, mask: int, local_bytes: int) -> int:
        axes = tuple(axis for i, axis in enumerate(self.axes) if mask >> i & 1)
        ticks = to_ticks(self.profile.seconds(kind, self.mesh, axes, local_bytes))
        self._tables[local_bytes][kind, mask] = ticks
        return ticks


@lru_cache(maxsize=256)
def prices_of(profile: Costs, mesh: Mesh, axes: tuple[str, ...]) -> Prices:
    return Prices(profile, mesh, axes)


@dataclass(slots=True)
class Problem:
    """A move as the search sees it.

    `pending` must not be partial at the end; the sets in `added`, one for each op, must (from where they cut a dim, or
    once all else is done from where they are replicated); along `replicated` the source is replicated. All are bit
    sets. In an even space `total` is the bytes of the value before any axis in play cuts it, else the bytes of an
    element. `order` says when a reduction may run: "sound", while every axis that is replicated was so in the source;
    "strict", while none is (and a replicated axis may become partial for it); "any".
    """

    space: Space
    prices: Prices
    start: State
    goal: tuple[tuple[int, ...], ...]
    pending: int
    added: tuple[int, ...]
    replicated: int
    total: int
    order: Order = "sound"
    end: int = field(init=False)
    _even: bool = field(init=False)
    _twins: int = field(init=False)  # axes that may be replicated when a reduction runs

    def __post_init__(self) -> None:
        self._even = self.space.extents is None
        self._twins = {"any": -1, "sound": self.replicated, "strict": 0}[self.order]
        self.end = self.space.number(State(self.goal, sum(self.added)))

    def bytes_of(self, size: int) -> int:
        """Bytes of the largest piece of a state of this size (see Space)."""
        return self.total // size if self._even else self.total * size

    def fans(self, number: int) -> Iterator[Fan]:
        """The steps that this move may take from a state."""
        space = self.space
        yield from space.moves(number)
        state = space.states[number]
        pending = state.gone & self.pending
        if pending and not space.replicated(state) & ~self._twins:
            for fan in space.reductions(number):
                whole = self.order == "any" or fan.kind == "reduce_scatter" or fan.mask == pending
                if whole and not fan.mask & ~pending:
                    yield fan
        if pending and self.order == "strict":
            yield from (fan for fan in space.spreads(number) if not fan.mask & ~self.pending)
        for added in self.added:
            yield from (fan for fan in space.pads(number) if not fan.mask & ~added)
            if not pending and state.cuts == self.goal:
                yield from (fan for fan in space.spreads(number) if not fan.mask & ~added)


def cheapest(problem: Problem, cap: float, banned: Container[Link] = ()) -> tuple[Link, ...] | None:
    """The cheapest path in which no step's input and output are more than `cap` bytes; None if there is
    none. Of equally cheap paths the one with fewer steps, then the first in the order of the space."""
    space, prices, end = problem.space, problem.prices, problem.end
    first = space.number(problem.start)
    best: dict[int, int] = {first: 0}
    parents: dict[int, Link] = {}
    tick, bound = count(), 1 << 200
    heap = [(0, next(tick), first)]
    while heap:
        key, _, here = heapq.heappop(heap)
        if key > best[here]:
            continue
        if here == end:
            break
        room = cap - problem.bytes_of(space.size(space.states[here]))
        for kind, mask, work, size, ends in problem.fans(here):
            if problem.bytes_of(size) > room:
                continue
            work_bytes = problem.bytes_of(work)
            ticks = 0 if kind in LOCAL else prices.table(work_bytes).get((kind, mask))
            if ticks is None:
                ticks = prices.add(kind, mask, work_bytes)
            total = key + ticks * _LENGTHS + 1
            if total >= bound:
                continue
            for there, edge in ends:
                if total < best.get(there, bound) and (here, edge) not in banned:
                    best[there] = total
                    parents[there] = (here, edge)
                    heapq.heappush(heap, (total, next(tick), there))
                    if there == end:
                        bound = total + 1
    if end not in best:
        return None
    path: list[Link] = []
    while end != first:
        path.append(parents[end])
        end = parents[end][0]
    return tuple(reversed(path))


def least_peak(problem: Problem) -> int:
    """The least cap under which there is a path."""
    space = problem.space
    first = space.number(problem.start)
    best, heap = {first: 0}, [(0, first)]
    while heap:
        peak, here = heapq.heappop(heap)
        if peak > best[here]:
            continue
        if here == problem.end:
            return peak
        local_bytes = problem.bytes_of(space.size(space.states[here]))
        for _, _, _, size, ends in problem.fans(here):
            held = max(peak, local_bytes + problem.bytes_of(size))
            for there, _ in ends:
                if held < best.get(there, held + 1):
                    best[there] = held
                    heapq.heappush(heap, (held, there))
    raise AssertionError("gathering everything is always a path")
