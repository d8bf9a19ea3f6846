"""Equal gathers become a single gather, whose value is there before its first reader."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.overlap.graphs import ATEN, Builder, assert_same_values, starts
from torch import fx

from meshweave.ir.device_program import DeviceProgram, graph_program
from meshweave.ir.graph import Origin
from meshweave.optimize.decompose.rewriter import Shared, share_gathers

GROUPS = {"a": (0, 1), "b": (0, 2)}
Change = Callable[[DeviceProgram], DeviceProgram]


def shared(gm: fx.GraphModule, change: Change = lambda program: program) -> tuple[fx.GraphModule, tuple[Shared, ...]]:
    """The graph with equal gathers shared, which gives the same values."""
    after = fx.GraphModule({}, fx.Graph())
    after.graph.output(after.graph.graph_copy(gm.graph, {}))
    for old, new in zip(gm.graph.nodes, after.graph.nodes, strict=True):
        new.meta = dict(old.meta)
    rows = share_gathers(change(graph_program(after.graph, GROUPS)))
    after.graph.lint()
    after.recompile()
    assert_same_values(gm, after)
    return after, rows


def two_gathers(second: Callable[[Builder, fx.Node], fx.Node]) -> fx.GraphModule:
    """A view of x is gathered and multiplied, and so is what `second` gathers."""
    b = Builder()
    x, w = b.placeholders("x w")
    first = b.gather("first", b.call("view", ATEN.view.default, x, [4, 16]))
    product = b.mm("product", b.call("rows", ATEN.view.default, b.wait("full", first), [16, 8]), w)
    other = b.wait("other_full", second(b, x))
    return b.done(product, b.call("sum", ATEN.sum.default, other))


def test_gathers_of_equal_views_are_shared() -> None:
    def again(b: Builder, x: fx.Node) -> fx.Node:
        return b.gather("again", b.call("view_2", ATEN.view.default, x, [4, 16]))

    gm, rows = shared(two_gathers(again))
    assert rows == (("again", "a", "first"),)
    assert [start.name for start in starts(gm)] == ["first"]
    assert not {n.name for n in gm.graph.nodes} & {"again", "other_full", "view_2"}


def _of_another_value(b: Builder, x: fx.Node) -> fx.Node:
    return b.gather("other", b.call("view_2", ATEN.view.default, b.relu("relu", x), [4, 16]))


def _of_a_view_in_another_shape(b: Builder, x: fx.Node) -> fx.Node:
    return b.gather("other", b.call("view_2", ATEN.view.default, x, [16, 4]))


def _in_another_group(b: Builder, x: fx.Node) -> fx.Node:
    return b.gather("other", b.call("view_2", ATEN.view.default, x, [4, 16]), "b")


def _in_another_phase(b: Builder, x: fx.Node) -> fx.Node:
    start = b.gather("other", b.call("view_2", ATEN.view.default, x, [4, 16]))
    start.meta["origin"] = Origin("backward")
    return start


@pytest.mark.parametrize(
    "second", [_of_another_value, _of_a_view_in_another_shape, _in_another_group, _in_another_phase]
)
def test_gathers_that_differ_stay(second: Callable[[Builder, fx.Node], fx.Node]) -> None:
    gm, rows = shared(two_gathers(second))
    assert rows == ()
    assert [start.name for start in starts(gm)] == ["first", "other"]


def _sources(program: DeviceProgram) -> DeviceProgram:
    return replace(program, sources=frozenset(program.graph.find_nodes(op="placeholder")))


def _refused(program: DeviceProgram) -> DeviceProgram:
    return replace(program, refused=lambda start: "the caller keeps it" if start.name == "again" else "")


@pytest.mark.parametrize("change", [_sources, _refused])
def test_parameters_and_refused_gathers_stay(change: Change) -> None:
    def again(b: Builder, x: fx.Node) -> fx.Node:
        return b.gather("again", b.call("view_2", ATEN.view.default, x, [4, 16]))

    gm, rows = shared(two_gathers(again), change)
    assert rows == ()
    assert len(starts(gm)) == 2


def test_the_remaining_value_is_there_before_the_first_reader() -> None:
    """The wait for the gather that stays comes after that for the removed gather, and moves there."""
    b = Builder()
    x = b.placeholder("x")
    kept, removed = b.gather("kept", x), b.gather("removed", x)
    early = b.relu("early", b.wait("first_wait", removed))
    late = b.relu("late", b.wait("second_wait", kept))
    gm, rows = shared(b.done(early, late))
    assert rows == (("removed", "a", "kept"),)
    assert [n.name for n in gm.graph.nodes if n.op == "call_function"] == ["kept", "second_wait", "early", "late"]
