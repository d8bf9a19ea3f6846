"""Rings on anyone's graphs: every rank's graph is run in lockstep with the others', by an interpreter that knows none
of ours, and compared with the graph as it was."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.overlap.graphs import (
    ATEN,
    C10D,
    STARTS,
    WAIT,
    Builder,
    Ran,
    assert_same_results,
    by_name,
    handed_in,
    random_inputs,
    run,
)
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshweave as mw
from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import collective_of
from meshweave.optimize.batch_split import split_batch
from meshweave.optimize.decompose import DecomposeOptions, DecomposeReport, decompose_graph
from meshweave.optimize.overlap.prices import CostNumbers

EXCHANGE = C10D.all_to_all_single.default
H100 = mw.load_profile("h100")
Mesh = dict[str, tuple[tuple[int, ...], ...]]


def one_group(n: int, name: str = "g") -> Mesh:
    return {name: (tuple(range(n)),)}


def always(**changes: Any) -> DecomposeOptions:
    return DecomposeOptions(when="always", **{key: (value,) for key, value in changes.items()})


def on_every_rank(
    gm: fx.GraphModule, mesh: Mesh, options: DecomposeOptions | None = None, **arguments: Any
) -> list[tuple[fx.GraphModule, DecomposeReport]]:
    num_ranks = 1 + max(rank for groups in mesh.values() for group in groups for rank in group)
    made = []
    for rank in range(num_ranks):
        groups = {name: next(g for g in groups if rank in g) for name, groups in mesh.items()}
        made.append(decompose_graph(gm, groups=groups, rank=rank, options=options or always(), **arguments))
    return made


def check(gm: fx.GraphModule, mesh: Mesh, options: DecomposeOptions | None = None) -> list[fx.GraphModule]:
    """Take apart for every rank and compare; put in order by the overlap pass, and compare again. The input stays."""
    text = gm.graph.python_code("self").src
    made = [one for one, _ in on_every_rank(gm, mesh, options)]
    assert gm.graph.python_code("self").src == text
    inputs = random_inputs(gm, 0, len(made))
    expected = run(gm, inputs, mesh)
    assert_same_results(expected, run(made, inputs, mesh))
    ordered = []
    for rank, one in enumerate(made):
        groups = {name: next(g for g in groups if rank in g) for name, groups in mesh.items()}
        ordered.append(mw.overlap(one, cost=lambda node: 1e-3, groups=groups)[0])
    assert_same_results(expected, run(ordered, inputs, mesh))
    return made


def count(gm: fx.GraphModule, *targets: Any) -> int:
    return sum(node.target in targets for node in gm.graph.nodes)


def shapes(gm: fx.GraphModule, target: Any) -> list[tuple[int, ...]]:
    return [tuple(node.meta["val"].shape) for node in gm.graph.nodes if node.target is target]


# by hand


def gather_matmul(n: int, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    b = Builder(one_group(n))
    x, w = b.placeholder("x", (4, 8), dtype), b.placeholder("w", (8, 6), dtype)
    full = b.wait("full", b.gather("gather", x, "g"))
    return b.done(b.mm("product", full, w))


def matmul_scatter(n: int, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    b = Builder(one_group(n))
    x, w = b.placeholder("x", (4 * n, 8), dtype), b.placeholder("w", (8, 6), dtype)
    return b.done(b.wait("own", b.scatter("scatter", b.mm("product", x, w), "g")))


def matmul_reduce(n: int, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    b = Builder(one_group(n))
    x, w = b.placeholder("x", (4 * n, 8), dtype), b.placeholder("w", (8, 6), dtype)
    return b.done(b.wait("whole", b.reduce("reduce", b.mm("product", x, w), "g")))


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("way", ["direct", "cyclic", "bidirectional"])
def test_a_gather_before_a_matmul(way: str, n: int) -> None:
    made = check(gather_matmul(n), one_group(n), always(all_gather=way))[0]
    assert count(made, EXCHANGE) == n - 1
    assert count(made, C10D.all_gather_into_tensor.default) == 0
    assert shapes(made, ATEN.mm.default) == [(4, 6)] * n


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("way", ["direct", "ring"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matmul_before_a_reduce_scatter(way: str, n: int, dtype: torch.dtype) -> None:
    made = check(matmul_scatter(n, dtype), one_group(n), always(reduce_scatter=way))[0]
    assert count(made, EXCHANGE) == n - 1
    assert count(made, C10D.reduce_scatter_tensor.default) == 0
    assert shapes(made, ATEN.mm.default) == [(4, 6)] * n
    assert {node.meta["val"].dtype for node in made.graph.find_nodes(op="call_function", target=ATEN.add.Tensor)} == {
        torch.float32
    }
    # partial sums that others add to are sent in float32, what goes to the owner of a chunk in the operand's dtype
    sent = {node.meta["val"].dtype for node in made.graph.find_nodes(op="call_function", target=EXCHANGE)}
    assert sent == {torch.float32 if way == "ring" and n > 2 else dtype}


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_matmul_before_an_all_reduce(n: int) -> None:
    made = check(matmul_reduce(n), one_group(n))[0]
    assert count(made, EXCHANGE) == n - 1
    assert count(made, C10D.all_reduce.default) == 0
    assert count(made, C10D.all_gather_into_tensor.default) == 1
    made = check(matmul_reduce(n), one_group(n), always(all_reduce="pipelined"))[0]
    assert count(made, C10D.all_reduce.default) == 2


def test_groups_of_a_larger_mesh_and_one_with_ranks_in_another_order() -> None:
    mesh: Mesh = {"a": ((0, 1), (3, 2)), "b": ((0, 2), (1, 3))}
    b = Builder(mesh)
    x, w, v = b.placeholder("x", (4, 8)), b.placeholder("w", (8, 6)), b.placeholder("v", (6, 8))
    h = b.relu("h", b.mm("up", b.wait("full", b.gather("gather", x, "a")), w))
    gm = b.done(b.wait("own", b.scatter("scatter", b.mm("down", h, v), "b")))
    made = check(gm, mesh)
    assert [node.args[1:] for node in made[0].graph.nodes if node.target is EXCHANGE] == [
        ([0, 4], [0, 4], "a"),
        ([0, 4], [0, 4], "b"),
    ]
    assert [node.args[1:] for node in made[2].graph.nodes if node.target is EXCHANGE] == [
        ([4, 0], [4, 0], "a"),
        ([4, 0], [4, 0], "b"),
    ]


def test_a_weight_that_is_gathered_later_is_gathered_before_the_ring() -> None:
    """As FSDP in front of tensor parallelism has it: each weight is gathered right before it is used."""
    mesh: Mesh = {"tp": ((0, 1), (2, 3)), "fsdp": ((0, 2), (1, 3))}
    b = Builder(mesh)
    x, *weights = b.placeholder("x", (4, 8)), b.placeholder("w", (4, 6)), b.placeholder("v", (4, 6))
    full = b.wait("full", b.gather("gather", x, "tp"))
    outputs = []
    for i, w in enumerate(weights):
        whole = b.wait(f"weight_{i}", b.gather(f"gather_weight_{i}", w, "fsdp"))
        outputs.append(b.mm(f"product_{i}", full, whole))
    gm = b.done(*outputs)
    options = always(all_gather="direct")
    _, report = on_every_rank(gm, mesh, options)[0]
    rows = {row.name: row for row in report.rows}
    assert rows["gather"].matmuls == ("product_0", "product_1")
    check(gm, mesh, options)


# what is left as it is


def test_memory_that_is_written_to_is_left_alone() -> None:
    b = Builder(one_group(2))
    x, w = b.placeholder("x", (4, 8)), b.placeholder("w", (8, 6))
    full = b.wait("full", b.gather("gather", x, "g"))
    b.call("more", ATEN.add_.Tensor, w, 1.0)
    gm = b.done(b.mm("product", full, w))
    _, report = on_every_rank(gm, one_group(2))[0]
    assert report.num_taken == 0
    assert "product accesses memory that is written" in report.rows[0].reason
    check(gm, one_group(2))
    b = Builder(one_group(2))
    x, w = b.placeholder("x", (4, 8)), b.placeholder("w", (8, 6))
    b.call("more", ATEN.add_.Tensor, x, 1.0)
    full = b.wait("full", b.gather("gather", x, "g"))
    _, report = on_every_rank(b.done(b.mm("product", full, w)), one_group(2))[0]
    assert report.rows[0].reason == "it accesses memory that is written"


def test_random_numbers_stay_where_they_are() -> None:
    b = Builder(one_group(2))
    x, w = b.placeholder("x", (4, 8)), b.placeholder("w", (8, 6))
    full = b.wait("full", b.gather("gather", x, "g"))
    noise = b.call("noise", ATEN.rand.default, [8, 6])
    gm = b.done(b.mm("product", full, b.add("noisy", w, noise)))
    _, report = on_every_rank(gm, one_group(2))[0]
    assert report.num_taken == 0
    assert report.rows[0].reason == "noisy, an operand of product, is computed later"


# DTensor


class Block(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width, bias=bias), nn.Linear(2 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def traced(n: int, sequence_dim: int, bias: bool) -> list[fx.GraphModule]:
    """Forward and backward of a block under tensor and sequence parallelism over n ranks, as of rank 0."""
    width, found = 4 * n, list[fx.GraphModule]()

    def keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graph = fx.Graph()
        graph.output(graph.graph_copy(gm.graph, {}))
        found.append(fx.GraphModule(gm, graph))
        return make_boxed_func(gm.forward)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
    try:
        torch._dynamo.reset()
        styles: dict[str, Any] = {
            "norm": SequenceParallel(sequence_dim=sequence_dim),
            "up": ColwiseParallel(input_layouts=Shard(sequence_dim)),
            "down": RowwiseParallel(output_layouts=Shard(sequence_dim)),
        }
        block = parallelize_module(Block(width, bias), init_device_mesh("cpu", (n,)), styles)
        backend = aot_autograd(
            fw_compiler=keep,
            bw_compiler=keep,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        x = torch.randn(2, 2, width, requires_grad=True)
        torch.compile(block, backend=backend)(x).sum().backward()
        return found
    finally:
        dist.destroy_process_group()


def test_the_batch_of_a_block_whose_sequence_is_sharded_is_split() -> None:
    """Blocks that are joined and dealt along the sequence, beside the rows of the batch."""
    for gm in traced(2, 1, False):
        (group,) = groups_in(gm)
        made, report = split_batch(gm)
        assert report.num_collectives == 2, report
        assert count(made, C10D.all_gather_into_tensor.default, C10D.reduce_scatter_tensor.default) == 4
        inputs = random_inputs(gm, 0, 2)
        close(run(gm, inputs, one_group(2, group)), run(made, inputs, one_group(2, group)))


def groups_in(gm: fx.GraphModule) -> set[str]:
    return {str(node.args[-1]) for node in gm.graph.nodes if node.target in STARTS}


@pytest.mark.slow_rows("2-1-True")
@pytest.mark.parametrize(("n", "sequence_dim", "bias"), [(2, 1, True), (3, 1, False), (4, 0, True)])
def test_a_block_of_dtensor_forward_and_backward(n: int, sequence_dim: int, bias: bool) -> None:
    forward, backward = traced(n, sequence_dim, bias)
    for gm in (forward, backward):
        (group,) = groups_in(gm)
        mesh = one_group(n, group)
        made = on_every_rank(gm, mesh)
        assert [row.is_taken for row in made[0][1].rows] == [True, True]
        graphs = [one for one, _ in made]
        assert count(graphs[0], EXCHANGE) == 2 * (n - 1)
        assert count(graphs[0], C10D.all_gather_into_tensor.default, C10D.reduce_scatter_tensor.default) == 0
        inputs = random_inputs(gm, 0, n)
        close(run(gm, inputs, mesh), run(graphs, inputs, mesh))


def close(before: Ran, after: Ran) -> None:
    """Equal but for rounding: the norm's mean is no integer. Shapes and strides are as they were."""
    for want, got in zip(before.results(), after.results(), strict=True):
        for x, y in zip(want, got, strict=True):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
            torch.testing.assert_close(y, x, rtol=1e-4, atol=1e-4)


