"""Which calls that communicate a process makes, in order. Ranks that call different things (evaluate on one rank alone,
a loop that one rank leaves early) are an error on every rank, before their communications meet.

A call is numbered and kept here; the watch posts the last ones with its heartbeat and compares them with its
neighbour's (`runtime/watch.py`). A call that is like the one before costs no message. Any other meets: it waits until
all ranks are at this number with the same call, so that none of its communications begins beside those of another call.

What a call goes on to do by what its rank alone knows (which program it runs, that it compiles another for modes,
options or parameters that have changed) is a choice in it, which is posted, compared and met in the same way.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from meshweave.capture.batch import shapes_text
from meshweave.interop.process_groups import default_store
from meshweave.runtime.consensus import named

KEPT = 8  # calls that a rank posts: more than ranks run ahead of each other
_SHORTEST_PAUSE, _LONGEST_PAUSE = 5e-5, 0.02  # seconds between two looks at the store
_WHAT = {
    "ended": "a rank has ended its script while others go on",
    "calls": "ranks call different things",
    "choices": "ranks make one call of different things: model, optimizer or batch have changed on some alone",
}
_HINTS = {
    "ended": "let all ranks leave the loop together: share the decision (torch.distributed.broadcast, all_reduce), "
    "give every rank as many batches (drop_last=True), and call save, evaluate and the like on every rank",
    "calls": "mw.compile, step, evaluate, forward_only, save, async_save, load, parameters and, with sharded "
    "parameters, model(x) communicate: call them on every rank, in the same order, not under `if rank == 0`; print and "
    "write files there",
    "choices": "train(), eval(), requires_grad_(), options of the optimizer and shapes of batches change on every rank "
    "alike, and parameters, buffers and optimizer state are written there (swapped for their average, too): not under "
    "`if rank == 0`, and by what all ranks know (broadcast it)",
}


@dataclass(frozen=True, slots=True)
class Posted:
    """What a rank posts: how many calls it has begun, whether it is in the last one, the last calls as text, what the
    last one has chosen to do, whether the script has ended, and the exception that ended it."""

    num: int = 0
    is_inside: bool = False
    calls: tuple[Any, ...] = ()
    has_ended: bool = False
    choices: tuple[str, ...] = ()
    ended_by: str = ""

    @staticmethod
    def read(value: Mapping[str, Any]) -> Posted:
        calls, choices = tuple(value["calls"]), tuple(value["choices"])
        return Posted(value["num"], value["inside"], calls, value["ended"], choices, value["ended_by"])

    def write(self) -> dict[str, Any]:
        return {
            "num": self.num,
            "inside": self.is_inside,
            "calls": [_text(call) for call in self.calls],
            "ended": self.has_ended,
            "choices": self.choices,
            "ended_by": self.ended_by,
        }

    def at(self, num: int) -> str | None:
        """The call of that number as text; None where it is not among those posted."""
        index = num - self.num + len(self.calls) - 1
        return _text(self.calls[index]) if 0 <= index < len(self.calls) else None

    def differs_from(self, other: Posted) -> int | None:
        """The first call that is another than that of `other`, or that `other` has ended without; None where there is
        none."""
        for num in range(max(1, self.num - KEPT + 1), self.num + 1):
            mine, its = self.at(num), other.at(num)
            if mine is not None and its is not None and mine != its:
                return num
        if self.num == other.num and any(a != b for a, b in zip(self.choices, other.choices, strict=False)):
            return self.num
        return other.num + 1 if other.has_ended and self.is_inside and other.num < self.num else None


def _text(call: Any) -> str:
    if isinstance(call, str):
        return call
    name, detail = call
    return f"{name} ({shapes_text(detail)})" if detail else str(name)


class Health(Protocol):
    """What sees failures of other ranks: a `Watch`."""

    @property
    def has_failed(self) -> bool: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class Calls:
    """The calls of this process. `now` is replaced by each, so that another thread reads it whole."""

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self.store, self.rank, self.num_ranks = store, rank, num_ranks
        self.now = Posted()
        self.watches: list[Health] = []  # those of the worlds that are open
        self._before: tuple[str, Any] = ("", ())
        self._chosen: dict[str, tuple[str, ...]] = {}  # by the name of a call what the last of that name chose
        self._met = ""

    @contextmanager
    def call(self, name: str, detail: Any, is_compared: bool, check: Callable[[], None]) -> Iterator[None]:
        """One call that communicates. `detail` are the shapes of its batch by name; `is_compared` says that the call
        itself compares those first, so that another detail alone needs no meeting. `check` raises once a rank has
        failed."""
        is_like_the_last = self._before == (name, detail) or (is_compared and self._before[0] == name)
        shown = (name, () if is_compared else detail)
        with self._posted(name, detail, shown) as num:
            if not is_like_the_last:
                self._meet(f"{num}/{_text(shown)}", check)
            yield

    def choose(self, choice: str, check: Callable[[], None]) -> None:
        """What this rank's call goes on to do. Another choice than in the last call of that name meets; ranks with
        different ones are an error on every rank, before a communication that depends on it."""
        now, name = self.now, self._before[0]
        chosen = (*now.choices, choice)
        self.now = replace(now, choices=chosen)
        if self._chosen.get(name, ())[: len(chosen)] != chosen:
            self._chosen[name] = chosen
            self._meet(f"{now.num}.{len(chosen)}/{choice}", check)

    @contextmanager
    def exchange(self, name: str) -> Iterator[Callable[[], None]]:
        """A call in which ranks meet through the store alone (`runtime/consensus.py`), however long one of them takes:
        it has no meeting of its own. Gives what raises, while they wait, once a rank is seen to have failed, or to be
        in another call, by a world that is sound now. Inside another call it is part of that. Worlds that are made in
        it end with its failure."""
        before = tuple(self.watches)
        sound = [watch for watch in before if not watch.has_failed]

        def check() -> None:
            for watch in sound:
                watch.check()

        try:
            with nullcontext() if self.now.is_inside else self._posted(name, (), (name, ())):
                yield check
        except BaseException:
            for watch in [watch for watch in self.watches if watch not in before]:
                watch.close()
            raise

    @contextmanager
    def _posted(self, name: str, detail: Any, shown: Any) -> Iterator[int]:
        self._before = (name, detail)
        now = self.now = Posted(self.now.num + 1, True, (*self.now.calls[1 - KEPT :], shown))
        try:
            yield now.num
        finally:
            self.now = replace(self.now, is_inside=False)

    def _meet(self, key: str, check: Callable[[], None]) -> None:
        """Wait until every rank is at this call. The key of the meeting before, where all have been, is deleted."""
        num_here, pause = self.store.add(key, 1), _SHORTEST_PAUSE
        while num_here < self.num_ranks:
            check()
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
            num_here = self.store.add(key, 0)
        if self.rank == 0 and self._met:
            self.store.delete_key(self._met)
        self._met = key


def failure_of(num: int, posted: Mapping[int, Posted]) -> dict[str, Any]:
    """What ranks that call different things fail with, by what each has posted: parts of an error. `num` is the first
    call that differs."""
    ended = {rank: its for rank, its in posted.items() if its.has_ended and its.num < num}
    states = {rank: _state_at(num, its) for rank, its in posted.items()}
    kind = "ended" if ended else "calls"
    if len(set(states.values())) == 1:
        kind = "choices"
        states = {rank: f"{text}, which {_choice_at(num, rank, posted)}" for rank, text in states.items()}
    by_state: dict[str, list[int]] = {}
    for rank, state in states.items():
        by_state.setdefault(state, []).append(rank)
    shown = "; ".join(f"{named(ranks)}: {text}" for text, ranks in by_state.items())
    raised = [f"rank {rank} by {its.ended_by}" for rank, its in ended.items() if its.ended_by]
    got = f"call {num} that communicates is {shown}" + (f"; ended {', '.join(raised)}" if raised else "")
    hint = f"mend what {raised[0].partition(' by ')[0]} raises" if raised else _HINTS[kind]
    return {"what": _WHAT[kind], "got": got, "hint": hint, "rank": -1}


def uncaught_exception() -> str:
    """The exception that ends this script, as text; nothing where none does. Python notes it as it prints it."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # the former from Python 3.12 on
    return "" if error is None else f"{type(error).__name__}: {error}".rstrip(": ")


