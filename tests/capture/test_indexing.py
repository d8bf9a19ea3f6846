"""Positions that the step computes, as ring buffers have them, and diagonals: the same as in eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training import assert_equals_eager, batches
from torch import Tensor, nn

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
    m.history[m.t % 3] = y.detach().mean()
    return y + m.history.sum()


def _rows_and_columns(m: Any, y: Tensor) -> Tensor:
    at = m.t % 4
    m.queue[at] = y[0].detach()
    m.queue[:, at] = 0.25
    m.queue[..., -1 - at] = y[1].detach()
    m.queue[at, 1:3] = y[2, :2].detach()
    m.queue[None, at] = y[:1].detach().double()  # cast to the buffer's dtype
    m.queue[at, (at + 1) % 4] = y.detach().sum()
    m.queue[0, at] = 2
    m.queue[at] = y[None, :1].detach() + m.queue.mean()
    return y + m.queue.mean(0)


def _with_gradients(m: Any, y: Tensor) -> Tensor:
    out = y.clone()
    out[m.t % 4] = 2 * y[0]
    out[:, m.t % 4] = 3 * y[:, 1]
    return out


def _moved_on(m: Any, y: Tensor) -> Tensor:
    """The position is that of the write, though it moves in place before backward."""
    out = y.new_zeros(4, *y.shape)
    at = (m.t % 4).to(torch.int16)
    out[at] = 2 * y
    at.add_(1)
    return y + 0.1 * out.tanh().sum(0)


def _no_diagonal(m: Any, y: Tensor) -> Tensor:
    covariance = y.t() @ y / len(y)
    covariance.fill_diagonal_(0)
    return y * (1 + covariance.square().sum())


def _diagonals(m: Any, y: Tensor) -> Tensor:
    tall = torch.cat([y, y.flip(0)])
    wide = tall.t().clone().fill_diagonal_(0.5)
    cube = y[:4, :, None] * y[:4, None, :]
    cube.fill_diagonal_(2.0)
    again = tall.clone().fill_diagonal_(0.1, wrap=True)
    return tall.fill_diagonal_(0.3)[:8] * again[8:] + wide.mean() + cube.mean()


CASES = [_history, _rows_and_columns, _with_gradients, _moved_on, _no_diagonal, _diagonals]


@pytest.mark.parametrize("mesh", ["", "dp=2", "fsdp=2,tp=2"])
@pytest.mark.parametrize("how", CASES)
def test_equals_eager(how: Callable[[Any, Tensor], Tensor], mesh: str) -> None:
    assert_equals_eager(Model(how), DATA, mesh)


def test_a_view_at_a_computed_position_is_an_error() -> None:
    """In eager PyTorch it shares its memory with the whole, which no op of a graph does."""

    def added(m: Any, y: Tensor) -> Tensor:
        m.history[m.t % 3] += 1
        return y

    for how in (added, lambda m, y: y + m.queue[m.t % 4]):
        with pytest.raises(CaptureError, match=r"at a position that the step computes(.|\n)*index_select"):
            assert_equals_eager(Model(how), DATA)


def test_a_diagonal_that_wraps_around_in_a_view_is_an_error() -> None:
    """torch writes it outside of the view."""

    def wrapped(m: Any, y: Tensor) -> Tensor:
        y = torch.cat([y, y.flip(0)])
        y[:, :2].fill_diagonal_(3.0, wrap=True)
        return y[:8]

    with pytest.raises(CaptureError, match="cannot be expressed by new tensors"):
        assert_equals_eager(Model(wrapped), DATA)


def test_a_position_outside_is_an_error() -> None:
    def beyond(m: Any, y: Tensor) -> Tensor:
        m.history[m.t + 2] = 1.0
        return y

    with pytest.raises(Exception, match=r"index 3 is out of bounds"):
        assert_equals_eager(Model(beyond), DATA)
