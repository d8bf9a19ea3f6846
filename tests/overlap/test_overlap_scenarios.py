"""What an overlap pass must do, scenario by scenario, each decided by clear numbers: ops of about 1 s.

Every graph is run on four ranks before and after (`passed`): the values are the same to the bit, and the seconds that
the report gives are those of an independent simulation of the returned graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.overlap.graphs import (
    ATEN,
    C10D,
    CONVERT,
    STARTS,
    WAIT,
    Builder,
    Cost,
    assert_same_results,
    assert_same_values,
    by_name,
    by_size,
    groups_of,
    peak,
    play,
    position,
    renamed,
    run,
    starts,
)
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import meshweave as mw
from meshweave.optimize.overlap import OverlapOptions, OverlapReport, overlap
from meshweave.optimize.overlap.prices import CostNumbers

PLAIN = OverlapOptions(bucket=False)
KINDS = ["all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"]


def passed(gm: fx.GraphModule, cost: Cost, **options: Any) -> tuple[fx.GraphModule, OverlapReport, dict[str, int]]:
    """The graph after the pass, the report, and the place of every node."""
    after, report = overlap(gm, cost=cost, groups=groups_of(0), **options)
    after.graph.lint()
    assert_same_values(gm, after)
    assert (report.seconds_before, report.exposed_before) == pytest.approx(play(gm, cost))
    assert (report.seconds, report.exposed_seconds) == pytest.approx(play(after, cost))
    assert report.bound_seconds <= report.seconds * (1 + 1e-9)
    return after, report, position(after)


def exposed_rows(report: OverlapReport) -> list[str]:
    return [row.name for row in report.collectives if row.exposed_seconds > 1e-9]


def taken(report: OverlapReport) -> list[tuple[str, ...]]:
    return [merge.names for merge in report.merges if merge.is_taken]


# ---- where starts and waits stand -------------------------------------------------------------------------------


def test_start_and_wait_move_apart_to_both_sides() -> None:
    b = Builder()
    x = b.placeholder("x")
    first = b.mm("first", x, x)
    second = b.mm("second", r := b.relu("relu", first), r)
    total = b.wait("total", b.reduce("reduce", first))
    third = b.mm("third", r := b.relu("relu_1", second), r)
    gm = b.done(b.mm("last", total, third))
    _, report, at = passed(gm, by_name({"first": 1, "second": 1, "third": 1, "last": 1, "reduce": 2}))
    assert (report.seconds, report.exposed_seconds) == (4, 0)
    assert at["first"] < at["reduce"] < at["second"]
    assert at["third"] < at["total"] < at["last"]


def two_reductions(needs_both: bool) -> fx.GraphModule:
    """Two reductions one after the other and two matmuls; the second reduction needs one matmul or both."""
    b = Builder()
    x = b.placeholder("x")
    total = b.wait("total", b.reduce("reduce", x))
    free = b.mm("free", x, x)
    bound = b.mm("bound", r := b.relu("relu", x), r)
    product = b.call("product", ATEN.mul.Tensor, bound, total)
    if needs_both:
        product = b.add("sum", product, free)
    again = b.wait("again", b.reduce("reduce_1", product))
    return b.done(b.mm("last", again, free))


def test_compute_is_reordered_so_that_each_reduction_has_a_matmul_to_hide_under() -> None:
    cost = by_name({"reduce": 1, "reduce_1": 1, "free": 1, "bound": 1, "last": 1})
    _, report, at = passed(two_reductions(False), cost)
    assert (report.seconds, report.exposed_seconds) == (3, 0)
    assert at["bound"] < at["reduce_1"] < at["free"] < at["again"]


def test_exactly_one_reduction_stays_exposed_where_nothing_is_left_to_hide_it() -> None:
    cost = by_name({"reduce": 1, "reduce_1": 1, "free": 1, "bound": 1, "last": 1})
    _, report, at = passed(two_reductions(True), cost)
    assert (report.seconds, report.exposed_seconds) == (4, 1)
    assert exposed_rows(report) == ["reduce_1"]
    assert max(at["free"], at["bound"]) < at["reduce_1"]


def test_without_anything_to_gain_starts_keep_their_order() -> None:
    b = Builder()
    made = [b.reduce(f"reduce_{i}", x) for i, x in enumerate(b.placeholders("x y z"))]
    gm = b.done(*[b.wait(f"total_{i}", made[i]) for i in (2, 1, 0)])
    after, report, _ = passed(gm, by_name({"reduce_0": 1, "reduce_1": 2, "reduce_2": 3}), options=PLAIN)
    assert [n.name for n in starts(after)] == ["reduce_0", "reduce_1", "reduce_2"]
    assert (report.seconds, report.exposed_seconds) == (6, 6)


def test_a_gather_of_another_group_starts_before_an_exposed_wait() -> None:
    b = Builder()
    x, y = b.placeholders("x y")
    one = b.wait("one", b.gather("gather_a", x, "a"))
    first = b.mm("first", one, x)
    two = b.wait("two", b.gather("gather_b", y, "b"))
    gm = b.done(first, b.mm("second", two, x))
    _, report, at = passed(gm, by_name({"gather_a": 2, "gather_b": 2, "first": 1, "second": 1}))
    assert (report.seconds_before, report.seconds, report.exposed_seconds) == (6, 4, 2)
    assert max(at["gather_a"], at["gather_b"]) < min(at["one"], at["two"])


def test_a_reduce_scatter_off_the_path_does_not_drift_to_the_end() -> None:
    """Gradients of eight layers, each needed by nobody but the caller: the link is busy from the first on."""
    b = Builder()
    x = b.placeholder("x")
    outputs, table, value = [], {}, x
    for i in range(8):
        value = b.mm(f"path_{i}", value, x)
        shard = b.wait(f"shard_{i}", b.scatter(f"scatter_{i}", value))
        outputs.append(shard)
        table |= {f"path_{i}": 1.0, f"scatter_{i}": 0.9}
    after, report, at = passed(b.done(value, *outputs), by_name(table), options=PLAIN)
    # Only the last one has nothing to hide under.
    assert report.seconds == pytest.approx(8.9)
    assert exposed_rows(report) == ["scatter_7"]
    for i in range(7):
        assert at[f"path_{i}"] < at[f"scatter_{i}"] < at[f"path_{i + 1}"]
    assert [n.name for n in starts(after)] == [f"scatter_{i}" for i in range(8)]


def test_the_larger_gather_that_can_be_hidden_is_fetched_first() -> None:
    b = Builder()
    x, y, z = b.placeholders("x y z")
    small, large = b.wait("small", b.gather("gather_small", x)), b.wait("large", b.gather("gather_large", y))
    free = b.mm("free", z, z)
    short, long = b.mm("short", small, z), b.mm("long", large, z)
    gm = b.done(free, short, long)
    table = {"gather_small": 0.5, "gather_large": 2, "free": 2, "short": 0.1, "long": 1}
    _, report, at = passed(gm, by_name(table), options=PLAIN)
    assert report.seconds == pytest.approx(3.1)
    assert at["gather_large"] < at["gather_small"]


def test_a_weight_gradient_waits_until_a_reduce_scatter_needs_something_to_hide_it() -> None:
    """Tensor-parallel backward: per layer the gradient of the weight stands first, then that of the input, reduced."""
    b = Builder()
    weight, grad = b.placeholders("weight grad")
    outputs, table, layers = [], {}, 6
    for i in range(layers):
        outputs.append(b.mm(f"wgrad_{i}", grad, weight))
        partial = b.mm(f"dgrad_{i}", grad, weight)
        shard = b.wait(f"shard_{i}", b.scatter(f"scatter_{i}", partial))
        grad = b.call(f"grad_{i}", ATEN.cat.default, [shard, shard])
        table |= {f"wgrad_{i}": 1.0, f"dgrad_{i}": 1.0, f"scatter_{i}": 1.0}
    _, report, at = passed(b.done(grad, *outputs), by_name(table))
    assert report.seconds_before == pytest.approx(3 * layers)
    assert report.seconds == pytest.approx(2 * layers)
    assert report.bound_seconds == pytest.approx(2 * layers)
    for i in range(layers):
        assert any(at[f"scatter_{i}"] < at[f"wgrad_{j}"] < at[f"shard_{i}"] for j in range(i + 1))


@pytest.mark.skipif(not hasattr(C10D, "isend"), reason="this torch has no functional point to point")
def test_messages_keep_their_order_and_are_hidden() -> None:
    """Point to point, a message meets its partner by its place: nothing of its group passes it, however urgent."""
    b = Builder()
    x, y = b.placeholders("x y")
    sent = b.graph.create_node("call_function", C10D.isend.default, (x, 1, 0, "a"), name="sent")
    got = b.graph.create_node("call_function", C10D.irecv.default, (y, 1, 0, "a"), name="got")
    for node in (sent, got):
        node.meta["val"] = b.value(ATEN.clone.default, (x,), {})
    left = b.wait("left", sent)
    full = b.wait("full", b.gather("urgent", x))
    gm = b.done(left, b.wait("here", got), b.mm("free", x, x), b.mm("first", full, x))
    table = {"sent": 1, "got": 1, "urgent": 0.1, "free": 3, "first": 2}
    after, report = overlap(gm, cost=by_name(table), groups=groups_of(0))
    at = position(after)
    assert at["sent"] < at["got"] < at["urgent"] < min(at["left"], at["here"])
    assert (report.seconds, report.exposed_seconds) == pytest.approx((5, 0))


# ---- merging ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_three_of_one_kind_become_one(kind: str) -> None:
    b = Builder()
    xs = b.placeholders("x y z")
    made = [b.wait(f"wait_{i}", b.start(f"start_{i}", kind, x)) for i, x in enumerate(xs)]
    gm = b.done(*[b.mm(f"mm_{i}", w, xs[0]) for i, w in enumerate(made)])
    cost = by_size({f"mm_{i}": 1 for i in range(3)}, latency=10, seconds=1)
    after, report, _ = passed(gm, cost)
    assert len(starts(after)) == 1
    assert len(after.graph.find_nodes(op="call_function", target=WAIT)) == 1
    assert taken(report) == [("start_0", "start_1", "start_2")]
    # 10 + 3 for the merged one, then three matmuls; apart it would be 3 * 11 + 1.
    assert report.seconds == pytest.approx(16)
    assert next(m for m in report.merges if m.is_taken).saved_seconds > 0


@pytest.mark.parametrize("kind", KINDS)
def test_merging_is_an_option(kind: str) -> None:
    b = Builder()
    made = [b.start(f"start_{i}", kind, x) for i, x in enumerate(b.placeholders("x y z"))]
    after, report, _ = passed(b.done(*map(b.wait, [None] * 3, made)), by_size({}, 10, 1), options=PLAIN)
    assert len(starts(after)) == 3
    assert taken(report) == []


@pytest.mark.parametrize("kind", KINDS)
def test_two_whose_hiding_compute_is_dependent_stay_two(kind: str) -> None:
    """What hides the second needs the first: one collective of both would hold up what is to hide it."""
    b = Builder()
    x, y, z = b.placeholders("x y z")
    first, second = b.start("first", kind, x), b.start("second", kind, y)
    hides_first = b.mm("hides_first", z, z)
    early = b.wait("early", first)
    hides_second = b.mm("hides_second", early, z)
    gm = b.done(hides_first, hides_second, b.wait("late", second))
    after, report, _ = passed(gm, by_size({"hides_first": 1.1, "hides_second": 1.1}, 0.1, 1))
    assert len(starts(after)) == 2
    assert taken(report) == []
    assert (report.seconds, report.exposed_seconds) == pytest.approx((2.2, 0))


@pytest.mark.parametrize("kind", ["all_reduce"])
def test_a_collective_that_depends_on_another_cannot_join_it(kind: str) -> None:
    """However much a merge would save, it would close a circle; the third may join either."""
    b = Builder()
    x, y = b.placeholders("x y")
    first = b.wait("w_0", b.start("start_0", kind, x))
    second = b.wait("w_1", b.start("start_1", kind, b.relu("relu", first)))
    third = b.wait("w_2", b.start("start_2", kind, y))
    after, report, _ = passed(b.done(first, second, third), by_size({}, 100, 1))
    assert len(starts(after)) == 2
    assert [len(names) for names in taken(report)] == [2]
    assert not any({"start_0", "start_1"} <= set(names) for names in taken(report))
    assert report.seconds == pytest.approx(203)


def test_four_become_two_and_two_so_that_they_hide() -> None:
    b = Builder()
    xs = b.placeholders("x0 x1 x2 x3")
    g = [b.wait(f"w_{i}", b.gather(f"gather_{i}", x)) for i, x in enumerate(xs)]
    early = b.mm("early", xs[0], xs[0])
    middle = b.mm(
        "middle", b.add("sum_0", b.add("sum", g[0], g[1]), b.call("twice", ATEN.cat.default, [early] * 2)), xs[0]
    )
    gm = b.done(b.mm("last", b.add("sum_2", b.add("sum_1", g[2], g[3]), middle), xs[0]))
    after, report, _ = passed(gm, by_size({"early": 3, "middle": 3, "last": 1}, latency=1, seconds=1))
    # One of four: 5 s before `middle`; all apart: 8 s of latency and bytes; two and two hide under 3 s each.
    assert report.seconds == pytest.approx(7)
    assert sorted(taken(report)) == [("gather_0", "gather_1"), ("gather_2", "gather_3")]
    assert len(starts(after)) == 2


def test_an_exposed_and_a_hidden_one_become_one() -> None:
    b = Builder()
    x, y, z = b.placeholders("x y z")
    hidden = b.gather("hidden", x)
    free = b.mm("free", z, z)
    one = b.wait("one", hidden)
    two = b.wait("two", b.gather("exposed", y))
    gm = b.done(free, b.mm("last", b.add("sum", one, two), z))
    after, report, _ = passed(gm, by_size({"free": 2, "last": 1}, latency=1, seconds=1))
    assert (report.seconds_before, report.seconds) == pytest.approx((5, 4))
    assert len(starts(after)) == 1
    assert taken(report) == [("hidden", "exposed")]


def test_gathers_of_several_dtypes_become_one() -> None:
    b = Builder()
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.int64]
    xs = [b.placeholder(f"x{i}", (4, 8), dtype) for i, dtype in enumerate(dtypes)]
    made = [b.wait(f"w_{i}", b.gather(f"gather_{i}", x)) for i, x in enumerate(xs)]
    after, report, _ = passed(b.done(*made), by_size({}, latency=10, seconds=0.01))
    assert len(starts(after)) == 1
    # Packed as bytes: no more than what the five hand in, 32 elements each.
    assert sum(row.bytes for row in report.collectives) == 32 * (4 + 2 + 4 + 2 + 8)


@pytest.mark.parametrize("kind", ["reduce_scatter_tensor", "all_reduce"])
def test_sums_of_several_dtypes_stay_apart(kind: str) -> None:
    """To add bfloat16 as float32 would change bits; those of one dtype still join."""
    b = Builder()
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    xs = [b.placeholder(f"x{i}", (4, 8), dtype) for i, dtype in enumerate(dtypes)]
    made = [b.wait(f"w_{i}", b.start(f"start_{i}", kind, x)) for i, x in enumerate(xs)]
    after, report, _ = passed(b.done(*made), by_size({}, latency=10, seconds=0.01))
    assert sorted(taken(report)) == [("start_0", "start_2"), ("start_1", "start_3")]
    assert {n.meta["val"].dtype for n in starts(after)} == {torch.float32, torch.bfloat16}


@pytest.mark.parametrize(("latency", "seconds", "work", "num_gathers"), [(0.1, 1, 1.1, 2), (5, 0.01, 0.1, 1)])
def test_a_reduce_scatter_between_two_gathers_blocks_their_merge(
    latency: float, seconds: float, work: float, num_gathers: int
) -> None:
    """gather, scatter and gather each hide under a matmul that needs the one before, where bytes count, not latency."""
    b = Builder()
    x, y, z = b.placeholders("x y z")
    one = b.gather("gather", x)
    first = b.mm("first", z, z)
    scatter = b.scatter("scatter", first)
    second = b.mm("second", b.wait("full", one), z)
    shard = b.wait("shard", scatter)
    two = b.gather("gather_1", y)
    third = b.mm("third", shard, z)
    gm = b.done(second, third, b.mm("last", b.wait("full_1", two), z))
    table = dict.fromkeys(["first", "second", "third", "last"], work)
    after, report, _ = passed(gm, by_size(table, latency, seconds))
    assert len([n for n in starts(after) if "gather" in str(n.target)]) == num_gathers
    assert len(starts(after)) == num_gathers + 1
    if num_gathers == 2:
        assert (report.seconds, report.exposed_seconds) == pytest.approx((4 * work, 0))


def test_unlike_collectives_never_become_one() -> None:
    b = Builder()
    xs = b.placeholders("x0 x1 x2 x3 x4 x5 x6")
    made = [
        b.reduce("sum_a", xs[0]),
        b.scatter("scatter_a", xs[1]),
        b.reduce("sum_b", xs[2], "b"),
        b.reduce("max_a", xs[3], "a", "max"),
        b.gather("gather_a", xs[4]),
        b.scatter("avg_a", xs[5], "a", "avg"),
        b.start("exchange_a", "all_to_all_single", xs[6]),
    ]
    gm = b.done(*[b.wait(f"w_{i}", node) for i, node in enumerate(made)])
    after, report, _ = passed(gm, by_size({}, latency=1000, seconds=0.001))
    assert sorted(n.name for n in starts(after)) == sorted(n.name for n in made)
    assert taken(report) == []


def coalesced() -> tuple[Builder, fx.GraphModule]:
    b = Builder()
    x, y, z = b.placeholders("x y z")
    shards = b.scatter("scatter", [x, y])
    done = [b.wait(f"shard_{i}", b.item(f"item_{i}", shards, i)) for i in range(2)]
    full = b.gather("gather", [x, y])
    done += [b.wait(f"full_{i}", b.item(f"piece_{i}", full, i)) for i in range(2)]
    done += [b.wait("total", b.item("part", b.reduce("reduce", [z]), 0))]
    return b, b.done(*done, b.mm("free", z, z))


def test_coalesced_collectives_pass_through_and_are_hidden() -> None:
    _, gm = coalesced()
    after, report, at = passed(gm, by_name({"scatter": 1, "gather": 1, "reduce": 1, "free": 4}))
    assert sorted(n.name for n in starts(after)) == ["gather", "reduce", "scatter"]
    assert {n.target for n in starts(after)} == {
        C10D.reduce_scatter_tensor_coalesced.default,
        C10D.all_gather_into_tensor_coalesced.default,
        C10D.all_reduce_coalesced.default,
    }
    assert len(after.graph.find_nodes(op="call_function", target=WAIT)) == 5
    assert (report.seconds_before, report.seconds, report.exposed_seconds) == (7, 4, 0)
    assert at["scatter"] < at["free"]


def test_no_circle_from_fused_regions() -> None:
    """A chain of pointwise ops that hangs on the first two gathers and feeds the last two, beside one that does not."""
    b = Builder()
    x, y, z = b.placeholders("x y z")
    w = [
        b.wait(f"w_{i}", b.gather(f"gather_{i}", b.call(f"low_{i}", CONVERT, t, torch.bfloat16)))
        for i, t in enumerate((x, y))
    ]
    chain = z
    for i in range(4):
        chain = b.add(f"chain_{i}", chain, i)
    late = b.relu("late_1", b.add("late_0", w[0], w[1]))
    last = [b.wait(f"w_{i}", b.gather(f"gather_{i}", t)) for i, t in ((2, late), (3, b.relu("late_2", late)))]
    gm = b.done(chain, *last)
    table = {f"chain_{i}": 1.0 for i in range(4)}
    after, report, _ = passed(gm, by_size(table, latency=10, seconds=0))
    assert sorted(map(set, taken(report)), key=sorted) == [{"gather_0", "gather_1"}, {"gather_2", "gather_3"}]
    assert len(starts(after)) == 2
    assert report.seconds == pytest.approx(20)


# ---- what must not change ---------------------------------------------------------------------------------------


def test_a_generator_that_is_passed_around_keeps_the_order_of_its_users() -> None:
    from torch._prims.rng_prims import graphsafe_run_with_rng_state

    b = Builder()
    x, y = b.placeholders("x y")
    generator = b.graph.placeholder("generator")
    generator.meta["val"] = torch.Generator()
    drawn = []
    for name, operand in (("late", x), ("early", y)):
        args = (ATEN.rand_like.default, operand)
        node = b.graph.create_node(
            "call_function", graphsafe_run_with_rng_state, args, {"rng_state": generator}, name=name
        )
        node.meta["val"] = b.value(ATEN.rand_like.default, (operand,), {})
        drawn.append(node)
    total = b.wait("total", b.reduce("reduce", drawn[1]))
    gm = b.done(b.add("sum", total, drawn[0]), b.mm("free", x, x))
    after, report = overlap(gm, cost=by_name({"late": 1, "early": 1, "reduce": 2, "free": 2}), groups=groups_of(0))
    at = position(after)
    assert at["late"] < at["early"] < at["reduce"] < at["free"] < at["total"]
    assert (report.seconds, report.exposed_seconds) == (4, 0)


def test_collectives_that_write_into_buffers() -> None:
    """In place and into a buffer of the caller's, as other passes leave them: hidden, and read only after the wait."""
    b = Builder()
    x, y = b.placeholders("x y")
    buffer = b.call("buffer", ATEN.empty.memory_format, [16, 8])
    gather = b.call("gather", C10D.all_gather_into_tensor_out.default, x, 2, "a", out=buffer)
    full = b.wait("full", gather)
    own = b.relu("own", x)
    total = b.wait("total", b.call("reduce", C10D.all_reduce_.default, own, "sum", "b"))
    gm = b.done(b.add("one", full, 1), b.add("two", buffer, 1), b.add("three", total, 1), b.mm("free", y, y))
    after, report, at = passed(gm, by_name({"gather": 1, "reduce": 1, "free": 2}))
    assert (report.seconds_before, report.seconds) == (4, 2)
    assert at["full"] < min(at["one"], at["two"])
    assert report.peak_bytes == peak(after)


