"""Collectives beside matmuls: what can be computed from their chunks, and why not more."""

from __future__ import annotations

import pytest
from tests.overlap.graphs import ATEN, Builder
from torch import fx

from meshweave.ir.device_program import graph_program
from meshweave.optimize.decompose.algorithms import algorithm
from meshweave.optimize.decompose.chains import Downstream, Shapes, Upstream
from meshweave.optimize.decompose.cut import LOOSE, Cut
from meshweave.optimize.decompose.find import earlier, gathered, hoisted, needed, reduced, starts_of, variants
from meshweave.optimize.decompose.rewrite import RingScheme
from meshweave.optimize.decompose.writer import Ring

PAIR = Ring("a", (2,))
DIRECT = RingScheme(algorithm("all_gather", "direct"), 0)
RING = RingScheme(algorithm("reduce_scatter", "ring"), 0)
IN_TWO, IN_FOUR = RingScheme(None, 2), RingScheme(None, 4)
ROWS = Cut(0, 1, 2)  # the pieces of both ranks


class Chains:
    """A graph of a Builder, in the form of the pass."""

    def __init__(self, b: Builder, *outputs: fx.Node) -> None:
        self.graph = b.done(*outputs).graph
        self.nodes = {node.name: node for node in self.graph.nodes}
        self.order = {node: i for i, node in enumerate(self.graph.nodes)}
        self.shapes = Shapes(dict(graph_program(self.graph).values))

    def gathered(self, name: str, scheme: RingScheme = DIRECT) -> Downstream:
        return gathered(self.nodes[name], scheme, PAIR, self.shapes, self.order)

    def reduced(self, name: str, scheme: RingScheme = RING) -> Upstream:
        return reduced(self.nodes[name], scheme, PAIR, self.shapes, self.order)

    def earlier(self, name: str, anchor: str) -> list[str] | None:
        nodes = earlier(self.nodes[name], self.nodes[anchor], self.order)
        return None if nodes is None else [n.name for n in nodes]


def cuts_by_name(cuts: dict[fx.Node, object]) -> dict[str, object]:
    return {node.name: cut for node, cut in cuts.items()}


def after_a_gather(*, rows: int = 2, is_turned: bool = False) -> Chains:
    """x [rows, 4] of two ranks, elementwise ops, and a product; beside them a sum that no product needs. `is_turned`:
    the rows are summed over by the product."""
    b = Builder()
    x, w = b.placeholder("x", (rows, 4)), b.placeholder("w", (2 * rows, 8) if is_turned else (4, 8))
    full = b.wait("full", b.gather("start", x))
    relu = b.relu("relu", full)
    left = b.call("turned", ATEN.t.default, relu) if is_turned else relu
    return Chains(b, b.mm("product", left, w), b.call("sum", ATEN.sum.dim_IntList, full, [1]))


def test_pieces_are_followed_to_the_product() -> None:
    chain = after_a_gather().gathered("start")
    assert cuts_by_name(chain.consumers) == {"product": ROWS}
    assert cuts_by_name(chain.cuts) == {"full": ROWS, "relu": ROWS}
    assert next(iter(chain.cuts)).name == "full"


def test_a_product_that_sums_over_the_pieces_is_a_sum_of_products() -> None:
    chain = after_a_gather(is_turned=True).gathered("start")
    assert cuts_by_name(chain.consumers) == {"product": "sum"}
    assert cuts_by_name(chain.cuts) == {"full": ROWS, "relu": ROWS, "turned": Cut(1, 1, 2)}


def test_parts_are_of_every_piece_along_the_first_dim_that_divides() -> None:
    """In two: part c has row c of each piece. In four: 2 rows do not divide, the columns do."""
    chains = after_a_gather()
    assert cuts_by_name(chains.gathered("start", IN_TWO).consumers) == {"product": Cut(0, 2, 2)}
    chain = chains.gathered("start", IN_FOUR)
    assert cuts_by_name(chain.cuts) == {"full": Cut(1, 1, 4), "relu": Cut(1, 1, 4)}
    assert cuts_by_name(chain.consumers) == {"product": "sum"}


