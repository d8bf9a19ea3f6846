"""Optimizers whose own step() changes values that belong to no parameter: counts and rates in groups and attributes."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training import batches, mse
from torch import Tensor, nn

import meshweave as mw
from meshweave.errors import CaptureError

NUM_STEPS = 14
STEPS = {"taken": 0}


class Counting(torch.optim.Optimizer):
    """SGD at a rate that follows from a count of its own."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})
        self.count = 0
        self.rates = {"now": lr}

    def rate(self, group: dict[str, Any]) -> float:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for group in self.param_groups:
            rate = self.rate(group)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=rate)
                    if self.count % 4 == 0:
                        p.mul_(0.9)


class InGroup(Counting):
    def rate(self, group: dict[str, Any]) -> float:
        group["k"] += 1
        return float(group["lr"] / group["k"])


class NewOption(Counting):
    def rate(self, group: dict[str, Any]) -> float:
        group["step"] = group.get("step", 0) + 1
        return float(group["lr"] if group["step"] < 11 else group["lr"] / 3)


class Decaying(Counting):
    def rate(self, group: dict[str, Any]) -> float:
        group["lr"] *= 0.9
        return float(group["lr"])


class InAttribute(Counting):
    def rate(self, group: dict[str, Any]) -> float:
        return float(group["lr"] if self.count < 11 else group["lr"] / 3)


class InDeque(Counting):
    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.cycle = deque([0.1, 0.2, 0.05])

    def rate(self, group: dict[str, Any]) -> float:
        if group is self.param_groups[0]:
            self.cycle.rotate()
        return self.cycle[0]


class InDict(Counting):
    def rate(self, group: dict[str, Any]) -> float:
        self.rates["now"] = 0.1 / self.count
        return self.rates["now"]


WORKING = (InGroup, NewOption, Decaying, InAttribute, InDeque, InDict)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(6, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 4)})


def forward(net: Any, batch: dict[str, Tensor]) -> Tensor:
    out: Tensor = net["c"](net["b"](net["a"](batch["x"]).tanh()).tanh())
    return out


def groups(net: Any) -> list[dict[str, Any]]:
    return [{"params": list(net[name].parameters())} for name in ("a", "b", "c")]


DATA = batches(NUM_STEPS, (8, 6), (8, 4))


def eager(net: nn.Module, optimizer: torch.optim.Optimizer, between: Callable[[int, Any], None]) -> None:
    for i, batch in enumerate(DATA):
        between(i, net)
        optimizer.zero_grad()
        mse(forward(net, batch), batch).backward()
        optimizer.step()


