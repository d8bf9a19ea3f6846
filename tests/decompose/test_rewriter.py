"""Programs taken apart by every choice there is: the same values on all devices, and rows that say what was done."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.decompose.lockstep import results
from tests.decompose.programs import integers
from tests.overlap.graphs import ATEN, Builder
from torch import fx

from meshweave.cost.hardware import load_profile
from meshweave.errors import VerifyError
from meshweave.ir import local_ops
from meshweave.ir.collectives import STARTS
from meshweave.ir.device_program import DeviceProgram
from meshweave.optimize.decompose import rewriter
from meshweave.optimize.decompose.algorithms import DecomposeOptions, algorithm
from meshweave.optimize.decompose.chains import Downstream
from meshweave.optimize.decompose.lower import ring_graph
from meshweave.optimize.decompose.price import Estimate
from meshweave.optimize.decompose.report import DecomposeReport
from meshweave.optimize.decompose.rewrite import RingScheme
from meshweave.optimize.decompose.rewriter import RingChoice, by_gain, first, take_apart

N = 3
GROUPS = {"a": tuple(range(N))}
EVERY = DecomposeOptions(when="always", num_chunks=(2,))
Build = Callable[[Builder], Sequence[fx.Node]]


def built(build: Build) -> fx.Graph:
    b = Builder({"a": (GROUPS["a"],)})
    return b.done(*build(b)).graph


def program_of(build: Build) -> DeviceProgram:
    return ring_graph(built(build), GROUPS, 0).program


class Plan:
    """Takes given decisions (-1: leave it), and leaves what comes after them; notes how many choices there were."""

    def __init__(self, decisions: Sequence[int]) -> None:
        self.rest, self.counts = list(decisions), list[int]()

    def __call__(self, start: fx.Node, choices: Sequence[RingChoice]) -> tuple[int, str]:
        self.counts.append(len(choices))
        at = self.rest.pop(0) if self.rest else -1
        return (at, "") if at >= 0 else (0, "left by the plan")


Outcome = tuple[tuple[int, ...], fx.Graph, DecomposeReport]


def outcomes(build: Build, options: DecomposeOptions = EVERY, taken: tuple[int, ...] = ()) -> Iterator[Outcome]:
    """The program by every list of decisions that begins with `taken`."""
    program, plan = program_of(build), Plan(taken)
    report, decisions = take_apart(program, options, plan, None)
    program.graph.lint()
    yield decisions, program.graph, report
    for at in range(len(taken), len(plan.counts)):
        left = (*taken, *[-1] * (at - len(taken)))
        for choice in range(plan.counts[at]):
            yield from outcomes(build, options, (*left, choice))


def assert_same_on_all(before: fx.Graph, after: fx.Graph) -> None:
    nodes = before.find_nodes(op="placeholder", sort=True)
    inputs = [{n.name: integers(*n.meta["val"].shape, seed=10 * i + r) for i, n in enumerate(nodes)} for r in range(N)]
    for expected, got in zip(results(before, inputs), results(after, inputs), strict=True):
        for x, y in zip(expected, got, strict=True):
            assert torch.equal(x, y), str(after)


def before_two_products(b: Builder) -> list[fx.Node]:
    """A gathered value in a product by rows, in one that sums over rows, and by itself."""
    x, w, v = b.placeholder("x", (4, 6)), b.placeholder("w", (6, 2)), b.placeholder("v", (12, 5))
    full = b.wait("full", b.gather("gather", x))
    rows = b.mm("rows", b.relu("relu", full), w)
    return [rows, b.mm("total", b.call("turned", ATEN.t.default, full), v), b.call("sum", ATEN.neg.default, full)]


def after_a_product(kind: str) -> Build:
    """A product whose relu is read elsewhere is reduced, and multiplied again."""

    def build(b: Builder) -> list[fx.Node]:
        x, w, v = b.placeholder("x", (12, 6)), b.placeholder("w", (6, 4)), b.placeholder("v", (4, 2))
        relu = b.relu("relu", b.mm("product", x, w))
        total = b.wait("total", b.start("start", kind, relu))
        return [b.mm("after", total, v), b.call("elsewhere", ATEN.neg.default, relu)]

    return build


def two_layers(b: Builder) -> list[fx.Node]:
    """A gather, two products, and a reduce-scatter; the second layer's gather cannot be decomposed."""
    x, w, v = b.placeholder("x", (2, 4)), b.placeholder("w", (4, 6)), b.placeholder("v", (6, 4))
    up = b.mm("up", b.wait("full", b.gather("gather", x)), w)
    own = b.wait("own", b.scatter("scatter", b.mm("down", b.relu("relu", up), v)))
    return [b.call("sum", ATEN.cumsum.default, b.wait("last", b.gather("again", own)), 0)]


