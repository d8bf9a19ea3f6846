"""The communication ops that costs know, and the bytes that each makes a device receive."""

from __future__ import annotations

from collections.abc import Callable

from meshweave.errors import MeshweaveError

# Bytes that one device receives, from the group size n and its local input of b bytes. Ring and pairwise algorithms,
# which are optimal in bytes (Thakur, Rabenseifner and Gropp, IJHPCA 2005). A local op receives nothing.
_RECEIVED: dict[str, Callable[[int, float], float]] = {
    "slice": lambda n, b: 0,
    "to_partial": lambda n, b: 0,
    "scale": lambda n, b: 0,
    "all_gather": lambda n, b: (n - 1) * b,
    "reduce_scatter": lambda n, b: (n - 1) * b / n,
    "all_reduce": lambda n, b: 2 * (n - 1) * b / n,
    "all_to_all": lambda n, b: (n - 1) * b / n,
    "permute": lambda n, b: b,
    "transfer": lambda n, b: b,
}
LOCAL = ("slice", "to_partial", "scale")


def bytes_received(op: str, group_size: int, local_bytes: float, where: str) -> float:
    """Bytes that one device receives when `op` runs in groups of `group_size` on local inputs of `local_bytes`.

    `where` names the costs in errors. Raises MeshweaveError for an unknown op and for a size that is negative or NaN.
    """
    if op not in _RECEIVED:
        raise MeshweaveError(
            f"there is no cost for '{op}'", where=where, got=op, expected=f"one of {', '.join(_RECEIVED)}"
        )
    if not local_bytes >= 0:
        raise bad_figure("local_bytes", local_bytes, "0 or more bytes", where)
    if group_size < 1:
        raise bad_figure("group_size", group_size, "1 or more devices", where)
    return _RECEIVED[op](group_size, local_bytes) if group_size > 1 or op == "transfer" else 0


def bad_figure(name: str, got: float, expected: str, where: str) -> MeshweaveError:
    return MeshweaveError(f"{name} is not a cost", where=where, got=str(got), expected=expected)
