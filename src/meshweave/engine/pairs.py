"""Two actions of a device as one: while one would wait for a communication, the other computes.

Each keeps its own order. One runs until it would wait for what it has started since its turn began; then it is the
other's turn. So a communication has at least a turn of the other action to hide under, on every runtime, whatever the
times are, and all devices of a role start communications in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from meshweave.engine.actions import Action, Actions

Item = TypeVar("Item")


def groups_of_actions(actions: Actions) -> Iterator[tuple[Action, ...]]:
    """The actions in order; those that run as one come together."""
    group: tuple[Action, ...] = ()
    for action in actions:
        group = (*group, action)
        if not action.with_next:
            yield group
            group = ()
    if group:
        yield group


def interleave(
    parts: Sequence[Sequence[Item]], started_by: Callable[[Item], Item | None]
) -> Iterator[tuple[int, Item]]:
    """The items of all parts, each with the number of its part. `started_by(item)`: for a wait, the item that started
    what it waits for; None for any other item."""
    places, turn = [0] * len(parts), 0
    begun: dict[tuple[int, Item], int] = {}  # in which turn each item has run
    current = 0
    while any(place < len(part) for place, part in zip(places, parts, strict=True)):
        part = parts[current]
        while places[current] < len(part):
            item = part[places[current]]
            start = started_by(item)
            others = any(p < len(its) for i, (p, its) in enumerate(zip(places, parts, strict=True)) if i != current)
            if start is not None and others and begun.get((current, start)) == turn:
                break
            begun[current, item] = turn
            places[current] += 1
            yield current, item
        current, turn = (current + 1) % len(parts), turn + 1
