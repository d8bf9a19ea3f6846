"""A pipeline's step from one of four short stages: each stage takes and holds what its layers do, by the same schedule.

The stages of the short pipeline are the first (with what comes before the layers), two between that differ in their
number of layers, and the last (with head and loss). It runs all forwards, then all backwards, so that what a microbatch
takes and holds shows on every stage. Figures of other stages are linear in their layers; the schedule's clock
(`engine.schedules.pipeline_times`) composes them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from meshweave.cost.simulate.result import LiveTensor, RoleResult, Simulation, Span
from meshweave.cost.simulate.verdict import judged, memory_notes
from meshweave.engine.actions import Action, Schedule
from meshweave.engine.schedules import ActivationMemory, PipelineTimes, StageTimes, peak_activations, pipeline_times
from meshweave.engine.sections import Kind

SHORT_SIZES = (2, 2, 4, 2)  # layers of the stages of the short pipeline
SHORT_MICROBATCHES = 4
_STEADY = 2  # a microbatch that is neither the first nor the last
_PASSES = ("forward", "backward", "input", "weight")


@dataclass(frozen=True, slots=True)
class StageFigures:
    """What a stage takes, in seconds: of a microbatch in `forward`, `backward` (its input part where it is split) and
    `weight`; `first` and `last`: how much longer the first forward and the last backward take with what is exposed of
    gathers and reductions, which take `gather` and `reduction` of the links; `total` and `update` at the end of a step.
    What of these is exposed communication: `exposed` of a microbatch, `exposed_ends` of `first` and `last`,
    `exposed_after` of `total` and `update`; `communication` is all of a microbatch.

    And what it holds, in bytes: `activation` of a microbatch from forward to backward, `persistent` all the time,
    `during` all microbatches beside their activations, and `at_update` at the end."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    first: float = 0.0
    last: float = 0.0
    gather: float = 0.0
    reduction: float = 0.0
    total: float = 0.0
    update: float = 0.0
    exposed: float = 0.0
    exposed_ends: float = 0.0
    exposed_after: float = 0.0
    communication: float = 0.0
    activation: float = 0.0
    persistent: float = 0.0
    during: float = 0.0
    at_update: float = 0.0

    def plus(self, other: StageFigures, times: float = 1.0) -> StageFigures:
        names = (each.name for each in fields(self))
        return StageFigures(**{name: getattr(self, name) + times * getattr(other, name) for name in names})

    def at_least_nothing(self) -> StageFigures:
        return StageFigures(**{each.name: max(0.0, getattr(self, each.name)) for each in fields(self)})


@dataclass(frozen=True, slots=True)
class PipelineHabits:
    """What a framework does in a pipeline: see `Framework.blocking_messages` and `gathers_ahead`."""

    blocking_messages: bool = False
    gathers_ahead: bool = False


@dataclass(frozen=True, slots=True)
class ShortPipeline:
    """What a short pipeline says: figures of any stage, a layer, the first and the last beside that; bytes that a stage
    needs for a moment beside what it holds, and that the allocator reserves beyond (first, between, last); bytes of the
    message of a microbatch between two stages, per device."""

    stage: StageFigures
    layer: StageFigures
    ends: tuple[StageFigures, StageFigures]
    moment: tuple[float, float, float]
    fragments: tuple[float, float, float]
    message_bytes: float

    def figures(self, number: int, sizes: Sequence[int]) -> StageFigures:
        """Those of a stage of a pipeline whose stages have so many layers."""
        figures = self.stage.plus(self.layer, sizes[number])
        figures = figures.plus(self.ends[0]) if number == 0 else figures
        figures = figures.plus(self.ends[1]) if number == len(sizes) - 1 else figures
        return figures.at_least_nothing()


def short_schedule(schedule: Schedule) -> Schedule:
    """All forwards, then all backwards of four stages, which are split where `schedule` splits them; by its name."""
    kinds = {kind for actions in schedule.of_role for action in actions for kind in action.kinds}
    backward: tuple[Kind, ...] = ("input", "weight") if "input" in kinds else ("backward",)
    numbers = range(SHORT_MICROBATCHES)
    return Schedule(
        schedule.name,
        tuple(
            (
                *(Action(("forward",), microbatch, stage) for microbatch in numbers),
                *(Action((kind,), microbatch, stage) for microbatch in numbers for kind in backward),
            )
            for stage in range(len(SHORT_SIZES))
        ),
    )


