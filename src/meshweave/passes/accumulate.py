"""Where gradients of several microbatches are added up: whole if memory has room for them, else in shards."""

from __future__ import annotations

from collections.abc import Callable

from meshweave.ir.graph import StepGraph
from meshweave.ir.liveness import peak_bytes
from meshweave.ir.rank import RankGraph
from meshweave.report.tables import bytes_text
from meshweave.sharding.sums import sum_bytes


def accumulated(
    expanded: Callable[[str], tuple[StepGraph, tuple[RankGraph, ...]]], microbatches: int, where: str, room: int | None
) -> tuple[StepGraph, tuple[RankGraph, ...], str]:
    """A program that adds up its microbatches' gradients as `where` asks, and a sentence about that.

    `expanded(where)` places and expands it. "auto" is whole, unless a device would then use more than `room` bytes.
    """
    placed, roles = expanded("whole" if where == "auto" else where)
    if microbatches == 1:
        return placed, roles, ""
    whole, stored = sum_bytes(placed)
    how = f"gradients of {microbatches} microbatches are added up"
    if whole == stored:
        return placed, roles, f"{how} in {bytes_text(whole)} a device and reduced once a step"
    if where == "auto" and room is not None and (peak := max(map(peak_bytes, roles))) > room:
        placed, roles = expanded("shards")
        asked = f"whole they would need {bytes_text(peak)} a device of {bytes_text(room)}"
        return placed, roles, f"{how} in shards, reduced in each microbatch: {asked}"
    if where == "shards":
        return placed, roles, f"{how} in shards, reduced in each microbatch, as asked"
    return placed, roles, f"{how} whole, in {bytes_text(whole)} a device, and reduced once a step"
