"""Activation checkpointing as a pass over the captured step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meshweave.capture.recompute import check_policy, recompute
from meshweave.capture.recompute_check import check_recompute
from meshweave.passes.base import CapturedProgram, Numerics, Pass, Report, Stage


@dataclass(frozen=True, slots=True)
class Recompute(Pass[CapturedProgram]):
    """The backward pass makes again what it needs of forward, instead of keeping it.

    policy: of each repeated block is kept, with "full", what enters it; with "selective" also attention, every second
    matmul and sums over devices; with "none" everything. Raises PlanError for another.
    """

    name: ClassVar[str] = "recompute"
    numerics: ClassVar[Numerics] = "exact"
    stage: ClassVar[Stage] = "captured"
    policy: str = "full"

    def __post_init__(self) -> None:
        check_policy(self.policy)

    def run(self, program: CapturedProgram, costs: Any) -> tuple[CapturedProgram, tuple[Report, ...]]:
        step = recompute(program.step, self.policy, program.cuts)
        check_recompute(program.step, step, self.policy, program.cuts)
        return CapturedProgram(step, program.cuts), ()
