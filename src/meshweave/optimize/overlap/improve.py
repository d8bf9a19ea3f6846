"""Moves from a given order to orders that may be faster: kernels that run during a stall instead of before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshweave.optimize.overlap.model import Order, Problem
from meshweave.optimize.overlap.waits import with_waits

_PARTS = (1.0, 0.5)  # how much of a stall is filled
_NOTHING, _SEVERAL = -1, -2  # instead of a start: nothing depends on a kernel, or more than one start


def fill_stall(problem: Problem, order: Sequence[int], start: int, stall: float) -> Iterator[list[int]]:
    """Orders in which the stream reaches a start earlier: kernels before it that it does not need run when the stream
    waits for it, `stall` seconds or a part of that. With a kernel move all items that need it, such as the start of its
    gradient's reduction; so the moved kernels are those that lead to a single start, or none. Of the same channel they
    take longer than that start takes; of another channel their starts take no longer than the stall. The last of them
    are moved, because what they need lives until then."""
    at = order.index(start)
    wait = order.index(~start) if problem.is_waited[start] else len(order)
    leads = _leads(problem, order[:wait], start)
    seconds, place = dict[int, float](), dict[int, int]()
    for i, x in enumerate(order[:at]):
        if x >= 0 and problem.channel[x] < 0 and leads[x] != _SEVERAL:
            seconds[leads[x]] = seconds.get(leads[x], 0.0) + problem.seconds[x]
            place[leads[x]] = i
    own = problem.channel[start]
    channel = {c: problem.channel[c] if c >= 0 else _NOTHING for c in seconds}
    copy = {c: problem.copy[c] if c >= 0 else 0.0 for c in seconds}
    able = [c for c in seconds if channel[c] != own or seconds[c] > copy[c]]
    able.sort(key=lambda c: -place[c])
    for part in _PARTS:
        moved, total, copied = set[int](), 0.0, dict[int, float]()
        for c in able:
            copies = 0.0 if channel[c] == own else copied.get(channel[c], 0.0) + copy[c]
            if total + seconds[c] <= part * stall and copies <= part * stall:
                moved.add(c)
                total += seconds[c]
                copied[channel[c]] = copies
        if moved:
            late = [x for x in order[:wait] if x >= 0 and leads[x] in moved]
            gone = {*late, *(~x for x in late)}
            before = [x for x in order[:wait] if x not in gone]
            yield with_waits(problem, [*before, *late, *(x for x in order[wait:] if x not in gone)])


def _leads(problem: Problem, order: Order, start: int) -> dict[int, int]:
    """By item of an order the only start in it that needs the item; what `start` needs counts as needed by several."""
    users, leads = problem.users(), {start: _SEVERAL}
    for x in reversed(order):
        if x < 0 or x == start:
            continue
        later = {leads[u] for u in users[x] if u in leads}
        if not later:
            leads[x] = x if problem.channel[x] >= 0 else _NOTHING
        else:
            leads[x] = later.pop() if len(later) == 1 and problem.channel[x] < 0 else _SEVERAL
    return leads
