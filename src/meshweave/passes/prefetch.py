"""Parameters gathered some blocks ahead, as a pass over rank graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from meshweave.gathers.prefetch import prefetch
from meshweave.ir.rank import copied
from meshweave.passes.base import MeshProgram, Numerics, Pass, Report, Stage


@dataclass(frozen=True, slots=True)
class Prefetch(Pass[MeshProgram]):
    """Gathers of parameters start `blocks` blocks before the block that needs them; that many more blocks are kept
    whole."""

    name: ClassVar[str] = "prefetch"
    numerics: ClassVar[Numerics] = "exact"
    stage: ClassVar[Stage] = "expanded"
    blocks: int = 1

    def run(self, program: MeshProgram, costs: Any) -> tuple[MeshProgram, tuple[Report, ...]]:
        return replace(program, roles=tuple(prefetch(copied(role), self.blocks) for role in program.roles)), ()
