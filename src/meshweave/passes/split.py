"""Rows of the batch in chunks, as a pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from meshweave.passes.base import MeshProgram, Numerics, Pass, PassProgram, Scope, Stage
from meshweave.rows import SplitOptions, SplitReport, split_program

Q = TypeVar("Q", bound=PassProgram)


@dataclass(frozen=True, slots=True)
class Split(SplitOptions, Pass[Any]):
    """Ops that work row by row run in chunks of a device's rows, so that communication of a chunk hides under the
    compute of another. Sums over rows are added chunk by chunk."""

    name: ClassVar[str] = "split"
    numerics: ClassVar[Numerics] = "reassociates"
    stage: ClassVar[Stage] = "written"
    scope: ClassVar[Scope] = "joint graph"

    @property
    def alternatives(self) -> tuple[Split, ...]:
        counts = self.num_chunks[:1] if self.when == "always" else self.num_chunks
        return tuple(replace(self, num_chunks=(count,)) for count in counts)

    @property
    def label(self) -> str:
        return f"rows in {self.num_chunks[0]} chunks"

    def run(self, program: Q, costs: Any) -> tuple[Q, tuple[SplitReport, ...]]:
        """Splits into the first of `num_chunks`. Gradients of weights are added in float32, chunk by chunk; in a graph
        of torch.compile the matmuls add them."""
        is_step = isinstance(program, MeshProgram)
        count, positions = self.num_chunks[0], self.positions
        return program.each(partial(split_program, num_chunks=count, fuse_sums=not is_step, positions=positions))
