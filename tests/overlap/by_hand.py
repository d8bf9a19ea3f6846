"""Problems written by hand, item by item."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meshweave.optimize.overlap.model import Problem


@dataclass(frozen=True, slots=True)
class Entry:
    """A kernel of `seconds`, or (with a `channel`) the start of a communication of `copy` seconds. `needs` are names of
    earlier items: of a communication that it is complete."""

    name: str
    needs: tuple[str, ...] = ()
    seconds: float = 0.0
    channel: str = ""
    copy: float = 0.0


def kernel(name: str, seconds: float, *needs: str) -> Entry:
    return Entry(name, needs, seconds)


def communication(name: str, copy: float, *needs: str, channel: str = "a") -> Entry:
    return Entry(name, needs, channel=channel, copy=copy)


def problem_of(*entries: Entry) -> Problem:
    """Every communication is waited for, and occupies its own link; items have no storages."""
    problem = Problem(channels=sorted({e.channel for e in entries if e.channel}))
    numbers = {entry.name: i for i, entry in enumerate(entries)}
    for entry in entries:
        needs = tuple(numbers[name] for name in entry.needs)
        problem.names.append(entry.name)
        problem.seconds.append(entry.seconds)
        problem.deps.append(needs)
        problem.waits.append(tuple(i for i in needs if problem.channel[i] >= 0))
        problem.channel.append(problem.channels.index(entry.channel) if entry.channel else -1)
        problem.copy.append(entry.copy)
        problem.host.append(0.0)
        problem.startup.append(0.0)
        problem.usage.append(((entry.channel, 1.0),) if entry.channel else ())
        problem.allocs.append(())
        problem.uses.append(())
        problem.is_waited.append(bool(entry.channel))
    problem.order = list(range(problem.num_items))
    return problem


def named(problem: Problem, order: Sequence[int]) -> list[str]:
    """An order as text: `~x` is the wait for x."""
    return [problem.names[x] if x >= 0 else f"~{problem.names[~x]}" for x in order]


def all_orders(problem: Problem, done: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every order of the items after their dependencies, without waits."""
    if len(done) == problem.num_items:
        yield done
    for i in range(problem.num_items):
        if i not in done and set(problem.deps[i]) <= set(done):
            yield from all_orders(problem, (*done, i))
