"""Python state is compared as forward can tell it apart: by value, by type, by sign of zero, in its order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from tests.training import batches, mse
from torch import Tensor, nn

import meshweave as mw
from meshweave.capture.snapshot import Snapshot, same
from meshweave.errors import StepError


class Kind(IntEnum):
    FIRST = 1


@dataclass
class Options:
    scale: float = 1.0


class LeavesOut:
    """An object that is equal to any other of its class."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LeavesOut)

    __hash__ = object.__hash__


# Pairs that == takes for equal, and that forward can tell apart.
EQUAL_BUT_OTHER: list[tuple[Any, Any]] = [
    (True, 1),
    (1, 1.0),
    (0.0, -0.0),
    (1.0, 1 + 0j),
    (1.0, numpy.float64(1)),
    (Kind.FIRST, 1),
    (Fraction(1), 1),
    ((1, (2, 3)), (1, (2, 3.0))),
    ([1], [True]),
    ({1}, {True}),
    (frozenset({1}), frozenset({True})),
    (slice(0, 1), slice(0, True)),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({1: 2}, {True: 2}),
    (Options(1), Options(True)),
    (LeavesOut(1.0), LeavesOut(2.0)),
]


@pytest.mark.parametrize("pair", EQUAL_BUT_OTHER, ids=lambda pair: type(pair[0]).__name__)
def test_what_is_equal_and_yet_another_is_a_change(pair: tuple[Any, Any]) -> None:
    old, new = pair
    assert old == new
    assert same(old, old)
    assert not same(old, new)
    holder = SimpleNamespace(value=old)
    snapshot = Snapshot.of({"holder": holder})
    assert snapshot.is_current()
    holder.value = new
    assert not snapshot.is_current()
    assert [change.place for change in snapshot.changes()] == ["holder.value"]


def reorder(values: dict[str, Any]) -> None:
    values["a"] = values.pop("a")


# Containers, what happens to each, and which place the change is at.
IN_PLACE: list[tuple[Any, Callable[[Any], Any], str]] = [
    ([1], lambda v: v.__setitem__(0, True), "holder.value[0]"),
    ({"a": 1, "b": 2}, reorder, "the keys of holder.value"),
    (OrderedDict(a=1, b=2), lambda v: v.move_to_end("a"), "the keys of holder.value"),
    ({1: 2}, lambda v: (v.clear(), v.update({True: 2})), "the keys of holder.value"),
    ({1}, lambda v: (v.clear(), v.update({True})), "the keys of holder.value"),
    (numpy.zeros(3), lambda v: v.__setitem__(0, -0.0), "holder.value.elements"),
    (list(range(20_000)), lambda v: v.append(1), "holder.value['length']"),
]


@pytest.mark.parametrize("row", IN_PLACE, ids=lambda row: row[2])
def test_what_changes_within_a_container_is_seen_and_put_back(row: tuple[Any, Callable[[Any], Any], str]) -> None:
    value, change, place = row
    snapshot = Snapshot.of({"holder": SimpleNamespace(value=value)})
    assert snapshot.is_current()
    change(value)
    assert not snapshot.is_current()
    assert [change.place for change in snapshot.changes()] == [place]
    if "length" not in place:
        snapshot.restore()
        assert not snapshot.changes()


def test_equal_values_of_the_same_type_are_no_change() -> None:
    holder = SimpleNamespace(number=float("1.5"), pair=(1, 2.5), kept=[1.5])
    snapshot = Snapshot.of({"holder": holder})
    holder.number = float("1.5")
    assert not snapshot.is_current()
    assert not snapshot.changes()
    assert snapshot.renew()
    assert snapshot.is_current()
    holder.kept = [1.5]  # another list, which a new snapshot is to watch
    assert not snapshot.changes()
    assert not snapshot.renew()


