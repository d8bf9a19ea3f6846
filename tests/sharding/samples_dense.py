"""Samples of the rows for arithmetic, matmuls, convolutions, norms, softmax and attention."""

from __future__ import annotations

from typing import Any

import torch

from tests.sharding.conformance import B, F, I, P, R, made, sample

aten = torch.ops.aten
ours = torch.ops.meshweave

ARITHMETIC = [
    sample(aten.add.Tensor, F(5, 4), F(5, 4)),
    sample(aten.add.Tensor, F(5, 4), F(4)),
    sample(aten.add.Tensor, F(3, 1), F(1, 4)),
    sample(aten.add.Tensor, F(5, 4), 3),
    sample(aten.add.Tensor, F(5, 4), F()),
    sample(aten.add.Tensor, F(5, 4), F(5, 4), alpha=2),
    sample(aten.sub.Tensor, F(5, 4), F(5, 1)),
    sample(aten.mul.Tensor, F(5, 4), F(4)),
    sample(aten.mul.Tensor, F(5, 4), F()),
    sample(aten.mul.Tensor, F(5, 4), 3),
    sample(aten.mul.Tensor, F(), F(6)),
    sample(aten.mul.Scalar, F(5, 2), 3),
    sample(aten.div.Tensor, F(5, 4), P(5, 4), exact=False),
    sample(aten.div.Tensor, F(5, 4), 2),
    sample(aten.div.Scalar, F(5, 4), 4),
    sample(aten.neg.default, F(5, 2)),
    sample(aten._to_copy.default, F(5, 2), dtype=torch.float64),
    sample(aten._to_copy.default, R(5, 2), dtype=torch.bfloat16),
    sample(aten._to_copy.default, I(5, 2), dtype=torch.float32),
    sample(aten.where.self, B(5, 4), F(5, 4), F(5, 4)),
    sample(aten.where.self, B(5, 1), F(4), F()),
    sample(aten.gelu_backward.default, F(5, 4), R(5, 4), exact=False),
    sample(aten.silu_backward.default, F(5, 4), R(5, 4), exact=False),
    sample(aten.threshold_backward.default, F(5, 4), R(5, 4), 0),
    sample(aten.tanh_backward.default, F(5, 4), R(5, 4), exact=False),
    sample(aten.sigmoid_backward.default, F(5, 4), P(5, 4), exact=False),
    sample(aten.hardtanh_backward.default, F(5, 4), R(5, 4), -1, 1),
    sample(aten.leaky_relu_backward.default, F(5, 4), R(5, 4), 0.25, False),
    sample(aten.mish_backward.default, F(5, 4), R(5, 4), exact=False),
    sample(aten.log_sigmoid_backward.default, F(5, 4), R(5, 4), P(5, 4), exact=False),
    sample(aten.logit_backward.default, F(5, 4), P(5, 4), exact=False),
]

PRODUCTS = [
    sample(aten.mm.default, F(5, 6), F(6, 3)),
    sample(aten.mm.default, F(2, 3), F(3, 2)),
    sample(aten.mm.default, F(1, 5), F(5, 4)),
    sample(aten.bmm.default, F(3, 5, 4), F(3, 4, 2)),
    sample(aten.mv.default, F(5, 3), F(3)),
    sample(aten.dot.default, F(5), F(5)),
    sample(ours.matmul.default, F(2, 3, 5, 4), F(2, 3, 4, 5)),
    sample(ours.matmul.default, F(5, 4, 3), F(5, 3, 2)),
]

