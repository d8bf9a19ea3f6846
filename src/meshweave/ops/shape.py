"""Sharding rules of views, slices, reductions and factories."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import fx

from meshweave.errors import RuleError
from meshweave.interop.ops import aten_ops
from meshweave.ir import local_ops
from meshweave.ir.graph import argument, op_name, origin_of, spec_of, tensor_inputs
from meshweave.ops.factors import Dim, Linear, Rule, RuleBuilder, moved, sums
from meshweave.ops.pieces import OnPiece, PieceCall
from meshweave.ops.registry import add, result_specs

aten = torch.ops.aten
ours = torch.ops.meshweave


def _boundaries(shape: Sequence[int]) -> list[int]:
    """Products of the trailing dims: where dims begin, counted from the innermost element."""
    return [prod(shape[d:]) for d in range(len(shape) + 1)]


def split_and_merge(before: Sequence[int], after: Sequence[int]) -> tuple[RuleBuilder, list[Dim], list[Dim]]:
    """Factors of a reshape: the coarsest factors that divide both shapes. Where dims do not nest (6 x 4 to 4 x 6) the
    stretch between the nearest common boundaries is whole."""
    build = RuleBuilder()
    common = sorted(set(_boundaries(before)) & set(_boundaries(after)))
    cuts = [common[0]] if common else [1]
    factors: list[tuple[int, int, int]] = []  # (low, high, factor): elements between two boundaries
    for low, high in pairwise(common):
        inside = sorted({b for b in (*_boundaries(before), *_boundaries(after)) if low <= b <= high})
        nests = all(b % a == 0 for a, b in pairwise(inside))
        steps = list(pairwise(inside)) if nests else [(low, high)]
        factors += [(a, b, build.factor(b // a, whole=not nests)) for a, b in steps]
        cuts.append(high)

    def dims(shape: Sequence[int]) -> list[Dim]:
        edges = _boundaries(shape)
        dims_of: list[Dim] = []
        for d, size in enumerate(shape):
            low, high = edges[d + 1], edges[d]
            own = tuple(f for a, b, f in reversed(factors) if size > 1 and low <= a and b <= high)
            covered = prod(build.sizes[f] for f in own) == size
            dims_of.append(own if covered else (build.factor(size, whole=True),))
        return dims_of

    return build, dims(before), dims(after)


def _view(node: fx.Node) -> Rule:
    before, after = spec_of(tensor_inputs(node)[0]).shape, spec_of(node).shape
    filled = [[max(size, 1) for size in shape] for shape in (before, after)]
    if prod(filled[0]) != prod(filled[1]):  # of no elements
        build = RuleBuilder()
        return build.rule([build.dims(before, whole=range(len(before)))], [build.dims(after, whole=range(len(after)))])
    build, *dims = split_and_merge(*filled)
    old, new = (
        [of if size else (build.factor(0, whole=True),) for of, size in zip(each, shape, strict=True)]
        for each, shape in zip(dims, (before, after), strict=True)
    )
    return build.rule([old], [new], moved({0}))


def _permute(node: fx.Node) -> Rule:
    build = RuleBuilder()
    dims = build.dims(spec_of(tensor_inputs(node)[0]).shape)
    return build.rule([dims], [[dims[d] for d in argument(node, 1)]], moved({0}))


def _expand(node: fx.Node) -> Rule:
    before, after = spec_of(tensor_inputs(node)[0]).shape, spec_of(node).shape
    build = RuleBuilder()
    new = build.dims(after)
    last = new[len(after) - len(before) :]
    return build.rule([[() if s == 1 else dim for s, dim in zip(before, last, strict=True)]], [new], moved({0}))


def _to_local_shape(call: PieceCall) -> fx.Node:
    """view and expand. A view of a piece may need a copy, hence reshape. The number of owned rows is not known here:
    the operand's number is used."""
    owned, shape = call.layout.owned_dims, call.local_shape()
    if call.node.target is aten.expand.default:
        return call.same_op(call.args[0], [-1 if dim in owned else size for dim, size in enumerate(shape)])
    if owned:
        return call.write(local_ops.view_rows, call.args[0], shape, *owned, *call.operand(0)[1].owned_dims)
    return call.write(aten.reshape.default, call.args[0], shape)


_SHAPED = OnPiece(_to_local_shape, is_placed=False, in_chunks="any", shape_at=1)
add(aten.view.default, _view, on_piece=_SHAPED)
add(aten.permute.default, _permute)
add(aten.expand.default, _expand, on_piece=_SHAPED)


