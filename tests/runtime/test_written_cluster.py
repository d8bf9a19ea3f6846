"""What every rank writes between steps counts in the next step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from tests.processes import Job
from tests.training import batches, mse
from torch import nn

import meshweave as mw

pytestmark = pytest.mark.multiprocess


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@torch.no_grad()
def write(what: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Between two steps, on every rank."""
    params = list(model.parameters())
    if what == "alike":
        params[0].clamp_(-0.2, 0.2)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:  # each rank has one of the stages: a write to the other leaves no trace here
        for p in params[-2:]:
            p.mul_(0.5)
            optimizer.state[p]["exp_avg"].mul_(0.5)


class Stages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x).tanh())


def written(what: str) -> float:
    """The last loss."""
    torch.manual_seed(0)
    is_pipeline = what == "stages"
    model, data = Stages() if is_pipeline else Layer(4, 4), batches(4, (4, 4), (4, 4))
    optimizer, mesh = torch.optim.AdamW(model.parameters(), lr=0.1), "pp=2" if is_pipeline else "dp=2"
    step = mw.compile(model, loss=mse, example=data[0], optimizer=optimizer, mesh=mesh, profile="alpha-beta")
    for batch in data[:2]:
        step(batch)
    write(what, model, optimizer)
    return [float(step(batch)) for batch in data[2:]][-1]


class Critic(nn.Module):
    """A GAN's critic: its last layer has fewer rows than there are ranks, so that rank 1 has no element of it."""

    def __init__(self, inner: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x).tanh())


def two_steps_in_turns() -> tuple[list[float], list[float]]:
    """The losses, and those of eager PyTorch."""
    torch.manual_seed(0)
    inner, last = nn.Linear(4, 4), nn.Linear(4, 1)
    data = batches(3, (4, 4), (4, 1))
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.1) for part in (last, inner)]
    steps = [
        mw.compile(Critic(inner, last), loss=mse, example=data[0], optimizer=o, mesh="fsdp=2", profile="alpha-beta")
        for o in optimizers
    ]
    losses = [float(step(batch)) for batch in data for step in steps]
    torch.manual_seed(0)
    model = Critic(nn.Linear(4, 4), nn.Linear(4, 1))
    eager = [torch.optim.Adam(part.parameters(), lr=0.1) for part in (model.last, model.inner)]
    expected = []
    for batch in data:
        for optimizer in eager:
            model.zero_grad()
            loss = mse(model(batch["x"]), batch)
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    return losses, expected


class ThreeHeads(nn.Module):
    """Attention of three heads, which two devices share unevenly: DTensor has no such cut, so every process keeps whole
    copies of parameters and optimizer state."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(12, 12, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], 3, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


def write_by_data(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Leaves no trace in the version of any tensor."""
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)
        optimizer.state[p]["momentum_buffer"].data.mul_(0.5)
    model.v.weight.data[-1].zero_()  # type: ignore[operator,index,union-attr]  # a row that only one rank has


def load_whole_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Of a part of the model: the root module does not see it."""
    last: nn.Module = model.layers[1]  # type: ignore[index,assignment,union-attr]
    last.load_state_dict({name: torch.full(p.shape, 0.1) for name, p in last.named_parameters()})


def load_back(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


STYLES = {"q": "colwise", "k": "colwise", "v": "colwise", "out": "rowwise"}
ROWS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, Any], Callable[..., None]]] = {
    "writes by .data": (ThreeHeads, (2, 5, 12), {"mesh": "tp=2", "plan": mw.Plan.tp("tp", STYLES)}, write_by_data),
    "a module's load_state_dict": (Stages, (4, 4), {"mesh": "fsdp=2"}, load_whole_tensors),
    "an optimizer's load_state_dict": (Stages, (4, 4), {"mesh": "pp=2"}, load_back),
}


def beside_eager(row: str) -> tuple[list[float], list[float]]:
    """The losses, and those of eager PyTorch."""
    make, shape, options, between = ROWS[row]
    data, losses = batches(4, shape, shape), list[list[float]]()
    for is_eager in (True, False):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        step = None
        if not is_eager:
            step = mw.compile(model, loss=mse, example=data[0], optimizer=optimizer, profile="alpha-beta", **options)
        losses.append([])
        for i, batch in enumerate(data):
            if i == 2:
                between(model, optimizer)
            if step is not None:
                losses[-1].append(float(step(batch)))
                continue
            optimizer.zero_grad()
            loss = mse(model(batch["x"]), batch)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    return losses[1], losses[0]


def job(pipe: Connection) -> dict[str, Any]:
    rows = {row: beside_eager(row) for row in ROWS}
    return {
        "alike": [written(what) for what in ("alike", "stages")],
        "rows": rows | {"a parameter of which a rank has no element": two_steps_in_turns()},
    }


def test_what_a_script_writes_on_processes_counts_as_in_eager_pytorch(start: Callable[..., Job]) -> None:
    first, second = start(f"{__name__}:job", 2).finish(240)
    assert first.get("alike") == second.get("alike") is not None, (first, second)
    for outcome in (first, second):
        for row, (losses, expected) in outcome["rows"].items():
            assert losses == pytest.approx(expected, rel=1e-5), row
