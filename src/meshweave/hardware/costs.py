"""What the planner and the simulator ask of costs: AlphaBeta and MachineProfile both answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from meshweave.hardware.work import Work
from meshweave.ir.mesh import Mesh


class Costs(Protocol):
    """Seconds and bytes of communication and of work. Immutable and hashable; equal costs give equal answers.

    `seconds` is 0 for local ops and in groups of one, and never falls as bytes grow. `alpha_s` is a start-up that
    every collective takes, and no collective moves more than `bandwidth_of` along an axis: both bound plans from below.
    `usable_bytes` are those of a device's memory that tensors may take, None where it is not known.
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
