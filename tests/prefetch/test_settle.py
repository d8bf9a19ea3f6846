"""Steps of gradients' moves have the time of one block, and hold no more than its gradients."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tests.models import hugging_face
from tests.training import assert_equals_eager, batches
from torch import fx, nn

import meshweave as mw
from meshweave.check.completeness import check_complete
from meshweave.check.deadlock import check_deadlock
from meshweave.cost.hardware import load_profile
from meshweave.ir.collectives import STARTS, WAIT, functional
from meshweave.ir.graph import origin_of
from meshweave.ir.rank import SYMBOLS, RankGraph
from meshweave.optimize.prefetch.gather_ahead import block_of
from meshweave.train_step import TrainStep
from meshweave.whatif import simulate

NODES_OF_TWO = load_profile("h100").scaled(
    devices_per_node=2, latency=1e-6
)  # dp crosses nodes: its gradients move in two steps
SUMS = (functional.reduce_scatter_tensor.default, functional.all_reduce.default)


class Blocks(nn.Module):
    def __init__(self, depth: int = 6, width: int = 48) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def trained(mesh: str, **options: object) -> TrainStep:
    return assert_equals_eager(Blocks(), batches(2, (8, 48), (8, 48)), mesh, profile=NODES_OF_TWO, **options)


def ways(role: RankGraph) -> list[list[int]]:
    """By gradient the positions of its starts and waits in backward, in the order of the steps."""
    position = {node: i for i, node in enumerate(role.graph.nodes)}
    found = []
    output = next(iter(reversed(role.graph.nodes)))
    for (kind, _), node in zip(role.outputs, output.args[0], strict=True):  # type: ignore[arg-type]
        steps: list[fx.Node] = []
        while kind == "grad" and node.op == "call_function":
            steps += [node] if node.target in STARTS or node.target is WAIT else []
            operands = [n for n in node.all_input_nodes if n.target not in SYMBOLS]
            if len(operands) != 1:
                break
            (node,) = operands
        found += [[position[n] for n in reversed(steps)]] if steps else []
    return sorted(found)


@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2,fsdp=2", "dp=4"])
def test_values_are_those_of_eager_pytorch_and_the_program_is_proven(mesh: str) -> None:
    step = trained(mesh)
    check_complete(step.program.placed, step.program.roles)
    check_deadlock(step.program.roles)
    assert all(a < b for way in ways(step.program.rank) for a, b in pairwise(way))


def test_clipping_does_not_part_a_step_from_the_wait_for_it() -> None:
    """The norm needs all gradients at once: those of the last block are on their way to it in two steps."""
    model, batch, loss = hugging_face("llama", batch=4, heads=4, layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mw.compile(
        model, loss=loss, example=batch, optimizer=optimizer, mesh="dp=2,fsdp=2", profile=NODES_OF_TWO,
        clip_grad_norm=1.0,
    )  # fmt: skip
    assert max(map(len, ways(step.program.rank))) >= 4  # two starts, two waits
    check_complete(step.program.placed, step.program.roles)


def test_a_device_holds_the_unreduced_gradients_of_two_blocks_at_most() -> None:
    role = trained("fsdp=2").program.rank
    under_way: dict[fx.Node, str] = {}
    for node in role.graph.nodes:
        if node.target in SUMS and origin_of(node).phase == "backward":
            under_way[node] = block_of(node)
            assert len(set(under_way.values())) <= 2
        elif node.target is WAIT:
            under_way.pop(node.args[0], None)  # type: ignore[arg-type]
    assert len({block_of(n) for n in role.graph.nodes if n.target in SUMS}) >= 6


def test_memory_does_not_grow_with_the_devices_that_share_it() -> None:
    """All of a model's gradients on one axis took more than on two, for those waited for at their first steps."""
    peaks = {}
    for mesh in ("fsdp=8", "dp=2,fsdp=4"):
        model = Blocks(12, 512)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile(
            model, loss=lambda out, batch: out.sum(), example={"x": torch.empty(8, 512)}, optimizer=optimizer,
            mesh=mesh, profile="h100",
        )  # fmt: skip
        peaks[mesh] = simulate(step.program, "h100").peak_bytes
    assert peaks["fsdp=8"] < peaks["dp=2,fsdp=4"]
