"""Sharding rules of arithmetic, matmuls, norms, softmax, scans and attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from meshweave.interop.ops import aten_ops
from meshweave.ir import ops  # noqa: F401  (defines meshweave::attention)
from meshweave.ir.graph import Spec, argument, named_argument, spec_of, tensor_inputs
from meshweave.ops.factors import Dim, Linear, Rule, RuleBuilder, sums
from meshweave.ops.pieces import GUARDED, OnPiece, PieceCall
from meshweave.ops.registry import RuleFunction, add, pointwise, result_specs

aten = torch.ops.aten
ours = torch.ops.meshweave


def _sum_like(node: fx.Node) -> Rule:
    """a + b: partial sums pass if both operands are partial; a number would be added once per device."""
    both = len(tensor_inputs(node)) == 2
    return pointwise(node, sums({0, 1}) if both else ())


def _product(node: fx.Node) -> Rule:
    """a * b: a partial sum of either operand passes."""
    return pointwise(node, sums(*({i} for i in range(len(tensor_inputs(node))))))


def _cast(node: fx.Node) -> Rule:
    """A cast is linear only if it does not round: to the same or a wider float. Rounding is monotonic, so max and min
    pass every cast between floats."""
    before, after = spec_of(tensor_inputs(node)[0]).dtype, spec_of(node).dtype
    passing = {"max", "min"} | ({"sum"} if after.itemsize >= before.itemsize else set())
    floats = before.is_floating_point and after.is_floating_point
    return pointwise(node, (Linear(frozenset({0}), frozenset(passing)),) if floats else ())


_FIRST = partial(pointwise, linear=sums({0}))

add([aten.add.Tensor, aten.sub.Tensor], _sum_like)
add([aten.mul.Tensor, aten.mul.Scalar], _product)
add([aten.div.Tensor, aten.div.Scalar, aten.neg.default], _FIRST)
add(aten._to_copy.default, _cast)
add([ours.round_parts.default, ours.pin.default], _FIRST)
add(aten.where.self, partial(pointwise, linear=sums({1, 2})))
add([aten.lerp.Scalar, aten.lerp.Tensor], partial(pointwise, linear=sums({0, 1})))
add(
    aten_ops(
        "gelu_backward silu_backward threshold_backward tanh_backward sigmoid_backward hardtanh_backward "
        "leaky_relu_backward mish_backward log_sigmoid_backward logit_backward hardshrink_backward _conj _neg_view "
        "softshrink_backward"
    ),
    _FIRST,
)
# Pointwise ops that torch does not tag as such, or not in all versions from 2.11 on.
add(
    aten_ops(
        "hardswish leaky_relu where.ScalarSelf where.ScalarOther where.Scalar fill.Scalar floor_divide _prelu_kernel "
        "polar complex"
    ),
    pointwise,
)


def _each(node: fx.Node, linear: tuple[Linear, ...] = ()) -> Rule:
    """Several results, each of the broadcast shape of the operands."""
    build = RuleBuilder()
    results = result_specs(node)
    dims = build.dims(results[0].shape)
    operands = [build.broadcast(spec_of(n).shape, dims) for n in tensor_inputs(node)]
    return build.rule(operands, [dims] * len(results), linear)


def _beside_table(node: fx.Node, table: int) -> Rule:
    """Pointwise except for an operand that is a table in which every element is looked up: it is whole."""
    build = RuleBuilder()
    dims = build.dims(spec_of(node).shape)
    shapes = [spec_of(n).shape for n in tensor_inputs(node)]
    operands = [
        build.dims(s, whole=range(len(s))) if i == table else build.broadcast(s, dims) for i, s in enumerate(shapes)
    ]
    return build.rule(operands, [dims])


def _searchsorted(node: fx.Node) -> Rule:
    """A table of one dim is whole; a table of more dims has a line for each line of the values, whose last dim is
    free."""
    table, values = (spec_of(n).shape for n in tensor_inputs(node))
    if len(table) == 1:
        return _beside_table(node, 0)
    build = RuleBuilder()
    dims = build.dims(values)
    return build.rule([[*dims[:-1], (build.factor(table[-1], whole=True),)], dims], [dims])


add([aten.log_sigmoid_forward.default, aten._prelu_kernel_backward.default, aten.frexp.Tensor], _each)
add([aten.bucketize.Tensor, aten.isin.Tensor_Tensor], partial(_beside_table, table=1))
add(aten.searchsorted.Tensor, _searchsorted)

add(aten.mm.default, "m k, k n -> m n", linear=sums({0}, {1}))
add(aten.bmm.default, "b m k, b k n -> b m n", linear=sums({0}, {1}))
add(aten.mv.default, "m k, k -> m", linear=sums({0}, {1}))
add(aten.dot.default, "k, k ->", linear=sums({0}, {1}))


def _matmul(node: fx.Node) -> Rule:
    a, b = (spec_of(n).shape for n in tensor_inputs(node))
    build = RuleBuilder()
    batch = build.dims(a[:-2])
    m, k, n = ((build.factor(size),) for size in (a[-2], a[-1], b[-1]))
    return build.rule([[*batch, m, k], [*batch, k, n]], [[*batch, m, n]], sums({0}, {1}))


add(ours.matmul.default, _matmul)


def _layer_norm(node: fx.Node) -> Rule:
    """Batch dims are free, normalised dims whole. Operands: x, then weight and bias if present."""
    x, *rest = [spec_of(n) for n in tensor_inputs(node)]
    batch = len(x.shape) - len(argument(node, 1))
    build = RuleBuilder()
    known = {d: (build.factor(x.shape[d]),) for d in range(batch)}
    operands = [build.dims_from(x.shape, known), *(build.dims_from(s.shape, {}) for s in rest)]
    results = [build.dims_from(s.shape, known) for s in result_specs(node)]
    return build.rule(operands, results)


def _layer_norm_backward(node: fx.Node) -> Rule:
    """Operands grad, x, mean, rstd, weight, bias; gradients of weight and bias are sums over the batch dims."""
    grad, x, mean, rstd, *rest = [spec_of(n) for n in tensor_inputs(node)]
    batch = len(x.shape) - len(argument(node, 2))
    build = RuleBuilder()
    known = {d: (build.factor(x.shape[d]),) for d in range(batch)}
    operands = [build.dims_from(s.shape, known) for s in (grad, x, mean, rstd)]
    operands += [build.dims_from(s.shape, {}) for s in rest]
    results = [build.dims_from(s.shape, known if s.shape == x.shape and batch else {}) for s in result_specs(node)]
    return build.rule(operands, results, sums({0}))


add(aten.native_layer_norm.default, _layer_norm)
add(aten.native_layer_norm_backward.default, _layer_norm_backward)


def _along_dim(node: fx.Node, dim: int, linear: tuple[Linear, ...] = ()) -> Rule:
    """Lines along `dim` are independent; operands and results have the same shape except for that dim's size."""
    shape = spec_of(tensor_inputs(node)[0]).shape
    build = RuleBuilder()
    known = {d: (build.factor(size),) for d, size in enumerate(shape) if d != dim % max(len(shape), 1)}
    operands = [build.dims_from(spec_of(t).shape, known) for t in tensor_inputs(node)]
    return build.rule(operands, [build.dims_from(s.shape, known) for s in result_specs(node)], linear)


