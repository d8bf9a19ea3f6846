"""Models with complex parameters, as spectral layers have them: trained as by eager PyTorch, on every mesh."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import Job
from tests.training import assert_equals_eager, assert_tensors, assert_trained_alike, batches, mse, train_eagerly
from torch import Tensor, nn

import meshweave as mw

DATA = batches(3, (4, 2, 16), (4, 1, 16))


class Spectral(nn.Module):
    """A product with each of the lowest frequencies of its own."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(channels, channels, modes, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        modes = self.weight.shape[-1]
        low = torch.einsum("bim,iom->bom", torch.fft.rfft(x)[..., :modes], self.weight)
        return torch.fft.irfft(low, n=x.shape[-1])


class Operator(nn.Module):
    """A small Fourier neural operator (Li et al., arXiv 2010.08895)."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv1d(2, 6, 1), nn.Conv1d(6, 1, 1)
        self.spectral = nn.ModuleList(Spectral(6, 5) for _ in range(2))
        self.local = nn.ModuleList(nn.Conv1d(6, 6, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = nn.functional.gelu(spectral(x) + local(x))
        return self.project(x)


def operator() -> nn.Module:
    torch.manual_seed(0)
    return Operator()


def make(name: str, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: getattr(torch.optim, name)(params, lr=0.01, **options)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("AdamW", {"amsgrad": True}),
        ("AdamW", {"foreach": False}),
        ("Adagrad", {"initial_accumulator_value": 0.1}),  # its state begins with a complex number
        ("Rprop", {}),  # likewise
    ],
)
def test_optimizers(name: str, options: dict[str, Any]) -> None:
    assert_equals_eager(operator(), DATA, "fsdp=2", make=make(name, **options))


@pytest.mark.slow_rows("fsdp=4-options2")
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=2", {"accumulate": 2}),
        ("dp=2,tp=2", {}),
        ("fsdp=4", {"passes": "default", "profile": "h100"}),
        ("dp=2", {"run": mw.RunOptions(backend="inductor")}),
    ],
)
def test_meshes(mesh: str, options: dict[str, Any]) -> None:
    assert_equals_eager(operator(), DATA, mesh, make=make("AdamW"), **options)


def test_the_norm_of_gradients_is_that_of_magnitudes() -> None:
    eager, expected = train_eagerly(operator(), DATA, make=make("SGD"), after_backward=clip)
    model = operator()
    options: dict[str, Any] = {"loss": mse, "example": DATA[0], "optimizer": make("SGD")(model.parameters())}
    step = mw.compile(model, mesh="fsdp=2", clip_grad_norm=0.01, **options)
    assert_trained_alike(step, [step(batch).item() for batch in DATA], eager, expected)


class Phases(nn.Module):
    """Products with Python's complex numbers, whose conjugates are in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.phase = nn.Linear(16, 16), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.exp(1j * self.linear(x)) * torch.exp(-0.5j * self.phase) + (2 + 1j) * x
        return (turned.real - (turned * 3j).imag).mean(1, keepdim=True)


def test_products_with_complex_numbers() -> None:
    assert_equals_eager(Phases(), DATA, "fsdp=2", make=make("AdamW"))


def job(pipe: Connection, mesh: str, path: str) -> dict[str, Any]:
    eager, _ = train_eagerly(operator(), DATA, make=make("Adagrad"), after_backward=clip)

    def step() -> mw.TrainStep:
        model = operator()
        options: dict[str, Any] = {"loss": mse, "example": DATA[0], "optimizer": make("Adagrad")(model.parameters())}
        return mw.compile(
            model, mesh=mesh, batch="global", clip_grad_norm=0.01, profile="h100", passes="exact", **options
        )

    first = step()
    for batch in DATA:
        first(batch)
    assert_tensors(first.parameters(), {n: p.detach() for n, p in eager.named_parameters()})
    first.save(path)
    resumed = step()
    resumed.load(path)
    return {
        "losses": [first(DATA[0]).item(), resumed(DATA[0]).item()],
        "dtype": str(first.parameters()["spectral.0.weight"].dtype),
    }


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2"])
def test_processes_and_checkpoints(mesh: str, start: Callable[..., Job], tmp_path: Path) -> None:
    for outcome in start("tests.test_complex:job", 2, mesh, str(tmp_path / "saved")).finish(120):
        assert "losses" in outcome, outcome
        assert outcome["losses"][0] == outcome["losses"][1]
        assert outcome["dtype"] == "torch.complex64"
