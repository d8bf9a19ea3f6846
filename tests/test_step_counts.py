"""Parameters that not every step updates: each has its own count of steps and its own state, as in eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshweave as mw

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
}


class Branches(nn.Module):
    """A trunk and two heads; in eval mode the second is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x).tanh()
        return self.first(h), self.second(h) if self.training else h


def first_alone(out: Any, batch: Any) -> Tensor:
    return out[0].pow(2).mean()


def second_alone(out: Any, batch: Any) -> Tensor:
    return (out[1] - 1).pow(2).mean()


def both(out: Any, batch: Any) -> Tensor:
    return first_alone(out, batch) + second_alone(out, batch)


class Pair:
    """A model in eager PyTorch and a copy of it for meshweave."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.eager = Branches().double()
        self.own = copy.deepcopy(self.eager)
        self.optimizer = OPTIMIZERS[name](self.eager.parameters())
        self.own_optimizer = OPTIMIZERS[name](self.own.parameters())
        self.batches = [(torch.randn(8, 6, dtype=torch.float64),) for _ in range(8)]

    def compiled(self, loss: Callable[[Any, Any], Tensor], mesh: str = "dp=2") -> mw.TrainStep:
        return mw.compile(self.own, loss=loss, example=self.batches[0], optimizer=self.own_optimizer, mesh=mesh)

    def train(self, batch: Any, loss: Callable[[Any, Any], Tensor]) -> None:
        self.optimizer.zero_grad()
        loss(self.eager(*batch), batch).backward()
        self.optimizer.step()

    def check(self) -> None:
        pairs = zip(self.eager.named_parameters(), self.own.parameters(), strict=True)
        for (name, expected), got in pairs:
            assert torch.allclose(got, expected, rtol=1e-10, atol=1e-10), name
            wanted, state = self.optimizer.state.get(expected, {}), self.own_optimizer.state.get(got, {})
            assert {k for k, v in state.items() if v is not None} == {k for k, v in wanted.items() if v is not None}, (
                name
            )
            for slot, value in wanted.items():
                if value is not None:
                    assert torch.allclose(torch.as_tensor(state[slot]), torch.as_tensor(value), rtol=1e-9), (name, slot)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_branch_that_is_taken_later(name: str) -> None:
    pair = Pair(name)
    pair.eager.eval()
    pair.own.eval()
    step = pair.compiled(both if name == "sgd" else first_alone)
    loss = both if name == "sgd" else first_alone
    for i, batch in enumerate(pair.batches):
        pair.eager.train(i in (2, 3, 6))
        pair.own.train(i in (2, 3, 6))
        pair.train(batch, loss)
        step(batch)
        pair.check()


@pytest.mark.slow_rows("nadam-dp=2", "rmsprop-dp=2", "adagrad-dp=2")
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_losses_in_turns(name: str, mesh: str, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(name)
    steps = {loss: pair.compiled(loss, mesh) for loss in (first_alone, second_alone)}
    for i, batch in enumerate(pair.batches):
        loss = (first_alone, second_alone, second_alone)[i % 3]
        pair.train(batch, loss)
        steps[loss](batch)
        pair.check()
    again = [record for record in caplog.records if "compiled again" in record.getMessage()]
    assert len(again) <= 2  # not in each turn


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loss_that_uses_more_later(name: str) -> None:
    pair = Pair(name)
    for loss in (first_alone, both):
        step = pair.compiled(loss)
        for batch in pair.batches[:3]:
            pair.train(batch, loss)
            step(batch)
            pair.check()
    pair.eager, pair.own = pair.own, pair.eager  # and eager steps after compiled ones
    pair.optimizer, pair.own_optimizer = pair.own_optimizer, pair.optimizer
    pair.train(pair.batches[3], both)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_counts_are_in_checkpoints(name: str, tmp_path: Path) -> None:
    pair = Pair(name)
    step = pair.compiled(first_alone)
    for batch in pair.batches[:3]:
        pair.train(batch, first_alone)
        step(batch)
    step.save(str(tmp_path / "saved"))
    expected = copy.deepcopy(pair.own.state_dict())
    for p in pair.own.parameters():
        nn.init.zeros_(p)
    pair.own_optimizer = OPTIMIZERS[name](pair.own.parameters())
    step = pair.compiled(both, "fsdp=2")
    step(pair.batches[0])  # which gives every parameter a state
    step.load(str(tmp_path / "saved"))
    assert all(torch.equal(v, expected[k]) for k, v in pair.own.state_dict().items())
    pair.check()
    for batch in pair.batches[3:6]:
        pair.train(batch, both)
        step(batch)
        pair.check()
