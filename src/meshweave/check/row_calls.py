"""How ops on rows by expert (`ir.grouped`), and on rows in blocks (`ir.blocks`), must appear in a rank graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch

from meshweave.check.calls import OPERAND, Context, LocalCall, Number
from meshweave.ir import blocks, grouped
from meshweave.ir.layout import DimSharding, Layout

ours = torch.ops.meshweave


def _grouped_mm(c: Context) -> LocalCall:
    rows, experts = (placed[1].dims[0].axes for placed in c.operands[:2])
    if not rows and not experts:
        return c.plain()
    first = [c.offsets(placed)[0] for placed in c.operands[:2]]
    numbers = (first[0] if rows else 0, first[1] if experts else 0, *_block_rows(c))
    return LocalCall(grouped.mm_piece, (OPERAND, OPERAND, OPERAND, *numbers), {})


def _block_rows(c: Context) -> tuple[int, ...]:
    """The number of rows of a block of rows in blocks, whose ends have two dims."""
    rows, ends = c.operands[0][0].shape, c.operands[2][0].shape
    return () if len(ends) == 1 else (rows[0] // ends[0],)


def _grouped_outer(c: Context) -> LocalCall:
    rows, experts = c.operands[0][1].dims[0].axes, c.results[0][1].dims[0].axes
    if not rows and not experts:
        return c.plain()
    row = c.offsets(c.operands[0])[0] if rows else 0
    numbers = (c.sizes(c.results[0])[0], row, c.offsets(c.results[0])[0], *_block_rows(c))
    return LocalCall(grouped.outer_piece, (OPERAND, OPERAND, OPERAND, *numbers), {})


def _own_experts(c: Context, layout: Layout) -> tuple[Number, Number]:
    """First index and number of each device's experts, from the layout of its owned rows."""
    ends = c.operands[1][0]
    placed = (replace(ends, shape=ends.shape[-1:]), Layout(layout.mesh, (DimSharding(layout.owned_axes),)))
    return c.offsets(placed)[0], c.sizes(placed)[0]


def _leave_rows(c: Context) -> LocalCall:
    (spec, layout), dim = c.operands[0], int(c.plain().args[2])  # type: ignore[call-overload]
    pieces = (spec, layout.without_owned())
    numbers = (c.offsets(pieces)[dim], *_own_experts(c, layout), c.sizes(pieces)[dim])
    return LocalCall(grouped.all_rows, (OPERAND, OPERAND, dim, *numbers), {})


def _enter_rows(c: Context) -> LocalCall:
    layout, dim = c.results[0][1], int(c.plain().args[2])  # type: ignore[call-overload]
    parts = prod(layout.mesh.size(axis) for axis in layout.owned_axes)
    numbers = (c.offsets(c.operands[0])[dim], *_own_experts(c, layout), parts)
    return LocalCall(grouped.own_rows, (OPERAND, OPERAND, dim, *numbers), {})


def _num_blocks(c: Context, num_blocks: int) -> Number:
    """The number of blocks of rows that each device has of the first operand."""
    spec = c.operands[0][0]
    return c.sizes(c.operands[0])[0] // max(spec.shape[0] // num_blocks, 1)


def _block_sort(c: Context) -> LocalCall:
    _, num_blocks, descending = c.plain().args
    numbers = (_num_blocks(c, num_blocks), descending, c.offsets(c.operands[0])[0])  # type: ignore[arg-type]
    return LocalCall(blocks.sort_piece, (OPERAND, *numbers), {})


def _block_counts(c: Context) -> LocalCall:
    plain = c.plain()
    _, num_ids, num_blocks = plain.args
    return LocalCall(plain.target, (OPERAND, num_ids, _num_blocks(c, num_blocks)), {})  # type: ignore[arg-type]


def _block_index(c: Context) -> LocalCall:
    return LocalCall(blocks.index_piece, (OPERAND, OPERAND, c.offsets(c.operands[0])[0]), {})


def _block_put(c: Context) -> LocalCall:
    numbers = (c.plain().args[3], c.offsets(c.operands[0])[0])
    return LocalCall(blocks.put_piece, (OPERAND, OPERAND, OPERAND, *numbers), {})


def _row_owners(c: Context) -> LocalCall:
    plain, (_, layout) = c.plain(), c.results[0]
    if not layout.dims[0].axes:
        return plain
    num_rows = c.sizes(c.results[0])[0]
    return LocalCall(plain.target, (OPERAND, num_rows, [num_rows], *plain.args[3:]), {})


def _row_readers(c: Context) -> LocalCall:
    numbers = (c.sizes(c.results[0])[1], c.offsets(c.results[0])[1])
    return LocalCall(grouped.readers_piece, (*c.plain().args[:3], *numbers), {})


ROW_CALLS: Mapping[Any, Callable[[Context], LocalCall]] = {
    ours.grouped_mm.default: _grouped_mm,
    ours.grouped_outer.default: _grouped_outer,
    ours.enter_rows.default: _enter_rows,
    ours.leave_rows.default: _leave_rows,
    ours.row_owners.default: _row_owners,
    ours.row_readers.default: _row_readers,
    ours.block_sort.default: _block_sort,
    ours.block_counts.default: _block_counts,
    ours.block_index.default: _block_index,
    ours.block_put.default: _block_put,
}
