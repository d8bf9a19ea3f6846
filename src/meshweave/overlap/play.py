"""A problem's order played on a virtual clock: how long it takes, what is exposed, and the bytes that live at each
item.

One pass over the order. `simulate.clock` plays the same rules on the event machine; the tests hold both together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from meshweave.overlap.problem import Order, Problem

Slowdown = Callable[[frozenset[str]], float]


@dataclass(frozen=True, slots=True)
class Played:
    """`begin` and `end` by item: of a kernel on the compute stream, of a start's communication on its channel; `issued`
    is when the stream reached a start. `stalls` are (start that was waited for, from, to)."""

    seconds: float
    begin: tuple[float, ...]
    end: tuple[float, ...]
    issued: tuple[float, ...]
    stalls: tuple[tuple[int, float, float], ...]


def seconds_of(problem: Problem, order: Order, slowdown: Slowdown | None = None) -> float:
    """The makespan of `order`: until the compute stream and every channel are done."""
    if slowdown is not None and any(problem.usage):
        return _Fluid(problem, slowdown).run(order).seconds
    seconds, channel, copy = problem.seconds, problem.channel, problem.copy
    free, end, now = [0.0] * len(problem.channels), [0.0] * problem.num_items, 0.0
    for x in order:
        if x < 0:
            if end[~x] > now:
                now = end[~x]
        elif channel[x] < 0:
            now += seconds[x]
        else:
            c = channel[x]
            begun = free[c] if free[c] > now else now
            free[c] = end[x] = begun + copy[x]
    return max(now, *free) if free else now


def play(problem: Problem, order: Order, slowdown: Slowdown | None = None) -> Played:
    """As `seconds_of`, with the times of every item."""
    return _Fluid(problem, slowdown or (lambda levels: 1.0)).run(order)


@dataclass(slots=True)
class _Fluid:
    """Communications that want more of a link than there is slow each other; compute slows while communication runs."""

    problem: Problem
    slowdown: Slowdown
    now: float = 0.0
    left: dict[int, float] = field(default_factory=dict)  # channel -> seconds left of what runs in it, alone
    running: dict[int, int] = field(default_factory=dict)  # channel -> item
    rates: dict[int, float] = field(default_factory=dict)
    since: dict[int, float] = field(default_factory=dict)  # channel -> when `left` was counted
    ends: dict[int, float] = field(default_factory=dict)  # channel -> when what runs ends at these rates
    queues: dict[int, deque[int]] = field(default_factory=dict)
    begin: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    done: list[bool] = field(default_factory=list)
    factors: dict[frozenset[str], float] = field(default_factory=dict)
    pace: float = 1.0  # of compute beside what runs now
    next_end: float = float("inf")

    def run(self, order: Order) -> Played:
        problem = self.problem
        self.begin, self.end = [0.0] * problem.num_items, [0.0] * problem.num_items
        self.done = [False] * problem.num_items
        issued, stalls = [0.0] * problem.num_items, []
        for x in order:
            if x < 0:
                if not self.done[~x]:
                    since = self.now
                    while not self.done[~x]:
                        self.advance(self.next_end)
                    if self.now > since:
                        stalls.append((~x, since, self.now))
            elif problem.channel[x] < 0:
                self.begin[x] = self.now
                self.compute(problem.seconds[x])
                self.end[x] = self.now
            else:
                issued[x] = self.now
                self.issue(x)
        finished = self.now
        while self.running:
            last = next(iter(self.running.values()))
            since = self.now
            self.advance(self.next_end)
            stalls.append((last, since, self.now))
        return Played(max(finished, self.now), tuple(self.begin), tuple(self.end), tuple(issued), tuple(stalls))

    def compute(self, seconds: float) -> None:
        while seconds > 0:
            until = self.now + seconds / self.pace
            if until <= self.next_end:
                self.now = until
                return
            seconds -= (self.next_end - self.now) * self.pace
            self.advance(self.next_end)

    def issue(self, start: int) -> None:
        channel = self.problem.channel[start]
        self.queues.setdefault(channel, deque()).append(start)
        if channel not in self.running:
            self.settle()
            self.begin_next(channel)
            self.share()

    def begin_next(self, channel: int) -> None:
        queue = self.queues[channel]
        while queue:
            start = queue.popleft()
            self.begin[start] = self.now
            if self.problem.copy[start] > 0:
                self.running[channel], self.left[channel] = start, self.problem.copy[start]
                return
            self.end[start], self.done[start] = self.now, True

    def settle(self) -> None:
        """Count what has been carried since the rates last changed."""
        for channel in self.left:
            self.left[channel] -= (self.now - self.since[channel]) * self.rates[channel]
        self.since = dict.fromkeys(self.left, self.now)

    def advance(self, to: float) -> None:
        """Go to `to`, where the next communication ends."""
        self.now = to
        self.settle()
        ended = [c for c, left in self.left.items() if left <= 1e-15 or self.ends[c] <= to]
        for channel in ended:
            start = self.running.pop(channel)
            del self.left[channel]
            self.end[start], self.done[start] = to, True
            self.begin_next(channel)
        self.share()

    def share(self) -> None:
        """Set the rates of what runs now."""
        total: dict[str, float] = {}
        for start in self.running.values():
            for level, share in self.problem.usage[start]:
                total[level] = total.get(level, 0.0) + share
        self.rates = {
            c: min([1.0, *(1.0 / max(1.0, total[level]) for level, _ in self.problem.usage[start])])
            for c, start in self.running.items()
        }
        levels = frozenset(total)
        if levels not in self.factors:
            self.factors[levels] = 1.0 / self.slowdown(levels) if levels else 1.0
        self.pace = self.factors[levels]
        self.since = dict.fromkeys(self.left, self.now)
        self.ends = {c: self.now + left / self.rates[c] for c, left in self.left.items()}
        self.next_end = min(self.ends.values(), default=float("inf"))


@dataclass(frozen=True, slots=True)
class Level:
    """The most bytes that live at once, and where: the number of entries of the order before the peak, what lives
    then."""

    peak: int
    at: int
    live: tuple[int, ...] = ()


def peak_of(problem: Problem, order: Order, *, with_live: bool = False) -> Level:
    """The true peak of `order`, transients included: a kernel's results stand beside its operands, a communication's
    operands and results live from its start until its wait."""
    counts, sizes = problem.counts(), problem.sizes
    allocs, uses, channel = problem.allocs, problem.uses, problem.channel
    level = peak = problem.base_bytes
    at = 0
    for number, x in enumerate(order):
        if x >= 0:
            for s in allocs[x]:
                level += sizes[s]
            if level > peak:
                peak, at = level, number
            if channel[x] >= 0:
                continue
            held = uses[x]
            for s in allocs[x]:
                if not counts[s]:
                    level -= sizes[s]
        else:
            held = problem.holds(~x)
        for s in held:
            counts[s] -= 1
            if not counts[s]:
                level -= sizes[s]
    return Level(peak, at, _live(problem, order[: at + 1]) if with_live else ())


def _live(problem: Problem, done: Order) -> tuple[int, ...]:
    """The storages that live at the last entry of `done`, the largest first."""
    counts = problem.counts()
    live = {s for s, is_before in enumerate(problem.before) if is_before}
    for x in done[:-1]:
        if x >= 0:
            live.update(problem.allocs[x])
        held = problem.holds(~x) if x < 0 else problem.uses[x] if problem.channel[x] < 0 else ()
        for s in held:
            counts[s] -= 1
        live -= {s for s in (*held, *(problem.allocs[x] if x >= 0 else ())) if not counts[s]}
    live.update(problem.allocs[done[-1]] if done and done[-1] >= 0 else ())
    return tuple(sorted(live, key=lambda s: (-problem.sizes[s], s)))
