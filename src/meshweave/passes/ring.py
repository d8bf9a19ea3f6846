"""Attention over gathered keys and values as a ring of messages, as a pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from meshweave.passes.base import MeshProgram, Numerics, Pass, Stage
from meshweave.rings.attention import AttentionReport, ring_attention


@dataclass(frozen=True, slots=True)
class RingAttention(Pass[MeshProgram]):
    """Keys and values are passed around the devices of a sequence instead of being gathered: a device needs 1/n of the
    memory for them on n devices. `when`: "gain" (if the step simulates faster), or "always"."""

    name: ClassVar[str] = "ring"
    numerics: ClassVar[Numerics] = "reassociates"
    saves_compute: ClassVar[bool] = True
    stage: ClassVar[Stage] = "written"
    when: Literal["gain", "always"] = "gain"

    @property
    def label(self) -> str:
        return "ring attention"

    def run(self, program: MeshProgram, costs: Any) -> tuple[MeshProgram, tuple[AttentionReport, ...]]:
        return program.each(ring_attention)