# by cost


def chain(n: int = 4) -> fx.GraphModule:
    """A column- and a row-parallel linear over a sequence that is sharded: nothing else hides their communication."""
    b = Builder(one_group(n))
    x = b.placeholder("x", (512, 1024), torch.bfloat16)
    w, v = b.placeholder("w", (1024, 4096), torch.bfloat16), b.placeholder("v", (4096, 1024), torch.bfloat16)
    h = b.relu("h", b.mm("up", b.wait("full", b.gather("gather", x, "g")), w))
    return b.done(b.wait("own", b.scatter("scatter", b.mm("down", h, v), "g")))


def costs(matmul: float, message: float) -> Callable[[fx.Node], float]:
    """A matmul by its rows, communication by the bytes handed in: seconds per row, per MiB; nothing else takes time."""

    def cost(node: fx.Node) -> float:
        if node.target is ATEN.mm.default:
            return matmul * node.meta["val"].shape[0]
        if node.target in STARTS:
            times = 3 if node.target is C10D.all_gather_into_tensor.default else 1
            return message * times * handed_in(node) / 2**20
        return 0.0

    return cost


def test_a_callable_is_asked_for_the_nodes_of_candidates() -> None:
    gm = chain()
    groups = {"g": range(4)}
    made, report = decompose_graph(gm, cost=costs(1e-6, 1e-3), groups=groups, rank=1)
    assert [row.is_taken for row in report.rows] == [True, True]
    before, after = (mw.overlap(g, cost=costs(1e-6, 1e-3), groups=groups)[1].seconds for g in (gm, made))
    assert after < 0.75 * before
    assert re.match("2 of 2 collectives decomposed: [^;]+", str(report))


