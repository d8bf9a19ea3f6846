"""Writes a collective and its matmuls anew, chunk by chunk, in place of start, wait and matmuls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from meshweave.decompose.algorithms import Algorithm
from meshweave.decompose.chunks import Chunker, Downstream, Shapes, Upstream
from meshweave.decompose.cut import Cut, is_same
from meshweave.decompose.emit import Consume, Produce, write_gather, write_reduce
from meshweave.decompose.writer import Number, Ring, Writer
from meshweave.ir import local_ops
from meshweave.ir.rank import WAIT, collectives

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Way:
    """How a collective is taken apart: by an algorithm of the table, or (None) as `num_chunks` collectives of the same
    kind, each of a part of every device's piece."""

    row: Algorithm | None
    num_chunks: int

    def __str__(self) -> str:
        return self.row.name if self.row is not None else "pipelined"


def wait_of(start: fx.Node) -> fx.Node:
    (wait,) = (user for user in start.users if user.target is WAIT)
    return wait


def inherit(made: fx.Node, old: fx.Node, shapes: Shapes) -> fx.Node:
    """`made` stands for `old` from now on."""
    shapes.local.values[made] = shapes.local.values[old]
    made.meta |= {key: old.meta[key] for key in ("spec", "global", "origin") if key in old.meta}
    old.replace_all_uses_with(made)
    return made


def erase_unused(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Take out those of the nodes that nobody uses any more, and what only they used."""
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.users or node.op != "call_function" or node.graph is not graph or node._erased:
            continue
        waiting += node.all_input_nodes
        graph.erase_node(node)


# gathers


@dataclass(slots=True)
class _Results:
    """The products of the chunks, to be put together."""

    write: Writer
    wide: torch.dtype
    numbers: list[Number]
    parts: dict[fx.Node, list[fx.Node]]

    def put(self, consumer: fx.Node, cut: object) -> fx.Node:
        parts, numbers = self.parts[consumer], list(self.numbers)
        if isinstance(cut, Cut):
            return self.write.call(local_ops.join_chunks, parts, numbers, cut.dim, cut.outer, like=consumer)
        return self.write.call(local_ops.sum_parts, parts, numbers, self.wide, like=consumer)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of values of a dtype are taken unless said otherwise: float32 for half precision."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def rewrite_gather(
    write: Writer, start: fx.Node, found: Downstream, ring: Ring, way: Way, shapes: Shapes, wide: torch.dtype
) -> None:
    """An all-gather and the matmuls that `found` leads to. Who else reads the gathered value finds it put together."""
    wait = wait_of(start)
    write.follow(start, wait)
    piece = start.args[0]
    assert isinstance(piece, fx.Node)
    results = _Results(write, wide, [], {consumer: [] for consumer in found.consumers})
    chunks: list[fx.Node] = []

    def consume(number: Number, chunk: fx.Node) -> None:
        chunker = Chunker(write, shapes, number, {wait: chunk})
        results.numbers.append(number)
        chunks.append(chunk)
        for consumer, cut in found.consumers.items():
            results.parts[consumer].append(chunker.down(consumer, found.cuts, cut))

    if way.row is not None:
        write_gather(write, way.row, ring, piece, consume, start)
    else:
        _write_parts_gathered(write, start, _of_piece(found.cuts[wait], ring), consume)
    for consumer, cut in found.consumers.items():
        inherit(results.put(consumer, cut), consumer, shapes)
    erase_unused(write.graph, [*found.consumers, *found.cuts])
    if not wait._erased:
        kept = _kept(wait, found)
        cut = found.cuts[kept]
        inherit(write.call(local_ops.join_chunks, chunks, results.numbers, cut.dim, cut.outer), kept, shapes)
        erase_unused(write.graph, [kept])


def _kept(wait: fx.Node, found: Downstream) -> fx.Node:
    """What is put together of the chunks: the gathered value, or the join of its blocks, if that alone reads it."""
    (first, *others) = wait.users
    is_join = not others and first in found.cuts and is_same(first, found.cuts[first])
    return first if is_join else wait


def _of_piece(cut: Cut, ring: Ring) -> Cut:
    """The cut of one of the blocks of a group, where all of them, stacked along dim 0, are cut so."""
    return cut if cut.dim else Cut(0, cut.outer // ring.size, cut.count)


def _write_parts_gathered(write: Writer, start: fx.Node, cut: Cut, consume: Consume) -> None:
    """Part i of every piece is gathered while part i - 1 is computed with."""
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


def rewrite_scatter(
    write: Writer, start: fx.Node, found: Upstream, ring: Ring, way: Way, shapes: Shapes, wide: torch.dtype
) -> None:
    """A reduce-scatter and the matmuls that make its operand."""
    wait = wait_of(start)
    write.follow(start, start)
    operand = start.args[0]
    assert isinstance(operand, fx.Node)
    if way.row is not None:
        dtype = shapes.local.values[operand][0].dtype
        produce = _producer(write, shapes, found.cuts, operand)
        made = write_reduce(write, way.row, ring, produce, dtype, wide, wait)
    else:
        made = _write_parts_reduced(write, start, found, way, shapes, _of_piece(found.cuts[operand], ring))
    inherit(made, wait, shapes)
    erase_unused(write.graph, [wait])


def rewrite_reduce(
    write: Writer, start: fx.Node, found: Upstream, ring: Ring, way: Way, shapes: Shapes, wide: torch.dtype
) -> None:
    """An all-reduce and the matmuls that make its operand: as a reduce-scatter that is taken apart and an all-gather,
    or as all-reduces of parts."""
    wait = wait_of(start)
    write.follow(start, start)
    operand = start.args[0]
    assert isinstance(operand, fx.Node)
    cut = found.cuts[operand]
    if way.row is None:
        made = _write_parts_reduced(write, start, found, way, shapes, cut)
    else:
        dtype = shapes.local.values[operand][0].dtype
        own = write_reduce(write, way.row, ring, _producer(write, shapes, found.cuts, operand), dtype, wide)
        gather = collectives.all_gather_into_tensor.default
        begun = write.call(gather, write.contiguous(own), ring.size, ring.group)
        write.place = wait
        made = write.wait(begun)
        if cut.dim:
            made = write.call(local_ops.join_blocks, made, [ring.size], [0], cut.dim, None)
    inherit(made, wait, shapes)
    erase_unused(write.graph, [wait])


def _producer(write: Writer, shapes: Shapes, cuts: Mapping[fx.Node, Cut], operand: fx.Node) -> Produce:
    return lambda number: Chunker(write, shapes, number).up(operand, cuts)


def _write_parts_reduced(
    write: Writer, start: fx.Node, found: Upstream, way: Way, shapes: Shapes, joined: Cut
) -> fx.Node:
    """Part i is reduced while part i + 1 is computed; the results are put together at the wait."""
    operand, *args = start.args
    assert isinstance(operand, fx.Node)
    produce, begun = _producer(write, shapes, found.cuts, operand), list[fx.Node]()
    for i in range(way.num_chunks):
        begun.append(write.call(start.target, write.contiguous(produce(i)), *args))
    write.place = wait_of(start)
    parts = [write.wait(one) for one in begun]
    return write.call(local_ops.join_chunks, parts, list(range(way.num_chunks)), joined.dim, joined.outer)
