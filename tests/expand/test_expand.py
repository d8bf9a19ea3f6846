"""Expansion: the text of rank graphs, sizes that are bound per rank, and graphs that do not grow with the mesh."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from tests.training import assert_equals_eager, batches, mse
from torch import Tensor, nn

from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.cost.hardware import AlphaBeta
from meshweave.ir.collectives import STARTS, WAIT
from meshweave.ir.graph import Spec, op_name
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import SYMBOLS, bind_symbols
from meshweave.place.plans import Plan
from meshweave.program import Program

SGD = partial(torch.optim.SGD, lr=0.1)


class MLP(nn.Module):
    def __init__(self, width: int = 4, hidden: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def program(model: nn.Module, example: Any, mesh: str, plan: Plan | None = None) -> Program:
    spec = read_optimizer(SGD(model.parameters()), model)
    return build_program(StepSource(model, mse), example, spec, Target(Mesh(mesh), plan, AlphaBeta()), CaptureOptions())


def meta_mlp(mesh: str, size: int = 64) -> Program:
    with torch.device("meta"):
        example = {"x": torch.empty(size, size), "y": torch.empty(size, size)}
        return program(MLP(size, 2 * size), example, mesh)


GOLDEN = """\
weight: float32[1,3] = input
bias: float32[1] = input
batch_input: float32[2,3] = input
batch_y: float32[2,2] = input
scalar_draw: int64[] = input
scalar_update0_size: float64[] = input
contiguous_default = aten.contiguous(weight)
all_gather_into_tensor_default = _c10d_functional.all_gather_into_tensor(contiguous_default, 2, fsdp)
wait_tensor_default: float32[2,3] = _c10d_functional.wait_tensor(all_gather_into_tensor_default)
permute_default: float32[3,2] = aten.permute(wait_tensor_default, [1, 0])
mm_default: float32[2,2] = aten.mm(batch_input, permute_default)
contiguous_default_1 = aten.contiguous(bias)
all_gather_into_tensor_default_1 = _c10d_functional.all_gather_into_tensor(contiguous_default_1, 2, fsdp)
wait_tensor_default_1: float32[2] = _c10d_functional.wait_tensor(all_gather_into_tensor_default_1)
add_tensor: float32[2,2] = aten.add.Tensor(mm_default, wait_tensor_default_1)
sub_tensor: float32[2,2] = aten.sub.Tensor(add_tensor, batch_y)
pow_tensor_scalar: float32[2,2] = aten.pow.Tensor_Scalar(sub_tensor, 2)
sum_dim_int_list: float32[] = aten.sum.dim_IntList(pow_tensor_scalar, [0, 1])
div_tensor: float32[] = aten.div.Tensor(sum_dim_int_list, 8)
contiguous_default_2 = aten.contiguous(div_tensor)
all_reduce_default = _c10d_functional.all_reduce(contiguous_default_2, sum, fsdp)
"""


def test_the_text_of_a_rank_graph() -> None:
    """Gathers before use, the loss's reduction begun where it is made and waited for where forward ends."""
    example = {"input": torch.randn(4, 3), "y": torch.randn(4, 2)}
    lines = program(nn.Linear(3, 2), example, "fsdp=2").rank.text()
    assert lines.startswith(GOLDEN)
    rest = lines.removeprefix(GOLDEN).splitlines()
    assert rest[0] == "wait_tensor_default_2: float32[] = _c10d_functional.wait_tensor(all_reduce_default)"
    assert not [line for line in rest[1:] if "all_reduce_default" in line]
    assert rest[-5:] == [
        "mul_tensor_1: float32[1,3] = aten.mul.Tensor(wait_tensor_default_4, scalar_update0_size)",
        "add_tensor_1: float32[1,3] = aten.add.Tensor(weight, mul_tensor_1)",
        "mul_tensor_2: float32[1] = aten.mul.Tensor(reshape_default, scalar_update0_size)",
        "add_tensor_2: float32[1] = aten.add.Tensor(bias, mul_tensor_2)",
        "return [wait_tensor_default_2, wait_tensor_default_4, reshape_default, add_tensor_1, add_tensor_2]",
    ]


