"""The passes of a program, one after the other: what is asked for, the programs that are compared, and the proof that
the one that is taken still does what it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshweave.check.completeness import Completeness, check_complete
from meshweave.check.deadlock import DeadlockFreedom, check_deadlock
from meshweave.check.same import check_same
from meshweave.errors import MeshweaveError, VerifyError
from meshweave.hardware import Costs, MachineProfile
from meshweave.ir.graph import StepGraph
from meshweave.ir.rank import RankGraph
from meshweave.ir.verify import verify_rank, verify_step
from meshweave.passes.base import STAGES, CapturedProgram, MeshProgram, Pass, Stage
from meshweave.passes.candidates import AS_IT_IS, Budget, ProgramVariant, Progress, run_passes
from meshweave.rings import DecomposeReport, prove_rings
from meshweave.rows import SplitReport
from meshweave.schedule import OverlapReport
from meshweave.schedule.decide import NoOrderError


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Passes, in the order of their stages and else as listed, and what holds for all of them.

    memory_cap_bytes: the most that a device may hold at once; keeps_gradients: those of a step live to its end.
    least_gain: what writes ops anew is taken if the step is simulated faster by this share of it at least.
    is_default: nobody asked for the passes over rank graphs, and where they cannot do with a program or its costs it
    stays as it is.
    """

    passes: tuple[Pass[Any], ...] = ()
    memory_cap_bytes: int | None = None
    keeps_gradients: bool = False
    least_gain: float = 0.0
    is_default: bool = False
    budget: Budget = field(default_factory=Budget)

    def __post_init__(self) -> None:
        names = [each_pass.name for each_pass in self.passes]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise MeshweaveError("a pass is asked for twice", got=", ".join(twice), expected="each at most once")
        object.__setattr__(
            self, "passes", tuple(sorted(self.passes, key=lambda each_pass: STAGES.index(each_pass.stage)))
        )

    def of(self, *stages: Stage) -> tuple[Pass[Any], ...]:
        return tuple(each_pass for each_pass in self.passes if each_pass.stage in stages)

    def having(self, each_pass: Pass[Any]) -> Pipeline:
        """The pipeline with a pass, in place of the one of its name."""
        return replace(self, passes=(each_pass, *(other for other in self.passes if other.name != each_pass.name)))

    def without(self, name: str) -> Pipeline:
        return replace(self, passes=tuple(one for one in self.passes if one.name != name))

    def room(self, costs: Costs) -> int | None:
        """Bytes that a device may hold: the cap, else what the machine has; None where neither is known."""
        if self.memory_cap_bytes is not None:
            return self.memory_cap_bytes
        return None if costs.usable_bytes is None else int(costs.usable_bytes)

    def captured(self, program: CapturedProgram, costs: Costs, progress: Progress) -> StepGraph:
        """The step behind the passes over what is captured, each proven by itself."""
        for each_pass in self.of("captured"):
            progress(each_pass.name)
            program, _ = each_pass.run(program, costs)
            verify_step(program.step)
        return program.step

    def expanded(self, roles: tuple[RankGraph, ...], costs: Costs) -> tuple[RankGraph, ...]:
        """Rank graphs behind the passes over what has just been expanded."""
        program = MeshProgram(roles)
        for each_pass in self.of("expanded"):
            before = program
            program, _ = each_pass.run(program, costs)
            program.verify(before)
        return program.roles


@dataclass(frozen=True, slots=True)
class Optimized:
    """A program's roles, and what they were before: as expanded, and as the scheduler got them (the same, where no ops
    were written anew). `reports`: by name of a pass what it did, per role, where it ran; `variants`: which ways to
    write the program were compared, where several were."""

    roles: tuple[RankGraph, ...]
    expanded: tuple[RankGraph, ...]
    unscheduled: tuple[RankGraph, ...]
    reports: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    name: str = AS_IT_IS
    variants: tuple[ProgramVariant, ...] = ()

    @property
    def splits(self) -> tuple[SplitReport, ...]:
        return self.reports.get("split", ())

    @property
    def rings(self) -> tuple[DecomposeReport, ...]:
        return self.reports.get("decompose", ())

    @property
    def overlap(self) -> tuple[OverlapReport, ...]:
        return self.reports.get("overlap", ())


def optimize(
    placed: StepGraph,
    roles: tuple[RankGraph, ...],
    costs: Costs,
    pipeline: Pipeline,
    microbatches: int = 1,
    progress: Progress = lambda stage: None,
) -> Optimized:
    """The roles of a program behind the passes over rank graphs, proven.

    What a pass does by gain is taken only if the whole step, behind all passes, is simulated faster and stays under the
    cap: of all variants the fastest is taken, the first of equals. Raises MeshweaveError for costs that the passes
    cannot do with, and NoOrderError where no variant is under the cap. Passes that nobody asked for leave the roles as
    they are in place of the first, and the name of the result says why.
    """
    if not pipeline.is_default:
        return _optimized(placed, roles, costs, pipeline, microbatches, progress)
    try:
        return _optimized(placed, roles, costs, pipeline, microbatches, progress)
    except (NoOrderError, VerifyError):
        raise
    except MeshweaveError as error:
        return Optimized(roles, roles, roles, name=f"{AS_IT_IS}: {error.what}")


def _optimized(
    placed: StepGraph,
    roles: tuple[RankGraph, ...],
    costs: Costs,
    pipeline: Pipeline,
    microbatches: int,
    progress: Progress,
) -> Optimized:
    passes = pipeline.of("written", "ordered")
    for each_pass in passes:
        _check_costs(each_pass, roles, costs)
    program = MeshProgram(roles, placed, microbatches, pipeline.memory_cap_bytes, pipeline.keeps_gradients)
    chosen, variants = run_passes(program, passes, costs, pipeline.least_gain, pipeline.budget, progress)
    written, done = chosen.written.roles, chosen.program.roles
    optimized = Optimized(done, roles, written, chosen.reports, chosen.name, variants)
    if optimized.roles is not roles:
        prove(placed, optimized)
    return optimized


def _check_costs(each_pass: Pass[Any], roles: tuple[RankGraph, ...], costs: Costs) -> None:
    if not each_pass.needs_costs:
        return
    if not isinstance(costs, MachineProfile):
        raise MeshweaveError(
            "to overlap communication with compute needs the costs of both",
            where=f"the pass '{each_pass.name}'",
            got=type(costs).__name__,
            expected='a machine profile: profile="h100", another name or a file',
        )
    costs.check_mesh(roles[0].mesh)


def prove(placed: StepGraph, optimized: Optimized) -> tuple[Completeness, DeadlockFreedom]:
    """Raise VerifyError for the first thing that a pass did wrong; else say what was proven of the program.

    Merged collectives and gathers of the next step are taken apart and back, and the step is replayed. Chunks are no
    form that the replay knows: there it is done on the roles as expanded; that all chunks of rings meet their places,
    and that the scheduler changed nothing but order and buckets, is proven by itself.
    """
    prologues = [role.prologue for role in optimized.roles if role.prologue is not None]
    for role in (*optimized.roles, *prologues):
        verify_rank(role)
    if optimized.unscheduled is optimized.expanded:
        complete = check_complete(placed, optimized.roles)
    else:
        complete = check_complete(placed, optimized.expanded)
        for before, after in zip(optimized.unscheduled, optimized.roles, strict=True):
            prove_rings(before)
            check_same(before, after)
    if prologues:
        check_deadlock(prologues)
    return complete, check_deadlock(optimized.roles)
