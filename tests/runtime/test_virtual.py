"""Virtual devices: in which order they run, and how it ends."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training import batches, train
from torch import Tensor, fx, nn

import meshweave as mw
from meshweave.errors import StepError, VerifyError
from meshweave.ir.collectives import WAIT, functional, transfer
from meshweave.ir.graph import Input, Origin, Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph, Transfer
from meshweave.runtime.executor import compile_tasks
from meshweave.runtime.world import LocalExecutor

CPU = torch.device("cpu")
PAIR = Mesh("d=2")
ONE, OTHER = Mesh("", devices=[0]), Mesh("", devices=[1])
Build = Callable[[Any, fx.Node], fx.Node]


def role(device: int, build: Build, transfers: dict[str, Transfer] | None = None) -> RankGraph:
    """A role of one device: `build(call, x)` makes the output of the number x, `call(target, *args)` a node."""
    graph = fx.Graph()
    x = graph.placeholder("x")

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta["origin"] = Origin("forward", source=f"model.py:{len(graph.nodes)}")
        return node

    graph.output([build(call, x)])
    layout = Layout.replicated(PAIR, 0)
    item = Input("batch", "x", Spec((), torch.float32))
    meshes = (PAIR, ONE, OTHER)
    return RankGraph(
        graph, PAIR, (item,), (layout,), (("loss", ""),), (layout,), {}, (device,), meshes, transfers or {}
    )


def run(*roles: RankGraph) -> list[Any]:
    ranks = [compile_tasks(rank, CPU) for rank in roles]
    executor = LocalExecutor(ranks, [rank.devices[0] for rank in roles], CPU)
    envs = executor.environment()
    for i, (env, rank) in enumerate(zip(envs, ranks, strict=True)):
        env[rank.inputs[0]] = torch.tensor(float(i + 1))
    executor.begin(envs)
    executor.run("forward")
    return [env[rank.outputs[0]] for env, rank in zip(envs, ranks, strict=True)]


def all_reduce(call: Any, x: fx.Node) -> fx.Node:
    return call(WAIT, call(functional.all_reduce.default, x, "sum", "d"))


def test_devices_meet_in_collectives() -> None:
    assert [v.item() for v in run(role(0, all_reduce), role(1, all_reduce))] == [3.0, 3.0]


def test_compute_between_start_and_wait() -> None:
    """Both devices compute between the start and the wait of a large all-reduce; the values are right all the same."""

    def build(call: Any, x: fx.Node) -> fx.Node:
        started = call(functional.all_reduce.default, call(torch.ops.aten.expand.default, x, [1 << 20]), "sum", "d")
        held = call(operator.pos, x)
        for _ in range(20):
            held = call(torch.ops.aten.mul.Tensor, held, 1.0)
        return call(torch.ops.aten.add.Tensor, call(WAIT, started), held)

    found = run(role(0, build), role(1, build))
    assert [(v[0].item(), v[-1].item()) for v in found] == [(4.0, 4.0), (5.0, 5.0)]


def test_starts_that_do_not_belong_together_are_refused_before_anything_runs() -> None:
    with pytest.raises(VerifyError, match="group"):
        run(role(0, all_reduce), role(1, lambda call, x: call(operator.pos, x)))


def test_devices_that_wait_for_each_other_are_told_instead_of_hanging() -> None:
    """Each waits for what the other sends before it sends itself."""
    transfers = {
        "t0": Transfer(Layout.replicated(ONE, 0), Layout.replicated(OTHER, 0), Spec((), torch.float32)),
        "t1": Transfer(Layout.replicated(OTHER, 0), Layout.replicated(ONE, 0), Spec((), torch.float32)),
    }

    def first(call: Any, x: fx.Node) -> fx.Node:
        got = call(WAIT, call(transfer, None, "t1"))
        call(WAIT, call(transfer, got, "t0"))
        return got

    def second(call: Any, x: fx.Node) -> fx.Node:
        got = call(WAIT, call(transfer, None, "t0"))
        call(WAIT, call(transfer, got, "t1"))
        return got

    with pytest.raises(StepError, match="devices wait for each other") as error:
        run(role(0, first, transfers), role(1, second, transfers))
    assert error.value.got.count("waits for") >= 3
    assert "model.py:" in error.value.got


def test_a_failure_is_that_of_its_device() -> None:
    def fail(x: Tensor) -> Tensor:
        raise RuntimeError("no memory left")

    with pytest.raises(StepError, match="fail failed on device 1") as error:
        run(role(0, all_reduce), role(1, lambda call, x: all_reduce(call, call(fail, x))))
    assert error.value.got == "RuntimeError: no memory left"
    assert error.value.where.startswith("model.py:")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2,tp=2", "pp=2,dp=2"])
def test_several_virtual_devices_on_one_gpu_equal_the_cpu(mesh: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 6))
    data = [{"input": b["x"], **b} for b in batches(5, (8, 6), (8, 6))]
    _, expected = train(model, data, mesh)
    _, losses = train(model, data, mesh, device="cuda")
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    assert isinstance(mw.__version__, str)
