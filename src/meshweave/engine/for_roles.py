"""A schedule of pipeline ranks for the roles of a program: who runs what, with what a step runs once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshweave.engine.actions import Action, Actions, Schedule, sequential
from meshweave.engine.match import devices_text
from meshweave.engine.sections import PASSES, Kind, Sections, sections_of_roles
from meshweave.errors import PlanError
from meshweave.ir.rank import RankGraph

# What to do if a plan or a model has other stages than a schedule.
OTHER_STAGES = (
    'pipeline="best" takes the stages as they are; or plan=mw.Plan.stages(AXIS), without Plan.on and mw.on, gives each '
    "index of the axis the stages of the schedule"
)
_LAST: tuple[Kind, ...] = ("backward", "weight")  # the end of a stage's backward


def scheduled(
    roles: Sequence[RankGraph], pipeline: Schedule | None, microbatches: int
) -> tuple[tuple[Sections, ...], Schedule]:
    """The sections of the roles of a program, and what each role does in a step: the actions of a schedule of pipeline
    ranks, or, without one, those of microbatches that come one after the other."""
    if pipeline is None:
        sections = sections_of_roles(roles)
        return sections, sequential(sections, microbatches)
    has_parts = any(action.name in ("input", "weight") for actions in pipeline.of_role for action in actions)
    sections = sections_of_roles(roles, is_pipeline=True, has_parts=has_parts)
    return sections, schedule_for_roles(pipeline, sections)


def schedule_for_roles(schedule: Schedule, sections: Sequence[Sections]) -> Schedule:
    """The actions of each role: those of the rank that has its stages. A stage gathers its parameters with its first
    forward and reduces its gradients with its last backward. After all passes stages tell each other the losses, and
    meet for what their gradients come to and for the update, in an environment of their own.

    Raises PlanError if no rank has the stages of a role, or none of the roles those of a rank."""
    of_roles = [its.stage_numbers for its in sections]
    ranks = schedule.stages_of_role
    for rank, stages in enumerate(ranks):
        if stages not in of_roles:
            raise _no_role(schedule, f"rank {rank} with stages {_text(stages)}", ranks, of_roles)
    of_role = []
    for its, stages in zip(sections, of_roles, strict=True):
        if stages not in ranks:
            where = devices_text(its.role.devices)
            raise _no_role(schedule, f"{where} with stages {_text(stages)}", ranks, of_roles)
        of_role.append(_with_rest(schedule.of_role[ranks.index(stages)], its, schedule.num_microbatches))
    return replace(schedule, of_role=tuple(of_role))


def _with_rest(passes: Actions, its: Sections, microbatches: int) -> Actions:
    own = [action for action in passes if action.name in PASSES]
    first = {action.stage: at for at, action in reversed([*enumerate(own)]) if action.name == "forward"}
    last = {action.stage: at for at, action in enumerate(own) if action.name in _LAST}
    kinds = set(its.kinds.values())
    actions = list[Action]()
    for at, action in enumerate(own):
        before: tuple[Kind, ...] = ("unshard",) if "unshard" in kinds and first.get(action.stage) == at else ()
        after: tuple[Kind, ...] = ("reduce",) if "reduce" in kinds and last.get(action.stage) == at else ()
        actions.append(replace(action, kinds=(*before, action.name, *after)))
    ends: tuple[Kind, ...] = ("tell", "report")
    actions += [Action((kind,), number) for kind in ends if kind in kinds for number in range(microbatches)]
    actions.append(Action(("total",), microbatches))
    actions.append(Action(("update",), microbatches))
    return tuple(actions)


def _no_role(
    schedule: Schedule, what: str, ranks: Sequence[tuple[int, ...]], of_roles: Sequence[tuple[int, ...]]
) -> PlanError:
    return PlanError(
        f"the stages of the plan are not those of schedule {schedule.name}",
        where=what,
        got=f"devices with stages {'; '.join(map(_text, dict.fromkeys(of_roles)))}",
        expected=f"devices with stages {'; '.join(map(_text, dict.fromkeys(ranks)))}",
        hint=OTHER_STAGES,
    )


def _text(stages: Sequence[int]) -> str:
    return ", ".join(map(str, stages)) or "none"
