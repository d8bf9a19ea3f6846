"""A lower bound of the time of any order, merged or not: each stream has to do its work between its predecessors and
successors, and a kernel, once begun, runs to its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, nlargest

from meshweave.optimize.overlap.model import Problem

# How much is examined: more would cost time, and less is still a valid bound. Between two communications of a
# transformer's tensor parallelism there are 10 to 40 kernels; of long kernels only those that are longer than a
# communication count.
_STRETCH = 32
_LONG = 8


def bound_of(problem: Problem) -> float:
    """Seconds that every order takes at least, with any merges; the largest of four bounds.

    The critical path, where kernels between two communications run one by one (`_PathLengths`). The compute stream, and
    every channel, alone: the best preemptive order of its work, between the longest path to each item and the longest
    path from it (Jackson's rule: Carlier, European Journal of Operational Research 11, 1982). The critical path with
    one long kernel more, at any place in it (`_bound_with_kernel`). What stream and channel do before and after a long
    communication (`_bound_around`).

    Merging beats none of them: a merged collective takes at least as long as any part of it alone, and as long as the
    bytes of all its parts; it begins when all parts can and ends when all parts have. Start-ups that it may save are
    not counted in channels.
    """
    n = problem.num_items
    own = [problem.seconds[i] if c < 0 else problem.copy[i] for i, c in enumerate(problem.channel)]
    heads, tails = _heads(problem, own), _tails(problem, own)
    longest = max([h + o + t for h, o, t in zip(heads, own, tails, strict=True)], default=0.0)
    items: list[list[int]] = [[] for _ in range(len(problem.channels) + 1)]
    for i in range(n):
        if own[i] > 0:
            items[problem.channel[i]].append(i)  # the last list is that of the compute stream, channel -1
    for group in items:
        work = [own[i] - problem.startup[i] if problem.channel[i] >= 0 else own[i] for i in group]
        longest = max(longest, _preemptive_makespan([heads[i] for i in group], work, [tails[i] for i in group]))
    long = nlargest(_LONG, problem.starts, key=lambda c: (own[c], heads[c]))
    around = [_bound_around(problem, c, own, tails[c]) for c in long]
    return max(longest, _bound_with_kernel(problem, heads, tails, own), *around)


def _heads(problem: Problem, own: Sequence[float]) -> list[float]:
    """By item, a time before which it cannot begin."""
    channel = problem.channel
    needs = [
        (*(d for d in deps if channel[d] < 0), *waits) for deps, waits in zip(problem.deps, problem.waits, strict=True)
    ]
    # The stream has passed a start when it has reached it.
    passes = [[d for d in deps if channel[d] >= 0] for deps in problem.deps]
    return _PathLengths(needs, passes, own, channel).lengths(range(problem.num_items))


def _tails(problem: Problem, own: Sequence[float]) -> list[float]:
    """By item, a time that passes at least between its end and that of the step."""
    users: list[list[int]] = [[] for _ in own]
    for i, (deps, waits) in enumerate(zip(problem.deps, problem.waits, strict=True)):
        for d in deps:
            if problem.channel[d] < 0:
                users[d].append(i)
        for c in waits:
            users[c].append(i)
    nothing: list[list[int]] = [[]] * problem.num_items
    return _PathLengths(users, nothing, own, problem.channel).lengths(range(problem.num_items - 1, -1, -1))


@dataclass(slots=True)
class _PathLengths:
    """Lengths of paths, in seconds.

    `needs` are by item its finished predecessors, `passes` its begun predecessors. Kernels share a stream: any set of
    an item's predecessors takes the sum of their times, after the smallest of their own lengths. Only those since the
    last communication on the longest path are examined.
    """

    needs: Sequence[Sequence[int]]
    passes: Sequence[Sequence[int]]
    own: Sequence[float]
    channel: Sequence[int]

    def lengths(self, order: Iterable[int]) -> list[float]:
        """By item the length of the longest path to it; `order` is a topological order."""
        own, channel = self.own, self.channel
        path, since = [0.0] * len(own), [0.0] * len(own)
        for i in order:
            longest = last = 0.0
            num_kernels = 0
            for d in self.needs[i]:
                is_kernel = channel[d] < 0
                num_kernels += is_kernel
                end = path[d] + own[d]
                if end > longest:
                    longest, last = end, since[d] if is_kernel else end
            for d in self.passes[i]:
                if path[d] > longest:
                    longest, last = path[d], since[d]
            path[i] = max(longest, self.together(i, path, last)) if num_kernels > 1 else longest
            since[i] = last
        return path

    def together(self, item: int, path: Sequence[float], since: float) -> float:
        """When all kernels that an item needs can be done one by one, among those that cannot begin before `since`."""
        seen, left = set[int](), [item]
        while left and len(seen) < _STRETCH:
            for d in self.needs[left.pop()]:
                if d not in seen and self.channel[d] < 0 and path[d] >= since:
                    seen.add(d)
                    left.append(d)
        longest = total = 0.0
        for length, d in sorted([(path[d], d) for d in seen], reverse=True):
            total += self.own[d]
            if length + total > longest:
                longest = length + total
        return longest


def _bound_with_kernel(problem: Problem, heads: Sequence[float], tails: Sequence[float], own: Sequence[float]) -> float:
    """The critical path with a long kernel beside it, which runs before, after, or between two kernels of the path; the
    following kernel begins when it is done. The minimum over these places, the maximum over the longest kernels."""
    chain = _chain(problem, heads, tails, own)
    on_chain = set(chain)
    before = [0.0, *(heads[c] + own[c] for c in chain)]
    after = [*(own[c] + tails[c] for c in chain), 0.0]
    others = [k for k, channel in enumerate(problem.channel) if channel < 0 and k not in on_chain]
    longest = 0.0
    for k in nlargest(_LONG, others, key=lambda k: own[k]):
        head, tail = heads[k], tails[k]
        least = min(max(head, b) + own[k] + max(tail, a) for b, a in zip(before, after, strict=True))
        longest = max(longest, least)
    return longest


def _bound_around(problem: Problem, start: int, own: Sequence[float], tail: float) -> float:
    """The kernels that a communication needs, itself, and then its tail, or what its channel has to do after it: each
    other communication of the channel either has all its kernels before this one, on the stream, or begins after it.
    A kernel counts for the first communication that needs it; what others save by merging does not count."""
    seen = {start}

    def kernels_before(item: int) -> float:
        """Seconds of the kernels that an item needs and that have not been seen."""
        total, stack = 0.0, [item]
        while stack:
            for d in problem.deps[stack.pop()]:
                if d not in seen:
                    seen.add(d)
                    stack.append(d)
                    total += own[d] if problem.channel[d] < 0 else 0.0
        return total

    before, beside = kernels_before(start), 0.0
    for c in problem.starts:
        if problem.channel[c] == problem.channel[start] and c not in seen:
            beside += min(kernels_before(c), own[c] - problem.startup[c])
    return before + own[start] + max(beside, tail)


def _chain(problem: Problem, heads: Sequence[float], tails: Sequence[float], own: Sequence[float]) -> list[int]:
    """Kernels along the longest path, each of which needs the previous kernel."""
    channel = problem.channel
    if not own:
        return []
    middle = max(range(len(own)), key=lambda i: (heads[i] + own[i] + tails[i], i))
    chain = [middle]
    while needs := [*(d for d in problem.deps[chain[-1]] if channel[d] < 0), *problem.waits[chain[-1]]]:
        chain.append(max(needs, key=lambda d: (heads[d] + own[d], d)))
    chain.reverse()
    users = problem.users()
    while later := [u for u in users[chain[-1]] if channel[chain[-1]] < 0 or chain[-1] in problem.waits[u]]:
        chain.append(max(later, key=lambda u: (own[u] + tails[u], -u)))
    return [i for i in chain if channel[i] < 0]


def _preemptive_makespan(heads: Sequence[float], work: Sequence[float], tails: Sequence[float]) -> float:
    """The makespan of a machine that always runs, among arrived jobs, that with the longest tail."""
    left = list(work)
    arrivals = sorted(range(len(heads)), key=lambda i: heads[i])
    ready: list[tuple[float, int]] = []
    now, arrival, longest = 0.0, 0, 0.0
    while ready or arrival < len(arrivals):
        if not ready:
            now = max(now, heads[arrivals[arrival]])
        while arrival < len(arrivals) and heads[arrivals[arrival]] <= now:
            heappush(ready, (-tails[arrivals[arrival]], arrivals[arrival]))
            arrival += 1
        tail, i = ready[0]
        until = heads[arrivals[arrival]] if arrival < len(arrivals) else float("inf")
        if now + left[i] <= until:
            now += left[i]
            heappop(ready)
            longest = max(longest, now - tail)
        else:
            left[i] -= until - now
            now = until
    return longest
