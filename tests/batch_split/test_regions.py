"""Which ops run in chunks if the rows of a value do, and why the others do not; work, written by hand."""

from __future__ import annotations

import pytest
import torch
from tests.batch_split.chunked import BLOCKS, HALVES, Build, Chunked, described, named, product
from tests.overlap.graphs import ATEN, Builder, assert_same_values
from torch import fx

from meshweave.optimize.batch_split.regions import regions
from meshweave.optimize.decompose.cut import FIXED, Cut


def chain(b: Builder) -> list[fx.Node]:
    """A product and what follows it; `alone` reads another input, `neg` the same."""
    x, rows = product(b)
    alone = b.relu("alone", b.placeholder("y", (8, 6)))
    return [b.add("plus", b.relu("relu", rows), alone), b.call("neg", ATEN.neg.default, x)]


def one_way(b: Builder) -> list[fx.Node]:
    """A sum over all rows, which is added to each of them."""
    _, rows = product(b)
    total = b.call("total", ATEN.sum.dim_IntList, rows, [0], True)
    return [b.call("centred", ATEN.sub.Tensor, rows, total)]


def coupled(b: Builder) -> list[fx.Node]:
    """Rows with those before them, and with themselves turned."""
    _, rows = product(b)
    running = b.call("running", ATEN.cumsum.default, rows, 0)
    gram = b.mm("gram", rows, b.call("turned", ATEN.t.default, rows))
    return [b.relu("after", running), b.relu("other", gram)]


def shifted(b: Builder) -> list[fx.Node]:
    """A sum of the halves of the rows."""
    _, rows = product(b)
    halves = [b.call(f"half_{i}", ATEN.slice.Tensor, rows, 0, 4 * i, 4 * i + 4) for i in range(2)]
    return [b.add("sum", *halves)]


def trailing(b: Builder) -> list[fx.Node]:
    """What leads to a value that is needed whole alone."""
    x, rows = product(b)
    return [b.call("running", ATEN.cumsum.default, rows, 0), b.relu("relu", x)]


def two_halves(b: Builder) -> list[fx.Node]:
    """The same rows along dim 0 of a value, and along dim 1 of another: an outer sum."""
    x, _ = product(b)
    column = b.call("column", ATEN.sum.dim_IntList, x, [1], True)
    row = b.call("row", ATEN.t.default, column)
    return [b.add("table", column, row)]


def around(kind: str) -> Build:
    """A collective between elementwise ops."""

    def build(b: Builder) -> list[fx.Node]:
        _, rows = product(b)
        return [b.relu("after", b.wait("full", b.start("start", kind, b.relu("before", rows))))]

    return build


def listed(b: Builder) -> list[fx.Node]:
    _, rows = product(b)
    parts = b.call("parts", ATEN.split.Tensor, rows, 2, 1)
    return [b.relu("after", b.call("cat", ATEN.cat.default, parts, 1))]


ALONG, NEEDS = "it works along the whole of dim 0", "every row of its result needs all rows of"
# The graph, what is cut, the ops in chunks, why others are not. Ops whose operands are whole stay whole if nothing in
# chunks needs their results.
REGIONS: dict[str, tuple[Build, str, Cut, str, dict[str, str]]] = {
    "from an input": (chain, "x", HALVES, "product alone relu plus", {}),
    "from a result": (chain, "plus", HALVES, "product alone relu plus", {}),
    "from another input": (chain, "y", HALVES, "product alone relu plus", {}),
    "columns of a product's operand": (chain, "x", Cut(1, 1, 2), "", {"product": "none of its operands is in chunks"}),
    "columns of its result": (chain, "relu", Cut(1, 1, 3), "product alone relu plus", {}),
    "a sum that comes back": (one_way, "x", HALVES, "product total centred", {}),
    "rows with those before, and with each other": (
        coupled, "x", HALVES, "product turned", {"running": ALONG, "gram": f"{NEEDS} turned"},
    ),
    "shifted rows": (shifted, "x", HALVES, "", {"half_0": ALONG, "half_1": ALONG}),
    "what is needed whole": (trailing, "x", HALVES, "", {"running": ALONG}),
    "rows of both operands": (two_halves, "x", HALVES, "column row", {"table": f"{NEEDS} row"}),
    "a gather": (around("all_gather_into_tensor"), "x", HALVES, "product before start full after", {}),
    "a scatter of halves": (
        around("reduce_scatter_tensor"), "x", HALVES, "product before",
        {"start": "a chunk of its rows is not the same part of the blocks of all 2 ranks"},
    ),
    "a scatter in blocks": (around("reduce_scatter_tensor"), "x", BLOCKS, "product before start full after", {}),
    "a list": (listed, "x", HALVES, "", {"parts": "its results are used as a list"}),
}  # fmt: skip


