"""Positions that the step computes, rows that a mask selects, and diagonals: the same as in eager PyTorch."""

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


CASES = [_history, _no_diagonal, _diagonals]


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


def _labels(y: Tensor) -> Tensor:
    """Classes by row, -100 where there is none."""
    return torch.where(y[:, 0] > 0, (y[:, 1] > 0).long() + 1, -100)


def _head_of_rows(m: Any, out: Tensor, y: Tensor) -> Tensor:
    chosen = y[:, 0] > 0
    hidden = m.linear(F.layer_norm(out[chosen], (4,)).tanh())
    return F.cross_entropy(hidden / 2, _labels(y)[chosen], label_smoothing=0.1) + hidden.softmax(-1)[:, 1].sum()


def _written_rows(m: Any, out: Tensor, y: Tensor) -> Tensor:
    chosen, out = y > 0, out.clone()
    out[chosen] = 2 * out[chosen].exp()
    out[y[:, 0] < 0, 1:] = y[0, 1:]
    out[y[:, 1] < 0] += 1
    out[y[:, 2] < 0] = 0.5
    return out.pow(2).mean()


def _positions(m: Any, out: Tensor, y: Tensor) -> Tensor:
    (at,) = torch.where(y[:, 0] > 0)
    found = (y[:, 0] > 0).nonzero().squeeze(1)
    i, j = (y > 0).nonzero(as_tuple=True)
    return F.mse_loss(out[at], y[at]) + out[found].abs().sum() + (out[i][:, 1] * j).mean()


BY_MASK: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "mean": lambda m, out, y: out[y[:, 0] > 0].mean(),
    "sum of elements": lambda m, out, y: out[y > 0].sum() + out.masked_select(y < 0).exp().mean(),
    "log of rows": lambda m, out, y: (out.abs()[y[:, 0] > 0] * m.linear.weight[0].abs()).log().mean(),
    "mse": lambda m, out, y: F.mse_loss(out[y[:, 0] > 0], y[y[:, 0] > 0]),
    "by hand": lambda m, out, y: (out[y[:, 0] > 0] - y[y[:, 0] > 0]).pow(2).sum(-1).mean(),
    "least of two": lambda m, out, y: (
        torch.min(out[y[:, 0] > 0], y[y[:, 0] > 0]).sum() + out[y[:, 0] > 0].max(y[y[:, 0] > 0]).mean()
    ),
    "cross entropy": lambda m, out, y: F.cross_entropy(out[_labels(y) != -100], _labels(y)[_labels(y) != -100]),
    "sum of cross entropies": lambda m, out, y: nn.CrossEntropyLoss(reduction="sum")(
        out[y[:, 0] > 0, :], y[y[:, 0] > 0].softmax(-1)
    ),
    "divergence": lambda m, out, y: F.kl_div(
        out[y[:, 0] > 0].log_softmax(1), y[y[:, 0] > 0].softmax(1), reduction="batchmean"
    ),
    "means of columns": lambda m, out, y: (1 - out[y[:, 0] > 0, 1:].float().mean(0)).square().sum(),
    "constants": lambda m, out, y: (torch.arange(8.0)[y[:, 0] > 0] * out[y[:, 0] > 0].amax(1)).sum(),
    "head": _head_of_rows,
    "writes": _written_rows,
    "positions": _positions,
}


class Chooses(nn.Module):
    """Its output is the loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.how = nn.Linear(4, 4), BY_MASK[name]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.how(self, self.linear(x), y)


def _as_it_is(out: Tensor, batch: Any) -> Tensor:
    return out


@pytest.mark.parametrize("mesh", ["", "fsdp=2,tp=2"])
@pytest.mark.parametrize("name", BY_MASK)
def test_rows_that_a_mask_selects(name: str, mesh: str) -> None:
    assert_equals_eager(Chooses(name), DATA, mesh, loss=_as_it_is)


def test_a_mask_that_selects_nothing() -> None:
    batch, run = {"x": torch.ones(8, 4), "y": -torch.ones(8, 4)}, mw.RunOptions(keep_gradients=True, check_finite=False)
    for name, is_nan in (("mean", True), ("cross entropy", True), ("constants", False)):
        step = mw.compile(Chooses(name), loss=_as_it_is, example=batch, mesh="dp=2", run=run)
        assert torch.isnan(step(batch)) if is_nan else step(batch) == 0
        assert is_nan or not step.gradients()["linear.weight"].any()


@pytest.mark.parametrize(
    "use",
    [
        lambda out, y: out[y > 0].median(),
        lambda out, y: out[y[:, 0] > 0].sum() / len(y[y[:, 0] > 0]),
        lambda out, y: out[y[:, 0] > 0].sum() / y[y[:, 0] > 0].shape[0],
        lambda out, y: out[y[:, 0] > 0].view(-1).sum(),
        lambda out, y: torch.cat([out[y[:, 0] > 0], y]).sum(),
        lambda out, y: (out[y[:, 0] > 0] - out[y[:, 0] < 0]).sum(),
        lambda out, y: (out[y[:, 0] > 0] - y.add_(1)[y[:, 0] > 0]).sum(),
        lambda out, y: (out[torch.rand(8) > 0.5] - y[torch.rand(8) > 0.5]).sum(),
        lambda out, y: (out[y[:, 0] > 0] * out[:, :1]).sum(),
        lambda out, y: (out[y[:, 0] > 0] @ out[y[:, 0] > 0].t()).sum(),
        lambda out, y: out[y[:, 0] > 0].softmax(0).sum(),
        lambda out, y: F.mse_loss(out[y[:, 0] > 0], y[:3]),
        lambda out, y: out[:, y[0] > 0].sum(),
        lambda out, y: out.clone().add_(1).index_put_((y[:, 0] > 0,), out[:3]).sum(),
    ],
)
def test_what_needs_the_number_of_selected_rows_is_an_error_at_its_line(
    use: Callable[[Tensor, Tensor], Tensor],
) -> None:
    with pytest.raises(CaptureError, match="shape of a result depends on data") as error:
        mw.compile(Model(lambda m, y: y), loss=lambda out, batch: use(out, batch["y"]), example=DATA[0], mesh="")
    assert f"test_indexing.py:{use.__code__.co_firstlineno}" in error.value.where
    assert "mask.sum()" in error.value.hint
