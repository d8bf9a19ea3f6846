"""Parameters that are gathered in the graph: what torch.compile sees, and the same steps as fully_shard takes."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager, boxed_nop
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import meshweave as mw
from meshweave.errors import MeshweaveError
from meshweave.torch_compile.fsdp import shard_in_graph

# torch 2.13 warns of itself: Dynamo instantiates an autograd.Function while it traces one.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class Net(nn.Module):
    """Two linear layers and a norm; 12 rows do not divide over 8 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(8),
            nn.Linear(8, 12, bias=False),
            nn.Linear(12, 8, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.norm(x)))).sum()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """4 x 2 ranks of which this process is the first; the others do nothing."""
    dist.init_process_group("fake", rank=0, world_size=8)
    yield init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    torch._dynamo.reset()
    dist.destroy_process_group()


@pytest.fixture
def mesh_of_fully_shard(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """For tests that make modules by fully_shard, which a drop-in of a later test would find."""
    yield mesh
    torch._dynamo.reset()
    gc.collect()


def traced(module: nn.Module, x: Tensor) -> list[Counter[str]]:
    """How many collectives the forward and the backward graph have, by op."""
    found: list[Counter[str]] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        names = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
        found.append(Counter(name.split(".")[1] for name in names if name.startswith("_c10d_functional.")))
        return boxed_nop(gm, inputs)

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        return aot_eager(gm, inputs, fw_compiler=keep, bw_compiler=keep)

    torch.compile(module, backend=backend, fullgraph=True)(x).backward()
    return found


def test_gathers_and_reductions_are_in_the_graph(mesh: DeviceMesh) -> None:
    net = shard_in_graph(Net(), mesh["dp"])
    forward, backward = traced(net, torch.randn(2, 8))
    assert forward == {"all_gather_into_tensor": 4, "wait_tensor": 4}
    # Gathered again is what the backward pass reads: the norm's weight and bias, down's weight, up's weight.
    assert backward == {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4, "wait_tensor": 8}
    assert all(p.grad is not None and p.grad.placements == (Shard(0),) for p in net.parameters())


def test_without_resharding_nothing_is_gathered_again(mesh: DeviceMesh) -> None:
    net = shard_in_graph(Net(), mesh["dp"], reshard_after_forward=False)
    _, backward = traced(net, torch.randn(2, 8))
    assert backward == {"reduce_scatter_tensor": 4, "wait_tensor": 4}


def test_tensor_parallel_parameters_are_cut_once_more(mesh: DeviceMesh) -> None:
    net = Net()
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    shard_in_graph(net, mesh["dp"])
    up, down = dict(net.named_parameters())["up.weight"], dict(net.named_parameters())["down.weight"]
    assert isinstance(up, DTensor)
    assert up.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert (up.shape, up.to_local().shape) == ((12, 8), (2, 8))
    assert isinstance(down, DTensor)
    assert down.placements == (Shard(0), Shard(1))
    assert (down.shape, down.to_local().shape) == ((8, 12), (2, 6))
    forward, backward = traced(net, torch.randn(2, 8))
    assert forward["all_reduce"] == 1  # the sum over tp after down
    assert backward["all_reduce"] == 1  # and before up
    assert backward["reduce_scatter_tensor"] == 4
    assert up.grad is not None
    assert up.grad.placements == up.placements


def test_the_parameters_keep_their_names_and_whole_shapes(mesh: DeviceMesh) -> None:
    net = Net()
    before = {name: p.shape for name, p in net.named_parameters()}
    shard_in_graph(net, mesh["dp"])
    assert {name: p.shape for name, p in net.named_parameters()} == before
    assert set(net.state_dict()) == set(before)
    assert dict(net.named_parameters())["up.weight"].to_local().shape == (3, 8)
    assert net.up.weight.shape == (12, 8)
    assert not isinstance(net.up.weight, DTensor)


def test_a_parameter_of_two_modules_stays_one(mesh: DeviceMesh) -> None:
    pair = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    pair[1].weight = pair[0].weight
    shard_in_graph(pair, mesh["dp"])
    assert len(list(pair.parameters())) == 1
    assert pair[0]._parameters["weight"] is pair[1]._parameters["weight"]


def test_parameters_are_gathered_in_the_dtype_that_is_asked_for(mesh: DeviceMesh) -> None:
    net = shard_in_graph(Net(), mesh["dp"], param_dtype=torch.bfloat16)
    assert net.up.weight.dtype == torch.bfloat16
    traced(net, torch.randn(2, 8, dtype=torch.bfloat16))
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}


def test_a_mesh_of_two_dims_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(MeshweaveError, match=r"sharded along a single dim(.|\n)*a mesh of 2 dims, \('dp', 'tp'\)"):
        shard_in_graph(Net(), mesh)


def test_a_copy_reads_its_own_parameters(mesh: DeviceMesh) -> None:
    net = shard_in_graph(Net(), mesh["dp"])
    other = copy.deepcopy(net)
    with torch.no_grad():
        dict(other.named_parameters())["up.weight"].zero_()
    assert other.up.weight.abs().sum() == 0
    assert dict(net.named_parameters())["up.weight"].to_local().abs().sum() > 0


@pytest.mark.parametrize("door", [mw.backend, mw.inductor_pass])
def test_fully_shard_is_named_where_the_drop_in_is_made(
    mesh_of_fully_shard: DeviceMesh, door: Callable[..., Any]
) -> None:
    """A graph break in the first hook keeps torch from compiling anything of this model: no backend is called."""
    net = Net()
    for part in (net.up, net):
        fully_shard(part, mesh=mesh_of_fully_shard["dp"])
    with pytest.warns(UserWarning, match=r"sharded by fully_shard \(Linear, Net\)(.|\n)*mw.shard_in_graph"):
        door(cost="h100")
    del net, part
    gc.collect()
    door(cost="h100")  # nothing to warn of


def test_fully_shard_after_the_drop_in_is_made_is_named_by_the_first_graph(mesh_of_fully_shard: DeviceMesh) -> None:
    reports: list[Any] = []
    backend = mw.backend(cost="h100", inner="aot_eager", report=reports.append)
    net = Net()
    fully_shard(net, mesh=mesh_of_fully_shard["dp"])
    compiled = torch.compile(net, backend=backend)
    with pytest.warns(UserWarning, match=r"sharded by fully_shard \(Net\)") as caught:
        compiled(torch.randn(2, 8)).backward()
    assert sum("fully_shard" in str(warning.message) for warning in caught) == 1
    assert not reports


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_what_the_warning_recommends_is_reported_on(mesh: DeviceMesh, inner: str) -> None:
    reports: list[Any] = []
    net = mw.shard_in_graph(Net(), mesh["dp"])
    compiled = torch.compile(net, backend=mw.backend(cost="h100", inner=inner, report=reports.append))
    compiled(torch.randn(2, 8)).backward()
    assert [type(report) for report in reports] == [mw.OverlapReport] * 2  # forward, backward
    assert all(report.collectives for report in reports)
