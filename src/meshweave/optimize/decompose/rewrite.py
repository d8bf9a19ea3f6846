"""Rewrites a collective and its matmuls chunk by chunk, replacing start, wait and matmuls."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from meshweave.ir import local_ops
from meshweave.ir.collectives import ALL_GATHER, REDUCE_SCATTER, WAIT
from meshweave.ir.graph import erase_unused
from meshweave.ir.rank import operands_of
from meshweave.optimize.decompose.algorithms import Algorithm
from meshweave.optimize.decompose.chains import Chunker, Downstream, Shapes, Upstream, part_of, read_outside, reshape
from meshweave.optimize.decompose.cut import Cut
from meshweave.optimize.decompose.emit import Consume, Produce, write_gather, write_reduce
from meshweave.optimize.decompose.writer import ChunkWriter, Number, Ring

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class RingScheme:
    """How a collective is decomposed: by an algorithm of the table, or (None) as `num_chunks` collectives of the same
    kind, each of a part of every device's piece."""

    row: Algorithm | None
    num_chunks: int

    def __str__(self) -> str:
        return self.row.name if self.row is not None else "pipelined"


def wait_of(start: fx.Node) -> fx.Node:
    (wait,) = (user for user in start.users if user.target is WAIT)
    return wait


def inherit(new: fx.Node, old: fx.Node, shapes: Shapes) -> fx.Node:
    """`new` replaces `old` from now on."""
    shapes.take_over(new, shapes.values[old], old)
    new.meta |= {key: old.meta[key] for key in ("spec", "global", "origin", "val") if key in old.meta}
    old.replace_all_uses_with(new)
    return new


# gathers


@dataclass(slots=True)
class _Results:
    """The products of the chunks, to be joined."""

    write: ChunkWriter
    wide: torch.dtype
    numbers: list[Number]
    parts: dict[fx.Node, list[fx.Node]]

    def put(self, consumer: fx.Node, cut: object) -> fx.Node:
        parts, numbers = self.parts[consumer], list(self.numbers)
        if isinstance(cut, Cut):
            return self.write.call(local_ops.join_chunks, parts, numbers, cut.dim, cut.outer, like=consumer)
        return self.write.call(local_ops.sum_parts, parts, numbers, self.wide, like=consumer)


def rewrite_gather(
    write: ChunkWriter,
    start: fx.Node,
    chain: Downstream,
    ring: Ring,
    scheme: RingScheme,
    shapes: Shapes,
    wide: torch.dtype,
) -> None:
    """An all-gather and the matmuls that `chain` leads to. Other readers of the gathered value get it joined."""
    wait = wait_of(start)
    write.follow(start, wait)
    piece = start.args[0]
    assert isinstance(piece, fx.Node)
    results = _Results(write, wide, [], {consumer: [] for consumer in chain.consumers})
    read: dict[fx.Node, list[fx.Node]] = {node: [] for node in read_outside(chain)}

    def consume(number: Number, chunk: fx.Node) -> None:
        chunker = Chunker(write, shapes, number, {wait: chunk})
        results.numbers.append(number)
        for consumer, cut in chain.consumers.items():
            results.parts[consumer].append(chunker.down(consumer, chain.cuts, cut))
        for node, chunks in read.items():
            chunks.append(chunker.through(node, chain.cuts))

    if scheme.row is not None:
        write_gather(write, scheme.row, ring, piece, consume, start)
    else:
        _write_parts_gathered(write, start, _of_piece(chain.cuts[wait], ring), consume)
    for consumer, cut in chain.consumers.items():
        inherit(results.put(consumer, cut), consumer, shapes)
    for node, chunks in read.items():
        cut = chain.cuts[node]
        inherit(write.call(local_ops.join_chunks, chunks, list(results.numbers), cut.dim, cut.outer), node, shapes)
    erase_unused(write.graph, [*chain.consumers, *chain.cuts])


