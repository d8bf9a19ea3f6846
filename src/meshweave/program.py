"""A compiled training step as data: its graphs, where everything is placed, what it rests on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshweave.capture.contract import Contract
from meshweave.capture.optimizers import OptimizerSpec
from meshweave.capture.step import CaptureOptions
from meshweave.hardware import Costs
from meshweave.ir.graph import StepGraph
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph
from meshweave.passes import Optimized
from meshweave.schedule import OverlapReport
from meshweave.sharding.placement import Placement
from meshweave.sharding.plans import Resolved


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled training step at its three stages. Nothing in it grows with the number of devices.

    `optimized` holds the rank graphs, before and after the passes that were asked for.
    """

    captured: StepGraph
    placed: StepGraph
    optimized: Optimized
    placement: Placement
    options: CaptureOptions
    contract: Contract
    optimizer: OptimizerSpec | None = None
    accumulation: str = ""  # where gradients of several microbatches are added up, and why there
    sequence: str = ""  # in which order devices hold pieces of a sequence, and why
    costs: Costs | None = None  # that it was planned by
    costs_from: str = ""  # which they are, and where they come from
    recompute: str = "none"  # what backward makes again, as `mw.compile` has it
    resolved: Resolved | None = None  # the plan as it was read, with what was chosen for weights that it left open

    @property
    def roles(self) -> tuple[RankGraph, ...]:
        """What every role runs."""
        return self.optimized.roles

    @property
    def expanded(self) -> tuple[RankGraph, ...]:
        """The roles before all passes."""
        return self.optimized.expanded

    @property
    def notes(self) -> tuple[str, ...]:
        """What was decided that no plan names: where gradients are added up, in which order a sequence is held."""
        return tuple(note for note in (self.accumulation, self.sequence) if note)

    @property
    def as_expanded(self) -> Program:
        """The program without any pass."""
        return replace(self, optimized=Optimized(self.expanded, self.expanded, self.expanded))

    @property
    def overlap(self) -> tuple[OverlapReport, ...]:
        """By role what the scheduler did; nothing where it did not run."""
        return self.optimized.overlap

    @property
    def mesh(self) -> Mesh:
        return self.placement.mesh

    @property
    def rank(self) -> RankGraph:
        """The rank graph of the first role: of every device, where all do the same."""
        return self.roles[0]
