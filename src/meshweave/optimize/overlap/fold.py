"""Kernels that depend only on inputs and have a single user run right before it: they form an item with it.

The cast of a parameter's shard belongs to its gather, a recomputed activation to its reader. A scheduler that saw them
separately would run them as early as possible, and fill the memory with values that are not read yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.optimize.overlap.model import Order, Problem


@dataclass(frozen=True, slots=True)
class Folded:
    """`problem` has fewer items; `members[i]` are those of the original problem that item i consists of, in their
    order."""

    problem: Problem
    members: tuple[tuple[int, ...], ...]

    def unfold(self, order: Order) -> list[int]:
        """An order of the folded problem as an order of the original."""
        unfolded_order: list[int] = []
        for x in order:
            if x >= 0:
                unfolded_order += self.members[x]
            else:
                unfolded_order.append(~self.members[~x][-1])
        return unfolded_order


def trivial_fold(problem: Problem) -> Folded:
    """The problem, unchanged."""
    return Folded(problem, tuple((i,) for i in range(problem.num_items)))


def fold(problem: Problem) -> Folded:
    """An item for each kernel or start with everything folded into it. Kernels longer than the mean stay separate."""
    users, seconds, deps = problem.users(), problem.seconds, problem.deps
    kernels = [s for s, c in zip(seconds, problem.channel, strict=True) if c < 0]
    light = sum(kernels) / max(len(kernels), 1)
    into: dict[int, int] = {}
    inside: dict[int, list[int]] = {}
    for i, (own, channel, waits) in enumerate(zip(seconds, problem.channel, problem.waits, strict=True)):
        if channel >= 0 or own > light or waits or not users[i]:
            continue
        user = users[i][0]
        if any([u != user for u in users[i]]) or any([into.get(d) != i for d in deps[i]]):
            continue
        into[i] = user
        inside.setdefault(user, []).extend((*inside.get(i, ()), i))
    kept = [i for i in range(problem.num_items) if i not in into]
    number = {i: n for n, i in enumerate(kept)}
    members = tuple((*sorted(inside[i]), i) if i in inside else (i,) for i in kept)
    folded = Problem(sizes=problem.sizes, kept=problem.kept, before=problem.before, channels=problem.channels)
    for name in ("names", "channel", "copy", "host", "startup", "usage", "is_waited"):
        values = getattr(problem, name)
        setattr(folded, name, [values[i] for i in kept])
    folded.waits = [tuple([number[c] for c in problem.waits[i]]) if problem.waits[i] else () for i in kept]
    counts = problem.counts()
    for i, group in zip(kept, members, strict=True):
        if len(group) == 1:
            folded.seconds.append(seconds[i])
            folded.deps.append(tuple([number[d] for d in deps[i]]))
            folded.allocs.append(problem.allocs[i])
            folded.uses.append(problem.uses[i])
            continue
        folded.seconds.append(sum([seconds[m] for m in group]))
        folded.deps.append(tuple([number[d] for d in deps[i] if d not in group]))
        folded.allocs.append(tuple(s for m in group for s in problem.allocs[m] if counts[s] or m == i))
        folded.uses.append(tuple(dict.fromkeys(s for m in group for s in problem.uses[m])))
    folded.order = [number[x] if x >= 0 else ~number[~x] for x in problem.order if x < 0 or x in number]
    return Folded(folded, members)
