"""Scenarios: each changes the costs as its name says, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.overlap.by_hand import communication, kernel, problem_of

from meshweave.optimize.overlap.play import NOISE, SCENARIOS, SLOWER

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
NOMINAL = SCENARIOS[0]
# 1.5 s of communication beside 1 s of compute, and 1 s of compute after both.
BESIDE = problem_of(communication("gather", 1.5), kernel("beside", 1.0), kernel("after", 1.0, "gather"))
ORDER = (0, 1, ~0, 2)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("as said", 2.5), ("communication x2", 4.0), ("communication x3", 5.5), ("shared link", 2.5)],
)
def test_slower_communication_is_exposed(name: str, seconds: float) -> None:
    assert BY_NAME[name].seconds(BESIDE, ORDER, None) == pytest.approx(seconds)


def test_the_first_scenarios_are_the_costs_themselves_and_half_the_rate() -> None:
    assert SCENARIOS[1 : 1 + len(SLOWER)] == SLOWER
    assert NOMINAL.change(BESIDE) is BESIDE
    with_startup = replace(BESIDE, startup=[0.5, 0.0, 0.0])
    slow = SLOWER[0].change(with_startup)
    assert (slow.copy, slow.startup, slow.seconds) == ([3.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 1.0])


def test_a_shared_link_serves_every_channel_in_turn() -> None:
    """Two communications of 1 s on their own links take 1 s together, on a shared link 2 s; kernels do not use it."""
    pair = problem_of(communication("x", 1.0, channel="a"), communication("y", 1.0, channel="b"), kernel("k", 0.5))
    order = (0, 1, 2, ~0, ~1)
    assert NOMINAL.seconds(pair, order, None) == pytest.approx(1.0)
    assert BY_NAME["shared link"].seconds(pair, order, None) == pytest.approx(2.0)
    assert BY_NAME["shared link"].change(pair).usage[2] == ()


def test_the_machine_is_not_asked_for_the_shared_link() -> None:
    """A profile raises for a level that it lacks: its slowdown is asked for its own levels alone."""
    asked = set[str]()

    def slowdown(levels: frozenset[str]) -> float:
        asked.update(levels)
        return 2.0 if levels else 1.0

    # Compute is half as fast beside the communication: of its 1 s, 0.75 s are done after 1.5 s, and 1.25 s follow.
    assert BY_NAME["shared link"].seconds(BESIDE, ORDER, slowdown) == pytest.approx(2.75)
    assert asked == {"a"}


def test_noise_is_bounded_and_depends_on_names_alone() -> None:
    names = [f"item_{i}" for i in range(200)]
    problem = problem_of(*(kernel(name, 2.0) for name in names), *(communication(f"c{n}", 3.0) for n in names))
    noisy = BY_NAME["40% noise"].change(problem)
    factors = [s / 2.0 for s in noisy.seconds[:200]] + [c / 3.0 for c in noisy.copy[200:]]
    assert all(1 - NOISE <= f <= 1 + NOISE for f in factors)
    assert min(factors) < 1 - NOISE / 2 < 1 + NOISE / 2 < max(factors)
    assert sum(factors) / len(factors) == pytest.approx(
        1.0, abs=0.05
    )  # of 400 uniform numbers: 3.5 deviations are 0.04
    assert len(set(noisy.copy[200:])) == len(set(noisy.seconds[:200])) == 200
    backwards = BY_NAME["40% noise"].change(problem_of(*(kernel(name, 2.0) for name in reversed(names))))
    assert backwards.seconds == noisy.seconds[199::-1]
    assert problem.seconds[:200] == [2.0] * 200
