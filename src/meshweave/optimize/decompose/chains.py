"""Ops in chunks: which ops of a graph can run chunk by chunk, and the nodes for a chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import fx

from meshweave.ir import local_ops
from meshweave.ir.graph import map_nodes, origin_of
from meshweave.ir.rank import SYMBOLS, operands_of
from meshweave.ir.traits import RANK_CHANGES
from meshweave.ir.values import NOTHING, Value, Values
from meshweave.optimize.decompose.cut import (
    FIXED,
    SHAPED,
    Cut,
    Kind,
    NoCut,
    Op,
    Shape,
    Sum,
    contraction,
    has_symbols,
    is_same,
    kind_of,
)
from meshweave.optimize.decompose.writer import ChunkWriter, Number

aten = torch.ops.aten


@dataclass(slots=True)
class Shapes:
    """Local shapes of values, as ops of the table see them. `uneven`: the dims whose size differs between devices."""

    values: dict[fx.Node, Values]
    uneven: dict[fx.Node, frozenset[int]] = field(default_factory=dict)

    def of(self, node: fx.Node) -> Shape:
        results = self.values.get(node, NOTHING)  # results of rings are not in it
        if len(results) != 1:
            raise NoCut("it is several tensors, or unknown")
        return results[0].shape

    def fits(self, node: fx.Node, cut: Cut) -> bool:
        """Whether a value splits into equal chunks, the same on every device."""
        uneven = self.uneven.get(node, frozenset())
        is_written = bool(uneven) and node.target in RANK_CHANGES | SHAPED  # a chunk's shape is, in numbers
        return cut.fits(self.of(node)) and cut.dim not in uneven and not is_written

    def take_over(self, new: fx.Node, values: Values, old: fx.Node) -> None:
        """Record the shape of a new node that replaces `old`: its uneven dims are its own."""
        self.values[new] = values
        if old in self.uneven:
            self.uneven[new] = self.uneven[old]

    def op(self, node: fx.Node) -> Op:
        return Op(node, tuple(map(self.of, operands_of(node))), self.of(node))


def part_of(value: Value, cut: Cut | None) -> Value:
    """A chunk of a value, contiguous."""
    return value if cut is None else reshape(value, cut.chunk(value.shape))


def reshape(value: Value, shape: Shape) -> Value:
    """A contiguous value of another shape."""
    strides = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
    return replace(value, shape=shape, stride=strides, storage_bytes=prod(shape) * value.dtype.itemsize)


def cuttable(node: fx.Node, why: list[str]) -> Kind | None:
    """The kind of an op that chunks may pass; None, with a reason in `why`, for others."""
    kind = kind_of(node)
    if kind is None and node.op != "output":
        why.append(f"{node.name} {node.meta.get(FIXED, 'cannot run chunk by chunk')}")
    elif has_symbols((node.args, node.kwargs)):
        why.append(f"{node.name} has sizes that differ between devices")
        return None
    return kind


@dataclass(slots=True)
class Downstream:
    """What is computed from a gathered value: views and elementwise ops down to matmuls.

    `cuts` has the cut of every value on the path, the gathered value first, `consumers` the cut of every matmul's
    result, or "sum" if the products of the chunks are added up. `why` has the reason for others.
    """

    cuts: dict[fx.Node, Cut]
    consumers: dict[fx.Node, Cut | Sum] = field(default_factory=dict)
    why: list[str] = field(default_factory=list)


def downstream(source: fx.Node, cut: Cut, shapes: Shapes, is_late: Callable[[fx.Node], bool]) -> Downstream:
    """Follow the chunks of `source`, within its phase. Not past ops with an operand that `is_late`: it is neither
    available at the source nor computed from its chunks."""
    chain = Downstream({source: cut})
    waiting = [source]
    while waiting:
        node = waiting.pop(0)
        for user in node.users:
            if user in chain.cuts or user in chain.consumers:
                continue
            cut_or_sum = _follow(user, node, chain, shapes)
            if cut_or_sum is None:
                continue
            if cut_or_sum == "sum" or kind_of(user).is_matmul:  # type: ignore[union-attr]
                chain.consumers[user] = cut_or_sum
            elif late := next((n for n in operands_of(user) if n not in chain.cuts and is_late(n)), None):
                chain.why.append(late_text(late, user))
            else:
                chain.cuts[user] = cut_or_sum
                waiting.append(user)
    _drop_idle(chain, source, shapes)
    return chain


def late_text(operand: fx.Node, user: fx.Node) -> str:
    return f"{operand.name}, an operand of {user.name}, is computed later"


def _follow(user: fx.Node, node: fx.Node, chain: Downstream, shapes: Shapes) -> Cut | Sum | None:
    if origin_of(user).phase != origin_of(node).phase:
        return None
    kind = cuttable(user, chain.why)
    if kind is None:
        return None
    try:
        op = shapes.op(user)
        result = kind.forward(op, operands_of(user).index(node), chain.cuts[node])
    except NoCut as error:
        chain.why.append(f"{user.name}: {error}")
        return None
    return result if result == "sum" or shapes.fits(user, result) else None


def operand_cuts(
    node: fx.Node, result: Cut | Sum, cuts: Mapping[fx.Node, Cut], shapes: Shapes
) -> tuple[Cut | None, ...]:
    """The cuts of the operands of a chunk of a node, at least one of which is in `cuts`. Raises NoCut."""
    op, kind = shapes.op(node), kind_of(node)
    assert kind is not None
    if result == "sum":
        return contraction(op, next(cuts[n] for n in operands_of(node) if n in cuts))
    return kind.backward(op, result)


def _drop_idle(chain: Downstream, source: fx.Node, shapes: Shapes) -> None:
    """Drop values that lead to no consumer, and ops whose chunks do not fit; they read whole values."""

    def stays(node: fx.Node) -> bool:
        if node not in chain.consumers and not any(u in chain.cuts or u in chain.consumers for u in node.users):
            return False
        operands = operands_of(node)
        if not any(n in chain.cuts for n in operands):
            return False
        wanted = operand_cuts(node, chain.consumers.get(node) or chain.cuts[node], chain.cuts, shapes)
        return all(chain.cuts.get(n, cut) == cut for n, cut in zip(operands, wanted, strict=True))

    open_nodes = {*chain.cuts, *chain.consumers}
    while open_nodes:
        idle = [n for n in open_nodes if n is not source and not stays(n)]
        for node in idle:
            chain.cuts.pop(node, None)
            chain.consumers.pop(node, None)
        beside = {other for node in idle for other in (*node.users, *node.all_input_nodes)}
        open_nodes = {n for n in beside if n in chain.cuts or n in chain.consumers}  # nothing changed for others


def read_outside(chain: Downstream) -> list[fx.Node]:
    """The values on the path with other readers. A view of such a value is repeated on the whole value."""
    inside, nodes = {*chain.cuts, *chain.consumers}, dict[fx.Node, None]()
    for node in chain.cuts:
        if any(user not in inside for user in node.users):
            while (kind := kind_of(node)) is not None and kind.is_free:
                node = operands_of(node)[0]
            nodes[node] = None
    return list(nodes)


@dataclass(slots=True)
class Upstream:
    """What a reduced value is computed from: matmuls, sums of them, views and elementwise ops. `cuts` has the cut of
    every value that is computed chunk by chunk; their other operands are cut, or whole. `kept` are values with later
    readers."""

    cuts: dict[fx.Node, Cut] = field(default_factory=dict)
    read_outside: list[fx.Node] = field(default_factory=list)
    matmuls: list[fx.Node] = field(default_factory=list)
    why: list[str] = field(default_factory=list)


def upstream(start: fx.Node, operand: fx.Node, cut: Cut, shapes: Shapes, order: Mapping[fx.Node, int]) -> Upstream:
    """Follow the chunks of the operand of `start` backwards, within its phase."""
    chain, wanted = Upstream(), {operand: cut}
    while wanted:
        node = max(wanted, key=order.__getitem__)
        its = wanted.pop(node)
        other_users = [user for user in node.users if user is not start and user not in chain.cuts]
        if any(order[user] < order[start] for user in other_users):
            chain.why.append(f"{node.name} is used by others before")
            continue
        kind = cuttable(node, chain.why) if origin_of(node).phase == origin_of(start).phase else None
        if kind is None:
            continue
        try:
            cuts = kind.backward(shapes.op(node), its)
        except NoCut as error:
            chain.why.append(f"{node.name}: {error}")
            continue
        pairs = [(n, c) for n, c in zip(operands_of(node), cuts, strict=True) if c is not None]
        if not shapes.fits(node, its) or not all(shapes.fits(n, c) for n, c in pairs):
            chain.why.append(f"{its.count} chunks do not divide {node.name} {list(shapes.of(node))}")
            continue
        chain.cuts[node] = its
        chain.read_outside += [node] if other_users else []
        if kind.is_matmul:
            chain.matmuls.append(node)
            continue
        for n, c in pairs:
            if n.op == "call_function" and wanted.setdefault(n, c) != c:
                chain.why.append(f"{n.name} is cut in two ways")
                del wanted[n]
    _drop_bare(chain, order)
    return chain


def _drop_bare(chain: Upstream, order: Mapping[fx.Node, int]) -> None:
    """Parts without a matmul are computed whole, and then cut."""
    has: set[fx.Node] = set(chain.matmuls)
    for node in sorted(chain.cuts, key=order.__getitem__):
        if any(n in has for n in operands_of(node)):
            has.add(node)
    for node in [n for n in chain.cuts if n not in has]:
        del chain.cuts[node]
    chain.read_outside = [node for node in chain.read_outside if node in chain.cuts]


# a single chunk


@dataclass(slots=True)
class Chunker:
    """Writes the nodes for a chunk of values."""

    write: ChunkWriter
    shapes: Shapes
    number: Number
    chunk_of: dict[fx.Node, fx.Node] = field(default_factory=dict)
    whole_chunks: dict[tuple[fx.Node, Cut], fx.Node] = field(default_factory=dict)

    def take(self, node: fx.Node, cut: Cut | None) -> fx.Node:
        """A chunk of a value that exists whole; the value itself if it is not cut."""
        if cut is None:
            return node
        if (node, cut) not in self.whole_chunks:
            args = (node, cut.dim, cut.outer, cut.count, self.number)
            self.whole_chunks[node, cut] = self.write.call(local_ops.take_chunk, *args)
        return self.whole_chunks[node, cut]

    def down(self, node: fx.Node, cuts: Mapping[fx.Node, Cut], result: Cut | Sum) -> fx.Node:
        """The chunk of `node` whose operands are on the path of the received chunk (see Downstream)."""
        pairs = zip(operands_of(node), operand_cuts(node, result, cuts, self.shapes), strict=True)
        operands = [self.through(n, cuts) if n in cuts else self.take(n, c) for n, c in pairs]
        return self.emit(node, operands, None if result == "sum" else result)

    def through(self, node: fx.Node, cuts: Mapping[fx.Node, Cut]) -> fx.Node:
        """The chunk of a node on the path, with the path to it."""
        if node not in self.chunk_of:
            self.chunk_of[node] = self.down(node, cuts, cuts[node])
        return self.chunk_of[node]

    def up(self, node: fx.Node, cuts: Mapping[fx.Node, Cut]) -> fx.Node:
        """The chunk of `node` (see Upstream), with its operands."""
        if node not in self.chunk_of:
            kind = kind_of(node)
            assert kind is not None
            wanted = kind.backward(self.shapes.op(node), cuts[node])
            pairs = zip(operands_of(node), wanted, strict=True)
            operands = [self.up(n, cuts) if n in cuts else self.take(n, c) for n, c in pairs]
            self.chunk_of[node] = self.emit(node, operands, cuts[node])
        return self.chunk_of[node]

    def emit(self, node: fx.Node, operands: Iterable[fx.Node], cut: Cut | None) -> fx.Node:
        """The op on chunks of its operands."""
        if cut is not None and is_same(node, cut):
            return next(iter(operands))
        rest = iter(operands)
        args, kwargs = map_nodes(node, lambda n: n if n.target in SYMBOLS else next(rest))
        target = node.target
        if target in RANK_CHANGES and cut is not None:  # a chunk may have a dim of size 1 where the whole value has not
            target, args = aten.reshape.default, (args[0], list(cut.chunk(self.shapes.of(node))))
        elif target in SHAPED and cut is not None:
            args = (args[0], list(cut.chunk(self.shapes.of(node))))
        if node.target is local_ops.deal_blocks and cut is not None and cut.dim == args[3]:
            args = (*args[:5], args[5] // cut.count)  # the size of a block along the dim that is cut
        return self.write.call(target, *args, like=node, kwargs=kwargs)
