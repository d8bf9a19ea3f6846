"""Parts of a step in a problem: what stays before the beginning of a part, and what behind it."""

from __future__ import annotations

from collections.abc import Sequence

from meshweave.problem.problem import Problem


def hold_fences(problem: Problem, fences: Sequence[tuple[int, bool]]) -> None:
    """Let items stay on their side of the fences, which are items themselves, in order, each with whether gathers may
    pass it."""
    first = -1
    for fence, gathers_pass in fences:
        _hold(problem, first, fence, gathers_pass)
        first = fence


def _hold(problem: Problem, first: int, fence: int, gathers_pass: bool) -> None:
    """Let item `fence` stand behind all after item `first`, and before all behind it.

    Kernels that need nothing but inputs and lead to one other item, as the cast of a parameter to its gather, go with
    that: held themselves, they could be folded into nothing. `gathers_pass`: communications that need no more than that
    may start before the fence.
    """
    users: list[set[int]] = [set() for _ in problem.names]
    for i, (deps, waits) in enumerate(zip(problem.deps, problem.waits, strict=True)):
        for d in (*deps, *waits):
            users[d].add(i)
    last = (i for i in range(first + 1, fence) if all(u > fence for u in users[i]))
    problem.deps[fence] = tuple(sorted({*problem.deps[fence], *last}))
    loose = set[int]()
    for i in range(fence + 1, problem.num_items):
        deps = problem.deps[i]
        passes = gathers_pass if problem.channel[i] >= 0 else len(users[i]) == 1
        if passes and not problem.waits[i] and all(d in loose for d in deps):
            loose.add(i)
        elif all(d < fence or d in loose for d in deps):
            problem.deps[i] = tuple(sorted({*deps, fence}))