def with_itself(b: Builder) -> list[fx.Node]:
    """Rows of the gathered value times all of its rows: chunks of one operand are not those of the other."""
    full = b.wait("full", b.gather("gather", b.placeholder("x", (4, 6))))
    return [b.mm("product", full, b.call("turned", ATEN.t.default, full))]


def squeezed_in_vain(b: Builder) -> list[fx.Node]:
    """A chunk of a single row has a dim of size 1 where the gathered value has not."""
    full = b.wait("full", b.gather("gather", b.placeholder("x", (1, 6))))
    return [b.mm("product", b.call("same", ATEN.squeeze.dim, full, 0), b.placeholder("w", (6, 4)))]


def late_weight(b: Builder) -> list[fx.Node]:
    """The product's weight is cast after the wait for its rows."""
    x, w = b.placeholder("x", (4, 6)), b.placeholder("w", (6, 2))
    full = b.wait("full", b.gather("gather", x))
    return [b.mm("product", full, b.relu("cast", w))]


GATHERS = ["direct", "cyclic", "bidirectional", "pipelined"]
SCATTERS = ["direct", "ring", "pipelined"]
# By program the collectives of a list of decisions: their names, and the algorithms that are chosen among, in order.
PROGRAMS: dict[str, tuple[Build, set[tuple[tuple[str, str], ...]]]] = {
    "gather": (before_two_products, {(("gather", way),) for way in ("", *GATHERS)}),
    "reduce_scatter": (
        after_a_product("reduce_scatter_tensor"), {(("start", way),) for way in ("", *SCATTERS)},
    ),
    "all_reduce": (
        after_a_product("all_reduce"),
        {
            (("start", ""),), (("start", "pipelined"),),
            *((("start", way), ("", then)) for way in ("direct", "ring") for then in ("", *GATHERS)),
        },
    ),
    "squeezed in vain": (squeezed_in_vain, {(("gather", ""),)}),
    "with itself": (with_itself, {(("gather", way),) for way in ("", "pipelined")}),
    "a weight that comes later": (late_weight, {(("gather", way),) for way in ("", *GATHERS)}),
    "two layers": (
        two_layers,
        {
            (("gather", way), ("scatter", then), ("again", ""))
            for way in ("", *GATHERS) for then in ("", *SCATTERS) if way in ("", "direct")
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_choice_gives_the_same_values_on_all_devices(name: str) -> None:
    build, expected = PROGRAMS[name]
    options = EVERY if name != "two layers" else replace(EVERY, all_gather=("direct",))
    before, seen, every = built(build), set(), list(outcomes(build, options))
    for decisions, graph, report in every:
        assert_same_on_all(before, graph)
        names = {n.name for n in before.nodes}
        seen.add(tuple((r.name if r.name in names else "", r.scheme if r.is_taken else "") for r in report.rows))
        left = {n.name for n in graph.nodes if n.target in STARTS}
        for row in report.rows:
            assert (row.name in left) != row.is_taken
            assert row.is_taken == bool(row.numerics)
        assert sum(at >= 0 for at in decisions) == report.num_taken
    assert seen == expected
    assert len(every) == len(expected)


def test_what_is_written_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(program: DeviceProgram) -> None:
        raise VerifyError("not proven")

    monkeypatch.setattr(rewriter, "prove_rings", refuse)
    with pytest.raises(VerifyError, match="not proven"):
        take_apart(program_of(two_layers), EVERY, first, None)


def test_every_variant_of_consumers_gives_the_same_values() -> None:
    """Both products, or that by rows alone: the sum then reads the gathered value, joined."""
    options = replace(EVERY, when="gain", all_gather=("direct", "pipelined"))
    variants = []
    for _, graph, report in outcomes(before_two_products, options):
        assert_same_on_all(built(before_two_products), graph)
        variants += [(row.scheme, row.matmuls) for row in report.rows if row.is_taken]
    both, rows = ("rows", "total"), ("rows",)
    assert variants == [("direct", both), ("direct", rows), ("pipelined", both), ("pipelined", rows)]


def two_products_and_an_addend(b: Builder) -> list[fx.Node]:
    x, y, *weights = b.placeholder("x", (12, 6)), b.placeholder("y", (12, 4)), *b.placeholders("w v", (6, 4))
    products = [b.mm(f"product_{i}", x, w) for i, w in enumerate(weights)]
    return [b.wait("own", b.scatter("start", b.add("sum", b.add("both", *products), b.relu("relu", y))))]


def test_what_has_no_matmul_is_computed_whole_and_a_chunk_is_taken_once() -> None:
    program = program_of(two_products_and_an_addend)
    take_apart(program, replace(EVERY, reduce_scatter=("direct",)), first, None)
    taken = Counter(n.args[0].name for n in program.graph.nodes if n.target is local_ops.take_chunk)
    assert taken == {"x": N, "relu": N}


def viewed(b: Builder) -> list[fx.Node]:
    x, w = b.placeholder("x", (4, 6)), b.placeholder("w", (6, 2))
    full = b.wait("full", b.gather("gather", x))
    seen = b.call("seen", ATEN.view.default, b.relu("relu", full), [12, 6])
    return [b.mm("product", b.call("exp", ATEN.neg.default, seen), w), b.call("sum", ATEN.neg.default, seen)]


def test_a_view_that_is_read_elsewhere_is_repeated_on_the_whole_value() -> None:
    program = program_of(viewed)
    report, _ = take_apart(program, replace(EVERY, all_gather=("direct",)), first, None)
    (view,) = (n for n in program.graph.nodes if n.name == "seen")
    assert report.num_taken == 1
    assert view.args[0].target is local_ops.join_chunks
    assert_same_on_all(built(viewed), program.graph)


def test_decisions_reproduce_the_program() -> None:
    build, _ = PROGRAMS["all_reduce"]
    for decisions, graph, _ in outcomes(build):
        again = program_of(build)
        assert take_apart(again, EVERY, Plan(decisions), None)[1] == decisions
        assert str(again.graph) == str(graph)


def rows_of(build: Build, options: DecomposeOptions = EVERY, **changes: Any) -> dict[str, Any]:
    program = replace(program_of(build), **changes)
    before = str(program.graph)
    report, decisions = take_apart(program, options, first, None)
    assert (report.num_taken, str(program.graph)) == (0, before)
    assert decisions == ()
    return {row.name: row.reason for row in report.rows}


def a_max(b: Builder) -> list[fx.Node]:
    product = b.mm("product", b.placeholder("x", (12, 6)), b.placeholder("w", (6, 4)))
    return [b.wait("most", b.reduce("start", product, reduce="max"))]


def read_before(b: Builder) -> list[fx.Node]:
    product = b.mm("product", b.placeholder("x", (12, 6)), b.placeholder("w", (6, 4)))
    early = b.call("early", ATEN.exp.default, product)
    return [b.wait("own", b.scatter("start", product)), early]


def heavy_operand(b: Builder) -> list[fx.Node]:
    x, w = b.placeholder("x", (2, 4)), b.placeholder("w", (4, 4))
    full = b.wait("full", b.gather("start", x))
    return [b.mm("product", full, b.mm("weight", w, w))]


REASONS: dict[str, tuple[Build, dict[str, Any], str, str]] = {
    "no algorithm": (two_layers, {"all_gather": (), "reduce_scatter": ()}, "gather", "the options exclude it"),
    "pipelined in one part": (
        two_layers, {"all_gather": ("pipelined",), "reduce_scatter": (), "num_chunks": (1,)}, "gather",
        "the options exclude it",
    ),
    "too many devices": (
        two_layers, {"most_devices": 2}, "scatter", "its group has 3 devices, and a ring would have as many steps",
    ),
    "a max": (a_max, {"all_reduce": ("direct", "ring")}, "start", "a max cannot be decomposed into messages"),
    "chunks that do not divide": (
        late_weight, {"all_gather": ("pipelined",), "num_chunks": (5,)}, "gather", "5 chunks do not divide [12, 6]",
    ),
    "an earlier reader": (read_before, {}, "start", "product is used by others before"),
    "an operand that comes later": (heavy_operand, {}, "start", "weight, an operand of product, is computed later"),
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_be_decomposed_has_a_reason_and_stays(name: str) -> None:
    build, options, start, reason = REASONS[name]
    assert rows_of(build, replace(EVERY, **options))[start] == reason


def test_dims_that_differ_between_devices_are_not_cut() -> None:
    program = program_of(late_weight)
    (full,) = (n for n in program.graph.nodes if n.name == "full")
    program = replace(program, uneven={full: frozenset({0})})
    report, _ = take_apart(program, replace(EVERY, all_gather=("direct",)), first, None)
    assert [row.reason for row in report.rows] == ["3 chunks do not divide [12, 6]"]


def test_what_the_program_refuses_is_not_asked_for() -> None:
    rows = rows_of(two_layers, refused=lambda start: f"{start.name} is kept")
    assert rows == {name: f"{name} is kept" for name in ("gather", "scatter", "again")}


def test_as_many_devices_as_the_options_allow_are_a_ring() -> None:
    report, _ = take_apart(program_of(two_layers), replace(EVERY, most_devices=N), first, None)
    assert [row.is_taken for row in report.rows] == [True, True, False]


def test_a_max_is_decomposed_into_parts() -> None:
    program = program_of(a_max)
    report, _ = take_apart(program, EVERY, first, None)
    assert [row.scheme for row in report.rows] == ["pipelined"]
    assert_same_on_all(built(a_max), program.graph)


def test_a_single_device_has_nothing_to_move() -> None:
    b = Builder({"a": ((0,),)})
    product = b.mm("product", b.wait("full", b.gather("gather", b.placeholder("x"))), b.placeholder("w"))
    program = ring_graph(b.done(product).graph, {"a": (0,)}, 0).program
    report, _ = take_apart(program, EVERY, first, None)
    assert [row.reason for row in report.rows] == ["its group has one device: nothing moves"]


NUMERICS = {
    # kind, algorithm: the effect on values
    ("reduce_scatter_tensor", "ring"): "as by hand; sums in float64",
    ("reduce_scatter_tensor", "pipelined"): "as by the collective",
    ("all_reduce", "direct"): "as by hand; sums in float64",
}


@pytest.mark.parametrize(("kind", "way"), NUMERICS)
def test_the_effect_on_values(kind: str, way: str) -> None:
    """Sums have the dtype of the options and the caller's order; parts are summed by the collective itself."""
    options = replace(EVERY, reduce_scatter=(way,), all_reduce=(way,), accumulate=torch.float64)
    report, _ = take_apart(program_of(after_a_product(kind)), options, first, None, "as by hand")
    rest = "; a matmul of fewer rows may round differently than the whole"
    assert report.rows[0].numerics == NUMERICS[kind, way] + rest


def test_products_that_are_summed_say_so() -> None:
    """The chunks of a gather are exact; the order of sums over a group is not theirs."""
    report, _ = take_apart(program_of(before_two_products), EVERY, first, None, "as by hand")
    assert report.rows[0].numerics.startswith("exact: every element is moved once; sums in float32;")


# the choice by gain


def choice(before: float, after: float, steps: int, more: float = 0.0) -> RingChoice:
    estimate = Estimate(
        compute=before,
        collective=0.0,
        host=0.0,
        hidden=0.0,
        chunk=0.0,
        message=0.0,
        num_steps=steps,
        num_messages=0,
        losses=0.0,
        played=after,
    )
    return RingChoice(RingScheme(algorithm("all_gather", "direct"), 0), Downstream({}), steps, estimate, more)


def test_a_gain_is_what_is_saved_and_what_a_second_half_can_save() -> None:
    assert choice(5.0, 3.0, 2).gain == 2.0
    assert choice(5.0, 3.0, 2, 1.5).gain == 3.5
    assert replace(choice(5.0, 3.0, 2), estimate=None).gain == 0.0


def test_the_fewest_steps_near_the_best_are_taken_if_they_gain() -> None:
    """Against the definition, for lists of choices with equal gains, steps near the margin, and losses."""
    rng, start, verdicts = random.Random(0), fx.Graph().placeholder("start"), set()
    for _ in range(300):
        margin = rng.choice([0.0, 0.02, 0.3])
        choices = [choice(10.0, rng.choice([6.0, 7.0, 9.0, 9.9, 11.0]), rng.choice([2, 4]), rng.choice([0.0, 1.0]))
                   for _ in range(rng.randint(1, 5))]  # fmt: skip
        at, reason = by_gain(margin)(start, choices)
        taken, most = choices[at], max(c.gain for c in choices)
        assert taken.gain >= most - margin * 10.0
        better = [c for c in choices if c.gain >= most - margin * 10.0 and c.num_steps < taken.num_steps]
        equal = [c for c in choices if c.num_steps == taken.num_steps and c.gain > taken.gain]
        assert not better
        assert not equal
        assert choices.index(taken) == at
        assert (reason == "") == (taken.gain > margin * 10.0)
        verdicts.add(reason == "")
    assert verdicts == {True, False}


def test_a_loss_has_its_cause() -> None:
    """A collective of 4 s beside compute of 6 s, none of it hidden: two steps of 5 s each."""
    loss = choice(10.0, 11.0, 2)
    assert loss.estimate is not None
    estimate = replace(loss.estimate, compute=6.0, collective=4.0, chunk=5.0)
    _, reason = by_gain(0.02)(fx.Graph().placeholder("start"), [replace(loss, estimate=estimate)])
    cause = "the matmuls are slower in chunks (4000000.0 us)"
    assert reason == f"no gain: direct takes 11000000.0 us instead of 10000000.0 us, {cause}"


def test_with_costs_rows_have_seconds_and_the_order_is_by_gain() -> None:
    """Large products beside large messages: what is taken gains the margin, what is not does not."""

    def build(b: Builder) -> list[fx.Node]:
        half = torch.bfloat16
        x, w = b.placeholder("x", (8192, 4096), half), b.placeholder("w", (4096, 4096), half)
        y, v = b.placeholder("y", (2, 4)), b.placeholder("v", (4, 4))
        tiny = b.mm("tiny", b.wait("few", b.gather("small", y)), v)
        return [b.mm("product", b.wait("full", b.gather("large", x)), w), tiny]

    options = DecomposeOptions()
    report, decisions = take_apart(program_of(build), options, by_gain(options.margin), load_profile("h100"))
    small, large = (next(row for row in report.rows if row.name == name) for name in ("small", "large"))
    assert large.is_taken
    assert large.seconds_after < (1 - options.margin) * large.seconds_before
    assert not small.is_taken
    assert small.seconds_after > (1 - options.margin) * small.seconds_before > 0
    assert [at >= 0 for at in decisions] == [row.is_taken for row in report.rows]
