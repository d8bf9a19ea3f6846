"""The cheapest path through the layouts of a mesh, by Dijkstra's algorithm."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Literal

from meshweave.hardware.alpha_beta import AlphaBeta
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

    def __init__(self, profile: AlphaBeta, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self.profile, self.mesh, self.axes = profile, mesh, axes
        self._tables: dict[int, dict[tuple[Kind, int], int]] = {}

    def table(self, local_bytes: int) -> dict[tuple[Kind, int], int]:
        """The prices known for local inputs of a size; `add` completes it."""
        table = self._tables.get(local_bytes)
        if table is None:
            table = self._tables[local_bytes] = dict.fromkeys(((kind, 0) for kind in LOCAL), 0)
        return table

    def add(self, kind: Kind, mask: int, local_bytes: int) -> int:
        axes = tuple(axis for i, axis in enumerate(self.axes) if mask >> i & 1)
        ticks = to_ticks(self.profile.seconds(kind, self.mesh, axes, local_bytes))
        self._tables[local_bytes][kind, mask] = ticks
        return ticks


@lru_cache(maxsize=256)
def prices_of(profile: AlphaBeta, mesh: Mesh, axes: tuple[str, ...]) -> Prices:
    return Prices(profile, mesh, axes)


@dataclass(slots=True)
class Problem:
    """A move as the search sees it.

    `pending` must be reduced, `padded` may become partial by padding, `replicated` are the axes along which the source
    is replicated (bit sets). In an even space `total` is the bytes of the value before any axis in play cuts it, else
    the bytes of an element. `order` says which reductions may run: "sound" ones, where replicas add in the same order;
    "strict", a single one over all pending axes; or "any".
    """

    space: Space
    prices: Prices
    start: State
    goal: tuple[tuple[int, ...], ...]
    pending: int
    padded: int
    replicated: int
    total: int
    order: Order = "sound"
    goals: frozenset[int] = field(init=False)
    _even: bool = field(init=False)

    def __post_init__(self) -> None:
        self._even = self.space.extents is None
        padded = [mask for mask in range(self.padded + 1) if not mask & ~self.padded]
        self.goals = frozenset(self.space.number(State(self.goal, mask)) for mask in padded)

    def bytes_of(self, size: int) -> int:
        """Bytes of the largest piece of a state of this size (see Space)."""
        return self.total // size if self._even else self.total * size

    def fans(self, number: int) -> Iterator[Fan]:
        """The steps that this move may take from a state."""
        space = self.space
        yield from space.moves(number)
        state = space.states[number]
        pending = state.gone & self.pending
        if pending and (self.order == "any" or not space.replicated(state) & ~self.replicated):
            for fan in space.reductions(number):
                if not fan.mask & ~pending and self._may_reduce(fan, pending):
                    yield fan
        if self.padded:
            yield from (fan for fan in space.pads(number) if not fan.mask & ~self.padded)

    def _may_reduce(self, fan: Fan, pending: int) -> bool:
        if self.order == "strict":
            return fan.mask == self.pending
        return self.order == "any" or fan.kind == "reduce_scatter" or fan.mask == pending


def cheapest(problem: Problem, cap: float, banned: Container[Link] = ()) -> tuple[Link, ...] | None:
    """The cheapest path in which no step's input and output are more than `cap` bytes; None if there is
    none. Of equally cheap paths the one with fewer steps, then the first in the order of the space."""
    space, prices, goals = problem.space, problem.prices, problem.goals
    first = space.number(problem.start)
    best: dict[int, int] = {first: 0}
    parents: dict[int, Link] = {}
    tick, bound, done = count(), 1 << 200, -1
    heap = [(0, next(tick), first)]
    while heap:
        key, _, here = heapq.heappop(heap)
        if key > best[here]:
            continue
        if here in goals:
            done = here
            break
        local_bytes = problem.bytes_of(space.size(space.states[here]))
        table = prices.table(local_bytes)
        for kind, mask, size, ends in problem.fans(here):
            if local_bytes + problem.bytes_of(size) > cap:
                continue
            ticks = table.get((kind, 0 if kind in LOCAL else mask))
            if ticks is None:
                ticks = prices.add(kind, mask, local_bytes)
            total = key + ticks * _LENGTHS + 1
            if total >= bound:
                continue
            for there, edge in ends:
                if total < best.get(there, bound) and (here, edge) not in banned:
                    best[there] = total
                    parents[there] = (here, edge)
                    heapq.heappush(heap, (total, next(tick), there))
                    if there in goals:
                        bound = total + 1
    if done < 0:
        return None
    path: list[Link] = []
    while done != first:
        path.append(parents[done])
        done = parents[done][0]
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
        if here in problem.goals:
            return peak
        local_bytes = problem.bytes_of(space.size(space.states[here]))
        for _, _, size, ends in problem.fans(here):
            held = max(peak, local_bytes + problem.bytes_of(size))
            for there, _ in ends:
                if held < best.get(there, held + 1):
                    best[there] = held
                    heapq.heappush(heap, (held, there))
    raise AssertionError("gathering everything is always a path")
