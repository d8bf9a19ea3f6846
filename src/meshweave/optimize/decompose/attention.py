"""Ring attention: pieces of keys and values are passed around, and the results of queries over each piece are merged.

Where an attention's keys and values are gathered over a group, each device's piece is passed around the group instead,
in a message per step with both, and the results over the pieces, (out, lse), are merged as they come. In backward the
pieces are passed around again, and a device's contribution to the gradient of a piece is sent to its owner. A device
has at most two pieces of keys and values at a time. Pieces that a causal mask hides from all of a device's queries cost
nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from meshweave.ir import local_ops
from meshweave.ir.attention import finish_attention, merge_attention
from meshweave.ir.collectives import ALL_GATHER, REDUCE_SCATTER, WAIT, permute
from meshweave.ir.device_program import DeviceProgram
from meshweave.ir.graph import erase_unused, place_of
from meshweave.ir.rank import linear
from meshweave.ir.traits import CASTS, PRODUCTS, VIEWS
from meshweave.optimize.decompose.algorithms import algorithm
from meshweave.optimize.decompose.emit import write_gather
from meshweave.optimize.decompose.proof import ATTENTION, prove_rings
from meshweave.optimize.decompose.writer import ChunkWriter, Number, Ring, ring_of

aten = torch.ops.aten
ours = torch.ops.meshweave
FORWARD, BACKWARD = ATTENTION
_MASKED = {aten.masked_fill.Scalar, aten.where.self}
_SPELLED = "its whole score matrix exists: for a bias with a gradient, dropout or an attention of the model's own"
_SEQUENCE = 2  # the dim of positions in [batch, heads, positions, size]


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """An attention whose queries are cut, and the outcome."""

    name: str
    place: str
    num_permutes: int = 0
    reason: str = ""

    @property
    def is_taken(self) -> bool:
        return self.num_permutes > 0

    def __str__(self) -> str:
        verdict = f"a ring of {self.num_permutes} permutes" if self.is_taken else f"left: {self.reason}"
        return f"{self.name} {verdict}; {self.place}"


@dataclass(frozen=True, slots=True)
class AttentionReport:
    """Every attention of a role whose keys are gathered."""

    rows: tuple[AttentionRow, ...]

    @property
    def num_taken(self) -> int:
        return sum(row.is_taken for row in self.rows)

    def left(self, reason: str) -> AttentionReport:
        """A report of a role that stays as it is, with the reason."""
        return AttentionReport(tuple(replace(row, num_permutes=0, reason=reason) for row in self.rows))

    def __str__(self) -> str:
        lines = [f"{self.num_taken} of {len(self.rows)} attentions are rings", *map(str, self.rows)]
        return "\n".join(lines)


class _Left(Exception):
    """Why an attention stays as it is."""


@dataclass(frozen=True, slots=True)
class _Gathered:
    """A value that is gathered along the sequence: the piece, the start, and the nodes between it and the attention."""

    piece: fx.Node
    start: fx.Node
    between: tuple[fx.Node, ...]


def ring_attention(program: DeviceProgram) -> tuple[fx.Graph | None, AttentionReport]:
    """The program's graph with rings instead of attentions over gathered keys; None if there are none."""
    rows = []
    for node in [n for n in program.graph.nodes if n.target in ATTENTION]:
        is_forward = node.target is FORWARD
        try:
            matched = _find(program, node, 1 if is_forward else 2)
            if matched is None:
                continue
            site = _Site.of(program, node, *matched)
            num = site.forward() if is_forward else site.backward()
            rows.append(AttentionRow(node.name, place_of(node), num))
        except _Left as left:
            rows.append(AttentionRow(node.name, place_of(node), reason=str(left)))
    prove_rings(program)
    spelled = [n for n in program.graph.nodes if n.target is aten._softmax.default and _weighs(n)]
    rows += [AttentionRow(node.name, place_of(node), reason=_SPELLED) for node in spelled]
    report = AttentionReport(tuple(rows))
    return (program.graph if report.num_taken else None), report


def _weighs(node: fx.Node) -> bool:
    """Whether a softmax is multiplied by a matmul: it is of scores. Fully masked rows may be set to zero in between."""
    users = [user.target for user in node.users]
    return any(t in PRODUCTS for t in users) or any(
        user.target in VIEWS | CASTS | _MASKED and _weighs(user) for user in node.users
    )


