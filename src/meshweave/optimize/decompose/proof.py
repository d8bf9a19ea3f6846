"""Proves the rings of a graph: every joined chunk has its number, and every sum has a contribution of each device.

The table of algorithms is not used: the content of a node on each device of a group follows from the permutes and
slices on the path to it. A writer marks the nodes of a ring (`meta["ring"]`), so that their other
operands are distinguished from the ring's values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from meshweave.errors import VerifyError
from meshweave.ir import local_ops, ops  # noqa: F401  (defines our attention)
from meshweave.ir.attention import finish_attention, merge_attention
from meshweave.ir.collectives import destinations, permute
from meshweave.ir.device_program import DeviceProgram
from meshweave.ir.graph import origin_of
from meshweave.ir.rank import RankGraph, linear, operands_of, ring_index
from meshweave.optimize.decompose.writer import Mark

_Token = tuple[int, int]  # the device whose data it is, and the number of the chunk


def prove_rings(role: RankGraph | DeviceProgram) -> int:
    """The number of rings in a graph, each proven. Raises VerifyError, with the node, for a wrong ring."""
    rings: dict[Mark, list[fx.Node]] = {}
    for node in role.graph.nodes:
        if "ring" in node.meta:
            rings.setdefault(node.meta["ring"], []).append(node)
    for mark, nodes in rings.items():
        _RingProof(mark, nodes).run()
    return len(rings)


@dataclass(slots=True)
class _RingProof:
    mark: Mark
    nodes: Sequence[fx.Node]
    pieces: frozenset[fx.Node] = frozenset()  # the values that are passed around, at the start: each device's own chunk
    known: dict[tuple[fx.Node, int], tuple[_Token, ...]] = field(default_factory=dict)

    def run(self) -> None:
        if self.mark.kind in ("gather", "attention"):
            moved = [x for node in self.nodes if node.target is permute for x in operands_of(node)]
            self.pieces = frozenset(x for x in moved if not self.goes_round(x))
        for r in range(self.mark.ring.size):
            for node in self.nodes:
                if self.mark.kind == "attention":
                    self.check_attention(node, r)
                elif node.target in (local_ops.join_chunks, local_ops.sum_parts):
                    self.check_numbers(node, r)
                elif self.mark.kind == "sum" and any(user.meta.get("ring") != self.mark for user in node.users):
                    self.check_sum(node, r)

    def goes_round(self, node: fx.Node) -> bool:
        if node.meta.get("ring") != self.mark:
            return False
        return node.target is permute or any(map(self.goes_round, operands_of(node)))

    def check_numbers(self, node: fx.Node, r: int) -> None:
        """Parts match their numbers: chunks, all of them, or contributions of devices to a sum over the group."""
        parts, numbers = node.args[:2]
        stated = [self.number(number, r) for number in numbers]  # type: ignore[union-attr]
        if sorted(stated) != list(range(len(stated))):
            raise self.wrong(node, f"has the numbers {stated} on device {r}")
        is_group_sum = self.mark.kind == "sum" and node.target is local_ops.sum_parts
        for part, number in zip(parts, stated, strict=True):  # type: ignore[arg-type]
            tokens = set(self.content(part, r))  # type: ignore[arg-type]
            if {token[0 if is_group_sum else 1] for token in tokens} != {number}:
                raise self.wrong(node, f"takes {part} for number {number} on device {r}, which has {tokens}")
        if is_group_sum:
            self.check_sum(node, r)

    def check_sum(self, node: fx.Node, r: int) -> None:
        """The addends are of the device's own chunk, with an equal share of each device."""
        tokens = self.content(node, r)
        counts = Counter(device for device, _ in tokens)
        if {chunk for _, chunk in tokens} != {r} or len(counts) != self.mark.ring.size or len(set(counts.values())) > 1:
            raise self.wrong(node, f"adds up on device {r} (device, chunk): {tokens}")

    def check_attention(self, node: fx.Node, r: int) -> None:
        """A part has the keys of its stated position. A result of the ring covers all keys for the device's own
        queries, or its own keys for the queries of all."""
        n = self.mark.ring.size
        if node.target in ATTENTION:
            chunks = [chunk for _, chunk in self.content(_keys_of(node), r)]
            position = node.args[7 if node.target is FORWARD else 10]  # `first_key`
            if isinstance(position, fx.Node) and position.target is linear:
                position = position.args[1][0]  # type: ignore[index,assignment]
            if chunks != [self.number(position, r)]:
                raise self.wrong(node, f"takes keys {chunks} for those at {position} on device {r}")
        elif self.is_result(node):
            content = set(self.content(node, r))
            of_queries, of_keys = {(r, chunk) for chunk in range(n)}, {(device, r) for device in range(n)}
            if content not in (of_queries, of_keys) or len(self.content(node, r)) != n:
                raise self.wrong(node, f"has on device {r} results of (queries, keys): {sorted(content)}")

    def is_result(self, node: fx.Node) -> bool:
        is_taken = any(user.meta.get("ring") != self.mark for user in node.users)
        return is_taken and self.mark.kind == "attention" and bool(self.content(node, 0)) and node not in self.pieces

    def content(self, node: fx.Node, r: int) -> tuple[_Token, ...]:
        """The content of a node on device r: whose data, of which chunk. Empty if it is not part of the ring."""
        if node in self.pieces:
            return ((r, r),)
        if node.meta.get("ring") != self.mark:
            return ()
        if (node, r) not in self.known:
            if node.target in ATTENTION:
                self.known[node, r] = tuple((r, chunk) for _, chunk in self.content(_keys_of(node), r))
            elif node.target in _FIRST_OF_TWO:
                self.known[node, r] = tuple(t for x in operands_of(node)[::2] for t in self.content(x, r))
            elif node.target is local_ops.take_chunk:
                self.known[node, r] = ((r, self.number(node.args[4], r)),)
            else:
                source = self.source(node, r)
                self.known[node, r] = tuple(token for x in operands_of(node) for token in self.content(x, source))
        return self.known[node, r]

    def source(self, node: fx.Node, r: int) -> int:
        """The device from which a node of device r gets its operands."""
        if node.target is permute:
            return destinations(node.args[1], self.mark.ring.size).index(r)  # type: ignore[arg-type]
        return r

    def number(self, value: Any, r: int) -> int:
        """A number on device r of the group."""
        if isinstance(value, int):
            return value
        axes, sizes, sign, shift = value.args
        if value.target is not ring_index or (",".join(axes), tuple(sizes)) != (
            self.mark.ring.group,
            self.mark.ring.sizes,
        ):
            raise self.wrong(value, "is not an index along the group of its ring")
        return (sign * r + shift) % self.mark.ring.size

    def wrong(self, node: fx.Node, what: str) -> VerifyError:
        return VerifyError(f"ring {self.mark.number}: {node.name} {what}", where=str(origin_of(node)))


aten = torch.ops.aten
ATTENTION = FORWARD, BACKWARD = (
    torch.ops.meshweave.attention.default,
    torch.ops.meshweave.attention_backward.default,
)
# For pairs, (out, lse) or keys and values, the first element decides.
_FIRST_OF_TWO = (merge_attention, finish_attention, aten.cat.default)


def _keys_of(node: fx.Node) -> fx.Node:
    """The keys of an attention."""
    keys = node.args[1 if node.target is FORWARD else 2]
    assert isinstance(keys, fx.Node)
    return keys