def test_without_a_cut_there_is_a_reason_for_each() -> None:
    chain = after_a_gather().gathered("start", RingScheme(None, 3))
    assert not chain.consumers
    assert chain.why == ["3 chunks do not divide [4, 4]"] * 2


def late_operand(*, is_light: bool) -> Chains:
    """The product's second operand is computed after the wait: by an elementwise op, or by another product."""
    b = Builder()
    x, w = b.placeholder("x", (2, 4)), b.placeholder("w", (4, 4))
    full = b.wait("full", b.gather("start", x))
    weight = b.relu("weight", w) if is_light else b.mm("weight", w, w)
    return Chains(b, b.mm("product", full, weight))


def test_operands_that_are_light_move_before_the_wait() -> None:
    chains = late_operand(is_light=True)
    chain = chains.gathered("start")
    assert cuts_by_name(chain.consumers) == {"product": ROWS}
    assert [n.name for n in hoisted(chain, chains.nodes["full"], chains.order)] == ["weight"]


def test_products_of_operands_that_come_later_stay_whole() -> None:
    chains = late_operand(is_light=False)
    chain = chains.gathered("start")
    assert not chain.consumers
    assert cuts_by_name(chain.cuts) == {}
    assert chain.why == ["weight, an operand of product, is computed later"]
    assert list(hoisted(chain, chains.nodes["full"], chains.order)) == []


def test_the_path_to_a_product_that_stays_whole_is_dropped() -> None:
    b = Builder()
    x, w = b.placeholder("x", (2, 4)), b.placeholder("w", (4, 4))
    full = b.wait("full", b.gather("start", x))
    early = b.mm("early", full, w)
    chains = Chains(b, early, b.mm("late", b.relu("relu", full), b.mm("weight", w, w)))
    chain = chains.gathered("start")
    assert cuts_by_name(chain.consumers) == {"early": ROWS}
    assert cuts_by_name(chain.cuts) == {"full": ROWS}


def views_of_a_weight(count: int) -> Chains:
    """After the wait `count` casts of a weight, one after the other."""
    b = Builder()
    x, w = b.placeholder("x", (2, 4)), b.placeholder("w", (4, 4))
    full = b.wait("full", b.gather("start", x))
    for i in range(count):
        w = b.relu(f"cast_{i}", w)
    return Chains(b, b.mm("product", full, w))


@pytest.mark.parametrize("count", [0, 1, 16])
def test_a_chain_of_light_ops_moves_in_order(count: int) -> None:
    chains = views_of_a_weight(count)
    last = f"cast_{count - 1}" if count else "w"
    assert chains.earlier(last, "full") == [f"cast_{i}" for i in range(count)]


def test_a_long_chain_stays() -> None:
    assert views_of_a_weight(17).earlier("cast_16", "full") is None


def test_what_depends_on_the_anchor_cannot_come_before_it() -> None:
    chains = after_a_gather()
    assert chains.earlier("relu", "full") is None
    assert chains.earlier("full", "full") is None
    assert chains.earlier("start", "full") == []


@pytest.mark.parametrize("is_loose", [False, True])
def test_a_communication_moves_forward_only_if_it_is_loose(is_loose: bool) -> None:
    b = Builder()
    x, w = b.placeholder("x", (2, 4)), b.placeholder("w", (2, 4))
    full = b.wait("full", b.gather("start", x))
    other = b.gather("other", w)
    weight = b.wait("weight", other)
    other.meta |= {LOOSE: True} if is_loose else {}
    chains = Chains(b, b.mm("product", full, weight))
    assert chains.earlier("weight", "full") == (["other", "weight"] if is_loose else None)


