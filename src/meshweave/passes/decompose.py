"""Collectives decomposed into messages between chunks of matmuls, as a pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meshweave.passes.base import MeshProgram, Numerics, Pass, Scope, Stage
from meshweave.passes.graph_program import GraphProgram
from meshweave.rings import DecomposeOptions, DecomposeReport, GraphTrials, decompose


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
        cap, order = program.memory_cap_bytes, program.order
        trials = GraphTrials(program.module, costs, program.groups, program.rank, self, cap, order)
        candidate = trials.chosen(program.agree)
        is_left = not candidate.report.num_taken
        return program if is_left else program.with_module(candidate.module), (candidate.report,)
