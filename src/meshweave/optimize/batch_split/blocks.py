"""Rows sorted by expert in blocks: each group of devices sorts the rows of its own part of the batch.

A model sorts the rows of all tokens by expert. If data parallelism cuts the batch a device would have to wait for the
tokens of all others, and would get the rows of other tokens than its own. So such a step is rewritten before it is
placed: the rows of each block of the batch are sorted, counted, looked up and added by themselves (`ir.blocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from meshweave.ir.graph import Spec, StepGraph, argument, copy_meta, is_descending, row_index, spec_of, tensor_inputs
from meshweave.ir.grouped import BY_ROWS
from meshweave.ir.traits import CASTS
from meshweave.ir.verify import verify_step
from meshweave.optimize.batch_split.captured import described, has_experts
from meshweave.optimize.batch_split.orders import HistogramChunks, SortedChunks, counted
from meshweave.optimize.batch_split.regions import Regions, regions
from meshweave.optimize.batch_split.row_rules import fits
from meshweave.optimize.decompose.cut import FIXED, Cut

aten = torch.ops.aten
ours = torch.ops.meshweave


def in_blocks(step: StepGraph, num_blocks: int) -> StepGraph:
    """The step in which the rows of experts are sorted in each of `num_blocks` parts of the batch, wherever the result
    is the same; the step itself if there are no such rows.

    Values are equal but for the order in which sums over rows are added. A sort whose order is needed for all rows
    stays whole (`rows.orders`).
    """
    if num_blocks == 1 or not has_experts(step):
        return step
    cut, graph = Cut(0, 1, num_blocks), described(step)
    inputs = zip(step.inputs, graph.find_nodes(op="placeholder"), strict=True)
    rows = [node for item, node in inputs if item.kind == "batch" and item.spec.shape and fits(cut, item.spec.shape)]
    chunked = _in_contiguous_blocks(graph, dict.fromkeys(rows, cut)) if rows else None
    if chunked is None or not any(node.target in BY_ROWS for node in chunked.rules):
        return step
    return verify_step(replace(step, graph=_BlockWriter(graph, chunked, num_blocks).run()))


def _in_contiguous_blocks(graph: fx.Graph, seeds: Mapping[fx.Node, Cut]) -> Regions:
    """The ops that may run block by block, without sorts and counts of rows whose blocks are not contiguous, and
    without counts of anything but integers."""
    while True:
        chunked = regions(graph, seeds)
        whole = {node: why for node, cut in chunked.cuts.items() if (why := _why_whole(cut)) and FIXED not in node.meta}
        if not whole:
            return chunked
        for node, why in whole.items():
            for op in (node, *node.all_input_nodes):
                op.meta.setdefault(FIXED, why)


def _why_whole(cut: Cut) -> str:
    if isinstance(cut, HistogramChunks) and cut.of is not None and not spec_of(cut.of).is_integer:
        return "it counts numbers that may not be integers"
    is_scattered = isinstance(cut, (SortedChunks, HistogramChunks)) and cut.outer > 1
    return "the rows of a block do not follow each other" if is_scattered else ""


@dataclass(slots=True)
class _BlockWriter:
    """Writes the graph with rows in blocks. Only ops that use positions of rows, or their number, are replaced."""

    old: fx.Graph
    chunked: Regions
    num_blocks: int
    new: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)
    counts: dict[fx.Node, fx.Node] = field(default_factory=dict)  # [blocks, ...], instead of the sum over all blocks

    def run(self) -> fx.Graph:
        for node in self.old.nodes:
            is_count = isinstance(self.cut(node), HistogramChunks)
            table = _OF_COUNTS if is_count else _OF_ROWS
            write = table.get(node.target) if node in self.chunked.rules else None
            new = write(self, node) if write is not None else None
            if new is None:
                new = self.new.node_copy(node, self.value)
            (self.counts if is_count else self.values)[node] = new
            new.meta.pop("val", None)
            new.meta.pop(FIXED, None)
        self.new.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        self.new.lint()
        return self.new

    def value(self, node: fx.Node) -> fx.Node:
        """The value in the new graph; counts of all rows are the sum of those of the blocks."""
        if node not in self.values:
            spec = spec_of(node)
            total = self.new.call_function(aten.sum.dim_IntList, (self.counts[node], [0], False), {"dtype": spec.dtype})
            self.values[node] = copy_meta(node, total)
        return self.values[node]

    def call(self, like: fx.Node, target: Any, *args: Any, spec: Any = None, **kwargs: Any) -> fx.Node:
        new = self.new.call_function(target, args, kwargs)
        return copy_meta(like, new, spec=like.meta["spec"] if spec is None else spec)

    def cut(self, node: fx.Node) -> Cut | None:
        return self.chunked.cuts.get(node)


def _sort(writer: _BlockWriter, node: fx.Node) -> fx.Node | None:
    (x,) = tensor_inputs(node)
    if len(spec_of(x).shape) != 1:  # each row by itself
        return None
    return writer.call(node, ours.block_sort.default, writer.value(x), writer.num_blocks, is_descending(node))


def _lookup(writer: _BlockWriter, node: fx.Node) -> fx.Node | None:
    at = _places(writer, node)
    if at is None:
        return None
    return writer.call(node, ours.block_index.default, writer.value(tensor_inputs(node)[0]), at, writer.num_blocks)


def _put(writer: _BlockWriter, node: fx.Node) -> fx.Node | None:
    at, args = _places(writer, node), node.args
    if at is None:
        return None
    into, values = writer.value(tensor_inputs(node)[0]), writer.value(argument(node, 2))
    is_added = len(args) > 3 and bool(args[3])
    return writer.call(node, ours.block_put.default, into, at, values, is_added, writer.num_blocks)


def _places(writer: _BlockWriter, node: fx.Node) -> fx.Node | None:
    """The index along dim 0, if it consists of positions of rows of the same block."""
    at = row_index(node)
    cut = writer.cut(at) if at is not None else None
    return writer.value(at) if at is not None and isinstance(cut, SortedChunks) and cut.into is not None else None


def _counts(writer: _BlockWriter, node: fx.Node) -> fx.Node:
    spec, blocks, ids = spec_of(node), writer.num_blocks, counted(node)
    assert ids is not None, f"{node.name} is in chunks as a count"
    (num_ids,) = spec.shape
    rows = Spec((spec_of(ids).num_elements,), spec_of(ids).dtype)
    flat = writer.call(ids, aten.view.default, writer.value(ids), list(rows.shape), spec=rows)
    counts = Spec((blocks, num_ids), torch.int64)
    new = writer.call(node, ours.block_counts.default, flat, num_ids, blocks, spec=counts)
    if spec.dtype is torch.int64:
        return new
    return writer.call(node, aten._to_copy.default, new, spec=Spec(counts.shape, spec.dtype), dtype=spec.dtype)


def _same_counts(writer: _BlockWriter, node: fx.Node) -> fx.Node:
    """A cast, or a running sum, of the counts of each block."""
    (of,), spec, rest = tensor_inputs(node), spec_of(node), node.args[1:]
    if node.target is aten.cumsum.default:
        rest = (1,)
    spec = Spec((writer.num_blocks, *spec.shape), spec.dtype)
    return writer.call(node, node.target, writer.counts[of], *rest, spec=spec, **node.kwargs)


def _by_expert(writer: _BlockWriter, node: fx.Node) -> fx.Node:
    *operands, ends = tensor_inputs(node)
    return writer.call(node, node.target, *map(writer.value, operands), writer.counts[ends])


_OF_ROWS: Mapping[Any, Callable[[_BlockWriter, fx.Node], fx.Node | None]] = {
    **dict.fromkeys((aten.sort.default, aten.sort.stable), _sort),
    **dict.fromkeys((aten.index.Tensor, aten.index_select.default), _lookup),
    **dict.fromkeys((aten.index_put.default, aten._unsafe_index_put.default), _put),
    **dict.fromkeys((ours.grouped_mm.default, ours.grouped_outer.default), _by_expert),
}
_OF_COUNTS: Mapping[Any, Callable[[_BlockWriter, fx.Node], fx.Node]] = {
    **dict.fromkeys((aten.histc.default, aten.sum.dim_IntList), _counts),
    **dict.fromkeys((aten.cumsum.default, *CASTS), _same_counts),
}