def _choice_at(num: int, rank: int, posted: Mapping[int, Posted]) -> str:
    """What a rank has chosen in its call `num`, where ranks differ first."""
    if posted[rank].num > num:
        return "is past that"
    all_choices = [its.choices for its in posted.values() if its.num == num]
    index = next(i for i in range(KEPT) if len({choices[i] for choices in all_choices if len(choices) > i}) != 1)
    mine = posted[rank].choices
    return mine[index] if len(mine) > index else "has chosen nothing yet"


def _state_at(num: int, posted: Posted) -> str:
    call = posted.at(num)
    if call is not None:
        return call
    if posted.num > num:
        return f"past, now in call {posted.num} ({posted.at(posted.num)})"
    last = f"call {posted.num} ({posted.at(posted.num)})" if posted.num else "no call"
    return f"never, its script has ended after {last}" if posted.has_ended else f"not begun, after {last}"


_CALLS: WeakKeyDictionary[Any, Calls] = WeakKeyDictionary()  # by the store of a job, as torch keeps its groups


def calls_of_job() -> Calls:
    """The calls of this process in the job that torch.distributed is of: those of all its worlds."""
    store = default_store()
    if store not in _CALLS:
        prefixed = PrefixStore("meshweave/calls", store)
        _CALLS[store] = Calls(prefixed, dist.get_rank(), dist.get_world_size())
    return _CALLS[store]
