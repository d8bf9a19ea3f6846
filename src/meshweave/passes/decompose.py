"""Collectives decomposed into messages between chunks of matmuls, as a pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meshweave.passes.base import MeshProgram, Numerics, Pass, Scope, Stage
from meshweave.passes.graph_program import GraphProgram
from meshweave.rings import DecomposeOptions, DecomposeReport, decompose, decompose_graph


@dataclass(frozen=True, slots=True)
class Decompose(DecomposeOptions, Pass[Any]):
    """Collectives beside matmuls become rings of messages between chunks of these matmuls. Gathers stay exact; sums
    over devices are added in the order of the messages."""

    name: ClassVar[str] = "decompose"
    numerics: ClassVar[Numerics] = "reassociates"
    stage: ClassVar[Stage] = "written"
    scope: ClassVar[Scope] = "graph"

    @property
    def label(self) -> str:
        return "collectives taken apart"

    def run(
        self, program: MeshProgram | GraphProgram, costs: Any
    ) -> tuple[MeshProgram | GraphProgram, tuple[DecomposeReport, ...]]:
        if isinstance(program, GraphProgram):
            return self.of_graph(program, costs)
        return program.each_role(lambda role: decompose(role, costs, self))

    def of_graph(self, program: GraphProgram, costs: Any) -> tuple[GraphProgram, tuple[DecomposeReport, ...]]:
        module, report = decompose_graph(
            program.module,
            cost=costs,
            groups=program.groups,
            rank=program.rank,
            options=self,
            memory_cap_bytes=program.memory_cap_bytes,
            overlap_options=program.order,
            agree=program.agree,
        )
        return program.with_module(module) if report.num_taken else program, (report,)
