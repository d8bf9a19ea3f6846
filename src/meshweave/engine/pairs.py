"""Two actions of a device as one: while one would wait for a communication, the other computes.

Each keeps its own order; they take turns. A turn ends where its action would wait for a communication that is still on
its way, by the times of a machine, if the other action has something to compute. All devices of a role take the same
turns, so that they start communications in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from meshweave.engine.actions import Action, Actions

Item = TypeVar("Item")
# The turns of a pair, in order: which of the two actions, and the wait before which its turn ends ("": at its end).
PairTurns = tuple[tuple[int, str], ...]
PairKey = tuple[Any, ...]  # a role, and the sections and stage of each of its actions that run as one
_WIDTH = 32  # orders that are followed at a time


@dataclass(frozen=True, slots=True)
class PairedItem:
    """What an action runs: its seconds; of a start those of its communication, of a wait the name of its start."""

    name: str
    seconds: float = 0.0
    communication: float | None = None
    start: str = ""


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


def key_of_pair(role: int, group: Sequence[Action]) -> PairKey:
    """What tells pairs apart: all of a key take the same turns."""
    return (role, *((action.kinds, action.stage) for action in group))


def turns_of_pair(parts: Sequence[Sequence[PairedItem]]) -> PairTurns:
    """The turns of actions that run as one. Communications of a device run one after the other, as on a channel.

    Several orders are followed at a time: those that have idled least, and in which most of what is still to be sent by
    one action has compute of the others to hide under."""
    runs = [_runs_of(part) for part in parts]
    states = [_State((0,) * len(parts), 0.0, 0.0, ({},) * len(parts))]
    for _ in range(sum(map(len, runs))):
        reached = [following for state in states for following in state.following(runs)]
        states = sorted(reached, key=lambda state: state.bound(runs))[:_WIDTH]
    return states[0].turns(runs)


@dataclass(frozen=True, slots=True)
class _Span:
    """What an action runs from a wait (`name`; it waits for `start`) to the next: compute, and communications that
    begin after so many seconds of it. `compute` and `communication` are those from here to the action's end."""

    name: str
    start: str
    seconds: float
    begins: tuple[tuple[float, str, float], ...]
    compute: float
    communication: float


def _runs_of(part: Sequence[PairedItem]) -> list[_Span]:
    rows: list[list[PairedItem]] = [[]]
    for item in part:
        if item.start:
            rows.append([])
        rows[-1].append(item)
    spans: list[_Span] = []
    compute = communication = 0.0
    for row in reversed(rows):
        seconds, begins = 0.0, list[tuple[float, str, float]]()
        for item in row:
            seconds += item.seconds
            if item.communication is not None:
                begins.append((seconds, item.name, item.communication))
        compute += seconds
        communication += sum(took for _, _, took in begins)
        head = row[0] if row and row[0].start else PairedItem("")
        spans.append(_Span(head.name, head.start, seconds, tuple(begins), compute, communication))
    return spans[::-1]


@dataclass(frozen=True, slots=True)
class _State:
    """How far each action is, at what time, until when the channel is busy, and when what each has begun arrives."""

    places: tuple[int, ...]
    now: float
    channel: float
    arrivals: tuple[dict[str, float], ...]
    before: _State | None = None
    part: int = 0

    def following(self, runs: Sequence[Sequence[_Span]]) -> Iterator[_State]:
        """The states after another span of one of the actions."""
        for part, (place, spans) in enumerate(zip(self.places, runs, strict=True)):
            if place == len(spans):
                continue
            span, arrivals, channel = spans[place], dict(self.arrivals[part]), self.channel
            begin = max(self.now, arrivals.pop(span.start, 0.0))
            for after, name, took in span.begins:
                channel = max(channel, begin + after) + took
                arrivals[name] = channel
            places = tuple(at + (number == part) for number, at in enumerate(self.places))
            rest = tuple(arrivals if number == part else its for number, its in enumerate(self.arrivals))
            yield _State(places, begin + span.seconds, channel, rest, self, part)

    def bound(self, runs: Sequence[Sequence[_Span]]) -> float:
        """When all will have ended, if the rest hides as well as it can."""
        rest = [spans[at] for spans, at in zip(runs, self.places, strict=True) if at < len(spans)]
        compute = sum(span.compute for span in rest)
        exposed = (max(0.0, span.communication - (compute - span.compute)) for span in rest)
        return self.now + compute + sum(exposed)

    def turns(self, runs: Sequence[Sequence[_Span]]) -> PairTurns:
        """The turns that have led here."""
        turns: list[tuple[int, str]] = []
        state, following = self, -1
        while state.before is not None:
            if state.part != following:
                at = state.places[state.part]
                spans = runs[state.part]
                turns.append((state.part, spans[at].name if at < len(spans) else ""))
            following = state.part
            state = state.before
        return tuple(reversed(turns))


def pieces_of(part: Sequence[Item], stops: Sequence[str], name_of: Callable[[Item], str]) -> list[list[Item]]:
    """What an action runs, cut before each of the items with these names, in order. The last stop, "", is its end."""
    pieces, waiting = [list[Item]()], [*stops]
    for item in part:
        if waiting and waiting[0] and name_of(item) == waiting[0]:
            waiting.pop(0)
            pieces.append([])
        pieces[-1].append(item)
    return pieces


def in_turns(
    parts: Sequence[Sequence[Item]], turns: PairTurns, name_of: Callable[[Item], str]
) -> Iterator[tuple[int, Item]]:
    """The items of all actions of a pair in these turns, each with the number of its action."""
    pieces = [
        iter(pieces_of(part, [stop for which, stop in turns if which == number], name_of))
        for number, part in enumerate(parts)
    ]
    for number, _ in turns:
        for item in next(pieces[number], ()):
            yield number, item
