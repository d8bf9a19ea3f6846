"""Samples of the rows for images: convolutions, pooling, resizing, padding, windows and sampling."""

from __future__ import annotations

from typing import Any

import torch
from tests.place.conformance import F, I, P, R, Sample, sample

aten = torch.ops.aten

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
    sample(aten.convolution.default, F(2, 5, 4, 4), F(5, 1, 3, 3), F(5), *_PLAIN[:5], 5),
    sample(aten.convolution.default, F(2, 6, 4), F(12, 2, 3), None, [1], [1], [1], False, [0], 3),
    sample(aten.convolution.default, F(2, 4, 4, 4), F(4, 3, 3, 3), F(6), *_TRANSPOSED[:5], 2),
    sample(aten.convolution.default, F(3, 2, 4, 4, 4), F(3, 2, 3, 3, 3), None, *_VOLUME),
    *(
        sample(aten.convolution_backward.default, grad, x, w, None, *options, mask)
        for grad, x, w, options in [
            (F(2, 5, 6, 5), F(2, 3, 6, 5), F(5, 3, 3, 3), _PLAIN),
            (F(3, 4, 4), F(3, 2, 8), F(4, 2, 3), _STRIDED),
            (F(2, 5, 8, 8), F(2, 3, 4, 4), F(3, 5, 3, 3), _TRANSPOSED),
            (F(3, 6, 4, 4), F(3, 4, 4, 4), F(6, 2, 3, 3), _GROUPED),
            (F(2, 5, 4, 4), F(2, 5, 4, 4), F(5, 1, 3, 3), (*_PLAIN[:5], 5)),
            (F(2, 6, 8, 8), F(2, 4, 4, 4), F(4, 3, 3, 3), (*_TRANSPOSED[:5], 2)),
            (F(3, 3, 4, 4, 4), F(3, 2, 4, 4, 4), F(3, 2, 3, 3, 3), _VOLUME),
        ]
        for mask in (_TO_INPUT, _TO_WEIGHT)
    ),
]

