"""Parts of a step in a problem: which items stay before the beginning of a part, and which after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshweave.problem.problem import Problem


def begin(phase: str, *needed: Any) -> None:
    """Marks where a part of the step begins; its operands are available by then."""
    raise AssertionError("a fence is removed before the graph is run")


def hold_fences(problem: Problem, fences: Sequence[tuple[int, bool]]) -> None:
    """Keep items on their side of the fences, which are items themselves, in order, each with whether gathers may pass
    it."""
    first = -1
    for fence, gathers_pass in fences:
        _hold(problem, first, fence, gathers_pass)
        first = fence


def _hold(problem: Problem, first: int, fence: int, gathers_pass: bool) -> None:
    """Keep item `fence` after all items from `first` on that precede it, and before all later items.

    Kernels that depend only on inputs and have a single user, as the cast of a parameter before its gather, stay with
    that user: if they were fenced themselves, they could not be folded. `gathers_pass`: communications that depend on
    nothing else may start before the fence.
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
