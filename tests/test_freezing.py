"""Parameters that are frozen and unfrozen between steps train as in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.processes import Job
from tests.training import assert_tensors, batches, mse
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

import meshweave as mw
from meshweave.errors import StepError

DATA = batches(10, (8, 4), (8, 2))


class Tuned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.backbone(x)))


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> float:
    loss = mse(model(batch["x"]), batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


# Before which step what is done: the backbone joins after two steps, the head rests for two.
SCHEDULE: dict[int, Callable[[Tuned], Any]] = {
    2: lambda model: model.backbone.requires_grad_(True),
    4: lambda model: model.head.requires_grad_(False),
    6: lambda model: model.head.requires_grad_(True),
}


def trained(mesh: str) -> tuple[mw.TrainStep, float]:
    """A step after it has trained, and how far its losses were from those of eager PyTorch."""
    torch.manual_seed(0)
    model = Tuned()
    model.backbone.requires_grad_(False)
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.02, weight_decay=0.1) for m in (model, twin))
    step = mw.compile(model, loss=mse, example=DATA[0], optimizer=ours, mesh=mesh, profile="alpha-beta")
    worst = 0.0
    for i, batch in enumerate(DATA[:8]):
        for each in (model, twin) if i in SCHEDULE else ():
            SCHEDULE[i](each)
        worst = max(worst, abs(float(step(batch)) / eager_step(twin, theirs, batch) - 1))
    assert step.num_steps == 8
    assert_tensors(step.parameters(), {n: p.detach() for n, p in twin.named_parameters()}, 2e-6)
    for mine, other in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        assert float(ours.state[mine]["step"]) == float(theirs.state[other]["step"])
    return step, worst


@pytest.mark.slow_rows("dp=2")
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2"])
def test_frozen_and_unfrozen_as_in_eager_torch(mesh: str, tmp_path: Path) -> None:
    step, worst = trained(mesh)
    assert worst < 1e-6
    before = step.evaluate(DATA[8])
    step.model.head.requires_grad_(False)
    assert step.evaluate(DATA[8]) == before
    step.save(str(tmp_path / "at"))
    kept = step.parameters()["head.weight"].clone()
    step(DATA[8])
    assert torch.equal(step.parameters()["head.weight"], kept)


def script(mesh: str, path: str, stops: int, is_frozen_at_compile: bool) -> list[float]:
    """Losses of a run that is interrupted before step `stops` and resumed by a new process's model and optimizer."""
    losses: list[float] = []
    for first, last in ((0, stops), (stops, 8)):
        torch.manual_seed(0)
        model = Tuned()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
        for i in [i for i in (0, *SCHEDULE) if i <= first] if is_frozen_at_compile else ():
            FIRST_SCHEDULE[i](model)
        step = mw.compile(model, loss=mse, example=DATA[0], optimizer=optimizer, mesh=mesh, profile="alpha-beta")
        if first:
            step.load(path)
        for i in range(last):
            FIRST_SCHEDULE.get(i, lambda model: None)(model)
            if first <= i:
                losses.append(float(step(DATA[i])))
        step.save(path)
    return losses


FIRST_SCHEDULE: dict[int, Callable[[Tuned], Any]] = {0: lambda model: model.backbone.requires_grad_(False), **SCHEDULE}


@pytest.mark.slow_rows("1-False", "3-False", "3-True", "5-False", "5-True", "7-True")
@pytest.mark.parametrize("is_frozen_at_compile", [True, False])
@pytest.mark.parametrize("stops", [1, 3, 5, 7])
def test_a_run_with_frozen_parameters_resumes_as_it_would_have_gone_on(
    stops: int, is_frozen_at_compile: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    twin = Tuned()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.02, weight_decay=0.1)
    expected = []
    for i, batch in enumerate(DATA[:8]):
        FIRST_SCHEDULE.get(i, lambda model: None)(twin)
        expected.append(eager_step(twin, optimizer, batch))
    losses = script("fsdp=2", str(tmp_path / "at"), stops, is_frozen_at_compile)
    assert losses == pytest.approx(expected, abs=1e-6)


def job(pipe: Connection, mesh: str) -> dict[str, Any]:
    step, worst = trained(mesh)
    if dist.get_rank() == 1:
        step.model.head.requires_grad_(False)
    try:
        step(DATA[8])
    except StepError as error:
        return {"worst": worst, "text": str(error)}
    return {"worst": worst, "text": "none"}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_on_a_cluster_all_ranks_freeze(start: Callable[..., Job]) -> None:
    for outcome in start(f"{__name__}:job", 2, "fsdp=2").finish(90):
        assert outcome.get("worst", 1.0) < 1e-6, outcome
        assert "ranks make different calls" in outcome["text"], outcome
        assert "which compiles again: parameters were frozen or unfrozen" in outcome["text"]


class Bootstrapped(nn.Module):
    """Learns what its target network, an average of its own weights, says of the next input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.online = nn.Linear(4, 4)
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.online(x) - 0.9 * self.target(y) - y).pow(2).mean()

    @torch.no_grad()
    def follow(self) -> None:
        for target, online in zip(self.target.parameters(), self.online.parameters(), strict=True):
            target.lerp_(online, 0.1)


def test_averages_and_target_networks_that_are_written_between_steps() -> None:
    """The recipes of docs/migrate.md."""
    data, losses, averages = batches(4, (4, 4), (4, 4)), [], []
    for is_compiled in (True, False):
        model = Bootstrapped()
        optimizer = torch.optim.SGD(model.online.parameters(), lr=0.1)
        loss = lambda out, batch: out  # noqa: E731
        step = (
            mw.compile(model, loss=loss, example=data[0], optimizer=optimizer, mesh="fsdp=2") if is_compiled else None
        )
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for batch in data:
            if step is None:
                value = model(**batch)
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
            else:
                value = step(batch)
            losses.append(value.item())
            model.follow()
            average.update_parameters(model)
        averages.append({n: p.detach() for n, p in average.module.named_parameters()})
    assert losses[:4] == pytest.approx(losses[4:], rel=1e-5)
    assert_tensors(*averages)
