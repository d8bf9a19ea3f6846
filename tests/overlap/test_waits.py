"""Waits in an order of items: as late as they can be, or where communication is done for certain."""

from __future__ import annotations

from itertools import chain

import pytest
from tests.overlap.by_hand import all_orders, communication, kernel, named, problem_of

from meshweave.optimize.overlap.model import Problem
from meshweave.optimize.overlap.play import seconds_of
from meshweave.optimize.overlap.waits import hoist_continuations, sunk_waits, with_waits

STEP = problem_of(
    communication("x", 1.0),
    kernel("k", 1.0),
    communication("y", 1.0, "k"),
    kernel("uses_x", 1.0, "x"),
    kernel("uses_both", 1.0, "x", "y"),
    communication("z", 1.0, "k"),
)


def test_each_wait_comes_right_before_its_first_reader_or_at_the_end() -> None:
    orders = list(all_orders(STEP))
    assert len(orders) > 10
    for items in orders:
        order = with_waits(STEP, items)
        assert STEP.check(order) == ""
        assert [x for x in order if x >= 0] == list(items)
        for start in STEP.starts:
            readers = [i for i in items if start in STEP.waits[i]]
            after = order[order.index(~start) + 1 :]
            next_item = next((x for x in after if x >= 0), None)
            assert next_item == (readers[0] if readers else None)


def line(seconds: float, *, first_reader: int = 4) -> Problem:
    """A communication of `seconds`, and five kernels of 1 s, of which the last and `first_reader` need it."""
    kernels = [kernel(f"k{i}", 1.0, *["x"] * (i in (first_reader, 4))) for i in range(5)]
    return problem_of(communication("x", seconds), *kernels)


@pytest.mark.parametrize(("seconds", "place"), [(0.3, 1), (0.4, 2), (0.6, 2), (0.9, 3), (1.4, 4), (9.0, 4)])
def test_a_wait_stands_where_three_times_the_time_is_over(seconds: float, place: int) -> None:
    """Kernel i begins at second i: the wait comes before the first that begins after three times the communication."""
    problem = line(seconds)
    expected = ["x", *(f"k{i}" for i in range(place)), "~x", *(f"k{i}" for i in range(place, 5))]
    assert named(problem, sunk_waits(problem, range(6), None)) == expected


def test_waits_that_nothing_needs_are_in_the_order_in_which_communications_end() -> None:
    problem = problem_of(communication("long", 9.0, channel="a"), communication("short", 5.0, channel="b"))
    assert named(problem, sunk_waits(problem, (0, 1), None)) == ["long", "short", "~short", "~long"]


def test_sunk_waits_make_an_order_of_every_order_of_items() -> None:
    for items in all_orders(STEP):
        with_early = list(chain.from_iterable((x, ~x) if STEP.channel[x] >= 0 else (x,) for x in items))
        order = sunk_waits(STEP, with_early, None)
        assert STEP.check(order) == ""
        assert [x for x in order if x >= 0] == list(items)
        assert order == sunk_waits(STEP, items, None)  # the waits of the order itself do not matter


# Two gradients arrive; each is scaled, then added to its parameter.
UPDATES = problem_of(
    communication("x", 1.0),
    communication("y", 2.0),
    kernel("scale_x", 1.0, "x"),
    kernel("scale_y", 1.0, "y"),
    kernel("add_x", 1.0, "scale_x"),
    kernel("add_y", 1.0, "scale_y"),
)


def test_a_chain_that_waits_part_becomes_one_piece() -> None:
    breadth_first = with_waits(UPDATES, range(6))
    assert named(UPDATES, breadth_first) == ["x", "y", "~x", "scale_x", "~y", "scale_y", "add_x", "add_y"]
    expected = ["x", "y", "~x", "scale_x", "add_x", "~y", "scale_y", "add_y"]
    assert named(UPDATES, hoist_continuations(UPDATES, breadth_first)) == expected


@pytest.mark.parametrize("problem", [STEP, UPDATES])
def test_hoisting_keeps_an_order_and_what_comes_before_each_start_and_is_never_slower(problem: Problem) -> None:
    for items in all_orders(problem):
        order = with_waits(problem, items)
        moved = hoist_continuations(problem, order)
        assert problem.check(moved) == ""
        assert sorted(moved) == sorted(order)
        for start in problem.starts:
            before, after = (set(x[: x.index(start)]) for x in (order, moved))
            assert before == after
        assert seconds_of(problem, moved) <= seconds_of(problem, order) + 1e-12
