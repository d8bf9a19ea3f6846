"""Random models on random devices: layers, operators, copies and fan-out; proven, run, and equal to eager PyTorch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.training import assert_tensors, mse, sgd, train, train_eagerly
from torch import Tensor, nn

import meshweave as mw
from meshweave.check.completeness import check_complete
from meshweave.check.deadlock import check_deadlock
from meshweave.errors import LayoutError, PlanError
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.place.plans import Plan

Op = tuple[Any, ...]


def any_mesh(chance: random.Random) -> Mesh:
    """Some of four devices, in any order, under one or two axes."""
    count = chance.choice([1, 1, 2, 2, 3, 4])
    axes = {1: [""], 2: ["t=2", "u=2"], 3: ["t=3"], 4: ["t=4", "t=2,u=2"]}[count]
    return Mesh(chance.choice(axes), devices=chance.sample(range(4), count))


def any_layout(chance: random.Random) -> Layout:
    mesh = any_mesh(chance)
    axes = chance.sample(mesh.axis_names, len(mesh.axis_names))
    where = {axis: chance.choice([0, 1, None]) for axis in axes}
    return Layout.of(mesh, 2, {d: [a for a in axes if where[a] == d] for d in (0, 1)})


def any_program(chance: random.Random) -> list[Op]:
    ops: list[Op] = []
    for _ in range(chance.randint(3, 8)):
        kind, of = chance.choice(["linear", "linear", "linear", "norm", "on", "add", "move"]), chance.randrange(100)
        extra = {
            "linear": lambda: (chance.randrange(4),),
            "on": lambda: (any_mesh(chance),),
            "move": lambda: (any_layout(chance),),
            "add": lambda: (chance.randrange(100),),
            "norm": lambda: (),
        }[kind]()
        ops.append((kind, of, *extra))
    return ops


class Net(nn.Module):
    """Runs its ops in order, each on an earlier value; the last value is the result."""

    def __init__(self, ops: list[Op]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.norm, self.ops = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.LayerNorm(6), ops

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for kind, of, *extra in self.ops:
            value = values[of % len(values)]
            if kind == "linear":
                value = torch.tanh(self.layers[extra[0]](value))
            elif kind == "norm":
                value = self.norm(value)
            elif kind == "add":
                value = value + values[extra[0] % len(values)]
            else:
                value = {"on": mw.on, "move": mw.move}[kind](value, extra[0])
            values.append(value)
        return values[-1] + 0 * sum(p.sum() for p in self.parameters())


def outcome(seed: int) -> str:
    """What came of the program of a seed: how many roles it had, or why it was refused."""
    chance = random.Random(seed)
    model = Net(any_program(chance))
    plan = Plan.replicate("d")
    where = {f"layers.{i}": any_mesh(chance) for i in range(4) if chance.random() < 0.6}
    plan = plan + Plan.on(where) if where else plan
    made = torch.Generator().manual_seed(seed)
    data = [{k: torch.randn(5, 6, generator=made) for k in ("x", "y")} for _ in range(2)]
    eager, expected = train_eagerly(model, data, mse, sgd)
    try:
        step, losses = train(model, data, "d=4", mse, sgd, plan=plan)
    except PlanError as error:
        assert error.what == "devices of the mesh have no layer"  # noqa: PT017
        return "idle devices"
    except LayoutError as error:
        assert error.hint.startswith("add it up first: mw.reduction(x")  # noqa: PT017
        return "partial"
    check_complete(step.program.placed, step.program.roles)
    check_deadlock(step.program.roles)
    torch.testing.assert_close(losses, expected, rtol=2e-5, atol=1e-5)
    assert_tensors(step.parameters(), {n: p.detach() for n, p in eager.named_parameters()}, 1e-4)
    return f"{len(step.program.roles)} roles"


def test_random_programs_are_right_or_refused() -> None:
    outcomes = [outcome(seed) for seed in range(16)]
    assert outcomes.count("1 roles") >= 2
    assert sum(o in ("2 roles", "3 roles", "4 roles") for o in outcomes) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_many_random_programs_are_right_or_refused(part: int) -> None:
    outcomes = [outcome(seed) for seed in range(100 + 40 * part, 140 + 40 * part)]
    assert sum(o.endswith("roles") for o in outcomes) >= 10
