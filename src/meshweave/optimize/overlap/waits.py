"""Where the waits for communications stand in an order of items."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from meshweave.cost.simulate.clock import Slowdown
from meshweave.optimize.overlap.model import Order, Problem
from meshweave.optimize.overlap.play import play

_MARGIN = 3.0  # a wait stands where the communication is done although it takes so many times as long as said


def with_waits(problem: Problem, order: Sequence[int]) -> list[int]:
    """An order of items with the waits that it leaves out, each before the first item that needs it, or at the end."""
    complete: list[int] = []
    waited = {~x for x in order if x < 0}
    for x in order:
        if x >= 0:
            for c in problem.waits[x]:
                if c not in waited:
                    waited.add(c)
                    complete.append(~c)
        complete.append(x)
    return [*complete, *(~c for c in problem.starts if problem.is_waited[c] and c not in waited)]


def hoist_continuations(problem: Problem, order: Order) -> list[int]:
    """The order with each kernel that continues an earlier kernel in front of the waits that it does not need, so that
    these do not part what a compiler would fuse, such as the ops of an update. No kernel passes the start of a
    communication: none begins later, and since more is computed before each wait, no order becomes slower."""
    stretch, num_passed = _places(problem, order)
    users, complete, num_waits = problem.users(), list[int](), 0
    placed, waited = [False] * problem.num_items, [False] * problem.num_items

    def is_next(kernel: int, before: int) -> bool:
        if placed[kernel] or stretch[kernel] != stretch[before] or num_passed[kernel] == num_waits:
            return False
        is_ready = all([placed[d] for d in problem.deps[kernel]]) and all([waited[c] for c in problem.waits[kernel]])
        return is_ready and problem.channel[kernel] < 0

    for x in order:
        if x < 0:
            complete.append(x)
            waited[~x], num_waits = True, num_waits + 1
            continue
        stack = [x]
        while stack:
            item = stack.pop()
            if placed[item]:
                continue
            placed[item] = True
            complete.append(item)
            stack += [user for user in reversed(users[item]) if is_next(user, item)]
    return complete


def _places(problem: Problem, order: Order) -> tuple[list[int], list[int]]:
    """By item, how many starts of communications stand up to it in the order, and how many waits."""
    starts, waits = [0] * problem.num_items, [0] * problem.num_items
    num_starts = num_waits = 0
    for x in order:
        if x < 0:
            num_waits += 1
            continue
        num_starts += problem.channel[x] >= 0
        starts[x], waits[x] = num_starts, num_waits
    return starts, waits


def sunk_waits(problem: Problem, order: Sequence[int], slowdown: Slowdown | None) -> list[int]:
    """The order of items with waits where they block nothing even if communication takes `_MARGIN` times as long as
    said, and release memory as soon as that allows. One that is needed earlier stands before what needs it."""
    items = [x for x in order if x >= 0]
    played = play(problem.slower(_MARGIN), with_waits(problem, items), slowdown)
    complete: list[int] = []
    under_way: list[tuple[float, int]] = []  # (end, start)
    waited: set[int] = set()

    def wait(start: int) -> None:
        if start not in waited:
            waited.add(start)
            complete.append(~start)

    for x in items:
        is_start = problem.channel[x] >= 0
        now = played.issued[x] if is_start else played.begin[x]
        while under_way and under_way[0][0] <= now:
            wait(heappop(under_way)[1])
        for start in problem.waits[x]:
            wait(start)
        complete.append(x)
        if is_start and problem.is_waited[x]:
            heappush(under_way, (played.end[x], x))
    for _, start in sorted(under_way):
        wait(start)
    return complete
