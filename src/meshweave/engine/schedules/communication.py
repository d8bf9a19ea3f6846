"""What a schedule of computation leaves open: when messages are sent and received, parameters gathered and gradients
reduced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from meshweave.engine.actions import Action, Actions, Schedule
from meshweave.engine.schedules.clock import TimedAction, pipeline_times, stage_times
from meshweave.engine.schedules.form import COMPUTE, RECEIVES, SENDS, groups_of, ranks_of_stages
from meshweave.engine.schedules.lowering import is_explicit
from meshweave.engine.schedules.memory import PerStage
from meshweave.engine.sections import Kind
from meshweave.errors import PlanError

Groups = list[tuple[Action, ...]]


def with_communication(
    schedule: Schedule, *, F: PerStage = 1.0, B: PerStage = 1.0, W: PerStage = 1.0, comm: PerStage = 1.0
) -> Schedule:
    """The schedule with its sends and receives, for times as in `pipeline_times`.

    Each send follows the action (or the pair) whose result it sends, before a reduction that was part of it. Each
    receive stands as late as it costs nothing: before the last action at whose begin, at these times, the message can
    still arrive before it is needed. (A receive that is posted earlier may block other communication of its rank.)
    Between two ranks, receives have the order of sends. The result never deadlocks, also where a receive blocks its
    rank, whatever the times turn out to be.

    Raises PlanError for a schedule that is not valid, or that has sends or receives."""
    if is_explicit(schedule):
        raise PlanError("a pipeline schedule has sends and receives of its own", where=f"schedule {schedule.name}")
    result = pipeline_times(schedule, F=F, B=B, W=W, comm=comm)
    latency = stage_times(schedule.num_stages, F, B, W, comm).comm
    rank_of = ranks_of_stages(schedule)
    groups = [list(groups_of(actions)) for actions in schedule.of_role]
    receives: list[dict[int, list[Action]]] = [defaultdict(list) for _ in groups]  # per rank and group: before it
    for rank, messages in enumerate(_messages_to_ranks(groups, rank_of)):
        begins, ends, index = _times_of_groups(groups[rank], result.of_rank[rank])
        for on_edge in messages.values():
            latest = len(groups[rank])
            for receive in reversed(on_edge):
                user = index["F" if receive.kinds == ("receive_forward",) else "B", receive.stage, receive.microbatch]
                hop = receive.stage - (receive.kinds == ("receive_forward",))
                at = user
                # Rounding must not move a receive: times are compared up to a billionth.
                while at > 0 and ends[at - 1] > begins[user] - latency[hop] + 1e-9 * begins[user]:
                    at -= 1
                latest = min(latest, at)
                receives[rank][latest].insert(0, receive)
    return Schedule(schedule.name, tuple(_merge(groups[r], receives[r], rank_of) for r in range(len(groups))))


def _messages_to_ranks(groups: Sequence[Groups], rank_of: dict[int, int]) -> list[dict[int, list[Action]]]:
    """For each rank and each that sends to it the receives, in the order of sends."""
    messages: list[dict[int, list[Action]]] = [defaultdict(list) for _ in groups]
    for rank, its in enumerate(groups):
        for group in its:
            for action in group:
                for kind, stage in _sends_of(action, rank_of):
                    receive: Kind = "receive_forward" if kind == "send_forward" else "receive_backward"
                    messages[rank_of[stage]][rank].append(Action((receive,), action.microbatch, stage))
    return messages


def _sends_of(action: Action, rank_of: dict[int, int]) -> Iterator[tuple[Kind, int]]:
    """The sends that follow an action, each with the stage that it goes to."""
    for kind in action.kinds:
        if kind == "forward" and rank_of.get(action.stage + 1, rank_of[action.stage]) != rank_of[action.stage]:
            yield "send_forward", action.stage + 1
        if (
            kind in ("backward", "input")
            and rank_of.get(action.stage - 1, rank_of[action.stage]) != rank_of[action.stage]
        ):
            yield "send_backward", action.stage - 1


def _times_of_groups(
    groups: Groups, timed: Sequence[TimedAction]
) -> tuple[list[float], list[float], dict[tuple[str, int, int], int]]:
    """Begin and end of each group of a rank, and which group uses what is received for a stage and microbatch."""
    begins, ends = [], []
    index: dict[tuple[str, int, int], int] = {}
    at = 0
    for number, group in enumerate(groups):
        begins.append(timed[at].begin_s)
        ends.append(timed[at].end_s)
        at += len(group)
        for action in group:
            for kind in action.kinds:
                if kind in ("forward", "backward", "input"):
                    index["F" if kind == "forward" else "B", action.stage, action.microbatch] = number
    return begins, ends, index


def _merge(groups: Groups, receives: dict[int, list[Action]], rank_of: dict[int, int]) -> Actions:
    result: list[Action] = []
    for number, group in enumerate(groups):
        result += receives.get(number, ())
        reductions: list[Action] = []
        for action in group:
            at = action.kinds.index("reduce") if "reduce" in action.kinds else 0
            if at:  # the next rank need not wait for the reduction
                reductions.append(replace(action, kinds=action.kinds[at:], with_next=False))
                action = replace(action, kinds=action.kinds[:at])
            result.append(action)
        for action in group:
            result += (Action((kind,), action.microbatch, action.stage) for kind, _ in _sends_of(action, rank_of))
        result += reductions
    return tuple(result)


def with_gathers(schedule: Schedule) -> Schedule:
    """The schedule with what each stage does once per step: its parameters are gathered (unshard) before its first
    action and the receives of that; behind its last action and the sends of that, gradients are reduced and parameters
    freed (reshard). A rank that has gathers, or reductions, of its own keeps them as they are."""
    of_role = []
    for actions in schedule.of_role:
        kinds: set[Kind] = {kind for action in actions for kind in action.kinds}
        groups = list(groups_of(actions))
        computes = [(at, a.stage) for at, group in enumerate(groups) for a in group if COMPUTE.intersection(a.kinds)]
        before: dict[int, list[Action]] = defaultdict(list)
        behind: dict[int, list[Action]] = defaultdict(list)
        for stage, at in {stage: at for at, stage in reversed(computes)}.items():
            if "unshard" not in kinds:
                before[_beyond(groups, at, RECEIVES, -1)].append(Action(("unshard",), stage=stage))
        for stage, at in {stage: at for at, stage in computes}.items():
            end = _beyond(groups, at, SENDS, 1)
            behind[end] += [Action(("reduce",), stage=stage)] if "reduce" not in kinds else []
            behind[end] += [Action(("reshard",), stage=stage)] if "unshard" not in kinds else []
        of_role.append(tuple(a for at, group in enumerate(groups) for a in (*before[at], *group, *behind[at])))
    return Schedule(schedule.name, tuple(of_role))


def _beyond(groups: Groups, at: int, kinds: Collection[Kind], step: int) -> int:
    """The last group from `at` on, in steps of 1 or -1, up to which all are of these kinds."""
    while 0 <= at + step < len(groups) and set(groups[at + step][0].kinds) <= set(kinds):
        at += step
    return at
