"""Order and buckets, as a pass over rank graphs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from meshweave.passes.base import MeshProgram, Numerics, Pass, Stage
from meshweave.schedule import OverlapOptions, OverlapReport
from meshweave.schedule.decide import OrderOptions
from meshweave.schedule.steps import Scheduling, overlap_roles


@dataclass(frozen=True, slots=True)
class Overlap(OrderOptions, Pass[MeshProgram]):
    """Communication runs beside compute: the step is put into another order and collectives are merged, where it is
    simulated faster so or the cap on memory asks for it. Values are the same to the bit."""

    name: ClassVar[str] = "overlap"
    numerics: ClassVar[Numerics] = "exact"
    stage: ClassVar[Stage] = "ordered"

    @property
    def needs_costs(self) -> bool:
        return True

    def options(self, program: MeshProgram) -> OverlapOptions:
        own = {one.name: getattr(self, one.name) for one in fields(OrderOptions)}
        return OverlapOptions(**own, carry=program.carry)

    def run(self, program: MeshProgram, costs: Any) -> tuple[MeshProgram, tuple[OverlapReport, ...]]:
        """Raises NoOrderError where no order is under the cap."""
        how = Scheduling(self.options(program), program.memory_cap_bytes, program.keeps_gradients)
        roles, reports = overlap_roles(program.roles, costs, how, program.microbatches, program.placed)
        return replace(program, roles=roles), reports
