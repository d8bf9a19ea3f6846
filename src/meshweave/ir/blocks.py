"""Ops on rows in blocks, in which each block needs only its own rows.

A value of `blocks * n` rows has blocks of n consecutive rows, for example those of the devices that share a batch. The
ops below are sort, count, lookup and indexed sum. Positions are those of the whole value, but a row refers only to rows
of the block with the same number. So devices that have different blocks need nothing of each other.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from meshweave.ir.ops import define_op

aten = torch.ops.aten


@define_op("block_sort")
def block_sort(x: Tensor, blocks: int, descending: bool) -> tuple[Tensor, Tensor]:
    """x [blocks * n], sorted stably in each block: the values, and their positions in x."""
    return sort_piece(x, blocks, descending, 0)


@block_sort.register_fake
def _(x: Tensor, blocks: int, descending: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)


def sort_piece(x: Tensor, blocks: int, descending: bool, first_row: int) -> tuple[Tensor, Tensor]:
    """`block_sort` of the `blocks` blocks that begin at row `first_row` of a larger value."""
    rows = x.shape[0] // max(blocks, 1)
    values, order = x.reshape(blocks, rows).sort(dim=1, stable=True, descending=descending)
    starts = torch.arange(blocks, device=x.device).unsqueeze(1) * rows + first_row
    return values.view(-1), (order + starts).view(-1)


@define_op("block_counts")
def block_counts(ids: Tensor, num_ids: int, blocks: int) -> Tensor:
    """How often each of the numbers 0 .. `num_ids` - 1 occurs in each block of ids [blocks * n], integers of any dtype:
    [blocks, num_ids] int64. Other integers are not counted."""
    ids = ids.long()
    at = torch.where((ids >= 0) & (ids < num_ids), ids, num_ids).reshape(blocks, ids.shape[0] // max(blocks, 1))
    counts = at.new_zeros((blocks, num_ids + 1))
    return counts.scatter_add_(1, at, torch.ones_like(at))[:, :num_ids].contiguous()


@block_counts.register_fake
def _(ids: Tensor, num_ids: int, blocks: int) -> Tensor:
    return ids.new_empty((blocks, num_ids), dtype=torch.int64)


@define_op("block_index")
def block_index(x: Tensor, index: Tensor, blocks: int) -> Tensor:
    """x[index] along dim 0, whose index stays in the same block: x [blocks * m, ...], index [blocks * n] ->
    [blocks * n, ...]."""
    return aten.index.Tensor(x, [index])


@block_index.register_fake
def _(x: Tensor, index: Tensor, blocks: int) -> Tensor:
    return x.new_empty((*index.shape, *x.shape[1:]))


def index_piece(x: Tensor, index: Tensor, first_row: int) -> Tensor:
    """`block_index` of the blocks of x that begin at row `first_row` of the whole value."""
    return x.index_select(0, index - first_row)  # unlike x[...] it refuses negative numbers


@define_op("block_put")
def block_put(x: Tensor, index: Tensor, values: Tensor, accumulate: bool, blocks: int) -> Tensor:
    """x [blocks * m, ...] with `values` [blocks * n, ...] written to, or added to, the rows at `index` [blocks * n],
    which stays in the same block."""
    return aten.index_put.default(x, [index], values, accumulate)


@block_put.register_fake
def _(x: Tensor, index: Tensor, values: Tensor, accumulate: bool, blocks: int) -> Tensor:
    return torch.empty_like(x)


def put_piece(x: Tensor, index: Tensor, values: Tensor, accumulate: bool, first_row: int) -> Tensor:
    """`block_put` for the blocks of x that begin at row `first_row` of the whole value."""
    at = index - first_row
    at = torch.where(at < 0, x.shape[0], at)  # a row of an earlier block is refused, and not counted from the end
    return aten.index_put.default(x, [at], values, accumulate)


_NUM_AT = {
    torch.ops.meshweave.block_sort.default: 1,
    torch.ops.meshweave.block_counts.default: 2,
    torch.ops.meshweave.block_index.default: 2,
    torch.ops.meshweave.block_put.default: 4,
}


def num_blocks_of(node: fx.Node) -> int:
    """The number of blocks that the op of a node, or of the tuple that it is an element of, works in; 0 for ops on
    other rows."""
    op: Any = node.args[0] if node.target is operator.getitem else node
    at = _NUM_AT.get(op.target)
    return 0 if at is None else op.args[at]