_PLAIN: tuple[Any, ...] = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
_STRIDED: tuple[Any, ...] = ([2], [1], [1], False, [0], 1)
_TRANSPOSED: tuple[Any, ...] = ([2, 2], [1, 1], [1, 1], True, [1, 1], 1)
_GROUPED: tuple[Any, ...] = ([1, 1], [1, 1], [1, 1], False, [0, 0], 2)
_VOLUME: tuple[Any, ...] = ([1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1)
_TO_INPUT, _TO_WEIGHT = [True, False, False], [False, True, False]

CONVOLUTIONS = [
    sample(aten.convolution.default, F(2, 3, 6, 5), F(5, 3, 3, 3), None, *_PLAIN),
    sample(aten.convolution.default, F(3, 2, 4, 4), F(5, 2, 3, 3), F(5), *_PLAIN),
    sample(aten.convolution.default, F(3, 2, 8), F(4, 2, 3), F(4), *_STRIDED),
    sample(aten.convolution.default, F(2, 3, 4, 4), F(3, 5, 3, 3), F(5), *_TRANSPOSED),
    sample(aten.convolution.default, F(2, 3, 4, 4), F(3, 5, 3, 3), None, *_TRANSPOSED),
    sample(aten.convolution.default, F(3, 4, 4, 4), F(6, 2, 3, 3), F(6), *_GROUPED),
    sample(aten.convolution.default, F(3, 2, 4, 4, 4), F(3, 2, 3, 3, 3), None, *_VOLUME),
    *(
        sample(aten.convolution_backward.default, grad, x, w, None, *options, mask)
        for grad, x, w, options in [
            (F(2, 5, 6, 5), F(2, 3, 6, 5), F(5, 3, 3, 3), _PLAIN),
            (F(3, 4, 4), F(3, 2, 8), F(4, 2, 3), _STRIDED),
            (F(2, 5, 8, 8), F(2, 3, 4, 4), F(3, 5, 3, 3), _TRANSPOSED),
            (F(3, 6, 4, 4), F(3, 4, 4, 4), F(6, 2, 3, 3), _GROUPED),
            (F(3, 3, 4, 4, 4), F(3, 2, 4, 4, 4), F(3, 2, 3, 3, 3), _VOLUME),
        ]
        for mask in (_TO_INPUT, _TO_WEIGHT)
    ),
]

PLANES = [
    sample(aten.max_pool2d_with_indices.default, R(3, 5, 4, 4), [2, 2], [2, 2]),
    sample(
        aten.max_pool2d_with_indices_backward.default,
        F(3, 5, 2, 2), F(3, 5, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, I(3, 5, 2, 2, high=16),
    ),
    sample(aten.avg_pool2d.default, F(3, 5, 4, 4), [2, 2], [2, 2]),
    sample(aten.avg_pool2d_backward.default, F(3, 5, 2, 2), F(3, 5, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None),
    sample(aten._adaptive_avg_pool2d_backward.default, F(3, 5, 2, 2), F(3, 5, 4, 4)),
    sample(aten.upsample_nearest2d.vec, F(3, 2, 2, 3), None, [2.0, 2.0]),
    sample(aten.upsample_bilinear2d.vec, F(3, 2, 2, 3), [4, 6], False, None, exact=False),
    sample(aten.upsample_nearest2d.default, F(3, 2, 2, 3), [4, 6]),
    sample(aten.upsample_bilinear2d.default, F(3, 2, 2, 3), [4, 6], False, exact=False),
    sample(aten.upsample_nearest2d_backward.default, F(3, 2, 4, 6), [4, 6], [3, 2, 2, 3]),
    sample(aten.upsample_bilinear2d_backward.default, F(3, 2, 4, 6), [4, 6], [3, 2, 2, 3], False, exact=False),
]


def _norm_backward(weight: bool) -> Any:
    def build(generator: torch.Generator) -> tuple[Any, ...]:
        x, grad = R(5, 3, 4).make(generator), F(5, 3, 4).make(generator)
        w, b = (P(4).make(generator), P(4).make(generator)) if weight else (None, None)
        _, mean, rstd = aten.native_layer_norm.default(x, [4], w, b, 1e-5)
        return grad, x, [4], mean, rstd, w, b, [True, weight, weight]

    return build


NORMS = [
    sample(aten.native_layer_norm.default, R(5, 3, 4), [4], P(4), P(4), 1e-5, exact=False),
    sample(aten.native_layer_norm.default, R(5, 3, 4), [3, 4], None, None, 1e-5, exact=False),
    sample(aten.native_layer_norm.default, R(4), [4], P(4), None, 1e-5, exact=False),
    made(aten.native_layer_norm_backward.default, _norm_backward(True)),
    made(aten.native_layer_norm_backward.default, _norm_backward(False)),
    sample(aten._softmax.default, R(5, 3, 4), -1, False, exact=False),
    sample(aten._softmax.default, R(5, 3), 0, False, exact=False),
    sample(aten._softmax.default, R(), 0, False, exact=False),
    sample(aten._softmax_backward_data.default, F(5, 3, 4), P(5, 3, 4), -1, torch.float32, exact=False),
]

SCANS = [
    sample(aten.cumsum.default, F(5, 4), 1),
    sample(aten.cumsum.default, F(5, 4), -2),
    sample(aten.cumsum.default, F(), 0),
    sample(aten.cumprod.default, F(5, 4), -1),
    sample(aten.cummax.default, R(5, 4), 0),
    sample(aten.sort.default, R(5, 4)),
    sample(aten.sort.default, R(5, 4), 0, True),
    sample(aten.sort.stable, F(5, 4), stable=True, dim=0),
    sample(aten.topk.default, R(5, 6), 2),
    sample(aten.topk.default, R(5, 6), 3, 0),
]


def _attention_backward(heads: int, groups: int, *, value_size: int = 4, bias: tuple[int, ...] | None = None) -> Any:
    def build(generator: torch.Generator) -> tuple[Any, ...]:
        q, k = R(2, heads, 5, 4).make(generator), R(2, groups, 5, 4).make(generator)
        v, grad = R(2, groups, 5, value_size).make(generator), R(2, heads, 5, value_size).make(generator)
        extra = None if bias is None else R(*bias).make(generator)
        out, lse = ours.attention(q, k, v, extra, bias is None, 0.5)
        return grad, q, k, v, extra, out, lse, bias is None, 0.5

    return build


ATTENTION = [
    sample(ours.attention.default, R(2, 3, 5, 4), R(2, 3, 5, 4), R(2, 3, 5, 4), None, True, 0.5, exact=False),
    sample(ours.attention.default, R(3, 6, 5, 4), R(3, 3, 5, 4), R(3, 3, 5, 4), None, True, 0.5, exact=False),
    sample(ours.attention.default, R(2, 4, 3, 4), R(2, 2, 5, 4), R(2, 2, 5, 4), B(3, 5), False, 0.5, exact=False),
    sample(ours.attention.default, R(2, 4, 3, 4), R(2, 2, 5, 4), R(2, 2, 5, 4), R(2, 4, 3, 5), False, 0.5, exact=False),
    sample(ours.attention.default, R(2, 3, 3, 4), R(2, 3, 5, 4), R(2, 3, 5, 6), R(2, 1, 1, 5), False, 0.5, exact=False),
    made(ours.attention_backward.default, _attention_backward(3, 3)),
    made(ours.attention_backward.default, _attention_backward(6, 3)),
    made(ours.attention_backward.default, _attention_backward(4, 2, bias=(2, 4, 5, 5))),
    made(ours.attention_backward.default, _attention_backward(4, 2, value_size=6, bias=(1, 4, 5, 5))),
]

DENSE = [*ARITHMETIC, *PRODUCTS, *CONVOLUTIONS, *PLANES, *NORMS, *SCANS, *ATTENTION]