def test_nothing_is_done_where_it_does_not_gain() -> None:
    """Matmuls that are as slow in chunks as whole leave nothing to gain, communication that is free neither."""

    def launch(node: fx.Node) -> float:
        return 1e-3 if node.target is ATEN.mm.default else 1e-5

    for cost in (launch, costs(1e-6, 0.0)):
        made, report = decompose_graph(chain(), cost=cost, groups={"g": range(4)}, rank=0)
        assert report.num_taken == 0
        assert count(made, EXCHANGE) == 0


def test_a_permute_is_priced_as_one_message() -> None:
    made = on_every_rank(gather_matmul(4), one_group(4), always(all_gather="direct"))[1][0]
    rows = mw.overlap(made, cost=H100, groups={"g": range(4)})[1].collectives
    mesh = mw.Mesh({"g": 4})
    assert [row.op for row in rows] == ["all_to_all_single"] * 3
    assert all(collective_of(node).name == "permute" for node in made.graph.nodes if node.target is EXCHANGE)  # type: ignore[union-attr]
    assert {row.bytes for row in rows} == {4 * 8 * 4}
    for row in rows:
        assert row.seconds >= H100.seconds("permute", mesh, ("g",), 4 * 8 * 4) * 0.999


def test_ranks_do_what_was_agreed_on() -> None:
    """Rank 1 finds no gain; it is told what rank 0 has decided, and does it."""
    said: list[CostNumbers] = []

    def keep(figures: CostNumbers) -> CostNumbers:
        said.append(figures)
        return figures

    gm, groups = chain(), {"g": range(4)}
    first, _ = decompose_graph(gm, cost=costs(1e-6, 1e-3), groups=groups, rank=0, agree=keep)
    decompose_graph(gm, cost=costs(1e-6, 0.0), groups=groups, rank=1, agree=keep)
    assert said[0].fingerprint == said[1].fingerprint
    assert min(said[0].numbers) >= 0
    assert said[1].numbers == (-1.0, -1.0)
    made, report = decompose_graph(gm, cost=costs(1e-6, 0.0), groups=groups, rank=1, agree=lambda _: said[0])
    assert report.num_taken == 2
    assert [node.target for node in made.graph.nodes] == [node.target for node in first.graph.nodes]


