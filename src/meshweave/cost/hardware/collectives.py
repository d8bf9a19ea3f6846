"""The communication ops with known costs, and the bytes that a device receives in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import PERMUTE, RECEIVED, TRANSFER, Collective
from meshweave.ir.mesh import Mesh

if TYPE_CHECKING:
    from meshweave.cost.hardware.profile import MachineProfile

LOCAL = ("slice", "to_partial", "scale")
_RECEIVED: Mapping[str, Callable[[int, float], float]] = {**dict.fromkeys(LOCAL, lambda n, b: 0), **RECEIVED}


def bytes_received(op: str, group_size: int, local_bytes: float, where: str) -> float:
    """Bytes that a device receives when `op` runs in groups of `group_size` on local inputs of `local_bytes`.

    `where` names the costs in errors. Raises MeshweaveError for an unknown op and for a size that is negative or NaN.
    """
    if op not in _RECEIVED:
        raise MeshweaveError(f"no known cost of '{op}'", where=where, got=op, expected=f"one of {', '.join(_RECEIVED)}")
    if not local_bytes >= 0:
        raise bad_figure("local_bytes", local_bytes, "0 or more bytes", where)
    if group_size < 1:
        raise bad_figure("group_size", group_size, "1 or more devices", where)
    return _RECEIVED[op](group_size, local_bytes) if group_size > 1 or op == "transfer" else 0


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


def bad_figure(name: str, got: float, expected: str, where: str) -> MeshweaveError:
    return MeshweaveError(f"{name} is not a cost", where=where, got=str(got), expected=expected)
