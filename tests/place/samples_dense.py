"""Samples of the rows for arithmetic, matmuls, norms, softmax, scans, attention and recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from tests.place.conformance import B, F, I, P, R, Z, made, sample

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
    sample(ours.round_parts.default, F(5, 2), torch.bfloat16),
    sample(ours.pin.default, F(5, 2), "replicate | tp", False),
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
    sample(aten.hardshrink_backward.default, F(5, 4), R(5, 4), 0.5),
    sample(aten.softshrink_backward.default, F(5, 4), R(5, 4), 0.5),
    sample(aten.hardswish.default, R(5, 4)),
    sample(aten.where.ScalarSelf, B(5, 4), 3.0, F(5, 4)),
    sample(aten.where.ScalarOther, B(5, 1), F(5, 4), 0.0),
    sample(aten.where.Scalar, B(5, 3), 1.0, 0.0),
    sample(aten.fill.Scalar, F(5, 4), 2.0),
    sample(aten.floor_divide.default, I(5, 4, high=20), 3),
    sample(aten._prelu_kernel.default, F(2, 5, 4), F(5, 1)),
    sample(aten._prelu_kernel_backward.default, F(2, 5, 4), F(2, 5, 4), F(5, 1)),
    sample(aten.log_sigmoid_forward.default, R(5, 4), exact=False),
    sample(aten.frexp.Tensor, R(5, 4)),
    sample(aten._conj.default, F(5, 4, dtype=torch.complex64)),
    sample(aten._neg_view.default, F(5, 4)),
    sample(aten.polar.default, P(5, 4), R(5, 1), exact=False),
    sample(aten.complex.default, F(5, 4), F(4)),
]


def _cdist_backward(generator: torch.Generator) -> tuple[Any, ...]:
    x, y = R(3, 5, 4).make(generator), R(3, 2, 4).make(generator)
    return F(3, 5, 2).make(generator), x, y, 2.0, torch.cdist(x, y)


def _cdist_backward_broadcast(generator: torch.Generator) -> tuple[Any, ...]:
    x, y = R(6, 4).make(generator), R(3, 5, 4).make(generator)
    return F(3, 6, 5).make(generator), x, y, 2.0, torch.cdist(x, y)


TABLES = [
    made(aten.bucketize.Tensor, lambda g: (R(5, 4).make(g), torch.linspace(-1, 1, 5)), exact=True),
    made(aten.searchsorted.Tensor, lambda g: (torch.linspace(-1, 1, 5), R(5, 4).make(g)), exact=True),
    made(aten.searchsorted.Tensor, lambda g: (R(5, 6).make(g).sort()[0], R(5, 4).make(g)), exact=True),
    sample(aten.isin.Tensor_Tensor, I(5, 4, high=9), I(3, high=9)),
    sample(aten._cdist_forward.default, R(3, 5, 4), R(3, 2, 4), 2.0, None, exact=False),
    sample(aten._cdist_forward.default, R(3, 5, 4), R(6, 4), 2.0, None, exact=False),
    made(aten._cdist_backward.default, _cdist_backward),
    made(aten._cdist_backward.default, _cdist_backward_broadcast),
]


ENDS = torch.tensor([2, 2, 6], dtype=torch.int32)  # an expert without rows, and a row of no expert
BLOCK_ENDS = torch.tensor([[0, 1, 2], [2, 2, 2], [0, 0, 0], [1, 1, 2], [0, 2, 2], [1, 1, 1]])  # six blocks of two rows


def _in_blocks(g: torch.Generator, size: int) -> torch.Tensor:
    """Positions of two rows of each of six blocks of `size` rows."""
    return torch.arange(6).repeat_interleave(2) * size + torch.randint(0, size, (12,), generator=g)


def _put(is_added: bool) -> Any:
    """Rows that are added to zeros, or written to distinct places."""

    def build(g: torch.Generator) -> tuple[Any, ...]:
        x = Z(18, 4) if is_added else F(18, 4)
        at = _in_blocks(g, 3) if is_added else torch.arange(18).view(6, 3)[:, 1:].flip(1).reshape(-1)
        return x, at, F(12, 4).make(g), is_added, 6

    return build


PRODUCTS = [
    sample(aten.mm.default, F(5, 6), F(6, 3)),
    sample(aten.mm.default, F(2, 3), F(3, 2)),
    sample(aten.mm.default, F(1, 5), F(5, 4)),
    sample(aten.bmm.default, F(3, 5, 4), F(3, 4, 2)),
    sample(aten.mv.default, F(5, 3), F(3)),
    sample(aten.dot.default, F(5), F(5)),
    sample(ours.contract.default, I(3, 5, 4), I(4, 6), [2], [0]),
    sample(ours.contract.default, I(6, 3, 5), I(3, 5, 4), [1, 2], [0, 1]),
    sample(ours.matmul.default, F(2, 3, 5, 4), F(2, 3, 4, 5)),
    made(ours.grouped_mm.default, lambda g: (F(7, 4).make(g), F(3, 4, 5).make(g), ENDS), exact=True),
    made(ours.leave_rows.default, lambda g: (F(2, 7).make(g)[:, :6], ENDS[1:], 1), exact=True),
    made(ours.enter_rows.default, lambda g: (F(2, 6).make(g), ENDS, 1), exact=True),
    made(ours.enter_rows.default, lambda g: (F(12, 2).make(g), BLOCK_ENDS, 0), exact=True),
    made(ours.grouped_outer.default, lambda g: (F(7, 4).make(g), F(7, 5).make(g), ENDS), exact=True),
    made(ours.row_owners.default, lambda g: (ENDS, 7, [4, 7], [1, 3], [0, 1, 2, 3]), exact=True),
    sample(ours.row_readers.default, I(6, 2, high=3), I(6, high=5), 3, 5, 1),
    sample(ours.row_readers.default, I(6, 1, high=3), None, 3, 6, 1),
    made(ours.grouped_mm.default, lambda g: (F(12, 4).make(g), F(3, 4, 5).make(g), BLOCK_ENDS), exact=True),
    made(ours.leave_rows.default, lambda g: (F(2, 12).make(g), BLOCK_ENDS, 1), exact=True),
    made(ours.grouped_outer.default, lambda g: (F(12, 4).make(g), F(12, 5).make(g), BLOCK_ENDS), exact=True),
    made(ours.row_owners.default, lambda g: (BLOCK_ENDS, 12, [12], [1, 3], [0, 1]), exact=True),
    made(ours.row_readers.default, lambda g: (I(12, 2, high=3).make(g), _in_blocks(g, 3), 3, 18, 6), exact=True),
    sample(ours.block_sort.default, I(12, high=3), 6, False),
    sample(ours.block_sort.default, I(12, high=3), 6, True),
    sample(ours.block_counts.default, I(12, low=-1, high=4), 3, 6),
    made(ours.block_index.default, lambda g: (F(18, 4).make(g), _in_blocks(g, 3), 6), exact=True),
    made(ours.block_put.default, _put(True), exact=True),
    made(ours.block_put.default, _put(False), exact=True),
    sample(ours.matmul.default, F(5, 4, 3), F(5, 3, 2)),
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
    sample(aten.logcumsumexp.default, R(5, 4), 1, exact=False),
    sample(aten._fft_c2c.default, F(5, 4, 4, dtype=torch.complex64), [1, 2], 0, True, exact=False),
    sample(aten._fft_r2c.default, F(5, 3, 4), [2], 0, True, exact=False),
    sample(aten._fft_c2r.default, F(5, 3, 3, dtype=torch.complex64), [2], 0, 4, exact=False),
    sample(aten.cumprod.default, F(5, 4), -1),
    sample(aten.cummax.default, R(5, 4), 0),
    sample(aten.cummin.default, R(5, 4), 0),
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
]

UNEQUAL_HEADS = made(ours.attention_backward.default, _attention_backward(4, 2, value_size=6, bias=(1, 4, 5, 5)))


def _recurrent(kind: str, gates: int, *, size: int = 4, bias: bool = True, is_backward: bool = False) -> Any:
    """A layer of 4 hidden features, projected to `size`, over 3 sequences of length 6."""

    def build(generator: torch.Generator) -> tuple[Any, ...]:
        shapes = [(gates * 4, 5), (gates * 4, size), *([(gates * 4,)] * 2 * bias), *([(size, 4)] * (size != 4))]
        weights = [R(*shape, low=-1, high=1).make(generator) for shape in shapes]
        states = [R(3, size).make(generator), R(3, 4 if kind == "lstm" else 0).make(generator)]
        grads = [R(*shape).make(generator) for shape in ((6, 3, size), *(state.shape for state in states))]
        return *([grads] if is_backward else ()), R(6, 3, 5).make(generator), *states, weights, kind, not bias

    return build


RECURRENT = [
    made(ours.recurrent.default, _recurrent("lstm", 4)),
    made(ours.recurrent.default, _recurrent("lstm", 4, size=3, bias=False)),
    made(ours.recurrent.default, _recurrent("gru", 3, bias=False)),
    made(ours.recurrent_backward.default, _recurrent("lstm", 4, is_backward=True)),
    made(ours.recurrent_backward.default, _recurrent("lstm", 4, size=3, is_backward=True)),
    made(ours.recurrent_backward.default, _recurrent("rnn_tanh", 1, bias=False, is_backward=True)),
]

DENSE = [*ARITHMETIC, *TABLES, *PRODUCTS, *NORMS, *SCANS, *ATTENTION, *RECURRENT]