def _along(position: int, *default: int, linear: tuple[Linear, ...] = ()) -> RuleFunction:
    """`_along_dim`, along the dim that is the argument at `position`."""
    return lambda node: _along_dim(node, argument(node, position, *default), linear)


add(aten._softmax.default, _along(1))
add(aten._softmax_backward_data.default, _along(2, linear=sums({0})))
add(aten.cumsum.default, _along(1, linear=sums({0})))
add(aten.topk.default, _along(2, -1))
_scans = aten_ops("logcumsumexp cumprod sort sort.stable cummax cummin")
add(_scans, lambda node: _along_dim(node, named_argument(node, "dim", -1)))


def _distances(node: fx.Node) -> Rule:
    """Distances of rows: x [..., p, d], y [..., r, d] -> [..., p, r]; batch dims broadcast."""
    x, y = (spec_of(n).shape for n in tensor_inputs(node))
    build = RuleBuilder()
    *batch, p, r = build.dims(spec_of(node).shape)
    size = (build.factor(x[-1], whole=True),)
    left, right = build.broadcast(x, [*batch, p, size]), build.broadcast(y, [*batch, r, size])
    return build.rule([left, right], [[*batch, p, r]])


def _distances_backward(node: fx.Node) -> Rule:
    """Operands grad, x, y, distances; the gradient of x is a sum over the rows of y. It has the batch dims of grad."""
    grad, x, y, _ = (spec_of(n).shape for n in tensor_inputs(node))
    build = RuleBuilder()
    *batch, p, r = pairs = build.dims(grad)
    size = (build.factor(x[-1], whole=True),)
    result = [*batch, p, size]
    left, right = build.broadcast(x, result), build.broadcast(y, [*batch, r, size])
    return build.rule([pairs, left, right, pairs], [result], sums({0}))


def _spectrum(node: fx.Node) -> Rule:
    """Fourier transforms along the listed dims, which are whole."""
    shape = spec_of(tensor_inputs(node)[0]).shape
    listed = {d % len(shape) for d in argument(node, 1)}
    build = RuleBuilder()
    known = {d: (build.factor(size),) for d, size in enumerate(shape) if d not in listed}
    return build.rule([build.dims_from(shape, known)], [build.dims_from(spec_of(node).shape, known)], sums({0}))


