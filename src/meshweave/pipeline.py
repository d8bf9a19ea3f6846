"""Which schedule the stages of a step follow: what the caller asked for, for the stages that the step has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from meshweave.engine.actions import Schedule
from meshweave.engine.for_roles import scheduled
from meshweave.engine.order import action_order
from meshweave.engine.schedules.csv_files import load_schedule
from meshweave.engine.schedules.form import Placement, place_stages
from meshweave.engine.schedules.generators import SCHEDULES, make_schedule
from meshweave.engine.schedules.proof import prove_schedule
from meshweave.engine.sections import sections_of_roles
from meshweave.errors import PlanError, near_miss
from meshweave.ir.rank import RankGraph

PipelineArgument = str | Path | Schedule | None


@dataclass(frozen=True, slots=True)
class PipelineChoice:
    """A schedule that was asked for: by name (`SCHEDULES`), or `schedule` itself."""

    name: str
    schedule: Schedule | None = None

    @staticmethod
    def of(argument: PipelineArgument) -> PipelineChoice | None:
        """The argument `pipeline=`: a name, a .csv file, a Schedule; None or "sequential" for microbatches that pass
        all stages one after the other. PlanError for anything else."""
        if argument is None or argument == "sequential":
            return None
        if isinstance(argument, Schedule):
            prove_schedule(argument)
            return PipelineChoice(argument.name, argument)
        if isinstance(argument, Path) or (isinstance(argument, str) and argument.endswith(".csv")):
            return PipelineChoice.of(load_schedule(argument))
        if argument in SCHEDULES:
            return PipelineChoice(argument)
        raise PlanError(
            "unknown pipeline schedule",
            where="pipeline=",
            got=repr(argument),
            expected=f"{', '.join(SCHEDULES)}, a .csv file or a Schedule",
            hint=near_miss(str(argument), SCHEDULES),
        )

    @property
    def stages(self) -> tuple[int, str]:
        """How many stages each rank has, and in what order (`Plan.stages`), where the plan leaves it open."""
        if self.schedule is None:
            family = SCHEDULES[self.name]
            return family.stages_per_rank or 2, "v" if family.placement == "v" else "looped"
        of_ranks = self.schedule.stages_of_role
        count, rank_of = len(of_ranks[0]), {stage: rank for rank, stages in enumerate(of_ranks) for stage in stages}
        ranks = tuple(rank_of[stage] for stage in sorted(rank_of))
        orders: tuple[Placement, ...] = ("looped", "v")
        for order in orders:
            if ranks == place_stages(len(of_ranks), count, order):
                return count, order
        return 1, "looped"  # stages that a plan places by hand

    def for_step(self, roles: Sequence[RankGraph], microbatches: int) -> Schedule:
        """The schedule of pipeline ranks for the stages of a step. Raises PlanError if the step has other stages than
        the schedule, VerifyError if its stages cannot follow it."""
        of_ranks = sorted({its.stage_numbers for its in sections_of_roles(roles, is_pipeline=True)})
        if len(of_ranks) < 2:
            raise PlanError(
                "a pipeline needs stages on several devices",
                where=f"pipeline={self.name}",
                got="a step that all devices run together",
                hint="a mesh axis pp, or a plan with Plan.stages, or layers on devices; or leave out pipeline=",
            )
        schedule = self.schedule
        if schedule is None:
            schedule = make_schedule(self.name, len(of_ranks), microbatches, max(map(len, of_ranks)))
        prove_schedule(schedule, microbatches=microbatches)
        sections, of_roles = scheduled(roles, schedule, microbatches)
        action_order(of_roles, sections)
        return schedule
