"""What is decomposed in any graph: what is exposed; and candidates written from an unchanged graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.overlap.graphs import Builder, assert_same_results, random_inputs, run
from torch import fx

import meshweave as mw
from meshweave.ir.collectives import functional
from meshweave.optimize.decompose.algorithms import DecomposeOptions
from meshweave.optimize.decompose.graphs import RingCandidate, RingWriter, gaining
from meshweave.optimize.decompose.rewriter import first
from meshweave.optimize.overlap.prices import CostNumbers

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


def writer(options: DecomposeOptions = OPTIONS) -> RingWriter:
    return RingWriter(placed(twins()), GROUPS, 0, options)


def ways_in(gm: fx.GraphModule) -> list[str]:
    return [way_of(gm, name) for name in ("g0", "g1", "h")]


def assert_same_on_both(writer: RingWriter, candidate: RingCandidate) -> None:
    """Each rank has a graph of its own; the other one writes its by the same decisions."""
    other = replace(writer, rank=1)
    start = other.written(lambda start, choices: (0, "left"))
    theirs = other.agreed(start, lambda own: replace(own, numbers=tuple(map(float, candidate.decisions))))
    inputs = random_inputs(writer.gm, num_ranks=2)
    assert_same_results(run(writer.gm, inputs, PAIRS), run([candidate.module, theirs.module], inputs, PAIRS))


@pytest.mark.parametrize(
    ("exposed", "expected"),
    [
        ({"g0": 0.06, "g1": 0.06}, ["messages", "messages", "whole"]),  # of one class, which counts together
        ({"h": 5.0}, ["whole", "whole", "messages"]),
        ({"g0": 0.05, "h": 0.09}, ["whole"] * 3),
    ],
)
def test_what_other_work_hides_is_left_alone(exposed: dict[str, float], expected: list[str]) -> None:
    its = writer()
    report = mw.overlap(its.gm, cost=lambda node: 1.0, groups=GROUPS, options=mw.OverlapOptions(bucket=False))[1]
    rows = tuple(replace(row, exposed_seconds=exposed.get(row.name, 0.0)) for row in report.collectives)
    result = its.written(gaining(its.gm, replace(report, seconds=100.0, collectives=rows), 0.0))
    assert ways_in(result.module) == expected
    assert_same_on_both(its, result)
    reasons = {row.name: row.reason for row in result.report.rows}
    hidden = [name for name, way in zip(("g0", "g1", "h"), expected, strict=True) if way == "whole"]
    assert all(reasons[name] == "other work hides it in the best order of the graph" for name in hidden)
    assert reasons["lone"] == "no matmul is beside it"


@pytest.mark.parametrize("others", [(0, 0, 0), (-1, -1, -1), (-1, 1, 0)])
def test_all_ranks_use_the_decisions_that_they_agree_on(others: Sequence[int]) -> None:
    its = writer()
    mine = its.written(first)
    assert mine.decisions == (0, 0, 0)

    def agree(own: CostNumbers) -> CostNumbers:
        assert own.numbers == (0.0, 0.0, 0.0)
        return replace(own, numbers=tuple(map(float, others)))

    used = its.agreed(mine, agree)
    assert used.decisions == tuple(others)
    assert (used is mine) == (others == (0, 0, 0))
    assert ways_in(used.module) == [{0: "messages", 1: "parts", -1: "whole"}[at] for at in others]
    assert its.agreed(mine, None) is mine


def test_candidates_are_written_from_a_graph_that_stays() -> None:
    its = writer()
    gm, text = its.gm, str(its.gm.graph)
    taken, left = its.written(first), its.written(lambda start, choices: (0, "left"))
    assert str(gm.graph) == text
    assert (taken.report.num_taken, left.report.num_taken) == (3, 0)
    assert str(left.module.graph) == text
    assert left.module is not gm
    assert_same_on_both(its, taken)
