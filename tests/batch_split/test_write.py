"""Graphs in chunks, written from regions: the same values on all ranks, in the same memory layout, and how often."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.batch_split.chunked import BLOCKS, HALVES, QUARTERS, Build, Chunked, described, named, names, product
from tests.overlap.graphs import ATEN, Builder, assert_same_values
from torch import fx

from meshweave.errors import VerifyError
from meshweave.optimize.batch_split.orders import RowRule
from meshweave.optimize.batch_split.regions import Regions
from meshweave.optimize.batch_split.write import RowWriter
from meshweave.optimize.decompose.cut import Cut

HALF = torch.bfloat16


def a_layer(b: Builder) -> list[fx.Node]:
    """Rows are gathered, multiplied, and scattered; the weight is gathered whole."""
    x, w = b.placeholder("x", (8, 4)), b.placeholder("w", (3, 4))
    full = b.wait("full", b.gather("gather", x))
    weight = b.call("turned", ATEN.t.default, b.wait("weight", b.gather("shard", w)))
    up = b.relu("relu", b.mm("up", full, weight))
    return [b.wait("own", b.scatter("scatter", b.mm("down", up, b.call("back", ATEN.t.default, weight))))]


def a_gradient(dtype: torch.dtype = torch.float32) -> Build:
    """The gradient of a weight sums over rows; another sum reads the product."""

    def build(b: Builder) -> list[fx.Node]:
        x, rows = product(b, dtype)
        gradient = b.mm("gradient", b.call("turned", ATEN.t.default, x), b.relu("relu", rows))
        return [gradient, b.call("sum", ATEN.sum.dim_IntList, rows, [0]), b.call("total", ATEN.sum.default, rows)]

    return build


def combined(b: Builder) -> list[fx.Node]:
    """Every way to combine results of chunks that is no sum."""
    _, rows = product(b, HALF)
    return [
        b.call("mean", ATEN.mean.dim, rows, [0]),
        b.call("most", ATEN.amax.default, rows, [0]),
        b.call("least", ATEN.amin.default, rows, [0]),
        b.call("means", ATEN.mean.dim, rows, [1]),
    ]


def several_results(b: Builder) -> list[fx.Node]:
    """A list of parts, and a norm with statistics."""
    x, rows = product(b)
    split = b.call("parts", ATEN.split.Tensor, rows, 2, 1)
    parts = [b.item(f"part_{i}", split, i) for i in range(3)]
    largest = b.call("largest", ATEN.topk.default, x, 2, 1)
    return [b.add("sum", parts[0], parts[2]), *(b.item(f"largest_{i}", largest, i) for i in range(2)), parts[1]]


def views(b: Builder) -> list[fx.Node]:
    """Shapes of their own, of chunks and of whole values, and a value that lies turned in memory."""
    x, rows = product(b)
    apart = b.call("apart", ATEN.view.default, rows, [2, 4, 6])
    wide = b.call("wide", ATEN.expand.default, b.call("single", ATEN.unsqueeze.default, rows, 1), [8, 3, 6])
    turned = b.relu("turned", b.call("t", ATEN.t.default, x))
    cycled = b.relu("cycled", b.call("cycle", ATEN.permute.default, apart, [2, 0, 1]))
    return [
        b.relu("relu", apart),
        b.add("plus", wide, 1.0),
        turned,
        cycled,
        b.call("flat", ATEN.view.default, rows, [48]),
    ]


def mixed(b: Builder) -> list[fx.Node]:
    """In order along the rows: whole, which needs joined rows, and gives what is sliced again."""
    _, rows = product(b)
    sums = b.call("running", ATEN.cumsum.default, rows, 0)
    return [b.add("again", rows, sums), b.call("other", ATEN.cumsum.default, rows, 0)]


def added_rows(b: Builder) -> list[fx.Node]:
    """Rows are added to those of a table, chunk after chunk."""
    x, _ = product(b)
    at = b.call("at", ATEN.remainder.Scalar, b.call("numbers", ATEN.sum.dim_IntList, b.relu("relu", x), [1]), 3)
    table = b.placeholder("table", (3, 4))
    return [b.call("put", ATEN.index_put.default, table, [cast(b, "index", at)], b.add("plus", x, 1.0), True)]


def cast(b: Builder, name: str, x: fx.Node) -> fx.Node:
    return b.call(name, ATEN._to_copy.default, x, dtype=torch.int64)


WRITTEN: dict[str, tuple[Build, tuple[Cut, ...]]] = {
    "a layer": (a_layer, (HALVES, QUARTERS, BLOCKS, Cut(1, 1, 2))),
    "a gradient": (a_gradient(), (HALVES, QUARTERS, BLOCKS, Cut(1, 1, 2))),
    "a gradient in bf16": (a_gradient(HALF), (HALVES, BLOCKS)),
    "combined": (combined, (HALVES, BLOCKS)),
    "several results": (several_results, (HALVES, BLOCKS)),
    "views": (views, (HALVES, QUARTERS, BLOCKS)),
    "mixed": (mixed, (HALVES, BLOCKS)),
    "added rows": (added_rows, (HALVES, QUARTERS, BLOCKS)),
}


@pytest.mark.parametrize(("name", "cut"), [(name, cut) for name, (_, cuts) in WRITTEN.items() for cut in cuts], ids=str)
@pytest.mark.parametrize("fuse_sums", [False, True])
def test_values_and_memory_layouts_stay(name: str, cut: Cut, fuse_sums: bool) -> None:
    chunked = Chunked(WRITTEN[name][0], cut, fuse_sums=fuse_sums)
    assert chunked.split
    assert_same_values(chunked.before, chunked.written())


# What runs, the slices and joins, and the bytes that they and copies write.
TEXTS: dict[str, tuple[Callable[[], Chunked], str, tuple[int, int, int]]] = {
    "halves": (
        lambda: Chunked(a_gradient()),
        "x_chunk0 product_chunk0 x_chunk1 product_chunk1 turned_chunk0 turned_chunk1 relu_chunk0 relu_chunk1 "
        "gradient_chunk0 gradient_chunk1 gradient sum_1_chunk0 sum_1_chunk1 sum_1 total_chunk0 total_chunk1 total",
        (2, 0, 0),
    ),
    "products that add themselves": (
        lambda: Chunked(a_gradient(), fuse_sums=True),
        "x_chunk0 product_chunk0 x_chunk1 product_chunk1 turned_chunk0 turned_chunk1 relu_chunk0 relu_chunk1 "
        "gradient_chunk0 gradient_chunk1 sum_1_chunk0 sum_1_chunk1 sum_1 total_chunk0 total_chunk1 total",
        (2, 0, 0),
    ),
    "joined rows, and slices of a whole value": (
        lambda: Chunked(mixed),
        "x_chunk0 product_chunk0 x_chunk1 product_chunk1 product running "
        "running_chunk0 again_chunk0 running_chunk1 again_chunk1 again other",
        (4, 2, 2 * 8 * 6 * 4),
    ),
    "blocks": (
        # x as [2, 2, 2, 4]: a part of it is a slice that is copied to be a matrix; a joined value is put together so
        lambda: Chunked(lambda b: [b.relu("relu", product(b)[1])], BLOCKS),
        "x_1 x_chunk0 x_chunk0_1 x_chunk0_2 product_chunk0 x_2 x_chunk1 x_chunk1_1 x_chunk1_2 product_chunk1 "
        "relu_chunk0 relu_chunk1 relu relu_1 relu_2 relu_3",
        (2, 1, 8 * 4 * 4 + 8 * 6 * 4),
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_ops_run_once_per_chunk_and_others_once(name: str) -> None:
    build, text, (num_slices, num_joins, num_bytes) = TEXTS[name]
    chunked = build()
    assert names(chunked.written()) == text
    writer = chunked.writer
    assert (writer.num_slices, writer.num_joins, writer.copied) == (num_slices, num_joins, num_bytes)


def test_sums_of_half_precision_are_added_in_float32() -> None:
    gm = Chunked(a_gradient(HALF)).written()
    adds = [n for n in gm.graph.nodes if n.target is ATEN.add.Tensor]
    assert len(adds) == 3
    assert {n.meta["val"].dtype for n in adds} == {torch.float32}
    assert [n.kwargs for n in gm.graph.nodes if n.target is ATEN.sum.dim_IntList] == [{"dtype": torch.float32}] * 2
    means = [n for n in Chunked(combined).written().graph.nodes if n.target is ATEN.mean.dim]
    assert [n.kwargs for n in means if n.args[1] == [0]] == [{"dtype": torch.float32}] * 2
    outputs = gm.graph.find_nodes(op="output")[0].args[0]
    assert {n.meta["val"].dtype for n in outputs} == {HALF}


def test_a_product_adds_itself_to_that_of_the_chunk_before() -> None:
    gm = Chunked(a_gradient(), QUARTERS, fuse_sums=True).written()
    products = [n for n in gm.graph.nodes if n.name.startswith("gradient")]
    assert [n.target for n in products] == [ATEN.mm.default, *[ATEN.addmm.default] * 3]
    assert [n.args[0] for n in products[1:]] == products[:-1]
    assert gm.graph.find_nodes(op="output")[0].args[0][0] is products[-1]


def test_integers_are_not_added_by_the_product() -> None:
    build = a_gradient(torch.int64)
    gm = Chunked(build, fuse_sums=True).written()
    assert not gm.graph.find_nodes(op="call_function", target=ATEN.addmm.default)
    assert_same_values(described(build), gm)


def test_a_wrong_rule_is_named() -> None:
    """A rule by which a sum adds half of its rows to all of them."""

    def build(b: Builder) -> list[fx.Node]:
        x, y = b.placeholders("x y", (8, 4))
        return [b.add("plus", x, y)]

    gm = described(build)
    plus = named(gm, "plus")
    rules = {plus: RowRule((HALVES, None), (HALVES,))}
    writer = RowWriter(gm.graph, Regions(2, {plus: HALVES, named(gm, "x"): HALVES}, rules), False)
    with pytest.raises(VerifyError, match="an op cannot take chunks of its rows") as error:
        writer.run()
    assert error.value.where == "node plus (aten.add.Tensor)"
    assert error.value.hint.startswith("fix the rule in sharding/")
