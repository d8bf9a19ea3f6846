"""The cheapest path through the layouts of a mesh, by Dijkstra's algorithm."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, count

from meshweave.cost.hardware import Costs
from meshweave.ir.mesh import Mesh
from meshweave.place.movement.space import LOCAL, PARTIAL, REPLICATED, Axes, Edge, Fan, MoveState, Space
from meshweave.place.movement.steps import Kind

Link = tuple[int, Edge]  # the index of the state that a step starts from, and the step
_TICKS_PER_SECOND = 10**12
_LENGTHS = 64  # a key is ticks * _LENGTHS + steps: ties go to fewer steps


def to_ticks(seconds: float) -> int:
    """Whole picoseconds, in which costs are compared, so that sums added in another order still tie."""
    return round(seconds * _TICKS_PER_SECOND)


class StepCosts:
    """Ticks of steps over sets of axes (bit sets of `axes`) of a mesh under a profile, each computed once."""

    def __init__(self, profile: Costs, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self.profile, self.mesh, self.axes = profile, mesh, axes
        self.speeds = tuple(profile.bandwidth_of(mesh, axis) for axis in axes)
        self.known: dict[tuple[Kind, int, int], int] = {}

    def ticks(self, kind: Kind, mask: int, local_bytes: int) -> int:
        """Ticks of a step over axes; cached in `known`."""
        axes = tuple(axis for i, axis in enumerate(self.axes) if mask >> i & 1)
        ticks = self.known[kind, mask, local_bytes] = to_ticks(self.profile.seconds(kind, self.mesh, axes, local_bytes))
        return ticks


@lru_cache(maxsize=256)
def step_costs_of(profile: Costs, mesh: Mesh, axes: tuple[str, ...]) -> StepCosts:
    return StepCosts(profile, mesh, axes)


@dataclass(slots=True)
class MoveProblem:
    """A move in the form of the search.

    Over the axes in `summed` the value may be partial on the way, with the reduce op of the source: it may be reduced
    over them and become partial again. At the end it is partial over those in `partial`, and over the sets in `added`,
    a set per other op, which are never reduced. A value becomes partial over an axis that cuts a dim, or at the very
    end over a replicated axis. Along `replicated` the source is replicated. All are bit sets. In an even space `total`
    is the bytes of the value before any active axis cuts it, else the bytes of an element; `finest` is the bytes of a
    piece that all active axes cut. A reduction runs only
    while every replicated axis was replicated in the source."""

    space: Space
    prices: StepCosts
    start: MoveState
    goal: tuple[tuple[int, ...], ...]
    summed: int
    partial: int
    added: tuple[int, ...]
    replicated: int
    total: int
    finest: float
    end: int = field(init=False)
    _even: bool = field(init=False)
    _all: int = field(init=False)
    heuristic: Heuristic = field(init=False)

    def __post_init__(self) -> None:
        self._even = self.space.extents is None
        self._all = (1 << len(self.space.sizes)) - 1
        self.end = self.space.number(MoveState(self.goal, self.partial | sum(self.added)))
        self.heuristic = Heuristic(
            self.goal,
            self.partial | sum(self.added),
            self.space.sizes,
            self.prices.speeds,
            self.prices.profile.alpha_s,
            self.finest,
            self._even,
        )

    def bytes_of(self, size: int) -> int:
        """Bytes of the largest piece of a state of this size (see Space)."""
        return self.total // size if self._even else self.total * size

    def fans(self, number: int) -> Iterator[Fan]:
        """The steps that this move may take from a state."""
        space = self.space
        state = space.states[number]
        partial_axes = state.partial & self.summed
        pending = partial_axes & ~self.partial
        lists = [space.moves(number)]
        if partial_axes == state.partial and partial_axes and not space.replicated(state) & ~self.replicated:
            lists.append(_within(space.reductions(number), partial_axes, state.partial))
        if self.summed:
            lists.append(_within(space.pads(number), self.summed, self._all))
        if not pending:
            lists += (_within(space.pads(number), mask, self._all) for mask in self.added)
        if not pending and state.cuts == self.goal:
            lists += (_within(space.spreads(number), mask, self._all) for mask in (self.partial, *self.added))
        return chain.from_iterable(lists)


def _within(fans: list[Fan], mask: int, largest: int) -> list[Fan]:
    """The steps over axes in the mask; none has others than those in `largest`."""
    return fans if mask == largest else [fan for fan in fans if not fan.mask & ~mask]


def cheapest(problem: MoveProblem, cap: float) -> tuple[Link, ...] | None:
    """The cheapest path in which no step's input and output exceed `cap` bytes; None if there is none.

    Ties go to fewer steps, then to the first in the order of the space. This is A* with the problem's heuristic."""
    space, end, rest = problem.space, problem.end, problem.heuristic
    states, places, bytes_of = space.states, space.places, problem.bytes_of
    known, price = problem.prices.known, problem.prices.ticks
    first = space.number(problem.start)
    best: dict[int, int] = {first: 0}
    ahead: dict[int, int] = {end: 0}
    parents: dict[int, Link] = {}
    tick, bound = count(), 1 << 200
    heap = [(0, next(tick), 0, first)]
    while heap:
        _, _, key, here = heapq.heappop(heap)
        if key > best[here]:
            continue
        if here == end:
            break
        room = cap - bytes_of(space.size(states[here]))
        for kind, mask, work, size, ends in problem.fans(here):
            if bytes_of(size) > room:
                continue
            total = key + 1
            if kind not in LOCAL:
                priced = (kind, mask, bytes_of(work))
                total += (known[priced] if priced in known else price(*priced)) * _LENGTHS
            if total >= bound:
                continue
            for there, edge in ends:
                if total < best.get(there, bound):
                    least = ahead.get(there)
                    if least is None:  # at least one step
                        least = ahead[there] = rest(states[there], places[there]) * _LENGTHS + 1
                    if total + least >= bound:
                        continue
                    best[there] = total
                    parents[there] = (here, edge)
                    heapq.heappush(heap, (total + least, next(tick), total, there))
                    if there == end:
                        bound = total + 1
    if end not in best:
        return None
    path: list[Link] = []
    while end != first:
        path.append(parents[end])
        end = parents[end][0]
    return tuple(reversed(path))


