"""Items stay on their side of fences, in every order that the dependencies allow."""

from __future__ import annotations

import pytest
from tests.overlap.by_hand import Entry, all_orders, communication, kernel, problem_of

from meshweave.optimize.overlap.read import hold_fences

# An activation, a gathered parameter and its cast after the fence; a kernel of two users, and the end.
STEP = (
    kernel("forward", 1.0),
    kernel("loss", 1.0, "forward"),
    kernel("fence", 1.0),
    kernel("cast", 1.0),
    communication("gather", 1.0, "cast"),
    kernel("backward", 1.0, "gather", "forward"),
    communication("reduce", 1.0, "backward"),
)


def before_and_after(entries: tuple[Entry, ...], gathers_pass: bool) -> tuple[set[str], set[str]]:
    """The items that may come before the fence in some order, and those that may come after it."""
    problem = problem_of(*entries)
    fence = problem.names.index("fence")
    hold_fences(problem, [(fence, gathers_pass)])
    before, after = set[str](), set[str]()
    for order in all_orders(problem):
        at = order.index(fence)
        before |= {problem.names[i] for i in order[:at]}
        after |= {problem.names[i] for i in order[at + 1 :]}
    return before, after


def test_items_stay_on_their_side() -> None:
    """The cast has a single user and depends on inputs: it goes where its gather goes, which is not held by itself."""
    before, after = before_and_after(STEP, False)
    assert before == {"forward", "loss", "cast"}
    assert after == {"cast", "gather", "backward", "reduce"}


def test_gathers_of_inputs_may_pass() -> None:
    before, after = before_and_after(STEP, True)
    assert before == {"forward", "loss", "cast", "gather"}
    assert after == {"cast", "gather", "backward", "reduce"}


@pytest.mark.parametrize("gathers_pass", [False, True])
def test_kernels_with_several_users_and_communications_of_others_stay(gathers_pass: bool) -> None:
    """`twice` is an input of two kernels; `second` needs the result of another communication."""
    entries = (
        kernel("fence", 1.0),
        kernel("twice", 1.0),
        communication("first", 1.0),
        communication("second", 1.0, "first"),
        kernel("left", 1.0, "twice", "second"),
        kernel("right", 1.0, "twice"),
    )
    before, after = before_and_after(entries, gathers_pass)
    assert before == ({"first"} if gathers_pass else set())
    assert after == {"twice", "first", "second", "left", "right"}


def test_parts_follow_each_other() -> None:
    """Two fences: every item between them is after the first and before the second."""
    problem = problem_of(
        kernel("forward", 1.0),
        kernel("backward_begins", 1.0),
        kernel("free", 1.0),
        kernel("backward", 1.0, "free", "forward"),
        kernel("also_free", 1.0),
        kernel("reader", 1.0, "also_free", "forward"),
        kernel("update_begins", 1.0),
        kernel("update", 1.0, "reader", "forward"),
    )
    hold_fences(problem, [(1, False), (6, False)])
    orders = list(all_orders(problem))
    assert len(orders) > 1
    for order in orders:
        at = {problem.names[i]: place for place, i in enumerate(order)}
        assert at["forward"] < at["backward_begins"] < at["backward"] < at["update_begins"] < at["update"]
        assert at["backward_begins"] < at["reader"] < at["update_begins"]
