"""Samples of the rows that move or make elements."""

from __future__ import annotations

import torch
from tests.sharding.conformance import B, F, I, R, made, sample

aten = torch.ops.aten
ours = torch.ops.meshweave

VIEWS = [
    sample(aten.view.default, F(5, 6), [5, 2, 3]),
    sample(aten.view.default, F(5, 2, 3), [5, 6]),
    sample(aten.view.default, F(5, 3, 4), [15, 4]),
    sample(aten.view.default, F(15, 4), [5, 3, 4]),
    sample(aten.view.default, F(3, 4), [12]),
    sample(aten.view.default, F(12), [3, 4]),
    sample(aten.view.default, F(6, 4), [4, 6]),
    sample(aten.view.default, F(2, 6), [4, 3]),
    sample(aten.view.default, F(3, 1, 2), [1, 6, 1]),
    sample(aten.view.default, F(1), []),
    sample(aten.view.default, F(2, 3, 4, 5), [2, 12, 5]),
    sample(aten.view.default, I(3, 4), [1, 3, 2, 2]),
    sample(aten.permute.default, F(2, 3, 5), [2, 0, 1]),
    sample(aten.permute.default, B(4, 3), [1, 0]),
    sample(aten.expand.default, F(5, 1, 3), [5, 4, 3]),
    sample(aten.expand.default, F(3), [5, 3]),
    sample(aten.expand.default, F(), [5, 2]),
    sample(aten.expand.default, F(5, 1), [-1, 3]),
]

STRETCHES = [
    sample(aten.slice.Tensor, F(5, 6), 1, 1, 4),
    sample(aten.slice.Tensor, F(5, 6), -2, 0, 5, 2),
    sample(aten.slice_scatter.default, F(5, 6), F(5, 2), 1, 2, 4),
    sample(aten.slice_scatter.default, F(5, 6), F(2, 6), 0, 1, 3),
    sample(aten.slice_scatter.default, F(5, 6), F(5, 6)),
    sample(aten.cat.default, [F(5, 2), F(5, 3)], 1),
    sample(aten.cat.default, [F(2, 5), F(3, 5), F(1, 5)]),
    sample(aten.cat.default, [F(3, 5), F(3, 5)], -1),
    sample(aten.unfold.default, F(5, 6, 3), 1, 3, 2),
    sample(aten.unfold.default, F(5, 6), -1, 2, 1),
    sample(aten.diagonal.default, F(5, 4)),
    sample(aten.diagonal.default, F(5, 4, 3), 1, -2, -1),
    sample(aten.diagonal.default, F(5, 4, 3), 0, 0, 2),
    sample(aten.diagonal_copy.default, F(4, 5)),
    sample(aten.diagonal_scatter.default, F(5, 4), F(4)),
    sample(aten.diagonal_scatter.default, F(5, 4, 3), F(5, 2), 1, -2, -1),
    sample(aten.view_as_complex.default, F(5, 3, 2)),
    sample(aten.view_as_real.default, F(5, 3, dtype=torch.complex64)),
    sample(aten.view.dtype, F(5, 3), torch.int32),
    sample(aten.view.dtype, F(5, 4), torch.float64),
    sample(aten.masked_scatter.default, F(5, 3), B(5, 3), F(15)),
    sample(aten.histc.default, R(12), 4, -2, 2),
    sample(aten.constant_pad_nd.default, F(5, 3), [1, 2], 0),
    sample(aten.constant_pad_nd.default, F(5, 3), [0, 0, 1, 2], 7.0),
    sample(aten.constant_pad_nd.default, F(5, 3), [1, -1]),
    sample(aten.flip.default, F(5, 3), [-1]),
    sample(aten.roll.default, F(5, 3), [2], [0]),
    sample(aten.roll.default, F(5, 3), [4]),
    sample(aten.repeat.default, F(5, 3), [2, 1, 3]),
    sample(aten.repeat.default, F(5), [1]),
    sample(aten.tril.default, F(5, 4, 4)),
    sample(aten.triu.default, F(3, 4, 2), 1),
]

REDUCTIONS = [
    sample(aten.sum.dim_IntList, F(5, 3, 4), [1]),
    sample(aten.sum.dim_IntList, F(5, 3, 4), [-1, 0], True),
    sample(aten.sum.dim_IntList, F(5, 3), []),
    sample(aten.sum.dim_IntList, F(), []),
    sample(aten.sum.dim_IntList, B(5, 3), [0], dtype=torch.int64),
    sample(aten.amax.default, R(5, 4), [1]),
    sample(aten.amax.default, R(2, 5), [-2], True),
    sample(aten.amax.default, R(5, 2)),
    sample(aten.amax.default, I(2, 5), [0]),
    sample(aten.amin.default, R(2, 5), [0, 1]),
    sample(aten.amin.default, I(5, 2), [1], True),
    sample(aten.any.default, B(5, 3)),
    sample(aten.any.dim, B(5, 3), -1),
    sample(aten.any.dims, B(5, 3, 2), [0, 2], True),
    sample(aten.all.default, B(5, 3)),
    sample(aten.all.dim, B(5, 3), 0, True),
    sample(aten.all.dims, B(5, 3, 2), [1]),
    sample(aten.argmax.default, R(5, 3)),
    sample(aten.argmax.default, R(5, 3), -1),
    sample(aten.argmax.default, R(5, 3), 0, True),
    sample(aten.argmax.default, R(), 0),
    sample(aten.argmin.default, R(5, 3), 1),
    sample(aten.max.dim, R(5, 3), 1),
    sample(aten.max.dim, R(5, 3), 0, True),
    sample(aten.min.dim, R(5, 3), -1),
    sample(aten.max.default, R(5, 3)),
    sample(aten.min.default, R(5, 3)),
    sample(aten.prod.default, F(5, 3)),
    sample(aten.prod.dim_int, F(5, 3), 1),
    sample(aten.median.dim, R(5, 3), 0),
    sample(aten.median.default, R(5, 3)),
    sample(aten.mode.default, I(5, 4)),
    sample(aten.mode.default, I(5, 4), 0, True),
    sample(aten.kthvalue.default, R(5, 4), 2),
    sample(aten.kthvalue.default, R(5, 4), 2, 0, True),
    sample(aten.count_nonzero.default, I(5, 4, high=2)),
    sample(aten.count_nonzero.default, I(5, 4, high=2), 1),
    sample(aten.count_nonzero.dim_IntList, I(5, 4, high=2), [0]),
]


