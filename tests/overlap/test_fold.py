"""Folded kernels: which they are, and that every order of the folded problem is an order of the original, as long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.overlap.by_hand import Entry, all_orders, communication, kernel, problem_of

from meshweave.optimize.overlap.model import Problem
from meshweave.optimize.overlap.outline import Fold, fold
from meshweave.optimize.overlap.play import peak_of, seconds_of
from meshweave.optimize.overlap.waits import with_waits

LONG = kernel("long", 9.0)  # so that the other kernels are shorter than the mean
LAST = kernel("last", 9.0, "full")


def items_of(problem: Problem) -> list[list[str]]:
    """The members of each item of the folded problem, by name."""
    return [[problem.names[i] for i in group] for group in fold(problem).members]


# The items that have several members.
CASES: dict[str, tuple[list[Entry], list[list[str]]]] = {
    "a cast of its gather": ([kernel("cast", 1), communication("full", 2, "cast"), LAST], [["cast", "full"]]),
    "a chain of kernels": (
        [kernel("a", 1), kernel("b", 1, "a"), kernel("c", 1, "b"), LONG],
        [["a", "b", "c"]],
    ),
    "two operands, and their operands": (
        [kernel("a", 1), kernel("b", 1), kernel("c", 1, "a"), kernel("sum", 1, "b", "c"), LONG],
        [["a", "b", "c", "sum"]],
    ),
    "a kernel with two users": ([kernel("a", 1), kernel("b", 1, "a"), kernel("c", 1, "a"), LONG], []),
    "a kernel that needs a kernel with two users": (
        [kernel("a", 1), kernel("b", 1, "a"), kernel("c", 1, "a"), kernel("d", 1, "b"), LONG],
        [],
    ),
    "a kernel without a user": ([kernel("a", 1), LONG], []),
    "a kernel of the mean": ([kernel("a", 2), kernel("b", 2, "a")], [["a", "b"]]),
    "a kernel above the mean": ([kernel("a", 2.1), kernel("b", 2, "a")], []),
    "communications do not count for the mean": (
        [kernel("a", 2), kernel("b", 2, "a"), communication("full", 90, "b")],
        [["a", "b", "full"]],
    ),
    "a kernel that needs a communication": (
        [communication("full", 2), kernel("a", 1, "full"), kernel("b", 1, "a"), LONG],
        [],
    ),
    "the operand of a kernel above the mean": ([kernel("a", 1), kernel("long", 9, "a"), kernel("b", 1, "long")], [
        ["a", "long"],
    ]),
    "a start": ([communication("full", 2), LAST], []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_light_kernels_of_inputs_alone_belong_to_their_only_user(name: str) -> None:
    entries, expected = CASES[name]
    assert [names for names in items_of(problem_of(*entries)) if len(names) > 1] == expected


def stored(*entries: Entry) -> Problem:
    """Every item has a result of its own size, which its users read."""
    problem = problem_of(*entries)
    problem.sizes = [1 << i for i in range(problem.num_items)]
    problem.allocs = [(i,) for i in range(problem.num_items)]
    problem.uses = list(problem.deps)
    problem.kept, problem.before = [False] * problem.num_items, [False] * problem.num_items
    problem.order = with_waits(problem, range(problem.num_items))
    return problem


BLOCKS = (
    kernel("cast", 1.0),
    communication("full", 3.0, "cast"),
    kernel("long", 8.0),
    kernel("mask", 0.5),
    kernel("shifted", 0.5, "mask"),
    kernel("scores", 5.0, "full", "shifted"),
    kernel("scaled", 1.0, "scores"),
    communication("sums", 2.0, "scaled", channel="b"),
    kernel("tail", 1.0, "long"),
)


def played(problem: Problem, order: Sequence[int]) -> float:
    """Seconds of an order in which a start takes the seconds of the kernels in it, before its communication begins."""
    now, free, ends = 0.0, dict[int, float](), dict[int, float]()
    for x in order:
        now = now + problem.seconds[x] if x >= 0 else max(now, ends[~x])
        if x >= 0 and problem.channel[x] >= 0:
            ends[x] = free[problem.channel[x]] = max(now, free.get(problem.channel[x], 0.0)) + problem.copy[x]
    return max(now, *ends.values())


FOLDED: dict[Fold, list[list[str]]] = {
    "inputs": [["cast", "full"], ["long"], ["mask", "shifted", "scores"], ["scaled"], ["sums"], ["tail"]],
    "feeders": [["cast", "full"], ["long"], ["mask", "shifted", "scores"], ["scaled", "sums"], ["tail"]],
}


@pytest.mark.parametrize("which", FOLDED)
def test_every_order_of_the_folded_problem_is_an_order_of_the_original_that_takes_as_long(which: Fold) -> None:
    problem = stored(*BLOCKS)
    folded = fold(problem, which)
    assert [[problem.names[i] for i in group] for group in folded.members] == FOLDED[which]
    orders = list(all_orders(folded.problem))
    assert len(orders) > 3
    for items in orders:
        order = with_waits(folded.problem, items)
        original = folded.unfold(order)
        assert problem.check(original) == ""
        assert seconds_of(problem, original) == pytest.approx(played(folded.problem, order))
        assert peak_of(problem, original) <= peak_of(folded.problem, order) + max(folded.problem.extra)


def test_results_that_nobody_reads_are_freed_before_the_user_runs() -> None:
    """Of a folded kernel with a second result; the second result of its user is there while that runs."""
    problem = stored(kernel("a", 1.0), kernel("b", 1.0, "a"), LONG)
    problem = replace(problem, allocs=[(0, 3), (1, 4), (2,)], sizes=[1, 2, 4, 8, 16])
    problem.kept, problem.before = [False] * 5, [False] * 5
    folded = fold(problem).problem
    assert folded.allocs == [(), (2,)]
    assert folded.extra == [1 + 2 + 16, 0]


def test_a_wait_without_an_order_keeps_a_kernel_where_it_is() -> None:
    problem = problem_of(communication("full", 2.0), kernel("a", 1.0, "full"), kernel("b", 1.0, "a"), LONG)
    problem.deps[1] = ()
    assert fold(problem).members == ((0,), (1,), (2,), (3,))
