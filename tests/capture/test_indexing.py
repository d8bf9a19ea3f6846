"""Positions that the step computes, writes by masks, and diagonals: the same as in eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training import assert_equals_eager, batches
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.errors import CaptureError

DATA = batches(5, (8, 4), (8, 4))


class Model(nn.Module):
    """`how` makes the outputs of the model's values, and may write into its buffers at position `self.t`."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.how = nn.Linear(4, 4), how
        self.register_buffer("t", torch.zeros((), dtype=torch.int64))
        self.register_buffer("history", torch.zeros(3))
        self.register_buffer("queue", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.how(self, self.linear(x))
        self.t += 1
        return y


def _history(m: Any, y: Tensor) -> Tensor:
    m.history.index_copy_(0, (m.t % 3).view(1), y.detach().mean().view(1))
    out = y.index_copy(1, (m.t % 4).view(1), 3 * y[:, 1:2])
    return out + m.history.sum()


def _no_diagonal(m: Any, y: Tensor) -> Tensor:
    covariance = y.t() @ y / len(y)
    covariance.fill_diagonal_(0)
    return y * (1 + covariance.square().sum())


def _diagonals(m: Any, y: Tensor) -> Tensor:
    tall = torch.cat([y, y.flip(0)])
    wide = tall.t().clone().fill_diagonal_(0.5, wrap=True)
    return tall.fill_diagonal_(0.3)[:8] + wide.mean()


def _written_rows(m: Any, y: Tensor) -> Tensor:
    out, row = y.clone(), m.linear.bias
    out[y > 0.5] = 2.0
    out[y[:, 1] < 0] = row
    out[y[:, 2] < 0] = row[:1]
    out[y[:, 0] < 0, 1:] = 0.25
    return out


CASES = [_history, _no_diagonal, _diagonals, _written_rows]


@pytest.mark.parametrize("mesh", ["", "dp=2", "fsdp=2,tp=2"])
@pytest.mark.parametrize("how", CASES)
def test_equals_eager(how: Callable[[Any, Tensor], Tensor], mesh: str) -> None:
    assert_equals_eager(Model(how), DATA, mesh)


def test_a_view_at_a_computed_position_is_an_error() -> None:
    """In eager PyTorch it shares its memory with the whole, which no op of a graph does."""

    def added(m: Any, y: Tensor) -> Tensor:
        m.history[m.t % 3] += 1
        return y

    def written(m: Any, y: Tensor) -> Tensor:
        m.queue[m.t % 4, 1:] = y[0, 1:]
        return y

    for how in (added, written, lambda m, y: y + m.queue[m.t % 4]):
        with pytest.raises(CaptureError, match=r"at a position that the step computes(.|\n)*index_copy_"):
            assert_equals_eager(Model(how), DATA)


def test_a_diagonal_that_wraps_around_in_a_view_is_an_error() -> None:
    """torch writes it outside of the view."""

    def wrapped(m: Any, y: Tensor) -> Tensor:
        y = torch.cat([y, y.flip(0)])
        y[:, :2].fill_diagonal_(3.0, wrap=True)
        return y[:8]

    with pytest.raises(CaptureError, match="cannot be expressed by new tensors"):
        assert_equals_eager(Model(wrapped), DATA)


@pytest.mark.parametrize(
    "use",
    [
        lambda out, y: F.cross_entropy(out[y[:, 0] > 0], y[y[:, 0] > 0]),
        lambda out, y: out.masked_select(y > 0).sum(),
        lambda out, y: out[(y[:, 0] > 0).nonzero()].sum(),
        lambda out, y: out.clone().__setitem__(y[:, 0] > 0, out[:3]),
    ],
)
def test_rows_that_a_mask_of_data_selects_are_an_error_at_their_line(use: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match="shape of a result depends on data") as error:
        mw.compile(Model(lambda m, y: y), loss=lambda out, batch: use(out, batch["y"]), example=DATA[0], mesh="")
    assert f"test_indexing.py:{use.__code__.co_firstlineno}" in error.value.where
    assert "torch.where(mask, y, -100)" in error.value.hint
