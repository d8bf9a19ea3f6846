"""Parameters gathered in the previous step, as a pass over rank graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from meshweave.errors import MeshweaveError
from meshweave.passes.base import MeshProgram, Numerics, Pass, Report, Stage
from meshweave.schedule.decide import OverlapOptions


@dataclass(frozen=True, slots=True)
class Carry(Pass[MeshProgram]):
    """Parameters of the first `blocks` blocks of the model may be gathered during the updates of the previous step, and
    kept from step to step.

    "auto": as many blocks as shorten the simulated step. `Overlap` chooses the order and reports what is carried;
    without it nothing is."""

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
