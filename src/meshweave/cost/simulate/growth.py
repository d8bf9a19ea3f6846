"""A larger step from two smaller ones: of more microbatches, or of more equal layers, each of which adds the same."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from meshweave.cost.simulate.result import LiveTensor, RoleResult, Simulation, Span
from meshweave.cost.simulate.verdict import judged, memory_notes

_TOTALS = ("compute_seconds", "communication_seconds", "exposed_seconds", "idle_seconds")
_ROUNDING = 1e-9  # of the seconds of a step


class SpanPlace(NamedTuple):
    """What a span belongs to and is, in a model of any depth: equal for what two models have. `module` is None in
    layers between the first and the last ones."""

    module: str | None
    what: tuple[Any, ...]


PlaceOf = Callable[[Span], SpanPlace]


def is_steady(steps: Sequence[Simulation]) -> bool:
    """Whether three steps, each of them larger by the same, grow by the same: in seconds, in all and exposed."""
    of_all = ([step.seconds, *(role.exposed_seconds for role in step.roles)] for step in steps)
    rounding = _ROUNDING * steps[-1].seconds
    return all(abs((c - b) - (b - a)) <= rounding for a, b, c in zip(*of_all, strict=True))


def has_steady_pattern(steps: Sequence[Simulation], places: Sequence[PlaceOf]) -> bool:
    """Whether three models, each of them with a period of equal layers more, communicate more by the same: buckets of
    some bytes may merge the communications of each layer in another way."""
    low, middle, high = (_communications(step, place_of) for step, place_of in zip(steps, places, strict=True))
    return middle - low == high - middle and not (low - middle or middle - high)


def _communications(simulation: Simulation, place_of: PlaceOf) -> Counter[SpanPlace]:
    """The communications that belong to a module, by place."""
    return Counter(place_of(span) for span in simulation.spans if span.kind != "compute" and span.module)


def grown_figure(low: float, high: float, times: float) -> float:
    """A figure that grows from `low` to `high`, so many times more."""
    return high + times * (high - low)


def grown_roles(low: Simulation, high: Simulation, times: float) -> tuple[RoleResult, ...]:
    """The roles of a step that grows `times` more as it does from `low` to `high`: their totals and their peak. The
    tensors at the peak, and what memory is over time, are those of `high`."""
    return tuple(_role(a, b, times) for a, b in zip(low.roles, high.roles, strict=True))


def grown(low: Simulation, high: Simulation, times: float, roles: tuple[RoleResult, ...]) -> Simulation:
    """The step of these `roles` that grows `times` more as it does from `low` to `high`. Its spans are those of
    `high`."""
    seconds = grown_figure(low.seconds, high.seconds, times)
    flops = grown_figure(low.flops, high.flops, times)
    mfu = None if high.mfu is None else high.mfu * (flops / high.flops) / (seconds / high.seconds)
    return replace(high, seconds=seconds, roles=roles, flops=flops, mfu=mfu)


def deepened(
    steps: Sequence[Simulation], times: float, microbatches: int, places: Sequence[PlaceOf]
) -> Simulation | None:
    """The step of a model with more equal layers than the last of three `steps`, each of which has a period of them
    more than the one before: `times` periods more, judged by its own peak. The spans of a period stand for all these.

    `places` say of each step what a span belongs to. The peak is the largest of what memory comes to at the places that
    all have: with few layers another may be the largest than with many. None if the largest does not grow by the same.
    """
    _, low, high = steps
    roles = []
    for i, role in enumerate(grown_roles(low, high, times)):
        peak = _grown_peak(steps, i, times, places)
        if peak is None:
            return None
        a, b = low.roles[i], high.roles[i]
        roles.append(
            replace(
                role,
                peak_bytes=peak,
                reserved_bytes=peak + b.reserved_bytes - b.peak_bytes,
                persistent_bytes=round(grown_figure(a.persistent_bytes, b.persistent_bytes, times)),
                at_peak=_tensors(a.at_peak, b.at_peak, times),
            )
        )
    room = high.memory_bytes
    assert room is not None
    about_memory = memory_notes(high.roles, room)
    notes = tuple(note for note in high.notes if note not in about_memory)
    spans = _repeated(low.spans, high.spans, round(1 + times), places[1:])
    whole = replace(grown(low, high, times, tuple(roles)), verdict="", advice=(), notes=notes, spans=spans)
    return judged(whole, microbatches)


def _grown_peak(steps: Sequence[Simulation], role: int, times: float, places: Sequence[PlaceOf]) -> int | None:
    """The peak of a role with so many periods more. None where the place that is then the largest does not grow by the
    same in three steps, or where the peak is in a layer between the ends, and does not grow as the places there."""
    before, middle, after = (_peaks(step, step.roles[role], of) for step, of in zip(steps, places, strict=True))
    largest, rate = {True: 0, False: 0}, 0  # by whether it grows by the same
    for place in before.keys() & middle.keys() & after.keys():
        is_even = after[place] - middle[place] == middle[place] - before[place]
        peak = grown_bytes(middle[place], after[place], times)
        if peak > largest[is_even]:
            largest[is_even] = peak
            rate = after[place] - middle[place] if is_even else rate
    a, b, c = (step.roles[role].peak_bytes for step in steps)
    if c > max(after.values(), default=0):
        is_even = c - b in (b - a, rate)
        largest[is_even] = max(largest[is_even], grown_bytes(b, c, times))
    return largest[True] if largest[True] > largest[False] else None


def grown_bytes(low: int, high: int, times: float) -> int:
    return round(grown_figure(low, high, times))


def _role(low: RoleResult, high: RoleResult, times: float) -> RoleResult:
    totals: dict[str, Any] = {name: grown_figure(getattr(low, name), getattr(high, name), times) for name in _TOTALS}
    return replace(high, peak_bytes=grown_bytes(low.peak_bytes, high.peak_bytes, times), **totals)


def _repeated(low: Sequence[Span], high: Sequence[Span], times: int, places: Sequence[PlaceOf]) -> tuple[Span, ...]:
    """The spans of `high`: at every place the last of those that it has more than `low` stand for so many."""
    before = Counter(map(places[0], low))
    extra = Counter(map(places[1], high)) - before
    # one that only `high` has outside of the middle is larger with each layer: of the norms of all gradients
    extra = Counter({place: n for place, n in extra.items() if place.module is None or place in before})
    spans = list(high)
    for i in reversed(range(len(spans))):
        place = places[1](spans[i])
        if extra[place]:
            extra[place] -= 1
            spans[i] = replace(spans[i], repeats=spans[i].repeats * times)
    return tuple(spans)


def _peaks(simulation: Simulation, role: RoleResult, place_of: PlaceOf) -> Mapping[tuple[SpanPlace, int], int]:
    """The most bytes of a role during each of its kernels that has a place: by place, and the how many-th there."""
    times = [at for at, _ in role.memory]
    peaks, counts = dict[tuple[SpanPlace, int], int](), dict[SpanPlace, int]()
    for span in simulation.spans:
        place = place_of(span)
        if span.kind != "compute" or span.role != role.index or place.module is None:
            continue
        first, end = bisect_right(times, span.start) - 1, bisect_right(times, span.end)
        counts[place] = counts.get(place, 0) + 1
        peaks[place, counts[place]] = max((num_bytes for _, num_bytes in role.memory[max(first, 0) : end]), default=0)
    return peaks


def _tensors(low: Sequence[LiveTensor], high: Sequence[LiveTensor], times: float) -> tuple[LiveTensor, ...]:
    """The tensors at the peak, each with its twins in more layers."""
    before = {(live.kind, live.module, live.line): live for live in low}
    tensors = []
    for live in high:
        twin = before.get((live.kind, live.module, live.line))
        if twin is not None:
            size, count = (
                round(grown_figure(a, b, times)) for a, b in ((twin.bytes, live.bytes), (twin.count, live.count))
            )
            live = replace(live, bytes=size, count=count)
        tensors.append(live)
    return tuple(sorted(tensors, key=lambda live: (-live.bytes, live.name)))
