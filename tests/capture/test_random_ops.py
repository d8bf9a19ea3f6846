"""Random ops of PyTorch: the right distribution, the same on every mesh, other numbers in each call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.capture.trace import GlobalRandom
from meshweave.errors import CaptureError

N = 20_000
# What is drawn for ones of N x 2, and the mean and standard deviation that it has.
CASES: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "randint": (lambda x: torch.randint(3, 8, x.shape), 5.0, 2**0.5),
    "randint to": (lambda x: torch.randint(5, x.shape), 2.0, 2**0.5),
    "randint_like": (lambda x: torch.randint_like(x, 5), 2.0, 2**0.5),
    "randint_like from": (lambda x: torch.randint_like(x, 3, 8), 5.0, 2**0.5),
    "normal": (lambda x: torch.normal(2.0, 3.0, x.shape), 2.0, 3.0),
    "normal of means": (lambda x: torch.normal(2 * x, 3.0), 2.0, 3.0),
    "normal of deviations": (lambda x: torch.normal(2.0, 3 * x), 2.0, 3.0),
    "normal of both": (lambda x: torch.normal(2 * x, 3 * x[0]), 2.0, 3.0),
    "rrelu": (lambda x: F.rrelu(-x, 0.1, 0.5, training=True), -0.3, 0.4 / 12**0.5),
    "dropout": (lambda x: F.dropout(x, 0.2), 1.0, 0.5),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_draw_has_its_distribution_and_the_next_is_another(name: str) -> None:
    draw, mean, deviation = CASES[name]
    x = torch.ones(N, 2)
    with GlobalRandom(torch.tensor(1), 0):
        first, second = draw(x).double(), draw(x).double()
    with GlobalRandom(torch.tensor(1), 0):
        assert torch.equal(draw(x).double(), first)
    assert not torch.equal(first, second)
    assert first.mean().item() == pytest.approx(mean, abs=5 * deviation / (2 * N) ** 0.5)
    assert first.std().item() == pytest.approx(deviation, rel=0.03)


def test_a_range_of_integers_too_wide_is_an_error() -> None:
    with GlobalRandom(torch.tensor(1), 0), pytest.raises(CaptureError, match="so wide a range"):
        torch.randint(1 << 30, (4,))


class Noisy(nn.Module):
    """A step of a diffusion model: a time and noise are drawn in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.times, self.net = nn.Embedding(10, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(0, 10, (x.shape[0],))
        noise = torch.normal(torch.zeros_like(x), 1.0)
        return F.dropout(F.rrelu(self.net(x + noise + self.times(t)), training=True), 0.1)


def test_every_mesh_draws_the_same() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 4)}
    losses = []
    for mesh in ("", "dp=4", "tp=2"):
        torch.manual_seed(1)
        model = Noisy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile(model, loss=lambda out, b: out.square().mean(), example=batch, optimizer=optimizer, mesh=mesh)
        losses.append([float(step(batch)) for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)
