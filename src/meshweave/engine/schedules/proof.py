"""The proof of a schedule: complete, in an order that can run, messages that match; or an error that names the action.

Nothing is assumed about where a schedule comes from: generators, searches, files and users' lists are proven alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshweave.engine.actions import Action, Schedule
from meshweave.engine.schedules.form import (
    COMPUTE,
    OF_RUNTIME,
    OF_STAGE,
    RECEIVES,
    SENDS,
    groups_of,
    ranks_of_stages,
    text_of,
)
from meshweave.engine.schedules.lowering import (
    LoweredSchedule,
    PassPart,
    is_explicit,
    lower_schedule,
    parts_of,
    run_tasks,
)
from meshweave.engine.sections import Kind
from meshweave.errors import PlanError

_RECEIVE_OF: Mapping[Kind, Kind] = {"send_forward": "receive_forward", "send_backward": "receive_backward"}


@dataclass(frozen=True, slots=True)
class ScheduleProof:
    """What was proven. `ranks[s]` is the rank of stage s; `order` an order of all actions in which each rank keeps its
    own and everything that an action needs has run before it."""

    ranks: tuple[int, ...]
    num_microbatches: int
    order: tuple[tuple[int, Action], ...]


def prove_schedule(schedule: Schedule, stages: int | None = None, microbatches: int | None = None) -> ScheduleProof:
    """Prove that a schedule is right for any times of its actions.

    - Complete: every stage has F, and B or both I and W, exactly once for every microbatch, all on one rank. `stages`
    and
      `microbatches`: how many there have to be (default: as many as the schedule names).
    - Gathers: where a schedule gathers parameters (unshard, reshard), a stage computes only while it has them. Where it
      reduces gradients, the last reduction of a stage follows its last weight gradient.
    - Messages: where a schedule has sends or receives, each result that another rank needs is sent once and received
      once, and between two ranks the order of receives is that of sends.
    - Free of deadlock under the strictest runtime: a rank runs its actions one by one in order, a receive blocks it
    until
      the message has been sent, and messages from a rank to another arrive in the order of their sends. (Sends do not
      block: no schedule in which stages send to each other runs without a buffer.)

    Raises PlanError with the action, its rank, and what to do."""
    rank_of = ranks_of_stages(schedule)
    num_stages = max(schedule.num_stages, stages or 0)
    num_microbatches = max(schedule.num_microbatches, microbatches or 0)
    _check_numbers(schedule, stages, microbatches)
    _check_complete(schedule, rank_of, num_stages, num_microbatches)
    _check_gathers(schedule)
    if is_explicit(schedule):
        _check_messages(schedule, rank_of, num_stages, num_microbatches)
    lowered = lower_schedule(schedule)
    _check_own_order(lowered)
    order = _common_order(lowered)
    whole = [(lowered.tasks[task].rank, action) for task in order for action in lowered.tasks[task].actions]
    return ScheduleProof(tuple(rank_of[stage] for stage in range(num_stages)), num_microbatches, tuple(whole))


def _places(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    """Each action with its rank and position."""
    for rank, actions in enumerate(schedule.of_role):
        for at, action in enumerate(actions):
            yield rank, at, action


def _where(rank: int, action: Action, at: int | None = None) -> str:
    return f"{text_of(action)} of rank {rank}" + ("" if at is None else f", its action number {at}")


def _check_numbers(schedule: Schedule, stages: int | None, microbatches: int | None) -> None:
    if not schedule.of_role:
        raise PlanError("a pipeline schedule without ranks", hint="give each rank its actions in order")
    for rank, actions in enumerate(schedule.of_role):
        if not any(COMPUTE.intersection(action.kinds) for action in actions):
            raise PlanError(
                "a rank of a pipeline schedule has no stage",
                where=f"rank {rank}",
                hint=f"give it a stage, or use a schedule for {len(schedule.of_role) - 1} ranks",
            )
        for group in groups_of(actions):
            numbers = [action.microbatch for action in group]
            if len(group) > 1 and (len({*numbers}) < len(group) or not all(COMPUTE & {*a.kinds} for a in group)):
                raise PlanError(
                    "actions that are scheduled as one compute on different microbatches",
                    where=_where(rank, group[0]),
                    got=", ".join(map(text_of, group)),
                    hint="with_next=False",
                )
        if actions[-1].with_next:
            raise PlanError("an action is to be scheduled as one with the next, but is the last",
                where=_where(rank, actions[-1], len(actions) - 1), hint="with_next=False")  # fmt: skip
    for rank, at, action in _places(schedule):
        for what, got, limit in (("stage", action.stage, stages), ("microbatch", action.microbatch, microbatches)):
            if got < 0 or (limit is not None and got >= limit):
                raise PlanError(
                    f"an action of a pipeline schedule names a {what} that there is not",
                    where=_where(rank, action, at),
                    got=f"{what} {got}",
                    expected=f"0 to {limit - 1}" if limit else "at least 0",
                    hint="remove the action" + (f", or use {got + 1} of them" if got > 0 else ""),
                )


def _check_complete(schedule: Schedule, rank_of: Mapping[int, int], stages: int, microbatches: int) -> None:
    """Every stage runs every part of every microbatch once."""
    first: dict[PassPart, int] = {}
    for rank, at, action in _places(schedule):
        for position, kind in enumerate(action.kinds):
            if kind in OF_STAGE or kind in OF_RUNTIME:
                continue
            is_repeated = kind in action.kinds[:position]
            if is_repeated or first.setdefault((kind, action.stage, action.microbatch), at) != at:
                raise PlanError(
                    "a pipeline schedule runs an action twice",
                    where=_where(rank, action, at),
                    got=f"also its action number {first[kind, action.stage, action.microbatch]}",
                    hint=f"remove one of the two {text_of(Action((kind,), action.microbatch, action.stage))}",
                )
    for stage in range(stages):
        if stage not in rank_of:
            raise PlanError(
                "no rank of a pipeline schedule holds a stage",
                where=f"stage {stage}",
                got=f"actions of stages {', '.join(map(str, sorted(rank_of)))}",
                expected=f"stages 0 to {stages - 1}",
                hint=f"add the actions of stage {stage} to a rank, or number stages from 0 without gaps",
            )
        for microbatch in range(microbatches):
            _check_parts({k for k in COMPUTE if (k, stage, microbatch) in first}, stage, microbatch, rank_of[stage])


def _check_parts(kinds: set[Kind], stage: int, microbatch: int, rank: int) -> None:
    """The parts of a microbatch on a stage: F, and B or both I and W."""
    if kinds in ({"forward", "backward"}, {"forward", "input", "weight"}):
        return
    expected: Sequence[Kind] = (
        ("forward", "input", "weight") if kinds & {"input", "weight"} else ("forward", "backward")
    )
    missing = [text_of(Action((kind,), microbatch, stage)) for kind in expected if kind not in kinds]
    if missing:
        raise PlanError(
            "a pipeline schedule lacks an action",
            where=f"{missing[0]} of rank {rank}",
            got=f"of stage {stage} and microbatch {microbatch}: " + (", ".join(sorted(kinds)) or "nothing"),
            expected="F and B, or F, I and W, once each",
            hint=f"add {' and '.join(missing)} to rank {rank}",
        )
    raise PlanError(
        "a pipeline schedule runs a backward both whole and in parts",
        where=f"stage {stage}, microbatch {microbatch}, rank {rank}",
        got=", ".join(sorted(kinds)),
        expected="B alone, or I and W",
        hint=f"remove {stage}B{microbatch}, or {stage}I{microbatch} and {stage}W{microbatch}",
    )


def _check_gathers(schedule: Schedule) -> None:
    """A stage's parameters are there when it computes, and its gradients are reduced when they are complete."""
    for rank, actions in enumerate(schedule.of_role):
        gathers = {action.stage for action in actions if "unshard" in action.kinds}
        there: set[int] = set()
        unreduced: dict[int, Action] = {}
        reduces = {action.stage for action in actions if "reduce" in action.kinds}
        for at, action in enumerate(actions):
            stage = action.stage
            for kind in action.kinds:
                fault = ""
                if kind == "unshard":
                    fault = "gathers parameters that are there" if stage in there else ""
                    there.add(stage)
                elif kind == "reshard":
                    fault = "" if stage in there else "frees parameters that are not gathered"
                    there.discard(stage)
                elif kind in COMPUTE:
                    fault = "computes without its parameters" if stage in gathers - there else ""
                if fault:
                    raise PlanError(
                        f"a stage {fault}",
                        where=_where(rank, action, at),
                        hint=f"put {stage}UNSHARD before and {stage}RESHARD behind the actions that need them",
                    )
                if kind == "reduce":
                    unreduced.pop(stage, None)
                elif kind in ("backward", "weight"):
                    unreduced[stage] = action
        for stage in sorted(reduces & unreduced.keys()):
            raise PlanError(
                "a weight gradient comes after the last reduction of its stage, and would be lost",
                where=_where(rank, unreduced[stage]),
                hint=f"move {stage}REDUCE_GRAD behind it",
            )