def _apart(*shape: int, high: int) -> torch.Tensor:
    """Different indices along dim 1, so that a scatter writes every place at most once."""
    return torch.stack([torch.arange(shape[1]) * 7 % high] * shape[0])


INDEXING = [
    sample(aten.embedding.default, F(5, 3), I(2, 4, high=5)),
    sample(aten.embedding.default, F(2, 5), I(5, high=2), 1),
    sample(aten.embedding.default, F(7, 2), I(high=7)),
    sample(aten.embedding_dense_backward.default, F(2, 4, 3), I(2, 4, high=5), 5, -1, False),
    sample(aten.embedding_dense_backward.default, F(5, 2), I(5, high=3), 3, 1, False),
    sample(aten.embedding_dense_backward.default, F(5, 2), I(5, high=3), 3, -1, True, exact=False),
    sample(aten.gather.default, F(5, 6), 1, I(5, 3, high=6)),
    sample(aten.gather.default, F(5, 6), -2, I(2, 6, high=5)),
    sample(aten.gather.default, F(5, 6), 1, I(3, 2, high=6)),
    sample(aten.gather.default, I(5, 2), 0, I(4, 2, high=5)),
    sample(aten.index_select.default, F(5, 4), 0, I(3, high=5)),
    sample(aten.index_select.default, F(5, 4), -1, I(5, high=4)),
    sample(aten.scatter.value, F(5, 6), 1, I(5, 1, high=6), 7.0),
    sample(aten.scatter.value, F(5, 6), 1, I(3, 1, high=6), 7.0),
    made(aten.scatter.src, lambda g: (F(5, 6).make(g), 1, _apart(5, 3, high=6), F(5, 3).make(g)), exact=True),
    made(aten.scatter.src, lambda g: (F(5, 6).make(g), 1, _apart(5, 3, high=6), F(7, 4).make(g)), exact=True),
    sample(aten.scatter_add.default, F(5, 6), 1, I(5, 4, high=6), F(5, 4)),
    sample(aten.scatter_add.default, F(5, 6), 0, I(3, 6, high=5), F(3, 6)),
    sample(aten.scatter_add.default, F(5, 6), 1, I(5, 4, high=6), F(6, 4)),
    sample(aten.scatter_add.default, F(), 0, I(high=1), F()),
    sample(aten.scatter.value_reduce, F(5, 6), 0, I(3, 6, high=5), 2.0, reduce="multiply"),
    sample(aten.scatter_reduce.two, F(5, 6), 1, I(5, 4, high=6), F(5, 4), "amax"),
    sample(aten.scatter_reduce.two, F(5, 6), 1, I(3, 4, high=6), F(4, 4), "mean", include_self=False, exact=False),
    sample(aten.index.Tensor, F(5, 4, 3), [I(6, high=5)]),
    sample(aten.index.Tensor, F(5, 4, 3), [None, I(2, 3, high=4)]),
    sample(aten.index.Tensor, F(5, 4, 3), [I(3, 1, high=5), I(2, high=4)]),
    sample(aten.index.Tensor, F(5, 4, 3), [I(2, high=5), None, I(2, high=3)]),
    sample(aten.index.Tensor, F(5, 4, 3, 2), [None, I(2, high=4), I(2, high=3)]),
    sample(aten._unsafe_index.Tensor, F(2, 5, 4, 3), [None, None, I(6, 1, high=4), I(5, high=3)]),
    sample(aten.index_put.default, F(5, 4), [I(3, high=5)], F(3, 4), True),
    sample(aten.index_put.default, F(5, 4), [None, I(3, high=4)], F(5, 3), True),
    sample(aten.index_put.default, F(5, 4), [I(3, high=5)], F()),
    sample(aten.index_put.default, F(5, 4, 3), [I(2, high=5), None, I(2, high=3)], F(2, 4), True),
    sample(aten._unsafe_index_put.default, F(5, 4), [I(3, high=5)], F(4), True),
]

FACTORIES = [
    sample(aten.full.default, [5, 3], 7, dtype=torch.float32),
    sample(aten.full.default, [], 2.5, dtype=torch.float32),
    sample(aten.arange.start_step, 0, 5, 1, dtype=torch.int64),
    sample(aten.arange.start_step, 3, 17, 3, dtype=torch.int64),
    sample(aten.arange.start_step, 5, 0, -1, dtype=torch.int64),
    sample(aten.arange.start_step, 0.0, 2.5, 0.5, dtype=torch.float32),
    sample(ours.uniform.default, I(high=9), 3, 4, [5, 6], [0, 0], [5, 6]),
    sample(ours.uniform.default, I(high=9), 3, 4, [3, 2, 5], [0, 0, 0], [3, 2, 5]),
    sample(ours.uniform.default, I(high=9), 3, 4, [], [], []),
]

SHAPE = [*VIEWS, *STRETCHES, *REDUCTIONS, *INDEXING, *FACTORIES]
