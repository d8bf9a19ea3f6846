"""A compiled training step as data: its graphs, its placement, and its assumptions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from meshweave.capture.contract import Contract
from meshweave.capture.optimizers import OptimizerSpec
from meshweave.capture.step import CaptureOptions
from meshweave.cost.hardware import Costs
from meshweave.engine.actions import Schedule
from meshweave.engine.pairs import PairKey, PairTurns
from meshweave.ir.graph import StepGraph, op_name, origin_of
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph
from meshweave.optimize.overlap import OverlapReport
from meshweave.passes import Optimized, PassList
from meshweave.place.decide import Placement
from meshweave.place.plans import Resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """All that the stages after capture read: the captured step, the plan with its choices, and `lasting`, the
    placement whose state the program shares."""

    captured: StepGraph
    mesh: Mesh
    resolved: Resolved
    costs: Costs
    options: CaptureOptions
    pass_list: PassList
    lasting: Placement | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What the stages after capture make: the step after the passes over it, the placed and the rank graphs."""

    captured: StepGraph
    placed: StepGraph
    optimized: Optimized
    placement: Placement
    accumulation: str = ""  # where gradients of several microbatches are added up, and the reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Program(Planned):
    """A compiled training step at its three stages. Its size does not grow with the number of devices.

    `optimized` has the rank graphs before and after the passes.
    """

    options: CaptureOptions
    contract: Contract
    optimizer: OptimizerSpec | None = None
    sequence: str = ""  # in which order devices store pieces of a sequence, and the reason
    costs: Costs | None = None  # the costs that it was planned with
    costs_from: str = ""  # which costs these are, and where they come from
    recompute: str = "none"  # what backward recomputes, as in `mw.compile`
    resolved: Resolved | None = None  # the plan as parsed, with the choices for weights that it left open
    eager_update: str = ""  # why the optimizer's own step() runs, instead of a compiled update
    rows: frozenset[str] | None = None  # the entries that microbatches cut; None: those with as many rows as the first
    ahead: Program | None = None  # what microbatches need of the whole batch
    coupling: str = ""  # why the step on microbatches is not that on the whole batch
    pipeline: Schedule | None = None  # of the stages, if they work on several microbatches at a time
    pairs: Mapping[PairKey, PairTurns] = field(default_factory=dict)  # how actions that run as one take turns
    storage: str = ""  # why the program of an earlier start was of no use, or why this program could not be stored

    @property
    def roles(self) -> tuple[RankGraph, ...]:
        """The rank graph of every role."""
        return self.optimized.roles

    @property
    def expanded(self) -> tuple[RankGraph, ...]:
        """The roles before all passes."""
        return self.optimized.expanded

    @property
    def notes(self) -> tuple[str, ...]:
        """Decisions that no plan states: where gradients are added up, in which order a sequence is stored, why no
        collective is decomposed, why default passes did nothing; also what was wrong with the program on disk."""
        rings = dict.fromkeys(report.note for report in self.optimized.rings)
        of_batch = (self.coupling, self._ahead_text, self.accumulation, self.sequence)
        notes = (*of_batch, self.eager_update, self.storage, self.optimized.note, *rings)
        return tuple(note for note in notes if note)

    @property
    def _ahead_text(self) -> str:
        """What microbatches need of the whole batch."""
        if self.ahead is None:
            return ""
        values = self.ahead.captured.output_values
        shown = ", ".join(dict.fromkeys(f"{op_name(node.target)} at {origin_of(node)}" for node in values))
        return f"of the whole batch, computed once before the first microbatch: {shown}"

    @property
    def is_sum(self) -> bool:
        """Whether loss and metrics of a step are the sums of those of its microbatches; else their means."""
        return self.options.accumulate > 1 and not self.coupling

    @property
    def as_expanded(self) -> Program:
        """The program without any pass."""
        return replace(
            self, optimized=Optimized(roles=self.expanded, expanded=self.expanded, unscheduled=self.expanded)
        )

    @property
    def overlap(self) -> tuple[OverlapReport, ...]:
        """The scheduler's report for each role; empty if it did not run."""
        return self.optimized.overlap

    @property
    def mesh(self) -> Mesh:
        return self.placement.mesh

    @property
    def rank(self) -> RankGraph:
        """The rank graph of the first role: that of every device if all run the same."""
        return self.roles[0]
