"""How the rank-graph ops that are not torch operators run on chunks of rows: `ir.local_ops` on pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from meshweave.chunks.cut import Cut, NoCut, Op, kind_of
from meshweave.ir import local_ops
from meshweave.ir.graph import spec_of, tensor_inputs
from meshweave.rows.row_rule import End, RowRule


def _blocks(node: fx.Node, end: End, cut: Cut) -> RowRule:
    """Blocks of a group, stacked or side by side: every block is cut equally, along another dim than that of blocks."""
    dim = int(node.args[3])  # type: ignore[arg-type]
    (source,) = tensor_inputs(node)
    op, kind = Op(node, (spec_of(source).shape,), spec_of(node).shape), kind_of(node)
    assert kind is not None, "blocks have their own table of kinds"
    other = kind.backward(op, cut)[0] if end.is_result else kind.forward(op, 0, cut)
    operand, result = (other, cut) if end.is_result else (cut, other)
    if not isinstance(operand, Cut) or not isinstance(result, Cut):
        raise NoCut("its chunks do not match its blocks")
    side_by_side = result if node.target is local_ops.join_blocks else operand
    if side_by_side.dim == dim:
        raise NoCut("the rows are the dim that its blocks divide")
    return RowRule((operand,), (result,))


def _embedding(node: fx.Node, end: End, cut: Cut) -> RowRule:
    """Rows of indices; the table is whole."""
    _, index = tensor_inputs(node)
    if (not end.is_result and end.index == 0) or cut.dim >= len(spec_of(index).shape):
        raise NoCut("the rows are the dim that its indices refer to")
    return RowRule((None, cut), (cut,))


def _along(node: fx.Node, end: End, cut: Cut) -> RowRule:
    """gather, index into equally many rows, and scatter: all operands are cut equally, beside their dim."""
    operands = tensor_inputs(node)
    shapes = [spec_of(n).shape for n in (*operands, node)]
    if cut.dim == int(node.args[1]) % len(shapes[0]):  # type: ignore[arg-type, operator]
        raise NoCut("the rows are the dim that its indices refer to")
    if len({shape[cut.dim : cut.dim + 1] for shape in shapes}) > 1:
        raise NoCut("its index has other rows than its operand")
    return RowRule((cut,) * len(operands), (cut,))


def _extreme(node: fx.Node, end: End, cut: Cut) -> RowRule:
    """Max or min over some dims."""
    rank = len(spec_of(tensor_inputs(node)[0]).shape)
    reduced = {d % rank for d in node.args[1]} or set(range(rank))  # type: ignore[union-attr, operator]
    kept_dims = [d for d in range(rank) if node.args[2] or d not in reduced]  # dims of the result
    at = kept_dims[cut.dim] if end.is_result else cut.dim
    if at in reduced:
        raise NoCut("the rows are reduced by max or min")
    return RowRule((Cut(at, cut.outer, cut.count),), (Cut(kept_dims.index(at), cut.outer, cut.count),))


LOCAL: Mapping[Any, Callable[[fx.Node, End, Cut], RowRule]] = {
    local_ops.join_blocks: _blocks,
    local_ops.deal_blocks: _blocks,
    local_ops.embedding: _embedding,
    local_ops.gather: _along,
    local_ops.scatter: _along,
    local_ops.extreme: _extreme,
}