def _of_piece(cut: Cut, ring: Ring) -> Cut:
    """The cut of a single block of a group, from the cut of all of them, stacked along dim 0."""
    return cut if cut.dim else Cut(0, cut.outer // ring.size, cut.count)


def _write_parts_gathered(write: ChunkWriter, start: fx.Node, cut: Cut, consume: Consume) -> None:
    """Part i of every piece is gathered while part i - 1 is used in compute."""
    piece, *args = start.args
    begun: list[fx.Node] = []

    def post(i: int) -> None:
        part = write.contiguous(write.call(local_ops.take_chunk, piece, cut.dim, cut.outer, cut.count, i))
        begun.append(write.call(start.target, part, *args))

    with write.at(start):
        post(0)
    for i in range(cut.count):
        chunk = write.wait(begun[i])
        if i + 1 < cut.count:
            post(i + 1)
        consume(i, chunk)


# reductions


def rewrite_sum(
    write: ChunkWriter,
    start: fx.Node,
    chain: Upstream,
    ring: Ring,
    scheme: RingScheme,
    shapes: Shapes,
    wide: torch.dtype,
) -> fx.Node | None:
    """A reduce-scatter or an all-reduce, and the matmuls that compute its operand; a decomposed all-reduce is a
    reduce-scatter and an all-gather, whose start is returned."""
    wait, is_scatter = wait_of(start), start.target is REDUCE_SCATTER.op
    write.follow(start, start)
    operand = start.args[0]
    assert isinstance(operand, fx.Node)
    cut, begun = chain.cuts[operand], None
    products, dtype = Products(write, shapes, chain, operand), shapes.values[operand][0].dtype
    if scheme.row is None:
        result = _write_parts_reduced(write, start, products, scheme, _of_piece(cut, ring) if is_scatter else cut)
    elif is_scatter:
        result = write_reduce(write, scheme.row, ring, products, dtype, wide, wait)
    else:
        own = write_reduce(write, scheme.row, ring, products, dtype, wide)
        gather = ALL_GATHER.op
        begun = write.call(gather, write.contiguous(own), ring.size, ring.group)
        write.place = wait
        result = write.wait(begun)
        part = part_of(shapes.values[operand][0], cut)
        stacked = reshape(part, (ring.size * part.shape[0], *part.shape[1:]))
        shapes.take_over(operands_of(begun)[0], (part,), operand)
        shapes.take_over(result, (stacked,), operand)
        if cut.dim:
            result = write.call(local_ops.join_blocks, result, [ring.size], [0], cut.dim, None)
    products.join(start)
    inherit(result, wait, shapes)
    erase_unused(write.graph, [wait, *products.parts])
    return begun


@dataclass(slots=True)
class Products:
    """Computes the chunks of a start's operand, and keeps those of values with other readers."""

    write: ChunkWriter
    shapes: Shapes
    chain: Upstream
    operand: fx.Node
    numbers: list[Number] = field(default_factory=list)
    parts: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)

    def __call__(self, number: Number) -> fx.Node:
        chunker = Chunker(self.write, self.shapes, number)
        product = chunker.up(self.operand, self.chain.cuts)
        self.numbers.append(number)
        for node in self.chain.read_outside:
            self.parts.setdefault(node, []).append(chunker.chunk_of[node])
        return product

    def join(self, place: fx.Node) -> None:
        """Join before `place` the values with other readers."""
        with self.write.at(place):
            for node, parts in self.parts.items():
                cut = self.chain.cuts[node]
                whole = self.write.call(local_ops.join_chunks, parts, list(self.numbers), cut.dim, cut.outer)
                inherit(whole, node, self.shapes)


def _write_parts_reduced(
    write: ChunkWriter, start: fx.Node, produce: Produce, scheme: RingScheme, joined: Cut
) -> fx.Node:
    """Part i is reduced while part i + 1 is computed; the results are joined at the wait."""
    _, *args = start.args
    begun = [write.call(start.target, write.contiguous(produce(i)), *args) for i in range(scheme.num_chunks)]
    write.place = wait_of(start)
    parts = [write.wait(start_of_part) for start_of_part in begun]
    return write.call(local_ops.join_chunks, parts, list(range(scheme.num_chunks)), joined.dim, joined.outer)