@pytest.mark.parametrize("name", REGIONS)
def test_regions(name: str) -> None:
    build, seed, cut, split, refused = REGIONS[name]
    chunked = Chunked(build, cut, seed=seed)
    assert chunked.split == split.split()
    assert {key: reason for key, reason in chunked.refused.items() if key in refused} == refused
    assert set(chunked.refused).isdisjoint(chunked.split)
    assert chunked.regions.count == cut.count
    assert_same_values(chunked.before, chunked.written())


def names_of(gm: fx.GraphModule, *seeds: str) -> tuple[list[str], dict[str, str]]:
    cut = regions(gm.graph, {named(gm, seed): HALVES for seed in seeds})
    return [n.name for n in cut.rules], {n.name: reason for n, reason in cut.refused.items()}


def apart(b: Builder) -> list[fx.Node]:
    x, y, w = b.placeholder("x", (8, 4)), b.placeholder("y", (8, 4)), b.placeholder("w", (4, 6))
    return [b.relu(f"relu_{v.name}", b.mm(f"product_{v.name}", v, w)) for v in (x, y)]


def test_rows_of_other_chunks_are_not_combined() -> None:
    """Of one operand a chunk is a half, of the other a part of each block."""

    def build(b: Builder) -> list[fx.Node]:
        return [b.add("plus", *apart(b))]

    gm = described(build)
    cut = regions(gm.graph, {named(gm, "x"): HALVES, named(gm, "y"): BLOCKS})
    assert [n.name for n in cut.rules] == ["product_x", "relu_x", "product_y", "relu_y"]
    assert cut.refused == {named(gm, "plus"): "it combines other rows than the chunks of relu_y"}


def test_a_fixed_op_ends_a_region() -> None:
    gm = described(chain)
    named(gm, "relu").meta[FIXED] = "a hook reads it"
    split, refused = names_of(gm, "x")
    assert split == []
    assert refused == {"relu": "a hook reads it"}


def written(target: str) -> Build:
    """Between two ops on rows of a value its memory is written, or that of a weight."""

    def build(b: Builder) -> list[fx.Node]:
        x, rows = product(b)
        relu = b.relu("relu", rows)
        value = {"x": x, "w": rows.args[1], "relu": relu}[target]
        near = b.add("near", b.call("before", ATEN.neg.default, value), 1.0)
        b.call("write", ATEN.mul_.Tensor, b.call("flat", ATEN.view.default, value, [-1]), 2.0)
        after = b.call("after", ATEN.neg.default, value)
        far = b.add("far", after, rows) if target == "relu" else b.add("far", after, 3.0)
        return [near, far, b.add("plus", rows, 1.0), relu]

    return build


WRITTEN = {
    "x": ([], {"product": "the memory of x is written"}),
    "relu": (
        ["product", "far", "plus"],
        {"relu": "the memory of relu is written", "after": "the memory of relu is written"},
    ),
    "w": (["product", "relu", "plus"], {}),
}


@pytest.mark.parametrize("cut", [HALVES, BLOCKS])
@pytest.mark.parametrize("target", WRITTEN)
def test_memory_that_is_written_is_not_in_chunks(target: str, cut: Cut) -> None:
    """A write changes the whole value, and chunks of it would be as before."""
    split, refused = WRITTEN[target]
    chunked = Chunked(written(target), cut, seed="product")
    assert_same_values(chunked.before, chunked.written())
    assert chunked.split == split
    assert {name: reason for name, reason in chunked.refused.items() if name in refused} == refused


def test_a_wait_is_in_chunks_if_its_communication_is() -> None:
    gm = described(around("all_gather_into_tensor"))
    named(gm, "start").meta[FIXED] = "it is fixed"
    split, refused = names_of(gm, "x", "full")
    assert split == ["product", "before"]
    assert refused["start"] == "it is fixed"
    assert refused["full"] == "its communication is not in chunks"


def test_a_result_with_gaps_in_memory_is_not_joined() -> None:
    gm = described(chain)
    product_node = named(gm, "product")
    product_node.meta["val"] = torch.empty_strided((8, 6), (12, 1), device="meta")
    assert names_of(gm, "x")[1]["product"] == "its result has gaps in memory"
    product_node.meta["val"] = torch.empty_strided((8, 6), (1, 8), device="meta")
    assert names_of(gm, "x") == (["product", "alone", "relu", "plus"], {})
