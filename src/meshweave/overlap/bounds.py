"""A time that no order beats, merged or not: what each stream has to do, between what must come before and after it."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from meshweave.overlap.problem import Problem


def bound_of(problem: Problem) -> float:
    """Seconds that every order takes at least, whatever is merged.

    The longest chain of items that need each other; and for the compute stream and every channel, alone, the best order
    that may interrupt itself, of what it has to do between the shortest way to it and the shortest way from it
    (Jackson's rule: Carlier, European Journal of Operational Research 11, 1982). A merged collective takes as long as
    any part of it alone, and as long as the bytes of all its parts: start-ups that merging may save are not counted
    in channels.
    """
    heads, tails = _heads(problem), _tails(problem)
    own = [problem.seconds[i] if c < 0 else problem.copy[i] for i, c in enumerate(problem.channel)]
    longest = max([h + o + t for h, o, t in zip(heads, own, tails, strict=True)], default=0.0)
    for channel in range(-1, len(problem.channels)):
        items = [i for i, c in enumerate(problem.channel) if c == channel]
        work = [problem.seconds[i] if channel < 0 else problem.copy[i] - problem.startup[i] for i in items]
        longest = max(longest, _preempted([heads[i] for i in items], work, [tails[i] for i in items]))
    return longest


def _heads(problem: Problem) -> list[float]:
    """By item the longest way to its begin."""
    ends = [0.0] * problem.num_items
    found = [0.0] * problem.num_items
    for i in range(problem.num_items):
        begin = 0.0
        for d in problem.deps[i]:
            held = found[d] if problem.channel[d] >= 0 else ends[d]  # a start is passed when it is reached
            begin = max(begin, held)
        for c in problem.waits[i]:
            begin = max(begin, ends[c])
        found[i] = begin
        ends[i] = begin + (problem.seconds[i] if problem.channel[i] < 0 else problem.copy[i])
    return found


def _tails(problem: Problem) -> list[float]:
    """By item the longest way from its end."""
    found = [0.0] * problem.num_items
    for i in range(problem.num_items - 1, -1, -1):
        own = found[i] + (problem.seconds[i] if problem.channel[i] < 0 else problem.copy[i])
        for d in problem.deps[i]:
            if problem.channel[d] < 0:
                found[d] = max(found[d], own)
        for c in problem.waits[i]:
            found[c] = max(found[c], own)
    return found


def _preempted(heads: Sequence[float], work: Sequence[float], tails: Sequence[float]) -> float:
    """The makespan of one machine that always does, of what has arrived, that with the longest tail."""
    left = list(work)
    arrivals = sorted(range(len(heads)), key=lambda i: heads[i])
    ready: list[tuple[float, int]] = []
    now, next_one, longest = 0.0, 0, 0.0
    while ready or next_one < len(arrivals):
        if not ready:
            now = max(now, heads[arrivals[next_one]])
        while next_one < len(arrivals) and heads[arrivals[next_one]] <= now:
            heappush(ready, (-tails[arrivals[next_one]], arrivals[next_one]))
            next_one += 1
        tail, i = ready[0]
        until = heads[arrivals[next_one]] if next_one < len(arrivals) else float("inf")
        if now + left[i] <= until:
            now += left[i]
            heappop(ready)
            longest = max(longest, now - tail)
        else:
            left[i] -= until - now
            now = until
    return longest