def read_short(simulation: Simulation) -> ShortPipeline:
    """The figures of a step of `short_schedule` whose stages have `SHORT_SIZES` layers and a role each."""
    readers = [_StageReader(simulation, number) for number in range(len(SHORT_SIZES))]
    first, low, high, last = (reader.figures() for reader in readers)
    few, many = SHORT_SIZES[1], SHORT_SIZES[2]
    layer = high.plus(low, -1.0)
    layer = StageFigures().plus(layer, 1 / (many - few))
    stage = low.plus(layer, -few)
    moments = [reader.moment() for reader in readers]
    fragments = [float(role.reserved_bytes - role.peak_bytes) for role in simulation.roles]
    sent = (
        span.bytes
        for span in simulation.spans
        if span.kind == "transfer" and (span.role, span.action, span.microbatch) == (1, "forward", _STEADY)
    )
    return ShortPipeline(
        stage=stage,
        layer=layer,
        ends=(
            first.plus(stage, -1).plus(layer, -SHORT_SIZES[0]),
            last.plus(stage, -1).plus(layer, -SHORT_SIZES[3]),
        ),
        moment=(moments[0], max(moments[1:3]), moments[3]),
        fragments=(fragments[0], max(fragments[1:3]), fragments[3]),
        message_bytes=sum(sent),
    )


