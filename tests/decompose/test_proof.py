"""The proof of rings against devices that run them: rings with right values are proven, all others are errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from tests.decompose.lockstep import results
from torch import fx

from meshweave.errors import VerifyError
from meshweave.ir import local_ops
from meshweave.ir.collectives import permute
from meshweave.optimize.decompose.proof import prove_rings
from meshweave.optimize.decompose.writer import ChunkWriter, Index, Ring, RingKind

aten = torch.ops.aten
N = 3
TRIPLE = Ring("d", (N,))
PIECES = torch.tensor([[1.0], [10.0], [100.0]])  # of a gather, by device: sums of any two subsets differ
CHUNKS = torch.tensor([[float(7**k) for k in range(N * r, N * r + N)] for r in range(N)]).unsqueeze(-1)  # by device


class Written:
    """A ring written node by node, from the input `x` to the output."""

    def __init__(self, kind: RingKind) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.graph.output(self.x)
        (self.output,) = self.graph.find_nodes(op="output")
        self.write = ChunkWriter(self.graph, self.output)
        self.write.begin(TRIPLE, kind)

    def index(self, shift: int, sign: int = 1) -> Any:
        return self.write.index(TRIPLE, Index(sign, shift))

    def take(self, number: Any) -> fx.Node:
        return self.write.call(local_ops.take_chunk, self.x, 0, 1, N, number)

    def sent(self, x: fx.Node, shift: int) -> fx.Node:
        return self.write.wait(self.write.call(permute, x, shift, TRIPLE.group))

    def join(self, parts: list[fx.Node], numbers: list[Any]) -> fx.Node:
        return self.write.call(local_ops.join_chunks, parts, numbers, 0, 1)

    def done(self, result: fx.Node) -> fx.Graph:
        self.output.args = (result,)
        return self.graph


class Proven:
    """Has only the graph, as any program has."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph


def is_proven(graph: fx.Graph) -> bool:
    try:
        return prove_rings(Proven(graph)) == 1
    except VerifyError:
        return False


def values(graph: fx.Graph, x: torch.Tensor) -> torch.Tensor:
    """The results of all devices; a join that has not every number has none."""
    try:
        return torch.stack(results(graph, [{"x": row} for row in x]))
    except ValueError:
        return torch.empty(0)


def assert_proven_if_right(graphs: Iterator[fx.Graph], x: torch.Tensor, expected: torch.Tensor) -> None:
    """Both verdicts occur."""
    verdicts = []
    for graph in graphs:
        is_right = torch.equal(values(graph, x), expected)
        assert is_proven(graph) == is_right, str(graph)
        verdicts.append(is_right)
    assert set(verdicts) == {True, False}


def gathers() -> Iterator[fx.Graph]:
    """A piece is sent, then that piece or the received one; with all shifts, and numbers for the two."""
    for first, second, is_passed_on in product(range(N), range(N), (False, True)):
        for one, (sign, other) in product(range(N), [(1, 0), (1, 1), (1, 2), (-1, 0), (-1, 2), (0, 1)]):
            ring = Written("gather")
            near = ring.sent(ring.x, first)
            far = ring.sent(near if is_passed_on else ring.x, second)
            yield ring.done(ring.join([ring.x, near, far], [ring.index(0), ring.index(one), ring.index(other, sign)]))


def test_a_gather_is_proven_exactly_if_every_device_has_every_piece_in_its_place() -> None:
    assert_proven_if_right(gathers(), PIECES, PIECES.t().expand(N, N))


def sums() -> Iterator[fx.Graph]:
    """A part is sent, added to another, sent, and added to a third, of any chunks."""
    for a, b, c, first, second in product(range(N), repeat=5):
        ring = Written("sum")
        total = ring.take(ring.index(a))
        for shift, chunk in ((first, b), (second, c)):
            received = ring.sent(total, shift)
            total = ring.write.call(aten.add.Tensor, ring.take(ring.index(chunk)), received)
        yield ring.done(total)


def test_a_chain_of_sums_is_proven_exactly_if_it_has_the_own_chunk_of_all() -> None:
    assert_proven_if_right(sums(), CHUNKS, CHUNKS.sum(0).unsqueeze(1))


