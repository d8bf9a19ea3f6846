"""The report of decomposed collectives: its sums, its texts, and which part of an estimate they blame."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshweave.optimize.decompose.algorithms import algorithm
from meshweave.optimize.decompose.price import Estimate
from meshweave.optimize.decompose.report import (
    DecomposeReport,
    RingRow,
    no_gain_text,
)
from meshweave.optimize.decompose.rewrite import RingScheme

US = 1e-6
DIRECT, PIPELINED = RingScheme(algorithm("all_gather", "direct"), 0), RingScheme(None, 4)
# 10 us of compute after 8 us of collective, of which 2 us are hidden; in 4 steps 13 us, and 1 us of copies.
ESTIMATE = Estimate(
    compute=10 * US,
    collective=8 * US,
    host=1 * US,
    hidden=2 * US,
    chunk=3 * US,
    message=2.5 * US,
    num_steps=4,
    num_messages=3,
    losses=1 * US,
    played=13 * US,
)
TAKEN = RingRow(
    "g",
    "all_gather",
    "tp",
    "model.py:7",
    scheme="direct",
    is_taken=True,
    reason="faster",
    seconds_before=5.0,
    seconds_after=3.0,
)
LEFT = RingRow("r", "all_reduce", "dp", "model.py:9", reason="no gain", seconds_before=7.0, seconds_after=9.0)


def test_the_text_has_a_line_per_collective() -> None:
    report = DecomposeReport((TAKEN, LEFT))
    lines = [
        "1 of 2 collectives decomposed: 1 direct",
        "  g (all_gather over tp) taken apart: faster; model.py:7",
        "  r (all_reduce over dp) left: no gain; model.py:9",
    ]
    assert str(report) == "\n".join(lines)


def test_a_graph_that_stays_says_why_beside_the_reason_of_each() -> None:
    report = DecomposeReport((TAKEN, LEFT)).left("the graph is slower")
    assert report.num_taken == 0
    assert [row.reason for row in report.rows] == ["the graph is slower; faster", "no gain"]


# Each makes one part the largest: 4 chunks over the compute, 3 messages over the collective, the play over its chunks.
BLAMED = [
    ({"chunk": 5 * US}, "the matmuls are slower in chunks (10.0 us)"),
    ({"message": 5 * US}, "messages take longer than the collective (7.0 us)"),
    ({"played": 18 * US}, "not every message is hidden (6.0 us)"),
    ({"losses": 9 * US}, "results have to be put together (9.0 us)"),
]


@pytest.mark.parametrize(("changes", "blamed"), BLAMED)
def test_a_decomposition_without_a_gain_says_which_part_is_too_slow(changes: dict[str, float], blamed: str) -> None:
    estimate = replace(ESTIMATE, **changes)
    times = f"{estimate.after / US:.1f} us instead of 16.0 us"
    assert no_gain_text(DIRECT, estimate) == f"no gain: direct takes {times}, {blamed}"


def test_a_hidden_collective_has_nothing_to_gain() -> None:
    assert no_gain_text(DIRECT, replace(ESTIMATE, hidden=8 * US)) == "other work hides it: 8.0 us of 8.0 us"
