"""The communication ops with known costs, and the bytes that a device receives in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import RECEIVED

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


def bad_figure(name: str, got: float, expected: str, where: str) -> MeshweaveError:
    return MeshweaveError(f"{name} is not a cost", where=where, got=str(got), expected=expected)