def _check_messages(schedule: Schedule, rank_of: Mapping[int, int], stages: int, microbatches: int) -> None:
    """Each result that another rank needs is sent and received once, in one order."""
    expected: dict[PassPart, int] = {}
    for stage in range(stages - 1):
        if rank_of[stage] != rank_of[stage + 1]:
            for m in range(microbatches):
                expected["send_forward", stage, m] = expected["receive_backward", stage, m] = rank_of[stage]
                expected["receive_forward", stage + 1, m] = expected["send_backward", stage + 1, m] = rank_of[stage + 1]
    sent: dict[tuple[int, int], list[PassPart]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[PassPart, Action]]] = defaultdict(list)
    for rank, at, action in _places(schedule):
        for kind in action.kinds:
            part = (kind, action.stage, action.microbatch)
            if kind not in SENDS | RECEIVES:
                continue
            if expected.pop(part, None) != rank:
                raise PlanError(
                    "a message that no other rank needs, or on a rank that does not hold its stage",
                    where=_where(rank, action, at),
                    got=f"stage {action.stage} is on rank {rank_of.get(action.stage, '(none)')}",
                    expected="a send or receive between two neighbouring stages on different ranks",
                    hint="remove it, or move it to the rank of its stage",
                )
            peer_stage = action.stage + (1 if kind in ("send_forward", "receive_backward") else -1)
            if kind in SENDS:
                sent[rank, rank_of[peer_stage]].append((_RECEIVE_OF[kind], peer_stage, action.microbatch))
            else:
                received[rank_of[peer_stage], rank].append((part, action))
    for (kind, stage, m), rank in expected.items():
        raise PlanError(
            "a pipeline schedule lacks a send or a receive",
            where=_where(rank, Action((kind,), m, stage)),
            hint=f"add it to rank {rank}, or leave out all sends and receives: they are added",
        )
    for edge, parts in sent.items():
        for part, (got, action) in zip(parts, received[edge], strict=True):
            if got != part:
                wanted = Action((part[0],), part[2], part[1])
                raise PlanError(
                    "messages between two ranks are received in another order than they are sent",
                    where=_where(edge[1], action),
                    got=f"{text_of(action)}, where rank {edge[0]} sends for {text_of(wanted)}",
                    expected="the order of sends in every directed edge",
                    hint=f"receive {text_of(wanted)} before {text_of(action)}",
                )


