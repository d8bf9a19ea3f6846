"""What a graph can see of a tensor besides its elements: views, storages and offsets, ops in place, results that are
absent, starts that are outputs, waits for what an earlier graph began."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.overlap.graphs import ATEN, WAIT, Builder, assert_same_values, by_size, groups_of, peak, play, starts
from tests.overlap.test_overlap_fuzz import (
    KINDS,
    Flying,
    Grower,
    Unsound,
    _is_exact,
    _owns_all,
    case,
    check,
    check_tight,
)
from torch import fx

from meshweave.optimize.overlap import OverlapReport, overlap

ALL = 2000


def merged(gm: fx.GraphModule, **options: Any) -> tuple[fx.GraphModule, OverlapReport]:
    """Through the pass at costs under which fewer, larger collectives are faster; the values are those of before."""
    found = overlap(gm, cost=by_size({}, 5.0, 1e-3), groups=groups_of(0), **options)
    assert_same_values(gm, found[0])
    return found


def num_taken(report: OverlapReport) -> int:
    return sum(m.is_taken for m in report.merges)


# ---- by hand ----------------------------------------------------------------------------------------------------


def reduced(kind: str) -> tuple[Builder, list[fx.Node], list[fx.Node]]:
    """Two reductions that merging makes faster, and their results."""
    b = Builder()
    x, y = b.placeholders("x y", (8, 8))
    begun = [b.start(f"start_{n.name}", kind, n) for n in (x, y)]
    return b, begun, [b.wait(f"done_{n.name}", n) for n in begun]


REDUCTIONS = ("reduce_scatter_tensor", "all_reduce")
OBSERVERS: dict[str, Callable[[Builder, fx.Node], Any]] = {
    "as_strided from an offset": lambda b, x: b.call("seen", ATEN.as_strided.default, x, [4], [1], 2),
    "as_strided of a view": lambda b, x: b.call(
        "seen", ATEN.as_strided.default, b.call("row", ATEN.select.int, x, 0, 1), [4], [1], 0
    ),
    "as_strided_scatter": lambda b, x: b.call(
        "seen", ATEN.as_strided_scatter.default, x, b.call("src", ATEN.full.default, [4], 1.0), [4], [1], 2
    ),
    "as_strided, in place": lambda b, x: b.call(
        "seen", ATEN.add_.Tensor, b.call("cut", ATEN.as_strided.default, x, [4], [1], 2), 1
    ),
    "in place": lambda b, x: b.call("seen", ATEN.mul_.Tensor, x, 2),
    "a view in place": lambda b, x: b.call("seen", ATEN.mul_.Tensor, b.call("row", ATEN.select.int, x, 0, 1), 2),
    "a larger dtype": lambda b, x: b.call("seen", ATEN.view.dtype, x, torch.float64),
    "complex": lambda b, x: b.call(
        "seen", ATEN.view_as_complex.default, b.call("pairs", ATEN.view.default, x, [-1, 2])
    ),
    "the offset": lambda b, x: b.call("seen", ATEN.sym_storage_offset.default, x),
    "an output": lambda b, x: x,
    "an output that is a view": lambda b, x: b.call("seen", ATEN.select.int, x, 0, 1),
}


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("name", OBSERVERS)
def test_what_is_observed_has_a_storage_of_its_own(name: str, kind: str) -> None:
    """The merge is taken; what it makes is a copy where the graph sees more than elements, priced as one."""
    b, _, (first, second) = reduced(kind)
    seen = OBSERVERS[name](b, second)
    gm = b.done(b.relu("used", first), b.relu("other", second) if name != "an output" else second, seen)
    after, report = merged(gm)
    assert num_taken(report) == 1
    assert len(starts(after)) == 1
    assert peak(after) <= report.peak_bytes


def test_what_is_not_observed_stays_a_view() -> None:
    b, _, (first, second) = reduced("all_reduce")
    after, report = merged(b.done(b.relu("used", first), b.relu("other", second)))
    assert num_taken(report) == 1
    assert not after.graph.find_nodes(op="call_function", target=ATEN.clone.default)


def test_a_single_element_of_any_stride_is_merged_with_another_dtype() -> None:
    b = Builder()
    (total,), (y,) = b.placeholders("total", ()), b.placeholders("y", (8,), torch.bfloat16)
    begun = [b.gather("start_x", b.call("few", ATEN.expand.default, total, [1])), b.gather("start_y", y)]
    first, second = (b.wait(f"done_{n.name}", n) for n in begun)
    after, report = merged(b.done(b.relu("used", first), b.relu("other", second)))
    assert num_taken(report) == 1
    assert len(starts(after)) == 1


@pytest.mark.parametrize("kind", ["all_gather_into_tensor", *REDUCTIONS])
@pytest.mark.parametrize("how", ["output", "view", "view that is waited for", "used after its wait"])
def test_a_start_whose_result_is_used_by_itself(how: str, kind: str) -> None:
    """It is merged with nothing: what reads it, or a view of it, reads the very tensor."""
    b = Builder()
    x, y, z = b.placeholders("x y z", (8, 8))
    begun = [b.start(f"start_{n.name}", kind, n) for n in (x, y, z)]
    raw = begun[1]
    if how.startswith("view"):
        raw = b.call("shown", ATEN.view.default, raw, [-1])
    done = [b.wait("done_x", begun[0])]
    done += [b.wait("done_y", raw if how == "view that is waited for" else begun[1]), b.wait("done_z", begun[2])]
    outputs = [b.relu(None, n) for n in done]
    outputs.append(b.relu("late", raw) if how == "used after its wait" else raw)
    after, report = merged(b.done(*outputs))
    assert "start_y" in {n.name for n in starts(after)}
    assert [m.names for m in report.merges if m.is_taken] == [("start_x", "start_z")]


def test_a_start_that_a_later_graph_waits_for() -> None:
    b = Builder()
    x, y = b.placeholders("x y", (8, 8))
    raw = b.gather("raw", x)
    gm = b.done(raw, b.mm("product", y, y))
    after, report = merged(gm)
    assert [n.name for n in after.graph.nodes if n.op == "call_function"] == ["raw", "product"]
    assert report.collectives[0].name == "raw"


@pytest.mark.parametrize("is_read", [False, True])
def test_a_wait_for_what_an_earlier_graph_began(is_read: bool) -> None:
    """It stands where its result is needed, or, where the input itself is read too, on its side of each reader."""
    b = Builder()
    early, x = b.placeholders("early x")
    there = b.wait("there", early)
    busy = b.mm("busy", x, x)
    outputs = [b.mm("used", there, busy)]
    if is_read:
        outputs.append(b.relu("raw", early))
    after, report = merged(b.done(*outputs))
    names = [n.name for n in after.graph.nodes]
    assert names.index("there") < names.index("used")
    assert is_read or names.index("busy") < names.index("there")
    assert report.seconds == 0.0


def test_waits_for_inputs_in_backward_come_after_starts_in_forward() -> None:
    """Two graphs of one step: the first starts, the second waits."""
    b = Builder()
    x, y = b.placeholders("x y")
    forward, _ = merged(b.done(b.gather("raw", x), b.relu("used", y)))
    later = Builder()
    raw, tangents = later.placeholder("raw", (16, 8)), later.placeholder("tangents_1")
    full = later.wait("full", raw)
    start = later.gather("next", tangents)
    backward, _ = merged(later.done(later.mm("product", full, tangents), later.wait("done", start)))
    assert [n.target is WAIT for n in backward.graph.nodes if n.name == "full"] == [True]
    assert starts(forward)[0].name == "raw"


@pytest.mark.parametrize("mask", [(False, True, True), (False, True, False), (True, False, True)])
def test_results_that_are_absent_keep_their_place(mask: tuple[bool, bool, bool]) -> None:
    """A convolution that a model begins with has no gradient of its input: the others are what they are."""
    b = Builder()
    grad, x = b.placeholders("grad x", (2, 4, 8))
    weight = b.placeholder("weight", (4, 4, 1))
    several = b.call("grads", *convolution(grad, x, weight, mask))
    items = [b.item(f"item_{i}", several, i) for i, is_there in enumerate(mask) if is_there]
    gm = b.done(*(b.relu(None, b.wait(None, b.reduce(None, item))) for item in items))
    after, report = merged(gm)
    assert report.peak_before == peak(gm)
    assert peak(after) <= report.peak_bytes


def convolution(grad: fx.Node, x: fx.Node, weight: fx.Node, mask: Any) -> tuple[Any, ...]:
    bias = [weight.meta["val"].shape[0]]
    return ATEN.convolution_backward.default, grad, x, weight, bias, [1], [0], [1], False, [0], 1, list(mask)


def test_a_wait_that_is_waited_for_again_goes_with_its_merge() -> None:
    b, _, (first, second) = reduced("all_reduce")
    again = b.wait("again", second)
    after, report = merged(b.done(b.relu("used", first), b.relu("other", again), b.relu("third", second)))
    assert num_taken(report) == 1
    assert len(after.graph.find_nodes(op="call_function", target=WAIT)) == 1
    assert_same_values(after, merged(after)[0])


def test_a_result_that_is_handed_in_twice_costs_twice_by_whatever_names() -> None:
    """A merge makes a wait, and a wait for that again, one node: what is priced is what moves, before and after."""
    b, _, (first, second) = reduced("all_reduce")
    again = b.wait("again", second)
    several = torch.ops._c10d_functional.all_reduce_coalesced.default
    parts = b.call("several", several, [second, again], "sum", "a")
    outputs = [b.wait(None, b.item(None, parts, i)) for i in range(2)]
    gm = b.done(b.relu("used", first), *outputs)
    cost = by_size({}, 5.0, 1e-3)
    after, report = merged(gm)
    assert num_taken(report) == 1
    assert play(gm, cost)[0] == pytest.approx(report.seconds_before)
    assert play(after, cost)[0] == pytest.approx(report.seconds, rel=1e-6)


# ---- at random --------------------------------------------------------------------------------------------------


class Observer(Grower):
    """Grows graphs that see storages: what `Grower` leaves out."""

    def more(self) -> list[Callable[[], None]]:
        moves = [self.strided] * 3 + [self.write_view] * 4 + [self.absent, self.other_dtype, self.in_place]
        return moves + [self.land] * 2 + [self.like_another] * 8

    def like_another(self) -> None:
        """Several reductions or gathers of a kind, next to each other and waited for late: what is merged."""
        kind, group = self.random.choice(KINDS[:3]), self.random.choice("aab")
        for _ in range(self.random.randrange(2, 4)):
            x = self.pick(
                lambda k: k.val.dim() > 0 and k.val.shape[0] % 2 == 0 and k.val.dtype is torch.float32 and k.val.nbytes
            )
            if x:
                base, node = self.contiguous(x)
                self.flying.append(Flying([(self.b.start(None, kind, node, group), x.is_exact)], {base}))

    def placeholders(self) -> None:
        super().placeholders()
        for known in self.inputs:  # an earlier graph began to fill it
            if self.random.random() < 0.25:
                self.known.remove(known)
                self.flying.append(Flying([(known.node, known.is_exact)], {known.base}))
                self.early.add(known.node)
        if not self.known:
            self.land()

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.early: set[fx.Node] = set()

    def strided(self) -> None:
        """A view by explicit geometry, from an offset in the storage, whatever it is a view of."""
        x = self.pick()
        if not x:
            return
        size = x.val.untyped_storage().nbytes() // x.val.dtype.itemsize
        rows, columns = self.random.choice([1, 2, 4]), self.random.choice([2, 4, 8])
        step = columns + self.random.choice([0, 0, 1])
        room = size - (rows - 1) * step - columns
        if room < 0:
            return
        geometry = ([rows, columns], [step, 1], self.random.randrange(room + 1))
        if self.random.random() < 0.25:
            source = self.b.call(None, ATEN.full.default, geometry[0], 1.0, dtype=x.val.dtype)
            self.keep(self.b.call(None, ATEN.as_strided_scatter.default, x.node, source, *geometry))
            return
        self.keep(self.b.call(None, ATEN.as_strided.default, x.node, *geometry), x.base, x.is_exact)

    def write_view(self) -> None:
        """In place into whatever there is: a view, a result, an input."""
        x = self.pick(lambda k: torch._debug_has_internal_overlap(k.val) == 0)
        y = self.pick(lambda k: k.val.shape == x.val.shape and k.val.dtype == x.val.dtype and k.is_exact) if x else None
        if not x or not y:
            return
        for flight in [f for f in self.flying if x.base in f.bases]:
            self.land_all(flight)
        op = self.random.choice([ATEN.copy_.default, ATEN.maximum.default, ATEN.neg_.default, ATEN.relu_.default])
        if op is ATEN.copy_.default and y.base == x.base:
            return  # an overlap, which torch leaves undefined
        if op is ATEN.maximum.default:
            made = self.b.call(None, ATEN.clamp_.default, x.node, -2, 2)
        else:
            made = self.b.call(None, op, x.node, *([y.node] if op is ATEN.copy_.default else []))
        self.keep(made, x.base, x.is_exact)

    def absent(self) -> None:
        """An op of several results of which some are absent."""
        x = self.pick(
            _is_exact, lambda k: k.val.dtype is torch.float32 and k.val.numel() % 8 == 0 and 0 < k.val.numel() <= 256
        )
        if not x:
            return
        flat = self.b.call(None, ATEN.reshape.default, self.clamp(x), [2, 4, x.val.numel() // 8])
        weight = self.b.call(None, ATEN.full.default, [4, 4, 1], 1.0)
        mask = self.random.choice(
            [(False, True, True), (False, True, False), (True, False, True), (False, False, True)]
        )
        several = self.b.call(None, *convolution(flat, flat, weight, mask))
        for i, is_there in enumerate(mask):
            if is_there and self.random.random() < 0.8:
                self.keep(self.b.item(None, several, i))

    def other_dtype(self) -> None:
        x = self.pick(lambda k: k.val.dtype is torch.float32 and k.val.is_contiguous() and k.val.storage_offset() == 0)
        if x and x.val.dim() and x.val.shape[-1] % 2 == 0:
            shown = self.b.call(None, ATEN.view.dtype, x.node, torch.int64)
            self.keep(self.b.call(None, ATEN.bitwise_and.Scalar, shown, 3))

    def in_place(self) -> None:
        """A reduction into its operand, which nobody reads meanwhile."""
        x = self.pick(_owns_all, lambda k: k.val.dim() > 0 and k.val.dtype is not torch.float16 and k.val.nbytes < 4096)
        if not x or x.node.op == "placeholder":
            return
        for flight in [f for f in self.flying if x.base in f.bases]:
            self.land_all(flight)
        start = self.b.call(None, torch.ops._c10d_functional.all_reduce_.default, x.node, "sum", "a")
        hidden = [k for k in self.known if k.base == x.base]
        self.known = [k for k in self.known if k.base != x.base]
        self.flying.append(Flying([(start, x.is_exact)], {x.base}, hidden))
        if not self.known:
            self.land()

    def land_all(self, flight: Flying) -> None:
        """A wait for the result or for a view of it; at times the result is read by itself from then on, or it has a
        view from before."""
        self.flying.remove(flight)
        for node, is_exact in flight.parts:
            shown = None
            if node.meta["val"].dim() == 2 and self.random.random() < 0.06:
                shown = self.b.call(None, ATEN.view.default, node, [-1])
            base = min(flight.bases) if node in self.early or flight.hidden else None
            waited = shown if shown is not None and self.random.random() < 0.3 else node
            known = self.keep(self.b.wait(None, waited), base, is_exact)
            if self.random.random() < 0.1:
                self.keep(self.b.wait(None, known.node), known.base, is_exact)
            if shown is not None:
                self.keep(shown, known.base, is_exact)
            if self.random.random() < 0.05:
                self.keep(node, known.base, is_exact)
        self.known += flight.hidden


@pytest.mark.slow_rows("1", "2", "3")
@pytest.mark.parametrize("part", range(4))
def test_a_sample_of_graphs_that_see_storages(part: int) -> None:
    found = [check(seed, Observer) for seed in range(6 * part, 6 * part + 6)]
    assert sum(num for num, _ in found) > 0
    assert sum(saved > 1e-6 for _, saved in found) > len(found) // 3


def test_the_cap_that_an_error_names_works() -> None:
    """Orders sought under a cap that is too low hold less than those that the search then gave under what was named."""
    check_tight(case(617, Observer))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(60))
def test_graphs_that_see_storages(part: int) -> None:
    for seed in range(part, ALL, 60):
        try:
            check(seed, Observer)
        except Unsound:
            continue
        except Exception as error:
            raise AssertionError(f"graph {seed}: {error}") from error
