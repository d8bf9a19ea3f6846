"""Sharding rules of rows by expert (`ir.grouped`) and of rows in blocks (`ir.blocks`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import fx

from meshweave.ir import blocks, grouped
from meshweave.ir.graph import argument, spec_of, tensor_inputs
from meshweave.ir.grouped import key_of
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.ops import is_zeros
from meshweave.ops.emit import Number
from meshweave.ops.factors import Dim, Keyed, Rule, RuleBuilder, sums
from meshweave.ops.pieces import OnPiece, PieceCall
from meshweave.ops.registry import add

ours = torch.ops.meshweave


def _rows_and_ends(build: RuleBuilder, num_rows: int, ends: Sequence[int]) -> tuple[Dim, list[Dim]]:
    """The dim of rows by expert, and the dims of their ends [experts], or [blocks, experts] for rows in blocks."""
    outer = tuple(build.factor(size) for size in ends[:-1])
    rows = build.factor(num_rows // max(prod(ends[:-1]), 1))
    return (*outer, rows), [*((block,) for block in outer), (build.factor(ends[-1], whole=True),)]


def _by_expert(rule: Rule, node: fx.Node, rows: Dim, experts: int, positions: frozenset[int]) -> Rule:
    block = rows[0] if len(rows) > 1 else -1
    return replace(rule, keyed=Keyed(experts, rows[-1], key_of(node), positions), block=block)


def _grouped_mm(node: fx.Node) -> Rule:
    """x [s, k], weight [e, k, n], ends [e] -> [s, n]. A device with experts has their rows."""
    x, weight, ends = (spec_of(n).shape for n in tensor_inputs(node))
    build = RuleBuilder()
    rows, lasts = _rows_and_ends(build, x[0], ends)
    k, e, n = (build.factor(size) for size in (x[1], weight[0], weight[2]))
    rule = build.rule([[rows, (k,)], [(e,), (k,), (n,)], lasts], [[rows, (n,)]], sums({0}, {1}))
    return _by_expert(rule, node, rows, e, frozenset({0, 3}))


def _grouped_outer(node: fx.Node) -> Rule:
    """x [s, k], grad [s, n], ends [e] -> [e, k, n], a sum over the rows."""
    x, grad, ends = (spec_of(n).shape for n in tensor_inputs(node))
    build = RuleBuilder()
    rows, lasts = _rows_and_ends(build, x[0], ends)
    k, n, e = (build.factor(size) for size in (x[1], grad[1], ends[-1]))
    rule = build.rule([[rows, (k,)], [rows, (n,)], lasts], [[(e,), (k,), (n,)]], sums({0}, {1}))
    return _by_expert(rule, node, rows, e, frozenset({0, 1}))


def _rows_of_others(node: fx.Node, position: int) -> Rule:
    """x and ends -> x. Rows are owned in the tensor at `position`; in the other tensor they are whole, or partial
    sums."""
    x, ends = (spec_of(n).shape for n in tensor_inputs(node))
    dim = argument(node, 2)
    build = RuleBuilder()
    rows, lasts = _rows_and_ends(build, x[dim], ends)
    dims = [rows if d == dim else (build.factor(size),) for d, size in enumerate(x)]
    experts = build.factor(ends[-1])
    return _by_expert(build.rule([dims, lasts], [dims], sums({0})), node, rows, experts, frozenset({position}))


def _row_owners(node: fx.Node) -> Rule:
    """ends -> [rows, copies]. Every device computes all rows, or those of its blocks."""
    (ends,), (rows, copies) = (spec_of(n).shape for n in tensor_inputs(node)), spec_of(node).shape
    build = RuleBuilder()
    dim, lasts = _rows_and_ends(build, rows, ends)
    build.fixed.add(dim[-1])
    return build.rule([lasts], [[dim, (build.factor(copies, whole=True),)]])


def _row_readers(node: fx.Node) -> Rule:
    """Rows [rows, copies], and their places [rows] -> [members, places]."""
    (rows, copies), *places = (spec_of(n).shape for n in tensor_inputs(node))
    build, (count, num_places) = RuleBuilder(), spec_of(node).shape
    dim, at = _row_dims(build, argument(node, 4), rows, num_places)
    whole = [(build.factor(size, whole=True),) for size in (copies, count)]
    return build.rule([[dim, whole[0]], *([dim] for _ in places)], [[whole[1], at]])


def _row_dims(build: RuleBuilder, num_blocks: int, *sizes: int) -> list[Dim]:
    """Dims of rows that are all in `num_blocks` blocks; within a block they are whole."""
    block = build.factor(num_blocks)
    return [(block, build.factor(size // num_blocks, whole=True)) for size in sizes]


def _block_sort(node: fx.Node) -> Rule:
    build = RuleBuilder()
    (rows,) = _row_dims(build, argument(node, 1), *spec_of(tensor_inputs(node)[0]).shape)
    return replace(build.rule([[rows]], [[rows], [rows]]), block=rows[0])


def _block_counts(node: fx.Node) -> Rule:
    """ids [rows] -> [blocks, numbers]."""
    (ids,) = (spec_of(n).shape for n in tensor_inputs(node))
    build = RuleBuilder()
    (rows,) = _row_dims(build, argument(node, 2), ids[0])
    rule = build.rule([[rows]], [[rows[:-1], (build.factor(argument(node, 1), whole=True),)]])
    return replace(rule, block=rows[0])


def _block_index(node: fx.Node) -> Rule:
    """x [places, ...], index [rows] -> [rows, ...]. Devices may look up their own rows of each block."""
    x, index = (spec_of(n).shape for n in tensor_inputs(node))
    build = RuleBuilder()
    places, rows = _row_dims(build, argument(node, 2), x[0], index[0])
    build.fixed.discard(rows[-1])
    rest = build.dims(x[1:])
    rule = build.rule([[places, *rest], [rows]], [[rows, *rest]], sums({0}))
    return replace(rule, placed=frozenset({places[-1]}), block=places[0])


def _block_put(node: fx.Node) -> Rule:
    """x [places, ...], index [rows], values [rows, ...] -> like x. If values are added to zeros devices may add their
    own rows of each block: the results are partial sums."""
    x, index, values = (spec_of(n).shape for n in tensor_inputs(node))
    build, is_added = RuleBuilder(), bool(argument(node, 3))
    places, rows = _row_dims(build, argument(node, 4), x[0], index[0])
    if is_added and is_zeros(argument(node, 0)):
        build.fixed.discard(rows[-1])
    rest = build.dims(x[1:])
    source = [rows, *build.broadcast(values[1:], rest)]
    rule = build.rule([[places, *rest], [rows], source], [[places, *rest]], sums({0, 2}) if is_added else ())
    return replace(rule, placed=frozenset({places[-1]}), block=places[0])


# How these run on pieces.


def _grouped_mm_of_piece(call: PieceCall) -> fx.Node | None:
    if not call.is_cut(0, 0) and not call.is_cut(1, 0):
        return None
    return call.write(grouped.mm_piece, *call.values, call.start_of(0, 0), call.start_of(1, 0), *_block_rows(call))


def _grouped_outer_of_piece(call: PieceCall) -> fx.Node | None:
    if not call.is_cut(0, 0) and not call.layout.dims[0].axes:
        return None
    numbers = call.size(0), call.start_of(0, 0), call.start(0)
    return call.write(grouped.outer_piece, *call.values, *numbers, *_block_rows(call))


def _block_rows(call: PieceCall) -> tuple[int, ...]:
    """The number of rows of a block, if the rows of an op by expert are in blocks."""
    rows, ends = call.operand(0)[0].shape, call.operand(2)[0].shape
    return (rows[0] // ends[0],) if len(ends) == 2 else ()


def _own_experts(call: PieceCall, layout: Layout) -> tuple[Number, Number]:
    """First index and number of a device's experts, from the layout of its owned rows."""
    experts, cut = call.operand(1)[0].shape[-1:], Layout(layout.mesh, (DimSharding(layout.owned_axes),))
    return call.emit.offset(experts, cut, 0), call.emit.extent(experts, cut, 0)