def test_operands_by_keyword() -> None:
    b = Builder()
    x, y = b.placeholders("x y")
    named = b.call("named", C10D.all_reduce.default, input=x, reduce_op="sum", group_name="a")
    gm = b.done(b.wait("total", named), b.wait("total_1", b.reduce("plain", y)), b.mm("free", y, y))
    after, report = overlap(gm, cost=by_name({"named": 1, "plain": 1, "free": 2}), groups=groups_of(0))
    at = position(after)
    assert max(at["named"], at["plain"]) < at["free"] < min(at["total"], at["total_1"])
    assert [(row.name, row.group, row.bytes) for row in report.collectives] == [
        ("named", "a", 256),
        ("plain", "a", 256),
    ]
    assert (report.seconds_before, report.seconds) == (4, 2)


def test_sizes_that_are_symbols() -> None:
    """A graph traced for any number of rows runs on other numbers of rows than those of the example."""

    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        wait, gather = C10D.wait_tensor.default, C10D.all_gather_into_tensor.default
        made = [gather(t, 2, "a") for t in (x, y)]
        made += [C10D.all_reduce.default(t, "sum", "b") for t in (x, y)]
        made += [C10D.reduce_scatter_tensor.default(t, "sum", 2, "a") for t in (x, y)]
        return [*map(wait, made), y @ y]

    gm = make_fx(step, tracing_mode="symbolic")(torch.zeros(8, 6), torch.zeros(6, 6))
    gm.graph.eliminate_dead_code()

    def cost(node: fx.Node, num_bytes: int) -> float:
        return 10 + num_bytes / 256 if node.target in STARTS else 1.0

    after, report = overlap(gm, cost=cost, groups=groups_of(0))
    after.graph.lint()
    assert report.seconds <= report.seconds_before
    for rows in (8, 16):
        inputs = [[torch.randint(-3, 4, (n, 6)).float() for n in (rows, 6)] for _ in range(4)]
        assert_same_results(run(gm, inputs, has_meta=False), run(after, inputs, has_meta=False))


