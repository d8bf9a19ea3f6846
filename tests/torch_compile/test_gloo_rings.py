"""The drop-in with rings and chunks of the batch, in two processes on Gloo: tensor parallelism with sequence
parallelism by DTensor, the same steps as without torch.compile."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.torch_compile.test_gloo import run_job
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import functional
from meshweave.optimize.batch_split import SplitReport
from meshweave.optimize.decompose import DecomposeReport
from meshweave.optimize.overlap import OverlapReport
from meshweave.passes import Decompose, Overlap, Split
from meshweave.torch_compile import backend
from meshweave.torch_compile.agreement import communications
from meshweave.torch_compile.inductor import patches

pytestmark = pytest.mark.multiprocess
ALWAYS = [Decompose(when="always"), Overlap()]


class Block(nn.Module):
    """[batch, seq, 8], of which a rank holds its part of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def model() -> nn.Module:
    torch.manual_seed(0)
    styles = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
    return parallelize_module(Block(), init_device_mesh("cpu", (2,)), styles)


def steps(net: nn.Module, rank: int) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.25)
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(2):
        loss = (net(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same_steps(rank: int) -> Any:
    found: dict[str, Any] = {"eager": steps(model(), rank)}
    for inner in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        reports: list[Any] = []
        net = model()
        own = backend(cost=lambda node: 1e-3, inner=inner, report=reports.append, passes=ALWAYS)
        net.compile(backend=own, fullgraph=True)
        found[inner], codes = run_and_get_code(lambda net=net: steps(net, rank))
        found[f"{inner} early"] = [line for code in codes for line in read_before_wait(code)]
        orders = [r for r in reports if isinstance(r, OverlapReport)]
        found[f"{inner} taken"] = [r.num_taken for r in reports if isinstance(r, DecomposeReport)]
        found[f"{inner} ops"] = [sorted(row.op for row in r.collectives) for r in orders]
    return found


def read_before_wait(code: str) -> list[str]:
    """Lines of generated code that read what a communication brings before it has been waited for."""
    flying, found = set[str](), list[str]()
    for line in code.splitlines():
        names = set(re.findall(r"\bbuf\d+\b", line))
        if match := re.match(r"\s*(buf\d+) = torch.ops._c10d_functional", line):
            flying.add(match[1])
        elif "wait_tensor" in line:
            flying -= names
        elif names & flying and "assert_" not in line:
            found.append(line)
    return found


def test_early_reads_are_found() -> None:
    start = "    buf1 = torch.ops._c10d_functional.all_reduce.default(buf0, 'sum', '0')"
    wait, use = "    torch.ops._c10d_functional.wait_tensor.default(buf1)", "    kernel(buf1, buf2)"
    assert read_before_wait("\n".join([start, wait, use])) == []
    assert read_before_wait("\n".join([start, use, wait])) == [use]


@pytest.mark.slow
def test_steps_with_rings_are_those_of_eager() -> None:
    for found in run_job(same_steps):
        assert isinstance(found, dict), found
        for inner in ("aot_eager", "inductor"):
            assert found[inner] == pytest.approx(found["eager"], rel=1e-5)
            assert found[f"{inner} early"] == []
            assert found[f"{inner} taken"] == [2, 1]  # forward a gather and a scatter, backward a gather
            # a ring of two ranks has one message
            assert [ops.count("all_to_all_single") for ops in found[f"{inner} ops"]] == [2, 1]
            assert all("reduce_scatter_tensor" not in ops for ops in found[f"{inner} ops"])


# ---- chunks of the batch, and what ranks prove of each other ------------------------------------------------------


def split_steps(rank: int) -> Any:
    """A batch in two chunks: communication is slow, and one chunk's runs under the other's matmuls."""

    def cost(node: Any) -> float:
        if node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            a, b = (n.meta["val"] for n in node.args[-2:])
            return 1e-6 * a.numel() * b.shape[1]
        return 1e-5 * node.meta["val"].numel() if "_c10d" in str(node.target) else 1e-6

    found: list[Any] = [steps(model(), rank)]
    for inner in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        reports: list[Any] = []
        net = model()
        own = backend(cost=cost, inner=inner, report=reports.append, passes="split=2,decompose,overlap")
        net.compile(backend=own, fullgraph=True)
        losses = steps(net, rank)
        (split,) = [r for r in reports if isinstance(r, SplitReport)]
        found.append((losses, str(split), split.is_taken, [str(r) for r in reports]))
    return found


@pytest.mark.slow
def test_a_batch_in_chunks_takes_the_steps_of_eager() -> None:
    first, second = run_job(split_steps)
    for found in (first, second):
        assert isinstance(found, list), found
        eager, *others = found
        for losses, told, is_taken, _ in others:
            assert losses == pytest.approx(eager, rel=1e-5)
            assert is_taken, told
            assert told.startswith("split in 2 chunks")
    assert [reports for *_, reports in first[1:]] == [reports for *_, reports in second[1:]]


def test_blocks_are_no_part_of_the_order() -> None:
    """A permute of rank r sends to rank r + 1: the sizes differ between ranks, the events do not."""
    events = []
    for rows in ([0, 3], [3, 0]):
        graph = torch.fx.Graph()
        start = graph.call_function(functional.all_to_all_single.default, (graph.placeholder("x"), rows, rows, "g"))
        graph.output(graph.call_function(functional.wait_tensor.default, (start,)))
        found, channels = communications(graph)
        assert [group for group, _ in channels] == ["g"]
        events.append(found)
    assert events[0] == events[1]


def test_options_that_say_nothing() -> None:
    with pytest.raises(MeshweaveError, match="a batch is split into two or more chunks"):
        backend(passes="split=1")
    with pytest.raises(MeshweaveError, match="needs whole training steps"):
        backend(passes="overlap,recompute")
    assert backend(passes="decompose,split,overlap").settings.passes == (Split(), Decompose(), Overlap())
    assert backend(passes="exact,split=4").settings.passes == (Split((4,)), Overlap())
    assert backend(passes="none").settings.passes == ()
    assert backend().settings.passes == (Overlap(),)


def test_an_inductor_that_reads_messages_too_early_gets_no_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    with pytest.raises(MeshweaveError, match=r"rings in Inductor need torch 2\.13"):
        patches(backend(passes="decompose").settings, {})
    assert patches(backend().settings, {})
