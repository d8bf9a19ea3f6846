"""Scenarios: machines that differ slightly from the costs; orders are also judged under them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from meshweave.cost.simulate.clock import Slowdown
from meshweave.optimize.overlap.model import Order, Problem
from meshweave.optimize.overlap.play import seconds_of

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


NOMINAL = Scenario("as said", lambda problem: problem)
SLOW = Scenario("communication x2", lambda problem: problem.slower(2.0))
SCENARIOS = (
    NOMINAL,
    SLOW,
    Scenario("communication x3", lambda problem: problem.slower(3.0)),
    Scenario("40% noise", _noisy),
    Scenario("shared link", _shared),
)