# ---- choice, memory, report -------------------------------------------------------------------------------------


def prefetchable(layers: int = 4, rows: int = 64) -> fx.GraphModule:
    """Weights gathered one by one, each before the matmul that needs it."""
    b = Builder()
    value = b.placeholder("x", (8, 2 * rows))
    weights = [b.placeholder(f"weight_{i}", (rows, 2 * rows)) for i in range(layers)]
    for i, weight in enumerate(weights):
        full = b.wait(f"full_{i}", b.gather(f"gather_{i}", weight))
        value = b.mm(f"mm_{i}", value, full)
    return b.done(value)


def layer_cost(mm: float = 1.0, gather: float = 1.0, layers: int = 4) -> Cost:
    return by_name({f"mm_{i}": mm for i in range(layers)} | {f"gather_{i}": gather for i in range(layers)})


def test_the_cap_is_kept_and_costs_what_it_must() -> None:
    """Without room for two gathered weights nothing can be fetched ahead; with it, all but the first hides."""
    gm = prefetchable()
    before, full = peak(gm), 128 * 128 * 4
    for extra, seconds in ((0, 8), (full, 5), (None, 5)):
        cap = None if extra is None else before + extra
        after, report, _ = passed(gm, layer_cost(), memory_cap_bytes=cap, options=PLAIN)
        assert report.seconds == pytest.approx(seconds)
        assert report.peak_before == before
        assert report.peak_bytes == peak(after) <= report.cap_bytes
        assert report.cap_bytes == (before + 512 * 2**20 if cap is None else cap)


