"""Optimizers on meshes: a compiled step against eager PyTorch, from the same parameters on the same batches."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.optimizers import SETTINGS, make
from tests.training import batches, mse
from torch import Tensor, nn

import meshweave as mw
from meshweave.check.runs import Eager, Recipe


class Deep(nn.Module):
    """Six matrices, some tall and some wide, and their biases: each of three groups has both shapes."""

    def __init__(self) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(*s) for s in ((4, 8), (8, 4), (4, 8), (8, 8), (8, 8), (8, 4)))
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=gen) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def trained_apart(
    model: nn.Module,
    build: Callable[[nn.Module], torch.optim.Optimizer],
    mesh: str,
    dtype: torch.dtype,
    num_steps: int = 5,
    before: Callable[[torch.optim.Optimizer, int], None] = lambda optimizer, i: None,
) -> float:
    """Largest relative difference of losses, parameters and state from those of eager PyTorch after each step."""
    data = [{k: v.to(dtype) for k, v in b.items()} for b in batches(num_steps, (8, 4), (8, 4))]
    model = model.to(dtype)
    twin = copy.deepcopy(model)
    ours, theirs = build(model), build(twin)
    step = mw.compile(model, loss=mse, example=data[0], optimizer=ours, mesh=mesh)
    eager, worst = Eager(twin, theirs, Recipe(mse)), 0.0
    for i, batch in enumerate(data):
        for optimizer in (ours, theirs):
            before(optimizer, i)
        worst = max(worst, abs(step(batch) / eager(batch) - 1))
        pairs = [(v, dict(twin.named_parameters())[n]) for n, v in step.parameters().items()]
        state, expected = step.optimizer_state(), eager.optimizer_state()
        assert state.keys() <= expected.keys()
        pairs += [(v, expected[n]) for n, v in state.items()]
        worst = max([worst, *(_difference(a, b) for a, b in pairs)])
    return worst


def _difference(got: Tensor, expected: Tensor) -> float:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    got, expected = got.detach(), expected.detach()
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


CASES = [
    pytest.param(kind, mesh, dtype, bound, marks=() if mesh == "fsdp=2,tp=2" and bound < 1e-6 else pytest.mark.slow)
    for kind in SETTINGS
    for mesh in ("fsdp=2,tp=2", "dp=2", "fsdp=2")
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-6))
]


@pytest.mark.parametrize(("kind", "mesh", "dtype", "bound"), CASES)
def test_five_steps_equal_eager(kind: str, mesh: str, dtype: torch.dtype, bound: float) -> None:
    assert trained_apart(Deep(), lambda model: make(kind, model, 1e-2), mesh, dtype) <= bound
