"""Sharding rules of embeddings, gathers, scatters and indexing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from meshweave.ir import local_ops
from meshweave.ir.graph import argument, spec_of, tensor_inputs
from meshweave.ir.ops import is_zeros
from meshweave.ops.factors import Dim, Rule, RuleBuilder, moved, sums
from meshweave.ops.pieces import AS_IT_IS, OnPiece, PieceCall
from meshweave.ops.registry import add

aten = torch.ops.aten


def _embedding(node: fx.Node) -> Rule:
    """weight [v, h], index [...]: a sharded vocabulary gives partial sums (rows on other devices count as 0)."""
    weight, index = (spec_of(n) for n in tensor_inputs(node))
    build = RuleBuilder()
    v, h = build.factor(weight.shape[0]), build.factor(weight.shape[1])
    at = build.dims(index.shape)
    return build.rule([[(v,), (h,)], at], [[*at, (h,)]], sums({0}))


def _embedding_backward(node: fx.Node) -> Rule:
    grad, index = (spec_of(n) for n in tensor_inputs(node))
    by_frequency = bool(argument(node, 4, False))
    build = RuleBuilder()
    v, h = build.factor(spec_of(node).shape[0], whole=by_frequency), build.factor(grad.shape[-1])
    at = build.dims(index.shape, whole=range(len(index.shape)) if by_frequency else ())
    return build.rule([[*at, (h,)], at], [[(v,), (h,)]], sums({0}))


def _embedding_of_piece(call: PieceCall) -> fx.Node | None:
    return call.write_at(0, local_ops.embedding, *call.values)


def _embedding_backward_of_piece(call: PieceCall) -> fx.Node | None:
    if not call.layout.dims[0].axes:
        return None
    numbers = call.size(0), argument(call.node, 3, -1), call.start(0)
    return call.write(local_ops.embedding_backward, *call.values, *numbers)


def _rows_by_number(node: fx.Node) -> list[tuple[int, fx.Node]]:
    return [(0, argument(node, 1))]


add(
    aten.embedding.default,
    _embedding,
    on_piece=OnPiece(_embedding_of_piece, in_chunks="index", indexed=_rows_by_number),
)
add(
    aten.embedding_dense_backward.default,
    _embedding_backward,
    on_piece=OnPiece(_embedding_backward_of_piece, in_chunks="index", indexed=_rows_by_number, makes_table=True),
)


def _beside(build: RuleBuilder, x: Sequence[int], index: Sequence[int], dim: int) -> tuple[list[Dim], list[Dim]]:
    """Dims of a tensor and of the index into it along `dim`: other dims are shared if their sizes agree, else whole."""
    left: list[Dim] = []
    right: list[Dim] = []
    for d, (a, b) in enumerate(zip(x, index, strict=True)):
        if d == dim:
            left.append((build.factor(a),))
            right.append((build.factor(b, whole=False),))
        elif a == b:
            left.append((build.factor(a),))
            right.append(left[-1])
        else:
            left.append((build.factor(a, whole=True),))
            right.append((build.factor(b, whole=True),))
    return left, right


def _gather(node: fx.Node) -> Rule:
    """out = x at index along dim: a sharded dim gives partial sums (elements on other devices count as 0)."""
    x, index = (spec_of(n).shape for n in tensor_inputs(node))
    if not x or not index:
        build = RuleBuilder()
        every = [build.dims(s, whole=range(len(s))) for s in (x, index, spec_of(node).shape)]
        return build.rule(every[:2], every[2:])
    build = RuleBuilder()
    left, right = _beside(build, x, index, argument(node, 1) % len(x))
    return build.rule([left, right], [right], sums({0}))


def _scatter(node: fx.Node, whole: bool = False) -> Rule:
    """x with values written at index along dim. The index's own dim is whole, unless values are added to zeros: x
    itself must count once.

    `whole`: the dim of x is whole, too.
    """
    x, index, *sources = [spec_of(n).shape for n in tensor_inputs(node)]
    build = RuleBuilder()
    if not x:
        return build.rule([build.dims(s, whole=range(len(s))) for s in (x, index, *sources)], [[]])
    dim = argument(node, 1) % len(x)
    left, right = _beside(build, x, index, dim)
    added = node.target is aten.scatter_add.default
    if not (added and is_zeros(argument(node, 0))):
        build.fixed.add(right[dim][0])
    build.fixed.update(left[dim] if whole else ())
    operands = [left, right]
    for source in sources:
        fits = [a == b for a, b in zip(source, index, strict=True)]
        build.fixed.update(right[d][0] for d, same in enumerate(fits) if not same)
        operands.append([right[d] if same else (build.factor(source[d], whole=True),) for d, same in enumerate(fits)])
    return build.rule(operands, [left], sums({0, 2}) if added else ())


def _index_select(node: fx.Node) -> Rule:
    """The positions are free, and devices may look up only their own; a cut of the indexed dim gives partial sums."""
    x, index = (spec_of(n).shape for n in tensor_inputs(node))
    build = RuleBuilder()
    dims = build.dims(x)
    at = build.factor(index[0] if index else 1)
    dim = argument(node, 1) % len(x)
    result = [(at,) if d == dim else f for d, f in enumerate(dims)]
    rule = build.rule([dims, [(at,)] if index else []], [result], sums({0}))
    return replace(rule, placed=frozenset(dims[dim]))


def _dim_of(node: fx.Node) -> int:
    """The dim of the first operand along which an op (x, dim, index) indexes."""
    return int(argument(node, 1)) % max(len(spec_of(tensor_inputs(node)[0]).shape), 1)


def _along(function: Any) -> Callable[[PieceCall], fx.Node | None]:
    """gather and index_select: (x, dim, index)."""

    def write(call: PieceCall) -> fx.Node | None:
        dim = _dim_of(call.node)
        return call.write_at(dim, function, call.values[0], dim, call.values[1])

    return write


def _scatter_to_piece(call: PieceCall) -> fx.Node | None:
    dim, added = _dim_of(call.node), call.node.target is aten.scatter_add.default
    return call.write_at(dim, local_ops.scatter, call.args[0], dim, *call.args[2:4], added)


def _line(node: fx.Node) -> list[tuple[int, fx.Node]]:
    return [(_dim_of(node), argument(node, 2))] if spec_of(argument(node, 0)).shape else []


add(
    aten.gather.default,
    _gather,
    on_piece=OnPiece(_along(local_ops.gather), in_chunks="index", indexed=_line),
)
add(
    [aten.scatter.value, aten.scatter.src, aten.scatter_add.default],
    _scatter,
    on_piece=OnPiece(_scatter_to_piece, in_chunks="index", indexed=_line),
)
add(
    [aten.scatter.value_reduce, aten.scatter_reduce.two],
    partial(_scatter, whole=True),
    on_piece=replace(AS_IT_IS, indexed=_line),
)
add(
    aten.index_select.default,
    _index_select,
    on_piece=OnPiece(_along(local_ops.index_select), is_placed=False, in_chunks="index", indexed=_line),
)


def _index_parts(indices: Sequence[Any], rank: int) -> tuple[list[int], int, bool]:
    """Indexed dims, rank of the broadcast index, and whether its dims go to the front of the result."""
    at = [d for d, i in enumerate(indices) if i is not None]
    width = max(len(spec_of(indices[d]).shape) for d in at)
    together = at == list(range(at[0], at[-1] + 1))
    return at, width, not together


def _index_dims(
    build: RuleBuilder, x: Sequence[int], indices: Sequence[Any]
) -> tuple[list[Dim], list[list[Dim]], list[Dim]]:
    """Dims of x, of each index and of x[indices]: indexed dims whole, the others and the index's own free."""
    at, width, to_front = _index_parts(indices, len(x))
    shapes = [spec_of(indices[d]).shape for d in at]
    wide = torch.broadcast_shapes(*shapes)
    own: list[Dim] = build.dims(wide)
    dims = build.dims(x, whole=at)
    each = [[() if s == 1 else own[width - len(shape) + i] for i, s in enumerate(shape)] for shape in shapes]
    rest = [(d, dims[d]) for d in range(len(x)) if d not in at]
    first = 0 if to_front else at[0]
    result = [f for d, f in rest if d < first] + own + [f for d, f in rest if d >= first]
    return dims, each, result