def least_peak(problem: MoveProblem) -> int:
    """The least cap for which there is a path."""
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
            level = max(peak, local_bytes + problem.bytes_of(size))
            for there, _ in ends:
                if level < best.get(there, level + 1):
                    best[there] = level
                    heapq.heappush(heap, (level, there))
    raise AssertionError("gathering everything is always a path")


# A lower bound of the remaining cost from an intermediate layout to the end of a move, for the A* search.

_ROUNDING = 32  # ticks by which the prices of a path may be rounded down: half a tick per step


class Heuristic:
    """Ticks that every path from a state to the end takes at least (an admissible heuristic).

    As in `movement.bounds`, devices that differ only along axes faster than some bandwidth form a node, and the bytes
    that must enter nodes on average take time; any state but the end takes a start-up. `finest` is the bytes of a piece
    that all axes cut, `speeds` are bytes per second by axis, `opened` the bit set of axes over which the value is
    partial at the end. Those count as inside of nodes: the value may be anywhere among them."""

    def __init__(
        self,
        goal: tuple[Axes, ...],
        opened: int,
        sizes: Sequence[int],
        speeds: Sequence[float],
        alpha_s: float,
        finest: float,
        is_even: bool,
    ) -> None:
        self._goal, self._opened, self._is_even = goal, opened, is_even
        self._start_up, self._ticks_per_unit = alpha_s * 1e12 * (1 - 1e-9), finest * 1e12 * (1 - 1e-9)
        ends = {axis: d for d, cut in enumerate(goal) for axis in cut}
        axes = [axis for axis in sorted(range(len(sizes)), key=speeds.__getitem__) if not opened >> axis & 1]
        self._rows = [(axis, sizes[axis], ends.get(axis, REPLICATED), 1 / speeds[axis]) for axis in axes]

    def __call__(self, state: MoveState, places: Sequence[int]) -> int:
        """`places` has for each axis the dim that it cuts, or REPLICATED or PARTIAL."""
        units = self._units(places)
        if not units and not self._is_astray(state):
            return 0
        return max(0, int(self._start_up + units * self._ticks_per_unit) - _ROUNDING)

    def _units(self, places: Sequence[int]) -> float:
        """Seconds for what must enter nodes over slow axes, on average, if the finest piece had 1 byte."""
        parts = copies = nodes = 1
        needed, there = 1.0, 1.0  # shares of the value that a node needs, and the shares of these that it has
        seconds = before = 0.0
        for axis, size, goal, slowness in self._rows:
            place = places[axis]
            nodes *= size
            if place == PARTIAL:
                parts *= size
            elif place >= 0 and place != goal and (self._is_even or goal < 0):
                there /= size
            if goal >= 0:
                needed, there = needed / size, there / size
            else:
                copies *= size
            entering = parts + copies - 2 if parts > 1 else nodes * (needed - there)
            if entering > before:
                seconds, before = seconds + (entering - before) * slowness, entering
        return seconds

    def _is_astray(self, state: MoveState) -> bool:
        """Whether some dim is cut so that slices and partial axes cannot turn it into the end's."""
        for cut, goal in zip(state.cuts, self._goal, strict=True):
            if cut == goal[: len(cut)]:
                continue
            count = len(cut)
            while count and self._opened >> cut[count - 1] & 1:
                count -= 1
            if cut[:count] != goal[:count]:
                return True
        return False
