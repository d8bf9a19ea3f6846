"""Simulated pipelines against the formulas: with equal stages and free communication, the bubble is (p-1)/(m+p-1)."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.cost.hardware import load_profile
from meshweave.cost.simulate.result import Simulation
from meshweave.cost.simulate.stages import costs_of_stages
from meshweave.cost.simulate.step import SimulateOptions, simulate_roles
from meshweave.engine.schedules import make_schedule, pipeline_times
from meshweave.engine.sections import sections_of_roles
from meshweave.errors import MeshweaveError
from meshweave.program import Program

WIDTH = 4096
FREE = load_profile("h100").scaled(bandwidth=1e9, latency=1e-9)


class Stages(nn.Module):
    """Matmuls of one size, and a scale before them, so that the first stage has a gradient of its input to compute."""

    def __init__(self, depth: int, tied: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        if tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x


@cache
def stages(depth: int, tied: bool = False) -> Program:
    with torch.device("meta"):
        model, batch = Stages(depth, tied), {"x": torch.empty(2 * 2 * WIDTH, WIDTH)}
    mesh, options = mw.Mesh(f"pp={depth}"), CaptureOptions(accumulate=2)
    loss = lambda out, batch: (out.sum(), {"first": out[0, 0]}) if tied else out.sum()  # noqa: E731
    return build_program(StepSource(model, loss), batch, None, Target(mesh, None, FREE), options)


def simulated(program: Program, microbatches: int, pipeline: str | None) -> Simulation:
    schedule = None if pipeline is None else make_schedule(pipeline, len(program.roles), microbatches)
    return simulate_roles(program.roles, FREE, SimulateOptions(microbatches=microbatches, pipeline=schedule))


def bubble(found: Simulation) -> float:
    """The share of the step in which a stage, on average, computes nothing."""
    return 1 - sum(role.compute_seconds for role in found.roles) / len(found.roles) / found.seconds


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("pipeline", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("depth", "counts"),
    [(2, (2, 4, 16)), (4, (4, 8, 32)), pytest.param(8, (8, 16, 64), marks=pytest.mark.slow)],
)
def test_the_bubble_is_that_of_the_formula(depth: int, counts: tuple[int, ...], pipeline: str, tied: bool) -> None:
    for count in counts:
        found = simulated(stages(depth, tied), count, pipeline)
        assert bubble(found) == pytest.approx((depth - 1) / (count + depth - 1), abs=0.025)


def placed(*indices: int) -> Program:
    """Layers on these stages of two."""
    with torch.device("meta"):
        model, batch = Stages(len(indices), tied=False), {"x": torch.empty(8 * WIDTH, WIDTH)}
    plan = mw.Plan.on({f"layers.{i}": f"pp={index}" for i, index in enumerate(indices)})
    source, target = StepSource(model, lambda out, batch: out.sum()), Target(mw.Mesh("pp=2"), plan, FREE)
    return build_program(source, batch, None, target, CaptureOptions(accumulate=2))


def test_stages_may_have_devices_in_any_order() -> None:
    ordered, reversed_ = (simulated(placed(*indices), 12, "1f1b") for indices in ((0, 1), (1, 0)))
    assert reversed_.seconds == pytest.approx(ordered.seconds)


def test_a_device_has_as_many_stages_as_its_schedule_says() -> None:
    with pytest.raises(MeshweaveError, match="the stages of the plan are not those of schedule 1f1b"):
        simulated(placed(0, 1, 0), 2, "1f1b")
    looped = placed(0, 1, 0, 1)
    held = [its.stage_numbers for its in sections_of_roles(looped.roles, is_pipeline=True)]
    assert held == [(0, 2), (1, 3)]
    before = bubble(simulated(stages(2), 8, "1f1b"))
    assert bubble(simulated(looped, 8, "interleaved")) == pytest.approx(before / 2, abs=0.03)


def test_a_sequential_run_keeps_one_stage_busy_at_a_time() -> None:
    assert bubble(simulated(stages(4), 8, None)) == pytest.approx(3 / 4, abs=0.02)


def test_only_what_tells_the_loss_waits_for_the_end() -> None:
    """Every stage has one transfer of the loss, and what computes it stays where it is."""
    program = stages(4)
    sections = sections_of_roles(program.roles, is_pipeline=True)
    starts = [[n for n in its.nodes(["report"]) if n.args[-1] in its.role.transfers] for its in sections]
    assert [len(found) for found in starts] == [1, 1, 1, 1]
    assert len({found[0].args[-1] for found in starts}) == 1


def test_a_tied_weight_is_sent_once_for_forward_and_backward() -> None:
    program = stages(4, tied=True)
    shape = (WIDTH, WIDTH)
    sent = [made for made in program.roles[0].transfers.values() if made.spec.shape == shape]
    assert len(sent) == 2  # the weight to the last stage, its gradient back


@pytest.mark.parametrize(("depth", "count"), [(2, 8), (4, 12)])
def test_stages_that_wait_for_what_they_send_take_as_long_as_schedules_say(depth: int, count: int) -> None:
    """A message takes half as long as forward. The clock of schedules has no links that messages share."""
    program, machine = stages(depth), load_profile("h100")
    times = costs_of_stages(program.roles, machine).times
    machine = machine.scaled(node_bandwidth=2 * times.comm[0] / times.forward[0], latency=1e-9)
    times = costs_of_stages(program.roles, machine).times
    schedule = make_schedule("1f1b", depth, count)
    found, expected = list[float](), list[float]()
    for is_blocking in (False, True):
        options = SimulateOptions(microbatches=count, pipeline=schedule, blocking_messages=is_blocking)
        found.append(simulate_roles(program.roles, machine, options).seconds)
        seconds = {"F": times.forward, "B": times.input, "W": times.weight, "comm": times.comm}
        expected.append(pipeline_times(schedule, **seconds, blocking_messages=is_blocking).step_s)
    assert found == pytest.approx(expected, rel=0.07)
    assert found[1] > 1.05 * found[0]
