"""Layers on any devices, trained: every number equals eager PyTorch on one device, ten steps long."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training import Breaks, assert_tensors, assert_trained_alike, batches, mse, sgd, train, train_eagerly
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.errors import StepError
from meshweave.ir.mesh import Mesh
from meshweave.place.plans import Plan

NESTEROV = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
ADAM, ADAMW = partial(torch.optim.Adam, lr=0.01), partial(torch.optim.AdamW, lr=0.01)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(*sizes) for sizes in ((6, 8), (8, 8), (8, 8), (8, 6)))

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.tanh(self.c(F.gelu(self.b(torch.tanh(self.a(x)))))))


def assert_state(step: mw.TrainStep, model: nn.Module, make: Callable[..., torch.optim.Optimizer], data: Any) -> None:
    """The optimizer's own state after the same steps, tensor by tensor."""
    optimizer = make(model.parameters())
    for batch in data:
        optimizer.zero_grad()
        mse(model(batch["x"]), batch).backward()
        optimizer.step()
    names = {p: n for n, p in model.named_parameters()}
    expected = {
        f"{slot}/{names[p]}": value
        for p, held in optimizer.state.items()
        for slot, value in held.items()
        if isinstance(value, Tensor) and value.shape == p.shape
    }
    assert_tensors(step.optimizer_state(), expected)
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_tensors(step.gradients(), gradients)


def alike(
    model: nn.Module, mesh: str | Mesh, plan: Plan | None = None, make: Any = sgd, **options: Any
) -> mw.TrainStep:
    """Ten steps both ways: losses, parameters and buffers agree."""
    data = options.pop("data", None) or batches(10, (4, 6), (4, 6))
    eager, expected = train_eagerly(
        model, data, make=make, after_backward=options.pop("after_backward", lambda m: None)
    )
    step, losses = train(model, data, mesh, make=make, plan=plan, **options)  # type: ignore[arg-type]
    assert_trained_alike(step, losses, eager, expected)
    return step


LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "two devices": ("pp=2", {"[ab]": 0, "[cd]": 1}),
    "three, one of them twice": ("pp=3", {"a": 0, "b": 1, "c": 0, "d": 2}),
    "four in another order": ("pp=4", {"a": 2, "b": 0, "c": 3, "d": 1}),
    "permuted pairs": ("d=4", {"[ab]": Mesh("t=2", devices=[1, 0]), "[cd]": Mesh("t=2", devices=[3, 2])}),
    "overlapping": ("d=3", {"[ab]": [0, 1], "[cd]": [1, 2]}),
    "one to many and back": ("d=4", {"a": 0, "b": [0, 1, 2, 3], "c": [3, 1], "d": 2}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layers_on_any_devices(name: str) -> None:
    mesh, where = LAYOUTS[name]
    step = alike(MLP(), mesh, Plan.on(where))
    assert len(step.program.roles) > 1


STAGES = ["pp=2", "pp=4", "pp=2,dp=2", "pp=2,tp=2", "pp=2,fsdp=2", "dp=2,pp=2"]
OPTIMIZERS = {"sgd": sgd, "nesterov": NESTEROV, "adam": ADAM, "adamw": ADAMW}
# Every mesh and every optimizer is in the quick ones.
QUICK = {*zip(STAGES, ["adamw", "sgd", "adam", "adamw", "nesterov", "sgd"], strict=True)}
BOTH = [
    pytest.param(mesh, name, marks=() if (mesh, name) in QUICK else pytest.mark.slow)
    for mesh in STAGES
    for name in OPTIMIZERS
]


@pytest.mark.slow_rows("pp=2,tp=2-adamw")
@pytest.mark.parametrize(("mesh", "name"), BOTH)
def test_stages_alone_and_with_other_axes(mesh: str, name: str) -> None:
    make: Any = OPTIMIZERS[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Linear(8, 6))
    data = [{"input": b["x"], **b} for b in batches(10, (4, 6), (4, 6))]
    step = alike(model, mesh, make=make, data=data, run=mw.RunOptions(keep_gradients=True))
    assert_state(step, model, make, data)
    assert len(step.program.roles) == Mesh(mesh).size("pp")


def test_tied_weights_and_fan_out_across_stages_add_their_gradients_once() -> None:
    class Tied(MLP):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.a(x))
            deep = self.c(F.gelu(self.b(hidden))) + hidden * 0.5
            return self.d(F.linear(deep, self.b.weight) + deep)

    step = alike(Tied(), "pp=3", Plan.on({"a": 0, "b": 1, "c": 2, "d": 2}), ADAMW)
    assert step.num_steps == 10