PLANES = [
    sample(aten._adaptive_avg_pool2d.default, F(3, 2, 4, 4), [2, 2]),
    sample(aten.adaptive_max_pool2d.default, R(3, 2, 4, 4), [2, 2]),
    sample(aten.adaptive_max_pool2d_backward.default, F(3, 2, 2, 2), F(3, 2, 4, 4), I(3, 2, 2, 2, high=16)),
    sample(aten.max_pool3d_with_indices.default, R(3, 2, 4, 4, 4), [2, 2, 2], [2, 2, 2]),
    sample(
        aten.max_pool3d_with_indices_backward.default,
        F(3, 2, 2, 2, 2),
        F(3, 2, 4, 4, 4),
        *[[2] * 3] * 2,
        [0] * 3,
        [1] * 3,
        False,
        I(3, 2, 2, 2, 2, high=64),
    ),
    sample(aten.adaptive_max_pool3d.default, R(3, 2, 4, 4, 4), [2, 2, 2]),
    sample(aten.adaptive_max_pool3d_backward.default, F(3, 2, 2, 2, 2), F(3, 2, 4, 4, 4), I(3, 2, 2, 2, 2, high=64)),
    sample(aten.avg_pool3d.default, F(3, 2, 4, 4, 4), [2, 2, 2], [2, 2, 2]),
    sample(
        aten.avg_pool3d_backward.default,
        F(3, 2, 2, 2, 2),
        F(3, 2, 4, 4, 4),
        *[[2] * 3] * 2,
        [0] * 3,
        False,
        True,
        None,
    ),
    sample(aten._adaptive_avg_pool3d.default, F(3, 2, 4, 4, 4), [2, 2, 2]),
    sample(aten._adaptive_avg_pool3d_backward.default, F(3, 2, 2, 2, 2), F(3, 2, 4, 4, 4)),
    sample(aten.max_pool2d_with_indices.default, R(5, 4, 4), [2, 2], [2, 2]),
    sample(aten.max_pool2d_with_indices.default, R(3, 2, 4, 4), [2, 2], [2, 2]),
    sample(
        aten.max_pool2d_with_indices_backward.default,
        F(3, 2, 2, 2),
        F(3, 2, 4, 4),
        [2, 2],
        [2, 2],
        [0, 0],
        [1, 1],
        False,
        I(3, 2, 2, 2, high=16),
    ),
    sample(aten.avg_pool2d.default, F(3, 2, 4, 4), [2, 2], [2, 2]),
    sample(aten.avg_pool2d_backward.default, F(3, 2, 2, 2), F(3, 2, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None),
    sample(aten._adaptive_avg_pool2d_backward.default, F(3, 2, 2, 2), F(3, 2, 4, 4)),
    sample(aten.upsample_nearest2d.vec, F(3, 2, 2, 3), None, [2.0, 2.0]),
    sample(aten.upsample_bilinear2d.vec, F(3, 2, 2, 3), [4, 6], False, None, exact=False),
    sample(aten.upsample_nearest2d.default, F(3, 2, 2, 3), [4, 6]),
    sample(aten.upsample_bilinear2d.default, F(3, 2, 2, 3), [4, 6], False, exact=False),
    sample(aten.upsample_nearest2d_backward.default, F(3, 2, 4, 6), [4, 6], [3, 2, 2, 3]),
    sample(aten.upsample_bilinear2d_backward.default, F(3, 2, 4, 6), [4, 6], [3, 2, 2, 3], False, exact=False),
]


def _pads() -> list[Sample]:
    """Reflection and replication of 1, 2 and 3 dims, forwards and backwards."""
    found = []
    for rank in (1, 2, 3):
        inner, outer, pad = (3, 2, *[4] * rank), (3, 2, *[6] * rank), [1, 1] * rank
        for kind in ("reflection", "replication"):
            forward, backward = getattr(aten, f"{kind}_pad{rank}d"), getattr(aten, f"{kind}_pad{rank}d_backward")
            found += [sample(forward.default, F(*inner), pad), sample(backward.default, F(*outer), F(*inner), pad)]
    return found


def _resizes() -> list[Sample]:
    """Every way to double 1, 2 or 3 dims, forwards and backwards."""
    corners: dict[str, list[Any]] = {name: [] for name in ("upsample_nearest", "_upsample_nearest_exact")}
    kinds = {
        1: [*corners, "upsample_linear"],
        2: [*corners, "upsample_bilinear", "upsample_bicubic", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"],
        3: [*corners, "upsample_trilinear"],
    }
    found = []
    for rank, names in kinds.items():
        small, large = (3, 2, *[3] * rank), (3, 2, *[6] * rank)
        for name in names:
            full = name if name.endswith("_aa") else f"{name}{rank}d"
            extra = corners.get(name, [False])
            forward, backward = getattr(aten, full), getattr(aten, f"{full}_backward")
            rest = [*extra, *[None] * rank]
            found += [
                sample(forward.default, F(*small), list(large[2:]), *rest, exact=False),
                sample(backward.default, F(*large), list(large[2:]), list(small), *rest, exact=False),
            ]
    return found


WINDOWS = [
    sample(aten.im2col.default, F(3, 2, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]),
    sample(aten.im2col.default, F(2, 3, 4, 4), [3, 3], [1, 1], [1, 1], [1, 1]),
    sample(aten.col2im.default, F(3, 20, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2]),
    sample(aten.grid_sampler_2d.default, F(3, 2, 4, 4), R(3, 2, 5, 2, low=-1, high=1), 0, 0, False, exact=False),
    sample(
        aten.grid_sampler_2d_backward.default,
        F(3, 2, 2, 5),
        F(3, 2, 4, 4),
        R(3, 2, 5, 2, low=-1, high=1),
        0,
        0,
        False,
        [True, True],
        exact=False,
    ),
    sample(aten.grid_sampler_3d.default, F(3, 2, 3, 3, 3), P(3, 2, 2, 2, 3), 0, 0, False, exact=False),
    sample(
        aten.grid_sampler_3d_backward.default,
        F(3, 2, 2, 2, 2),
        F(3, 2, 3, 3, 3),
        P(3, 2, 2, 2, 3),
        0,
        0,
        False,
        [False, True],
        exact=False,
    ),
]

VISION = [*CONVOLUTIONS, *PLANES, *_pads(), *_resizes(), *WINDOWS]
