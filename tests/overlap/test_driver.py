"""Device programs in order: what the steps before and after the decision promise, each by itself."""

from __future__ import annotations

import gc
import importlib
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from tests.overlap.graphs import ATEN, C10D, Builder, assert_same_values, by_name, groups_of, peak
from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.ir.device_program import DeviceProgram, graph_program
from meshweave.ir.graph import copied_graph
from meshweave.optimize.overlap.decide import OverlapOptions
from meshweave.optimize.overlap.driver import order_program, without_collector
from meshweave.optimize.overlap.prices import costs_of
from meshweave.optimize.overlap.report import OverlapReport

SECONDS = by_name({"gather": 2.0, "free": 2.0, "uses": 1.0})
PLAIN = OverlapOptions(bucket=False)


def hidden() -> fx.GraphModule:
    """A gather that a matmul could hide, and that is waited for first."""
    b = Builder()
    x, y = b.placeholders("x y")
    full = b.wait("full", b.gather("gather", x))
    uses = b.mm("uses", full, y)
    return b.done(uses, b.mm("free", y, y))


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    return fx.GraphModule({}, copied_graph(gm.graph))


def ordered(
    gm: fx.GraphModule,
    options: OverlapOptions | None = PLAIN,
    changed: Callable[[DeviceProgram], DeviceProgram] = lambda program: program,
    cost: object = SECONDS,
    cap: int | None = None,
) -> tuple[fx.GraphModule, OverlapReport]:
    """A copy of the graph, ordered."""
    after = copy_of(gm)
    report = order_program(changed(graph_program(after.graph, groups_of(0))), costs_of(cost), cap, options)  # type: ignore[arg-type]
    return after, report


def test_errors_of_an_order_have_its_number_and_the_name() -> None:
    good = ("gather", "free", "uses")
    with pytest.raises(MeshweaveError, match="order 1 has a name that is not in the graph") as error:
        ordered(hidden(), replace(PLAIN, orders=(good, ("gather", "nothing"))))
    assert error.value.got == "nothing"
    with pytest.raises(MeshweaveError, match="order 0 is not an order of the graph") as error:
        ordered(hidden(), replace(PLAIN, orders=(("uses", "free"), good)))
    assert error.value.got == "the wait for gather comes before its start"


def test_a_wait_of_an_order_stands_where_it_was_put() -> None:
    """Without its waits an order has them as late as possible: here the gather is waited for before the matmul."""
    early, late = ("gather", "full", "free", "uses"), ("gather", "free", "uses")
    _, report = ordered(hidden(), replace(PLAIN, orders=(early, late)))
    seconds = {row.name: row.seconds[0][1] for row in report.candidates}
    assert (seconds["order 0 handed in"], seconds["order 1 handed in"]) == (5.0, 3.0)


def test_groups_that_the_caller_names_must_be_known() -> None:
    """With seconds of the caller's own no group is needed: only where groups are checked is an unknown group an
    error."""

    def unknown(start: fx.Node) -> object:
        raise MeshweaveError(f"no group for {start.name}")

    def checked(is_checked: bool) -> Callable[[DeviceProgram], DeviceProgram]:
        return lambda program: replace(program, group_of=unknown, checks_groups=is_checked)

    with pytest.raises(MeshweaveError, match="no group for gather"):
        ordered(hidden(), changed=checked(True))
    assert ordered(hidden(), changed=checked(False))[1].seconds == 3.0


def two_gathers() -> fx.GraphModule:
    b = Builder()
    x, y = b.placeholders("x y")
    starts = [b.gather(f"gather_{v.name}", v) for v in (x, y)]
    return b.done(*(b.wait(f"full_{start.name}", start) for start in starts))


@pytest.mark.parametrize(("uneven", "num_starts"), [("", 1), ("x", 2), ("xy", 2)])
def test_only_operands_of_equal_shape_on_every_device_are_merged(uneven: str, num_starts: int) -> None:
    def changed(program: DeviceProgram) -> DeviceProgram:
        nodes = [n for n in program.graph.nodes if n.name in tuple(uneven)]
        return replace(program, uneven={n: frozenset({0}) for n in nodes})

    after, report = ordered(two_gathers(), OverlapOptions(), changed, cost=lambda node, num_bytes=0: 1.0)
    assert len([n for n in after.graph.nodes if "all_gather" in str(n.target)]) == num_starts
    assert [m.names for m in report.merges if m.is_taken] == [("gather_x", "gather_y")] * (num_starts == 1)
    assert_same_values(two_gathers(), after)


