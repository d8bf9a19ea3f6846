"""Runs the passes of a program in order, compares the candidates, and proves that the chosen program still does what
the original did."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshweave.check.completeness import Completeness, check_complete
from meshweave.check.deadlock import DeadlockFreedom, check_deadlock
from meshweave.check.same import check_same
from meshweave.cost.hardware import Costs, MachineProfile
from meshweave.cost.simulate.step import least_bytes_of_step, peak_bytes_of_step
from meshweave.errors import MeshweaveError, VerifyError
from meshweave.ir.graph import StepGraph
from meshweave.ir.rank import RankGraph
from meshweave.ir.verify import verify_rank, verify_step
from meshweave.optimize.batch_split import SplitReport
from meshweave.optimize.decompose import DecomposeReport, prove_rings
from meshweave.optimize.overlap import OverlapReport
from meshweave.optimize.overlap.decide import NoOrderError
from meshweave.optimize.prefetch.keep import KeepReport
from meshweave.passes.base import STAGES, CapturedProgram, MeshProgram, Pass, Stage, named
from meshweave.passes.candidates import Progress, run_passes
from meshweave.passes.table import GROUPS
from meshweave.report.tables import bytes_text
from meshweave.search import Budget, Candidate, Gathered


@dataclass(frozen=True, slots=True)
class PassList:
    """Passes, sorted by stage and then as listed, and the options common to all.

    memory_cap_bytes: the most that may be live on a device at once; keeps_gradients: gradients live to the end of a
    step. least_gain: a rewrite of ops is taken if the step simulates faster by at least this share.
    is_default: the caller did not ask for the passes over rank graphs; a program or costs that they do not support
    leave it unchanged. recalls: if given, the program of an earlier start with the same inputs is loaded (`stored.py`);
    all processes that compile together call it together.
    """

    passes: tuple[Pass[Any], ...] = ()
    memory_cap_bytes: int | None = None
    keeps_gradients: bool = False
    least_gain: float = 0.0
    is_default: bool = False
    budget: Budget = field(default_factory=Budget)
    recalls: Gathered | None = None

    def __post_init__(self) -> None:
        names = [each_pass.name for each_pass in self.passes]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise MeshweaveError("a pass is asked for twice", got=", ".join(twice), expected="each at most once")
        object.__setattr__(
            self, "passes", tuple(sorted(self.passes, key=lambda each_pass: STAGES.index(each_pass.stage)))
        )

    def of(self, *stages: Stage) -> tuple[Pass[Any], ...]:
        return tuple(each_pass for each_pass in self.passes if each_pass.stage in stages)

    def having(self, each_pass: Pass[Any]) -> PassList:
        """The list with this pass, in place of the pass of the same name."""
        return replace(self, passes=(each_pass, *(other for other in self.passes if other.name != each_pass.name)))

    def without(self, name: str) -> PassList:
        return replace(self, passes=tuple(each_pass for each_pass in self.passes if each_pass.name != name))

    def following(self, rewrites: Collection[Pass[Any]]) -> PassList:
        """The list for another size of a step that took these rewrites: of the passes that are compared, only they;
        without passes that take long it is not stored. Under a cap, which another size may exceed, all are compared."""
        if self.memory_cap_bytes is not None:
            return self
        taken = {each_pass.name: (each_pass,) for each_pass in rewrites}
        ways = (taken.get(each.name, ()) if each.is_compared else (each,) for each in self.passes)
        passes = tuple(each_pass for way in ways for each_pass in way)
        is_long = any(each_pass.stage in ("written", "ordered") for each_pass in passes)
        return replace(self, passes=passes, recalls=self.recalls if is_long else None)

    def room(self, costs: Costs) -> int | None:
        """Bytes available on a device: the cap, else the machine's memory; None if neither is known."""
        if self.memory_cap_bytes is not None:
            return self.memory_cap_bytes
        return None if costs.usable_bytes is None else int(costs.usable_bytes)

    def captured(self, program: CapturedProgram, costs: Costs, progress: Progress) -> StepGraph:
        """The step after the passes over the captured graph, each proven by itself."""
        for each_pass in self.of("captured"):
            progress(each_pass.name)
            program, _ = each_pass.run(program, costs)
            verify_step(program.step)
        return program.step

    def expanded(self, roles: tuple[RankGraph, ...], costs: Costs) -> tuple[RankGraph, ...]:
        """Rank graphs after the passes that run right after expansion."""
        program = MeshProgram(roles)
        for each_pass in self.of("expanded"):
            before = program
            program, _ = each_pass.run(program, costs)
            program.verify(before)
        return program.roles


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimized:
    """A program's roles, and earlier states of them: as expanded, and as the scheduler got them (the same if no ops
    were rewritten). `reports`: by name of a pass, its report for each role, if it ran; `rewrites`: the passes that
    changed values; `variants`: the variants that were compared, if there were several; `note`: why default passes left
    the roles unchanged."""

    roles: tuple[RankGraph, ...]
    expanded: tuple[RankGraph, ...]
    unscheduled: tuple[RankGraph, ...]
    reports: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    rewrites: tuple[Pass[Any], ...] = ()
    variants: tuple[Candidate, ...] = ()
    note: str = ""

    @property
    def name(self) -> str:
        return named(self.rewrites) + (f": {self.note}" if self.note else "")

    @property
    def keeps(self) -> tuple[KeepReport, ...]:
        return self.reports.get("keep", ())

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
    pass_list: PassList,
    microbatches: int = 1,
    progress: Progress = lambda stage: None,
) -> Optimized:
    """The roles of a program after the passes over rank graphs, proven.

    A pass that is taken by gain is kept only if the whole step, after all passes, simulates faster and stays under the
    cap: the fastest variant wins, the first of equals. Raises MeshweaveError for costs that the passes do not support,
    and NoOrderError if no variant is under the cap. Default passes leave the roles unchanged instead of the former
    error, and `note` gives the reason. They do so, too, asked for or not, if there is no cap and the step cannot fit
    the machine's memory, or fits only without them.
    """
    passes = pass_list.of("written", "ordered")
    program = MeshProgram(roles, microbatches, pass_list.memory_cap_bytes, pass_list.keeps_gradients)

    def unchanged(note: str) -> Optimized:
        return Optimized(roles=roles, expanded=roles, unscheduled=roles, note=note)

    try:
        for each_pass in passes:
            _check_costs(each_pass, roles, costs)
        if note := _why_none_searched(passes, roles, costs, pass_list):
            return unchanged(note)
        chosen, variants = run_passes(program, passes, costs, pass_list.least_gain, pass_list.budget, progress)
    except MeshweaveError as error:
        if not pass_list.is_default or isinstance(error, NoOrderError | VerifyError):
            raise
        return unchanged(error.what)
    optimized = Optimized(
        roles=chosen.program.roles,
        expanded=roles,
        unscheduled=chosen.written.roles,
        reports=chosen.reports,
        rewrites=chosen.rewrites,
        variants=variants,
    )
    if note := _why_none_taken(optimized, roles, costs, pass_list, microbatches):
        optimized = unchanged(note)
    if optimized.roles is not roles or pass_list.of("expanded"):
        prove(placed, optimized)
    return optimized


