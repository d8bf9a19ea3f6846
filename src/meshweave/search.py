"""The search among variants: what is tried and for how long, which candidate is taken, and why the others are not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

Gathered = Callable[[int], Sequence[int]]  # this process's number to those of all processes that compile together
T = TypeVar("T", bound="Timed")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
AS_IT_IS = "as it is"  # the name of what no variant has changed
_UNTRIED = "not tried"


def alone(number: int) -> Sequence[int]:
    return (number,)


@dataclass(frozen=True, slots=True)
class Budget:
    """How long further candidates are tried. `gathered` makes the time-out of a process that of all; all processes call
    it together."""

    seconds: float = math.inf
    gathered: Gathered = alone

    def is_over(self, began: float) -> bool:
        return self.seconds < math.inf and any(self.gathered(int(time.monotonic() - began > self.seconds)))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A candidate of a search. `seconds` is its simulated time; `reason` says why it has none."""

    name: str
    seconds: float = 0.0
    reason: str = ""

    @property
    def is_untried(self) -> bool:
        return self.reason.startswith(_UNTRIED)

    def __str__(self) -> str:
        return f"{self.name} {self.reason or f'{self.seconds * 1e3:,.3f} ms'}"


class Timed(Protocol):
    """What a search compares: `seconds` are infinite for what cannot run."""

    @property
    def name(self) -> str: ...

    @property
    def seconds(self) -> float: ...


@dataclass(kw_only=True)
class Search(Generic[T]):
    """The candidates that were tried, that without changes first, and those for which there was no time. `least_gain`:
    the share by which a candidate has to be faster than that without changes."""

    least_gain: float = 0.0
    budget: Budget = field(default_factory=Budget)
    began: float = field(default_factory=time.monotonic)
    tried: list[T] = field(default_factory=list)
    untried: list[Candidate] = field(default_factory=list)

    def has_time_for(self, name: str) -> bool:
        """Whether another candidate may be tried; if not, it is noted."""
        if not self.budget.is_over(self.began):
            return True
        self.untried.append(Candidate(name, reason=f"{_UNTRIED}: the {self.budget.seconds:g} s were used up"))
        return False

    def fastest(self) -> tuple[int, tuple[Candidate, ...], str]:
        """The index of the fastest candidate, the first of equals and where none can run; the rows of those tried; and
        why nothing of the others is taken."""
        rows = tuple(
            Candidate(each.name, each.seconds)
            if each.seconds < math.inf
            else Candidate(each.name, reason="does not fit under the cap")
            for each in self.tried
        )
        handicap = [1.0 if each.name == AS_IT_IS else 1.0 / (1.0 - self.least_gain) for each in self.tried]
        at = min(range(len(handicap)), key=lambda i: self.tried[i].seconds * handicap[i])
        return at, rows, "the program is not faster with it: " + "; ".join(map(str, rows))


def descend(
    start: Mapping[K, V],
    alternatives: Mapping[K, Sequence[V]],
    seconds: Callable[[Mapping[K, V]], float],
    least_gain_s: float = 0.0,
    rounds: int = 1,
) -> Mapping[K, V]:
    """Coordinate descent: for one key after the other the value that is fastest with the present values of the others,
    if it gains more than `least_gain_s`. It ends after a round that changes nothing."""
    chosen, best = start, seconds(start)
    for _ in range(rounds):
        before = best
        for key, values in alternatives.items():
            for value in (value for value in values if chosen.get(key) != value):
                candidate = {**chosen, key: value}
                if (took := seconds(candidate)) < best - least_gain_s:
                    chosen, best = candidate, took
        if best == before:
            break
    return chosen
