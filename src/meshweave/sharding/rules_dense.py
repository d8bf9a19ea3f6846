"""Rows for arithmetic, matmuls, convolutions, norms, softmax and attention."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import fx

from meshweave.ir import ops  # noqa: F401  (defines meshweave::attention)
from meshweave.ir.graph import Spec, spec_of, tensor_inputs
from meshweave.sharding.factors import Dim, Linear, Rule, RuleBuilder, sums
from meshweave.sharding.registry import add, pointwise, result_specs

aten = torch.ops.aten
ours = torch.ops.meshweave


def _sum_like(node: fx.Node) -> Rule:
    """a + b: partial sums pass when both are partial; a number added would be added once per device."""
    both = len(tensor_inputs(node)) == 2
    return pointwise(node, sums({0, 1}) if both else ())


def _product(node: fx.Node) -> Rule:
    """a * b: a partial sum passes in either operand."""
    return pointwise(node, sums(*({i} for i in range(len(tensor_inputs(node))))))


def _cast(node: fx.Node) -> Rule:
    """A cast is linear only where it does not round: to the same or a wider float."""
    before, after = spec_of(tensor_inputs(node)[0]).dtype, spec_of(node).dtype
    widens = before.is_floating_point and after.is_floating_point and after.itemsize >= before.itemsize
    return pointwise(node, sums({0}) if widens else ())


_FIRST = partial(pointwise, linear=sums({0}))

add([aten.add.Tensor, aten.sub.Tensor], _sum_like)
add([aten.mul.Tensor, aten.mul.Scalar], _product)
add([aten.div.Tensor, aten.div.Scalar, aten.neg.default], _FIRST)
add(aten._to_copy.default, _cast)
add(aten.where.self, partial(pointwise, linear=sums({1, 2})))
add(
    [
        aten.gelu_backward.default,
        aten.silu_backward.default,
        aten.threshold_backward.default,
        aten.tanh_backward.default,
        aten.sigmoid_backward.default,
        aten.hardtanh_backward.default,
        aten.leaky_relu_backward.default,
        aten.mish_backward.default,
        aten.log_sigmoid_backward.default,
        aten.logit_backward.default,
    ],
    _FIRST,
)

add(aten.mm.default, "m k, k n -> m n", linear=sums({0}, {1}))
add(aten.bmm.default, "b m k, b k n -> b m n", linear=sums({0}, {1}))
add(aten.mv.default, "m k, k -> m", linear=sums({0}, {1}))
add(aten.dot.default, "k, k ->", linear=sums({0}, {1}))


def _dims(build: RuleBuilder, shape: tuple[int, ...], known: Mapping[int, Dim]) -> list[Dim]:
    """Dim d is made of the factors `known[d]` where known, else a whole factor of its own."""
    return [known[d] if d in known else (build.factor(size, whole=True),) for d, size in enumerate(shape)]


def _channels(
    build: RuleBuilder, x: Spec, w: Spec, transposed: bool, groups: int, whole_input: bool
) -> tuple[Dim, Dim, dict[int, Dim]]:
    """Factors of the input channels, of the output channels and of the weight's dims: channels are (group, member)."""
    wide = w.shape[1] * groups if transposed else w.shape[0]
    group = build.factor(groups)
    before = (group, build.factor(x.shape[1] // groups, whole=whole_input))
    after = (group, build.factor(wide // groups))
    return before, after, {0: before, 1: after[1:]} if transposed else {0: after, 1: before[1:]}


def _convolution(node: fx.Node) -> Rule:
    """Free over batch, groups and channels; a sharded input channel gives partial sums, unless a bias is added."""
    x, w, bias = (n.meta["spec"] if isinstance(n, fx.Node) else None for n in node.args[:3])
    transposed, groups = bool(node.args[6]), int(node.args[8])  # type: ignore[call-overload]
    build = RuleBuilder()
    batch = (build.factor(x.shape[0]),)
    before, after, weight = _channels(build, x, w, transposed, groups, bias is not None)
    operands = [_dims(build, x.shape, {0: batch, 1: before}), _dims(build, w.shape, weight)]
    operands += [] if bias is None else [[after]]
    (out,) = result_specs(node)
    result = _dims(build, out.shape, {0: batch, 1: after})
    return build.rule(operands, [result], () if bias is not None else sums({0}, {1}))


def _convolution_backward(node: fx.Node) -> Rule:
    """One gradient per op (see capture/normalize): of the input, or of the weight."""
    grad, x, w = (n.meta["spec"] for n in node.args[:3])  # type: ignore[union-attr]
    transposed, groups, mask = bool(node.args[7]), int(node.args[9]), node.args[10]  # type: ignore[call-overload]
    build = RuleBuilder()
    batch = (build.factor(x.shape[0]),)
    before, after, weight = _channels(build, x, w, transposed, groups, False)
    operands = [
        _dims(build, grad.shape, {0: batch, 1: after}),
        _dims(build, x.shape, {0: batch, 1: before}),
        _dims(build, w.shape, weight),
    ]
    (result,) = result_specs(node)
    to_input = bool(mask[0])  # type: ignore[index]
    dims = _dims(build, result.shape, {0: batch, 1: before} if to_input else weight)
    return build.rule(operands, [dims], sums({0}, {2}) if to_input else sums({0}, {1}))


def _matmul(node: fx.Node) -> Rule:
    a, b = (spec_of(n).shape for n in tensor_inputs(node))
    build = RuleBuilder()
    batch = build.dims(a[:-2])
    m, k, n = ((build.factor(size),) for size in (a[-2], a[-1], b[-1]))
    return build.rule([[*batch, m, k], [*batch, k, n]], [[*batch, m, n]], sums({0}, {1}))


add(ours.matmul.default, _matmul)
add(aten.convolution.default, _convolution, localize="convolution")
add(aten.convolution_backward.default, _convolution_backward, localize="convolution_backward")


def _planes(node: fx.Node) -> Rule:
    """Pooling and resizing: every [n, c] plane by itself."""
    build = RuleBuilder()
    tensors = tensor_inputs(node)
    leading = len(spec_of(tensors[0]).shape) - 2
    known = {d: (build.factor(spec_of(tensors[0]).shape[d]),) for d in range(leading)}
    operands = [_dims(build, spec_of(t).shape, known) for t in tensors]
    results = [_dims(build, s.shape, known) for s in result_specs(node)]
    return build.rule(operands, results)


add(
    [
        aten.max_pool2d_with_indices.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.avg_pool2d.default,
        aten.avg_pool2d_backward.default,
        aten._adaptive_avg_pool2d_backward.default,
        aten.upsample_nearest2d.vec,
        aten.upsample_bilinear2d.vec,
        aten.upsample_nearest2d.default,
        aten.upsample_bilinear2d.default,
    ],
    _planes,
    localize="planes",
)
add(
    [aten.upsample_nearest2d_backward.default, aten.upsample_bilinear2d_backward.default],
    _planes,
    localize="resized_backward",
)


def _layer_norm(node: fx.Node) -> Rule:
    """Batch dims are free, normalised dims whole. Operands: x, then weight and bias where present."""
    x, *rest = [spec_of(n) for n in tensor_inputs(node)]
    batch = len(x.shape) - len(node.args[1])  # type: ignore[arg-type]
    build = RuleBuilder()
    known = {d: (build.factor(x.shape[d]),) for d in range(batch)}
    operands = [_dims(build, x.shape, known), *(_dims(build, s.shape, {}) for s in rest)]
    results = [_dims(build, s.shape, known) for s in result_specs(node)]
    return build.rule(operands, results)


def _layer_norm_backward(node: fx.Node) -> Rule:
    """Operands grad, x, mean, rstd, weight, bias; gradients of weight and bias are sums over the batch dims."""
    grad, x, mean, rstd, *rest = [spec_of(n) for n in tensor_inputs(node)]
    batch = len(x.shape) - len(node.args[2])  # type: ignore[arg-type]
    build = RuleBuilder()
    known = {d: (build.factor(x.shape[d]),) for d in range(batch)}
    operands = [_dims(build, s.shape, known) for s in (grad, x, mean, rstd)]
    operands += [_dims(build, s.shape, {}) for s in rest]
    results = [_dims(build, s.shape, known if s.shape == x.shape and batch else {}) for s in result_specs(node)]
    return build.rule(operands, results, sums({0}))


add(aten.native_layer_norm.default, _layer_norm)
add(aten.native_layer_norm_backward.default, _layer_norm_backward)


def _along_dim(node: fx.Node, dim: int, linear: tuple[Linear, ...] = ()) -> Rule:
    """Every line along `dim` by itself; operands and results have the same shape up to that dim's size."""
    shape = spec_of(tensor_inputs(node)[0]).shape
    build = RuleBuilder()
    known = {d: (build.factor(size),) for d, size in enumerate(shape) if d != dim % max(len(shape), 1)}
    operands = [_dims(build, spec_of(t).shape, known) for t in tensor_inputs(node)]
    return build.rule(operands, [_dims(build, s.shape, known) for s in result_specs(node)], linear)


def _softmax(node: fx.Node) -> Rule:
    return _along_dim(node, node.args[1])  # type: ignore[arg-type]


def _softmax_backward(node: fx.Node) -> Rule:
    return _along_dim(node, node.args[2], sums({0}))  # type: ignore[arg-type]


def _scan(node: fx.Node) -> Rule:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", -1)
    return _along_dim(node, dim)  # type: ignore[arg-type]


def _linear_scan(node: fx.Node) -> Rule:
    return _along_dim(node, node.args[1], sums({0}))  # type: ignore[arg-type]


def _top(node: fx.Node) -> Rule:
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", -1)
    return _along_dim(node, dim)  # type: ignore[arg-type]


add(aten._softmax.default, _softmax)
add(aten._softmax_backward_data.default, _softmax_backward)
add([aten.cumprod.default, aten.sort.default, aten.sort.stable, aten.cummax.default], _scan)
add(aten.cumsum.default, _linear_scan)
add(aten.topk.default, _top)


def _heads(build: RuleBuilder, q: Spec, k: Spec) -> tuple[int, tuple[int, ...], int]:
    """Factors (batch, dims of a query head, key head): a query head is (key head, member of its group)."""
    batch, key_head = build.factor(q.shape[0]), build.factor(k.shape[1])
    members = q.shape[1] // k.shape[1]
    return batch, ((key_head, build.factor(members)) if members > 1 else (key_head,)), key_head


def _scores(bias: Spec, batch: int, head: tuple[int, ...], build: RuleBuilder) -> list[tuple[int, ...]]:
    """Dims of a bias that broadcasts to [b, h, s, t]."""
    named = [(batch,), head, None, None][4 - len(bias.shape) :]
    return [
        () if size == 1 else (dim if dim is not None else (build.factor(size, whole=True),))
        for size, dim in zip(bias.shape, named, strict=True)
    ]


def _attention(node: fx.Node) -> Rule:
    """Free over batch and key heads; positions and head size whole."""
    q, k, v, *bias = [spec_of(n) for n in tensor_inputs(node)]
    build = RuleBuilder()
    batch, head, key_head = _heads(build, q, k)
    s, t, d, e = (build.factor(n, whole=True) for n in (q.shape[2], k.shape[2], q.shape[3], v.shape[3]))
    operands = [[(batch,), head, (s,), (d,)], [(batch,), (key_head,), (t,), (d,)], [(batch,), (key_head,), (t,), (e,)]]
    operands += [_scores(b, batch, head, build) for b in bias]
    return build.rule(operands, [[(batch,), head, (s,), (e,)], [(batch,), head, (s,)]])


def _attention_backward(node: fx.Node) -> Rule:
    """Operands grad, q, k, v, (bias), out, lse."""
    grad, q, k, v, *bias, out, lse = [spec_of(n) for n in tensor_inputs(node)]
    build = RuleBuilder()
    batch, head, key_head = _heads(build, q, k)
    s, t, d, e = (build.factor(n, whole=True) for n in (q.shape[2], k.shape[2], q.shape[3], v.shape[3]))
    query, key, value = [(batch,), head, (s,), (d,)], [(batch,), (key_head,), (t,), (d,)], [(batch,), (key_head,), (t,), (e,)]
    result = [(batch,), head, (s,), (e,)]
    operands = [result, query, key, value, *(_scores(b, batch, head, build) for b in bias), result, [(batch,), head, (s,)]]
    return build.rule(operands, [query, key, value])


add(ours.attention.default, _attention)
add(ours.attention_backward.default, _attention_backward)