def _machine_of_default(pass_list: PassList, costs: Costs) -> MachineProfile | None:
    """The machine whose memory decides about default passes: without a cap, beside which an error has to name the least
    peak, and without other passes, of which nothing is known."""
    names = {each.name for each in pass_list.of("written", "ordered")}
    is_open = pass_list.memory_cap_bytes is None and names <= {*GROUPS["default"]}
    return costs if is_open and isinstance(costs, MachineProfile) else None


def _why_none_searched(
    passes: Collection[Pass[Any]], roles: tuple[RankGraph, ...], costs: Costs, pass_list: PassList
) -> str:
    """Why no pass is searched that would be compared: the step does not fit, whatever they do; "" if it may fit."""
    machine = _machine_of_default(pass_list, costs)
    if machine is None or not any(each.is_compared for each in passes):
        return ""
    least, room = least_bytes_of_step(roles, machine), int(machine.usable_bytes)
    if least <= room:
        return ""
    return (
        f"no pass was tried, because none can make the step fit: at least {bytes_text(least)} are live at once, on a "
        f"device with {bytes_text(room)}"
    )


def _why_none_taken(
    optimized: Optimized, roles: tuple[RankGraph, ...], costs: Costs, pass_list: PassList, microbatches: int
) -> str:
    """Why a step is as it was: only so it fits the machine's memory; "" if it does not matter.

    The scheduler counts every op's result, also those that a kernel never writes. Where even the step's own order is
    above the memory by that count, it allows as much as that order has, which may be too much."""
    machine = _machine_of_default(pass_list, costs)
    if machine is None:
        return ""
    room = int(machine.usable_bytes)
    if all(report.peak_bytes <= room for report in optimized.overlap):
        return ""
    after = peak_bytes_of_step(optimized.roles, machine, microbatches)
    if after <= room or peak_bytes_of_step(roles, machine, microbatches) > room:
        return ""
    return (
        f"no pass was taken, because only so the step fits: with the passes {bytes_text(after)} would be live at once, "
        f"on a device with {bytes_text(room)}"
    )


def _check_costs(each_pass: Pass[Any], roles: tuple[RankGraph, ...], costs: Costs) -> None:
    if not each_pass.needs_costs:
        return
    if not isinstance(costs, MachineProfile):
        raise MeshweaveError(
            "overlapping communication with compute needs the costs of both",
            where=f"the pass '{each_pass.name}'",
            got=type(costs).__name__,
            expected='a machine profile: profile="h100", another name or a file',
        )
    costs.check_mesh(roles[0].mesh)


def prove(placed: StepGraph, optimized: Optimized) -> tuple[Completeness, DeadlockFreedom]:
    """Raise VerifyError for the first fault of a pass; else return what was proven. Merged collectives are undone,
    and the step is replayed. The replay does not support chunks: then it runs on the expanded
    roles. Separate proofs show that all chunks of rings reach their places, and that the scheduler changed only order
    and buckets.
    """
    for role in optimized.roles:  # also those that a pass has edited without returning another
        verify_rank(role)
    if optimized.unscheduled is optimized.expanded:
        complete = check_complete(placed, optimized.roles)
    else:
        complete = check_complete(placed, optimized.expanded)
        for before, after in zip(optimized.unscheduled, optimized.roles, strict=True):
            prove_rings(before)
            check_same(before, after)
    return complete, check_deadlock(optimized.roles)
