"""Rows for ops that move or make elements: views, slices, indexing, reductions, factories."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import fx

from meshweave.ir.graph import spec_of, tensor_inputs
from meshweave.sharding.factors import Dim, Linear, Rule, RuleBuilder, moved, sums
from meshweave.sharding.registry import add, result_specs

aten = torch.ops.aten
ours = torch.ops.meshweave


def _boundaries(shape: Sequence[int]) -> list[int]:
    """Products of the trailing dims: where dims begin, counted from the innermost element."""
    return [prod(shape[d:]) for d in range(len(shape) + 1)]


def split_and_merge(before: Sequence[int], after: Sequence[int]) -> tuple[RuleBuilder, list[Dim], list[Dim]]:
    """Factors of a reshape: the coarsest pieces that both shapes are made of.

    Where dims do not nest (6 x 4 to 4 x 6) the stretch between the nearest common boundaries is whole.
    """
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
        made: list[Dim] = []
        for d, size in enumerate(shape):
            low, high = edges[d + 1], edges[d]
            own = tuple(f for a, b, f in reversed(factors) if size > 1 and low <= a and b <= high)
            covered = prod(build.sizes[f] for f in own) == size
            made.append(own if covered else (build.factor(size, whole=True),))
        return made

    return build, dims(before), dims(after)


def _view(node: fx.Node) -> Rule:
    before, after = spec_of(tensor_inputs(node)[0]).shape, spec_of(node).shape
    if 0 in before:
        build = RuleBuilder()
        return build.rule([build.dims(before, whole=range(len(before)))], [build.dims(after, whole=range(len(after)))])
    build, old, new = split_and_merge(before, after)
    return build.rule([old], [new], moved({0}))


def _permute(node: fx.Node) -> Rule:
    build = RuleBuilder()
    dims = build.dims(spec_of(tensor_inputs(node)[0]).shape)
    return build.rule([dims], [[dims[d] for d in node.args[1]]], moved({0}))  # type: ignore[union-attr]


def _expand(node: fx.Node) -> Rule:
    before, after = spec_of(tensor_inputs(node)[0]).shape, spec_of(node).shape
    build = RuleBuilder()
    new = build.dims(after)
    last = new[len(after) - len(before) :]
    return build.rule([[() if s == 1 else dim for s, dim in zip(before, last, strict=True)]], [new], moved({0}))


add(aten.view.default, _view, localize="shape")
add(aten.permute.default, _permute)
add(aten.expand.default, _expand, localize="shape")


def _some_whole(node: fx.Node, whole: set[int], linear: tuple[Linear, ...]) -> Rule:
    """Same rank everywhere; the dims in `whole` differ or mix and are whole, the others are shared."""
    build = RuleBuilder()
    first = spec_of(tensor_inputs(node)[0]).shape
    known = {d: build.factor(size) for d, size in enumerate(first) if d not in whole}

    def dims(shape: Sequence[int]) -> list[Dim]:
        return [(known[d],) if d in known else (build.factor(size, whole=True),) for d, size in enumerate(shape)]

    operands = [dims(spec_of(t).shape) for t in tensor_inputs(node)]
    return build.rule(operands, [dims(s.shape) for s in result_specs(node)], linear)


def _rank(node: fx.Node) -> int:
    return len(spec_of(tensor_inputs(node)[0]).shape)


def _slice(node: fx.Node) -> Rule:
    return _some_whole(node, {node.args[1] % _rank(node)}, moved({0}))  # type: ignore[operator]


def _slice_scatter(node: fx.Node) -> Rule:
    dim = node.args[2] if len(node.args) > 2 else 0
    return _some_whole(node, {dim % _rank(node)}, moved({0, 1}))  # type: ignore[operator]


def _cat(node: fx.Node) -> Rule:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return _some_whole(node, {dim % _rank(node)}, moved(range(len(tensor_inputs(node)))))  # type: ignore[operator]


def _pad(node: fx.Node) -> Rule:
    pad: Sequence[int] = node.args[1]  # type: ignore[assignment]
    rank = _rank(node)
    padded = {rank - 1 - i // 2 for i, amount in enumerate(pad) if amount}
    zero = len(node.args) < 3 or node.args[2] == 0
    return _some_whole(node, padded, sums({0}) if zero else ())


def _listed_dims(node: fx.Node) -> Rule:
    dims: Sequence[int] = node.args[1]  # type: ignore[assignment]
    return _some_whole(node, {d % _rank(node) for d in dims}, moved({0}))


def _roll(node: fx.Node) -> Rule:
    dims: Sequence[int] = node.args[2] if len(node.args) > 2 else ()  # type: ignore[assignment]
    rank = _rank(node)
    return _some_whole(node, {d % rank for d in dims} if dims else set(range(rank)), moved({0}))


def _repeat(node: fx.Node) -> Rule:
    before, after = spec_of(tensor_inputs(node)[0]).shape, spec_of(node).shape
    build = RuleBuilder()
    lead = len(after) - len(before)
    kept = {d: build.factor(s) for d, s in enumerate(before) if after[d + lead] == s}
    old = [(kept[d],) if d in kept else (build.factor(s, whole=True),) for d, s in enumerate(before)]
    new = [
        (kept[d - lead],) if d - lead in kept else (build.factor(s, whole=True),) for d, s in enumerate(after)
    ]
    return build.rule([old], [new], moved({0}))


def _last_two(node: fx.Node) -> Rule:
    rank = _rank(node)
    return _some_whole(node, {rank - 1, rank - 2}, sums({0}))


add(aten.slice.Tensor, _slice)
add(aten.slice_scatter.default, _slice_scatter)
add(aten.cat.default, _cat)
add(aten.constant_pad_nd.default, _pad)
add(aten.flip.default, _listed_dims)
add(aten.roll.default, _roll)
add(aten.repeat.default, _repeat)
add([aten.tril.default, aten.triu.default], _last_two)


def _reduction(node: fx.Node, op: str, linear: tuple[Linear, ...]) -> Rule:
    """Dims reduced away are factors that the result lacks."""
    shape = spec_of(tensor_inputs(node)[0]).shape
    listed: Any = node.args[1] if len(node.args) > 1 else ()
    gone = {d % len(shape) for d in ([listed] if isinstance(listed, int) else listed or range(len(shape)))} if shape else set()
    keepdim = bool(node.args[2]) if len(node.args) > 2 else bool(node.kwargs.get("keepdim", False))
    build = RuleBuilder()
    dims = build.dims(shape)
    result = [() if d in gone else dim for d, dim in enumerate(dims) if d not in gone or keepdim]
    return build.rule([dims], [result], linear, {dims[d][0]: op for d in gone})


def _sum(node: fx.Node) -> Rule:
    return _reduction(node, "sum", sums({0}))


def _amax(node: fx.Node) -> Rule:
    return _reduction(node, "max", (Linear(frozenset({0}), frozenset({"max"})),))


def _amin(node: fx.Node) -> Rule:
    return _reduction(node, "min", (Linear(frozenset({0}), frozenset({"min"})),))


def _whole_reduction(node: fx.Node) -> Rule:
    """Reductions that no collective can finish: the dim is whole. Results with or without the dim."""
    shape = spec_of(tensor_inputs(node)[0]).shape
    listed: Any = node.args[1] if len(node.args) > 1 else None
    dims = [listed] if isinstance(listed, int) else listed
    gone = set(range(len(shape))) if dims is None or not shape else {d % len(shape) for d in dims}
    build = RuleBuilder()
    operand = build.dims(shape, whole=gone)
    kept = [dim for d, dim in enumerate(operand) if d not in gone]
    wide = [() if d in gone else dim for d, dim in enumerate(operand)]
    results = [wide if len(s.shape) == len(shape) else kept for s in result_specs(node)]
    return build.rule([operand], results)


add(aten.sum.dim_IntList, _sum)
add(aten.amax.default, _amax, localize="extreme")
add(aten.amin.default, _amin, localize="extreme")
add(
    [
        aten.any.default,
        aten.any.dim,
        aten.any.dims,
        aten.all.default,
        aten.all.dim,
        aten.all.dims,
        aten.argmax.default,
        aten.argmin.default,
        aten.max.dim,
        aten.min.dim,
        aten.max.default,
        aten.min.default,
        aten.prod.default,
        aten.prod.dim_int,
        aten.median.dim,
    ],
    _whole_reduction,
)


def _embedding(node: fx.Node) -> Rule:
    """weight [v, h], index [...]: a sharded vocabulary gives partial sums (rows held elsewhere count as 0)."""
    weight, index = (spec_of(n) for n in tensor_inputs(node))
    build = RuleBuilder()
    v, h = build.factor(weight.shape[0]), build.factor(weight.shape[1])
    at = build.dims(index.shape)
    return build.rule([[(v,), (h,)], at], [[*at, (h,)]], sums({0}))


def _embedding_backward(node: fx.Node) -> Rule:
    grad, index = (spec_of(n) for n in tensor_inputs(node))
    by_frequency = len(node.args) > 4 and bool(node.args[4])
    build = RuleBuilder()
    v, h = build.factor(spec_of(node).shape[0], whole=by_frequency), build.factor(grad.shape[-1])
    at = build.dims(index.shape, whole=range(len(index.shape)) if by_frequency else ())
    return build.rule([[*at, (h,)], at], [[(v,), (h,)]], sums({0}))


add(aten.embedding.default, _embedding, localize="embedding")
add(aten.embedding_dense_backward.default, _embedding_backward, localize="embedding_backward")


def _beside(build: RuleBuilder, x: Sequence[int], index: Sequence[int], dim: int) -> tuple[list[Dim], list[Dim]]:
    """Dims of a tensor and of the index into it along `dim`: other dims are shared where they agree, else whole."""
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
    """out = x at index along dim: a sharded dim gives partial sums (elements held elsewhere count as 0)."""
    x, index = (spec_of(n).shape for n in tensor_inputs(node))
    if not x or not index:
        build = RuleBuilder()
        every = [build.dims(s, whole=range(len(s))) for s in (x, index, spec_of(node).shape)]
        return build.rule(every[:2], every[2:])
    build = RuleBuilder()
    left, right = _beside(build, x, index, node.args[1] % len(x))  # type: ignore[operator]
    return build.rule([left, right], [right], sums({0}))


def _scatter(node: fx.Node) -> Rule:
    """x with values written at index along dim. The index's own dim is whole: x itself must count once."""
    x, index, *sources = [spec_of(n).shape for n in tensor_inputs(node)]
    build = RuleBuilder()
    if not x:
        return build.rule([build.dims(s, whole=range(len(s))) for s in (x, index, *sources)], [[]])
    dim = node.args[1] % len(x)  # type: ignore[operator]
    left, right = _beside(build, x, index, dim)
    build.fixed.add(right[dim][0])
    operands = [left, right]
    for source in sources:
        fits = [a == b for a, b in zip(source, index, strict=True)]
        build.fixed.update(right[d][0] for d, same in enumerate(fits) if not same)
        operands.append([right[d] if same else (build.factor(source[d], whole=True),) for d, same in enumerate(fits)])
    added = node.target is aten.scatter_add.default
    return build.rule(operands, [left], sums({0, 2}) if added else ())