add(aten._cdist_forward.default, _distances)
add(aten._cdist_backward.default, _distances_backward, on_piece=GUARDED)  # of no rows it has the shape of x
add([aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default], _spectrum, on_piece=GUARDED)


def _heads(build: RuleBuilder, q: Spec, k: Spec) -> tuple[int, tuple[int, ...], int]:
    """Factors (batch, dims of a query head, key head): a query head is (key head, index in its group)."""
    batch, key_head = build.factor(q.shape[0]), build.factor(k.shape[1])
    members = q.shape[1] // k.shape[1]
    return batch, ((key_head, build.factor(members)) if members > 1 else (key_head,)), key_head


def _scores(bias: Spec, named: Sequence[Dim]) -> list[Dim]:
    """Dims of a bias that broadcasts to [b, h, s, t], by factor name."""
    return [() if n == 1 else dim for n, dim in zip(bias.shape, named[4 - len(bias.shape) :], strict=True)]


def _attention_dims(q: Spec, k: Spec, v: Spec, bias: Sequence[Spec]) -> tuple[RuleBuilder, list[Any], list[Any]]:
    """Dims of (q, k, v, bias) and of (out, lse): free over batch, key heads and queries; keys and head size whole.

    If queries are cut, either keys and values are gathered, or all three are cut by heads during the op (Ulysses): out
    goes back to q's layout, gradients to the layouts of their operands.
    """
    build = RuleBuilder()
    batch, head, key_head = _heads(build, q, k)
    s = build.factor(q.shape[2])
    t, d, e = (build.factor(n, whole=True) for n in (k.shape[2], q.shape[3], v.shape[3]))
    key, value = [(batch,), (key_head,), (t,), (d,)], [(batch,), (key_head,), (t,), (e,)]
    scores = [_scores(b, [(batch,), head, (s,), (t,)]) for b in bias]
    results = [[(batch,), head, (s,), (e,)], [(batch,), head, (s,)]]
    return build, [[(batch,), head, (s,), (d,)], key, value, *scores], results


def _attention(node: fx.Node) -> Rule:
    q, k, v, *bias = [spec_of(n) for n in tensor_inputs(node)]
    build, operands, results = _attention_dims(q, k, v, bias)
    return replace(build.rule(operands, results), instead=_by_heads(operands), back=(0, -1))


def _by_heads(operands: Sequence[list[Dim]]) -> tuple[tuple[int, int], ...]:
    """The pair (queries, key heads) of an attention's factors."""
    q, k = operands[:2]
    return ((q[2][0], k[1][0]),)


def _attention_backward(node: fx.Node) -> Rule:
    """Operands grad, q, k, v, (bias), out, lse. Gradients of keys and values are sums over queries."""
    _, q, k, v, *bias, _, _ = [spec_of(n) for n in tensor_inputs(node)]
    build, operands, (out, lse) = _attention_dims(q, k, v, bias)
    rule = build.rule([out, *operands, out, lse], operands[:3])
    return replace(rule, instead=_by_heads(operands), back=(1, 2, 3))


def _contract(node: fx.Node) -> Rule:
    """Sums over the dims of either operand that the result lacks."""
    a, b = (spec_of(n).shape for n in tensor_inputs(node))
    over_a, over_b = argument(node, 2), argument(node, 3)
    build = RuleBuilder()
    left = build.dims(a)
    shared = {d: left[at] for at, d in zip(over_a, over_b, strict=True)}
    right = [shared[d] if d in shared else (build.factor(size),) for d, size in enumerate(b)]
    kept = [dim for d, dim in enumerate(left) if d not in over_a] + [
        dim for d, dim in enumerate(right) if d not in shared
    ]
    return build.rule([left, right], [kept], sums({0}, {1}))


add(ours.contract.default, _contract)


def _attention_of_piece(call: PieceCall, query: int, causal_at: int) -> fx.Node | None:
    """If queries are cut, a causal mask depends on the position of the first query."""
    if not call.args[causal_at] or not call.is_cut(query, 2):
        return None
    at = causal_at + 2  # of `first_query`
    return call.same_op(*call.args[:at], call.start_of(query, 2), *call.args[at + 1 :])


add(
    ours.attention.default,
    _attention,
    on_piece=OnPiece(partial(_attention_of_piece, query=0, causal_at=4), in_chunks="batch"),
)
add(
    ours.attention_backward.default,
    _attention_backward,
    on_piece=OnPiece(partial(_attention_of_piece, query=1, causal_at=7), in_chunks="batch"),
)
