"""Eager mode is as slow as the processor that launches it, and no slower than the device where that takes longer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import meshweave as mw
from meshweave.cost.hardware import load_profile
from meshweave.cost.simulate.result import Simulation
from meshweave.program import Program
from meshweave.whatif import simulate

LAYERS = 8


def compiled(rows: int) -> Program:
    width = 256
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS)))

    def loss(out: Tensor, batch: object) -> Tensor:
        return out.square().mean()

    step = mw.compile(model, loss=loss, example={"input": torch.zeros(rows, width)}, mesh="", profile="h100")
    return step.program


def in_eager(program: Program, eager_s: float) -> Simulation:
    return simulate(program, replace(load_profile("h100"), eager_s=eager_s), fusion="eager")


@pytest.fixture(scope="module")
def small() -> Program:
    return compiled(8)


def test_short_kernels_wait_for_the_processor(small: Program) -> None:
    slow, free = in_eager(small, 10e-6), in_eager(small, 0.0)
    num_kernels = sum(span.kind == "compute" for span in slow.spans)
    last = slow.spans[-1].seconds
    assert slow.seconds == pytest.approx(10e-6 * num_kernels + last)  # the last one runs when it has been launched
    assert slow.roles[0].idle_seconds == pytest.approx(slow.seconds - free.seconds)
    assert slow.roles[0].compute_seconds == pytest.approx(free.seconds)


def test_long_kernels_hide_their_launches() -> None:
    large = compiled(2**20)
    slow, free = in_eager(large, 10e-6), in_eager(large, 0.0)
    assert slow.seconds == pytest.approx(free.seconds + 10e-6)  # but for the first


def test_compiled_kernels_are_launched_at_no_cost(small: Program) -> None:
    for fusion in ("compiled", "ops"):
        machine = load_profile("h100")
        found = [simulate(small, replace(machine, eager_s=s), fusion=fusion).seconds for s in (0.0, 1e-3)]  # type: ignore[arg-type]
        assert found[0] == found[1]