class _StageReader:
    """Reads the figures of a stage, which a role alone has."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self.end = simulation.seconds
        self.role = simulation.roles[number]
        self.times = [at for at, _ in self.role.memory]
        self.spans: dict[tuple[str, int], list[Span]] = {}
        for span in simulation.spans:
            is_own = span.stage == number or span.action not in _PASSES
            if span.role == number and is_own and span.kind != "transfer":
                self.spans.setdefault((span.action, span.microbatch), []).append(span)

    def of(self, action: str, microbatch: int | None = None) -> list[Span]:
        numbers = range(SHORT_MICROBATCHES) if microbatch is None else (microbatch,)
        return [span for number in numbers for span in self.spans.get((action, number), ())]

    def figures(self) -> StageFigures:
        steady = [span for action in _PASSES for span in self.of(action, _STEADY)]
        forward, weight = (_seconds(self.of(action, _STEADY)) for action in ("forward", "weight"))
        behind = "input" if self.of("input") else "backward"
        backward = _seconds(self.of(behind, _STEADY))
        ends = [*self.of("forward", 0), *(s for a in _PASSES[1:] for s in self.of(a, SHORT_MICROBATCHES - 1))]
        at_end = [*self.of("total"), *self.of("update")]
        before = self.level(self.begin(behind, _STEADY))
        activation = self.activation
        first = _seconds(self.of("forward", 0)) - forward
        last = _seconds([s for a in _PASSES[1:] for s in self.of(a, SHORT_MICROBATCHES - 1)]) - backward - weight
        return StageFigures(
            forward=forward,
            backward=backward,
            weight=weight,
            first=first,
            last=last,
            gather=_busy(self.of("forward", 0), "prepare"),
            reduction=_busy([s for a in _PASSES[1:] for s in self.of(a, SHORT_MICROBATCHES - 1)], "reduce"),
            total=_seconds(self.of("total")),
            update=_seconds(self.of("update")),
            exposed=_exposed(steady),
            exposed_ends=_exposed(ends) - _exposed(steady),
            exposed_after=_exposed(at_end),
            communication=sum(span.seconds for span in steady if span.kind == "collective"),
            activation=activation,
            persistent=float(self.role.persistent_bytes),
            during=before - (SHORT_MICROBATCHES - _STEADY) * activation,
            at_update=self.most(min((span.start for span in at_end), default=self.end), self.end),
        )

    def moment(self) -> float:
        """Bytes beside what it holds, at most while a microbatch passes."""
        peaks = [0.0]
        for action in _PASSES:
            for number in range(1, SHORT_MICROBATCHES):
                spans = self.of(action, number)
                if spans:
                    begin = self.begin(action, number)
                    stays = self.activation if action == "forward" else 0.0
                    peaks.append(self.most(begin, max(s.end for s in spans)) - self.level(begin) - stays)
        return max(peaks)

    @property
    def activation(self) -> float:
        """Bytes that a microbatch leaves for backward: between the begins of two forwards."""
        first, second = (self.level(self.begin("forward", number)) for number in (_STEADY - 1, _STEADY))
        return second - first

    def begin(self, action: str, microbatch: int) -> float:
        """When its first kernel begins, before which nothing is freed."""
        return min(span.start for span in self.of(action, microbatch) if span.kind == "compute")

    def level(self, at: float) -> float:
        """Bytes just before."""
        return float(self.role.memory[max(0, bisect_left(self.times, at) - 1)][1])

    def most(self, begin: float, end: float) -> float:
        first = max(0, bisect_right(self.times, begin) - 1)
        last = bisect_left(self.times, end)
        return float(max((size for _, size in self.role.memory[first:last]), default=0))


def _seconds(spans: Sequence[Span]) -> float:
    """Of kernels, and of collectives that they wait for."""
    return sum(span.seconds for span in spans if span.kind == "compute") + _exposed(spans)


def _busy(spans: Sequence[Span], phase: str) -> float:
    """Of collectives in a phase."""
    return sum(span.seconds for span in spans if span.kind == "collective" and span.phase == phase)


def _exposed(spans: Sequence[Span]) -> float:
    return sum(span.exposed_seconds for span in spans if span.kind == "collective")


def compose(
    short: Simulation,
    sizes: Sequence[int],
    make_schedule: Callable[[StageTimes], Schedule],
    message_seconds: Callable[[int, float], float],
    devices: Sequence[Sequence[int]],
    habits: PipelineHabits,
) -> Simulation:
    """The step of a pipeline with so many layers in each stage, from the short one.

    `make_schedule` makes its schedule for times of its stages; `message_seconds(hop, bytes)` of a message from a stage
    to the next one; `devices` are those of each rank. Spans are its actions. Totals of the step in tokens and FLOPs are
    the short one's."""
    parts = read_short(short)
    stages = [parts.figures(number, sizes) for number in range(len(sizes))]
    comm = [message_seconds(hop, parts.message_bytes) for hop in range(len(sizes) - 1)]
    forward, backward, weight = (tuple(getattr(s, n) for s in stages) for n in ("forward", "backward", "weight"))
    schedule = make_schedule(StageTimes(forward, backward, weight, tuple(comm)))
    times = _times(schedule, stages, comm, habits)
    ranks = _ranks_of(schedule)
    ends = [max([links, *(a.end_s for a in own)]) for own, links in zip(times.of_rank, times.links_s, strict=True)]
    own_stages = [[stages[number] for number in numbers] for numbers in ranks]
    totals = [end + sum(s.total for s in own) for end, own in zip(ends, own_stages, strict=True)]
    seconds = max(totals) + max(sum(s.update for s in own) for own in own_stages)
    stored = peak_activations(schedule, ActivationMemory([s.activation for s in stages]))
    waits = _waits_for_links(times) if habits.gathers_ahead else [None for _ in ranks]
    of_step = len(sizes), schedule.num_microbatches, seconds
    roles = []
    for number, own in enumerate(zip(ranks, own_stages, strict=True)):
        once_s = _seconds_once_a_step(own[1], waits[number])
        roles.append(_role(parts, own, (number, devices[number]), of_step, once_s, stored[number]))
    room = short.memory_bytes
    assert room is not None
    about_memory = memory_notes(short.roles, room)
    return judged(
        replace(
            short,
            seconds=seconds,
            roles=tuple(roles),
            spans=_spans(times),
            edges=(),
            streams=("compute",),
            schedule=schedule.name,
            num_devices=sum(map(len, devices)),
            verdict="",
            advice=(),
            notes=tuple(note for note in short.notes if note not in about_memory),
        ),
        schedule.num_microbatches,
    )


def _times(
    schedule: Schedule, stages: Sequence[StageFigures], comm: Sequence[float], habits: PipelineHabits
) -> PipelineTimes:
    more, last = dict[tuple[Kind, int, int], float](), schedule.num_microbatches - 1
    for number, stage in enumerate(() if habits.gathers_ahead else stages):
        more["forward", number, 0] = stage.first
        more["backward", number, last] = more["weight", number, last] = stage.last
    return pipeline_times(
        schedule,
        F=[stage.forward for stage in stages],
        B=[stage.backward for stage in stages],
        W=[stage.weight for stage in stages],
        comm=comm,
        blocking_messages=habits.blocking_messages,
        more=more,
        gathers=[stage.gather for stage in stages] if habits.gathers_ahead else 0.0,
        reductions=[stage.reduction for stage in stages] if habits.gathers_ahead else 0.0,
    )


def _ranks_of(schedule: Schedule) -> list[list[int]]:
    """The stages of each rank."""
    return [sorted({action.stage for action in actions}) for actions in schedule.of_role]


