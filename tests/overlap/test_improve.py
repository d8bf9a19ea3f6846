"""Orders with filled stalls: by hand, and that they are orders, at random."""

from __future__ import annotations

from tests.overlap.by_hand import communication, kernel, problem_of
from tests.overlap.test_bounds import random_problem

from meshweave.optimize.overlap.improve import fill_stall
from meshweave.optimize.overlap.play import play, seconds_of
from meshweave.optimize.overlap.waits import with_waits


def test_kernels_of_other_reductions_run_while_the_last_is_awaited() -> None:
    """Three gradients of two seconds before the last one, whose reduction takes five: that of the first takes longer on
    the same channel than its kernel, so it stays; the others move, the later one first."""
    problem = problem_of(
        *(kernel("first", 2.0), communication("sum_first", 3.0, "first")),
        *(kernel("second", 2.0), communication("sum_second", 1.0, "second")),
        *(kernel("third", 2.0), communication("sum_third", 0.5, "third", channel="b")),
        *(kernel("last", 2.0), communication("sum_last", 5.0, "last")),
    )
    order = with_waits(problem, range(8))
    start = problem.names.index("sum_last")
    both, one = fill_stall(problem, order, start, 5.0)
    moved = [[problem.names[x] for x in items if x >= 0] for items in (both, one)]
    assert moved[0] == [
        *("first", "sum_first", "last", "sum_last", "second", "sum_second", "third", "sum_third"),
    ]
    assert moved[1] == [
        *("first", "sum_first", "second", "sum_second", "last", "sum_last", "third", "sum_third"),
    ]
    assert [seconds_of(problem, items) for items in (order, both, one)] == [13, 11, 11]


def test_communications_of_another_channel_fit_into_the_stall() -> None:
    """Three reductions of two seconds each on a channel of their own: two fit into a stall of five seconds."""
    problem = problem_of(
        *(entry for i in "abc" for entry in (kernel(i, 0.5), communication(f"sum_{i}", 2.0, i, channel="b"))),
        *(kernel("last", 2.0), communication("sum_last", 5.0, "last")),
    )
    order = with_waits(problem, range(8))
    moved, _ = fill_stall(problem, order, problem.names.index("sum_last"), 5.0)
    assert [problem.names[x] for x in moved if x >= 0] == [
        *("a", "sum_a", "last", "sum_last", "b", "sum_b", "c", "sum_c"),
    ]
    assert [seconds_of(problem, items) for items in (order, moved)] == [8.5, 7.5]


def test_they_are_orders() -> None:
    num_moved = 0
    for seed in range(20):
        problem = random_problem(seed, 40)
        for start, begin, end in play(problem, problem.order).stalls:
            for moved in fill_stall(problem, problem.order, start, 4 * (end - begin)):
                assert problem.check(moved) == ""
                num_moved += 1
    assert num_moved > 40
