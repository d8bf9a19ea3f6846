"""The interface of costs for planner and simulator: AlphaBeta and MachineProfile implement it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from meshweave.cost.hardware.work import Work
from meshweave.ir.mesh import Mesh


class Costs(Protocol):
    """Seconds and bytes of communication and of work. Immutable and hashable; equal costs give equal answers.

    `seconds` is 0 for local ops and in groups of one device, and never falls as bytes grow. Every collective takes at
    least the start-up time `alpha_s`, and none moves more than `bandwidth_of` along an axis: both give lower bounds of
    plans. `usable_bytes` is the part of a device's memory available to tensors, None if unknown.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def alpha_s(self) -> float: ...
    @property
    def usable_bytes(self) -> float | None: ...
    def __hash__(self) -> int: ...
    def bytes_received(self, op: str, group_size: int, local_bytes: float) -> float: ...
    def seconds(self, op: str, mesh: Mesh, axes: Sequence[str], local_bytes: float) -> float: ...
    def bandwidth_of(self, mesh: Mesh, axis: str) -> float: ...
    def compute_seconds(self, work: Work) -> float: ...
