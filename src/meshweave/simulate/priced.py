"""As what op of a profile, and with how many bytes, a collective of a rank graph is priced."""

from __future__ import annotations

from typing import Any

from torch import fx

from meshweave.ir.rank import collectives, destinations, permute

COST_NAMES: dict[Any, str] = {  # collectives as profiles name them
    collectives.all_gather_into_tensor.default: "all_gather",
    collectives.reduce_scatter_tensor.default: "reduce_scatter",
    collectives.all_reduce.default: "all_reduce",
    collectives.all_to_all_single.default: "all_to_all",
    collectives.broadcast.default: "broadcast",
    permute: "permute",
}


def priced_as(node: fx.Node, group_size: int, local_bytes: float) -> tuple[str, float]:
    """The op and local bytes by which a collective is priced.

    A permute in which everybody keeps what it has moves nothing. A broadcast in a ring sends all of its bytes over
    every link but one, after as many hops as a gather of pieces of 1/(n-1) of it, which sends as much (NCCL's
    broadcast is a ring: src/device/broadcast.h).
    """
    op = COST_NAMES[node.target]
    if node.target is permute and destinations(node.args[1], group_size) == tuple(range(group_size)):  # type: ignore[arg-type]
        return op, 0.0
    return ("all_gather", local_bytes / max(group_size - 1, 1)) if op == "broadcast" else (op, local_bytes)