def test_a_cap_makes_worse_peaks_better() -> None:
    """The input order gathers everything first; the cap asks for less than that, and the order that fits is found."""
    b = Builder()
    value = b.placeholder("x", (8, 128))
    weights = [b.placeholder(f"weight_{i}", (64, 128)) for i in range(4)]
    full = [b.wait(f"full_{i}", b.gather(f"gather_{i}", w)) for i, w in enumerate(weights)]
    for i in range(4):
        value = b.mm(f"mm_{i}", value, full[i])
    gm = b.done(value)
    size = 128 * 128 * 4
    cap = peak(gm) - size - size // 2
    after, report, _ = passed(gm, layer_cost(), memory_cap_bytes=cap, options=PLAIN)
    assert peak(after) <= cap
    # Within the cap two gathered weights may live at once, so the input order's seconds (1 + 4) can be had.
    assert report.seconds == pytest.approx(5)


@pytest.mark.parametrize("choose", ["regret", "nominal"])
def test_the_chosen_candidate_is_what_is_returned(choose: str) -> None:
    _, report, _ = passed(prefetchable(), layer_cost(), options=OverlapOptions(choose=choose, bucket=False))
    (chosen,) = [c for c in report.candidates if c.is_chosen]
    assert chosen.seconds[0][1] == pytest.approx(report.seconds)
    assert chosen.peak_bytes == report.peak_bytes
    feasible = [c for c in report.candidates if c.peak_bytes <= report.cap_bytes]
    if choose == "nominal":
        assert chosen.seconds[0][1] == min(c.seconds[0][1] for c in feasible)
    assert len({len(c.seconds) for c in report.candidates}) == 1


