"""Samples of the rows for functions of matrices, for CTC, and of ops that are never cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.place.conformance import B, F, I, R, made, sample
from torch import Tensor

aten = torch.ops.aten


def _positive(g: torch.Generator, batch: int = 5) -> Tensor:
    """Positive definite matrices [batch, 3, 3]."""
    root = torch.randn(batch, 3, 3, generator=g)
    return root @ root.mT + 3 * torch.eye(3)


def _with(*then: Callable[[Tensor], Any]) -> Callable[[torch.Generator], list[Any]]:
    return lambda g: [f(x) for x in [_positive(g)] for f in then]


def _itself(x: Tensor) -> Tensor:
    return x


def _columns(x: Tensor) -> Tensor:
    return x[:, :, :2].contiguous()


def _factored(g: torch.Generator) -> list[Any]:
    lu, pivots = torch.linalg.lu_factor(_positive(g))
    return [lu, pivots, torch.randn(5, 3, 2, generator=g)]


def _reflectors(g: torch.Generator) -> list[Any]:
    a, tau = torch.geqrf(torch.randn(5, 3, 3, generator=g))
    return [a, tau, torch.randn(5, 3, 3, generator=g)]


def _ctc(g: torch.Generator) -> list[Any]:
    """Of full length each: what lies beyond the length of a sequence is memory as it was."""
    return [torch.randn(6, 3, 5, generator=g).log_softmax(-1), torch.randint(1, 5, (3, 2), generator=g)]


def _ctc_backward(g: torch.Generator, lengths: list[Any]) -> list[Any]:
    x, targets = _ctc(g)
    loss, alpha = aten._ctc_loss(x, targets, *lengths)
    return [torch.ones(3), x, targets, *lengths, loss, alpha, 0]


def _bags(g: torch.Generator) -> list[Any]:
    return [torch.randn(7, 4, generator=g), torch.tensor([0, 3, 6, 2, 2]), torch.tensor([0, 2, 2])]


def _bags_backward(g: torch.Generator) -> list[Any]:
    weight, indices, offsets = _bags(g)
    _, bag_of, sizes, largest = aten._embedding_bag(weight, indices, offsets, False, 2)
    return [torch.randn(3, 4, generator=g), indices, bag_of, sizes, largest, 7, False, 2, None]


def _bag_weights_backward(g: torch.Generator) -> list[Any]:
    weight, indices, offsets = _bags(g)
    bag_of = aten._embedding_bag(weight, indices, offsets, False, 0)[1]
    return [torch.randn(3, 4, generator=g), weight, indices, offsets, bag_of, 0]


def _distances(g: torch.Generator) -> list[Any]:
    x = torch.randn(4, 3, generator=g)
    return [torch.randn(6, generator=g), x, 2.0, aten._pdist_forward(x, 2.0)]


_TENSORS = [torch.tensor([6, 6, 6]), torch.tensor([2, 2, 2])]
WHOLE = [
    made(aten._ctc_loss.default, lambda g: [*_ctc(g), [6, 6, 6], [2, 2, 2]]),
    made(aten._ctc_loss.Tensor, lambda g: [*_ctc(g), *_TENSORS]),
    made(aten._ctc_loss_backward.default, lambda g: _ctc_backward(g, [[6, 6, 6], [2, 2, 2]])),
    made(aten._ctc_loss_backward.Tensor, lambda g: _ctc_backward(g, _TENSORS)),
    made(aten._embedding_bag.default, lambda g: [*_bags(g), False, 2]),
    made(aten._embedding_bag_dense_backward.default, _bags_backward),
    made(aten._embedding_bag_per_sample_weights_backward.default, _bag_weights_backward),
    sample(aten._pdist_forward.default, R(4, 3), 2.0, exact=False),
    made(aten._pdist_backward.default, _distances),
    sample(aten.multi_margin_loss.default, R(4, 3), I(4, high=3), exact=False),
    sample(aten.multi_margin_loss_backward.default, R(), R(4, 3), I(4, high=3), 1, 1.0, exact=False),
    sample(aten.masked_scatter_backward.default, F(4, 3), B(4, 3), [12]),
    sample(aten.index_reduce.default, F(4, 3), 0, I(2, high=4), F(2, 3), "amax"),
]


LINALG = [
    made(torch.ops.meshweave.ctc_loss.default, lambda g: [*_ctc(g), *_TENSORS, 0, False]),
    made(aten.cholesky.default, _with(_itself)),
    made(aten.cholesky_inverse.default, _with(torch.linalg.cholesky)),
    made(aten.cholesky_solve.default, _with(_columns, torch.linalg.cholesky)),
    made(aten.linalg_cholesky_ex.default, _with(_itself)),
    made(aten.linalg_inv_ex.default, _with(_itself)),
    made(aten.linalg_lu_factor_ex.default, _with(_itself)),
    made(aten.linalg_lu_solve.default, _factored),
    made(aten.lu_unpack.default, lambda g: _factored(g)[:2]),
    made(aten.linalg_lu.default, _with(_itself)),
    sample(aten.linalg_matrix_exp.default, F(5, 3, 3), exact=False),
    sample(aten.linalg_qr.default, F(5, 4, 3), exact=False),
    made(aten.linalg_householder_product.default, lambda g: _reflectors(g)[:2]),
    made(aten.ormqr.default, _reflectors),
    made(aten.triangular_solve.default, lambda g: [torch.randn(5, 3, 2, generator=g), _positive(g)]),
    made(aten.linalg_solve_triangular.default, lambda g: [_positive(g), torch.randn(5, 3, 2, generator=g)], upper=True),
    made(
        aten.linalg_solve_triangular.default, lambda g: [_positive(g, 1), torch.randn(5, 3, 2, generator=g)], upper=True
    ),
    made(aten._linalg_solve_ex.default, lambda g: [_positive(g), torch.randn(5, 3, 2, generator=g)]),
    made(aten._linalg_det.default, _with(_itself)),
    made(aten._linalg_slogdet.default, _with(_itself)),
    made(aten._linalg_eigh.default, _with(_itself)),
    made(aten.linalg_eig.default, _with(_itself)),
    made(aten._linalg_svd.default, _with(_itself)),
    made(
        aten.linalg_pinv.atol_rtol_tensor,
        lambda g: [_positive(g)],
        atol=torch.tensor(0.0),
        rtol=torch.tensor(1e-6),
    ),
]
