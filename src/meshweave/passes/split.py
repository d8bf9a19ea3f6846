"""Rows of the batch in chunks, as a pass over rank graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from meshweave.ir.from_role import rewrite_role
from meshweave.passes.base import MeshProgram, Numerics, Pass, Stage
from meshweave.rows import SplitOptions, SplitReport, split_program


@dataclass(frozen=True, slots=True)
class Split(SplitOptions, Pass[MeshProgram]):
    """What goes row by row runs in chunks of a device's rows, so that communication of one hides under the compute of
    another. Sums over rows are added chunk by chunk."""

    name: ClassVar[str] = "split"
    numerics: ClassVar[Numerics] = "reassociates"
    stage: ClassVar[Stage] = "written"

    @property
    def is_compared(self) -> bool:
        return self.when == "gain"

    @property
    def alternatives(self) -> tuple[Split, ...]:
        counts = self.num_chunks[:1] if self.when == "always" else self.num_chunks
        return tuple(replace(self, num_chunks=(count,)) for count in counts)

    @property
    def label(self) -> str:
        return f"rows in {self.num_chunks[0]} chunks"

    def run(self, program: MeshProgram, costs: Any) -> tuple[MeshProgram, tuple[SplitReport, ...]]:
        """In the first of `num_chunks`."""
        rewrite = partial(split_program, num_chunks=self.num_chunks[0])
        split = [rewrite_role(role, rewrite) for role in program.roles]
        reports = tuple(report for _, report in split)
        if not any(report.is_taken for report in reports):
            return program, reports
        return replace(program, roles=tuple(role for role, _ in split)), reports
