"""The actions of a pipeline schedule: their parts, their text, and what must have run before each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from meshweave.engine.actions import Action, Schedule
from meshweave.engine.sections import Kind
from meshweave.errors import PlanError

Placement = Literal["plain", "looped", "v"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)

# Kinds as torch.distributed.pipelining writes them (torch 2.13, pipelining/schedules.py, _ComputationType).
TORCH_NAMES: dict[Kind, str] = {
    "forward": "F", "backward": "B", "input": "I", "weight": "W", "unshard": "UNSHARD", "reshard": "RESHARD",
    "reduce": "REDUCE_GRAD", "send_forward": "SEND_F", "receive_forward": "RECV_F", "send_backward": "SEND_B",
    "receive_backward": "RECV_B",
}  # fmt: skip
COMPUTE: frozenset[Kind] = frozenset({"forward", "backward", "input", "weight"})
SENDS: frozenset[Kind] = frozenset({"send_forward", "send_backward"})
RECEIVES: frozenset[Kind] = frozenset({"receive_forward", "receive_backward"})
# What is no part of a microbatch: gathers and reductions of a stage's parameters and gradients.
OF_STAGE: frozenset[Kind] = frozenset({"unshard", "reshard", "reduce"})
# Kinds that a runtime adds to a proven schedule; the order of a pipeline does not depend on them.
OF_RUNTIME: frozenset[Kind] = frozenset({"tell", "report", "total", "update"})


def text_of(action: Action) -> str:
    """An action as torch's files write it: `3F5` is forward of stage 3 and microbatch 5. Several kinds that run
    together are joined by `+`."""
    return "+".join(_text(kind, action) for kind in action.kinds)


def _text(kind: Kind, action: Action) -> str:
    return f"{action.stage}{TORCH_NAMES.get(kind, kind)}" + ("" if kind in OF_STAGE else str(action.microbatch))


def groups_of(actions: Sequence[Action]) -> Iterator[tuple[Action, ...]]:
    """The actions of a rank in order; those that are scheduled as one (`with_next`) come together."""
    group: list[Action] = []
    for action in actions:
        group.append(action)
        if not action.with_next:
            yield tuple(group)
            group = []
    if group:
        yield tuple(group)


def ranks_of_stages(schedule: Schedule) -> dict[int, int]:
    """The rank of each stage that an action computes on. Raises PlanError for a stage on two ranks."""
    ranks: dict[int, int] = {}
    for rank, actions in enumerate(schedule.of_role):
        for action in actions:
            if COMPUTE.intersection(action.kinds) and ranks.setdefault(action.stage, rank) != rank:
                raise PlanError(
                    "a stage of a pipeline schedule is on two ranks",
                    where=f"{text_of(action)} of rank {rank}",
                    got=f"stage {action.stage} on rank {ranks[action.stage]} and on rank {rank}",
                    expected="all actions of a stage on a single rank",
                    hint=f"move the actions of stage {action.stage} to one of the two ranks",
                )
    return ranks


def place_stages(ranks: int, stages_per_rank: int, placement: Placement) -> tuple[int, ...]:
    """The rank of each of `ranks * stages_per_rank` stages.

    `plain`: consecutive stages on a rank. `looped`: stage s on rank s % ranks. `v`: ranks in turn, then in reverse
    order, so that where the direction turns two stages in a row are on one rank. Raises PlanError for another name."""
    if placement not in PLACEMENTS:
        raise PlanError("unknown placement of stages", got=repr(placement), expected=", ".join(PLACEMENTS))
    stages = range(ranks * stages_per_rank)
    if placement == "plain":
        return tuple(stage // stages_per_rank for stage in stages)
    if placement == "looped":
        return tuple(stage % ranks for stage in stages)
    return tuple(ranks - 1 - stage % ranks if stage // ranks % 2 else stage % ranks for stage in stages)