def test_a_factor_scales_communication() -> None:
    _, report = overlap(
        gm := prefetchable(),
        cost=layer_cost(),
        groups=groups_of(0),
        options=OverlapOptions(bucket=False, communication_factor=3),
    )
    assert report.seconds_before == pytest.approx(play(gm, layer_cost(gather=3))[0])
    assert report.seconds == pytest.approx(3 * 4 + 1)


def test_the_report_says_what_is_exposed() -> None:
    after, report, _ = passed(prefetchable(), layer_cost(mm=2.0, gather=1.5), options=PLAIN)
    assert [row.name for row in report.collectives] == [n.name for n in starts(after)]
    assert report.exposed_seconds == pytest.approx(sum(row.exposed_seconds for row in report.collectives))
    for row in report.collectives:
        assert row.group == "a"
        assert row.bytes == 64 * 128 * 4
        assert row.seconds == pytest.approx(1.5)
        assert bool(row.reason) or row.exposed_seconds == 0
    text = str(report)
    assert all(row.name in text for row in report.collectives if row.exposed_seconds)


def test_a_profile_prices_a_graph() -> None:
    """Figures of a machine in place of a callable: the eight ranks of one node and the eight of eight nodes differ."""
    b = Builder()
    x = b.placeholder("x", (1024, 1024), torch.bfloat16)
    gm = b.done(b.mm("mm", x, x), b.wait("near_full", b.gather("near", x)), b.wait("far_full", b.gather("far", x, "b")))
    groups = {"a": (0, 1), "b": (0, 8)}
    _, report = overlap(gm, cost=mw.load_profile("h100"), groups=groups)
    near, far = (next(row for row in report.collectives if row.name == name) for name in ("near", "far"))
    assert 0 < near.seconds < far.seconds
    assert near.bytes == far.bytes == 2 * 1024 * 1024