def test_frozen_layers_integer_inputs_and_buffers_on_a_stage() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.norm, self.head = nn.Embedding(11, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
            self.frozen = nn.Linear(6, 6).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(torch.tanh(self.frozen(self.embed(x)))))

    made = torch.Generator().manual_seed(3)
    data = [
        {"x": torch.randint(0, 11, (4,), generator=made), "y": torch.randn(4, 6, generator=made)} for _ in range(10)
    ]
    plan = Plan.on({"embed": "pp=0", "frozen": "pp=0", "norm": "pp=1", "head": "pp=1"}) + Plan.dp("dp")
    step = alike(Mixed(), "pp=2,dp=2", plan, data=data)
    assert {n: list(a.mesh.devices) for i, a in step.session.state.items if (n := i.name).startswith("norm.run")} == {
        "norm.running_mean": [2, 3],
        "norm.running_var": [2, 3],
    }


@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_adds_the_norm_up_across_device_sets(accumulate: int) -> None:
    clip = partial(torch.nn.utils.clip_grad_norm_, max_norm=0.1)
    step = alike(
        MLP(),
        "pp=2,dp=2",
        Plan.on({"[ab]": "pp=0", "[cd]": "pp=1"}) + Plan.dp("dp"),
        after_backward=lambda model: clip(model.parameters()),
        clip_grad_norm=0.1,
        accumulate=accumulate,
    )
    assert step.metrics["grad_norm"] > 0.1


def test_dropout_draws_the_same_on_any_devices() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 6))
    data = [{"input": b["x"], **b} for b in batches(4, (4, 6), (4, 6))]
    _, expected = train(model, data)
    for mesh in ("pp=2", "pp=2,dp=2"):
        _, losses = train(model, data, mesh)
        torch.testing.assert_close(losses, expected, rtol=2e-6, atol=1e-6)


def test_operators_in_the_model_place_layers_as_a_plan_does() -> None:
    mesh = Mesh("pp=2,dp=2")

    class Moved(MLP):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.a(mw.on(x, mesh["pp"][0])))
            x = mw.on(F.gelu(self.b(x)), mesh["pp"][1])
            return self.d(torch.tanh(self.c(x)))

    said = alike(Moved(), mesh, Plan.dp("dp"))
    planned = alike(MLP(), mesh, Plan.on({"[ab]": "pp=0", "[cd]": "pp=1"}) + Plan.dp("dp"))
    assert [len(r.transfers) for r in said.program.roles] == [len(r.transfers) for r in planned.program.roles]
    for name, value in said.parameters().items():
        assert torch.equal(value, planned.parameters()[name]), name


def test_a_checkpoint_of_stages_goes_on_anywhere_and_back(tmp_path: Path) -> None:
    data = batches(8, (4, 6), (4, 6))
    stages = Plan.on({"[ab]": "pp=0", "[cd]": "pp=1"}) + Plan.dp("dp")
    _, expected = train(MLP(), data, make=ADAMW)

    def step(mesh: str, plan: Plan | None) -> mw.TrainStep:
        model = MLP()
        return mw.compile(model, loss=mse, example=data[0], optimizer=ADAMW(model.parameters()), mesh=mesh, plan=plan)

    first, losses = step("pp=2,dp=2", stages), []
    losses += [float(first(b)) for b in data[:3]]
    first.save(str(tmp_path / "stages"))
    for mesh, plan in (("dp=4", None), ("", None), ("pp=2,dp=2", stages)):
        other = step(mesh, plan)
        other.load(str(tmp_path / "stages"))
        torch.testing.assert_close([float(other(b)) for b in data[3:6]], expected[3:6], rtol=2e-6, atol=1e-6)
        other.save(str(tmp_path / f"from {mesh}"))
    back = step("pp=2,dp=2", stages)
    back.load(str(tmp_path / "from dp=4"))
    torch.testing.assert_close([float(back(b)) for b in data[6:]], expected[6:], rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(losses, expected[:3], rtol=2e-6, atol=1e-6)


@pytest.mark.slow_rows("0-backward", "3-backward", "3-loss")
@pytest.mark.parametrize("phase", ["forward", "loss", "backward"])
@pytest.mark.parametrize("index", [0, 3])
def test_a_device_that_fails_in_a_step_leaves_the_state_of_the_last_one(index: int, phase: str) -> None:
    if (index, phase) == (0, "loss"):
        index = 2
    data = batches(4, (4, 6), (4, 6))
    plan = Plan.on({"[ab]": "pp=0", "[cd]": "pp=1"}) + Plan.dp("dp")
    _, expected = train(MLP(), data, make=ADAMW)
    model = MLP()
    step = mw.compile(
        model, loss=mse, example=data[0], optimizer=ADAMW(model.parameters()), mesh="pp=2,dp=2", plan=plan
    )
    losses = [float(step(data[0])), float(step(data[1]))]
    before = {n: p.clone() for n, p in step.parameters().items()}
    step.session.turns.meter = Breaks(index, phase)
    with pytest.raises(StepError, match="the device is on fire") as error:
        step(data[2])
    assert error.value.where == f"device {index}"
    assert all(torch.equal(p, before[n]) for n, p in step.parameters().items())
    assert step.num_steps == 2
    losses += [float(step(data[2])), float(step(data[3]))]
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=1e-6)