def test_equal_inputs_give_equal_graphs() -> None:
    texts = [
        decompose_graph(chain(), cost=H100, groups={"g": range(4)}, rank=2)[0].graph.python_code("self").src
        for _ in range(2)
    ]
    assert texts[0] == texts[1]


# bad input


def test_bad_input() -> None:
    gm, groups = gather_matmul(2), {"g": (0, 1)}
    with pytest.raises(MeshweaveError, match="needs costs of compute and of links"):
        decompose_graph(gm, groups=groups, rank=0)
    with pytest.raises(MeshweaveError, match="the rank of this graph is unknown"):
        decompose_graph(gm, groups=groups, options=always())
    with pytest.raises(MeshweaveError, match="this rank is not in the group of a collective") as caught:
        decompose_graph(gm, groups=groups, rank=2, options=always())
    assert "node gather" in str(caught.value)
    with pytest.raises(MeshweaveError, match="the group of a collective is unknown"):
        decompose_graph(gm, groups={}, rank=0, options=always())
    with pytest.raises(MeshweaveError, match="a collective's group size contradicts its group"):
        decompose_graph(gm, groups={"g": (0, 1, 2)}, rank=0, options=always())
    with pytest.raises(MeshweaveError, match="no algorithm 'tree' for all_gather"):
        decompose_graph(gm, groups=groups, rank=0, options=always(all_gather="tree"))
    with pytest.raises(MeshweaveError, match="a cost is not a duration"):
        decompose_graph(gm, cost=by_name({}, -1.0), groups=groups, rank=0)


def test_a_wait_for_an_input_stays() -> None:
    """Its communication began in another graph, and is not this one's to take apart."""
    b = Builder(one_group(2))
    x = b.placeholder("x", (4, 8))
    graph, report = decompose_graph(b.done(b.call("late", WAIT, x)), groups={"g": (0, 1)}, rank=0, options=always())
    assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [WAIT]
    assert report.num_taken == 0