def _looked_up(indices: Sequence[Any]) -> int | None:
    """The indexed dim, if it is the only one and not indexed by a mask; else None."""
    at = [d for d, i in enumerate(indices) if i is not None]
    return at[0] if len(at) == 1 and spec_of(indices[at[0]]).dtype != torch.bool else None


def _index(node: fx.Node) -> Rule:
    """The positions are free. If a single dim is indexed, a cut of it gives partial sums (rows on other devices are
    0)."""
    build = RuleBuilder()
    indices = argument(node, 1)
    dims, each, result = _index_dims(build, spec_of(argument(node, 0)).shape, indices)
    dim = _looked_up(indices)
    if dim is None:
        return build.rule([dims, *each], [result], moved({0}))
    build.fixed.difference_update(dims[dim])
    return replace(build.rule([dims, *each], [result], sums({0})), placed=frozenset(dims[dim]))


def _index_put(node: fx.Node) -> Rule:
    """Only dims that are not indexed are free: writes of several positions to the same element have to meet there.

    Where values are added to zeros (the gradient of a lookup) the positions are a loop that is summed over; of a single
    indexed dim each device may sum its own rows.
    """
    x, indices, values = (argument(node, i) for i in range(3))
    build = RuleBuilder()
    added = bool(argument(node, 3, False))
    if any(i is not None and spec_of(i).dtype == torch.bool for i in indices):  # a mask covers several dims
        operands = [build.dims(spec_of(n).shape, whole=range(len(spec_of(n).shape))) for n in tensor_inputs(node)]
        return build.rule(operands, [operands[0]])
    dims, each, result = _index_dims(build, spec_of(x).shape, indices)
    dim = _looked_up(indices)
    if not (added and is_zeros(x)):
        build.fixed.update(f for index in each for d in index for f in d)
    elif dim is not None:
        build.fixed.difference_update(dims[dim])
    shape = spec_of(values).shape
    last = result[len(result) - len(shape) :]
    source = [() if s == 1 else f for s, f in zip(shape, last, strict=True)]
    rule = build.rule([dims, *each, source], [dims], sums({0, len(each) + 1}) if added else ())
    return rule if dim is None else replace(rule, placed=frozenset(dims[dim]))


def _indexed(node: fx.Node) -> list[tuple[int, fx.Node]]:
    return [(d, index) for d, index in enumerate(argument(node, 1)) if index is not None]


def _rows_of_piece(call: PieceCall, function: Any) -> fx.Node | None:
    """A lookup in the rows of a piece, or a sum into these; of several indexed dims none is cut."""
    dim, _ = _indexed(call.node)[0]
    rest = (call.args[1][dim], *call.args[2:3], call.operand(0)[0].shape[dim])
    return call.write_at(dim, function, call.values[0], dim, *rest)


for _targets, _rule, _local in (
    ([aten.index.Tensor, aten._unsafe_index.Tensor], _index, local_ops.index_rows),
    ([aten.index_put.default, aten._unsafe_index_put.default], _index_put, local_ops.add_rows),
):
    _on_piece = OnPiece(partial(_rows_of_piece, function=_local), is_placed=False, indexed=_indexed)
    add(_targets, _rule, on_piece=_on_piece)
