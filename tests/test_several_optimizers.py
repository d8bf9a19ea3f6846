"""Several optimizers over disjoint parameters in one step: Muon for matrices, AdamW for the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import Job
from tests.training import assert_tensors, batches, mse
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import meshweave as mw
from meshweave.errors import PlanError

DATA = batches(6, (8, 4), (8, 4))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(x))))


def optimizers_of(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1), torch.optim.AdamW(rest, lr=0.01)]


def schedules_of(optimizers: list[Optimizer]) -> list[Any]:
    return [lr_scheduler.StepLR(optimizers[0], 2, 0.5), lr_scheduler.OneCycleLR(optimizers[1], 0.1, total_steps=8)]


class Eager:
    """A training step of eager PyTorch with several optimizers and a norm over all gradients."""

    def __init__(self, model: nn.Module, clip: float | None = None) -> None:
        self.model, self.optimizers, self.clip = model, optimizers_of(model), clip

    def __call__(self, batch: dict[str, Tensor]) -> float:
        loss = mse(self.model(batch["x"]), batch)
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()


def pair(mesh: str, clip: float | None = None) -> tuple[mw.TrainStep, list[Optimizer], Eager]:
    torch.manual_seed(0)
    model = Small()
    eager = Eager(copy.deepcopy(model), clip)
    ours = optimizers_of(model)
    options: dict[str, Any] = {"clip_grad_norm": clip, "profile": "alpha-beta"}
    return mw.compile(model, loss=mse, example=DATA[0], optimizer=ours, mesh=mesh, **options), ours, eager


def params_of(eager: Eager) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in eager.model.named_parameters()}


def full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def assert_states(ours: list[Optimizer], theirs: list[Optimizer]) -> None:
    """The state dicts: the same keys, numbers and tensors."""
    for mine, other in zip(ours, theirs, strict=True):
        got, expected = mine.state_dict(), other.state_dict()
        assert got["param_groups"] == expected["param_groups"]
        flat = [{f"{p}.{k}": full(v) for p, its in d["state"].items() for k, v in its.items()} for d in (got, expected)]
        assert_tensors(*({k: torch.as_tensor(v, dtype=torch.float64) for k, v in each.items()} for each in flat))


@pytest.mark.slow_rows("dp=2", "fsdp=2")
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2", "fsdp=2,tp=2"])
def test_muon_and_adamw_train_as_in_eager_torch(mesh: str, tmp_path: Path) -> None:
    step, ours, eager = pair(mesh, clip=0.05)
    schedules = [schedules_of(ours), schedules_of(eager.optimizers)]
    for batch in DATA[:5]:
        assert float(step(batch)) == pytest.approx(eager(batch), rel=1e-6)
        for schedule in (s for each in schedules for s in each):
            schedule.step()
    assert_tensors(step.parameters(), params_of(eager), 1e-6)
    assert_states(ours, eager.optimizers)
    step.save(str(tmp_path / "at"))
    again, optimizers, _ = pair(mesh, clip=0.05)
    again.load(str(tmp_path / "at"))
    for mine, other in zip(optimizers, ours, strict=True):
        for group, its in zip(mine.param_groups, other.param_groups, strict=True):
            group.update({k: v for k, v in its.items() if k != "params"})
    assert float(again(DATA[5])) == pytest.approx(eager(DATA[5]), rel=1e-6)
    assert_states(optimizers, eager.optimizers)


def test_each_optimizer_loads_its_own_state_and_options() -> None:
    step, ours, eager = pair("fsdp=2")
    for batch in DATA[:3]:
        eager(batch)
    step.model.load_state_dict(eager.model.state_dict())
    for mine, other in zip(ours, eager.optimizers, strict=True):
        mine.load_state_dict(copy.deepcopy(other.state_dict()))
    ours[1].param_groups[0]["lr"] = eager.optimizers[1].param_groups[0]["lr"] = 0.003
    for batch in DATA[3:]:
        assert float(step(batch)) == pytest.approx(eager(batch), rel=1e-6)
    assert_tensors(step.parameters(), params_of(eager), 1e-6)
    assert_states(ours, eager.optimizers)


def test_the_optimizers_of_a_step_are_an_optimizer() -> None:
    step, _, eager = pair("dp=2")
    again = mw.compile(step.model, loss=mse, example=DATA[0], optimizer=step.optimizer, mesh="dp=2")
    assert float(again(DATA[0])) == pytest.approx(eager(DATA[0]), rel=1e-6)


def job(pipe: Connection, mesh: str) -> dict[str, Any]:
    step, ours, eager = pair(mesh)
    losses = [(float(step(batch)), eager(batch)) for batch in DATA]
    assert_tensors(step.parameters(), params_of(eager), 1e-6)
    assert_states(ours, eager.optimizers)
    return {"worst": max(abs(a / b - 1) for a, b in losses)}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_on_a_cluster(start: Callable[..., Job]) -> None:
    for outcome in start(f"{__name__}:job", 2, "fsdp=2").finish(60):
        assert outcome.get("worst", 1.0) < 1e-6, outcome


def test_what_is_no_list_of_optimizers() -> None:
    model = Small()
    options: dict[str, Any] = {"loss": mse, "example": DATA[0], "mesh": "dp=2"}
    twice = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(list(model.parameters())[2:])]
    with pytest.raises(PlanError, match="two optimizers have the same parameter"):
        mw.compile(model, optimizer=twice, **options)
    with pytest.raises(PlanError, match=r"item 1(.|\n)*got: str"):
        mw.compile(model, optimizer=[twice[0], "adamw"], **options)  # type: ignore[list-item]
    with pytest.raises(PlanError, match="no optimizer in the list"):
        mw.compile(model, optimizer=[], **options)
    lbfgs = [torch.optim.SGD(list(model.parameters())[1:]), torch.optim.LBFGS(list(model.parameters())[:1])]
    with pytest.raises(PlanError, match="LBFGS evaluates the loss several times"):
        mw.compile(model, optimizer=lbfgs, **options)
