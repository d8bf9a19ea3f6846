"""Properties of spans in reports: their class, the module with its layer number folded, and rows without overlapping
spans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from meshweave.cost.simulate.result import Simulation, Span

K = TypeVar("K")
COMPUTE_CLASSES = ("matmul", "attention", "memory", "host")
NANOSECONDS = 1e9  # per second; reports are rounded to whole nanoseconds


def class_of(span: Span) -> str:
    """`matmul`, `attention`, `memory` (every other kernel), `host` (starting or finishing a communication), or the op
    of a communication. Only matmuls and attention have flops in a Simulation; an attention is identified by its
    name."""
    if span.kind != "compute":
        return span.op
    if span.op in ("start", "wait"):
        return "host"
    if "attention" in span.op:
        return "attention"
    return "matmul" if span.flops > 0 else "memory"


@dataclass(frozen=True, slots=True)
class Sum:
    """Several spans: their number, seconds, exposed seconds, and the bytes that they receive or access."""

    count: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0
    bytes: float = 0.0

    def plus(self, span: Span) -> Sum:
        return Sum(
            self.count + span.repeats,
            self.seconds + span.seconds * span.repeats,
            self.exposed_seconds + span.exposed_seconds * span.repeats,
            self.bytes + span.bytes * span.repeats,
        )


def sums_by(spans: Iterable[Span], key: Callable[[Span], K]) -> dict[K, Sum]:
    """The spans of each key, in the order of their first appearance."""
    sums: dict[K, Sum] = {}
    for span in spans:
        sums[key(span)] = sums.get(key(span), Sum()).plus(span)
    return sums


def class_sums(spans: Iterable[Span]) -> dict[str, Sum]:
    """The spans of each class: kernels first, then communications by name."""
    sums = sums_by(spans, class_of)
    order = [*COMPUTE_CLASSES, *sorted(sums.keys() - {*COMPUTE_CLASSES})]
    return {name: sums[name] for name in order if name in sums}


def nanoseconds(seconds: float) -> int:
    return round(seconds * NANOSECONDS)


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of a timeline: spans of a role and stream that do not overlap, in order of time. `row` counts the lanes of
    a stream: rows above 0 contain spans for which earlier rows had no room."""

    role: int
    stream: str
    row: int
    spans: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.stream} ({self.row + 1})" if self.row else self.stream


def lanes_of(simulation: Simulation) -> tuple[Lane, ...]:
    """Every span on exactly one lane. Lanes are in order of role, then of `Simulation.streams`, then of row."""
    order = {stream: i for i, stream in enumerate(simulation.streams)}
    groups: dict[tuple[int, int, str], list[Span]] = {}
    for span in simulation.spans:
        place = (span.role, order.get(span.stream, len(order)), span.stream)
        groups.setdefault(place, []).append(span)
    lanes: list[Lane] = []
    for (role, _, stream), spans in sorted(groups.items()):
        rows = _rows(spans)
        lanes += [Lane(role, stream, i, tuple(row)) for i, row in enumerate(rows)]
    return tuple(lanes)


def _rows(spans: Sequence[Span]) -> list[list[int]]:
    """Each span in the first row that is free at its start, in whole nanoseconds."""
    rows: list[list[int]] = []
    ends: list[int] = []
    for span in sorted(spans, key=lambda s: (nanoseconds(s.start), nanoseconds(s.end), s.index)):
        begin, end = nanoseconds(span.start), nanoseconds(span.end)
        at = next((i for i, busy_until in enumerate(ends) if busy_until <= begin), len(rows))
        if at == len(rows):
            rows.append([])
            ends.append(0)
        rows[at].append(span.index)
        ends[at] = end
    return rows