def _all_rows_of_piece(call: PieceCall) -> fx.Node:
    (spec, layout), dim = call.operand(0), call.args[2]
    num_rows = call.emit.extent(spec.shape, layout, dim)
    return call.write(grouped.all_rows, *call.values, dim, call.start_of(0, dim), *_own_experts(call, layout), num_rows)


def _own_rows_of_piece(call: PieceCall) -> fx.Node:
    layout, dim = call.layout, call.args[2]
    parts = prod(layout.mesh.size(axis) for axis in layout.owned_axes)
    return call.write(grouped.own_rows, *call.values, dim, call.start_of(0, dim), *_own_experts(call, layout), parts)


def _num_blocks(call: PieceCall, num_blocks: int) -> Number:
    """The number of blocks that a device has of the `num_blocks` of an op's first operand."""
    spec, layout = call.operand(0)
    block_rows = spec.shape[0] // num_blocks
    cut = DimSharding(layout.dims[0].axes, max(layout.dims[0].unit // max(block_rows, 1), 1))
    return call.emit.extent((num_blocks,), Layout(layout.mesh, (cut,)), 0)


def _block_sort_of_piece(call: PieceCall) -> fx.Node:
    numbers = _num_blocks(call, call.args[1]), call.args[2], call.start_of(0, 0)
    return call.write(blocks.sort_piece, *call.values, *numbers)


def _block_counts_of_piece(call: PieceCall) -> fx.Node:
    return call.same_op(*call.args[:2], _num_blocks(call, call.args[2]))


def _block_index_of_piece(call: PieceCall) -> fx.Node:
    return call.write(blocks.index_piece, *call.values, call.start_of(0, 0))


def _block_put_of_piece(call: PieceCall) -> fx.Node:
    return call.write(blocks.put_piece, *call.values, call.args[3], call.start_of(0, 0))


def _row_owners_of_piece(call: PieceCall) -> fx.Node | None:
    if not call.layout.dims[0].axes:
        return None
    return call.same_op(call.args[0], call.size(0), [call.size(0)], *call.args[3:])


def _row_readers_of_piece(call: PieceCall) -> fx.Node:
    return call.write(grouped.readers_piece, *call.args[:3], call.size(1), call.start(1))


_leave, _enter = (partial(_rows_of_others, position=position) for position in (0, 2))
add(ours.row_owners.default, _row_owners, on_piece=OnPiece(_row_owners_of_piece))
add(ours.row_readers.default, _row_readers, on_piece=OnPiece(_row_readers_of_piece))
add(ours.grouped_mm.default, _grouped_mm, on_piece=OnPiece(_grouped_mm_of_piece, is_ordered=True))
add(ours.grouped_outer.default, _grouped_outer, on_piece=OnPiece(_grouped_outer_of_piece, is_ordered=True))
add(ours.leave_rows.default, _leave, on_piece=OnPiece(_all_rows_of_piece, is_ordered=True))
add(ours.enter_rows.default, _enter, on_piece=OnPiece(_own_rows_of_piece, is_ordered=True))
add(ours.block_sort.default, _block_sort, on_piece=OnPiece(_block_sort_of_piece))
add(ours.block_counts.default, _block_counts, on_piece=OnPiece(_block_counts_of_piece))
add(ours.block_index.default, _block_index, on_piece=OnPiece(_block_index_of_piece, is_placed=False))
add(ours.block_put.default, _block_put, on_piece=OnPiece(_block_put_of_piece, is_placed=False))
