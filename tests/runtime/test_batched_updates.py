"""Updates of small parameters together: bit for bit what each parameter's own ops compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training import batches, compile_once, mse
from torch import nn

import meshweave as mw
from meshweave.ir.collectives import STARTS, WAIT
from meshweave.runtime import batched_updates

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-1, lr_decay=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, decoupled_weight_decay=True),
}


class Mixed(nn.Module):
    """Small and large parameters, a scalar, and parameters in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first, self.norm = nn.Linear(8, 24), nn.LayerNorm(24)
        self.large, self.second = nn.Linear(24, 24), nn.Linear(24, 8)
        self.wide = nn.Parameter(torch.randn(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.large(torch.tanh(self.norm(self.first(x))))
        return self.second(x) * self.scale + self.wide.float()


def trained(name: str, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], mw.TrainStep]:
    torch.manual_seed(0)
    model, data = Mixed(), batches(4, (8, 8), (8, 8))
    options = {"mesh": "", "profile": "alpha-beta"} | options
    optimizer = OPTIMIZERS[name](model.parameters())
    step = compile_once((name, str(options)), model, loss=mse, example=data[0], optimizer=optimizer, **options)
    for batch in data:
        step(batch)
    return step.parameters() | step.optimizer_state(), step


def num_calls(step: mw.TrainStep) -> int:
    return len(step.session.ranks[0].tasks["update"])


@pytest.mark.parametrize("options", [{}, {"mesh": "fsdp=2"}, {"mesh": "dp=2", "clip_grad_norm": 0.1}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits_with_fewer_calls(name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_updates, "LARGEST", 0)
    expected, alone = trained(name, options)
    monkeypatch.setattr(batched_updates, "LARGEST", 300)
    monkeypatch.setattr(batched_updates, "GROUP", 500)  # several groups
    found, together = trained(name, options)
    assert num_calls(together) < num_calls(alone)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_communications_keep_their_order() -> None:
    _, step = trained("adamw", {"mesh": "fsdp=2", "clip_grad_norm": 0.1})
    (role,) = step.program.roles
    tasks = [task.node for part in step.session.ranks[0].tasks.values() for task in part]
    ends = [n for n in tasks if n.target in STARTS or n.target is WAIT]
    assert ends == [n for n in role.graph.nodes if n.target in STARTS or n.target is WAIT]


def test_a_call_per_op() -> None:
    torch.manual_seed(0)
    model, data = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))), batches(1, (8, 8), (8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mw.compile(model, loss=mse, example=data[0], optimizer=optimizer, mesh="", forward=lambda m, b: m(b["x"]))
    (task,) = step.session.ranks[0].tasks["update"]
    assert task.fused is not None
    assert len(task.outs) == 12
