"""The pass on graphs written by hand: what is taken apart, into what, and that values stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.decompose.programs import count, integers, num_permutes, program, run
from torch import Tensor, fx

import meshweave as mw
from meshweave.check.deadlock import check_deadlock
from meshweave.cost.hardware.schema import Fit
from meshweave.cost.simulate.step import simulate_roles
from meshweave.errors import MeshweaveError, VerifyError
from meshweave.ir import local_ops
from meshweave.ir.collectives import WAIT, functional, permute
from meshweave.ir.rank import RankGraph, ring_index
from meshweave.ir.values import local_values
from meshweave.optimize.decompose import DecomposeOptions, DecomposeReport, algorithm, decompose, prove_rings
from meshweave.optimize.decompose.algorithms import Index, RingStep
from meshweave.optimize.decompose.price import MessageCost, play_gather, play_reduce
from meshweave.runtime.world import LocalWorld

aten = torch.ops.aten
GATHER = functional.all_gather_into_tensor.default
SCATTER = functional.reduce_scatter_tensor.default
REDUCE = functional.all_reduce.default
MM = aten.mm.default
Call = Callable[..., fx.Node]
GATHERS = ["direct", "cyclic", "bidirectional"]
SCATTERS = ["direct", "ring"]


def always(**changes: Any) -> DecomposeOptions:
    """Every name of `changes` has one way: that is gone, wherever it can be."""
    ways = {key: (value,) if isinstance(value, str) else value for key, value in changes.items()}
    return DecomposeOptions(when="always", **ways)


def gathered(call: Call, x: fx.Node, n: int, group: str = "d") -> fx.Node:
    return call(WAIT, call(GATHER, call(aten.contiguous.default, x), n, group))


def scattered(call: Call, x: fx.Node, n: int, group: str = "d", op: str = "sum") -> fx.Node:
    return call(WAIT, call(SCATTER, call(aten.contiguous.default, x), op, n, group))


def check(role: RankGraph, options: DecomposeOptions, **values: Tensor) -> tuple[RankGraph, DecomposeReport]:
    """Take apart, run both on virtual devices, and compare to the bit; the role itself is left as it was."""
    text = role.text()
    made, report = decompose(role, None, options)
    assert role.text() == text
    check_deadlock([made])
    expected, found = run(role, values), run(made, values)
    for device, outputs in expected.items():
        for want, got in zip(outputs, found[device], strict=True):
            assert (got.shape, got.dtype) == (want.shape, want.dtype)
            assert torch.equal(got, want), f"device {device}: {got - want}"
    return made, report


def shapes_of(role: RankGraph, target: Any) -> list[tuple[int, ...]]:
    values = local_values(role).values
    return [values[node][0].shape for node in role.graph.nodes if node.target is target]


def order(role: RankGraph, *targets: Any) -> list[str]:
    """The nodes of some targets, in order, by short names."""
    return [node.target.__name__.partition(".")[0] for node in role.graph.nodes if node.target in targets]


# a gather and a matmul


def rows_times(n: int, mesh: mw.Mesh | None = None, rows: int = 24) -> tuple[RankGraph, dict[str, Tensor]]:
    """x, whose rows are sharded, times a weight whose columns are: a column-parallel linear."""
    values = {"x": integers(rows, 6, seed=1), "w": integers(6, 5 * n, seed=2)}
    role = program(
        mesh or mw.Mesh(d=n),
        {"x": (values["x"], "[{d}, {}]"), "w": (values["w"], "[{}, {d}]")},
        lambda call, x, w: [call(MM, gathered(call, x, n), w)],
    )
    return role, values


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("name", GATHERS)
def test_a_gather_before_a_matmul_becomes_a_ring(name: str, n: int) -> None:
    role, values = rows_times(n)
    made, report = check(role, always(all_gather=name), **values)
    assert count(made, GATHER) == 0
    assert num_permutes(made) == n - 1
    assert shapes_of(made, MM) == [(24 // n, 5)] * n
    assert shapes_of(made, local_ops.join_chunks) == [(24, 5)]
    (row,) = report.rows
    assert (row.is_taken, row.scheme, row.op, row.group, row.num_steps) == (True, name, "all_gather", "d", n)
    assert row.matmuls == ("mm_default",)
    assert row.numerics.startswith("exact: every element is moved once")
    assert report.num_taken == 1


def test_the_text_of_a_ring() -> None:
    """Chunks, permutes, waits and matmuls: an ordinary graph, in which message i + 1 is started before product i."""
    made, _ = decompose(rows_times(3)[0], None, always(all_gather="cyclic"))
    assert made.text() == (
        "x: float32[8,6] = input\n"
        "w: float32[6,5] = input\n"
        "ring_index_2 = ring_index([d], [3], 1, 1)\n"
        "ring_index_1 = ring_index([d], [3], 1, 2)\n"
        "ring_index = ring_index([d], [3], 1, 0)\n"
        "contiguous_default: float32[8,6] = aten.contiguous(x)\n"
        "permute: float32[8,6] = permute(contiguous_default, 1, d)\n"
        "mm_default_1: float32[8,5] = aten.mm(contiguous_default, w)\n"
        "wait_tensor_default_1: float32[8,6] = _c10d_functional.wait_tensor(permute)\n"
        "permute_1: float32[8,6] = permute(wait_tensor_default_1, 1, d)\n"
        "mm_default_2: float32[8,5] = aten.mm(wait_tensor_default_1, w)\n"
        "wait_tensor_default_2: float32[8,6] = _c10d_functional.wait_tensor(permute_1)\n"
        "mm_default_3: float32[8,5] = aten.mm(wait_tensor_default_2, w)\n"
        "join_chunks: float32[24,5] = join_chunks([mm_default_1, mm_default_2, mm_default_3], "
        "[ring_index, ring_index_1, ring_index_2], 0, 1)\n"
        "return [join_chunks]\n"
    )


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_a_gather_matmul_pipeline_of_collectives(chunks: int) -> None:
    """Shard-outermost: part i of every piece is gathered, and makes rows that lie apart."""
    role, values = rows_times(2, rows=32)
    made, report = check(role, always(all_gather="pipelined", num_chunks=(chunks,)), **values)
    assert count(made, GATHER) == chunks
    assert shapes_of(made, MM) == [(32 // chunks, 5)] * chunks
    assert shapes_of(made, GATHER) == [(32 // chunks, 6)] * chunks
    assert report.num_taken == (chunks > 1)
    if chunks > 1:
        assert order(made, GATHER, MM) == [
            "all_gather_into_tensor",
            *["all_gather_into_tensor", "mm"] * (chunks - 1),
            "mm",
        ]


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["direct", "pipelined"])
def test_a_gather_matmul_of_streams_of_shards(name: str, chunks: int) -> None:
    """Stream-outermost: [streams, shards, rows, k], gathered along dim 1. Chunks of a ring lie apart, those of a
    pipeline are streams."""
    n = 4
    values = {"x": integers(chunks, n, 3, 6, seed=1), "w": integers(6, 5, seed=2)}

    def build(call: Call, x: fx.Node, w: fx.Node) -> list[fx.Node]:
        joined = call(local_ops.join_blocks, gathered(call, x, n), (n,), (0,), 1, None)
        flat = call(aten.reshape.default, joined, [chunks * n * 3, 6])
        return [call(aten.reshape.default, call(MM, flat, w), [chunks, n, 3, 5])]

    role = program(mw.Mesh(d=n), {"x": (values["x"], "[{}, {d}, {}, {}]"), "w": (values["w"], "[{}, {}]")}, build)
    options = always(all_gather=name, num_chunks=(chunks,))
    made, report = check(role, options, **values)
    if name == "direct":
        assert shapes_of(made, MM) == [(3 * chunks, 5)] * n
        assert num_permutes(made) == n - 1
    else:
        assert shapes_of(made, MM) == [(3 * n, 5)] * chunks
        assert count(made, GATHER) == chunks
    assert report.num_taken == (name == "direct" or chunks > 1)


# every way to take what was gathered


def _right(call: Call, g: fx.Node, a: fx.Node) -> fx.Node:
    return call(MM, a, call(aten.permute.default, g, [1, 0]))


def _bias(call: Call, g: fx.Node, a: fx.Node) -> fx.Node:
    return call(aten.addmm.default, call(aten.full.default, [7], 3.0), g, call(aten.permute.default, a, [1, 0]))


def _chain(call: Call, g: fx.Node, a: fx.Node) -> fx.Node:
    """A view, a cast, one op element by element, and a view back."""
    apart = call(aten.reshape.default, g, [8, 3, 6])
    wide = call(aten.relu.default, call(aten._to_copy.default, apart, dtype=torch.float64))
    flat = call(aten.reshape.default, wide, [24, 6])
    return call(MM, flat, call(aten._to_copy.default, call(aten.permute.default, a, [1, 0]), dtype=torch.float64))


def _scaled(call: Call, g: fx.Node, a: fx.Node) -> fx.Node:
    """One op with an operand that is cut as the gathered value is, and one that is not."""
    ones = call(aten.full.default, [24, 1], 2.0)
    line = call(aten.full.default, [6], 3.0)
    both = call(aten.mul.Tensor, call(aten.mul.Tensor, g, ones), line)
    return call(MM, both, call(aten.permute.default, a, [1, 0]))


def _batched(call: Call, g: fx.Node, a: fx.Node) -> fx.Node:
    left = call(aten.reshape.default, g, [12, 2, 6])
    right = call(aten.reshape.default, call(aten.full.default, [12, 6, 3], 2.0), [12, 6, 3])
    return call(aten.bmm.default, left, right)


def _batched_rows(call: Call, g: fx.Node, a: fx.Node) -> fx.Node:
    """The gathered dim becomes that of rows behind a batch."""
    left = call(aten.permute.default, call(aten.reshape.default, g, [24, 3, 2]), [1, 0, 2])
    return call(torch.ops.meshweave.matmul.default, left, call(aten.full.default, [3, 2, 5], 1.0))


def _added_batched(call: Call, g: fx.Node, a: fx.Node) -> fx.Node:
    left = call(aten.reshape.default, g, [12, 2, 6])
    bias = call(aten.full.default, [12, 1, 3], 5.0)
    return call(aten.baddbmm.default, bias, left, call(aten.full.default, [12, 6, 3], 2.0))


@pytest.mark.parametrize(
    ("take", "target", "shape"),
    [
        (_right, MM, (7, 6)),
        (_bias, aten.addmm.default, (6, 7)),
        (_chain, MM, (6, 7)),
        (_scaled, MM, (6, 7)),
        (_batched, aten.bmm.default, (3, 2, 3)),
        (_batched_rows, torch.ops.meshweave.matmul.default, (3, 6, 5)),
        (_added_batched, aten.baddbmm.default, (3, 2, 3)),
    ],
)
@pytest.mark.parametrize("name", ["cyclic", "pipelined"])
def test_every_way_to_take_what_was_gathered(
    take: Callable[[Call, fx.Node, fx.Node], fx.Node], target: Any, shape: tuple[int, ...], name: str
) -> None:
    values = {"g": integers(24, 6, seed=3), "a": integers(7, 6, seed=4)}
    role = program(
        mw.Mesh(d=4),
        {"g": (values["g"], "[{d}, {}]"), "a": (values["a"], "[{}, {}]")},
        lambda call, g, a: [take(call, gathered(call, g, 4), a)],
    )
    if name == "pipelined" and target in (aten.bmm.default, aten.baddbmm.default):
        return  # a part of a piece of 6 rows is no whole number of batches in 4 parts, and one of 3 rows is none at all
    made, report = check(role, always(all_gather=name, num_chunks=(2,)), **values)
    assert report.num_taken == 1
    if name == "cyclic":
        assert shapes_of(made, target) == [shape] * 4
        assert num_permutes(made) == 3
    else:
        assert len(shapes_of(made, target)) == 2


def test_a_matmul_over_what_was_gathered_becomes_a_sum_of_products() -> None:
    """The gradient of a weight: rows are summed over. Products are added up in the order of the chunks everywhere."""
    values = {"x": integers(12, 6, seed=8), "g": integers(12, 4, seed=9)}
    inputs = {"x": (values["x"], "[{d}, {}]"), "g": (values["g"], "[{}, {}]")}
    role = program(
        mw.Mesh(d=4),
        inputs,
        lambda call, x, g: [call(MM, call(aten.permute.default, gathered(call, x, 4), [1, 0]), g)],
    )
    made, report = check(role, always(all_gather="direct"), **values)
    assert shapes_of(made, MM) == [(6, 4)] * 4
    assert count(made, local_ops.sum_parts) == 1
    assert "sums in float32" in report.rows[0].numerics
    _, left = decompose(role, None, replace(always(all_gather="direct"), sums=False))
    assert left.num_taken == 0


@pytest.mark.parametrize("is_started", [True, False])
def test_a_wait_for_an_operand_is_moved_before_the_ring_if_it_has_been_started(is_started: bool) -> None:
    values = {"x": integers(8, 6, seed=1), "w": integers(6, 6, seed=2)}

    def build(call: Call, x: fx.Node, w: fx.Node) -> list[fx.Node]:
        start = lambda: call(REDUCE, call(aten.contiguous.default, w), "sum", "a")  # noqa: E731
        weight = start() if is_started else None
        whole = gathered(call, x, 2)
        return [call(MM, whole, call(WAIT, weight or start()))]

    inputs = {"x": (values["x"], "[{d}, {}]"), "w": (values["w"], "[{}, {}]")}
    made, report = check(
        program(mw.Mesh("a=2,d=2"), inputs, build), always(all_gather="direct", all_reduce=()), **values
    )
    row = next(row for row in report.rows if row.group == "d")
    assert row.is_taken == is_started
    assert num_permutes(made) == is_started
    if not is_started:
        assert row.reason == "wait_tensor_default_1, an operand of mm_default, is computed later"


# a matmul and a reduction


def products(n: int, mesh: mw.Mesh | None = None, summed: bool = False, rows: int = 24) -> Any:
    """x, whose columns are sharded, times a weight whose rows are: a row-parallel linear, of partial sums."""
    values = {"x": integers(rows, 6 * n, seed=1), "w": integers(6 * n, 5, seed=2)}

    def build(call: Call, x: fx.Node, w: fx.Node) -> list[fx.Node]:
        made = call(MM, x, w)
        if summed:
            made = call(aten.add.Tensor, made, call(MM, call(aten.neg.default, x), w))
            made = call(aten.add.Tensor, made, call(aten.full.default, [rows, 5], 1.0))
        return [scattered(call, made, n)]

    inputs = {"x": (values["x"], "[{}, {d}]"), "w": (values["w"], "[{d}, {}]")}
    return program(mesh or mw.Mesh(d=n), inputs, build), values


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("name", SCATTERS)
def test_a_matmul_before_a_reduce_scatter_becomes_a_ring(name: str, n: int) -> None:
    role, values = products(n)
    made, report = check(role, always(reduce_scatter=name), **values)
    assert count(made, SCATTER) == 0
    assert num_permutes(made) == n - 1
    assert shapes_of(made, MM) == [(24 // n, 5)] * n
    (row,) = report.rows
    assert (row.is_taken, row.scheme, row.op, row.matmuls) == (True, name, "reduce_scatter", ("mm_default",))
    sends = [i for i, kind in enumerate(order(made, permute, MM)) if kind == "permute"]
    assert sends == [1 + 2 * i for i in range(n - 1)]  # the product of a chunk, its message, the next product


@pytest.mark.parametrize("name", [*SCATTERS, "pipelined"])
def test_a_sum_of_matmuls_before_a_reduce_scatter(name: str) -> None:
    role, values = products(4, mw.Mesh("d=4,a=2"), summed=True)
    made, report = check(role, always(reduce_scatter=name, num_chunks=(2,)), **values)
    chunks = 2 if name == "pipelined" else 4
    assert report.rows[0].matmuls == ("mm_default_1", "mm_default")
    assert shapes_of(made, MM) == [(24 // chunks, 5)] * 2 * chunks


@pytest.mark.parametrize(("name", "kind"), [("ring", "reduce_scatter"), ("pipelined", "all_reduce")])
def test_what_others_read_of_a_partial_sum_is_put_together(name: str, kind: str) -> None:
    """The residual of a transformer flows on as partial sums: the sum that is reduced is read again, later."""
    n, values = 4, {"x": integers(24, 24, seed=1), "w": integers(24, 5, seed=2), "r": integers(24, 5, seed=3)}

    def build(call: Call, x: fx.Node, w: fx.Node, r: fx.Node) -> list[fx.Node]:
        product = call(MM, x, w)
        total = call(aten.add.Tensor, r, product)
        if kind == "reduce_scatter":
            reduced = scattered(call, total, n)
        else:
            reduced = call(WAIT, call(REDUCE, call(aten.contiguous.default, total), "sum", "d"))
        return [reduced, call(aten.neg.default, total), call(aten.exp.default, product)]

    inputs = {"x": (values["x"], "[{}, {d}]"), "w": (values["w"], "[{d}, {}]"), "r": (values["r"], "[{}, {}]")}
    made, report = check(program(mw.Mesh(d=n), inputs, build), always(**{kind: name}, num_chunks=(2,)), **values)
    chunks = 2 if name == "pipelined" else n
    assert report.rows[0].matmuls == ("mm_default",)
    assert shapes_of(made, MM) == [(24 // chunks, 5)] * chunks
    assert shapes_of(made, local_ops.join_chunks)[:2] == [(24, 5), (24, 5)]
    assert shapes_of(made, aten.add.Tensor)[:chunks] == [(24 // chunks, 5)] * chunks


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_a_matmul_reduce_scatter_pipeline_of_collectives(chunks: int) -> None:
    role, values = products(4, rows=64)
    made, _ = check(role, always(reduce_scatter="pipelined", num_chunks=(chunks,)), **values)
    assert count(made, SCATTER) == chunks
    assert shapes_of(made, MM) == [(64 // chunks, 5)] * chunks
    if chunks > 1:
        assert order(made, SCATTER, MM) == ["mm", "reduce_scatter_tensor"] * chunks


def test_sums_of_half_precision_are_taken_in_float32() -> None:
    """256 + 1 + 1 + 1 is 256 in bfloat16 and 259 in float32, which rounds to 260. The ring sends float32 for it, the
    direct way what the collective sends."""
    n, values = 4, {"x": torch.tensor([[256.0, 1.0, 1.0, 1.0]] * 4).bfloat16(), "w": torch.ones(4, 2).bfloat16()}
    inputs = {"x": (values["x"], "[{}, {d}]"), "w": (values["w"], "[{d}, {}]")}
    role = program(mw.Mesh(d=n), inputs, lambda call, x, w: [scattered(call, call(MM, x, w), n)])
    for name, dtype in (("direct", torch.bfloat16), ("ring", torch.float32)):
        made, report = check(role, always(reduce_scatter=name), **values)
        assert {node.meta["spec"].dtype for node in made.graph.nodes if node.target is permute} == {dtype}
        assert "sums in float32" in report.rows[0].numerics
        assert {float(out[0].max()) for out in run(made, values).values()} == {260.0}
    narrow = replace(always(reduce_scatter="ring"), accumulate=torch.bfloat16)
    made, report = decompose(role, None, narrow)
    found = {float(out[0].max()) for out in run(made, values).values()}
    assert 256.0 in found  # where 256 comes first, the ones are lost
    assert "sums in bfloat16" in report.rows[0].numerics


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_parts_of_pieces_along_the_dim_that_is_dealt_and_joined(batch: int) -> None:
    """[batch, rows, k] gathered along its rows, and scattered along them: where two parts do not divide the batch, they
    are parts of the rows of every piece."""
    n, values = 4, {"x": integers(batch, 24, 6, seed=1), "w": integers(6, 5, seed=2), "v": integers(5, 6, seed=3)}

    def build(call: Call, x: fx.Node, w: fx.Node, v: fx.Node) -> list[fx.Node]:
        joined = call(local_ops.join_blocks, gathered(call, x, n), (n,), (0,), 1, None)
        wide = call(MM, call(aten.reshape.default, joined, [batch * 24, 6]), w)
        made = call(aten.reshape.default, call(MM, call(aten.relu.default, wide), v), [batch, 24, 6])
        return [scattered(call, call(local_ops.deal_blocks, made, (n,), (0,), 1, None, 6), n)]

    texts = {"x": "[{}, {d}, {}]", "w": "[{}, {}]", "v": "[{}, {}]"}
    role = program(mw.Mesh(d=n), {name: (value, texts[name]) for name, value in values.items()}, build)
    options = always(all_gather="pipelined", reduce_scatter="pipelined", num_chunks=(2,))
    made, report = check(role, options, **values)
    assert report.num_taken == 2
    assert shapes_of(made, MM) == [(12 * batch, 5)] * 2 + [(12 * batch, 6)] * 2
    assert shapes_of(made, SCATTER) == [(1, 6, 6) if batch == 2 else (batch, 3, 6)] * 2


@pytest.mark.parametrize("name", [*SCATTERS, "pipelined"])
@pytest.mark.parametrize("shape", [(24, 5), (1, 24, 5), (3, 8, 5)])
def test_a_matmul_before_an_all_reduce(name: str, shape: tuple[int, ...]) -> None:
    """A reduce-scatter along the first dim that its products have, and a gather; or all-reduces of parts."""
    n, values = 4, {"x": integers(24, 24, seed=1), "w": integers(24, 5, seed=2)}

    def build(call: Call, x: fx.Node, w: fx.Node) -> list[fx.Node]:
        made = call(aten.reshape.default, call(MM, x, w), list(shape))
        return [call(WAIT, call(REDUCE, call(aten.contiguous.default, made), "sum", "d"))]

    inputs = {"x": (values["x"], "[{}, {d}]"), "w": (values["w"], "[{d}, {}]")}
    role = program(mw.Mesh("a=2,d=4"), inputs, build)
    made, report = check(role, always(all_reduce=name, num_chunks=(2,)), **values)
    assert report.num_taken == 1
    if name == "pipelined":
        assert (count(made, REDUCE), num_permutes(made), count(made, MM)) == (2, 0, 2)
    else:
        assert (count(made, REDUCE), count(made, GATHER), num_permutes(made)) == (0, 1, n - 1)
        assert shapes_of(made, MM) == [(6, 5)] * n


def normed(call: Call, x: fx.Node, w: fx.Node) -> tuple[fx.Node, fx.Node]:
    """What an RMS norm does, in integers: x times a number per row, which comes from the row; and times a weight."""
    squares = call(aten.sum.dim_IntList, call(aten.pow.Tensor_Scalar, x, 2), [1], True)
    scaled = call(aten.mul.Tensor, x, call(aten.sign.default, call(aten.add.Tensor, squares, 1.0)))
    return scaled, call(MM, scaled, w)


@pytest.mark.parametrize("shape", [(24, 6), (3, 8, 6)])
@pytest.mark.parametrize(("scatter", "gather"), [("direct", "direct"), ("ring", "bidirectional")])
def test_an_all_reduce_becomes_a_ring_on_both_sides(scatter: str, gather: str, shape: tuple[int, ...]) -> None:
    """Its reduce-scatter hides behind the matmul before, its gather behind the norm and the matmul after."""
    n, values = 4, {"x": integers(24, 24, seed=1), "w": integers(24, 6, seed=2), "v": integers(6, 5, seed=3)}

    def build(call: Call, x: fx.Node, w: fx.Node, v: fx.Node) -> list[fx.Node]:
        partial = call(aten.reshape.default, call(MM, x, w), list(shape))
        whole = call(WAIT, call(REDUCE, call(aten.contiguous.default, partial), "sum", "d"))
        return [normed(call, call(aten.reshape.default, whole, [24, 6]), v)[1]]

    inputs = {"x": (values["x"], "[{}, {d}]"), "w": (values["w"], "[{d}, {}]"), "v": (values["v"], "[{}, {}]")}
    made, report = check(
        program(mw.Mesh("a=2,d=4"), inputs, build), always(all_reduce=scatter, all_gather=gather), **values
    )
    assert [(row.op, row.scheme, row.is_taken) for row in report.rows] == [
        ("all_reduce", scatter, True),
        ("all_gather", gather, True),
    ]
    assert (count(made, REDUCE, GATHER), num_permutes(made)) == (0, 2 * (n - 1))
    assert shapes_of(made, MM) == [(6, 6)] * n + [(6, 5)] * n
    assert prove_rings(made) == 2


# linears of tensor parallelism, with what their backward passes do


def backward(call: Call) -> Call:
    return lambda *args, **kwargs: call(*args, phase="backward", **kwargs)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("gather", "scatter"), [("cyclic", "ring"), ("direct", "direct"), ("bidirectional", "ring")])
def test_a_column_parallel_linear_forward_and_backward(gather: str, scatter: str, n: int) -> None:
    """Forward y = gather(x) w; backward dx = scatter(dy w'), and dw = x' dy of the x that forward has kept."""
    rows, k, columns = 24, 6, 5
    values = {"x": integers(rows, k), "w": integers(k, columns * n, seed=1), "g": integers(rows, columns * n, seed=2)}

    def build(call: Call, x: fx.Node, w: fx.Node, g: fx.Node) -> list[fx.Node]:
        whole, back = gathered(call, x, n), backward(call)
        y = call(MM, whole, w)
        dx = scattered(back, back(MM, g, back(aten.permute.default, w, [1, 0])), n)
        dw = back(MM, back(aten.permute.default, whole, [1, 0]), g)
        return [y, dx, dw]

    inputs = {"x": (values["x"], "[{d}, {}]"), "w": (values["w"], "[{}, {d}]"), "g": (values["g"], "[{}, {d}]")}
    role = program(mw.Mesh(d=n), inputs, build)
    made, report = check(role, always(all_gather=gather, reduce_scatter=scatter), **values)
    assert [row.matmuls for row in report.rows] == [("mm_default",), ("mm_default_1",)]
    assert num_permutes(made) == 2 * (n - 1)
    part = rows // n
    assert shapes_of(made, MM) == [(part, columns)] * n + [(part, k)] * n + [(k, columns)]
    assert (rows, k) in shapes_of(made, local_ops.join_chunks)  # kept for dw
    phases = [node.meta["origin"].phase for node in made.graph.nodes if node.target is permute]
    assert phases == ["forward"] * (n - 1) + ["backward"] * (n - 1)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(("gather", "scatter"), [("cyclic", "ring"), ("direct", "direct")])
def test_a_row_parallel_linear_forward_and_backward(gather: str, scatter: str, n: int) -> None:
    """Forward y = scatter(x w); backward dx = gather(dy) w' and dw = x' gather(dy) share one ring: the one in rows, the
    other as a sum of products."""
    rows, k, columns = 24, 6, 5
    values = {"x": integers(rows, k * n), "w": integers(k * n, columns, seed=1), "g": integers(rows, columns, seed=2)}

    def build(call: Call, x: fx.Node, w: fx.Node, g: fx.Node) -> list[fx.Node]:
        back = backward(call)
        y = scattered(call, call(MM, x, w), n)
        whole = gathered(back, g, n)
        dx = back(MM, whole, back(aten.permute.default, w, [1, 0]))
        dw = back(MM, back(aten.permute.default, x, [1, 0]), whole)
        return [y, dx, dw]

    inputs = {"x": (values["x"], "[{}, {d}]"), "w": (values["w"], "[{d}, {}]"), "g": (values["g"], "[{d}, {}]")}
    role = program(mw.Mesh(d=n), inputs, build)
    made, report = check(role, always(all_gather=gather, reduce_scatter=scatter), **values)
    assert [row.matmuls for row in report.rows] == [("mm_default",), ("mm_default_1", "mm_default_2")]
    assert num_permutes(made) == 2 * (n - 1)
    part = rows // n
    assert shapes_of(made, MM) == [(part, columns)] * n + [(part, k), (k, columns)] * n
    assert shapes_of(made, local_ops.join_chunks) == [(rows, k)]
    sums = shapes_of(made, local_ops.sum_parts)
    assert sums == [(part, columns)] * (scatter == "direct" or n == 2) + [(k, columns)]


# the proof of what was written


@pytest.mark.parametrize("name", ["direct", "ring", "pipelined", "all_reduce"])
def test_a_ring_of_sums_that_is_wrong_is_found(name: str) -> None:
    ways = always(all_reduce="direct") if name == "all_reduce" else always(reduce_scatter=name, num_chunks=(2,))
    role, _ = products(4, summed=True)
    if name == "all_reduce":
        start = next(node for node in role.graph.nodes if node.target is SCATTER)
        start.target, start.args = REDUCE, (start.args[0], "sum", "d")
    made, _ = decompose(role, None, ways)
    assert prove_rings(made) == 1
    for what in (permute, local_ops.take_chunk, local_ops.sum_parts, local_ops.join_chunks):
        _check_broken(made, what)


@pytest.mark.parametrize("name", [*GATHERS, "pipelined"])
def test_a_ring_that_gathers_wrongly_is_found(name: str) -> None:
    made, _ = decompose(rows_times(4)[0], None, always(all_gather=name, num_chunks=(2,)))
    assert prove_rings(made) == 1
    for what in (permute, local_ops.take_chunk, local_ops.join_chunks):
        _check_broken(made, what)


def _check_broken(made: RankGraph, what: Any) -> None:
    """Another destination, another chunk, or two parts in each other's places: each is found."""
    for node in [node for node in made.graph.nodes if node.target is what]:
        before = node.args
        if what is permute:
            node.args = (before[0], (before[1] + 1) % 4, *before[2:])  # type: ignore[operator]
        elif what is local_ops.take_chunk:
            symbols = [n for n in made.graph.nodes if n.target is ring_index] or [1 - before[4]]  # type: ignore[operator]
            node.args = (*before[:4], next(n for n in symbols if n is not before[4]))
        else:
            first, second, *others = before[0]  # type: ignore[misc]
            node.args = ([second, first, *others], *before[1:])
        with pytest.raises(VerifyError, match="ring 0: "):
            prove_rings(made)
        node.args = before
    prove_rings(made)


# what is left as it is, and why


def test_costs_without_compute_are_refused() -> None:
    role, _ = rows_times(2)
    with pytest.raises(MeshweaveError, match="needs costs of compute and of links"):
        decompose(role, None)
    with pytest.raises(MeshweaveError, match="no algorithm 'tree'"):
        decompose(role, None, always(all_gather="tree"))


# the gate


def large(rows: int, inner: int, columns: int, n: int = 8, between: int = 0) -> RankGraph:
    """A gather and a matmul in bfloat16; `between` matmuls of the same size stand between its start and its wait."""

    def build(call: Call, x: fx.Node, w: fx.Node, y: fx.Node) -> list[fx.Node]:
        start = call(GATHER, call(aten.contiguous.default, x), n, "d")
        others = [call(MM, y, w) for _ in range(between)]
        return [call(MM, call(WAIT, start), w), *others]

    meta: Sequence[Tensor] = [
        torch.empty(*shape, dtype=torch.bfloat16, device="meta")
        for shape in ((rows, inner), (inner, columns), (rows, inner))
    ]
    texts = ("[{d}, {}]", "[{}, {}]", "[{}, {}]")
    return program(mw.Mesh(d=n), dict(zip("xwy", zip(meta, texts, strict=True), strict=True)), build)  # type: ignore[arg-type]


def test_the_gate_takes_what_gains_and_says_why_it_leaves_the_rest() -> None:
    profile = mw.load_profile("h100")
    made, report = decompose(large(8192, 8192, 4096), profile)
    (row,) = report.rows
    assert row.is_taken
    assert row.seconds_after < row.seconds_before
    before, after = (simulated(role) for role in (large(8192, 8192, 4096), made))
    assert after < before
    assert before - after == pytest.approx(row.seconds_before - row.seconds_after, rel=0.5)
    _, hidden = decompose(large(8192, 8192, 4096, between=4), profile)
    assert hidden.rows[0].reason.startswith("other work hides it")
    _, small = decompose(large(64, 512, 512), profile)
    assert "no gain" in small.rows[0].reason
    assert str(small).startswith(
        f"0 of 1 collectives decomposed: {small.rows[0].reason}\n"
        "  all_gather_into_tensor_default (all_gather over d) left"
    )


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("shape", [(1024, 4096, 4096), (4096, 1024, 4096), (16384, 4096, 1024), (16384, 8192, 4096)])
def test_the_gate_is_right(shape: tuple[int, int, int], n: int) -> None:
    """What is chosen is, simulated, within 5% of the best of what could have been."""
    profile, before = mw.load_profile("h100"), simulated(large(*shape, n))
    chosen = simulated(decompose(large(*shape, n), profile)[0])
    ways = [always(all_gather="direct"), *(always(all_gather="pipelined", num_chunks=(c,)) for c in (2, 4, 8))]
    others = [simulated(decompose(large(*shape, n), None, scheme)[0]) for scheme in ways]
    assert chosen <= 1.05 * min(before, *others)


def test_the_gate_counts_on_the_gather_of_an_all_reduce() -> None:
    """What the gather can gain beside the matmul after it is part of what an all-reduce gains."""
    n, profile = 8, mw.load_profile("h100")
    meta = {name: torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta") for name in "xwv"}
    texts = {"x": "[{}, {d}]", "w": "[{d}, {}]", "v": "[{}, {d}]"}

    def build(call: Call, x: fx.Node, w: fx.Node, v: fx.Node, is_followed: bool = True) -> list[fx.Node]:
        whole = call(WAIT, call(REDUCE, call(aten.contiguous.default, call(MM, x, w)), "sum", "d"))
        return [call(MM, whole, v) if is_followed else whole]

    role = program(mw.Mesh(d=n), {name: (meta[name], texts[name]) for name in meta}, build)
    options = DecomposeOptions(all_reduce=("direct",))
    made, report = decompose(role, profile, options)
    first, second = report.rows
    assert (first.is_taken, second.is_taken, second.op) == (True, True, "all_gather")
    assert "and its gather can gain" in first.reason
    assert simulated(made) < simulated(role)
    alone = program(
        mw.Mesh(d=n), {name: (meta[name], texts[name]) for name in meta}, lambda *args: build(*args, is_followed=False)
    )
    assert simulated(alone) - simulated(decompose(alone, profile, options)[0]) < simulated(role) - simulated(made)


def test_steps_played() -> None:
    """4 chunks of 2 s. With messages of 1 s all but the first product waits for nothing; with those of 3 s the link is
    what counts; what the processor does for a message is added, and compute beside messages is slower."""
    gather, scatter = (algorithm(kind, "direct").steps(4) for kind in ("all_gather", "reduce_scatter"))
    parts = [RingStep(Index(0, i), 1) for i in range(4)]  # collectives of parts
    assert play_gather(gather, 1, 2.0, MessageCost(1.0), 0.0) == 8.0
    assert play_gather(parts, 1, 2.0, MessageCost(1.0), 0.0) == 9.0
    assert play_gather(parts, 1, 2.0, MessageCost(1.0), 1.0) == 8.0  # it begins 1 s before
    assert play_gather(gather, 1, 2.0, MessageCost(3.0), 0.0) == 3 * 3.0 + 2.0
    assert play_gather(gather, 1, 2.0, MessageCost(1.0, host=0.5), 0.0) == 8.0 + 3 * 0.5
    assert play_gather(gather, 1, 2.0, MessageCost(1.0, slowdown=2.0), 0.0) == 8.0 + 3 * 0.5
    assert play_reduce(scatter, 2.0, MessageCost(1.0), 0.0) == 8.0
    assert play_reduce(scatter, 2.0, MessageCost(3.0), 0.0) == 2.0 + 3 * 3.0
    assert play_reduce(scatter, 2.0, MessageCost(1.0, host=0.5), 0.0) == 8.0 + 3 * 0.5
    assert play_reduce(parts, 2.0, MessageCost(1.0), 0.0) == 9.0  # the last part's message follows it
    assert play_reduce(parts, 2.0, MessageCost(1.0), 5.0) == 8.0  # unless other work hides it


def simulated(role: RankGraph) -> float:
    return simulate_roles([role], mw.load_profile("h100")).seconds


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["direct", "ring", "pipelined"])
def test_virtual_devices_on_one_gpu_give_the_same(name: str) -> None:
    for role, values, kind in ((*rows_times(4), "all_gather"), (*products(4), "reduce_scatter")):
        scheme = {"ring": "cyclic"}.get(name, name) if kind == "all_gather" else name
        made, _ = decompose(role, None, always(**{kind: scheme}, num_chunks=(2,)))
        expected, found = run(role, values), run(made, values, LocalWorld(role.mesh, "cuda"))
        assert all(torch.equal(out[0].cpu(), expected[device][0]) for device, out in found.items())


def test_equal_arguments_give_equal_graphs() -> None:
    role = large(8192, 8192, 4096)
    first, second = (decompose(role, mw.load_profile("h100")) for _ in range(2))
    assert first[0].text() == second[0].text()
    assert first[1] == second[1]


def test_parts_take_no_less_than_the_whole_of_their_bytes() -> None:
    """A link that lets 8 MB through at once, and then goes at its rate: parts of 8 MB follow one another at that."""
    points = ((1e6, 1e-6), (8.4e6, 1e-6), (16.8e6, 0.01))
    profile = replace(mw.load_profile("h100"), collectives=(Fit("all_gather", "node", 8, points),))
    only = DecomposeOptions(all_gather=("pipelined",), num_chunks=(2,))
    _, report = decompose(large(8192, 8192, 4096), profile, only)
    assert report.rows[0].seconds_before > 0.01
    assert report.rows[0].seconds_after > 0.0099


def test_of_ways_that_gain_alike_the_one_with_the_fewest_steps_is_taken() -> None:
    role, profile = large(8192, 8192, 4096), mw.load_profile("h100")
    _, report = decompose(role, profile, DecomposeOptions(all_gather=("pipelined",), num_chunks=(8, 4), margin=0.0))
    _, wide = decompose(role, profile, DecomposeOptions(all_gather=("pipelined",), num_chunks=(8, 4), margin=0.2))
    few, many = wide.rows[0], report.rows[0]
    assert (few.num_steps, many.num_steps) == (4, 8)
    assert many.seconds_after < few.seconds_after < many.seconds_after + 0.2 * many.seconds_before
    _, first = decompose(role, None, always(all_gather="pipelined", num_chunks=(8, 4)))
    assert first.rows[0].num_steps == 8
