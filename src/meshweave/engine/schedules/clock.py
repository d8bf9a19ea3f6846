"""The times of a pipeline schedule: when each action runs, how long a step takes, and why a rank waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import add

from meshweave.engine.actions import Action, Schedule
from meshweave.engine.schedules.form import ranks_of_stages, text_of
from meshweave.engine.schedules.lowering import (
    LoweredSchedule,
    Needs,
    ScheduleTask,
    is_explicit,
    lower_schedule,
    parts_of,
    run_tasks,
)
from meshweave.engine.schedules.memory import PerStage, peak_activations, per_stage
from meshweave.engine.schedules.proof import prove_schedule
from meshweave.engine.sections import Kind
from meshweave.errors import PlanError

_ROUNDING = 1e-9  # of a time: shorter gaps come from sums in another order


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of a microbatch on each stage. `input` and `weight` are the two parts of backward; `comm[h]` is the
    latency of a message between stages h and h + 1, in either direction, where they are on different ranks."""

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    comm: tuple[float, ...]

    @property
    def whole(self) -> tuple[float, ...]:
        """Per stage F, I and W together."""
        return tuple(map(sum, zip(self.forward, self.input, self.weight, strict=True)))


def stage_times(stages: int, F: PerStage, B: PerStage, W: PerStage, comm: PerStage = 0.0) -> StageTimes:
    """Times of `stages` stages from numbers for all, or a number for each (`comm`: for each hop).

    Raises PlanError for another number of values, negative ones, and stages that take no time at all."""
    hops = max(0, stages - 1)
    times = StageTimes(
        forward=per_stage("F", F, stages),
        input=per_stage("B", B, stages),
        weight=per_stage("W", W, stages),
        comm=per_stage("comm (a value per hop between two stages)", comm, hops),
    )
    if not sum(times.whole):
        raise PlanError("the stages of a pipeline take no time", got=f"F={F}, B={B}, W={W}", expected="seconds")
    return times


