"""What the pass refuses, naming the node, and the graphs at the edge that it takes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.overlap.graphs import ATEN, Builder, assert_same_values, by_name, groups_of, peak, play, position, starts
from torch import fx

import meshweave as mw
from meshweave.errors import MeshweaveError
from meshweave.optimize.overlap import OverlapOptions, overlap
from meshweave.optimize.overlap.prices import CostNumbers

ONE = by_name({}, 1.0)


def refused(gm: fx.GraphModule, name: str, cost: Any = ONE, **options: Any) -> MeshweaveError:
    """The error of the pass, whose `where` names the node `name`; the graph handed in stays as it is."""
    before = str(gm.graph)
    with pytest.raises(MeshweaveError) as info:
        overlap(gm, cost=cost, groups=options.pop("groups", groups_of(0)), **options)
    assert re.search(rf"\b{re.escape(name)}\b", info.value.where), str(info.value)
    assert str(gm.graph) == before
    return info.value


def gathered() -> fx.GraphModule:
    """A gather, beside it a matmul that hides it."""
    b = Builder()
    x, y = b.placeholders("x y")
    full = b.wait("full", b.gather("gather", x))
    return b.done(full, b.mm("free", y, y))


# ---- collectives ------------------------------------------------------------------------------------------------


def test_a_collective_that_nobody_knows() -> None:
    with torch.library._scoped_library("_c10d_functional", "FRAGMENT") as library:
        library.define("shuffle_rows(Tensor input, str group_name) -> Tensor")
        library.impl("shuffle_rows", lambda x, group: x.clone(), "CompositeExplicitAutograd")
        b = Builder()
        x = b.placeholder("x")
        shuffled = b.call("shuffled", torch.ops._c10d_functional.shuffle_rows.default, x, "a")
        error = refused(b.done(b.wait("rows", shuffled)), "shuffled")
        assert "shuffle_rows" in str(error)
        assert "all_gather_into_tensor" in error.expected


def test_a_group_that_nobody_knows() -> None:
    """A machine's figures are for ranks; seconds of the caller's own are not, and need no group."""
    error = refused(gathered(), "gather", cost=mw.load_profile("h100"), groups={"other": (0, 1)})
    assert "'a'" in error.got
    assert "'other'" in error.expected
    _, report = overlap(gathered(), cost=ONE, groups={})
    assert report.seconds == 1


def test_a_group_of_another_size_than_the_op_says() -> None:
    error = refused(gathered(), "gather", cost=mw.load_profile("h100"), groups={"a": (0, 1, 2)})
    assert "2" in error.got
    assert "3" in error.expected


@pytest.mark.parametrize("kind", ["placeholder", "compute", "wait"])
def test_a_wait_without_a_start(kind: str) -> None:
    """An error, but for an input, which an earlier graph may have begun to fill, and for what has been waited for."""
    b = Builder()
    x, early = b.placeholders("x early")
    full = b.wait("full", b.gather("gather", x))
    source = {"placeholder": early, "compute": b.relu("relu", x), "wait": full}[kind]
    gm = b.done(full, b.wait("lost", source))
    if kind != "compute":
        after, _ = overlap(gm, cost=ONE, groups=groups_of(0))
        assert_same_values(gm, after)
    else:
        refused(gm, "lost")


# ---- buffers in flight ------------------------------------------------------------------------------------------


def written(where: str) -> fx.GraphModule:
    b = Builder()
    x, y = b.placeholders("x y")
    operand = b.relu("relu", x)
    target = b.call("view", ATEN.view.default, operand, [8, 8]) if where == "through a view" else operand
    start = b.reduce("reduce", operand)
    if where == "result":
        target = start
    b.call("write", ATEN.copy_.default, target, y)
    return b.done(b.wait("total", start))


@pytest.mark.parametrize("where", ["operand", "through a view", "result"])
def test_a_buffer_that_is_written_to_in_flight(where: str) -> None:
    error = refused(written(where), "write")
    assert "reduce" in str(error)


@pytest.mark.parametrize("through", [False, True])
def test_a_result_that_is_read_in_flight(through: bool) -> None:
    b = Builder()
    start = b.reduce("reduce", b.placeholder("x"))
    source = b.call("view", ATEN.view.default, start, [64]) if through else start
    read = b.relu("read", source)
    error = refused(b.done(read, b.wait("total", start)), "read")
    assert "wait" in str(error)


def test_a_part_of_a_coalesced_result_that_is_read_in_flight() -> None:
    b = Builder()
    both = b.gather("gather", b.placeholders("x y"))
    parts = [b.item(f"item_{i}", both, i) for i in range(2)]
    done = b.wait("full", parts[0])
    refused(b.done(done, b.relu("read", parts[1]), b.wait("full_1", parts[1])), "read")


# ---- costs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", ["free", "gather"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "1", None, True, 1j, (1.0,)])
def test_a_cost_that_is_no_duration(node: str, value: Any) -> None:
    error = refused(gathered(), node, cost=lambda n: value if n.name == node else 1.0)
    assert error.got == repr(value)
    assert "seconds" in error.expected


@pytest.mark.parametrize("node", ["free", "gather"])
def test_a_cost_that_raises(node: str) -> None:
    def cost(n: fx.Node) -> float:
        return {"free": 1.0, "gather": 1.0}[n.name if n.name != node else "unknown"]

    error = refused(gathered(), node, cost=cost)
    assert "KeyError" in error.got
    assert "unknown" in error.got


def test_an_error_of_ours_in_a_cost_passes_through() -> None:
    def cost(n: fx.Node) -> float:
        raise MeshweaveError("no figures", where=f"my table, {n.name}")

    assert refused(gathered(), "my table", cost=cost).what == "no figures"


def test_a_cost_of_another_kind() -> None:
    for cost in (3.0, None, {"free": 1.0}):
        with pytest.raises(MeshweaveError, match="cost"):
            overlap(gathered(), cost=cost, groups=groups_of(0))


def test_what_a_cost_is_asked_for() -> None:
    """Every op and every start; no waits, and views as to whether they cost anything. With two parameters, with the
    bytes handed in."""
    b = Builder()
    x, y = b.placeholders("x y")
    row = b.call("row", ATEN.select.int, x, 0, 0)
    starts_of = [b.gather(f"gather_{i}", t) for i, t in enumerate((x, y))]
    full = [b.wait(f"full_{i}", s) for i, s in enumerate(starts_of)]
    gm = b.done(*full, b.add("plus", row, 1))
    names: list[str] = []
    sizes: list[tuple[str, Any]] = []

    def by_node(node: fx.Node) -> float:
        names.append(node.name)
        return 1.0

    def by_bytes(node: fx.Node, num_bytes: int) -> float:
        sizes.append((node.name, num_bytes))
        return 1.0

    overlap(gm, cost=by_node, groups=groups_of(0))
    assert set(names) == {"gather_0", "gather_1", "plus", "row"}
    overlap(gm, cost=by_bytes, groups=groups_of(0))
    assert {name for name, _ in sizes} == {"gather_0", "gather_1", "plus", "row"}
    assert {("gather_0", 256), ("gather_1", 256)} <= set(sizes)


# ---- memory -----------------------------------------------------------------------------------------------------


def weights(layers: int = 3) -> fx.GraphModule:
    b = Builder()
    value = b.placeholder("x", (8, 128))
    for i, weight in enumerate([b.placeholder(f"weight_{i}", (64, 128)) for i in range(layers)]):
        value = b.mm(f"mm_{i}", value, b.wait(f"full_{i}", b.gather(f"gather_{i}", weight)))
    return b.done(value)


def test_a_cap_that_no_order_keeps() -> None:
    """The input order is the leanest there is: at each matmul one gathered weight, its operand and its result."""
    gm = weights()
    least = peak(gm)
    placed, report = overlap(gm, cost=ONE, groups=groups_of(0), memory_cap_bytes=least)
    assert report.peak_bytes == peak(placed) == least
    with pytest.raises(MeshweaveError) as info:
        overlap(gm, cost=ONE, groups=groups_of(0), memory_cap_bytes=least - 1)
    text = str(info.value)
    # The least peak that was found, and what stands at it, placeholders and the gathered weight among them.
    assert str(least) in text.replace(",", "")
    assert re.search(r"\bgather_\d|\bfull_\d", text)
    assert re.search(r"\bweight_\d", text)


@pytest.mark.parametrize("cap", [-1, float("nan")])
def test_a_cap_that_is_none(cap: Any) -> None:
    with pytest.raises(MeshweaveError):
        overlap(weights(), cost=ONE, groups=groups_of(0), memory_cap_bytes=cap)


# ---- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"communication_factor": -1.0},
        {"communication_factor": float("nan")},
        {"choose": "best"},
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(MeshweaveError) as info:
        overlap(gathered(), cost=ONE, groups=groups_of(0), options=OverlapOptions(**options))
    assert next(iter(options)) in str(info.value)


def test_figures_of_another_graph() -> None:
    with pytest.raises(MeshweaveError, match="different"):
        overlap(gathered(), cost=ONE, groups=groups_of(0), agree=lambda f: CostNumbers("another", f.numbers))
    with pytest.raises(MeshweaveError, match="different"):
        overlap(gathered(), cost=ONE, groups=groups_of(0), agree=lambda f: CostNumbers(f.fingerprint, f.numbers[1:]))


def test_a_node_that_nobody_described() -> None:
    gm = gathered()
    next(n for n in gm.graph.nodes if n.name == "free").meta.clear()
    assert "meta" in refused(gm, "free").got


# ---- edges ------------------------------------------------------------------------------------------------------


def test_an_empty_graph() -> None:
    gm = Builder().done()
    after, report = overlap(gm, cost=ONE, groups={})
    assert [n.op for n in after.graph.nodes] == ["output"]
    assert (report.seconds, report.seconds_before, report.exposed_seconds, report.peak_bytes) == (0, 0, 0, 0)
    assert report.collectives == report.merges == ()
    assert str(report)


def test_a_graph_without_collectives_stays_as_it_is() -> None:
    b = Builder()
    x, y = b.placeholders("x y")
    gm = b.done(b.mm("first", x, y), b.mm("second", y, x), b.relu("third", x))
    after, report = overlap(gm, cost=ONE, groups={})
    assert str(after.graph) == str(gm.graph)
    assert report.seconds == report.seconds_before == report.bound_seconds == 3


def test_one_collective_and_nothing_else() -> None:
    b = Builder()
    gm = b.done(b.wait("full", b.gather("gather", b.placeholder("x"))))
    after, report = overlap(gm, cost=ONE, groups=groups_of(0))
    assert str(after.graph) == str(gm.graph)
    assert (report.seconds, report.exposed_seconds, report.bound_seconds) == (1, 1, 1)
    assert [row.name for row in report.collectives] == ["gather"]


def test_a_collective_that_nobody_waits_for_is_kept_and_held_to_the_end() -> None:
    b = Builder()
    x, y = b.placeholders("x y")
    b.gather("lost", b.relu("relu", x))
    gm = b.done(b.mm("free", y, y))
    after, report = overlap(gm, cost=by_name({"lost": 2, "free": 1}), groups=groups_of(0))
    assert [n.name for n in starts(after)] == ["lost"]
    assert position(after)["lost"] < position(after)["free"]
    assert report.seconds == play(after, by_name({"lost": 2, "free": 1}))[0] == 2
    # x, y, what is gathered, the gathered value, the product
    assert report.peak_bytes == peak(after) == 256 * (2 + 1 + 2 + 1)
