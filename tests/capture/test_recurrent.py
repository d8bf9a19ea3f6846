"""Recurrent layers are an op for each layer and direction, and train as in eager PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.training import assert_trained_alike, train_eagerly
from torch import Tensor, nn

import meshweave as mw
from meshweave.capture.step import CaptureOptions, capture
from meshweave.ir import recurrent as _ops  # noqa: F401

BATCH, FEATURES, SIZE = 6, 5, 8


class Tagger(nn.Module):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(FEATURES, SIZE, batch_first=True, **options)
        width = options.get("proj_size", SIZE) * (1 + options.get("bidirectional", False))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, last = self.layer(x)
        ends = sum(state.mean() for state in (last if isinstance(last, tuple) else (last,)))
        return self.head(out) + ends


def squares(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return out.square().mean()


def batches(length: int, count: int = 3) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(BATCH, length, FEATURES, generator=draw)} for _ in range(count)]


def model(kind: str, **options: Any) -> Tagger:
    torch.manual_seed(0)
    return Tagger(kind, **options)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("LSTM", {}),
    ("LSTM", {"num_layers": 2, "bidirectional": True}),
    ("LSTM", {"proj_size": 3, "num_layers": 2, "bias": False}),
    ("GRU", {"bidirectional": True}),
    ("GRU", {"num_layers": 2, "bias": False}),
    ("RNN", {}),
    ("RNN", {"nonlinearity": "relu"}),
]


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2", "dp=3,tp=2"])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_networks_train_as_in_eager_pytorch(kind: str, options: dict[str, Any], mesh: str) -> None:
    compiled, data = model(kind, **options), batches(7)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    step = mw.compile(compiled, loss=squares, example=data[0], optimizer=optimizer, mesh=mesh, profile="alpha-beta")
    losses = [float(step(batch)) for batch in data]
    eager, expected = train_eagerly(
        model(kind, **options), data, make=lambda params: torch.optim.SGD(params, lr=0.1), loss=squares
    )
    assert_trained_alike(step, losses, eager, expected)


def test_the_graph_does_not_grow_with_the_length() -> None:
    sizes = []
    for length in (3, 50):
        step = capture(model("LSTM"), squares, batches(length)[0], None, CaptureOptions())
        sizes.append(len(step.graph.nodes))
        targets = [node.target for node in step.graph.nodes]
        assert targets.count(torch.ops.meshweave.recurrent.default) == 1
        assert targets.count(torch.ops.meshweave.recurrent_backward.default) == 1
    assert sizes[0] == sizes[1]


def test_dropout_between_layers_is_that_of_the_step() -> None:
    """The same masks on every mesh, and none in an evaluation."""
    found = []
    for mesh in ("dp=1", "dp=2"):
        net, batch = model("LSTM", num_layers=2, dropout=0.5), batches(4)[0]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        step = mw.compile(net, loss=squares, example=batch, optimizer=optimizer, mesh=mesh, profile="alpha-beta")
        found.append([float(step.evaluate(batch)), float(step(batch))])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0][0] != found[0][1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ops_are_what_torch_says_of_them(dtype: torch.dtype) -> None:
    args = [torch.randn(4, 3, 5, dtype=dtype), torch.randn(3, 8, dtype=dtype), torch.randn(3, 8, dtype=dtype)]
    weights = [torch.randn(*shape, dtype=dtype) for shape in ((32, 5), (32, 8), (32,), (32,))]
    for tensor in (*args, *weights):
        tensor.requires_grad_()
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.meshweave.recurrent, (*args, weights, "lstm", True), test_utils=checks)


def test_under_autocast_the_layer_runs_in_the_smaller_dtype() -> None:
    net, batch = model("GRU"), batches(4)[0]
    with torch.autocast("cpu", torch.bfloat16):
        expected = squares(net(batch["x"]), batch)
    step = mw.compile(
        net, loss=squares, example=batch, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), mesh="dp=2",
        precision=torch.bfloat16, profile="alpha-beta",
    )  # fmt: skip
    assert float(step(batch)) == pytest.approx(float(expected.detach()), rel=2e-2)
