"""Costs that a caller says: scalars of any library, seconds of views, and what copies cost where nothing says it."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from random import Random
from typing import Any

import numpy
import pytest
import torch
from tests.overlap.graphs import ATEN, STARTS, Builder, assert_same_values, by_name, by_size, groups_of, peak, play
from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.ir.device_program import graph_program
from meshweave.optimize.overlap import overlap
from meshweave.optimize.overlap.prices import CallablePrices, checked_cost
from meshweave.optimize.overlap.read import read_problem

RATE = 3e12  # bytes/s of the memory in these tests


@pytest.mark.parametrize(
    "number",
    [numpy.float32(0.5), numpy.float64(0.5), numpy.array(0.5), torch.tensor(0.5), Fraction(1, 2), numpy.float16(0.5)],
    ids=repr,
)
def test_any_real_scalar_is_a_duration(number: Any) -> None:
    b = Builder()
    x = b.placeholder("x")
    _, report = overlap(b.done(b.mm("product", x, x), b.wait("full", b.gather("gather", x))), cost=lambda node: number)
    assert report.seconds == 0.5


@pytest.mark.parametrize(
    "value", [numpy.bool_(True), torch.tensor(True), numpy.complex64(1), torch.tensor([1.0]), numpy.float32("nan")]
)
def test_other_scalars_are_not(value: Any) -> None:
    b = Builder()
    x = b.placeholder("x")
    with pytest.raises(MeshweaveError, match="a cost is not a duration"):
        overlap(b.done(b.wait("full", b.gather("gather", x))), cost=lambda node: value)


def test_views_that_cost_something_are_kernels() -> None:
    """In eager mode a view is a launch: it hides communication, and takes its time."""
    b = Builder()
    x, y = b.placeholders("x y")
    full = b.wait("full", b.gather("gather", x))
    shown = b.call("shown", ATEN.view.default, y, [64])
    gm = b.done(b.relu("used", full), b.relu("other", shown), b.call("late", ATEN.view.default, full, [-1]))
    cost = by_name({"gather": 2.0, "shown": 1.0, "late": 0.25, "used": 1.0, "other": 0.5})
    after, report = overlap(gm, cost=cost, groups=groups_of(0))
    assert_same_values(gm, after)
    assert report.seconds_before == play(gm, cost)[0] == 4.75
    assert report.seconds == play(after, cost)[0] == 3.25


def test_a_view_of_what_is_in_flight_costs_nothing() -> None:
    b = Builder()
    shown = b.call("shown", ATEN.view.default, b.gather("gather", b.placeholder("x")), [-1])
    gm = b.done(b.wait("full", shown))
    after, report = overlap(gm, cost=lambda node: 1.0, groups=groups_of(0))
    assert_same_values(gm, after)
    assert report.seconds == 1.0


@pytest.mark.parametrize("is_fused", [True, False])
def test_the_rate_of_copies_is_one_that_memory_has(is_fused: bool) -> None:
    """Costs of a compiler that fuses count operands in registers as nothing: bytes over seconds are then many times the
    rate of the memory, and copies would be free."""
    b = Builder()
    x, y = b.placeholders("x y", (1024, 1024))
    product = b.mm("product", x, y)
    chain = [product]
    for _ in range(6):
        chain.append(b.add(None, b.relu(None, chain[-1]), chain[-1]))
    between = b.relu("between", product)
    last = b.mm("last", b.mm("middle", between, y), chain[-1])
    gm = b.done(last, b.wait("full", b.gather("gather", chain[-1])))

    def seconds(node: fx.Node) -> float:
        if node.target in STARTS or node.target is ATEN.mm.default:
            return 1e-3
        nodes = (*node.all_input_nodes, node)
        if is_fused:
            nodes = tuple(n for n in nodes if n in (product, between, chain[-1]))
        return sum(n.meta["val"].nbytes for n in nodes) / RATE + 1e-12

    reading = read_problem(graph_program(gm.graph))
    prices = CallablePrices(reading, checked_cost(seconds))
    reading.problem.seconds = [0.0 if i in reading.rows else seconds(node) for i, node in enumerate(reading.nodes)]
    assert prices.copy_rate() == pytest.approx(RATE, rel=1e-3)


def layered(seed: int) -> fx.GraphModule:
    """A backward of layers at random sizes: gathers of weights, matmuls for gradients, which are reduced."""
    random = Random(seed)
    b = Builder()
    weights = [
        b.placeholder(f"primals_{i}", (random.choice([2, 4, 8]) * 4, 16)) for i in range(random.randrange(5, 10))
    ]
    x = b.placeholder("tangents_1", (16, 16))
    grads = []
    for weight in reversed(weights):
        full = b.wait(None, b.gather(None, weight))
        x = b.mm(None, b.mm(None, x, b.call(None, ATEN.permute.default, full, [1, 0])), full)
        grad = b.mm(None, full, x)
        grads.append(b.wait(None, b.scatter(None, grad, random.choice("ab"))))
    return b.done(x, *grads)


@pytest.mark.slow_rows("0", "5")
@pytest.mark.parametrize("seed", [0, 4, 5, 14])
def test_more_memory_is_never_slower(seed: int) -> None:
    """Orders are sought under the same memory whatever the cap, which only admits them; choosing for other machines
    may cost 0.2%."""
    gm = layered(seed)
    random = Random(seed)
    table = {n.name: random.choice([0.2, 0.5, 1.0, 2.0]) for n in gm.graph.nodes}
    cost = by_size(table, random.choice([0.1, 0.5, 1.0]), random.choice([0.02, 0.1, 0.3]))
    least, found = peak(gm, lambda n: not n.name.startswith("primals")), []
    for factor in (1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.6, 2.0):
        found.append(overlap(gm, cost=cost, memory_cap_bytes=int(least * factor), groups=groups_of(0))[1].seconds)
    for tighter, looser in pairwise(found):
        assert looser <= tighter * 1.002, found
