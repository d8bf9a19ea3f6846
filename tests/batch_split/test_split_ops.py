"""The batch split op by op: values to the bit on four ranks, what runs in chunks, and why the rest does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.overlap.graphs import ATEN, C10D, CONVERT, Builder, assert_same_values, starts
from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.optimize.batch_split.split import SplitReport, split_batch

Body = Callable[[Builder, fx.Node], Any]


def program(body: Body, dtype: torch.dtype = torch.float32) -> fx.GraphModule:
    """Rows x [8, 8] are gathered over two ranks; what `body` makes of them, [16, 8], is scattered: the input's rows cut
    in two are rows of both blocks."""
    b = Builder()
    rows = b.placeholder("x", dtype=dtype)
    full = b.wait("full", b.gather("gathered", rows))
    made = body(b, full)
    found = list(made) if isinstance(made, (list, tuple)) else [made]
    if found[0].meta["val"].shape == (16, 8) and found[0].meta["val"].dtype is dtype:
        found.append(b.wait("sum", b.scatter("scattered", found[0])))
    return b.done(*found)


def split(gm: fx.GraphModule, count: int = 2, **options: Any) -> tuple[fx.GraphModule, SplitReport]:
    """The split graph, which gives the same bits on integers."""
    made, report = split_batch(gm, count, dims={"x": 0}, **options)
    assert report.is_taken, report
    assert_same_values(gm, made)
    readers = {n.name for n in made.graph.nodes if any(o.target is ATEN.cat.default for o in n.all_input_nodes)}
    named = {w.name for w in report.whole}
    whole = {n.name for n in made.graph.nodes if n.op == "call_function" and n.name in {m.name for m in gm.graph.nodes}}
    assert named <= whole
    assert {n for n in readers if n in whole and not _is_view(made, n)} <= named, "a region ends without a reason"
    return made, report


def _is_view(gm: fx.GraphModule, name: str) -> bool:
    (node,) = [n for n in gm.graph.nodes if n.name == name]
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.returns[0].alias_info is not None


def chunks_of(gm: fx.GraphModule, target: Any) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.target is target]


def weight(b: Builder, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
    return b.placeholder("w", shape or (8, 8), dtype)


def _gradient(b: Builder, y: fx.Node) -> fx.Node:
    return b.mm("gradient", b.call("turned", ATEN.permute.default, y, [1, 0]), b.relu("relu", y))


def _softmax_of_rows(b: Builder, y: fx.Node) -> fx.Node:
    """Couples the rows, by a largest row and nothing else: chunks wait for each other, values stay."""
    return b.call("less", ATEN.sub.Tensor, y, b.call("most", ATEN.amax.default, y, [0], True))


def _heads(b: Builder, y: fx.Node) -> fx.Node:
    heads = b.call("heads", ATEN.permute.default, b.call("wide", ATEN.view.default, y, [16, 2, 4]), [1, 0, 2])
    scores = b.call("scores", ATEN.bmm.default, heads, b.placeholder("w", (2, 4, 4)))
    narrow = b.call("narrow", ATEN.permute.default, scores, [1, 0, 2])
    copied = b.call("copied", ATEN.clone.default, narrow, memory_format=torch.contiguous_format)
    return b.call("flat", ATEN.view.default, copied, [16, -1])


def _squeezed(b: Builder, y: fx.Node) -> fx.Node:
    return b.call("s", ATEN.squeeze.dim, b.call("u", ATEN.unsqueeze.default, y, 1), 1)


def _scaled(b: Builder, y: fx.Node) -> fx.Node:
    return b.call("scaled", ATEN.mul.Tensor, y, b.call("mean", ATEN.mean.dim, y, [1], True))


def _indexed(b: Builder, y: fx.Node) -> fx.Node:
    index = b.call("index", CONVERT, b.call("some", ATEN.gt.Scalar, y, 0), torch.int64)
    table = b.call("table", ATEN.gather.default, y, 1, index)
    zeros = b.call("zeros", ATEN.full.default, [16, 8], 0.0, dtype=torch.float32, device=torch.device("cpu"))
    return b.call("placed", ATEN.scatter_add.default, zeros, 1, index, table)


def _accumulated(b: Builder, y: fx.Node) -> fx.Node:
    first = b.call("first", ATEN.select.int, y, 1, 0)
    index = b.call("index", CONVERT, b.call("positive", ATEN.gt.Scalar, first, 0), torch.int64)
    zeros = b.call("zeros", ATEN.full.default, [4, 8], 0.0, dtype=torch.float32, device=torch.device("cpu"))
    return b.call("table", ATEN.index_put.default, zeros, [index], y, True)


def _looked_up(b: Builder, y: fx.Node) -> fx.Node:
    first = b.call("first", ATEN.select.int, y, 1, 0)
    index = b.call("index", CONVERT, b.call("positive", ATEN.gt.Scalar, first, 0), torch.int64)
    return b.call("looked", ATEN.embedding.default, weight(b, 2, 8), index)


def _parts(b: Builder, y: fx.Node) -> fx.Node:
    parts = b.call("parts", ATEN.split_with_sizes.default, y, [3, 5], 1)
    return b.call("whole", ATEN.cat.default, [b.item("back", parts, 1), b.item("front", parts, 0)], 1)


ROW_BY_ROW: dict[str, tuple[Body, Any]] = {
    "relu": (lambda b, y: b.relu("relu", y), ATEN.relu.default),
    "cast": (lambda b, y: b.call("wide", CONVERT, y, torch.float64), CONVERT),
    "linear": (lambda b, y: b.mm("mm", y, weight(b)), ATEN.mm.default),
    "bias": (lambda b, y: b.call("mm", ATEN.addmm.default, b.placeholder("v", (8,)), y, weight(b)), ATEN.addmm.default),
    "gradient": (_gradient, ATEN.addmm.default),
    "sum": (lambda b, y: b.call("sums", ATEN.sum.dim_IntList, y, [0]), ATEN.sum.dim_IntList),
    "sum of all": (lambda b, y: b.call("sums", ATEN.sum.default, y), ATEN.sum.default),
    "mean": (lambda b, y: b.call("mean", ATEN.mean.default, y), ATEN.mean.default),
    "mean of rows": (lambda b, y: b.call("mean", ATEN.mean.dim, y, [0], True), ATEN.mean.dim),
    "norm": (_scaled, ATEN.mean.dim),
    "largest": (_softmax_of_rows, ATEN.amax.default),
    "bmm": (_heads, ATEN.bmm.default),
    "index": (_indexed, ATEN.scatter_add.default),
    "accumulate": (_accumulated, ATEN.index_put.default),
    "embedding": (_looked_up, ATEN.embedding.default),
    "parts": (_parts, ATEN.split_with_sizes.default),
    "slice": (lambda b, y: b.call("s", ATEN.slice.Tensor, y, 1, 0, 4), ATEN.slice.Tensor),
    "transposed": (lambda b, y: b.call("u", ATEN.clone.default, b.call("t", ATEN.t.default, y)), ATEN.t.default),
    "squeeze": (_squeezed, ATEN.squeeze.dim),
    "expand": (
        lambda b, y: b.call("e", ATEN.expand.default, b.call("s", ATEN.slice.Tensor, y, 1, 0, 1), [16, 8]),
        ATEN.expand.default,
    ),
    "all-reduce": (lambda b, y: b.wait("r", b.reduce("ar", y)), C10D.all_reduce.default),
    "all-to-all": (lambda b, y: b.wait("r", b.start("a2a", "all_to_all_single", y)), C10D.all_to_all_single.default),
    "other group": (lambda b, y: b.wait("r", b.reduce("ar", y, "b", "max")), C10D.all_reduce.default),
}  # fmt: skip


@pytest.mark.parametrize("name", ROW_BY_ROW)
@pytest.mark.parametrize("count", [2, 4])
def test_runs_in_chunks(name: str, count: int) -> None:
    body, target = ROW_BY_ROW[name]
    gm = program(body)
    made, report = split(gm, count)
    assert not report.whole
    ops = [n for n in made.graph.nodes if n.target is target and "_chunk" in n.name]
    first = 1 if name == "gradient" else 0  # the first product is an mm
    assert len(ops) >= count - first
    assert len(starts(made)) == count * len(starts(gm)), "every collective carries rows"


def _dropped(b: Builder, y: fx.Node) -> fx.Node:
    return b.item("kept", b.call("dropped", ATEN.native_dropout.default, y, 0.5, True), 0)


def _written(b: Builder, y: fx.Node) -> fx.Node:
    b.call("written", ATEN.copy_.default, weight(b, 16, 8), b.relu("relu", y))
    return b.relu("again", y)


def _coalesced(b: Builder, y: fx.Node) -> fx.Node:
    return b.wait("r", b.item("i", b.start("both", "all_reduce", [y]), 0))


def _uneven(b: Builder, y: fx.Node) -> fx.Node:
    return b.wait("r", b.call("a2a", C10D.all_to_all_single.default, y, [4, 12], [4, 12], "a"))


COUPLED: dict[str, tuple[Body, str, str]] = {
    "pairs of rows": (lambda b, y: b.mm("pairs", y, b.call("t", ATEN.t.default, y)), "pairs", "needs all rows of t"),
    "variance": (lambda b, y: b.call("var", ATEN.var.correction, y, [0]), "var", "no sharding rule for aten.var.corr"),
    "scan": (lambda b, y: b.call("scan", ATEN.cumsum.default, y, 0), "scan", "works along the whole of dim 0"),
    "sort": (lambda b, y: b.item("o", b.call("ranked", ATEN.sort.default, y, 0), 0), "ranked", "the whole of dim 0"),
    "flip": (lambda b, y: b.call("flipped", ATEN.flip.default, y, [0]), "flipped", "works along the whole of dim 0"),
    "slice": (lambda b, y: b.call("front", ATEN.slice.Tensor, y, 0, 0, 4), "front", "works along the whole of dim 0"),
    "dropout": (_dropped, "dropped", "its random numbers are drawn from a single stream"),
    "bernoulli": (lambda b, y: b.call("drawn", ATEN.bernoulli.p, y, 0.5), "drawn", "drawn from a single stream"),
    "in place": (_written, "written", "it writes into an operand"),
    "coalesced": (_coalesced, "both", "split before collectives are merged"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_region_ends_with_a_reason(name: str) -> None:
    body, node, reason = COUPLED[name]
    _, report = split(program(body))
    found = {w.name: w.reason for w in report.whole}
    assert set(found) == ({node} if node else set())
    assert reason in found.get(node, "")


def test_blocks_of_several_sizes_stay_whole() -> None:
    _, report = split_batch(program(_uneven), dims={"x": 0})
    assert [(w.name, w.reason) for w in report.whole] == [
        ("a2a", "its blocks have several sizes, or sizes that depend on data")
    ]


def test_random_numbers_are_those_of_the_whole_op() -> None:
    def masked(b: Builder, y: fx.Node) -> fx.Node:
        mask = b.call("mask", ATEN.rand.default, [16, 8], dtype=torch.float32, device=torch.device("cpu"))
        return b.call("kept", ATEN.mul.Tensor, y, b.call("some", ATEN.ge.Scalar, mask, 0.5))

    made, _ = split(program(masked))  # runs both with the same stream
    assert len(chunks_of(made, ATEN.rand.default)) == 1
    assert len(chunks_of(made, ATEN.mul.Tensor)) == 2


def test_weights_are_gathered_once_and_gradients_reduced_once() -> None:
    b = Builder()
    x, shard, dy = b.placeholder("x"), b.placeholder("shard", (4, 8)), b.placeholder("dy")
    w = b.wait("w", b.gather("w_started", b.call("cast", CONVERT, shard, torch.float32), "b"))
    full, dfull = b.wait("full", b.gather("x_full", x)), b.wait("dfull", b.gather("dy_full", dy))
    out = b.wait("out", b.scatter("out_started", b.mm("mm", full, w)))
    dw = b.mm("dw", b.call("t", ATEN.permute.default, full, [1, 0]), dfull)
    gradient = b.wait("gradient", b.scatter("dw_started", dw, "b"))
    gm = b.done(out, gradient)
    made, report = split(gm)
    by_group = {g: sum(n.args[-1] == g for n in starts(made)) for g in "ab"}
    assert by_group == {"a": 6, "b": 2}
    assert report.sums == ("dw",)
    assert [n.target for n in made.graph.nodes if n.name.startswith("dw_chunk")] == [
        ATEN.mm.default,
        ATEN.addmm.default,
    ]


@pytest.mark.parametrize("is_fused", [True, False])
def test_sums_of_half_precision(is_fused: bool) -> None:
    """Row sums are added in float32 whatever is asked; products only where they are not fused."""

    def body(b: Builder, y: fx.Node) -> list[fx.Node]:
        return [_gradient(b, y), b.call("sums", ATEN.sum.dim_IntList, y, [0], True)]

    made, report = split(program(body, torch.bfloat16), fuse_sums=is_fused)
    assert ("rounded to their dtype after each chunk" in report.numerics) == is_fused
    assert len(chunks_of(made, ATEN.mm.default)) == (1 if is_fused else 2)
    adds = chunks_of(made, ATEN.add.Tensor)
    assert [n.meta["val"].dtype for n in adds] == [torch.float32] * (1 if is_fused else 2)
    dtypes = [n.meta["val"].dtype for n in made.graph.output_node().args[0]]
    assert dtypes == [torch.bfloat16] * 2


def test_bias_counts_once_in_a_sum_over_rows() -> None:
    def body(b: Builder, y: fx.Node) -> fx.Node:
        turned = b.call("turned", ATEN.permute.default, y, [1, 0])
        return b.call("dw", ATEN.addmm.default, b.placeholder("v", (8,)), turned, b.relu("relu", y))

    for is_fused in (True, False):
        split(program(body), fuse_sums=is_fused)


def test_results_keep_their_strides() -> None:
    """Saved values are what another graph was compiled for; views of one whole stay views of it."""

    def body(b: Builder, y: fx.Node) -> list[fx.Node]:
        wide = b.call("wide", ATEN.view.default, b.relu("relu", y), [16, 2, 4])
        turned = b.call("turned", ATEN.permute.default, wide, [1, 0, 2])
        return [b.call("neg", ATEN.neg.default, turned), turned, wide]

    gm = program(body)
    made, report = split(gm)
    before, after = (g.graph.output_node().args[0] for g in (gm, made))
    assert [n.meta["val"].stride() for n in after] == [n.meta["val"].stride() for n in before]
    assert report.num_joins == 2  # relu once for both of its views, and neg


def test_slices_copy_only_what_must_be() -> None:
    """Rows in one stretch, and single rows at equal distances, are views."""
    b = Builder()
    x = b.placeholder("x", (8, 8))
    total = b.reduce("ar", x)
    gm = b.done(b.wait("r", total), b.mm("mm", b.call("t", ATEN.permute.default, x, [1, 0]), b.relu("relu", x)))
    sizes = {}
    for outer, count in ((1, 2), (4, 2), (2, 2)):
        made, report = split_batch(gm, count, dims={"x": (0, outer)})
        assert_same_values(gm, made)
        sizes[outer] = report.copied_bytes
    joined = 8 * 8 * 4
    # the operand of the all-reduce is copied where it has gaps, and then its other use takes rows with gaps as they are
    assert sizes == {1: joined, 4: 2 * joined, 2: 2 * joined}


def test_chunks_by_an_inner_dim() -> None:
    """[seq * batch] rows, the batch innermost: a gather along the sequence keeps every sequence in one chunk."""
    b = Builder()
    x = b.placeholder("x", (4 * 4, 8))
    full = b.wait("full", b.gather("g", x))
    by_sequence = b.call("v", ATEN.view.default, full, [8, 4, 8])
    scanned = b.call("scan", ATEN.cumsum.default, by_sequence, 0)
    flat = b.call("flat", ATEN.view.default, scanned, [32, 8])
    gm = b.done(b.wait("out", b.scatter("s", flat)))
    made, report = split_batch(gm, 2, dims={"x": (0, 4)})
    assert_same_values(gm, made)
    assert not report.whole
    assert len(chunks_of(made, ATEN.cumsum.default)) == 2
    _, coupled = split_batch(gm, 2, dims={"x": 0})
    assert [w.name for w in coupled.whole] == ["scan"]


def test_input_is_untouched_and_result_is_deterministic() -> None:
    gm = program(ROW_BY_ROW["gradient"][0])
    text = str(gm.graph)
    one, other = split(gm)[0], split(gm)[0]
    assert str(gm.graph) == text
    assert str(one.graph) == str(other.graph)
    assert all("spec" not in n.meta for n in (*gm.graph.nodes, *one.graph.nodes))


def test_not_split() -> None:
    b = Builder()
    odd = b.done(b.wait("r", b.reduce("ar", b.placeholder("x", (7, 3)))))
    made, report = split_batch(odd)
    assert (report.is_taken, report.reason) == (False, "no value has rows that divide into equal chunks")
    assert len(starts(made)) == 1
    b = Builder()
    _, report = split_batch(b.done(b.relu("relu", b.placeholder("x"))))
    assert report.reason == "there is no collective between row-wise ops"


def test_buffers_that_are_written_into_are_no_rows() -> None:
    """A slice that is taken before the write would be of other values than one taken after it."""
    b = Builder()
    x = b.placeholder("x")
    total = b.wait("r", b.reduce("ar", x))
    b.call("written", ATEN.add_.Tensor, x, 1)
    gm = b.done(total, b.relu("relu", x))
    made, report = split_batch(gm, dims={"x": 0})
    assert not report.is_taken
    assert len(starts(made)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dims": {"nobody": 0}}, "does not name a tensor"),
        ({"dims": {"x": 5}}, "do not divide"),
        ({"dims": {"x": (0, 3)}}, "do not divide"),
        ({"num_chunks": 3, "dims": {"x": 0}}, "do not divide"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshweaveError, match=message):
        split_batch(program(lambda b, y: b.relu("relu", y)), **arguments)


def test_names_of_ops_in_the_report() -> None:
    _, report = split(program(COUPLED["scan"][0]))
    assert str(report).splitlines()[-1] == "  whole: scan (aten.cumsum): it works along the whole of dim 0"