def _find(program: DeviceProgram, node: fx.Node, at: int) -> tuple[_Gathered, _Gathered] | None:
    """The gathers of keys and values, arguments `at` and `at + 1`; None if neither is gathered by its positions."""
    both = [_gathered(node, node.args[i]) for i in (at, at + 1)]  # type: ignore[arg-type]
    if both == [None, None]:
        return None
    keys, values = both
    if keys is None or values is None:
        raise _Left("only one of keys and values is gathered")
    if keys.start.args[1:] != values.start.args[1:]:
        raise _Left("keys and values are gathered over different groups")
    return keys, values


def _gathered(node: fx.Node, x: fx.Node) -> _Gathered | None:
    join = x
    if join.target is not local_ops.join_blocks or join.args[3] != _SEQUENCE:
        return None
    wait: Any = join.args[0]
    if wait.target is not WAIT or wait.args[0].target is not ALL_GATHER.op:
        return None
    if join.args[4] is not None:
        raise _Left("its pieces of the sequence have several sizes: the group does not divide it")
    if list(join.args[2]) != sorted(join.args[2]):  # type: ignore[arg-type,type-var]
        raise _Left("its pieces are in another order than the devices of the group")
    if any(user.target not in ATTENTION for user in join.users) or set(wait.users) != {join}:
        raise _Left("its gathered keys or values have other readers")
    start = wait.args[0]
    piece = start.args[0]
    piece = piece.args[0] if piece.target is aten.contiguous.default else piece
    return _Gathered(piece, start, (join, wait))


