"""What the overlap pass did, and why: values, and their text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

INPUT = "the input order"


class Deferred(Sequence[Any]):
    """Rows that are computed at the first access; equal to any sequence of the same rows."""

    __slots__ = ("_make", "_rows")

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make: Callable[[], Iterable[Any]] | None = make
        self._rows: tuple[Any, ...] = ()

    def rows(self) -> tuple[Any, ...]:
        if self._make is not None:
            self._rows, self._make = tuple(self._make()), None
        return self._rows

    def __getitem__(self, index: Any) -> Any:
        return self.rows()[index]

    def __len__(self) -> int:
        return len(self.rows())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self.rows() == tuple(other)

    def __hash__(self) -> int:
        return hash(self.rows())

    def __repr__(self) -> str:
        return repr(self.rows())

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.rows(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """A collective of the result. `exposed_seconds` is the time in which the compute stream waits for it, and `reason`
    says why."""

    name: str
    op: str
    group: str
    bytes: float
    seconds: float
    exposed_seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge that was taken, with the seconds of communication that it saves, or a rejected merge, and why."""

    names: tuple[str, ...]
    is_taken: bool
    reason: str
    saved_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CandidateRow:
    """An order that was judged: seconds by scenario, the nominal costs first."""

    name: str
    seconds: tuple[tuple[str, float], ...]
    peak_bytes: int
    is_chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapReport:
    """Seconds and bytes of a graph before and after, under the nominal costs. `bound_seconds` is a lower bound for all
    orders, merged or not. Exposed is the time in which communication runs and the compute stream is idle."""

    seconds_before: float
    seconds: float
    exposed_before: float
    exposed_seconds: float
    bound_seconds: float
    peak_before: int
    peak_bytes: int
    cap_bytes: int
    regret: float
    collectives: Sequence[CollectiveRow] = ()
    merges: Sequence[Merge] = ()
    candidates: tuple[CandidateRow, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def speedup(self) -> float:
        return self.seconds_before / self.seconds if self.seconds else 1.0

    def left(self, reason: str) -> OverlapReport:
        """A report of a graph whose order is unchanged, with the reason."""
        return replace(
            self,
            seconds=self.seconds_before,
            exposed_seconds=self.exposed_before,
            peak_bytes=self.peak_before,
            collectives=(),
            merges=(),
            candidates=tuple(replace(c, is_chosen=c.name == INPUT) for c in self.candidates),
            notes=(*self.notes, f"{reason}: it stays as it was"),
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, num_rows: int = 12) -> list[str]:
        """The report as text: totals, the most exposed collectives, merges, candidates."""
        taken_merges = [m for m in self.merges if m.is_taken]
        exposed = sorted((c for c in self.collectives if c.exposed_seconds > 0), key=lambda c: -c.exposed_seconds)
        text = [
            f"step      {_ms(self.seconds_before)} -> {_ms(self.seconds)} ({self.speedup:.2f}x), "
            f"no order is below {_ms(self.bound_seconds)}",
            f"exposed   {_ms(self.exposed_before)} -> {_ms(self.exposed_seconds)}, "
            f"{len(exposed)} of {len(self.collectives)} collectives",
            f"peak      {_gb(self.peak_before)} -> {_gb(self.peak_bytes)}, cap {_gb(self.cap_bytes)}",
            f"merged    {sum(len(m.names) for m in taken_merges)} collectives into {len(taken_merges)}, "
            f"{_ms(sum(m.saved_seconds for m in taken_merges))} of communication saved",
            f"regret    {self.regret:.1%} at worst over the scenarios",
        ]
        if exposed:
            text += ["", "exposed:"]
            text += [
                f"  {_ms(c.exposed_seconds):>10}  {c.op} {c.name} ({c.group}): {c.reason}" for c in exposed[:num_rows]
            ]
        if refused := [m for m in self.merges if not m.is_taken]:
            text += ["", "not merged:"]
            text += [f"  {' + '.join(m.names)}: {m.reason}" for m in refused[:num_rows]]
        text += ["", "candidates:"]
        for c in self.candidates:
            more = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in c.seconds)
            text.append(f"  {'*' if c.is_chosen else ' '} {c.name}: {more}, peak {_gb(c.peak_bytes)}")
        return [*text, *(f"note: {note}" for note in self.notes)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.3f} GB"
