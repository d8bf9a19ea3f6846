"""Results of collectives kept for a second use, as a pass over rank graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from meshweave.check.same import check_same
from meshweave.gathers.keep import KeepReport, keep
from meshweave.hardware import Costs
from meshweave.passes.base import MeshProgram, Numerics, Pass, Stage
from meshweave.schedule.decide import cap_of


@dataclass(frozen=True, slots=True)
class Keep(Pass[MeshProgram]):
    """What a collective has brought is kept for the next equal collective, as parameters gathered in forward are for
    backward (`reshard_after_forward=False` of FSDP2, block by block), where memory is free in between.

    `share` is how much of what memory has left above the peak of the step may be used so: the scheduler needs the rest
    to gather ahead. What it has left is what the cap says; where the caller names none, 5% of the peak or 512 MiB,
    whichever is more, but no more than the machine has.
    """

    name: ClassVar[str] = "keep"
    numerics: ClassVar[Numerics] = "exact"
    stage: ClassVar[Stage] = "written"
    share: float = 0.5

    def run(self, program: MeshProgram, costs: Costs) -> tuple[MeshProgram, tuple[KeepReport, ...]]:
        def limit_of(peak: int) -> int:
            cap = cap_of(peak, program.memory_cap_bytes, costs.usable_bytes)
            return peak + int(max(0, cap - peak) * self.share)

        kept, reports = program.each_role(lambda role: keep(role, limit_of))
        for before, after in zip(program.roles, kept.roles, strict=True):
            if after is not before:
                check_same(before, after)
        return kept, reports
