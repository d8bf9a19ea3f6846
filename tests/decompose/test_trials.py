"""The search for what to decompose, judged by a table of seconds; and candidates written from an unchanged graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from tests.overlap.graphs import Builder, assert_same_results, random_inputs, run
from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import functional
from meshweave.optimize.decompose import graphs
from meshweave.optimize.decompose.algorithms import DecomposeOptions
from meshweave.optimize.decompose.graphs import RingCandidate, RingSearch, RingWriter
from meshweave.optimize.decompose.rewriter import first
from meshweave.optimize.overlap.prices import CostNumbers
from meshweave.optimize.overlap.report import CollectiveRow, OverlapReport

GROUPS = {"a": (0, 1)}
OPTIONS = DecomposeOptions(all_gather=("direct", "pipelined"), reduce_scatter=("ring",), num_chunks=(2,))
PAIRS = {"a": ((0, 1),)}


def twins() -> fx.GraphModule:
    """Two gathers of one shape before products, a third of another shape, and a gather without a product."""
    b = Builder(PAIRS)
    w, v = b.placeholder("w", (4, 4)), b.placeholder("v", (8, 4))
    outputs = []
    for name, (rows, columns) in {"g0": (4, 4), "g1": (4, 4), "h": (6, 8)}.items():
        full = b.wait(f"full_{name}", b.gather(name, b.placeholder(f"x_{name}", (rows, columns))))
        outputs.append(b.mm(f"product_{name}", full, w if columns == 4 else v))
    return b.done(*outputs, b.wait("full_lone", b.gather("lone", w)))


def placed(b: fx.GraphModule) -> fx.GraphModule:
    """The same with placeholders first, as graphs have them."""
    for node in reversed(b.graph.find_nodes(op="placeholder", sort=True)):
        next(iter(b.graph.nodes)).prepend(node)
    return b


class Table:
    """Seconds of a graph by how each gather is done: as it is, in parts, or by messages."""

    def __init__(self, seconds: Mapping[str, Mapping[str, float]], exposed: Mapping[str, float]) -> None:
        self.seconds, self.exposed, self.asked = seconds, exposed, list[dict[str, str]]()

    def __call__(self, gm: fx.GraphModule) -> OverlapReport:
        ways = {name: way_of(gm, name) for name in ("g0", "g1", "h")}
        self.asked.append(ways)
        total = 100.0 + sum(self.seconds.get(name, {}).get(way, 0.0) for name, way in ways.items())
        rows = [
            CollectiveRow(name=name, op="all_gather", group="a", bytes=0.0, seconds=1.0, exposed_seconds=s, reason="")
            for name, s in self.exposed.items()
        ]
        return OverlapReport(
            seconds_before=total,
            seconds=total,
            exposed_before=0.0,
            exposed_seconds=0.0,
            bound_seconds=0.0,
            peak_before=0,
            peak_bytes=0,
            cap_bytes=0,
            regret=0.0,
            collectives=rows,
        )


def way_of(gm: fx.GraphModule, name: str) -> str:
    """ "whole": the gather is there; "parts": two gathers of parts of its operand; else messages."""
    gathers = gm.graph.find_nodes(op="call_function", target=functional.all_gather_into_tensor.default)
    if any(node.name == name for node in gathers):
        return "whole"
    source = next(n for n in gm.graph.nodes if n.name == f"x_{name}")
    behind, waiting = set[fx.Node](), [source]
    while waiting:
        node = waiting.pop()
        behind.add(node)
        waiting += [user for user in node.users if user not in behind]
    return "parts" if behind & set(gathers) else "messages"


def search(table: Table, options: DecomposeOptions = OPTIONS) -> RingSearch:
    return RingSearch(RingWriter(placed(twins()), GROUPS, 0, options), table)


def ways_in(gm: fx.GraphModule) -> list[str]:
    return [way_of(gm, name) for name in ("g0", "g1", "h")]


def chosen(table: Table) -> tuple[RingSearch, RingCandidate, list[str]]:
    """The search after it has run, its result, which has the values of the graph, and the ways of that."""
    its = search(table)
    result = its.run()
    assert_same_on_both(its.writer, result)
    return its, result, ways_in(result.module)


def assert_same_on_both(writer: RingWriter, candidate: RingCandidate) -> None:
    """Each rank has a graph of its own; the other one writes its by the same decisions."""
    other = replace(writer, rank=1)
    start = other.written(lambda start, choices: (0, "left"))
    theirs = other.agreed(start, lambda own: replace(own, numbers=tuple(map(float, candidate.decisions))))
    inputs = random_inputs(writer.gm, num_ranks=2)
    assert_same_results(run(writer.gm, inputs, PAIRS), run([candidate.module, theirs.module], inputs, PAIRS))


EXPOSED = {"g0": 1.0, "g1": 1.0, "h": 5.0}
FASTER = {
    "messages for both twins": ({"g0": {"messages": -2.0, "parts": -1.0}}, ["messages", "messages", "whole"]),
    "parts": ({"g0": {"messages": -1.0, "parts": -2.0}}, ["parts", "parts", "whole"]),
    "the other class": ({"h": {"messages": -3.0}}, ["whole", "whole", "messages"]),
    "both": ({"h": {"messages": -3.0}, "g1": {"parts": -3.0}}, ["parts", "parts", "messages"]),
    "slower": ({"h": {"messages": 3.0, "parts": 3.0}, "g1": {"messages": 3.0, "parts": 3.0}}, ["whole"] * 3),
    "hardly faster": ({"h": {"messages": -0.09}}, ["whole"] * 3),
}


@pytest.mark.parametrize("name", FASTER)
def test_the_fastest_way_of_each_class_is_taken_if_it_gains(name: str) -> None:
    seconds, expected = FASTER[name]
    *_, ways = chosen(Table(seconds, EXPOSED))
    assert ways == expected


def test_classes_are_tried_by_exposed_seconds_on_top_of_what_is_taken() -> None:
    table = Table({"h": {"messages": -3.0}}, EXPOSED)
    chosen(table)
    whole, mine, theirs = ({"g0": way, "g1": way} for way in ("whole", "messages", "parts"))
    assert table.asked == [
        {**whole, "h": "whole"}, {**whole, "h": "messages"}, {**whole, "h": "parts"},
        {**mine, "h": "messages"}, {**theirs, "h": "messages"},
    ]  # fmt: skip


def test_what_other_work_hides_is_not_tried() -> None:
    table = Table({"h": {"messages": -3.0}}, {"g0": 1.0, "h": 0.09})
    _, result, ways = chosen(table)
    assert ways == ["whole"] * 3
    assert len(table.asked) == 3
    reasons = {row.name: row.reason for row in result.report.rows}
    assert reasons["h"] == "other work hides it in the best order of the graph"
    assert reasons["g0"] == reasons["g1"] == "the graph would take 100000000.0 us, and 100000000.0 us unchanged"
    assert reasons["lone"] == "no matmul is beside it"


def test_the_seconds_of_merged_collectives_are_shared() -> None:
    its = search(Table({}, {"g0+h": 4.0, "g1": 1.0}))
    its.enrol(its.judge(its.writer.gm))
    assert [twins.exposed for twins in its.twins.values()] == [3.0, 2.0]
    assert its.of["g0"] is its.of["g1"] is not its.of["h"]


def test_a_candidate_that_cannot_be_judged_is_left() -> None:
    table = Table({}, EXPOSED)

    def judge(gm: fx.GraphModule) -> OverlapReport:
        if way_of(gm, "h") != "whole":
            raise MeshweaveError("no price", where="node permute")
        return table(gm)

    its = RingSearch(search(table).writer, judge)
    assert way_of(its.run().module, "h") == "whole"
    assert its.twins[next(key for key in its.twins if its.twins[key] is its.of["h"])].reason == (
        "a candidate cannot be judged: no price, node permute"
    )


def test_so_many_candidates_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST_TRIALS", 1)
    its, _, ways = chosen(Table({"g0": {"messages": -9.0}}, EXPOSED))
    assert (its.num_trials, ways) == (1, ["whole"] * 3)
    assert its.of["g0"].reason == "not tried, because 1 other candidates were"


@pytest.mark.parametrize("others", [(0, 0, 0), (-1, -1, -1), (-1, 1, 0)])
def test_all_ranks_use_the_decisions_that_they_agree_on(others: Sequence[int]) -> None:
    its = search(Table({}, EXPOSED))
    mine = its.writer.written(first)
    assert mine.decisions == (0, 0, 0)

    def agree(own: CostNumbers) -> CostNumbers:
        assert own.numbers == (0.0, 0.0, 0.0)
        return replace(own, numbers=tuple(map(float, others)))

    used = its.writer.agreed(mine, agree)
    assert used.decisions == tuple(others)
    assert (used is mine) == (others == (0, 0, 0))
    assert ways_in(used.module) == [{0: "messages", 1: "parts", -1: "whole"}[at] for at in others]
    assert its.writer.agreed(mine, None) is mine


def test_candidates_are_written_from_a_graph_that_stays() -> None:
    gm = placed(twins())
    text = str(gm.graph)
    writer = RingWriter(gm, GROUPS, 0, OPTIONS)
    taken, left = writer.written(first), writer.written(lambda start, choices: (0, "left"))
    assert str(gm.graph) == text
    assert (taken.report.num_taken, left.report.num_taken) == (3, 0)
    assert str(left.module.graph) == text
    assert left.module is not gm
    assert_same_on_both(writer, taken)