def direct_sum(numbers: tuple[int, ...], chunks: tuple[int, ...] = (0, 1, 2)) -> fx.Graph:
    """The parts of the own chunk, of this device and, by message, of those at `chunks`; their stated numbers."""
    ring = Written("sum")
    parts = [ring.sent(ring.take(ring.index(chunk)), shift) for shift, chunk in enumerate(chunks)]
    stated = [ring.index(number) for number in numbers]
    return ring.done(ring.write.call(local_ops.sum_parts, parts, stated, torch.float32))


def test_addends_have_the_numbers_of_their_devices() -> None:
    """The order of a sum follows its numbers: others give a sum in another order."""
    assert is_proven(direct_sum((0, 2, 1)))
    assert not is_proven(direct_sum((0, 1, 2)))
    assert not is_proven(direct_sum((0, 0, 1)))
    assert not is_proven(direct_sum((0, 2, 1), chunks=(0, 1, 1)))


def test_a_device_that_adds_twice_is_not_a_sum_of_all() -> None:
    ring = Written("sum")
    own = ring.take(ring.index(0))
    twice = ring.write.call(aten.add.Tensor, own, ring.take(ring.index(0)))
    others = [ring.sent(ring.take(ring.index(shift)), shift) for shift in (1, 2)]
    for other in others:
        twice = ring.write.call(aten.add.Tensor, twice, other)
    assert not is_proven(ring.done(twice))


def test_an_equal_share_of_every_device_is_a_sum_of_all() -> None:
    """Of two products, both of every device are added."""
    ring = Written("sum")
    total = None
    for shift in range(N):
        for _ in range(2):
            part = ring.sent(ring.take(ring.index(shift)), shift)
            total = part if total is None else ring.write.call(aten.add.Tensor, total, part)
    assert total is not None
    assert is_proven(ring.done(total))


@pytest.mark.parametrize(("numbers", "is_right"), [((0, 2, 1), True), ((0, 1, 2), False)])
def test_products_of_gathered_chunks_are_added_by_the_numbers_of_the_chunks(
    numbers: tuple[int, ...], is_right: bool
) -> None:
    ring = Written("gather")
    chunks = [ring.x, ring.sent(ring.x, 1), ring.sent(ring.x, 2)]
    products = [ring.write.call(aten.neg.default, chunk) for chunk in chunks]
    stated = [ring.index(number) for number in numbers]
    assert is_proven(ring.done(ring.write.call(local_ops.sum_parts, products, stated, torch.float32))) == is_right


Other = Callable[[Written], Any]
STRANGE: dict[str, Other] = {
    "another group": lambda ring: ring.write.index(Ring("e", (N,)), Index(1, 0)),
    "other sizes": lambda ring: ring.write.index(Ring("d", (2, 2)), Index(1, 0)),
    "another op": lambda ring: ring.graph.call_function(torch.sym_max, (ring.index(0), 1, 2, 3)),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_number_along_another_group_is_refused(name: str) -> None:
    ring = Written("sum")
    strange = STRANGE[name](ring)
    graph = ring.done(ring.take(strange))
    with pytest.raises(VerifyError, match=f"{strange.name} is not an index along the group of its ring"):
        prove_rings(Proven(graph))


def test_rings_are_counted_by_mark_and_other_nodes_are_not_looked_at() -> None:
    ring = Written("gather")
    for _ in range(2):
        near, far = ring.sent(ring.x, 1), ring.sent(ring.x, 2)
        ring.write.call(aten.neg.default, ring.join([ring.x, near, far], [ring.index(s) for s in (0, 2, 1)]))
        ring.write.begin(TRIPLE, "gather")
    ring.write.mark = None
    ring.join([ring.x, ring.x], [0, 0])
    assert prove_rings(Proven(ring.graph)) == 2
    empty = fx.Graph()
    assert prove_rings(Proven(empty)) == 0


def test_the_message_names_the_node_and_what_it_has() -> None:
    graph = direct_sum((0, 1, 2))
    (node,) = graph.find_nodes(op="call_function", target=local_ops.sum_parts)
    with pytest.raises(VerifyError, match=rf"ring 0: {node.name} takes wait_tensor_default_1 for number 1 on device 0"):
        prove_rings(Proven(graph))
