"""The passes of a program, one after the other: what is asked for, the programs that are compared, and the proof that
the one that is taken still does what it did."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
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
from meshweave.passes.base import STAGES, CapturedProgram, MeshProgram, Pass, Report, Stage
from meshweave.rings import DecomposeReport, prove_rings
from meshweave.rows import SplitReport
from meshweave.schedule import OverlapReport
from meshweave.schedule.decide import NoOrderError
from meshweave.simulate.step import SimulateOptions, simulate_roles

Progress = Callable[[str], None]
AS_IT_IS = "as it is"  # the name of a program in which no ops are written anew


@dataclass(frozen=True, slots=True)
class Budget:
    """How long programs are tried beside the first. `agreed` makes what one process finds late the word of all of them,
    which call it together."""

    seconds: float = math.inf
    agreed: Callable[[bool], bool] = bool

    def is_over(self, began: float) -> bool:
        return self.seconds < math.inf and self.agreed(time.monotonic() - began > self.seconds)


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
    budget: Budget = Budget()

    def __post_init__(self) -> None:
        names = [one.name for one in self.passes]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise MeshweaveError("a pass is asked for twice", got=", ".join(twice), expected="each at most once")
        object.__setattr__(self, "passes", tuple(sorted(self.passes, key=lambda one: STAGES.index(one.stage))))

    def of(self, *stages: Stage) -> tuple[Pass[Any], ...]:
        return tuple(one for one in self.passes if one.stage in stages)

    def room(self, costs: Costs) -> int | None:
        """Bytes that a device may hold: the cap, else what the machine has; None where neither is known."""
        if self.memory_cap_bytes is not None:
            return self.memory_cap_bytes
        return None if costs.usable_bytes is None else int(costs.usable_bytes)

    def captured(self, program: CapturedProgram, costs: Costs, progress: Progress) -> StepGraph:
        """The step behind the passes over what is captured, each proven by itself."""
        for one in self.of("captured"):
            progress(one.name)
            program, _ = one.run(program, costs)
            verify_step(program.step)
        return program.step

    def expanded(self, roles: tuple[RankGraph, ...], costs: Costs) -> tuple[RankGraph, ...]:
        """Rank graphs behind the passes over what has just been expanded."""
        program = MeshProgram(roles)
        for one in self.of("expanded"):
            program, _ = one.run(program, costs)
            _verify(program)
        return program.roles


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to write a program. `seconds` are those of the simulated step, behind all passes; `reason` says why it
    has none."""

    name: str
    seconds: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.reason or f'{self.seconds * 1e3:,.3f} ms'}"


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
    variants: tuple[Variant, ...] = ()

    @property
    def splits(self) -> tuple[SplitReport, ...]:
        return self.reports.get("split", ())

    @property
    def rings(self) -> tuple[DecomposeReport, ...]:
        return self.reports.get("decompose", ())

    @property
    def overlap(self) -> tuple[OverlapReport, ...]:
        return self.reports.get("overlap", ())


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A program on its way through the passes; `written`: as it was before the passes that only order it; `unfit`: why
    it got no further."""

    name: str
    program: MeshProgram
    written: tuple[RankGraph, ...]
    reports: Mapping[str, tuple[Report, ...]] = field(default_factory=dict)
    unfit: NoOrderError | None = None

    def behind(self, one: Pass[MeshProgram], costs: Costs) -> Iterator[_Candidate]:
        """What becomes of it in a pass: with what that does and, if it is to be compared or does nothing, without.
        Raises VerifyError for what the pass did wrong."""
        if self.unfit is not None:
            yield self
            return
        try:
            tried = [self.after(other, *other.run(self.program, costs)) for other in one.alternatives]
        except NoOrderError as error:
            yield replace(self, unfit=error)
            return
        changed = [candidate for candidate in tried if candidate.program is not self.program]
        if not changed:
            yield tried[-1]
        elif one.is_compared:
            yield self
        yield from changed

    def after(self, one: Pass[MeshProgram], program: MeshProgram, reports: tuple[Report, ...]) -> _Candidate:
        _verify(program)
        said = {**self.reports, one.name: reports}
        if one.stage == "ordered":
            return replace(self, program=program, reports=said)
        name = self.name if program.roles is self.program.roles else _joined(self.name, one.label)
        return _Candidate(name, program, program.roles, said)


def _joined(name: str, label: str) -> str:
    return label if name == AS_IT_IS else f"{name}, {label}"


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
    began, untried = time.monotonic(), dict[str, Variant]()
    passes = pipeline.of("written", "ordered")
    for one in passes:
        _check_costs(one, roles, costs)
    program = MeshProgram(roles, placed, microbatches, pipeline.memory_cap_bytes, pipeline.keeps_gradients)
    candidates = [_Candidate(AS_IT_IS, program, roles)]
    for one in passes:
        progress(one.name)
        behind: list[_Candidate] = []
        for i, candidate in enumerate(candidates):
            if i and pipeline.budget.is_over(began):
                reason = f"not tried: {pipeline.budget.seconds:g} s were over"
                untried[candidate.name] = Variant(candidate.name, reason=reason)
            else:
                behind += candidate.behind(one, costs)
        candidates = behind
    chosen, variants = (
        _fastest(candidates, costs, pipeline.least_gain) if len(candidates) > 1 or untried else (candidates[0], ())
    )
    variants += tuple(untried.values())
    if chosen.unfit is not None:
        raise chosen.unfit
    optimized = Optimized(chosen.program.roles, roles, chosen.written, chosen.reports, chosen.name, variants)
    if optimized.roles is not roles:
        prove(placed, optimized)
    return optimized


def _check_costs(one: Pass[Any], roles: tuple[RankGraph, ...], costs: Costs) -> None:
    if not one.needs_costs:
        return
    if not isinstance(costs, MachineProfile):
        raise MeshweaveError(
            "to overlap communication with compute needs the costs of both",
            where=f"the pass '{one.name}'",
            got=type(costs).__name__,
            expected='a machine profile: profile="h100", another name or a file',
        )
    costs.check_mesh(roles[0].mesh)


def _fastest(candidates: list[_Candidate], costs: Costs, least_gain: float) -> tuple[_Candidate, tuple[Variant, ...]]:
    """The fastest candidate, the first of equals, and what each takes; its reports say of passes that others went
    through why it did not. Where none fits, the first. What is written anew has to be faster by `least_gain`."""
    assert isinstance(costs, MachineProfile)
    variants: list[Variant] = []
    for one in candidates:
        if one.unfit is not None:
            variants.append(Variant(one.name, reason="does not fit under the cap"))
            continue
        options = SimulateOptions(microbatches=one.program.microbatches)
        variants.append(Variant(one.name, simulate_roles(one.program.roles, costs, options).seconds))
    handicap = [1.0 if one.name == AS_IT_IS else 1.0 / (1.0 - least_gain) for one in variants]
    best = candidates[min(range(len(variants)), key=lambda i: (variants[i].reason, variants[i].seconds * handicap[i]))]
    reason = "the whole step is not faster with it: " + "; ".join(map(str, variants))
    others: dict[str, tuple[Report, ...]] = {}
    for one in candidates:
        for name, reports in one.reports.items():
            others.setdefault(name, tuple(report.left(reason) for report in reports))
    return replace(best, reports={**others, **best.reports}), tuple(variants)


def _verify(program: MeshProgram) -> None:
    for role in program.roles:
        verify_rank(role)


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
