"""Rows in sorted order, chunk by chunk: where that gives the same values, and what needs all rows in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.batch_split.chunked import BLOCKS, HALVES, Chunked
from tests.overlap.graphs import ATEN, Builder, assert_same_values
from torch import fx

from meshweave.optimize.decompose.cut import Cut

ROWS, EXPERTS = 8, 3


def cast(b: Builder, name: str, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return b.call(name, ATEN._to_copy.default, x, dtype=dtype)


def routed(b: Builder) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    """Tokens, their experts, these sorted, and the positions of the sorted."""
    x, scores = b.placeholder("x", (ROWS, 4)), b.placeholder("scores", (ROWS, EXPERTS))
    ids = b.call("ids", ATEN.argmax.default, scores, 1)
    sort = b.call("sort", ATEN.sort.stable, ids, stable=True, dim=0)
    return x, ids, b.item("sorted_ids", sort, 0), b.item("at", sort, 1)


def there_and_back(b: Builder) -> list[fx.Node]:
    """The rows in the order of their experts, an op on each, and back into the order of tokens."""
    x, _, _, at = routed(b)
    rows = b.relu("relu", b.call("rows", ATEN.index.Tensor, x, [at]))
    inverse = b.item("inverse", b.call("again", ATEN.sort.stable, at, stable=True, dim=0), 1)
    return [b.add("plus", b.call("back", ATEN.index.Tensor, rows, [inverse]), x)]


def put_back(b: Builder, accumulate: bool) -> list[fx.Node]:
    x, _, _, at = routed(b)
    rows = b.relu("relu", b.call("rows", ATEN.index.Tensor, x, [at]))
    zeros = b.call("zeros", ATEN.mul.Tensor, x, 0)
    return [b.add("plus", b.call("back", ATEN.index_put.default, zeros, [at], rows, accumulate), x)]


def by_table(b: Builder) -> list[fx.Node]:
    """A row of a table for each sorted expert, put back."""
    x, _, ids, at = routed(b)
    table = b.call("looked_up", ATEN.index.Tensor, b.placeholder("table", (EXPERTS, 4)), [ids])
    zeros = b.call("zeros", ATEN.mul.Tensor, x, 0)
    return [b.add("plus", b.call("back", ATEN.index_put.default, zeros, [at], table, True), x)]


def a_sum(b: Builder) -> list[fx.Node]:
    """A sum of all rows does not depend on their order."""
    x, _, _, at = routed(b)
    rows = b.relu("relu", b.call("rows", ATEN.index.Tensor, x, [at]))
    return [b.call("total", ATEN.sum.dim_IntList, rows, [0]), b.relu("other", x)]


def counts(b: Builder) -> list[fx.Node]:
    """How many rows each expert has, which is needed whole."""
    x, ids, _, _ = routed(b)
    wide = b.call("wide", ATEN.unsqueeze.default, ids, 1)
    each = b.call("each", ATEN.eq.Tensor, wide, b.call("numbers", ATEN.arange.start_step, 0, EXPERTS, 1))
    return [b.call("counts", ATEN.sum.dim_IntList, each, [0]), b.relu("other", x)]


def top_two(b: Builder) -> list[fx.Node]:
    """Each token goes to two experts: its rows are at positions 2 i and 2 i + 1."""
    x, scores = b.placeholder("x", (ROWS, 4)), b.placeholder("scores", (ROWS, EXPERTS))
    ids = b.item("ids", b.call("best", ATEN.topk.default, scores, 2, 1), 1)
    sort = b.call("sort", ATEN.sort.stable, b.call("flat", ATEN.view.default, ids, [2 * ROWS]), stable=True, dim=0)
    tokens = b.call("tokens", ATEN.floor_divide.default, b.item("at", sort, 1), 2)
    rows = b.relu("relu", b.call("rows", ATEN.index.Tensor, x, [tokens]))
    zeros = b.call("zeros", ATEN.mul.Tensor, x, 0)
    return [b.add("plus", b.call("back", ATEN.index_put.default, zeros, [tokens], rows, True), x)]


def experts(b: Builder) -> list[fx.Node]:
    """Each expert multiplies its rows, up to the end of which it counts."""
    x, ids, _, at = routed(b)
    rows = b.call("rows", ATEN.index.Tensor, x, [at])
    numbers = b.call("numbers", ATEN.arange.start_step, 0, EXPERTS, 1)
    each = b.call("each", ATEN.eq.Tensor, b.call("wide", ATEN.unsqueeze.default, ids, 1), numbers)
    running = b.call("running", ATEN.cumsum.default, b.call("counts", ATEN.sum.dim_IntList, each, [0]), 0)
    ends = cast(b, "ends", running, torch.int32)
    product = b.call("product", torch.ops.meshweave.grouped_mm.default, rows, b.placeholder("w", (EXPERTS, 4, 4)), ends)
    zeros = b.call("zeros", ATEN.mul.Tensor, x, 0)
    return [b.add("plus", b.call("back", ATEN.index_put.default, zeros, [at], product, True), x)]


VALID = {
    "experts": (experts, {"sort", "rows", "counts", "running", "ends", "product", "back", "plus"}),
    "two experts of each token": (top_two, {"best", "flat", "sort", "tokens", "rows", "relu", "back", "plus"}),
    "there and back": (there_and_back, {"sort", "rows", "relu", "again", "back", "plus"}),
    "put": (lambda b: put_back(b, False), {"sort", "rows", "relu", "back", "plus"}),
    "added": (lambda b: put_back(b, True), {"sort", "rows", "relu", "back", "plus"}),
    "rows of a table": (by_table, {"sort", "looked_up", "back", "plus"}),
    "a sum": (a_sum, {"sort", "rows", "relu", "total"}),
    "counts": (counts, {"each", "counts"}),
}


@pytest.mark.parametrize("cut", [HALVES, BLOCKS, Cut(0, 1, 4)])
@pytest.mark.parametrize("name", VALID)
def test_each_chunk_sorts_its_own_rows(name: str, cut: Cut) -> None:
    build, split = VALID[name]
    chunked = Chunked(build, cut, seed="scores")
    assert split <= set(chunked.split)
    assert_same_values(chunked.before, chunked.written())


def invalid(b: Builder, kind: str) -> Sequence[fx.Node]:
    """A use of sorted rows, or of their positions, that depends on all rows."""
    x, _, ids, at = routed(b)
    rows = b.call("rows", ATEN.index.Tensor, x, [at])
    uses: dict[str, Any] = {
        "positions as numbers": lambda: b.add("use", at, 1),
        "positions of other rows": lambda: b.call("use", ATEN.index.Tensor, b.placeholder("y", (9, 4)), [at]),
        "sorted rows communicate": lambda: b.wait("full", b.gather("use", rows)),
        "rows are combined": lambda: b.call("use", ATEN.view.default, rows, [ROWS // 2, 8]),
        "sorted rows are an output": lambda: b.relu("use", rows),
        "rows beside those in order": lambda: b.add("use", rows, x),
        "rows before and after": lambda: b.call("use", ATEN.cumsum.default, rows, 0),
        "positions from the end": lambda: b.item(
            "last", b.call("use", ATEN.sort.stable, at, stable=True, dim=0, descending=True), 1
        ),
        "a quotient that parts rows": lambda: b.call("use", ATEN.floor_divide.default, at, ROWS // 2 + ROWS),
    }
    return [uses[kind](), b.add("plus", x, 1.0), b.relu("kept", ids)]


INVALID = {
    "positions as numbers": "use needs all rows in order: positions of rows are used as numbers",
    "positions of other rows": "use needs all rows in order: its positions are of other rows",
    "sorted rows communicate": "use needs all rows in order: it communicates rows in another order",
    "rows are combined": "use needs all rows in order: it combines sorted rows",
    "sorted rows are an output": "output needs all rows in order: it is an output",
    "rows beside those in order": "use needs all rows in order: x is not sorted chunk by chunk",
    "rows before and after": "use needs all rows in order: it works along the whole of dim 0",
    "positions from the end": "use needs all rows in order: it sorts incomplete positions",
    "a quotient that parts rows": "use needs all rows in order: rows that belong together are in several chunks",
}


@pytest.mark.parametrize("cut", [HALVES, BLOCKS])
@pytest.mark.parametrize("kind", INVALID)
def test_a_sort_whose_order_is_needed_whole_stays_whole(kind: str, cut: Cut) -> None:
    chunked = Chunked(lambda b: invalid(b, kind), cut, seed="scores")
    assert "sort" not in chunked.split
    assert chunked.refused["sort"] == INVALID[kind]
    assert_same_values(chunked.before, chunked.written())


# numbers, and how many of each there are


def numbers(b: Builder) -> list[fx.Node]:
    _, ids, ordered, at = routed(b)
    wide, each = b.call("wide", ATEN.unsqueeze.default, ids, 1), b.call("upto", ATEN.arange.start_step, 0, EXPERTS, 1)
    one_hot = b.call("one_hot", ATEN.eq.Tensor, wide, each)
    counts = b.call("counts", ATEN.sum.dim_IntList, one_hot, [0])
    late = b.call("late", ATEN.arange.start_step, 1, EXPERTS + 1, 1)
    beyond = b.call("beyond", ATEN.sum.dim_IntList, b.call("shifted", ATEN.eq.Tensor, wide, late), [0])
    histogram = b.call("histogram", ATEN.histc.default, cast(b, "float_ids", ids, torch.float32), EXPERTS, 0, 2)
    wrong = b.call("wrong", ATEN.histc.default, histogram, EXPERTS, 0, 3)
    ends = b.call("ends", ATEN.cumsum.default, counts, 0, dtype=torch.int64)
    small = cast(b, "small", b.call("ends_of_histogram", ATEN.cumsum.default, histogram, 0), torch.int32)
    half = cast(b, "half", histogram, torch.bfloat16)
    rounded = b.call("rounded", ATEN.cumsum.default, histogram, 0, dtype=torch.bfloat16)
    down = b.call("down", ATEN.sort.stable, ids, stable=True, dim=0, descending=True)
    last = b.item("descending", down, 0)
    again = b.call("view", ATEN.view.default, cast(b, "to_int", ordered, torch.int32), [ROWS])
    return [beyond, wrong, ends, small, half, rounded, last, again, at]
