"""Which collectives are merged: the buckets of systems that flatten parameters and gradients.

meshweave's own steps have a collective per parameter. FSDP has one per wrapped block (torch 2.13,
torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py), DDP and Megatron's distributed optimizer one per so many
bytes (DDP: `bucket_cap_mb`, 25 MiB; Megatron: `ddp_bucket_size`, 40 million parameters). To predict such a system,
state its buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.ir.graph import block_name, origin_of

Buckets = Literal["none", "blocks"] | int
"""`none`: every collective by itself. `blocks`: those of a kind and phase in the same block of the model
(`model.layers.3`), or outside of blocks, are merged. A number: neighbours of a kind and phase are merged until they
have that many bytes."""


@dataclass(frozen=True, slots=True)
class Member:
    """A collective in the order of its channel: its node and microbatch, when it may start and when it is first waited
    for (as task numbers; `wait` -1: never), and bytes per device."""

    node: fx.Node
    microbatch: int
    start: int
    wait: int
    bytes: float


def check_buckets(buckets: Buckets) -> None:
    """Raises MeshweaveError for an unknown kind of buckets."""
    is_size = isinstance(buckets, int) and not isinstance(buckets, bool) and buckets > 0
    if not is_size and buckets not in ("none", "blocks"):
        raise MeshweaveError(
            "unknown buckets of collectives",
            got=repr(buckets),
            expected="none, blocks, or bytes per bucket above 0",
        )


def group_members(members: Sequence[Member], buckets: Buckets) -> Iterator[list[int]]:
    """The members of each bucket, by index: runs of neighbours of the same kind, phase and microbatch.

    A bucket is closed if one of its members is waited for before the next may start: the next would wait for itself.
    """
    positions: list[int] = []
    for i, member in enumerate(members):
        if positions and not _joins(members, positions, member, buckets):
            yield positions
            positions = []
        positions.append(i)
    if positions:
        yield positions


def _joins(members: Sequence[Member], positions: Sequence[int], member: Member, buckets: Buckets) -> bool:
    first = members[positions[0]]
    is_waited_for = any(-1 < members[i].wait < member.start for i in positions)
    if buckets == "none" or _kind(first) != _kind(member) or is_waited_for:
        return False
    if isinstance(buckets, str):
        return block_name(origin_of(first.node)) == block_name(origin_of(member.node))
    return sum(members[i].bytes for i in positions) < buckets


def _kind(member: Member) -> tuple[Any, int, str]:
    return member.node.target, member.microbatch, origin_of(member.node).phase
