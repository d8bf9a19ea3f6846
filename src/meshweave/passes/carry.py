"""Parameters that the step before gathers, as a pass over rank graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from meshweave.errors import MeshweaveError
from meshweave.passes.base import MeshProgram, Numerics, Pass, Report, Stage
from meshweave.schedule.decide import OverlapOptions


@dataclass(frozen=True, slots=True)
class Carry(Pass[MeshProgram]):
    """The first `blocks` blocks of the model may have their parameters gathered among the updates of the step before,
    and held from step to step. "auto": as many as the simulated step gains by. The order is that of `Overlap`, which
    says in its report what is carried; without it nothing is."""

    name: ClassVar[str] = "carry"
    numerics: ClassVar[Numerics] = "exact"
    stage: ClassVar[Stage] = "written"
    blocks: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        OverlapOptions(carry=self.blocks).check()

    def run(self, program: MeshProgram, costs: Any) -> tuple[MeshProgram, tuple[Report, ...]]:
        if program.placed is None:
            raise MeshweaveError(
                "nothing can be carried from a step that was not placed", where="passes=", hint="leave 'carry' out"
            )
        return replace(program, carry=self.blocks), ()
