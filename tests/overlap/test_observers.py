"""Which storages a graph may observe: outputs, what is written, and operands of ops that see more than elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.overlap.graphs import ATEN, Builder
from torch import fx

from meshweave.ir.device_program import graph_program
from meshweave.optimize.overlap.merge import observed_storages


def observed(read: Callable[[Builder, fx.Node], fx.Node]) -> set[str]:
    """The names of the nodes whose storages are observed: of a graph that reads a reduced value by `read`, and returns
    the sum of the result."""
    b = Builder()
    value = b.relu("value", b.placeholder("x"))
    result = read(b, value)
    b.done(b.call("total", ATEN.sum.default, result))
    program = graph_program(b.graph)
    storages = observed_storages(program)
    return {n.name for n in b.graph.nodes for x in program.values[n] if x.storage in storages}


PLAIN: dict[str, Callable[[Builder, fx.Node], fx.Node]] = {
    "elementwise": lambda b, x: b.relu("read", x),
    "view": lambda b, x: b.call("read", ATEN.view.default, x, [64]),
    "collective": lambda b, x: b.wait("read", b.gather("start", x)),
}
SEEING: dict[str, Callable[[Builder, fx.Node], fx.Node]] = {
    "strides": lambda b, x: b.call("read", ATEN.as_strided.default, x, [4], [1]),
    "write": lambda b, x: b.call("read", ATEN.relu_.default, x),
    "view of a dtype": lambda b, x: b.call("read", ATEN.view.dtype, x, x.meta["val"].dtype),
}


@pytest.mark.parametrize("name", PLAIN)
def test_ops_that_see_elements_alone_observe_nothing_but_the_output(name: str) -> None:
    assert observed(PLAIN[name]) == {"total"}


@pytest.mark.parametrize("name", SEEING)
def test_ops_that_see_or_write_storages_observe_their_operand(name: str) -> None:
    assert observed(SEEING[name]) >= {"value", "total"}


def test_a_storage_is_observed_through_a_view() -> None:
    b = Builder()
    value = b.relu("value", b.placeholder("x"))
    b.done(b.call("view", ATEN.view.default, value, [64]))
    program = graph_program(b.graph)
    assert observed_storages(program) == {program.values[value][0].storage}
