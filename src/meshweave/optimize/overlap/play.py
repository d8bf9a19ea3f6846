"""Plays an order of a problem on the virtual clock: its time, its exposed communication, and the live bytes at each
item; also on machines that differ slightly from the costs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from meshweave.cost.simulate import clock
from meshweave.cost.simulate.clock import Slowdown
from meshweave.optimize.overlap.model import Order, Problem


@dataclass(frozen=True, slots=True)
class Playback:
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
        return _times(problem, order, slowdown).seconds
    return clock.makespan(order, problem.seconds, problem.channel, problem.copy, problem.host, len(problem.channels))


def play(problem: Problem, order: Order, slowdown: Slowdown | None = None) -> Playback:
    """Like `seconds_of`, with the times of every item."""
    times, n = _times(problem, order, slowdown or (lambda levels: 1.0)), problem.num_items
    is_start = [c >= 0 for c in problem.channel]
    begin = tuple(times.starts[n + i if start else i] for i, start in enumerate(is_start))
    end = tuple(times.ends[n + i if start else i] for i, start in enumerate(is_start))
    return Playback(times.seconds, begin, end, tuple(times.starts[:n]), tuple(_stalls(problem, order, begin, end)))


def _times(problem: Problem, order: Order, slowdown: Slowdown) -> clock.Times:
    """Item i is task i, its communication is task n + i, the wait for it task 3n - 1 - i, which the index ~i
    reaches."""
    n, channel = problem.num_items, problem.channel
    none: list[tuple[tuple[str, float], ...]] = [()] * n
    work = clock.Work(
        seconds=[*problem.seconds, *problem.copy, *reversed(problem.host)],
        needs=_needs(n),
        usage=[*none, *problem.usage, *none],
        roles=[(0,)] * (3 * n),
        is_kernel=[c < 0 for c in channel] + [False] * (2 * n),
        issued=[0.0] * (3 * n),
    )
    lines: list[list[int]] = [[] for _ in problem.channels]
    for x in order:
        if x >= 0 and channel[x] >= 0:
            lines[channel[x]].append(n + x)
    return clock.play(work, [order, *lines], 1, slowdown)


@lru_cache(16)
def _needs(n: int) -> list[Sequence[int]]:
    """A communication needs its start, a wait the communication."""
    return [*[()] * n, *((i,) for i in range(n)), *((i,) for i in range(2 * n - 1, n - 1, -1))]


def _stalls(
    problem: Problem, order: Order, begin: Sequence[float], end: Sequence[float]
) -> Iterator[tuple[int, float, float]]:
    """Where the stream is idle: at a wait, and after its last entry, where it waits for all channels in order of
    begin."""
    now = 0.0
    for x in order:
        if x < 0:
            if end[~x] > now:
                yield ~x, now, end[~x]
                now = end[~x]
            now += problem.host[~x]
        elif problem.channel[x] < 0:
            now = end[x]
    left = sorted((c for c in problem.starts if end[c] > now), key=lambda c: begin[c])
    for until in sorted({end[c] for c in left}):
        yield next(c for c in left if begin[c] <= now < end[c]), now, until
        now = until


def peak_of(problem: Problem, order: Order) -> int:
    """The most live bytes in `order`, including storages that live before it."""
    return int(problem.live_bytes(order).max())


def live_at_peak(problem: Problem, order: Order) -> tuple[int, tuple[int, ...]]:
    """The entry of `order` at its peak, and the storages alive then, the largest first."""
    at = int(problem.live_bytes(order).argmax())
    begin, end = problem.live_ranges(order)
    live = ((begin <= at) & (at < end)).nonzero()[0].tolist()
    return at, tuple(sorted(live, key=lambda s: (-problem.sizes[s], s)))


NOISE = 0.4  # the largest relative deviation of an item
_SHARED = "shared"  # a link that every communication needs exclusively


@dataclass(frozen=True, slots=True)
class Scenario:
    """A name, and the function that modifies a problem."""

    name: str
    change: Callable[[Problem], Problem]

    def seconds(self, problem: Problem, order: Order, slowdown: Slowdown | None) -> float:
        rates = slowdown or _even
        return seconds_of(self.change(problem), order, lambda levels: rates(levels - {_SHARED}))


def _even(levels: frozenset[str]) -> float:
    return 1.0


def _noisy(problem: Problem) -> Problem:
    factors = [1 + NOISE * _spread(name) for name in problem.names]
    return replace(
        problem,
        seconds=[s * f for s, f in zip(problem.seconds, factors, strict=True)],
        copy=[c * f for c, f in zip(problem.copy, factors, strict=True)],
    )


@lru_cache(1 << 16)  # the candidates of a graph share most of their names
def _spread(name: str) -> float:
    """A number from -1 to 1 that depends only on a name, so that it is the same on every rank."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") / 2**31 - 1


def _shared(problem: Problem) -> Problem:
    usage = [(*u, (_SHARED, 1.0)) if c >= 0 else () for u, c in zip(problem.usage, problem.channel, strict=True)]
    return replace(problem, usage=usage)


SLOWER = (  # communication, than in the costs
    Scenario("communication x2", lambda problem: problem.slower(2.0)),
    Scenario("communication x3", lambda problem: problem.slower(3.0)),
)
SCENARIOS = (  # the costs themselves come first
    Scenario("as said", lambda problem: problem),
    *SLOWER,
    Scenario("40% noise", _noisy),
    Scenario("shared link", _shared),
)
