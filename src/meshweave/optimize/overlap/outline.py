"""A problem with kernels folded into their users, and its precomputed properties: longest paths to the end, memory
along the graph's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf
from typing import Literal

import numpy as np

from meshweave.optimize.overlap.model import Order, Problem

Fold = Literal["feeders", "inputs", "nothing"]  # which kernels are folded into their users
FOLDS: tuple[Fold, ...] = ("feeders", "inputs", "nothing")
_BY_ITEM = (
    "names",
    "seconds",
    "deps",
    "waits",
    "channel",
    "copy",
    "host",
    "startup",
    "usage",
    "allocs",
    "uses",
    "is_waited",
)


@dataclass(frozen=True, slots=True)
class Folded:
    """`problem` has fewer items; `members[i]` are those of the original problem that item i consists of, in their
    order."""

    problem: Problem
    members: tuple[tuple[int, ...], ...]

    def unfold(self, order: Order) -> list[int]:
        """An order of the folded problem as an order of the original."""
        unfolded_order: list[int] = []
        for x in order:
            if x >= 0:
                unfolded_order += self.members[x]
            else:
                unfolded_order.append(~self.members[~x][-1])
        return unfolded_order


def fold(problem: Problem, which: Fold = "inputs") -> Folded:
    """An item for each kernel or start with everything folded into it: kernels that depend only on inputs and have a
    single user right after them; with "feeders" also kernels that only a start needs. Kernels longer than the mean stay
    separate, and those that need a communication.

    The cast of a parameter's shard belongs to its gather, that of a gradient to its reduction, a recomputed activation
    to its reader. A scheduler that saw them separately would run them as early as possible, and fill the memory with
    values that are not read yet.
    """
    if which == "nothing":
        return Folded(problem, tuple((i,) for i in range(problem.num_items)))
    users, seconds, deps, channel = problem.users(), problem.seconds, problem.deps, problem.channel
    kernels = [s for s, c in zip(seconds, channel, strict=True) if c < 0]
    light = sum(kernels) / max(len(kernels), 1)
    into: dict[int, int] = {}
    inside: dict[int, list[int]] = {}
    able = [
        channel[i] < 0 and seconds[i] <= light and not problem.waits[i] and len({*users[i]}) == 1
        for i in range(problem.num_items)
    ]
    feeds = [False] * problem.num_items
    for i in range(problem.num_items - 1, -1, -1) if which == "feeders" else ():
        feeds[i] = able[i] and (channel[users[i][0]] >= 0 or feeds[users[i][0]])
    for i in range(problem.num_items):
        if able[i] and (feeds[i] or all([into.get(d) == i for d in deps[i]])):
            into[i] = users[i][0]
            inside.setdefault(users[i][0], []).extend((*inside.get(i, ()), i))
    kept = [i for i in range(problem.num_items) if i not in into]
    number = [-1] * problem.num_items
    for n, i in enumerate(kept):
        number[i] = n
    members = tuple([(*sorted(inside[i]), i) if i in inside else (i,) for i in kept])
    folded = Problem(sizes=problem.sizes, kept=problem.kept, before=problem.before, channels=problem.channels)
    for name in _BY_ITEM:
        values = getattr(problem, name)
        setattr(folded, name, [values[i] for i in kept])
    folded.waits = [tuple([number[c] for c in waits]) if waits else () for waits in folded.waits]
    folded.extra = [0] * len(kept)
    counts = problem.counts()
    for n, group in enumerate(members):
        if len(group) == 1:
            folded.deps[n] = tuple([number[d] for d in folded.deps[n]])
            continue
        folded.seconds[n] = sum([seconds[m] for m in group])
        folded.deps[n] = tuple(sorted({number[d] for m in group for d in deps[m] if d not in group}))
        hidden, folded.extra[n] = _inside(problem, group, counts)
        folded.allocs[n] = tuple([s for m in group for s in problem.allocs[m] if s not in hidden])
        folded.uses[n] = tuple(dict.fromkeys([s for m in group for s in problem.uses[m] if s not in hidden]))
    folded.order = [number[x] if x >= 0 else ~number[~x] for x in problem.order if x < 0 or number[x] >= 0]
    return Folded(folded, members)


def _inside(problem: Problem, group: Sequence[int], counts: Sequence[int]) -> tuple[set[int], int]:
    """The storages that live only while the members of an item run, and how much more lives at some moment of these
    than all that the others allocate."""
    left = {s: counts[s] for m in group for s in problem.allocs[m]}
    hidden, live, most = set[int](), 0, 0
    for m in group:
        live += sum([problem.sizes[s] for s in problem.allocs[m]])
        most = max(most, live)
        for s in (*problem.uses[m], *problem.allocs[m]) if problem.channel[m] < 0 else ():
            if s in left and s not in hidden:
                left[s] -= s in problem.uses[m]
                if left[s] <= 0:
                    hidden.add(s)
                    live -= problem.sizes[s]
    return hidden, max(0, most - live)


@dataclass(slots=True)
class Outline:
    """What is the same for all orders of a problem. `needs` is, by start, the seconds of compute before its first use
    in the graph; `levels` the live bytes at each item in the graph's order, in a table for ranges."""

    problem: Problem
    users: list[list[int]] = field(init=False)
    needs: list[float] = field(init=False)
    uses_at: list[int] = field(init=False)  # by start: the item of its first use; the number of items if there is none
    grows: list[bool] = field(init=False)
    holds: list[tuple[int, ...]] = field(init=False)
    missing: list[int] = field(init=False)  # how many items and communications an item needs
    first: list[int] = field(init=False)  # items that need nothing
    longest: list[float] = field(init=False)  # by channel: seconds of its longest communication
    growth: list[int] = field(init=False)  # bytes that an item allocates
    unused: list[int] = field(init=False)  # and those that nothing uses
    peak: list[int] = field(init=False)  # and those that live at most while it runs
    levels: list[list[int]] = field(init=False)
    before: list[int] = field(init=False)  # live bytes before an item in the graph's order
    paths: dict[float, list[float]] = field(default_factory=dict)
    rankings: dict[tuple[float, bool], tuple[list[int], list[int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problem, n = self.problem, self.problem.num_items
        self.users = problem.users()
        sizes = problem.sizes
        counts = problem.counts()
        self.growth = [sum([sizes[s] for s in storages]) for storages in problem.allocs]
        self.unused = [sum([sizes[s] for s in storages if not counts[s]]) for storages in problem.allocs]
        self.missing = [len(deps) + len(waits) for deps, waits in zip(problem.deps, problem.waits, strict=True)]
        self.first = [i for i, count in enumerate(self.missing) if not count]
        self.longest = [0.0] * len(problem.channels)
        self.peak = [a + b for a, b in zip(self.growth, problem.extra, strict=True)] if problem.extra else self.growth
        before = list(accumulate(problem.seconds, initial=0.0))
        self.needs, self.uses_at = [inf] * n, [n] * n
        self.grows, self.holds = [False] * n, [()] * n
        for c in reversed(problem.starts):
            self.longest[problem.channel[c]] = max(self.longest[problem.channel[c]], problem.copy[c])
            self.holds[c] = problem.holds(c)
            users = [u for u in self.users[c] if c in problem.waits[u]]
            self.uses_at[c] = min((self.uses_at[u] if problem.channel[u] >= 0 else u for u in users), default=n)
            self.needs[c] = before[self.uses_at[c]] if users else inf
            self.grows[c] = self.growth[c] > sum(sizes[s] for s in problem.uses[c]) or not problem.deps[c]
        self.before, at = self._levels()
        self.levels = _ranges(at)

    def path(self, factor: float) -> list[float]:
        """By item the longest path from its begin to the end of the step, with communications `factor` times as
        long."""
        if factor not in self.paths:
            problem = self.problem
            path_from = [0.0] * problem.num_items
            for i in range(problem.num_items - 1, -1, -1):
                own = problem.seconds[i] if problem.channel[i] < 0 else problem.copy[i] * factor
                users = self.users[i]
                path_from[i] = own + max([path_from[u] for u in users]) if users else own
            self.paths[factor] = path_from
        return self.paths[factor]

    def reach(self) -> list[float]:
        """By item the least compute, including its own, until a communication that needs it can start."""
        problem = self.problem
        distance = [inf] * problem.num_items
        for i in range(problem.num_items - 1, -1, -1):
            if problem.channel[i] >= 0:
                distance[i] = 0.0
                continue
            least = inf
            for u in self.users[i]:
                if distance[u] < least:
                    least = distance[u]
            distance[i] = problem.seconds[i] + least
        return distance

    def ranking(self, factor: float, *, feeds: bool = False) -> tuple[list[int], list[int]]:
        """By item its rank by longest remaining path (ties: what finishes sooner first), and the items in that order.
        `feeds`: by the shortest path to a communication first."""
        if (factor, feeds) not in self.rankings:
            path, seconds = self.path(factor), self.problem.seconds
            first = self.reach() if feeds else [0.0] * len(path)
            ranked = sorted(range(len(path)), key=lambda i: (first[i], -path[i], seconds[i], i))
            rank = [0] * len(path)
            for place, i in enumerate(ranked):
                rank[i] = place
            self.rankings[factor, feeds] = rank, ranked
        return self.rankings[factor, feeds]

    def highest(self, first: int, last: int) -> int:
        """The most live bytes between two items in the graph's order."""
        last = min(last, len(self.levels[0]) - 1)
        if last <= first:
            return self.levels[0][min(first, len(self.levels[0]) - 1)]
        k = (last - first + 1).bit_length() - 1
        row = self.levels[k]
        return max(row[first], row[last - (1 << k) + 1])

    def _levels(self) -> tuple[list[int], list[int]]:
        """Live bytes before each item of the graph's order, and at it, including its results."""
        order = self.problem.order
        levels = self.problem.live_bytes(order).tolist()
        before, at = [0] * self.problem.num_items, [0] * self.problem.num_items
        for level, x in zip(levels, order, strict=False):
            if x >= 0:
                before[x] = level - self.growth[x]
                at[x] = before[x] + self.peak[x]
        return [*before, levels[-1]], at


def _ranges(levels: list[int]) -> list[list[int]]:
    """Rows of maxima over 1, 2, 4, ... entries."""
    row, width = np.array(levels or [0]), 1
    rows = [row.tolist()]
    while 2 * width <= len(levels):
        row = np.maximum(row[:-width], row[width:])
        rows.append(row.tolist())
        width *= 2
    return rows
