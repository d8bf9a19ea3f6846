"""Numbers that a loss function returns beside the loss."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.errors import CaptureError


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.penalty: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Remembering(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.penalty = out.square().mean().detach()
        return out


def loss_with_metrics(out: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    hits = (out.argmax(-1) == batch["y"]).float().mean()
    return F.cross_entropy(out, batch["y"]), {"accuracy": hits, "largest": out.max(), "rows": (batch["y"] >= 0).sum()}


def batch_of(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, 4, generator=draw), "y": torch.randint(0, 3, (8,), generator=draw)}


def compiled(mesh: str, model: nn.Module, loss: Any = loss_with_metrics, **options: Any) -> mw.TrainStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"profile": "alpha-beta", **options}
    return mw.compile(model, loss=loss, example=batch_of(0), optimizer=optimizer, mesh=mesh, **options)


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2", "fsdp=2,tp=2", "pp=2"])
def test_metrics_are_those_of_the_global_batch(mesh: str) -> None:
    torch.manual_seed(0)
    model = Classifier()
    step, batch = compiled(mesh, model), batch_of(1)
    with torch.no_grad():
        loss, expected = loss_with_metrics(model(batch["x"]), batch)
    wanted = {"loss": loss.item()} | {name: float(value) for name, value in expected.items()}
    step.evaluate(batch)
    assert step.evaluated == pytest.approx(wanted, rel=1e-5)
    assert step.metrics == {}
    step(batch)
    assert step.metrics == pytest.approx(wanted, rel=1e-5)


def test_metrics_are_those_of_the_whole_batch_and_passes_keep_them(caplog: pytest.LogCaptureFixture) -> None:
    """One that couples rows is the mean over microbatches, and named."""
    torch.manual_seed(0)
    model, batch = Classifier(), batch_of(1)
    with caplog.at_level(logging.WARNING, "meshweave"):
        step = compiled("dp=2", model, accumulate=2, clip_grad_norm=1.0, passes="overlap", profile="h100")
    assert "a metric is the mean over microbatches" in caplog.text
    with torch.no_grad():
        _, whole = loss_with_metrics(model(batch["x"]), batch)
        largest = [float(model(x).max()) for x in batch["x"].chunk(2)]
    step(batch)
    assert set(step.metrics) == {"loss", "grad_norm", "accuracy", "largest", "rows"}
    for name in ("accuracy", "rows"):
        assert step.metrics[name] == pytest.approx(float(whole[name]), rel=1e-5)
    assert step.metrics["largest"] == pytest.approx(sum(largest) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        (lambda out: {"loss": out.mean()}, "a name that is taken"),
        (lambda out: {"logits": out}, r"of shape \(8, 3\)"),
        (lambda out: {"rows": 8}, "int"),
    ],
)
def test_what_is_no_number_of_the_step_is_an_error(metrics: Any, text: str) -> None:
    with pytest.raises(CaptureError, match=text):
        compiled("dp=2", Classifier(), lambda out, batch: (F.cross_entropy(out, batch["y"]), metrics(out)))


def test_an_attribute_that_forward_sets_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "meshweave"):
        model = Remembering()
        compiled("dp=2", model)
        compiled("dp=2", Classifier())
    (text,) = [record.getMessage() for record in caplog.records]
    assert "forward assigns a value of the step to model.penalty" in text
    assert "step.metrics['name']" in text
    assert model.penalty is None