@dataclass(frozen=True, slots=True)
class TimedAction:
    """An action, and its begin and end in seconds from the step's begin. Actions that are scheduled as one have the
    same."""

    action: Action
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which a rank does nothing, before an action (None: after its last one, until the step ends).

    It waits for `source` of rank `source_rank` (None: for its parameters, at the end for reductions); during the last
    `message_s` of the gap that has ended and its message is under way."""

    rank: int
    begin_s: float
    end_s: float
    before: Action | None
    source: Action | None
    source_rank: int
    message_s: float = 0.0

    def __str__(self) -> str:
        what = f"before {text_of(self.before)}" if self.before else "at the end"
        message = f", {self.message_s:.6g} s of it for the message" if self.message_s else ""
        if self.source is None:
            whose = "its parameters" if self.before else "the last reduction of gradients"
            return f"rank {self.rank} waits {self.end_s - self.begin_s:.6g} s {what} for {whose}"
        return (
            f"rank {self.rank} waits {self.end_s - self.begin_s:.6g} s {what} for {text_of(self.source)} of rank "
            f"{self.source_rank}{message}"
        )


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """A schedule's times, see `pipeline_times`.

    `step_s`: until all ranks have ended, with a synchronous optimizer; the longest span without. `spans_s`: per rank
    from the begin of its first action to the end of its last. `busy_s`: per rank the seconds in which it computes.
    `links_s`: per rank when the last of its gathers and reductions has ended.
    `bubble_rate`: the share of the longest span in which a rank idles, in the mean over ranks; with equal stages this
    is 1 - m (F + B + W) / longest span (Qi et al., section 5.3). `peak_activations`: per rank, in microbatches of a
    stage."""

    step_s: float
    bubble_rate: float
    spans_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    links_s: tuple[float, ...]
    of_rank: tuple[tuple[TimedAction, ...], ...] = field(repr=False)
    gaps: tuple[Gap, ...] = field(repr=False)
    peak_activations: tuple[float, ...] = field(repr=False)

    def __str__(self) -> str:
        lines = [f"step {self.step_s:.6g} s, bubble rate {self.bubble_rate:.4f}"]
        for rank, (span, busy, peak) in enumerate(zip(self.spans_s, self.busy_s, self.peak_activations, strict=True)):
            longest = max((g for g in self.gaps if g.rank == rank), key=lambda g: g.end_s - g.begin_s, default=None)
            reason = f"; longest gap: {longest}" if longest else ""
            lines.append(f"rank {rank}: span {span:.6g} s, busy {busy:.6g} s, holds {peak:g} microbatches{reason}")
        return "\n".join(lines)


def pipeline_times(
    schedule: Schedule,
    *,
    F: PerStage,
    B: PerStage,
    W: PerStage,
    comm: PerStage = 0.0,
    blocking_messages: bool = False,
    synchronous: bool = True,
    overlapped: float = 1.0,
    more: Mapping[tuple[Kind, int, int], float] | None = None,
    gathers: PerStage = 0.0,
    reductions: PerStage = 0.0,
) -> PipelineTimes:
    """The times of a schedule, which is proven first.

    `F`, `B`, `W`: seconds of a microbatch on a stage, a number for all stages or one for each. As in the zero-bubble
    paper (Qi et al., ICLR 2024) **B is the input part of backward alone** (T_B), W the weight part: action I takes B
    seconds, action W takes W, and the whole backward, action B, takes B + W. With several stages per rank these are
    times of a stage, not of the rank. `comm`: seconds from the end of an action to the begin of the one on another rank
    that needs its result; a latency, messages do not queue. Where the schedule has receives, a message begins when both
    it is sent and its receive is posted. `blocking_messages`: a message keeps both its ranks from
    computing for `comm`, the sender behind its action, the receiver before its own (as where a trainer waits for every
    send and receive). `synchronous`: the optimizer begins when all ranks have ended;
    else each rank goes on by itself, as with the paper's post-validation, and a step takes the longest span.
    `overlapped`: time of a pair that is scheduled as one, as a share of the sum of both. `more`: seconds that a kind of
    action of a stage takes longer with a microbatch, (kind, stage, microbatch), as the first with its gathers.
    `gathers`, `reductions`: seconds of a rank's links for the parameters of a stage, before its first forward, and for
    its gradients, behind its last backward; stage after stage, beside what the rank computes, from the step's begin.

    Each rank runs its actions in order, each as soon as it can. Gathers and reductions that are not stated, and what a
    runtime adds, take no time. Raises PlanError if the schedule is not valid (`prove_schedule`), or for times that do
    not fit it."""
    _check_options(overlapped, synchronous, bool(gathers or reductions))
    prove_schedule(schedule)
    lowered = lower_schedule(schedule)
    times = stage_times(schedule.num_stages, F, B, W, comm)
    seconds = _seconds_of_tasks(lowered, times, overlapped, more or {})
    latency = [0.0 if blocking_messages else comm for comm in times.comm]
    needs = [[(n.task, 0.0 if n.hop is None else latency[n.hop]) for n in row] for row in lowered.needs]
    receives, sends = _seconds_of_messages(lowered, schedule, times if blocking_messages else None)
    own = [
        per_stage(name, its, schedule.num_stages) for name, its in (("gathers", gathers), ("reductions", reductions))
    ]
    links = _Links.of(lowered, needs, *own)
    orders, durations = (*lowered.orders, *links.orders), [*map(add, receives, seconds), *links.seconds]
    begins, ends, _ = run_tasks(orders, links.needs, durations, [*sends, *[0.0] * len(links.seconds)])
    of_links = tuple(max((ends[task] for task in order), default=0.0) for order in links.orders)
    gathered = {task: ends[gather] for task, gather in links.gathers.items()} | {-1: max(of_links)}
    begins, ends = begins[: len(seconds)], ends[: len(seconds)]
    begins = list(map(add, begins, receives))
    spans = tuple(ends[order[-1]] - begins[order[0]] if order else 0.0 for order in lowered.orders)
    busy = tuple(sum(seconds[task] for task in order) for order in lowered.orders)
    last = max(range(len(ends)), key=ends.__getitem__)
    return PipelineTimes(
        step_s=max(ends[last], *of_links) if synchronous else max(spans),
        bubble_rate=1 - sum(busy) / len(busy) / max(spans),
        spans_s=spans,
        busy_s=busy,
        of_rank=tuple(
            tuple(TimedAction(a, begins[i], ends[i]) for i in order for a in lowered.tasks[i].actions)
            for order in lowered.orders
        ),
        links_s=of_links,
        gaps=_gaps(lowered, times, (begins, ends, sends), last if synchronous else None, gathered),
        peak_activations=peak_activations(schedule),
    )


def _check_options(overlapped: float, synchronous: bool, has_links: bool) -> None:
    if not 0 < overlapped < float("inf"):
        raise PlanError(
            "a pair that is scheduled as one takes a share of its parts' time", got=f"overlapped={overlapped}"
        )
    if has_links and not synchronous:
        raise PlanError("gathers and reductions belong to a step with a synchronous optimizer", got="synchronous=False")


@dataclass(frozen=True, slots=True)
class _Links:
    """The gathers and reductions of stages as tasks, numbered behind those of the schedule: their seconds, their order
    on each rank's link, and the needs of all tasks."""

    seconds: tuple[float, ...]
    orders: tuple[tuple[int, ...], ...]
    needs: list[list[tuple[int, float]]]
    gathers: dict[int, int]  # of the tasks that wait for one that takes time

    @staticmethod
    def of(lowered: LoweredSchedule, needs: Needs, gathers: Sequence[float], reductions: Sequence[float]) -> _Links:
        all_needs, seconds, orders = [list(row) for row in needs], list[float](), list[tuple[int, ...]]()
        gather_of = dict[int, int]()
        for order in lowered.orders:
            first, last, own = dict[int, int](), dict[int, int](), list[int]()
            for task in order:
                for kind, stage, _ in parts_of(lowered.tasks[task]):
                    if kind == "forward":
                        first.setdefault(stage, task)
                    elif kind in ("backward", "weight"):
                        last[stage] = task
            for stage, task in first.items():
                all_needs[task].append((len(all_needs), 0.0))
                gather_of |= {task: len(all_needs)} if gathers[stage] else {}
                own.append(len(all_needs))
                all_needs.append([])
                seconds.append(gathers[stage])
            for stage, task in sorted(last.items(), key=lambda item: item[1]):
                own.append(len(all_needs))
                all_needs.append([(task, 0.0)])
                seconds.append(reductions[stage])
            orders.append(tuple(own))
        return _Links(tuple(seconds), tuple(orders), all_needs, gather_of)