class Asks(nn.Module):
    """Doubles where its attribute is of the class that it had at first."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kind, self.value = type(value), value

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2.0 if type(self.value) is self.kind else 1.0)


@pytest.mark.parametrize("pair", [(True, 1), (1, True), (1, 1.0)], ids=str)
def test_another_type_counts_where_it_makes_a_difference(pair: tuple[Any, Any]) -> None:
    model = Asks(pair[0])
    batch = batches(1, (4, 4), (4, 4))[0]
    step = mw.compile(model, loss=mse, example=batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), mesh="")
    step(batch)
    model.value = pair[1]
    with pytest.raises(StepError, match=f"model.value: {pair[0]} -> {pair[1]}"):
        step(batch)
    model.kind, model.value = pair[1].__class__, pair[1]
    step(batch)


def test_the_order_of_a_dict_and_the_sign_of_zero_count() -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.factors, self.sign = {"a": 1.0, "b": 2.0}, 0.0

        def forward(self, x: Tensor) -> Tensor:
            return torch.copysign(self.linear(x), torch.full((4,), self.sign)) * next(iter(self.factors.values()))

    model = Scales()
    batch = batches(1, (4, 4), (4, 4))[0]
    step = mw.compile(model, loss=mse, example=batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), mesh="")
    step(batch)
    reorder(model.factors)
    with pytest.raises(StepError, match=r"the keys of model\.factors"):
        step(batch)
    model.factors = {"a": 1.0, "b": 2.0}
    step(batch)
    model.sign = -0.0
    with pytest.raises(StepError, match=r"model\.sign: 0\.0 -> -0\.0"):
        step(batch)


class Joins(nn.Module):
    """Goes through what it is called with, in order or, with `by_name`, by name."""

    def __init__(self, by_name: bool = False) -> None:
        super().__init__()
        self.linear, self.by_name = nn.Linear(8, 4), by_name

    def forward(self, parts: dict[str, Tensor], factors: dict[str, float]) -> Tensor:
        names = sorted(parts) if self.by_name else list(parts)
        return self.linear(torch.cat([parts[name] for name in names], 1)) * next(iter(factors.values()))


def nested(turn_parts: bool = False, turn_factors: bool = False) -> dict[str, Any]:
    batch = batches(1, (4, 4), (4, 4))[0]
    parts, factors = {"a": batch["x"], "b": batch["y"]}, {"a": 1.0, "b": 2.0}
    return {
        "parts": dict(reversed(parts.items())) if turn_parts else parts,
        "factors": dict(reversed(factors.items())) if turn_factors else factors,
        "y": batch["y"],
    }


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> mw.TrainStep:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return mw.compile(model, loss=mse, example=nested(), optimizer=optimizer, mesh="dp=2")


def test_the_order_of_entries_of_a_batch_counts() -> None:
    step = compiled(Joins())
    step(nested())
    with pytest.raises(StepError, match="the order of the batch's entries"):
        step(nested(turn_parts=True))
    with pytest.raises(StepError, match="the keys of factors"):
        step(nested(turn_factors=True))
    step(nested())


def test_an_order_that_makes_no_difference_is_tried_once() -> None:
    step = compiled(Joins(by_name=True))
    tries: list[Any] = []
    again = step.guards.contract.again
    step.guards.contract.again = lambda record, batch: (tries.append(batch), again(record, batch))[1]
    expected = step.evaluate(nested())
    tries.clear()
    for _ in range(3):
        step(nested(turn_parts=True))
        step(nested())
    assert len(tries) == 2  # forward and loss, and once more since the state may have changed
    assert step.evaluate(nested(turn_parts=True)) != expected


class Ordered(torch.optim.SGD):
    """Takes its rate from the first entry of a dict."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.rates = {"a": 0.1, "b": 0.3}

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["lr"] = next(iter(self.rates.values()))
        super().step(closure)


def test_the_order_of_a_dict_on_an_optimizer_counts() -> None:
    weights = []
    for turn in (False, True):
        torch.manual_seed(0)
        model = Joins()
        optimizer = Ordered(model.parameters())
        step = compiled(model, optimizer)
        step(nested())
        if turn:
            reorder(optimizer.rates)
        step(nested())
        weights.append(model.linear.weight.detach().clone())
    assert not torch.equal(*weights)
