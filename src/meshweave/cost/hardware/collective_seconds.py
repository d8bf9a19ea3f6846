"""Seconds of the nodes of a graph that communicate, and what of them the host spends."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from meshweave.cost.hardware.profile import MachineProfile
from meshweave.ir.collectives import PERMUTE, TRANSFER, Collective
from meshweave.ir.mesh import Mesh


def collective_seconds(
    profile: MachineProfile, node: fx.Node, row: Collective, mesh: Mesh, axes: Sequence[str], num_bytes: float
) -> float:
    """Seconds of a node of `row` in the groups of the flattened `axes`, for operands of `num_bytes`. Simulator and
    scheduler both use it. A permute that moves nothing takes no time."""
    priced_bytes = row.cost_bytes(node, mesh.flat_size(axes), num_bytes)
    if not priced_bytes and row.name == PERMUTE.name:
        return 0.0
    return profile.seconds(row.cost_name, mesh, axes, priced_bytes)


def host_seconds(profile: MachineProfile, row: Collective, mesh: Mesh, axes: Sequence[str], seconds: float) -> float:
    """What of a collective's `seconds` the waiting caller spends itself, once the bytes are there: sums and copies of a
    runtime on a processor."""
    if profile.fusion != "none" or not seconds or row.name in (PERMUTE.name, TRANSFER.name):
        return 0.0
    return profile.host_seconds(row.cost_name, mesh, axes, seconds)
