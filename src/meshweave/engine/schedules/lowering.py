"""A schedule as numbered tasks with dependencies, and the one order of time in which they run.

Every question about a schedule (can it run, how long does it take, what does a rank wait for) is asked of these tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshweave.engine.actions import Action, Schedule
from meshweave.engine.schedules.form import RECEIVES, SENDS, groups_of, ranks_of_stages
from meshweave.engine.sections import Kind


@dataclass(frozen=True, slots=True)
class TaskNeed:
    """What a task waits for: another task's end and, unless `hop` is None, a message after that. Hop h lies between
    stages h and h + 1."""

    task: int
    hop: int | None = None


@dataclass(frozen=True, slots=True)
class ScheduleTask:
    """Actions that begin together (a pair that is scheduled as one, else a single action) on a rank."""

    rank: int
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class LoweredSchedule:
    """`orders[r]` are the tasks of rank r in order. `absent` are parts that an action needs and nobody runs: as
    (task, kind, stage, microbatch)."""

    tasks: tuple[ScheduleTask, ...]
    orders: tuple[tuple[int, ...], ...]
    needs: tuple[tuple[TaskNeed, ...], ...]
    absent: tuple[tuple[int, Kind, int, int], ...]


PassPart = tuple[Kind, int, int]  # a kind of a stage and microbatch


def parts_of(task: ScheduleTask) -> Iterator[PassPart]:
    for action in task.actions:
        for kind in action.kinds:
            yield kind, action.stage, action.microbatch


def lower_schedule(schedule: Schedule) -> LoweredSchedule:
    """The tasks of a schedule. Raises PlanError if a stage is on two ranks."""
    rank_of = ranks_of_stages(schedule)
    last = max(rank_of, default=0)
    tasks: list[ScheduleTask] = []
    orders: list[tuple[int, ...]] = []
    for rank, actions in enumerate(schedule.of_role):
        begin = len(tasks)
        tasks += (ScheduleTask(rank, group) for group in groups_of(actions))
        orders.append(tuple(range(begin, len(tasks))))
    runs: dict[PassPart, int] = {}
    for number, task in enumerate(tasks):
        for part in parts_of(task):
            runs.setdefault(part, number)
    needs: list[tuple[TaskNeed, ...]] = []
    absent: list[tuple[int, Kind, int, int]] = []
    for number, task in enumerate(tasks):
        own: list[TaskNeed] = []
        for part in parts_of(task):
            for choices, hop in _needed(part, last, rank_of, runs):
                there = next((runs[each] for each in choices if each in runs), None)
                if there is None:
                    absent.append((number, *choices[0]))
                elif there != number:
                    own.append(TaskNeed(there, hop))
        needs.append(tuple(own))
    return LoweredSchedule(tuple(tasks), tuple(orders), tuple(needs), tuple(absent))


def _needed(
    part: PassPart, last: int, rank_of: Mapping[int, int], runs: Mapping[PassPart, int]
) -> Iterator[tuple[tuple[PassPart, ...], int | None]]:
    """What a part needs: for each need the parts of which one is enough, and the hop over which its result comes.

    Where a schedule has sends and receives, the message begins when it is sent and its receive is there; else when the
    part that it comes from has ended."""
    kind, stage, m = part
    backward: tuple[PassPart, ...] = (("backward", stage, m), ("input", stage, m))
    if kind in ("backward", "input"):
        yield (("forward", stage, m),), None
    elif kind == "weight":
        yield (("input", stage, m),), None
    elif kind == "send_forward":
        yield (("forward", stage, m),), None
    elif kind == "send_backward":
        yield backward, None
    if kind == "forward" and stage > 0:
        yield from _messages(part, stage - 1, rank_of, runs)
    if kind in ("backward", "input") and stage < last:
        yield from _messages(part, stage + 1, rank_of, runs)


def _messages(
    part: PassPart, source: int, rank_of: Mapping[int, int], runs: Mapping[PassPart, int]
) -> Iterator[tuple[tuple[PassPart, ...], int | None]]:
    kind, stage, m = part
    is_forward = kind == "forward"
    results: tuple[PassPart, ...] = (
        (("forward", source, m),) if is_forward else (("backward", source, m), ("input", source, m))
    )
    if rank_of.get(source) == rank_of.get(stage):
        yield results, None
        return
    send: PassPart = ("send_forward" if is_forward else "send_backward", source, m)
    receive: PassPart = ("receive_forward" if is_forward else "receive_backward", stage, m)
    yield (send, *results), min(stage, source)
    if receive in runs:
        yield (receive,), min(stage, source)


def is_explicit(schedule: Schedule) -> bool:
    """Whether a schedule says itself when messages are sent and received."""
    kinds = {kind for actions in schedule.of_role for action in actions for kind in action.kinds}
    return bool(kinds & (SENDS | RECEIVES))


Needs = Sequence[Sequence[tuple[int, float]]]  # for each task the tasks that it waits for, and seconds after their end


def run_tasks(
    orders: Sequence[Sequence[int]], needs: Needs, seconds: Sequence[float], after: Sequence[float] | None = None
) -> tuple[list[float], list[float], int]:
    """Begin and end of every task, and how many ran: each rank runs its tasks in order, each as soon as it can.

    `after`: seconds for which a task's rank is still busy once its result is there. A task that never runs has end -1:
    then there is no order of all tasks, whatever their seconds."""
    begins, ends = [-1.0] * len(seconds), [-1.0] * len(seconds)
    at, free = [0] * len(orders), [0.0] * len(orders)
    waiting: dict[int, list[int]] = {}  # by task: ranks that wait for it
    ready, ran = list(range(len(orders)))[::-1], 0
    while ready:
        rank = ready.pop()
        order, position, now = orders[rank], at[rank], free[rank]
        while position < len(order):
            task = order[position]
            begin = now
            for source, latency in needs[task]:
                end = ends[source]
                if end < 0:
                    waiting.setdefault(source, []).append(rank)
                    break
                if end + latency > begin:
                    begin = end + latency
            else:
                begins[task] = begin
                ends[task] = now = begin + seconds[task]
                if after is not None:
                    now += after[task]
                ran += 1
                position += 1
                if task in waiting:
                    ready += waiting.pop(task)
                continue
            break
        at[rank], free[rank] = position, now
    return begins, ends, ran
