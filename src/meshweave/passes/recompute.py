"""Activation checkpointing as a pass over the captured step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from meshweave.capture.blocks import has_blocks
from meshweave.capture.recompute import check_policy, recompute
from meshweave.capture.recompute_check import check_recompute
from meshweave.passes.base import CapturedProgram, Numerics, Pass, Report, Stage


@dataclass(frozen=True, slots=True)
class Recompute(Pass[CapturedProgram]):
    """The backward pass recomputes values of the forward pass instead of saving them. policy: what is saved of each
    repeated block: "full": its inputs; "selective": also attention, every second matmul and sums over devices;
    "pointwise": the fewest bytes from which elementwise ops compute the rest; "none": everything. Raises PlanError for
    another policy, and, unless `is_optional`, for a model without repeated blocks.
    """

    name: ClassVar[str] = "recompute"
    numerics: ClassVar[Numerics] = "reassociates"  # over tp and cp; elsewhere every bit stays
    stage: ClassVar[Stage] = "captured"
    policy: str = "full"
    is_optional: bool = False

    def __post_init__(self) -> None:
        check_policy(self.policy)

    def run(self, program: CapturedProgram, costs: Any) -> tuple[CapturedProgram, tuple[Report, ...]]:
        if self.is_optional and not has_blocks(program.step):
            return program, ()
        step = recompute(program.step, self.policy, program.cuts)
        check_recompute(program.step, step, self.policy, program.cuts)
        return CapturedProgram(step, program.cuts), ()
