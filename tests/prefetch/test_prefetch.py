"""Gathers start ahead of the block that needs them, and nothing else changes."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from tests.models import Made, hugging_face
from tests.training import assert_equals_eager, batches
from torch import nn

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.check.completeness import check_complete
from meshweave.check.deadlock import check_deadlock
from meshweave.cost.hardware import AlphaBeta
from meshweave.errors import PlanError
from meshweave.ir.collectives import COLLECTIVES, WAIT
from meshweave.ir.graph import origin_of
from meshweave.passes import Prefetch, pass_list_of
from meshweave.program import Program
from meshweave.runtime.session import SessionSettings
from meshweave.runtime.world import LocalWorld
from meshweave.train_step import CompiledStep, TrainStep
from meshweave.whatif import simulate


@cache
def llama() -> Made:
    return hugging_face("llama", batch=4, heads=4, layers=3)


@cache
def program(ahead: int, mesh: str = "fsdp=4") -> Program:
    model, batch, loss = llama()
    spec = read_optimizer(sgd(model), model)
    how = pass_list_of(f"prefetch={ahead}")
    return build_program(
        StepSource(model, loss), batch, spec, Target(mw.Mesh(mesh), None, AlphaBeta()), CaptureOptions(), pass_list=how
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def starts(made: Program) -> dict[str, int]:
    """Per layer, the number of waits that stand between the start of its first forward gather and the wait for it."""
    found: dict[str, int] = {}
    nodes = list(made.rank.graph.nodes)
    for i, node in enumerate(nodes):
        origin = origin_of(node)
        if node.target in COLLECTIVES and origin.phase == "forward" and ".layers." in origin.module:
            layer = origin.module.split(".layers.")[1].split(".")[0]
            waits = [n for n in nodes[i:] if n.target is WAIT]
            found.setdefault(layer, next(k for k, n in enumerate(waits) if n.args[0] is node))
    return found


def test_each_layer_is_gathered_while_the_one_before_computes() -> None:
    without, one, two = (starts(program(ahead)) for ahead in (0, 1, 2))
    assert without["2"] == 0
    assert one["2"] >= 9  # as many waits as a layer has parameters
    assert two["2"] > one["2"] > without["2"]


@pytest.mark.slow_rows("fsdp=4-distances0")
@pytest.mark.parametrize(
    ("mesh", "distances"),
    [
        ("fsdp=4", (2,)),
        pytest.param("fsdp=2,tp=2", (1, 3), marks=pytest.mark.slow),
        pytest.param("pp=2,fsdp=2", (1, 3), marks=pytest.mark.slow),
    ],
)
def test_the_step_is_the_same_to_the_bit_and_proven(mesh: str, distances: tuple[int, ...]) -> None:
    def trained(ahead: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        made, model = program(ahead, mesh), copy.deepcopy(llama()[0])
        check_complete(made.placed, made.roles)
        check_deadlock(made.roles)
        step = TrainStep(CompiledStep(made, model, sgd(model), LocalWorld(made.mesh), SessionSettings()))
        return [float(step(llama()[1])) for _ in range(2)], step.parameters()

    losses, params = trained(0)
    for ahead in distances:
        other_losses, other_params = trained(ahead)
        assert other_losses == losses
        assert all(torch.equal(value, other_params[name]) for name, value in params.items())


def test_it_hides_what_it_can() -> None:
    without, ahead = (simulate(program(n), "h100") for n in (0, 1))
    assert ahead.seconds < without.seconds
    assert ahead.exposed_seconds < 0.9 * without.exposed_seconds
    late = [sum(r.seconds for s in one.spans for r in s.reasons if r.kind == "late") for one in (without, ahead)]
    assert late[1] < 0.5 * late[0]


def test_every_step_of_a_gather_has_the_time_of_a_block() -> None:
    """State over two axes is gathered within nodes, then among them: the second step starts when the first has run."""
    plan = mw.Plan.fsdp("fsdp") + mw.Plan.shard_state("cp") + mw.Plan.replicate("cp")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU()) for _ in range(4)))
        batch = {"input": torch.empty(64, 64), "y": torch.empty(64, 64)}
    step = mw.compile(
        model, loss=lambda out, b: ((out - b["y"]) ** 2).mean(), example=batch, mesh="fsdp=16,cp=2", plan=plan,
        profile="h100", passes="prefetch=1",
    )  # fmt: skip
    nodes = [n for n in step.program.rank.graph.nodes if n.op == "call_function" and origin_of(n).phase == "forward"]
    blocks: dict[str, list[int]] = {}
    for wait in (n for n in nodes if n.target is WAIT and origin_of(n).module):
        between = nodes[nodes.index(wait.all_input_nodes[0]) : nodes.index(wait)]
        blocks.setdefault(origin_of(wait).module, []).append(
            sum(n.target is torch.ops.aten.mm.default for n in between)
        )
    assert list(blocks.values()) == [[0, 0], [0, 1], [1, 1], [1, 1]]


def test_backwards_in_time_is_an_error() -> None:
    with pytest.raises(PlanError, match="to prefetch is negative"):
        mw.compile(
            Named(), loss=lambda out, _: out.sum(), example=(torch.ones(4, 8),), mesh="fsdp=2", passes=[Prefetch(-1)]
        )


class Named(torch.nn.Module):
    """The second layer's name begins like that of an entry of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.batch_last = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.batch_last(self.first(x).relu())


def test_a_parameter_is_told_from_the_batch_by_what_it_is() -> None:
    step = mw.compile(
        Named(), loss=lambda out, _: out.sum(), example=(torch.ones(4, 8),), mesh="fsdp=2", passes="prefetch=1"
    )
    nodes = list(step.program.rank.graph.nodes)
    (start,) = (
        n
        for n in nodes
        if n.target in COLLECTIVES and origin_of(n).phase == "forward" and origin_of(n).module.startswith("batch_last")
    )
    assert nodes.index(start) < min(nodes.index(n) for n in nodes if n.target is WAIT)


@pytest.mark.parametrize(("mesh", "ahead"), [("fsdp=5", 1), ("fsdp=5", 2), ("fsdp=3,tp=2", 1), ("pp=2,fsdp=3", 1)])
def test_uneven_pieces_are_fetched_ahead(mesh: str, ahead: int) -> None:
    """The sizes of the pads of several gathers are one node of the graph, which has to stand before all of them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    data = [{"input": batch["x"], "y": batch["y"]} for batch in batches(2, (7, 8), (7, 8))]
    assert_equals_eager(model, data, mesh, passes=f"prefetch={ahead}")
