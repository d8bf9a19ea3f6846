"""Estimates of decompositions on a machine whose seconds are bytes and multiplications, beside figures worked out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from tests.overlap.graphs import Builder
from torch import fx

from meshweave.ir.device_program import graph_program
from meshweave.ir.work import MemoryWork
from meshweave.optimize.decompose.algorithms import algorithm
from meshweave.optimize.decompose.chains import Shapes
from meshweave.optimize.decompose.find import gathered, reduced
from meshweave.optimize.decompose.price import (
    Estimate,
    Kernels,
    MessageCost,
    RingPrices,
    gather_estimate,
    play_gather,
    play_reduce,
    reduce_estimate,
)
from meshweave.optimize.decompose.rewrite import RingScheme
from meshweave.optimize.decompose.writer import Ring

TRIPLE = Ring("a", (3,))
WIDE = 10.0  # seconds of a collective per byte that a device hands in; of a message 1
VIEW, HOST = 0.5, 0.25  # seconds of an op that does nothing, and the share of a collective that the processor spends


@dataclass
class Machine:
    """Seconds are bytes of memory read and written, multiplications, or bytes that are sent."""

    empty_op_s: float = VIEW
    burst: float = 0.0  # bytes that links let through at once

    def compute_seconds(self, work: Any) -> float:
        return float(work.bytes if isinstance(work, MemoryWork) else work.flops / 2)

    def seconds(self, op: str, mesh: object, axes: object, num_bytes: float) -> float:
        return max(num_bytes - self.burst, 0.0) * (1.0 if op == "permute" else WIDE)

    def usage(self, op: str, mesh: object, axes: object) -> Sequence[tuple[str, float]]:
        return (("net", 1.0),)

    def host_seconds(self, op: str, mesh: object, axes: object, seconds: float) -> float:
        return HOST * seconds

    def compute_slowdown(self, levels: frozenset[str]) -> float:
        return 1.5 if levels == {"net"} else 1.0


class Priced:
    """A graph of a Builder on the machine; `kernels` are other work, as (position, seconds)."""

    def __init__(self, build: Callable[[Builder], fx.Node], kernels: Kernels = (), burst: float = 0.0) -> None:
        b = Builder({"a": ((0, 1, 2),)})
        self.graph = b.done(build(b)).graph
        self.nodes = {node.name: node for node in self.graph.nodes}
        self.order = {node: i for i, node in enumerate(self.graph.nodes)}
        program = graph_program(self.graph, {"a": (0, 1, 2)})
        self.shapes = Shapes(dict(program.values))
        self.prices = RingPrices(program, Machine(burst=burst), self.shapes, kernels)  # type: ignore[arg-type]

    def gather(self, scheme: RingScheme, *, second_half: bool = False) -> Estimate:
        chain = gathered(self.nodes["start"], scheme, TRIPLE, self.shapes, self.order)
        return gather_estimate(self.prices, self.nodes["start"], chain, TRIPLE, scheme, second_half)

    def reduce(self, scheme: RingScheme, wide: float = 1.0) -> Estimate:
        chain = reduced(self.nodes["start"], scheme, TRIPLE, self.shapes, self.order)
        return reduce_estimate(self.prices, self.nodes["start"], chain, TRIPLE, scheme, wide)


def after_a_gather(b: Builder) -> fx.Node:
    """x [2, 4] of three ranks, elementwise, times [4, 8]."""
    x, w = b.placeholder("x", (2, 4)), b.placeholder("w", (4, 8))
    full = b.wait("full", b.gather("start", x))
    return b.mm("product", b.relu("relu", full), w)


def before_a_reduction(kind: str) -> Callable[[Builder], fx.Node]:
    """[6, 4] times [4, 8], elementwise, and a reduction."""

    def build(b: Builder) -> fx.Node:
        x, w = b.placeholder("x", (6, 4)), b.placeholder("w", (4, 8))
        return b.wait("total", b.start("start", kind, b.relu("relu", b.mm("product", x, w))))

    return build


DIRECT = RingScheme(algorithm("all_gather", "direct"), 0)
RING = RingScheme(algorithm("reduce_scatter", "ring"), 0)
IN_TWO = RingScheme(None, 2)


def test_a_gather_with_its_matmul() -> None:
    """Whole: relu 2 * 96 bytes, product 6 * 8 * 4; the collective 32 bytes, and two launches of half a second."""
    estimate = Priced(after_a_gather).gather(DIRECT)
    assert (estimate.compute, estimate.collective, estimate.host, estimate.hidden) == (192 + 192, 321.0, 81.0, 0.0)
    assert estimate.before == 384 + 321
    assert (estimate.chunk, estimate.message) == (64 + 64, 33.0)
    assert (estimate.num_steps, estimate.num_messages) == (3, 2)
    assert estimate.losses == 2 * 6 * 8 * 4  # the product is joined
    message = MessageCost(33.0, 0.25 * 32 + 1, 1.5)
    assert estimate.played == play_gather(DIRECT.row.steps(3), 1, 128.0, message, 0.0)  # type: ignore[union-attr]
    assert estimate.after == estimate.played + 384


def test_work_between_start_and_wait_hides_the_collective_but_for_the_processors_part() -> None:
    """The start stands at position 2, the wait at 3; what is at either of them, or outside, does not count."""
    for seconds, before in ((100.0, 384 + 221), (1000.0, 384 + 81)):
        kernels = [(1, 7.0), (2, 7.0), (2.5, seconds), (3, 7.0), (4, 7.0)]
        estimate = Priced(after_a_gather, kernels).gather(DIRECT)
        assert (estimate.hidden, estimate.before) == (seconds, before)


def test_parts_are_collectives_of_a_share_of_the_bytes() -> None:
    estimate = Priced(after_a_gather).gather(IN_TWO)
    assert (estimate.message, estimate.num_steps, estimate.num_messages) == (10 * 16 + 1, 2, 2)
    assert estimate.chunk == (192 + 192) / 2


def test_a_second_half_gathers_a_share_of_the_operand() -> None:
    """Of an all-reduce of 32 bytes each device has a third: a gather of that."""
    estimate = Priced(after_a_gather).gather(DIRECT, second_half=True)
    assert estimate.collective == pytest.approx(10 * 32 / 3 + 1)
    assert estimate.message == pytest.approx(32 / 3 + 1)


def test_messages_of_a_device_share_what_a_link_lets_through_at_once() -> None:
    """A message of 32 bytes after the first 30 takes 2 s; both together take 34 s."""
    assert Priced(after_a_gather, burst=30.0).gather(DIRECT).message == (34 + 1) / 2
    prices = Priced(after_a_gather, burst=30.0).prices
    (start,) = (node for node in prices.program.graph.nodes if node.name == "start")
    assert [prices.in_turn(start, "permute", 32, count).seconds for count in (1, 2, 4)] == [3.0, 17.5, 99 / 4]


def test_a_reduction_with_its_matmul() -> None:
    """A chunk is a third of the work, and a slice of x; a message is a third of the operand, in a wider dtype."""
    estimate = Priced(before_a_reduction("reduce_scatter_tensor")).reduce(RING, 2.0)
    assert (estimate.compute, estimate.collective) == (192 + 2 * 192, 10 * 192 + 1)
    assert (estimate.chunk, estimate.message) == (192 + VIEW, 2 * 64 + 1)
    assert (estimate.num_steps, estimate.num_messages) == (3, 2)
    assert estimate.losses == 2 * 2 / 3 * 192
    message = MessageCost(129.0, 0.25 * 128 + 1, 1.5)
    assert estimate.played == play_reduce(RING.row.steps(3), 192.5, message, 0.0)  # type: ignore[union-attr]


def test_an_all_reduce_in_messages_still_has_its_gather() -> None:
    """The second half gathers a third of 192 bytes, which the work after the start hides but for the processor's."""
    scattered = Priced(before_a_reduction("reduce_scatter_tensor")).reduce(RING)
    for hidden, gather in ((0.0, 641.0), (100.0, 541.0), (1e4, 161.0)):
        estimate = Priced(before_a_reduction("all_reduce"), [(4.5, hidden)]).reduce(RING)
        assert estimate.losses == scattered.losses + gather
        assert estimate.played == scattered.played


def test_parts_of_a_reduction_are_joined() -> None:
    estimate = Priced(before_a_reduction("all_reduce")).reduce(IN_TWO)
    assert (estimate.message, estimate.losses) == (10 * 96 + 1, 2 * 192)