def two_products() -> tuple[Chains, Downstream]:
    """The gathered value is an operand of a product over its rows, which comes first, and of two by rows."""
    b = Builder()
    x, w = b.placeholder("x", (2, 4)), b.placeholder("w", (4, 4))
    full = b.wait("full", b.gather("start", x))
    total = b.mm("total", b.call("turned", ATEN.t.default, full), w)
    rows = b.mm("rows", b.relu("relu", full), w)
    chains = Chains(b, total, rows, b.mm("more", full, w))
    return chains, chains.gathered("start")


def test_variants_have_all_consumers_or_the_first_with_sums_last() -> None:
    chains, chain = two_products()
    full = chains.nodes["full"]
    assert [list(cuts_by_name(c.consumers)) for c in variants(chain, full, with_sums=True)] == [
        ["more", "rows", "total"],
        ["more", "rows"],
        ["more"],
    ]
    without = variants(chain, full, with_sums=False)
    assert [list(cuts_by_name(c.consumers)) for c in without] == [["more", "rows"], ["more"]]
    assert [list(cuts_by_name(c.cuts)) for c in without] == [["full", "relu"], ["full"]]


def test_only_the_path_to_the_consumers_is_needed() -> None:
    chains, chain = two_products()
    full = chains.nodes["full"]
    assert list(cuts_by_name(needed(chain, full, [chains.nodes["total"]]))) == ["full", "turned"]
    assert list(cuts_by_name(needed(chain, full, []))) == ["full"]


def before_a_reduction(kind: str, *, columns: int = 4) -> Chains:
    """x [4, 8] @ w [8, columns], an elementwise op, and a reduction over two ranks."""
    b = Builder()
    x, w = b.placeholder("x", (4, 8)), b.placeholder("w", (8, columns))
    start = b.start("start", kind, b.relu("relu", b.mm("product", x, w)))
    return Chains(b, b.wait("reduced", start))


@pytest.mark.parametrize("kind", ["reduce_scatter_tensor", "all_reduce"])
def test_a_reduction_is_computed_from_its_product_by_rows(kind: str) -> None:
    chain = before_a_reduction(kind).reduced("start")
    assert [n.name for n in chain.matmuls] == ["product"]
    assert cuts_by_name(chain.cuts) == {"relu": ROWS, "product": ROWS}


def test_parts_of_a_reduction_are_of_every_block_or_along_another_dim() -> None:
    """A scattered part has a row of each rank's block; 4 parts of the rows of 2 blocks do not divide 4 rows."""
    chains = before_a_reduction("reduce_scatter_tensor")
    assert set(chains.reduced("start", IN_TWO).cuts.values()) == {Cut(0, 2, 2)}
    assert set(chains.reduced("start", IN_FOUR).cuts.values()) == {Cut(1, 1, 4)}
    assert set(before_a_reduction("all_reduce").reduced("start", IN_FOUR).cuts.values()) == {Cut(0, 1, 4)}


def test_a_reduction_without_a_product_or_without_a_cut_has_a_reason() -> None:
    b = Builder()
    start = b.reduce("start", b.call("ordered", ATEN.cumsum.default, b.placeholder("x", (4, 4)), 0))
    chain = Chains(b, b.wait("reduced", start)).reduced("start")
    assert not chain.matmuls
    assert chain.why == ["ordered cannot run chunk by chunk"] * 2
    assert (
        before_a_reduction("all_reduce", columns=5).reduced("start", RingScheme(None, 3)).why
        == ["3 chunks do not divide [4, 5]"] * 2
    )


def test_collectives_that_may_be_decomposed_are_listed_in_order() -> None:
    b = Builder()
    x = b.placeholder("x")
    names = ["all_reduce", "broadcast", "all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor"]
    chains = Chains(b, *(b.wait(None, b.start(f"its_{name}", name, x)) for name in names))
    assert [n.name for n in starts_of(chains.graph)] == [f"its_{name}" for name in names if name != "broadcast"]
