"""Samples of pointwise ops: those that capture leaves to the one row for all of them, and a few shapes of broadcast."""

from __future__ import annotations

import torch
from tests.place.conformance import B, F, I, P, R, sample

aten = torch.ops.aten

_UNARY = [
    aten.exp, aten.sqrt, aten.rsqrt, aten.log, aten.log1p, aten.reciprocal, aten.tanh, aten.sigmoid, aten.silu,
    aten.gelu, aten.erf, aten.sin, aten.cos, aten.expm1, aten.log2, aten.exp2, aten.hardsigmoid, aten.elu, aten.mish,
    aten.softplus,
]  # fmt: skip
_EXACT_UNARY = [
    aten.relu, aten.abs, aten.sign, aten.floor, aten.ceil, aten.round, aten.trunc, aten.isnan, aten.isinf,
    aten.hardtanh, aten.leaky_relu,
]  # fmt: skip

POINTWISE = [
    *(sample(op.default, P(5, 4), exact=False) for op in _UNARY),
    *(sample(op.default, R(3, 4)) for op in _EXACT_UNARY),
    sample(aten.logical_not.default, B(5, 2)),
    sample(aten.bitwise_not.default, B(5, 2)),
    sample(aten.bitwise_and.Tensor, B(5, 1), B(1, 4)),
    sample(aten.bitwise_or.Tensor, B(5, 4), B(4)),
    sample(aten.logical_and.default, B(5, 4), B(5, 4)),
    sample(aten.eq.Scalar, I(5, 4), 2),
    sample(aten.eq.Tensor, I(5, 1), I(4)),
    sample(aten.ne.Scalar, I(5, 4), 2),
    sample(aten.lt.Tensor, I(5, 1), I(1, 4)),
    sample(aten.le.Tensor, F(3, 1, 2), F(5, 1)),
    sample(aten.gt.Scalar, R(5, 4), 0),
    sample(aten.ge.Scalar, R(5, 4), 0.5),
    sample(aten.add.Scalar, F(5, 4), 2),
    sample(aten.sub.Scalar, F(5, 4), 2),
    sample(aten.rsub.Scalar, F(5, 4), 2),
    sample(aten.maximum.default, F(5, 4), F(4)),
    sample(aten.minimum.default, F(5, 4), F(5, 1)),
    sample(aten.clamp.default, R(5, 4), -0.5, 0.5),
    sample(aten.clamp_min.default, R(5, 4), 0.0),
    sample(aten.pow.Tensor_Scalar, F(5, 4), 2),
    sample(aten.pow.Tensor_Tensor, P(5, 4), P(4), exact=False),
    sample(aten.pow.Scalar, 2.0, F(5, 2)),
    sample(aten.remainder.Scalar, I(5, 4, high=20), 3),
    sample(aten.div.Tensor_mode, I(5, 4, high=20), 3, rounding_mode="floor"),
    sample(aten.lerp.Scalar, F(5, 4), F(5, 4), 0.5),
    sample(aten.lerp.Tensor, F(5, 4), F(5, 4), F(5, 4)),
    sample(aten.addcmul.default, F(5, 4), F(5, 1), F(4), value=2),
    sample(aten.masked_fill.Scalar, F(5, 4), B(5, 1), -7.0),
    sample(aten.atan2.default, R(5, 4), P(4), exact=False),
    sample(aten.bitwise_xor.Tensor, I(5, 4), I(5, 4)),
    sample(aten.bitwise_right_shift.Tensor_Scalar, I(5, 4, high=99), 2),
]