def test_on_one_device_nothing_moves() -> None:
    made = program(MLP(), batches(1, (3, 4), (3, 4))[0], "")
    before = Counter(op_name(n.target).replace("view", "reshape") for n in made.captured.graph.nodes)
    after = Counter(op_name(n.target) for n in made.rank.graph.nodes)
    assert after == before
    assert not any(n.target in STARTS or n.target in SYMBOLS for n in made.rank.graph.nodes)


@pytest.mark.parametrize(
    ("one", "other"),
    [("fsdp=2", "fsdp=64"), ("dp=2", "dp=32"), ("tp=2", "tp=16"), ("dp=2,fsdp=2,tp=2", "dp=4,fsdp=4,tp=8")],
)
def test_the_graph_does_not_grow_with_the_axes(one: str, other: str) -> None:
    small, large = meta_mlp(one).rank.graph, meta_mlp(other).rank.graph
    assert [op_name(n.target) for n in small.nodes] == [op_name(n.target) for n in large.nodes]


def test_uneven_pieces_add_symbols_but_none_per_device() -> None:
    small, large = (len(meta_mlp(f"fsdp={n}", 63).rank.graph.nodes) for n in (4, 32))
    assert small == large


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2", "tp=2", "dp=2,tp=2", "fsdp=3,tp=2", "dp=2,fsdp=2,tp=2"])
def test_every_collective_has_one_wait_that_all_its_users_read(mesh: str) -> None:
    made = program(MLP(), batches(1, (5, 4), (5, 4))[0], mesh)
    nodes = list(made.rank.graph.nodes)
    starts = [n for n in nodes if n.target in STARTS]
    assert starts
    for start in starts:
        (user,) = start.users
        assert user.target is WAIT
        assert nodes.index(start) < nodes.index(user)
    assert sum(n.target is WAIT for n in nodes) == len(starts)


def test_groups_are_named_by_axes() -> None:
    made = program(MLP(), batches(1, (8, 4), (8, 4))[0], "dp=2,fsdp=2")
    groups = {n.args[-1] for n in made.rank.graph.nodes if n.target in STARTS}
    assert groups == {"fsdp", "dp,fsdp"}


def test_symbolic_sizes_and_offsets_are_bound_per_rank() -> None:
    """Dropout and arange need to know where a piece lies; 5 rows on 3 devices are 2, 2 and 1."""

    class Ramp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w + torch.arange(5.0).view(5, 1)

    example = batches(1, (5, 4), (5, 4))[0]
    rank = program(Ramp(), example, "dp=3").rank
    bound = [bind_symbols(rank.graph, rank.mesh.coordinates(i)) for i in range(3)]
    by_op = {op_name(n.target): [b[n] for b in bound] for n in bound[0] if op_name(n.target) != "linear"}
    assert by_op["piece_size"] == [2, 2, 1]
    assert by_op["piece_offset"] == [0, 2, 4]
    assert len([n for n in rank.graph.nodes if n.target in SYMBOLS and op_name(n.target) == "piece_offset"]) == 1
    assert_equals_eager(Ramp(), [example], "dp=3")


def test_specs_of_a_rank_graph_are_those_of_the_largest_piece() -> None:
    rank = program(MLP(), batches(1, (5, 4), (5, 4))[0], "dp=3,tp=2").rank
    shapes = {i.name: n.meta["spec"] for n, i in zip(rank.graph.nodes, rank.inputs, strict=False)}
    assert shapes["x"] == Spec((2, 4), torch.float32)
    assert shapes["up.weight"] == Spec((3, 4), torch.float32)
    layouts = {item.name: layout for item, layout in zip(rank.inputs, rank.layouts, strict=True)}
    assert layouts["x"].local_shape((5, 4)) == (2, 4)


def test_the_loss_and_buffers_are_due_before_the_update() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    example = {"input": torch.randn(4, 4), "y": torch.randn(4, 4)}
    rank = program(model, example, "dp=2").rank
    nodes = list(rank.graph.nodes)
    results = dict(zip(rank.outputs, nodes[-1].args[0], strict=True))
    first = next(i for i, n in enumerate(nodes) if n.op == "call_function" and n.meta["origin"].phase == "update")
    for key in [("loss", ""), ("buffer", "1.running_mean"), ("buffer", "1.running_var")]:
        assert nodes.index(results[key]) < first
    assert any(nodes.index(n) >= first for key, n in results.items() if key[0] == "grad")