def _seconds_of_tasks(
    lowered: LoweredSchedule, times: StageTimes, overlapped: float, more: Mapping[tuple[Kind, int, int], float]
) -> list[float]:
    of_kind = {"forward": times.forward, "input": times.input, "weight": times.weight}
    of_kind["backward"] = tuple(map(sum, zip(times.input, times.weight, strict=True)))
    result = []
    for task in lowered.tasks:
        parts = [part for part in parts_of(task) if part[0] in of_kind]
        whole = sum(of_kind[kind][stage] + more.get((kind, stage, number), 0.0) for kind, stage, number in parts)
        result.append(whole * overlapped if len(task.actions) > 1 else whole)
    return result


def _seconds_of_messages(
    lowered: LoweredSchedule, schedule: Schedule, times: StageTimes | None
) -> tuple[list[float], list[float]]:
    """How long a task's rank is busy with messages before the task, and behind it; nothing without `times`."""
    if times is None:
        return [0.0] * len(lowered.tasks), [0.0] * len(lowered.tasks)
    rank_of = ranks_of_stages(schedule)
    comm = [c if rank_of[hop] != rank_of[hop + 1] else 0.0 for hop, c in enumerate(times.comm)]
    # Hops of a stage are the one before it (-1) and the one behind it (0).
    received: Mapping[Kind, int] = {"forward": -1, "backward": 0, "input": 0}
    sent: Mapping[Kind, int] = {"send_forward": 0, "send_backward": -1}
    if not is_explicit(schedule):
        sent = {"forward": 0, "backward": -1, "input": -1}

    def total(task: ScheduleTask, hops: Mapping[Kind, int]) -> float:
        its = [stage + hops[kind] for kind, stage, _ in parts_of(task) if kind in hops]
        return sum(comm[hop] for hop in its if 0 <= hop < len(comm))

    return [total(task, received) for task in lowered.tasks], [total(task, sent) for task in lowered.tasks]


def _gaps(
    lowered: LoweredSchedule,
    times: StageTimes,
    runs: tuple[list[float], list[float], list[float]],
    last: int | None,
    links: Mapping[int, float],
) -> tuple[Gap, ...]:
    """Each time a rank does nothing. `runs`: begin and end of every task, and how long its sends take behind it;
    `last`: the task that ends last, which ranks wait for in the end. `links`: when the gather has ended that a task
    waits for, and for -1 the last gather or reduction of all."""
    begins, ends, sends = runs
    gaps: list[Gap] = []

    def add_gap(rank: int, begin: float, end: float, task: int | None, source: int, message: float) -> None:
        gaps.append(
            Gap(
                rank=rank,
                begin_s=begin,
                end_s=end,
                before=None if task is None else lowered.tasks[task].actions[0],
                source=lowered.tasks[source].actions[-1],
                source_rank=lowered.tasks[source].rank,
                message_s=message,
            )
        )

    for rank, order in enumerate(lowered.orders):
        free = 0.0
        for task in order:
            if begins[task] - free > _ROUNDING * begins[task]:
                needs = lowered.needs[task]
                arrivals = [ends[n.task] + (0.0 if n.hop is None else times.comm[n.hop]) for n in needs]
                if links.get(task, 0.0) > max(arrivals, default=0.0):  # it waits for its parameters
                    gaps.append(Gap(rank, free, begins[task], lowered.tasks[task].actions[0], None, rank))
                    free = ends[task] + sends[task]
                    continue
                last_of = arrivals.index(max(arrivals))
                message = min(arrivals[last_of] - ends[needs[last_of].task], begins[task] - free)
                add_gap(rank, free, begins[task], task, needs[last_of].task, message)
            free = ends[task] + sends[task]
        if last is not None and links[-1] > ends[last]:
            gaps.append(Gap(rank, free, links[-1], None, None, rank))
        elif last is not None and ends[last] - free > _ROUNDING * ends[last]:
            add_gap(rank, free, ends[last], None, last, 0.0)
    return tuple(gaps)
