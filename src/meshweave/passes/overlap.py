"""Order and buckets, as a pass."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from meshweave.passes.base import MeshProgram, Numerics, Pass, Scope, Stage
from meshweave.passes.graph_program import GraphProgram
from meshweave.schedule import OverlapOptions, OverlapReport, overlap
from meshweave.schedule.decide import OrderOptions
from meshweave.schedule.steps import Scheduling, overlap_roles


@dataclass(frozen=True, slots=True)
class Overlap(OrderOptions, Pass[Any]):
    """Communication runs beside compute: the step is reordered and collectives are merged, where that simulates faster
    or the memory cap requires it. Values are the same to the bit."""

    name: ClassVar[str] = "overlap"
    numerics: ClassVar[Numerics] = "exact"
    stage: ClassVar[Stage] = "ordered"
    scope: ClassVar[Scope] = "graph"

    def __post_init__(self) -> None:
        self.check()

    @property
    def needs_costs(self) -> bool:
        return True

    def options(self, program: MeshProgram) -> OverlapOptions:
        own = {option.name: getattr(self, option.name) for option in fields(OrderOptions)}
        return OverlapOptions(**own, carry=program.carry)

    def run(
        self, program: MeshProgram | GraphProgram, costs: Any
    ) -> tuple[MeshProgram | GraphProgram, tuple[OverlapReport, ...]]:
        """Raises NoOrderError if no order is under the cap."""
        if isinstance(program, GraphProgram):
            module, report = overlap(
                program.module,
                cost=costs,
                memory_cap_bytes=program.memory_cap_bytes,
                groups=program.groups,
                options=self,
                agree=program.agree,
            )
            return replace(program, module=module, ordered_seconds=report.seconds), (report,)
        how = Scheduling(self.options(program), program.memory_cap_bytes, program.keeps_gradients)
        ordered = overlap_roles(program.roles, costs, how, program.microbatches, program.placed)
        return program.with_simulated(ordered.roles, ordered.seconds), ordered.reports
