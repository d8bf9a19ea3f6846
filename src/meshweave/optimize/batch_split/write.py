"""Writes the graph in which regions run in chunks: slices before a region, joins after it, other nodes unchanged."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from meshweave.errors import VerifyError
from meshweave.ir.collectives import OURS
from meshweave.ir.described import val_of_call
from meshweave.ir.graph import Spec, map_nodes, op_name, tensor_inputs
from meshweave.ir.traits import RESHAPES
from meshweave.optimize.batch_split.orders import HistogramChunks, RowRule, SortedChunks
from meshweave.optimize.batch_split.regions import Regions, is_view
from meshweave.optimize.batch_split.row_rules import PLAIN, PRODUCTS
from meshweave.optimize.decompose.cut import Cut, memory_order
from meshweave.optimize.decompose.writer import kept_meta

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default
_CONTIGUOUS = {"memory_format": torch.contiguous_format}
_HALF = (torch.float16, torch.bfloat16)
_SUMS = frozenset({aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim})
_JOINED = {"sum": aten.add.Tensor, "avg": aten.add.Tensor, "max": aten.maximum.default, "min": aten.minimum.default}


@dataclass(slots=True)
class RowWriter:
    """Writes the split graph of `old`, whose nodes have meta["spec"].
    `fuse_sums`: the matmul itself adds a product that sums over rows to the sum of earlier chunks; else the products
    are added in float32."""

    old: fx.Graph
    regions: Regions
    fuse_sums: bool
    new: fx.Graph = field(default_factory=fx.Graph)
    whole: dict[fx.Node, fx.Node] = field(default_factory=dict)
    chunks: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    slices: dict[tuple[fx.Node, Cut], list[fx.Node]] = field(default_factory=dict)
    copied: int = 0  # bytes that slices and joins write
    num_slices: int = 0
    num_joins: int = 0

    def run(self) -> fx.Graph:
        results = {n for output in self.old.find_nodes(op="output") for n in output.all_input_nodes}
        for node in self.old.nodes:
            rule = self.regions.rules.get(node)
            if rule is not None:
                self.split(node, rule)
            elif node.target is operator.getitem and node.args[0] in self.chunks:
                self.item(node)
            else:
                self.keep(node)
            if node in results:  # in the part of the step that computes it, not at the end
                self.as_whole(node)
        self.new.lint()
        return self.new

    # whole values

    def keep(self, node: fx.Node) -> fx.Node:
        """The node unchanged, on whole operands."""
        args, kwargs = map_nodes(node, self.as_whole)
        new = self.new.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        new.meta = dict(node.meta)
        pairs = zip(new.all_input_nodes, node.all_input_nodes, strict=True)
        changed = any(n.meta.get("val") is not o.meta.get("val") for n, o in pairs)
        if is_view(node) and changed and "val" in node.meta:  # without: its shape differs between devices
            new.meta["val"] = self.val_of_view(new)
        elif _is_item_of_view(node):
            new.meta["val"] = new.args[0].meta["val"][new.args[1]]  # type: ignore[union-attr, index]
        self.whole[node] = new
        return new

    def val_of_view(self, new: fx.Node) -> Any:
        """The val of a view of another operand than before. Views of a captured step may be reshapes of what no view
        can reshape (an expanded mask): there the operand is copied first."""
        like = new.meta["val"]
        try:
            return val_of_call(new.target, new.args, new.kwargs, like)
        except RuntimeError:
            if new.target not in RESHAPES:
                raise
        with self.new.inserting_before(new):
            new.args = (self.contiguous(new.args[0], new, None), *new.args[1:])  # type: ignore[arg-type]
        return val_of_call(new.target, new.args, new.kwargs, like)

    def as_whole(self, node: fx.Node) -> fx.Node:
        """The whole value: as computed, as a view of a whole value, or its chunks joined."""
        if node in self.whole:
            return self.whole[node]
        if is_view(node) or _is_item_of_view(node):
            return self.keep(node)
        cut = self.regions.cuts[node]
        assert not isinstance(cut, SortedChunks), f"{node.name} is in another order in every chunk"
        is_sum = isinstance(cut, HistogramChunks)
        joined = self.together(node, self.chunks[node], "sum") if is_sum else self.join(node, self.chunks[node], cut)
        self.whole[node] = joined
        return joined

    def join(self, node: fx.Node, chunks: Sequence[fx.Node], cut: Cut) -> fx.Node:
        """Chunks concatenated, with the value's memory layout."""
        val = node.meta["val"]
        order = memory_order(val)
        back = [order.index(d) for d in range(len(order))]
        dim, shape = order.index(cut.dim), [val.shape[d] for d in order]
        parts = []
        for chunk in chunks:
            part = self.permuted(chunk, order, node)
            if cut.outer > 1:
                part = self.viewed(part, _unfolded(shape, dim, cut.outer, cut.count, 1), node)
            parts.append(part)
        joined = self.call(aten.cat.default, (parts, dim + (cut.outer > 1)), {}, node)
        if cut.outer > 1:
            joined = self.viewed(joined, shape, node)
        self.num_joins += 1
        self.copied += node.meta["spec"].num_bytes
        return self.permuted(joined, back, node)

    def permuted(self, x: fx.Node, order: Sequence[int], like: fx.Node) -> fx.Node:
        if list(order) == sorted(order):
            return x
        return self.call(aten.permute.default, (x, list(order)), {}, like)

    def viewed(self, x: fx.Node, shape: Sequence[int], like: fx.Node, c: int | None = None) -> fx.Node:
        """x in another shape; a copy if its memory layout requires it."""
        try:
            return self.call(aten.view.default, (x, list(shape)), {}, like, c)
        except RuntimeError:
            return self.call(aten.view.default, (self.contiguous(x, like, c), list(shape)), {}, like, c)

    # chunks

    def as_chunk(self, node: fx.Node, cut: Cut, c: int) -> fx.Node:
        """Chunk c of a value: as computed, or sliced from the whole value."""
        if node in self.chunks and self.regions.cuts.get(node) == cut:
            return self.chunks[node][c]
        slices = self.slices.setdefault((node, cut), [])
        while len(slices) <= c:
            slices.append(self.slice(node, cut, len(slices)))
        return slices[c]

    def slice(self, node: fx.Node, cut: Cut, c: int) -> fx.Node:
        """Chunk c of a whole value: a view if the chunk is a single stretch of its dim or single rows at equal
        distances, else a copy."""
        whole = self.as_whole(node)
        shape = tuple(whole.meta["val"].shape)
        size = shape[cut.dim] // cut.count
        self.num_slices += 1
        if cut.outer == 1:
            return self.call(aten.slice.Tensor, (whole, cut.dim, c * size, (c + 1) * size), {}, node, c)
        wide = self.viewed(whole, _unfolded(shape, cut.dim, cut.outer, 1, cut.count), node)
        part = self.call(aten.slice.Tensor, (wide, cut.dim + 1, c, c + 1), {}, node, c)
        return self.viewed(part, cut.chunk(shape), node, c)

    def split(self, node: fx.Node, rule: RowRule) -> None:
        """The op once per chunk, and a whole result where the chunks' results have to be combined."""
        chunks: list[fx.Node] = []
        for c in range(self.regions.count):
            chunks.append(self.chunk_of(node, rule, c, chunks))
        if isinstance(node.meta.get("spec"), tuple) or isinstance(rule.results[0], Cut):
            self.chunks[node] = chunks
        else:
            self.whole[node] = self.together(node, chunks, rule.results[0])

    def chunk_of(self, node: fx.Node, rule: RowRule, c: int, before: Sequence[fx.Node]) -> fx.Node:
        operands = [
            self.as_whole(n) if cut is None else self.as_chunk(n, cut, c)
            for n, cut in zip(tensor_inputs(node), rule.operands, strict=True)
        ]
        rest = iter(operands)
        args, kwargs = map_nodes(
            node, lambda n: next(rest) if isinstance(n.meta.get("spec"), Spec) else self.as_whole(n)
        )
        target = node.target
        if rule.shape_at >= 0 and isinstance(cut := rule.results[0], Cut):
            args = _replaced(args, rule.shape_at, list(cut.chunk(node.meta["spec"].shape)))
        for at in rule.splits_at:
            sizes: Any = args[at]
            count = self.regions.count
            args = _replaced(args, at, sizes // count if isinstance(sizes, int) else [size // count for size in sizes])
        if before and rule.results[0] == "chain":
            args = _replaced(args, 0, before[-1])
        elif before and rule.results[0] == "sum" and target in PRODUCTS:
            sum_before = (before[-1],) if self.is_fused(node) else ()
            target, args, kwargs = (
                PRODUCTS[target] if sum_before else PLAIN.get(target, target),
                (*sum_before, *args[-2:]),
                {},
            )
        elif target in _SUMS and rule.results[0] in ("sum", "avg") and node.meta["spec"].dtype in _HALF:
            kwargs = {**kwargs, "dtype": torch.float32}
        return self.op(target, args, kwargs, node, c)

    def is_fused(self, node: fx.Node) -> bool:
        return self.fuse_sums and node.meta["spec"].dtype.is_floating_point

    def op(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], node: fx.Node, c: int) -> fx.Node:
        """An op on chunks. A slice whose memory layout the op cannot take is copied."""
        for at in _CONTIGUOUS_OPERANDS.get(target, ()):
            args = _replaced(args, at, self.contiguous(args[at], node, c))
        try:
            return self.call(target, args, kwargs, node, c)
        except RuntimeError as error:
            if target not in RESHAPES:
                raise VerifyError(
                    "an op cannot take chunks of its rows, although its sharding rule says so",
                    where=f"node {node.name} ({op_name(node.target)})",
                    got=str(error),
                    hint="fix the rule in sharding/, or the registered rule",
                ) from error
            return self.call(target, (self.contiguous(args[0], node, c), *args[1:]), kwargs, node, c)

    def contiguous(self, x: fx.Node, like: fx.Node, c: int | None) -> fx.Node:
        if x.meta["val"].is_contiguous():
            return x
        self.copied += x.meta["val"].nbytes
        return self.call(aten.clone.default, (x,), _CONTIGUOUS, like, c)

    def item(self, node: fx.Node) -> None:
        """A result of an op that has several."""
        of, index = node.args
        chunks = [self.call(operator.getitem, (part, index), {}, node, c) for c, part in enumerate(self.chunks[of])]  # type: ignore[index]
        kind = self.regions.rules[of].results[index]  # type: ignore[index]
        if isinstance(kind, Cut):
            self.chunks[node] = chunks
        else:
            self.whole[node] = self.together(node, chunks, kind)

    def together(self, node: fx.Node, chunks: Sequence[fx.Node], kind: str) -> fx.Node:
        """The whole result, from the results of the chunks."""
        if kind == "same":
            return chunks[0]
        fused = kind == "sum" and node.target in PRODUCTS and self.is_fused(node)
        if kind == "chain" or fused:
            return chunks[-1]
        dtype = node.meta["spec"].dtype
        parts = list(chunks)
        if kind in ("sum", "avg") and dtype in _HALF:
            parts = [p if p.meta["val"].dtype is torch.float32 else self.cast(p, torch.float32, node) for p in parts]
        total = parts[0]
        for part in parts[1:]:
            total = self.call(_JOINED[kind], (total, part), {}, node)
        if kind == "avg":
            total = self.call(aten.div.Tensor, (total, len(parts)), {}, node)
        return total if total.meta["val"].dtype is dtype else self.cast(total, dtype, node)

    def cast(self, x: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
        return self.call(convert, (x, dtype), {}, like)

    def call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node, c: int | None = None
    ) -> fx.Node:
        """A new node instead of `like`, for chunk c if it belongs to one."""
        is_item = target is operator.getitem
        val = args[0].meta["val"][args[1]] if is_item else val_of_call(target, args, kwargs, like.meta["val"])
        name = like.name if c is None else f"{like.name}_chunk{c}"
        new = self.new.create_node("call_function", target, args, kwargs, name)
        new.meta = kept_meta(like) | {"val": val}
        return new


def _is_item_of_view(node: fx.Node) -> bool:
    """Whether a value is of a list of views, as of a split."""
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and is_view(node.args[0])


# The operands that an op requires to be contiguous. Layer norm's kernel reads its statistics so, unchecked.
_CONTIGUOUS_OPERANDS: Mapping[Any, tuple[int, ...]] = {
    **{row.op: (0,) for row in OURS if row.may_cut},
    aten.native_layer_norm_backward.default: (3, 4),
}


def _unfolded(shape: Sequence[int], dim: int, outer: int, split: int, count: int) -> list[int]:
    """`shape` with `dim` seen as [outer, (count,) inner]; of a chunk if `split` chunks make up the dim."""
    inner = shape[dim] // outer // split // count
    return [*shape[:dim], outer, *([count] if count > 1 else []), inner, *shape[dim + 1 :]]


def _replaced(args: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*args[:at], value, *args[at + 1 :])
