"""Why collectives are exposed and neighbours not merged: rows of orders written by hand, beside figures worked out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.overlap.by_hand import all_orders
from tests.overlap.graphs import ATEN, Builder, Cost, by_name, by_size, groups_of
from torch import fx

from meshweave.ir.device_program import graph_program
from meshweave.optimize.overlap.explain import collective_rows, exposed_of, merge_rows
from meshweave.optimize.overlap.merge import Merger
from meshweave.optimize.overlap.play import play
from meshweave.optimize.overlap.prices import costs_of, fill_prices
from meshweave.optimize.overlap.read import read_problem
from meshweave.optimize.overlap.report import CollectiveRow, Merge
from meshweave.optimize.overlap.search import OrderCandidate, OrderSearch
from meshweave.optimize.overlap.waits import with_waits


class Judged:
    """Orders of a graph, as candidates of a search."""

    def __init__(self, gm: fx.GraphModule, cost: Cost) -> None:
        program, costs = graph_program(gm.graph, groups_of(0)), costs_of(cost)
        reading = read_problem(program, costs.kernel_views(gm.graph))
        self.merger = Merger(reading, fill_prices(reading, costs.prices(reading), 1.0, None))
        self.search = OrderSearch(self.merger, float("inf"), None)
        self.problem = reading.problem

    def order(self, text: str, name: str = "mine", buckets: tuple[tuple[int, ...], ...] = ()) -> OrderCandidate:
        """The candidate of an order of names; `~x` is the wait for x, and waits that are not there come last."""
        shape = self.search.shape(buckets)
        names = shape.merged.problem.names
        order = [~names.index(x[1:]) if x.startswith("~") else names.index(x) for x in text.split()]
        return self.search.judge(name, shape.merged, with_waits(shape.merged.problem, order))

    def rows(self, text: str) -> dict[str, CollectiveRow]:
        return {row.name: row for row in collective_rows(self.merger, self.order(text), None)}


def graph(*, is_chained: bool = False, group: str = "a") -> fx.GraphModule:
    """Two gathers, the second over `group`, a matmul of each, a sum that reads the first and its matmul, and matmuls of
    inputs. If it is chained, the first gather is of a matmul."""
    b = Builder()
    x, y = b.placeholders("x y")
    source = b.mm("before", x, x) if is_chained else x
    starts = [b.gather("first", source), b.gather("second", y, group)]
    uses = [b.mm(f"uses_{start.name}", b.wait(f"full_{start.name}", start), y) for start in starts]
    last = b.add("last", uses[0], uses[0].args[0])
    return b.done(*uses, last, b.mm("free", y, y), b.mm("more", y, y))


SECONDS = {"first": 4e-3, "second": 2e-3, "before": 1e-3, "free": 3e-3, "more": 1e-3, "uses_first": 1e-3}


def alone() -> fx.GraphModule:
    """A gather whose result is returned, and five matmuls of inputs."""
    b = Builder()
    x = b.placeholder("x")
    full = b.wait("full", b.gather("gather", x))
    return b.done(full, *(b.mm(name, x, x) for name in "edcba"))


def test_rows_are_exposed_for_as_long_as_compute_waits() -> None:
    """In every order: what the step takes beyond its kernels."""
    judged = Judged(graph(group="b"), by_name(SECONDS))
    orders = [judged.search.judge("", judged.search.shape(()).merged, with_waits(judged.problem, items))
              for items in all_orders(judged.problem)]  # fmt: skip
    assert len(orders) > 100
    for order in orders:
        rows = collective_rows(judged.merger, order, None)
        assert [row.name for row in rows] == [judged.problem.names[x] for x in order.order if x in (0, 1)]
        exposed = order.seconds[0] - sum(judged.problem.seconds)
        assert sum(row.exposed_seconds for row in rows) == pytest.approx(exposed)
        assert exposed_of(play(judged.problem, order.order)) == pytest.approx(exposed)


# What the graph is, seconds of its own, the order, and the reasons of the exposed collectives.
REASONS: dict[str, tuple[dict[str, Any], dict[str, float], str, dict[str, str]]] = {
    "it is first": (
        {}, {}, "first uses_first free more second uses_second last",
        {
            "first": "uses_first needs it; nothing comes before it; free could have run meanwhile",
            "second": "uses_second needs it; it starts 9.000 ms later than possible, because of memory or order; "
            "no other item is left that could run",
        },
    ),
    "its operand comes late": (
        {"is_chained": True}, {}, "free before first uses_first more second uses_second last",
        {
            "first": "uses_first needs it; before has just computed its operand; more could have run meanwhile",
            "second": "uses_second needs it; it starts 10.000 ms later than possible, because of memory or order; "
            "no other item is left that could run",
        },
    ),
    "its link is busy": (
        {}, {}, "first second free more uses_first uses_second last",
        {"second": "uses_second needs it; its link is busy with first; no other item is left that could run"},
    ),
    "its link is busy with the last before it": (
        {}, {"second": 20e-3}, "second first free more uses_second uses_first last",
        {
            "first": "uses_first needs it; its link is busy with second; no other item is left that could run",
            "second": "uses_second needs it; nothing comes before it; no other item is left that could run",
        },
    ),
    "what needs a communication that has ended could run": (
        {}, {"uses_second": 1e-3}, "second free first more uses_first uses_second last",
        {
            "first": "uses_first needs it; it starts 3.000 ms later than possible, because of memory or order; "
            "uses_second could have run meanwhile",
        },
    ),
    "what needs a communication that has not ended could not": (
        {"group": "b"}, {"first": 6e-3, "second": 5e-3, "uses_second": 1e-3},
        "first second free more uses_first uses_second last",
        {"first": "uses_first needs it; nothing comes before it; no other item is left that could run"},
    ),
    "what needs a later kernel could not": (
        {}, {"uses_first": 0.0, "last": 1e-3}, "first free more second uses_second uses_first last",
        {
            "second": "uses_second needs it; it starts 4.000 ms later than possible, because of memory or order; "
            "no other item is left that could run",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_an_exposed_collective_has_a_reason(name: str) -> None:
    kind, cost, text, expected = REASONS[name]
    rows = Judged(graph(**kind), by_name(SECONDS | cost)).rows(text)
    assert {row.name: row.reason for row in rows.values() if row.exposed_seconds} == expected


def test_a_merged_collective_has_the_bytes_of_all() -> None:
    """Two gathers as a single one, and reductions of twice the bytes: in the merged problem they have other numbers."""
    b = Builder()
    x, y, z = *b.placeholders("x y"), b.placeholder("z", (16, 8))
    starts = [b.gather("gather_x", x), b.gather("gather_y", y), b.reduce("total", z), b.scatter("part", z)]
    waits = [b.wait(None, start) for start in starts]
    judged = Judged(b.done(*waits), by_size({}, latency=1.0, seconds=1.0))
    shape = judged.search.shape(((0, 1),))
    rows = collective_rows(judged.merger, judged.search.judge("", shape.merged, shape.merged.problem.order), None)
    assert [(row.name, row.op, row.bytes) for row in rows] == [
        ("gather_x+gather_y", "all_gather_into_tensor", 512), ("total", "all_reduce", 512),
        ("part", "reduce_scatter_tensor", 512),
    ]  # fmt: skip


# merges


def gathers(num: int = 2, *, is_chained: bool = False) -> fx.GraphModule:
    """Gathers of 256 bytes of inputs; if it is chained, each is of the one before."""
    b = Builder()
    full = [b.placeholder(f"x_{i}") for i in range(num)]
    for i in range(num):
        rows = b.call(f"rows_{i}", ATEN.slice.Tensor, full[i - 1], 0, 0, 8) if is_chained and i else full[i]
        full[i] = b.wait(f"full_{i}", b.gather(f"gather_{i}", b.relu(f"relu_{i}", rows)))
    return b.done(*full)


COST = by_size({}, latency=1e-3, seconds=2e-3)
EQUAL = "6.000 ms, not 6.000 ms (wide)"
PLAIN = "relu_0 gather_0 relu_1 gather_1"


def test_a_merge_saves_the_latency_of_all_but_one() -> None:
    judged = Judged(gathers(3), COST)
    starts = tuple(judged.problem.starts)
    chosen = judged.search.judge("mine", merged := judged.search.shape((starts,)).merged, merged.problem.order)
    assert merge_rows(judged.search, chosen) == (
        Merge(("gather_0", "gather_1", "gather_2"), True, "", pytest.approx(2e-3)),
    )


def test_a_start_that_needs_another_is_never_merged_with_it() -> None:
    judged = Judged(gathers(2, is_chained=True), COST)
    (row,) = merge_rows(judged.search, judged.order(PLAIN))
    assert (row.names, row.is_taken) == (("gather_0", "gather_1"), False)
    assert row.reason == "gather_1 needs the result of gather_0, by way of relu_1"


def test_a_set_of_buckets_that_nobody_tried_says_why() -> None:
    judged = Judged(gathers(), COST)
    chosen = judged.order(PLAIN)
    (row,) = merge_rows(judged.search, chosen)
    assert row.reason == "together 0.0 MB, more than 0 MB"
    judged.search.by_size[1e6, 1e6] = ()
    (row,) = merge_rows(judged.search, chosen)
    assert row.reason == "in every set of buckets that was tried either of them is in another bucket"


@pytest.mark.parametrize(
    ("seconds", "busy", "reason"),
    [
        (9e-3, 1e-3, "the step would take 9.000 ms, not 6.000 ms (wide)"),
        (6e-3, 9e-3, f"links and copies would do 9.000 ms, not 6.000 ms, for a step of {EQUAL}"),
        (
            6e-3,
            6e-3,
            f"the step would take {EQUAL}, but lose more where links are slower or shared",
        ),
    ],
)
def test_the_best_order_that_merges_them_is_compared(seconds: float, busy: float, reason: str) -> None:
    judged = Judged(gathers(), COST)
    chosen = judged.order(PLAIN)
    assert (chosen.seconds[0], chosen.busy) == pytest.approx((6e-3, 6e-3))
    shape = judged.search.shape((tuple(judged.problem.starts),))
    merged = judged.search.judge("wide", shape.merged, shape.merged.problem.order)
    slower = replace(merged, name="slower", seconds=(seconds + 1e-3,))
    unfit = replace(merged, name="too large", seconds=(1e-3,), peak=10**9)
    judged.search.cap = 10**6
    judged.search.judged = [
        unfit,
        slower,
        replace(merged, seconds=(seconds,), merged=replace(merged.merged, busy=busy)),
        chosen,
    ]
    (row,) = merge_rows(judged.search, chosen)
    assert (row.is_taken, row.reason) == (False, reason)
