"""Collectives taken apart into messages between chunks of matmuls, as a pass over rank graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from meshweave.passes.base import MeshProgram, Numerics, Pass, Stage
from meshweave.rings import DecomposeOptions, DecomposeReport, decompose


@dataclass(frozen=True, slots=True)
class Decompose(DecomposeOptions, Pass[MeshProgram]):
    """Collectives beside matmuls become rings of messages between the chunks of these. Gathers stay exact; sums over
    devices are taken in the order of the messages."""

    name: ClassVar[str] = "decompose"
    numerics: ClassVar[Numerics] = "reassociates"
    stage: ClassVar[Stage] = "written"

    @property
    def is_compared(self) -> bool:
        return self.when == "gain"

    @property
    def label(self) -> str:
        return "collectives taken apart"

    def run(self, program: MeshProgram, costs: Any) -> tuple[MeshProgram, tuple[DecomposeReport, ...]]:
        apart = [decompose(role, costs, self) for role in program.roles]
        reports = tuple(report for _, report in apart)
        if not any(report.num_taken for report in reports):
            return program, reports
        return replace(program, roles=tuple(role for role, _ in apart)), reports
