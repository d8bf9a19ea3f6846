"""The drop-in in two processes on Gloo: the same steps as without it, and ranks that do not fit each other."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.processes import CONTEXT, free_port
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshweave.ir.collectives import WAIT, functional
from meshweave.optimize.overlap import OverlapReport
from meshweave.runtime.cluster import init_from_env, shutdown
from meshweave.torch_compile import backend
from meshweave.torch_compile.fsdp import shard_in_graph

pytestmark = pytest.mark.multiprocess
SECONDS_TO_END = 280.0


def run_job(job: Callable[[int], Any]) -> list[Any]:
    """What `job` returned or raised (as text) on each of two ranks."""
    pipes, processes, port = [], [], free_port()
    for rank in (0, 1):
        ours, theirs = CONTEXT.Pipe()
        processes.append(CONTEXT.Process(target=main, args=(theirs, rank, port, job)))
        processes[-1].start()
        pipes.append(ours)
        theirs.close()
    try:
        found = []
        for pipe in pipes:
            assert pipe.poll(SECONDS_TO_END), f"still running after {SECONDS_TO_END:g} s: {found}"
            found.append(pipe.recv())
        return found
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
            process.join()


def main(pipe: Connection, rank: int, port: int, job: Callable[[int], Any]) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    init_from_env("gloo")
    try:
        outcome = job(rank)
    except BaseException as error:
        outcome = str(error)
    pipe.send(outcome)
    shutdown()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def model() -> Net:
    torch.manual_seed(0)
    return Net()


def steps(net: nn.Module, rank: int) -> list[float]:
    """Losses of four steps on a batch of this rank's own."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(4):
        loss = (net(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same_steps(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    reports: list[OverlapReport] = []

    def cost(node: fx.Node) -> float:
        return (rank + 1) * 1e-3 * (1 + len(node.name) % (2 + rank))  # measured on each rank, and different

    reference = model()
    for block in reference.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(reference, mesh=mesh)
    ordered = shard_in_graph(model(), mesh)
    ordered.compile(backend=backend(cost=cost, inner="aot_eager", report=reports.append), fullgraph=True)
    losses = [steps(net, rank) for net in (reference, ordered)]
    return {
        "losses": losses,
        "reports": [str(report) for report in reports],
        "num": [len(r.collectives) for r in reports],
    }


def test_steps_are_those_of_fully_shard_to_the_bit_and_ranks_decide_alike() -> None:
    first, second = run_job(same_steps)
    assert isinstance(first, dict), first
    assert isinstance(second, dict), second
    for found in (first, second):
        reference, ordered = found["losses"]
        assert reference == ordered
        assert reference[-1] < reference[0]
    assert first["losses"] != second["losses"]  # each rank has a batch of its own
    # The figures of rank 0, on both: the same orders, seconds and reasons.
    assert first["reports"] == second["reports"]
    assert len(first["num"]) == 2
    assert min(first["num"]) > 0


def gathered(x: Tensor) -> Tensor:
    group = dist.group.WORLD.group_name
    return WAIT(functional.all_gather_into_tensor.default(x, 2, group)) * 2


def misfits(rank: int) -> Any:
    """Ranks that decide for themselves, that compute or communicate different things, and one that does not compile at
    all."""
    reports: list[OverlapReport] = []

    def one(x: Tensor) -> Tensor:
        return gathered(torch.sin(x) if rank else torch.cos(x))

    def twice(x: Tensor) -> Tensor:
        return gathered(gathered(x)) if rank else gathered(x)

    def compiled(function: Callable[[Tensor], Tensor] = one, **kwargs: Any) -> Any:
        torch._dynamo.reset()
        own = backend(cost=lambda node: 1e-3, inner="aot_eager", report=reports.append, **kwargs)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                values = torch.compile(function, backend=own)(torch.zeros(2)).tolist()
            return values, [str(w.message) for w in caught if "meshweave" in str(w.message)]
        except Exception as error:
            return str(error)

    # As the stages of a pipeline do, though over a group that both are in.
    alone = compiled(ranks=(rank,))
    uneven = compiled(timeout_seconds=20)
    other = compiled(twice, timeout_seconds=20)
    absent = compiled(timeout_seconds=1) if rank == 0 else ""
    count = len(reports)
    group = [dist.new_group([each]) for each in (0, 1)][rank].group_name

    def among_themselves(x: Tensor) -> Tensor:
        return WAIT(functional.all_reduce.default(x, "sum", group)) + 1

    own = compiled(among_themselves, timeout_seconds=1) if rank == 0 else ""  # rank 1 is not in the group
    return alone, other, absent, count, uneven, own


def test_ranks_that_do_not_fit_each_other_are_named_and_nobody_hangs() -> None:
    first, second = run_job(misfits)
    assert first[0] == second[0] == ([2.0, 2.0, 0.0, 0.0], [])
    assert first[3] == second[3] == 1
    for values, (warning,) in (first[4], second[4]):  # uneven shards are padded on some ranks: the order stays
        assert values == [2.0, 2.0, 0.0, 0.0]
        assert "leaves a graph in its order: rank 1 and rank 0 compute other things" in warning
    for text in (first[1], second[1]):
        assert "ranks compile different graphs" in text
        assert "where: rank 1\n" in text
    assert first[5] == ([1.0, 1.0], [])
    assert "ranks did not come to agree" in first[2]
    assert "where: rank 1\n  got: nothing in 1 s" in first[2]