def _index_select(node: fx.Node) -> Rule:
    x, index = (spec_of(n).shape for n in tensor_inputs(node))
    build = RuleBuilder()
    dims = build.dims(x)
    at = build.factor(index[0] if index else 1)
    dim = node.args[1] % len(x)  # type: ignore[operator]
    result = [(at,) if d == dim else f for d, f in enumerate(dims)]
    return build.rule([dims, [(at,)] if index else []], [result], sums({0}))


add(aten.gather.default, _gather, localize="gather")
add([aten.scatter.value, aten.scatter.src, aten.scatter_add.default], _scatter, localize="scatter")
add(aten.index_select.default, _index_select, localize="index_select")


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


def _index(node: fx.Node) -> Rule:
    build = RuleBuilder()
    dims, each, result = _index_dims(build, spec_of(node.args[0]).shape, node.args[1])  # type: ignore[arg-type]
    return build.rule([dims, *each], [result], moved({0}))


def _index_put(node: fx.Node) -> Rule:
    """Only dims beside the indexed ones are free: what several positions write to one place must meet there."""
    x, indices, values = node.args[:3]
    build = RuleBuilder()
    dims, each, result = _index_dims(build, spec_of(x).shape, indices)  # type: ignore[arg-type]
    for index in each:
        build.fixed.update(f for dim in index for f in dim)
    shape = spec_of(values).shape  # type: ignore[arg-type]
    last = result[len(result) - len(shape) :]
    source = [() if s == 1 else f for s, f in zip(shape, last, strict=True)]
    return build.rule([dims, *each, source], [dims])


add([aten.index.Tensor, aten._unsafe_index.Tensor], _index)
add([aten.index_put.default, aten._unsafe_index_put.default], _index_put)


def _factory(node: fx.Node) -> Rule:
    """Made from nothing (or from numbers): any piece can be made where it is wanted."""
    build = RuleBuilder()
    return build.rule([[] for _ in tensor_inputs(node)], [build.dims(spec_of(node).shape)])


FACTORIES = (aten.full.default, aten.arange.start_step, ours.uniform.default)

add(aten.full.default, _factory, localize="full")
add(aten.arange.start_step, _factory, localize="arange")
add(ours.uniform.default, _factory, localize="uniform")