def _check_own_order(lowered: LoweredSchedule) -> None:
    """What an action needs of its own rank comes before it there. (All that is needed is there: see above.)"""
    assert not lowered.absent, lowered.absent
    for number, needs in enumerate(lowered.needs):
        for need in needs:
            task, source = lowered.tasks[number], lowered.tasks[need.task]
            if task.rank == source.rank and need.task > number:
                raise PlanError(
                    "a pipeline schedule runs an action before one that it needs",
                    where=_where(task.rank, task.actions[0]),
                    got=f"{text_of(source.actions[0])} comes after it",
                    hint=f"move {text_of(source.actions[0])} before {text_of(task.actions[0])}",
                )


def _common_order(lowered: LoweredSchedule) -> list[int]:
    """All tasks in an order in which they can run, under the strictest runtime. PlanError with the cycle if none."""
    runs = {part: number for number, task in enumerate(lowered.tasks) for part in parts_of(task)}
    needs = [[(need.task, 0.0) for need in row] for row in lowered.needs]
    for (kind, stage, m), number in runs.items():
        if kind in _RECEIVE_OF:
            receive = (_RECEIVE_OF[kind], stage + (1 if kind == "send_forward" else -1), m)
            needs[runs[receive]].append((number, 0.0))
    begins, ends, num = run_tasks(lowered.orders, needs, [1.0] * len(needs))
    if num < len(needs):
        raise _deadlock(lowered, needs, lambda task: ends[task] >= 0)
    return sorted(range(len(needs)), key=lambda task: (begins[task], lowered.tasks[task].rank))


def _deadlock(
    lowered: LoweredSchedule, needs: Sequence[Sequence[tuple[int, float]]], has_run: Callable[[int], bool]
) -> PlanError:
    """The error with the shortest story: tasks at which ranks are stuck, each with what it waits for."""
    heads = {
        rank: stuck for rank, order in enumerate(lowered.orders) if (stuck := [t for t in order if not has_run(t)])
    }
    rank = min(heads)
    visited: list[int] = []
    while rank not in visited:
        visited.append(rank)
        waits = next(source for source, _ in needs[heads[rank][0]] if not has_run(source))
        rank = lowered.tasks[waits].rank
    cycle = visited[visited.index(rank) :]
    story = []
    for at in cycle:
        head = heads[at][0]
        waits = next(source for source, _ in needs[head] if not has_run(source))
        waited = lowered.tasks[waits]
        behind = heads[waited.rank][0]
        place = "" if behind == waits else f", which comes there after {text_of(lowered.tasks[behind].actions[0])}"
        story.append(
            f"{text_of(lowered.tasks[head].actions[0])} of rank {at} waits for {text_of(waited.actions[0])} of rank "
            f"{waited.rank}{place}"
        )
    return PlanError(
        "a pipeline schedule deadlocks: its ranks wait for each other",
        where=_where(cycle[0], lowered.tasks[heads[cycle[0]][0]].actions[0]),
        got="; ".join(story),
        expected="an order of all actions in which each comes after what it needs",
        hint="move one of these actions forward on its rank",
    )
