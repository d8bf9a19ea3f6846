"""Which order is taken: hand-made candidates on one link, whose seconds with slower communication follow."""

from __future__ import annotations

import random

import pytest
from tests.overlap.by_hand import communication, kernel, problem_of

from meshweave.optimize.overlap.choose import OrderChoice, choose
from meshweave.optimize.overlap.merge import Merged
from meshweave.optimize.overlap.play import peak_of, seconds_of
from meshweave.optimize.overlap.search import OrderCandidate


def candidate(exposed: float, hidden: float, peak: int = 0) -> OrderCandidate:
    """Ten seconds of compute beside `hidden` seconds of communication, and `exposed` seconds of it after that."""
    problem = problem_of(
        communication("beside", hidden), kernel("compute", 10.0), communication("after", exposed, "compute")
    )
    order = (0, 1, 2, ~0, ~2)
    merged = Merged(problem, (), (), exposed + hidden)
    peak = peak or peak_of(problem, order)
    return OrderCandidate("", merged, order, (seconds_of(problem, order),), peak, peak)


def chosen(*candidates: OrderCandidate, rule: str = "regret") -> OrderCandidate:
    choice: OrderChoice = choose(candidates, None, rule, 0)
    (taken,) = [c for c in candidates if c.order == choice.chosen.order and c.merged is choice.chosen.merged]
    return taken


ROBUST = candidate(exposed=0.1, hidden=3.0)  # 10.1, 10.2 and 10.3 s


@pytest.mark.parametrize(
    ("exposed", "hidden", "is_robust_taken"),
    [
        (0.0, 5.0, True),  # 10, 10 and 15 s: 46% are gained for 1%, and 2% where links are half as fast
        (0.0, 3.4, False),  # 10, 10 and 10.2 s: nothing is gained
        (0.0, 3.6, False),  # 10, 10 and 10.8 s: 5% are gained
        (0.0, 3.8, True),  # 10, 10 and 11.4 s: 11% are gained
    ],
)
def test_a_slower_order_is_taken_where_it_gains_far_more_with_slow_links(
    exposed: float, hidden: float, is_robust_taken: bool
) -> None:
    fast = candidate(exposed, hidden)
    assert (chosen(fast, ROBUST) is ROBUST) == is_robust_taken
    assert chosen(fast, ROBUST, rule="nominal") is fast


def test_no_more_than_one_and_a_quarter_percent_are_given() -> None:
    slow = candidate(exposed=0.13, hidden=3.0)
    fast = candidate(exposed=0.0, hidden=9.0)
    assert chosen(fast, slow) is fast


def test_the_chosen_order_is_never_slower_than_one_of_the_caller() -> None:
    fast = candidate(exposed=0.0, hidden=5.0)
    assert choose([fast, ROBUST], None, "regret", 1).chosen.merged is fast.merged


@pytest.mark.parametrize("seed", range(20))
def test_more_memory_never_gives_a_slower_order(seed: int) -> None:
    generator = random.Random(seed)
    candidates = [
        candidate(generator.uniform(0.0, 0.3), generator.uniform(0.0, 12.0), generator.randrange(1, 40))
        for _ in range(generator.randrange(2, 30))
    ]
    before = float("inf")
    for cap in sorted({c.peak for c in candidates}):
        seconds = chosen(*(c for c in candidates if c.peak <= cap)).seconds[0]
        assert seconds <= before * 1.0016
        before = min(before, seconds)