def test_a_whole_program_keeps_under_the_capacity_of_the_machine() -> None:
    """Without a cap an order may take a little more than the input order, but no more than the machine has."""
    costs = replace(costs_of(SECONDS), capacity=peak(hidden()) + 1)  # type: ignore[type-var]
    for is_whole, more in ((False, 512 << 20), (True, 1)):
        program = replace(graph_program(copy_of(hidden()).graph, groups_of(0)), is_whole=is_whole)
        assert order_program(program, costs, None, PLAIN).cap_bytes == peak(hidden()) + more


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_pauses_and_is_as_before(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with suppress(KeyError), without_collector():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == is_enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def messages(seed: int, rank: int) -> fx.GraphModule:
    """Collectives of two groups, messages in one of them, and exchanges by another library's op, at random. Where an
    even rank sends, an odd one receives."""
    rng, b = random.Random(seed), Builder()
    other = ATEN.relu.default  # stands for an op that starts a communication; waited for like a collective
    values = [*b.placeholders("x y")]
    for k in range(16):
        x, kind = rng.choice(values), rng.choice(["matmul", "matmul", "collective", "message", "exchange"])
        group = rng.choice("ab")
        if kind == "matmul":
            values.append(b.mm(f"matmul_{k}", x, rng.choice(values)))
            continue
        if kind == "collective":
            start = b.reduce(f"collective_{group}_{k}", x, group)
        elif kind == "exchange":
            start = b.call(f"exchange_{k}", other, x)
        else:
            op = C10D.isend.default if rank % 2 == 0 else C10D.irecv.default
            start = b.graph.create_node("call_function", op, (x, 1, 0, "a"), name=f"message_a_{k}")
            start.meta["val"] = b.value(ATEN.clone.default, (x,), {})
        values.append(b.wait(None, start))
    return b.done(*values[2:])


def channel_of(name: str) -> str:
    """The queue of a start, by its name; "" for other nodes."""
    return "library" if name.startswith("exchange") else name.split("_")[1] if name.count("_") == 2 else ""


@pytest.mark.skipif(not hasattr(C10D, "isend"), reason="this torch has no functional point to point")
def test_messages_and_ops_of_other_libraries_never_pass_each_other() -> None:
    """Random graphs: on each channel a message, or an exchange, stands after the same starts as before. Both ends of a
    message begin it after the same communications, so no two wait for each other."""
    num_moved = 0
    for seed in range(10, 18):
        rng = random.Random(1000 + seed)
        table = {f"{kind}_{k}": rng.choice([0.5, 1.0, 3.0]) for k in range(16) for kind in ("matmul", "exchange")}
        table |= {f"{kind}_{k}": rng.choice([0.5, 2.0]) for k in range(16)
                  for kind in ("collective_a", "collective_b", "message_a")}  # fmt: skip
        queues = []
        for rank in (0, 1):
            gm = messages(seed, rank)
            after, report = ordered(
                gm,
                changed=lambda program: replace(
                    program,
                    queues={n: "library" for n in program.graph.nodes if n.name.startswith("exchange")},
                    checks_groups=False,
                ),
                cost=by_name(table),
            )
            before, names = ([n.name for n in graph.nodes if channel_of(n.name)] for graph in (gm.graph, after.graph))
            for fixed in (n for n in names if n.startswith(("message", "exchange"))):
                earlier = [{n for n in order[: order.index(fixed)] if channel_of(n) == channel_of(fixed)}
                           for order in (before, names)]  # fmt: skip
                assert earlier[0] == earlier[1], (seed, fixed)
            assert report.seconds <= report.seconds_before
            num_moved += names != before
            queues.append(names)
        assert queues[0] == queues[1]
    assert num_moved > 6


def test_no_slower_than_blocks_by_hand() -> None:
    """Backward of four blocks under FSDP: by hand, the gathers of a block start when the block before begins, and its
    reductions when its last gradient is there. Handed in, that order bounds the result; the search hides more."""
    b, by_hand, outputs = Builder(), list[str](), list[fx.Node]()
    y, *shards = b.placeholders("y up_0 down_0 up_1 down_1 up_2 down_2 up_3 down_3")
    layers = [("down", "up")] * 4
    for k, names in enumerate(layers):
        for i, name in enumerate(names):
            full = b.wait(None, b.gather(f"gather_{name}_{k}", shards[2 * k + i]))
            gradient = b.mm(f"weight_{name}_{k}", full, y)
            y = b.mm(f"input_{name}_{k}", b.call(None, ATEN.slice.Tensor, full, 0, 0, 8), y)
            outputs.append(b.wait(None, b.scatter(f"reduce_{name}_{k}", gradient)))
    gm = b.done(y, *outputs)
    gathers = [[f"gather_{name}_{k}" for name in names] for k, names in enumerate(layers)]
    for k, names in enumerate(layers):
        by_hand += [*(gathers[0] if not k else ()), *(gathers[k + 1] if k + 1 < len(layers) else ())]
        by_hand += [f"{kind}_{name}_{k}" for name in names for kind in ("weight", "input")]
        by_hand += [f"reduce_{name}_{k}" for name in names]
    seconds = {"gather": 1.0, "reduce": 1.5, "weight": 1.0, "input": 1.0}
    table = {n.name: seconds[n.name.split("_")[0]] for n in gm.graph.nodes if n.name.split("_")[0] in seconds}
    _, report = ordered(gm, replace(PLAIN, orders=(tuple(by_hand),)), cost=by_name(table))
    hand = next(dict(row.seconds)["as said"] for row in report.candidates if row.name == "order 0 handed in")
    assert report.seconds < hand < report.seconds_before


@pytest.mark.slow
def test_llama_is_no_slower_than_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2] / "benchmarks")])
    rows = importlib.import_module("overlap_hand").rows(1)
    assert len(rows) == 4
    for name, _, _, hand, merged, ours, _ in rows:
        assert float(ours) <= min(float(hand), float(merged)), name
