"""Any graph in the form of the pass: its groups, and which of its nodes must stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.overlap.graphs import ATEN, Builder, groups_of
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from meshweave.errors import MeshweaveError
from meshweave.optimize.decompose.cut import FIXED, LOOSE
from meshweave.optimize.decompose.lower import RingGraph, ring_graph

WRITTEN = "accesses memory that is written"


def two_groups() -> fx.Graph:
    b = Builder()
    x = b.placeholder("x")
    row = b.wait("row", b.gather("by_row", x, "a"))
    column = b.wait("column", b.reduce("by_column", x, "b"))
    other = b.wait("other", b.start("sent", "broadcast", x, "w"))
    b.done(row, column, other)
    return b.graph


def nodes_of(rings: RingGraph) -> dict[str, fx.Node]:
    return {node.name: node for node in rings.program.graph.nodes}


@pytest.mark.parametrize(("rank", "row", "column"), [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)])
def test_members_of_the_groups_of_collectives_that_rings_replace(rank: int, row: int, column: int) -> None:
    """Rank 2 r + c of a 2 x 2 mesh is at c in its row a and at r in its column b; a broadcast is not decomposed."""
    groups = groups_of(rank)
    rings = ring_graph(two_groups(), groups, rank)
    assert rings.members == {"a": groups["a"], "b": groups["b"]}
    assert (rings.index("a"), rings.index("b"), rings.rank) == (row, column, rank)


def test_a_rank_outside_of_a_group_of_its_graph_is_an_error() -> None:
    with pytest.raises(MeshweaveError, match="this rank is not in the group") as error:
        ring_graph(two_groups(), groups_of(0), 3)
    assert "rank 3, group 'a' of ranks (0, 1)" in str(error.value)
    only_broadcast = Builder()
    only_broadcast.done(
        only_broadcast.wait("own", only_broadcast.start("sent", "broadcast", only_broadcast.placeholder("x"), "a"))
    )
    assert ring_graph(only_broadcast.graph, groups_of(0), 3).members == {}


# starts that are refused


def refused(build: Callable[[Builder, fx.Node], tuple[fx.Node, ...]]) -> str:
    """The reason for the start named `start` of a graph with these outputs."""
    b = Builder()
    b.done(*build(b, b.placeholder("x")))
    rings = ring_graph(b.graph, groups_of(0), 0)
    return rings.program.refused(nodes_of(rings)["start"])


def test_a_gather_with_a_single_wait_is_not_refused() -> None:
    assert refused(lambda b, x: (b.wait("full", b.gather("start", x)),)) == ""


def _waited_twice(b: Builder, x: fx.Node) -> tuple[fx.Node, ...]:
    start = b.gather("start", x)
    return b.wait("full", start), b.wait("again", start)


def _returned(b: Builder, x: fx.Node) -> tuple[fx.Node, ...]:
    return (b.gather("start", x),)


@pytest.mark.parametrize("build", [_waited_twice, _returned])
def test_a_start_without_a_wait_of_its_own_is_refused(
    build: Callable[[Builder, fx.Node], tuple[fx.Node, ...]],
) -> None:
    assert refused(build) == "it is waited for more than once, or not in this graph"


def _written_result(b: Builder, x: fx.Node) -> tuple[fx.Node, ...]:
    return (b.call("written", ATEN.relu_.default, b.wait("full", b.gather("start", x))),)


def _written_operand(b: Builder, x: fx.Node) -> tuple[fx.Node, ...]:
    view = b.call("view", ATEN.view.default, x, [64])
    full = b.wait("full", b.gather("start", x))
    return full, b.call("written", ATEN.relu_.default, view)


@pytest.mark.parametrize("build", [_written_result, _written_operand])
def test_collectives_of_memory_that_is_written_are_refused(
    build: Callable[[Builder, fx.Node], tuple[fx.Node, ...]],
) -> None:
    assert refused(build) == f"it {WRITTEN}"


def test_a_group_that_is_no_name_is_refused() -> None:
    """By keyword, or by a name that stands for no group of the graph."""
    b = Builder()
    x = b.placeholder("x")
    full = b.wait("full", b.gather("start", x))
    b.done(full)
    rings = ring_graph(b.graph, groups_of(0), 0)
    start = nodes_of(rings)["start"]
    start.args = (*start.args[:-1], "another")
    assert rings.program.refused(start) == "its group is not passed by name"
    start.args, start.kwargs = (start.args[0], 2), {"group_name": "a"}
    assert rings.program.refused(start) == "its group is not passed by name"


# nodes that must not change or move


def marks(b: Builder) -> tuple[dict[str, str], set[str]]:
    """Which nodes are fixed, with the reason, and which are loose."""
    nodes = nodes_of(ring_graph(b.graph, groups_of(0), 0))
    fixed = {name: node.meta[FIXED] for name, node in nodes.items() if FIXED in node.meta}
    return fixed, {name for name, node in nodes.items() if LOOSE in node.meta}


def test_only_the_collectives_that_rings_replace_are_loose() -> None:
    b = Builder()
    b.graph = two_groups()
    assert marks(b) == ({}, {"by_row", "by_column"})


def test_nodes_near_written_memory_are_fixed_and_not_loose() -> None:
    """Those that read or write it, through views, too; others stay free."""
    b = Builder()
    x, y = b.placeholders("x y")
    view = b.call("view", ATEN.view.default, x, [64])
    read = b.call("read", ATEN.relu.default, x)
    full = b.wait("full", b.gather("start", x))
    written = b.call("written", ATEN.relu_.default, view)
    b.done(read, full, written, b.relu("other", y), b.wait("far", b.gather("free", read)))
    fixed, loose = marks(b)
    assert fixed == dict.fromkeys(["view", "read", "start", "written"], WRITTEN)
    assert loose == {"free"}


def test_an_out_argument_is_written() -> None:
    b = Builder()
    x, into = b.placeholders("x into")
    b.done(b.call("total", ATEN.add.out, x, x, out=into), b.relu("read", into), b.relu("other", x))
    assert marks(b)[0] == dict.fromkeys(["total", "read"], WRITTEN)


def test_random_ops_and_symbolic_sizes_are_fixed() -> None:
    b = Builder()
    x = b.placeholder("x")
    drawn = b.call("drawn", ATEN.bernoulli.default, x)
    symbolic = b.placeholder("rows")
    size = ShapeEnv().create_unbacked_symint()
    torch._check(size >= 2)
    with b.mode:
        symbolic.meta["val"] = torch.empty((size, 8))
    out = b.graph.call_function(ATEN.relu.default, (symbolic,))
    out.meta["val"] = symbolic.meta["val"]
    b.done(drawn, out)
    fixed, _ = marks(b)
    assert fixed == {"drawn": "has effects besides its result", out.name: "has sizes that are unknown at compile time"}