def agree(net: nn.Module, own: torch.optim.Optimizer, net2: nn.Module, own2: torch.optim.Optimizer) -> None:
    for p, q in zip(net.parameters(), net2.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert [{**g, "params": 0} for g in own.param_groups] == [{**g, "params": 0} for g in own2.param_groups]
    assert (own.count, own.rates) == (own2.count, own2.rates)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", WORKING)
@pytest.mark.parametrize("mesh", ["", "dp=2,tp=2"])
def test_counts_advance_once_per_step(kind: type[Counting], mesh: str) -> None:
    net = model()
    net2 = copy.deepcopy(net)
    own, own2 = kind(groups(net)), kind(groups(net2))
    eager(net, own, lambda i, net: None)
    step = mw.compile(net2, loss=mse, example=DATA[0], optimizer=own2, mesh=mesh, forward=forward)
    for batch in DATA:
        step(batch)
    agree(net, own, net2, own2)


@pytest.mark.parametrize("kind", WORKING)
def test_a_frozen_group_counts_on(kind: type[Counting]) -> None:
    def between(i: int, net: Any) -> None:
        net["a"].requires_grad_(i >= 5)

    net = model()
    net2 = copy.deepcopy(net)
    own, own2 = kind(groups(net)), kind(groups(net2))
    eager(net, own, between)
    between(0, net2)
    step = mw.compile(net2, loss=mse, example=DATA[0], optimizer=own2, mesh="dp=2", forward=forward)
    for i, batch in enumerate(DATA):
        between(i, net2)
        step(batch)
    agree(net, own, net2, own2)


def test_counts_in_groups_are_in_checkpoints(tmp_path: Path) -> None:
    net = model()
    net2 = copy.deepcopy(net)
    own = InGroup(groups(net))
    eager(net, own, lambda i, net: None)
    parts = []
    for k in (0, 1):
        own2 = InGroup(groups(net2))
        step = mw.compile(net2, loss=mse, example=DATA[0], optimizer=own2, mesh="dp=2", forward=forward)
        if k:
            step.load(str(tmp_path / "half"))
            own2.count = 7  # an attribute is in no state_dict, in eager PyTorch either
        for batch in DATA[k * 7 : k * 7 + 7]:
            step(batch)
        step.save(str(tmp_path / "half"))
        parts.append(own2)
        net2 = net2 if k else model()
    agree(net, own, net2, parts[1])


def test_a_count_that_the_script_writes_is_used() -> None:
    net = model()
    net2 = copy.deepcopy(net)
    own, own2 = InGroup(groups(net)), InGroup(groups(net2))

    def reset(i: int, optimizer: Any) -> None:
        if i == 6:
            optimizer.param_groups[1]["k"] = 0

    eager(net, own, lambda i, net: reset(i, own))
    step = mw.compile(net2, loss=mse, example=DATA[0], optimizer=own2, mesh="dp=2", forward=forward)
    for i, batch in enumerate(DATA):
        reset(i, own2)
        step(batch)
    agree(net, own, net2, own2)


class PerParameter(Counting):
    def rate(self, group: dict[str, Any]) -> float:
        for p in group["params"]:
            group["k"] += p.grad is not None
        return float(group["lr"])


class InTensor(Counting):
    total = torch.zeros(())

    def rate(self, group: dict[str, Any]) -> float:
        self.tensor = getattr(self, "tensor", torch.zeros(())) + 1
        return 0.1


class InClass(Counting):
    steps = (0,)

    def rate(self, group: dict[str, Any]) -> float:
        InClass.steps = (InClass.steps[0] + 1,)
        return 0.1


class InGlobal(Counting):
    def rate(self, group: dict[str, Any]) -> float:
        STEPS["taken"] += 1
        return 0.1 if STEPS["taken"] < 1000 else 0.01


class InIterator(Counting):
    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.schedule = iter([0.1] * 1000 + [0.01])

    def rate(self, group: dict[str, Any]) -> float:
        return next(self.schedule)


class InState(Counting):
    def rate(self, group: dict[str, Any]) -> float:
        self.state["count"] = self.state.get("count", 0) + 1  # type: ignore[index, call-overload]
        return 0.1 if self.state["count"] < 9 else 0.01  # type: ignore[index, operator]


class OfData(Counting):
    def rate(self, group: dict[str, Any]) -> float:
        group["norm"] = next(p.grad for p in group["params"] if p.grad is not None).norm().item()
        return 0.1


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (PerParameter, r"changes param_groups\[0\]\['k'\] by a number that depends on its parameters"),
        (InTensor, "changes its attribute 'tensor' to a value that is no number"),
        (InClass, "changes the class attribute InClass.steps"),
        (InIterator, "may advance its attribute 'schedule', an iterator"),
        (InGlobal, "changes the global STEPS"),
        (InState, "keeps state that belongs to no parameter"),
        (OfData, r"changes param_groups\[\d\]\['norm'\] to a value that is no number"),
    ],
)
def test_what_cannot_be_followed_is_an_error(kind: type[Counting], what: str) -> None:
    net = model()
    with pytest.raises(CaptureError, match=what):
        mw.compile(net, loss=mse, example=DATA[0], optimizer=kind(groups(net)), mesh="dp=2", forward=forward)