@dataclass(slots=True)
class _Site:
    """An attention that becomes a ring."""

    program: DeviceProgram
    node: fx.Node
    keys: _Gathered
    values: _Gathered
    ring: Ring
    write: ChunkWriter
    products: dict[fx.Node, fx.Node] = field(default_factory=dict)

    @staticmethod
    def of(program: DeviceProgram, node: fx.Node, keys: _Gathered, values: _Gathered) -> _Site:
        write = ChunkWriter(program.graph, node)
        write.follow(keys.start, node)
        ring = ring_of(program, keys.start)
        write.begin(ring, "attention")
        return _Site(program, node, keys, values, ring, write)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        return self.program.values[node][0].shape

    def forward(self) -> int:
        node, write = self.node, self.write
        q, _, _, bias, *settings = node.args
        dtype = self.program.values[q][0].dtype  # type: ignore[index]
        state: list[fx.Node] = []

        def consume(number: Number, k: fx.Node, v: fx.Node) -> None:
            part = write.call(FORWARD, q, k, v, self.bias_of(bias, number), *self.placed(settings, number), like=node)
            own = [write.call(operator.getitem, part, i, like=node) for i in (0, 1)]
            if state:
                both = write.call(merge_attention, *state, *own, like=node)
                own = [write.call(operator.getitem, both, i, like=node) for i in (0, 1)]
            state[:] = own

        num = self.go_round(consume)
        result = write.call(finish_attention, *state, dtype, like=node)
        result.meta |= {key: node.meta[key] for key in ("spec", "origin", "val") if key in node.meta}
        node.replace_all_uses_with(result)
        self.erase()
        return num

    def backward(self) -> int:
        node, write = self.node, self.write
        grad, q, _, _, bias, out, lse, *settings = node.args
        items = {user.args[1]: user for user in node.users}
        ends = {i: self._scatter_wait(items[i]) for i in (1, 2) if i in items}
        if len(ends) < 2:
            raise _Left("only one of keys and values has a gradient")
        dtype = self.program.values[items[1]][0].dtype
        wide = torch.promote_types(dtype, torch.float32)
        sizes = [self.shape(x.piece)[-1] for x in (self.keys, self.values)]
        own: dict[str, fx.Node] = {}
        under_way: list[fx.Node] = []

        def add(name: str, x: fx.Node) -> None:
            own[name] = write.call(local_ops.add_gradient, own[name], x, like=node) if name in own else x

        def consume(number: Number, k: fx.Node, v: fx.Node) -> None:
            placed = self.placed(settings, number)
            part = write.call(BACKWARD, grad, q, k, v, self.bias_of(bias, number), out, lse, *placed, like=node)
            dq, dk, dv = (write.call(operator.getitem, part, i, like=node) for i in range(3))
            add("q", dq)
            both = write.call(aten.cat.default, [dk, dv], -1, like=node)
            shift = self.shift_of(number)
            if shift == 0:
                add("kv", both)
                return
            if under_way:  # a gradient is in flight while the next is computed
                add("kv", write.wait(under_way.pop()))
            under_way.append(write.call(permute, write.contiguous(both), shift, self.ring.group))

        num = self.go_round(consume)
        add("kv", write.wait(under_way.pop()))
        results = [write.cast(own[name], wide, dtype) for name in ("q", "kv")]
        self.take_over(items[0], results[0])
        start = 0
        for i, size in zip((1, 2), sizes, strict=True):
            piece = write.call(aten.slice.Tensor, results[1], 3, start, start + size, like=node)
            self.take_over(ends[i], piece)
            start += size
        erase_unused(self.program.graph, list(ends.values()))
        self.erase()
        return 2 * num

    def go_round(self, consume: Callable[[Number, fx.Node, fx.Node], None]) -> int:
        """Pass pieces of keys and values around, and give each to `consume`; returns the number of messages."""
        write, row = self.write, algorithm("all_gather", "cyclic")
        size_k, size_v = (self.shape(x.piece)[-1] for x in (self.keys, self.values))
        order = {node: i for i, node in enumerate(self.program.graph.nodes)}
        early = max((self.keys.start, self.values.start), key=order.__getitem__)
        with write.at(early):
            both = write.call(aten.cat.default, [self.keys.piece, self.values.piece], -1)

        def apart(number: Number, chunk: fx.Node) -> None:
            k = write.call(aten.slice.Tensor, chunk, 3, 0, size_k, like=self.node)
            v = write.call(aten.slice.Tensor, chunk, 3, size_k, size_k + size_v, like=self.node)
            consume(number, k, v)

        write_gather(write, row, self.ring, both, apart, early)
        return row.num_messages(self.ring.size)

    def placed(self, settings: Sequence[Any], number: Number) -> tuple[Any, ...]:
        """The mask, the scale, the positions of the first query and key of a piece, and where chunks begin."""
        is_causal, scale, *rest = settings
        first, starts = rest[0] if rest else 0, rest[3:]
        size = self.shape(self.keys.piece)[_SEQUENCE]
        return (is_causal, scale, first, self.product(number, size), True, *starts)

    def product(self, number: Number, size: int) -> Number:
        """number * size, as a symbol if the number is a symbol; it comes right after that."""
        if isinstance(number, int):
            return number * size
        if number not in self.products:
            with self.program.graph.inserting_after(number):
                self.products[number] = self.program.graph.call_function(linear, (0, (number, size)))
        return self.products[number]

    def bias_of(self, bias: Any, number: Number) -> Any:
        """The part of a bias, which broadcasts to [b, h, s, t], for a piece of the keys."""
        shape = () if bias is None else self.shape(bias)
        if not shape or shape[-1] == 1:
            return bias
        return self.write.call(local_ops.take_chunk, bias, len(shape) - 1, 1, self.ring.size, number, like=self.node)

    def _scatter_wait(self, gradient: fx.Node) -> fx.Node:
        """The wait of a gradient's reduce-scatter back to the owners of pieces."""
        node = gradient
        for target in (local_ops.deal_blocks, aten.contiguous.default, REDUCE_SCATTER.op, WAIT):
            users = list(node.users)
            if len(users) != 1 or users[0].target is not target:
                raise _Left("gradients of keys or values are not scattered in the way that these were gathered")
            node = users[0]
            if target is REDUCE_SCATTER.op and (node.args[1] != "sum" or node.args[-1] != self.ring.group):
                raise _Left("gradients of keys or values are summed over other devices")
            if target is local_ops.deal_blocks and (node.args[3] != _SEQUENCE or node.args[4] is not None):
                raise _Left("gradients of keys or values are scattered along another dim")
        return node

    def shift_of(self, number: Number) -> int:
        """Distance of a device from the owner of a piece."""
        return number if isinstance(number, int) else int(number.args[3])  # type: ignore[arg-type]

    def take_over(self, old: fx.Node, new: fx.Node) -> None:
        new.meta |= {key: old.meta[key] for key in ("spec", "origin", "val") if key in old.meta}
        old.replace_all_uses_with(new)

    def erase(self) -> None:
        """Erase the attention, and gathers that are no longer read."""
        nodes = [self.node, *self.node.users, *self.keys.between, *self.values.between]
        for node in [*self.node.users]:
            erase_unused(self.program.graph, [node])
        erase_unused(self.program.graph, nodes)