def _waits_for_links(times: PipelineTimes) -> list[float]:
    """Seconds that each rank waits for its gathers before an action, and for its reductions behind the last one."""
    waits = [
        max(0.0, links - max((timed.end_s for timed in own), default=0.0))
        for own, links in zip(times.of_rank, times.links_s, strict=True)
    ]
    for gap in times.gaps:
        if gap.source is None and gap.before is not None:
            waits[gap.rank] += gap.end_s - gap.begin_s
    return waits


def _seconds_once_a_step(stages: Sequence[StageFigures], waits: float | None) -> tuple[float, float]:
    """Seconds of a rank once a step, in no microbatch of the middle, and how much of them is exposed communication.
    `waits`: seconds for gathers and reductions that run on links while stages compute; None: they run within the first
    forward and the last backward."""

    def total(*names: str) -> float:
        return sum(getattr(stage, name) for stage in stages for name in names)

    busy, exposed = (total("first", "last"), total("exposed_ends")) if waits is None else (waits, waits)
    return busy + total("total", "update"), max(0.0, exposed + total("exposed_after"))


def _role(
    parts: ShortPipeline,
    own: tuple[Sequence[int], Sequence[StageFigures]],
    place: tuple[int, Sequence[int]],
    of_step: tuple[int, int, float],
    once_s: tuple[float, float],
    stored: float,
) -> RoleResult:
    """A rank: the numbers and figures of its stages. `place`: its number and devices. `of_step`: the numbers of stages
    and microbatches, and the seconds of the step. `once_s`: see `_seconds_once_a_step`. `stored`: bytes of activations
    at most."""
    (numbers, stages), (num_stages, microbatches, seconds), (index, devices) = own, of_step, place
    ends = {0: 0, num_stages - 1: 2}
    places = [ends.get(number, 1) for number in numbers]
    moment, fragments = (max(figures[place] for place in places) for figures in (parts.moment, parts.fragments))

    def total(name: str) -> float:
        return sum(getattr(stage, name) for stage in stages)

    per_microbatch = total("forward") + total("backward") + total("weight")
    busy = microbatches * per_microbatch + once_s[0]
    exposed = microbatches * total("exposed") + once_s[1]
    passing, persistent = total("during") + stored + moment, total("persistent")
    peak = round(max(passing, total("at_update")))
    tensors: list[tuple[str, str, float]] = [
        ("parameters and optimizer state", "state", persistent),
        ("activations of microbatches", "activation", stored),
        ("gradients and gathered parameters", "grad", max(0.0, total("during") - persistent)),
        ("for a moment", "temporary", moment),
    ]
    return RoleResult(
        index=index,
        devices=tuple(devices),
        compute_seconds=busy - exposed,
        communication_seconds=microbatches * total("communication") + once_s[1],
        exposed_seconds=exposed,
        idle_seconds=max(0.0, seconds - busy),
        peak_bytes=peak,
        peak_at=0.0,
        reserved_bytes=round(peak + fragments),
        persistent_bytes=round(persistent),
        at_peak=tuple(
            sorted((LiveTensor(name, round(size), kind) for name, kind, size in tensors), key=lambda x: -x.bytes)
        ),
    )


def _spans(times: PipelineTimes) -> tuple[Span, ...]:
    spans: list[Any] = []
    for rank, actions in enumerate(times.of_rank):
        for timed in actions:
            action = timed.action
            spans.append(
                Span(
                    index=len(spans),
                    name=f"{action.name} of stage {action.stage}",
                    op=action.name,
                    kind="compute",
                    stream="compute",
                    role=rank,
                    start=timed.begin_s,
                    seconds=timed.end_s - timed.begin_s,
                    phase="forward" if action.name == "forward" else "backward",
                    microbatch=action.microbatch,
                    action=action.name,
                    stage=action.stage,
                )
            )
    return tuple(spans)


def layer_flops(short: Simulation) -> float:
    """FLOPs of the model's mathematics in a layer, forward and backward, of a microbatch on all devices."""
    of_role = [0.0] * len(SHORT_SIZES)
    for span in short.spans:
        if span.kind == "compute" and (span.action, span.microbatch) == ("forward", _STEADY):
            of_role[span.role] += 3.0 * span.flops * len(short.roles[span.role].devices)
    return (of_role[2] - of_role[1]) / (SHORT_SIZES[2] - SHORT_SIZES[1])