def _some_whole(node: fx.Node, whole: set[int], linear: tuple[Linear, ...]) -> Rule:
    """Same rank everywhere; the dims in `whole` differ or mix and are whole, the others are shared."""
    build = RuleBuilder()
    first = spec_of(tensor_inputs(node)[0]).shape
    known = {d: (build.factor(size),) for d, size in enumerate(first) if d not in whole}
    operands = [build.dims_from(spec_of(t).shape, known) for t in tensor_inputs(node)]
    return build.rule(operands, [build.dims_from(s.shape, known) for s in result_specs(node)], linear)


# Rows (dim 0) are grouped into segments, whose lengths are data; the other dims may be cut.
add(aten_ops("segment_reduce _segment_reduce_backward"), partial(_some_whole, whole={0}, linear=()))


def _rank(node: fx.Node) -> int:
    return len(spec_of(tensor_inputs(node)[0]).shape)


def _stretch(build: RuleBuilder, size: int, part: int, start: int = 0, step: int = 1) -> tuple[Dim, Dim]:
    """A dim, and a part of it: every `step`-th element, or one of the equal stretches that it consists of. Other parts
    are whole."""
    if step > 1 and part * step == size and start < step:
        own = (build.factor(part),)
        return (*own, build.factor(step, whole=True)), own
    if step == 1 < part and size % part == 0 == start % part and 0 <= start <= size - part:
        own = (build.factor(part),)
        return (build.factor(size // part, whole=True), *own), own
    return (build.factor(size, whole=True),), (build.factor(part, whole=True),)


def _part(node: fx.Node, at: int) -> tuple[RuleBuilder, list[Dim], list[Dim]]:
    """Dims of a tensor and of a part of it: `dim, start, end, step` are the arguments from `at` on."""
    x = spec_of(tensor_inputs(node)[0]).shape
    dim = argument(node, at, 0) % len(x)
    start, end, step = slice(*(argument(node, at + i, None) for i in (1, 2, 3))).indices(x[dim])
    build = RuleBuilder()
    before, after = build.dims(x[:dim]), build.dims(x[dim + 1 :])
    line, own = _stretch(build, x[dim], len(range(start, end, step)), start, step)
    return build, [*before, line, *after], [*before, own, *after]


def _slice(node: fx.Node) -> Rule:
    build, dims, part = _part(node, 1)
    return build.rule([dims], [part], moved({0}))


def _slice_scatter(node: fx.Node) -> Rule:
    build, dims, part = _part(node, 2)
    return build.rule([dims, part], [dims], moved({0, 1}))


def _part_of_piece(call: PieceCall, at: int) -> fx.Node | None:
    """A part of each piece: every `step`-th element of it, or one of its stretches."""
    spec, layout = call.operand(0)
    dim = argument(call.node, at, 0) % max(len(spec.shape), 1)
    if not call.is_cut(0, dim):
        return None
    local, size = call.emit.extent(spec.shape, layout, dim), spec.shape[dim]
    start, end, step = slice(*(argument(call.node, at + i, None) for i in (1, 2, 3))).indices(size)
    if step > 1 or (start, end) == (0, size):
        end = local
    else:
        start, end = start * local // size, end * local // size
    return call.same_op(*call.args[:at], dim, start, end, *([step] if step > 1 else []))


def _cat(node: fx.Node) -> Rule:
    """Tensors of the same size are stretches of the result."""
    operands = [spec_of(n).shape for n in tensor_inputs(node)]
    dim = argument(node, 1, 0) % len(operands[0])
    if len({shape[dim] for shape in operands}) > 1:
        return _some_whole(node, {dim}, moved(range(len(operands))))
    build = RuleBuilder()
    dims = build.dims(operands[0])
    line = (build.factor(len(operands), whole=True), *dims[dim])
    return build.rule([dims] * len(operands), [[*dims[:dim], line, *dims[dim + 1 :]]], moved(range(len(operands))))


def _pad(node: fx.Node) -> Rule:
    """A padded dim may have what is padded as one of its stretches."""
    x, shape = spec_of(tensor_inputs(node)[0]).shape, spec_of(node).shape
    build, pad = RuleBuilder(), argument(node, 1)
    starts = [0] * (len(x) - len(pad) // 2) + list(pad[-2::-2])
    pairs = [
        _stretch(build, size, part, start) if start or size != part else (own := (build.factor(size),), own)
        for size, part, start in zip(shape, x, starts, strict=True)
    ]
    zero = argument(node, 2, 0) == 0
    return build.rule([[own for _, own in pairs]], [[line for line, _ in pairs]], sums({0}) if zero else ())


def _pad_of_piece(call: PieceCall) -> fx.Node | None:
    spec, layout = call.operand(0)
    amounts = list(call.args[1])
    for i, amount in enumerate(amounts):
        dim = len(spec.shape) - 1 - i // 2
        if amount and layout.dims[dim].axes:
            amounts[i] = amount * call.emit.extent(spec.shape, layout, dim) // spec.shape[dim]
    return None if amounts == call.args[1] else call.same_op(call.args[0], amounts, *call.args[2:])


def _listed_dims(node: fx.Node) -> Rule:
    dims: Sequence[int] = argument(node, 1)
    return _some_whole(node, {d % _rank(node) for d in dims}, moved({0}))


def _roll(node: fx.Node) -> Rule:
    dims: Sequence[int] = argument(node, 2, ())
    rank = _rank(node)
    return _some_whole(node, {d % rank for d in dims} if dims else set(range(rank)), moved({0}))


def _repeat(node: fx.Node) -> Rule:
    before, after = spec_of(tensor_inputs(node)[0]).shape, spec_of(node).shape
    build = RuleBuilder()
    lead = len(after) - len(before)
    old: list[Dim] = build.dims(before)
    new = build.dims(after[:lead], whole=range(lead))
    for size, wide, dim in zip(before, after[lead:], old, strict=True):
        new.append(dim if wide == size else (build.factor(wide // max(size, 1), whole=True), *dim))
    return build.rule([old], [new], moved({0}))


def _last_two(node: fx.Node) -> Rule:
    rank = _rank(node)
    return _some_whole(node, {rank - 1, rank - 2}, sums({0}))


def _refused(node: fx.Node) -> Rule:
    raise RuleError(
        f"{op_name(node.target)} reads memory by its strides, which a value has only at run time",
        where=str(origin_of(node)),
        got=f"{node.name}({', '.join(str(spec_of(n)) for n in tensor_inputs(node))})",
        expected="an op that is a function of the values",
        hint="write it with view, permute, slice or unfold",
    )


def _diagonal(node: fx.Node) -> Rule:
    """Two dims are replaced by their diagonal, which is the last dim of the result and whole."""
    shape = spec_of(tensor_inputs(node)[0]).shape
    removed = {argument(node, 2, 0) % len(shape), argument(node, 3, 1) % len(shape)}
    build = RuleBuilder()
    dims = build.dims(shape, whole=removed)
    kept = [dim for d, dim in enumerate(dims) if d not in removed]
    return build.rule([dims], [[*kept, (build.factor(spec_of(node).shape[-1], whole=True),)]], moved({0}))


def _diagonal_scatter(node: fx.Node) -> Rule:
    """x with its diagonal (whole, the last dim of operand 1) replaced."""
    shape, source = (spec_of(n).shape for n in tensor_inputs(node))
    removed = {argument(node, 3, 0) % len(shape), argument(node, 4, 1) % len(shape)}
    build = RuleBuilder()
    dims = build.dims(shape, whole=removed)
    kept = [dim for d, dim in enumerate(dims) if d not in removed]
    return build.rule([dims, [*kept, (build.factor(source[-1], whole=True),)]], [dims], moved({0, 1}))


def _last_whole(node: fx.Node, linear: tuple[Linear, ...] = ()) -> Rule:
    """All dims except the last are shared; the last, which one side may lack, is whole."""
    build = RuleBuilder()
    before, after = spec_of(tensor_inputs(node)[0]).shape, spec_of(node).shape
    known = {d: (build.factor(size),) for d, size in enumerate(before[: max(len(before), len(after)) - 1])}
    return build.rule([build.dims_from(before, known)], [build.dims_from(after, known)], linear)


def _whole(node: fx.Node) -> Rule:
    """Ops that need all elements at once: never sharded."""
    build = RuleBuilder()

    operands = [build.dims_from(spec_of(n).shape, {}) for n in tensor_inputs(node)]
    return build.rule(operands, [build.dims_from(s.shape, {}) for s in result_specs(node)])


add([aten.diagonal.default, aten.diagonal_copy.default], _diagonal)
add(aten.diagonal_scatter.default, _diagonal_scatter)
add(aten.as_strided.default, _refused)
add([aten.view_as_real.default, aten.view_as_complex.default], partial(_last_whole, linear=sums({0})))
add(aten.view.dtype, _last_whole)
add(
    aten_ops(
        "masked_scatter masked_scatter_backward histc multi_margin_loss multi_margin_loss_backward "
        "_pdist_forward _pdist_backward _ctc_loss _ctc_loss.Tensor _ctc_loss_backward "
        "_ctc_loss_backward.Tensor _embedding_bag _embedding_bag_dense_backward "
        "_embedding_bag_per_sample_weights_backward index_reduce"
    ),
    _whole,
)
add(ours.ctc_loss.default, "t! n c!, n s!, n, n -> n, t! n c!")
# unfold: the dim becomes the index of the window, and a new last dim the contents of each; both are whole.
add(aten.unfold.default, lambda n: _some_whole(n, {argument(n, 1) % _rank(n)}, moved({0})))
add(aten.slice.Tensor, _slice, on_piece=OnPiece(partial(_part_of_piece, at=1), is_placed=False, in_chunks="any"))
add(
    aten.slice_scatter.default,
    _slice_scatter,
    on_piece=OnPiece(partial(_part_of_piece, at=2), is_placed=False, in_chunks="any"),
)
add(aten.cat.default, _cat)
add(aten.constant_pad_nd.default, _pad, on_piece=OnPiece(_pad_of_piece, is_placed=False, in_chunks="any"))
add(aten.flip.default, _listed_dims)
add(aten.roll.default, _roll)
add(aten.repeat.default, _repeat)
add([aten.tril.default, aten.triu.default], _last_two)


def _reduction(node: fx.Node, op: str, linear: tuple[Linear, ...]) -> Rule:
    """Reduced dims are factors that the result lacks."""
    shape = spec_of(tensor_inputs(node)[0]).shape
    listed: Any = argument(node, 1, ())
    dims = [listed] if isinstance(listed, int) else listed or range(len(shape))
    removed = {d % len(shape) for d in dims} if shape else set()
    keepdim = bool(argument(node, 2, False))
    build = RuleBuilder()
    operand = build.dims(shape)
    result = [() if d in removed else dim for d, dim in enumerate(operand) if d not in removed or keepdim]
    return build.rule([operand], [result], linear, {operand[d][0]: op for d in removed})


def _whole_reduction(node: fx.Node, at: int = 1, default: int | None = None) -> Rule:
    """Reductions that no collective can finish: the dims (argument `at`, all for None) are whole. Results keep or drop
    them."""
    shape = spec_of(tensor_inputs(node)[0]).shape
    listed: Any = argument(node, at, default)
    dims = [listed] if isinstance(listed, int) else listed
    removed = set(range(len(shape))) if dims is None or not shape else {d % len(shape) for d in dims}
    build = RuleBuilder()
    operand = build.dims(shape, whole=removed)
    kept = [dim for d, dim in enumerate(operand) if d not in removed]
    wide = [() if d in removed else dim for d, dim in enumerate(operand)]
    results = [wide if len(s.shape) == len(shape) else kept for s in result_specs(node)]
    return build.rule([operand], results)


def _extreme(call: PieceCall) -> fx.Node | None:
    """amax and amin of a dim that is cut: a piece may be empty."""
    dims: Sequence[int] = argument(call.node, 1, ()) or range(len(call.operand(0)[0].shape))
    if not any(call.is_cut(0, d % max(len(call.operand(0)[0].shape), 1)) for d in dims):
        return None
    op = "max" if call.node.target is aten.amax.default else "min"
    return call.write(local_ops.extreme, call.values[0], list(dims), bool(argument(call.node, 2, False)), op)


add(aten.sum.dim_IntList, partial(_reduction, op="sum", linear=sums({0})))
add(ours.square_sum.default, partial(_reduction, op="sum", linear=()))
add([aten.count_nonzero.default, aten.count_nonzero.dim_IntList], partial(_reduction, op="sum", linear=()))
for _op, _target in {"max": aten.amax.default, "min": aten.amin.default}.items():
    _linear = (Linear(frozenset({0}), frozenset({_op})),)
    add(_target, partial(_reduction, op=_op, linear=_linear), on_piece=OnPiece(_extreme, in_chunks="any"))
add(
    aten_ops(
        "any any.dim any.dims all all.dim all.dims argmax argmin max.dim min.dim max min prod prod.dim_int median "
        "median.dim nanmedian nanmedian.dim"
    ),
    _whole_reduction,
)
add(aten.mode.default, partial(_whole_reduction, default=-1))
add(aten.kthvalue.default, partial(_whole_reduction, at=2, default=-1))


def _factory(node: fx.Node) -> Rule:
    """No tensor inputs: any piece can be computed on any device."""
    build = RuleBuilder()
    return build.rule([[] for _ in tensor_inputs(node)], [build.dims(spec_of(node).shape)])


def _full(call: PieceCall) -> fx.Node:
    return call.same_op(call.local_shape(), *call.args[1:])


def _arange(call: PieceCall) -> fx.Node | None:
    if not call.layout.dims[0].axes:
        return None
    start, _, step = call.args
    first = call.emit.linear(start, (call.start(0), step))
    return call.same_op(first, call.emit.linear(0, (first, 1), (call.size(0), step)), step)


def _random(call: PieceCall) -> fx.Node:
    offsets = [call.start(d) for d in range(len(call.shape))]
    return call.same_op(*call.args[:3], list(call.shape), offsets, call.local_shape(), *call.args[6:])


add(aten.full.default, _factory, on_piece=OnPiece(_full, in_chunks="any", shape_at=0))
add(aten.arange.start_step, _factory, on_piece=OnPiece(_arange, is_ordered=True))
add([ours.uniform.default, ours.chance.default], _factory, on_piece=OnPiece(_random, is_ordered=True))