# ---- the same on every rank -------------------------------------------------------------------------------------


def test_the_figures_to_agree_on_know_no_group_by_name_and_those_agreed_on_are_used() -> None:
    gm = prefetchable()
    other = renamed(gm, {"a": "row 7"})
    told: list[CostNumbers] = []

    def listen(figures: CostNumbers) -> CostNumbers:
        told.append(figures)
        return told[0]

    _, first = overlap(gm, cost=layer_cost(), groups={"a": (0, 1)}, options=PLAIN, agree=listen)
    # This rank measured other seconds; what is decided, and said, is with those of the first.
    after, second = overlap(other, cost=layer_cost(mm=0.3), groups={"row 7": (2, 3)}, options=PLAIN, agree=listen)
    assert told[0].fingerprint == told[1].fingerprint
    assert told[0].numbers != told[1].numbers
    assert len(told[0].numbers) == len(told[1].numbers)
    assert second.seconds == first.seconds == pytest.approx(5)
    alone, _ = overlap(gm, cost=layer_cost(), groups={"a": (0, 1)}, options=PLAIN)
    assert [n.name for n in after.graph.nodes] == [n.name for n in alone.graph.nodes]


def test_another_graph_has_another_fingerprint() -> None:
    told: list[str] = []

    def listen(figures: CostNumbers) -> CostNumbers:
        told.append(figures.fingerprint)
        return figures

    shapes: Sequence[fx.GraphModule] = (
        prefetchable(3),
        prefetchable(4),
        coalesced()[1],
        two_reductions(False),
        two_reductions(True),
    )
    for gm in shapes:
        overlap(gm, cost=by_name({}, 1.0), groups=groups_of(0), agree=listen)
    assert len(set(told)) == len(shapes)
