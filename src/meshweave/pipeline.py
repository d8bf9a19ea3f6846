"""Which schedule the stages of a step follow: what the caller asked for, for the stages that the step has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from meshweave.cost.hardware import Costs, MachineProfile
from meshweave.cost.simulate.stages import costs_of_stages
from meshweave.cost.simulate.step import default_fusion, peak_bytes_of_roles
from meshweave.cost.simulate.tasks import pair_turns
from meshweave.engine.actions import Schedule
from meshweave.engine.for_roles import OTHER_STAGES, scheduled
from meshweave.engine.match import devices_text
from meshweave.engine.order import action_order
from meshweave.engine.pairs import PairKey, PairTurns
from meshweave.engine.schedules import (
    SCHEDULES,
    ActivationMemory,
    ScheduleSearch,
    best_schedule,
    load_schedule,
    make_schedule,
    place_stages,
    prove_schedule,
    stage_times,
)
from meshweave.engine.schedules.form import ranks_of_stages
from meshweave.engine.sections import PASSES, Sections, sections_of_roles
from meshweave.errors import PlanError, near_miss
from meshweave.ir.graph import origin_of
from meshweave.ir.liveness import peak_bytes
from meshweave.ir.rank import RankGraph

_TRIES = 6  # searches for a schedule under a cap
BEST = "best"  # the fastest that a search finds, in the memory of 1f1b or under a cap
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
        if argument in SCHEDULES or argument == BEST:
            return PipelineChoice(argument)
        raise PlanError(
            "unknown pipeline schedule",
            where="pipeline=",
            got=repr(argument),
            expected=f"{BEST}, {', '.join(SCHEDULES)}, a .csv file or a Schedule",
            hint=f"did you mean {near_miss(str(argument), (BEST, *SCHEDULES))}?",
        )

    @property
    def needs_times(self) -> bool:
        """Whether the schedule depends on how long stages take."""
        return self.schedule is None and self.name in (BEST, "zb-1p", "zb-2p")

    def ranks_of_stages(self, size: int) -> Sequence[int]:
        """The index of each stage on an axis of this size, where the plan leaves it open. Raises PlanError if the
        schedule has another number of ranks."""
        if self.schedule is None:
            family = SCHEDULES.get(self.name)  # best: none
            count = 1 if family is None else family.stages_per_rank or 2
            return place_stages(size, count, "v" if family is not None and family.placement == "v" else "looped")
        ranks = len(self.schedule.of_role)
        if ranks != size:
            raise PlanError(
                "a schedule of a pipeline has a rank for each index of the axis of its stages",
                where=f"pipeline={self.name}",
                got=f"a schedule for {ranks} ranks, and an axis of size {size}",
                expected=f"an axis of size {ranks}",
                hint=f'mesh="pp={ranks}", or a schedule for {size} ranks',
            )
        rank_of = ranks_of_stages(self.schedule)
        return [rank_of[stage] for stage in sorted(rank_of)]

    def for_step(
        self,
        roles: Sequence[RankGraph],
        microbatches: int,
        costs: Costs | None = None,
        cap_bytes: int | None = None,
    ) -> Schedule:
        """The schedule of pipeline ranks for the stages of a step, on a machine of these costs, if they are known;
        `cap_bytes`: the most that a device may hold. Raises PlanError if the step has other stages than the schedule,
        and for a cap that no schedule meets, VerifyError if its stages cannot follow it."""
        sections = sections_of_roles(roles, is_pipeline=True)
        of_ranks = sorted({its.stage_numbers for its in sections})
        _check_apart(sections)
        if len(of_ranks) < 2:
            raise PlanError(
                "a pipeline needs stages on several devices",
                where=f"pipeline={self.name}",
                got="devices that all run the same, each microbatch on all of them",
                hint="a mesh axis pp, or a plan with Plan.stages, or layers on devices; or leave out pipeline=",
            )
        schedule = self.schedule or self._named(of_ranks, roles, microbatches, costs, cap_bytes)
        prove_schedule(schedule, microbatches=microbatches)
        sections, of_roles = scheduled(roles, schedule, microbatches)
        action_order(of_roles, sections)
        return schedule

    def _named(
        self,
        of_ranks: Sequence[tuple[int, ...]],
        roles: Sequence[RankGraph],
        microbatches: int,
        costs: Costs | None,
        cap_bytes: int | None,
    ) -> Schedule:
        """The schedule of this name. Without a machine profile all passes are taken to last equally long."""
        stages = sum(map(len, of_ranks))
        known = costs_of_stages(roles, costs) if self.needs_times and isinstance(costs, MachineProfile) else None
        times = stage_times(stages, 1.0, 1.0, 1.0) if known is None else known.times
        if self.name != BEST:
            per_rank, fixed = max(map(len, of_ranks)), SCHEDULES[self.name].stages_per_rank
            if fixed not in (None, per_rank):
                raise PlanError(
                    f"schedule {self.name} has a fixed number of stages per rank",
                    where=f"pipeline={self.name}",
                    got=f"devices with stages {'; '.join(', '.join(map(str, numbers)) for numbers in of_ranks)}",
                    expected=f"{fixed} for each device",
                    hint=OTHER_STAGES,
                )
            return make_schedule(self.name, len(of_ranks), microbatches, per_rank, times)
        rank_of = {stage: rank for rank, numbers in enumerate(of_ranks) for stage in numbers}
        placement = [rank_of[stage] for stage in range(stages)]
        search = partial(
            best_schedule,
            placement,
            microbatches,
            F=times.forward,
            B=times.input,
            W=times.weight,
            comm=times.comm,
            memory=None if known is None else known.memory,
        )
        if cap_bytes is None or known is None or not isinstance(costs, MachineProfile):
            return search().schedule
        return _best_under_cap(search, known.memory, of_ranks, roles, microbatches, costs, cap_bytes)


def _check_apart(sections: Sequence[Sections]) -> None:
    """Raise PlanError, with the op, if a microbatch comes back to devices whose stages it has passed: a stage is then
    on devices that have other stages beside it, or all devices have all stages."""
    home: dict[int, Sections] = {}
    of_ranks = {its.stage_numbers for its in sections}
    all_have_all = len(of_ranks) == 1 and max(map(len, of_ranks)) > 1
    for its in sorted(sections, key=lambda its: len(its.stage_numbers)):
        for stage in its.stage_numbers:
            other = home.setdefault(stage, its)
            if other.stage_numbers != its.stage_numbers or (all_have_all and other is not its):
                nodes = [node for node, kind in its.kinds.items() if kind in PASSES and its.stages[node] == stage]
                raise PlanError(
                    "a microbatch comes back to a stage that it has passed",
                    where=str(origin_of(nodes[0])),
                    got=f"an op of {devices_text(its.role.devices)} that stage {stage}, on "
                    f"{devices_text(other.role.devices)}, comes before",
                    expected="layers in a single chain of stages",
                    hint="leave out pipeline=, or place the layers of this line with those beside it (Plan.on)",
                )


def _best_under_cap(
    search: Callable[..., ScheduleSearch],
    memory: ActivationMemory,
    of_ranks: Sequence[tuple[int, ...]],
    roles: Sequence[RankGraph],
    microbatches: int,
    profile: MachineProfile,
    cap_bytes: int,
) -> Schedule:
    """The best schedule whose simulated peak is under the cap. What a rank has room for is first that of a step whose
    microbatches come one after the other; then less, as the schedule found exceeds it. PlanError if there is none."""
    stored, _ = memory.of_stages(sum(map(len, of_ranks)))
    rank_of_role = [of_ranks.index(its.stage_numbers) for its in sections_of_roles(roles, is_pipeline=True)]
    beside = [0.0] * len(of_ranks)
    for role, rank in enumerate(rank_of_role):
        own = peak_bytes(roles[role]) - sum(stored[number] for number in of_ranks[rank])
        beside[rank] = max(beside[rank], own)
    room = [max(0.0, cap_bytes - own) for own in beside]
    for _ in range(_TRIES):
        schedule = search(cap=room).schedule
        peaks = peak_bytes_of_roles(roles, profile, microbatches, schedule)
        if max(peaks) <= cap_bytes:
            return schedule
        for rank, peak in zip(rank_of_role, peaks, strict=True):
            if peak > cap_bytes:
                share = max(0.0, cap_bytes - beside[rank]) / (peak - beside[rank])
                room[rank] = min(room[rank] - (peak - cap_bytes), room[rank] * share)
    raise PlanError(
        "no schedule of the stages was found whose peak is under the memory cap",
        where="pipeline='best'",
        got=f"{max(peaks)} bytes; cap {cap_bytes}",
        expected=f"memory_cap_bytes={max(peaks)} or more",
        hint="smaller or more microbatches (accumulate=), or recompute",
    )


def turns_of_pairs(
    roles: Sequence[RankGraph], schedule: Schedule, microbatches: int, costs: Costs | None
) -> dict[PairKey, PairTurns]:
    """The turns of pairs of actions; none without a machine profile, where they run one behind the other."""
    if not isinstance(costs, MachineProfile):
        return {}
    return pair_turns(roles, costs, default_fusion(costs), schedule, microbatches)
