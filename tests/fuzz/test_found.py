"""Programs of the kinds that the fuzzer has found fault with, each as small as it goes; equal to eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fuzz.blocks import Attention, Spatial, UpDown
from tests.training import assert_equals_eager, assert_tensors, batches, train
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.passes import Decompose, Prefetch, Split

Program = tuple[Callable[[], nn.Module], tuple[int, ...], str, dict[str, Any]]
APART, SPLIT = Decompose(when="always"), Split((2,), when="always")


class Tied(nn.Module):
    """Layers between an embedding and a head that share their weight, which reads and writes at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 6) / 3)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.table
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x @ self.table.T


class Token(nn.Module):
    """A token of the model before each sequence: a parameter whose first dims have one element."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.layer = nn.Parameter(torch.randn(1, 1, 6)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) * self.token)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(6, 6, num_layers=2, batch_first=True), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x)[0])


def _normed(dim: int | None) -> nn.Module:
    norm = nn.utils.parametrizations.weight_norm
    return nn.Sequential(
        norm(nn.Linear(6, 6), dim=dim), nn.Tanh(), nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))
    )


def _depthwise() -> nn.Module:
    grouped = nn.Conv2d(6, 6, 3, padding=1, groups=6)
    return nn.Sequential(nn.Conv2d(3, 6, 1), grouped, nn.GELU(), nn.Conv2d(6, 3, 1))


class Transformed(nn.Module):
    """An image turned and shifted as it says itself (a spatial transformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Linear(48, 6)

    def forward(self, x: Tensor) -> Tensor:
        grid = F.affine_grid(self.where(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)


def _residual() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 6), nn.LayerNorm(6))


_SEQUENCE, _IMAGE = (4, 5, 6), (4, 3, 4, 4)
_COLUMNS = mw.Plan.dp("dp") + mw.Plan.tp("tp", {"0": "colwise"})
FOUND: dict[str, Program] = {
    "statistics of a layer norm that are pieces of the sequence": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Flatten(), nn.Linear(40, 5)),
        _SEQUENCE,
        "dp=2,tp=2",
        {"plan": mw.Plan.dp("dp") + mw.Plan({"3.weight": "[{}, {tp}]"})},
    ),
    "the cut of a ring along pieces of several sizes": (
        _residual,
        (3, 6),
        "dp=2,tp=2",
        {"plan": _COLUMNS, "passes": [APART]},
    ),
    "rings with stages, microbatches and uneven pieces": (Tied, _SEQUENCE, "pp=2,fsdp=4", {"passes": [APART]}),
    "chunks of rows beside uneven pieces": (_residual, _SEQUENCE, "tp=4", {"passes": [SPLIT]}),
    "chunks of rows of what another stage sends": (Tied, _SEQUENCE, "pp=2,tp=2", {"passes": [SPLIT]}),
    "costs of channels in groups on their pieces": (
        _depthwise,
        _IMAGE,
        "tp=2",
        {"passes": "overlap", "profile": "h100"},
    ),
    "channels in groups, taken apart": (_depthwise, _IMAGE, "fsdp=2,tp=3", {"passes": [APART, SPLIT]}),
    "a shared weight fetched ahead by stages": (Tied, _SEQUENCE, "pp=2,fsdp=2", {"passes": [Prefetch(1), APART]}),
    "the attention block of a diffusion model": (lambda: Spatial(4, 2), (4, 4, 3, 3), "tp=2", {"passes": "prefetch=1"}),
    "a small U with group norms": (lambda: UpDown(4, 2), (3, 4, 5, 4), "fsdp=2,tp=2", {"passes": [SPLIT]}),
    "a recurrent layer, which oneDNN has as one op": (Recurrent, _SEQUENCE, "fsdp=2,tp=2", {}),
    "a weight by its length and direction": (lambda: _normed(0), _SEQUENCE, "fsdp=2,tp=2", {}),
    "a weight by one length for all of it": (lambda: _normed(None), _SEQUENCE, "dp=2,tp=2", {}),
    "an affine grid": (Transformed, _IMAGE, "dp=2", {}),
    "attention in groups on uneven heads": (
        lambda: Attention(6, 4, 2, 3, "sdpa", "causal"),
        _SEQUENCE,
        "tp=3",
        {"passes": [APART]},
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_the_fuzzer_has_found_stays_mended(name: str) -> None:
    make, shape, mesh, options = FOUND[name]
    torch.manual_seed(0)
    model = make()
    first = "input" if isinstance(model, nn.Sequential) else "x"
    target = model(torch.zeros(shape)).shape
    data = [{first: b["x"], "y": b["y"]} for b in batches(2, shape, target)]
    assert_equals_eager(model, data, mesh, **options)


def _slopes() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(30, 6), nn.PReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("make", [_slopes, Token])
def test_a_dim_of_one_element_is_cast_on_the_device_that_has_it(make: Callable[[], nn.Module]) -> None:
    """A device with an empty piece takes part in every step. Values are those of one device, to bfloat16 rounding."""
    torch.manual_seed(0)
    model = make()
    first = "x" if isinstance(model, Token) else "input"
    data = [{first: b["x"], "y": b["y"]} for b in batches(2, _SEQUENCE, model(torch.zeros(_SEQUENCE)).shape)]
    whole, expected = train(model, data, precision=torch.bfloat16)
    step, losses = train(model, data, "fsdp=2", precision=torch.bfloat16, passes=[APART])
    torch.testing.assert_close(losses, expected, rtol=1e-2, atol=0.0)
    assert_tensors(step.parameters(), whole.parameters(), tolerance=1e-2)
