"""Which communicating calls a process makes, in order.

Ranks that make different calls (evaluate on a single rank, a loop that a rank leaves early) are an error on every rank,
before their communications meet. Each call is numbered and recorded here; the watch posts the latest calls with its
heartbeat and compares them with its neighbour's (`runtime/watch.py`). A call equal to the previous call costs no
message. Any other call meets: it waits until all ranks are at this number with the same call, so that its
communications never overlap those of another call. Decisions inside a call that depend on a rank's own knowledge (which
program it runs; whether it compiles again for modes, options or parameters that have changed) are choices of the call,
which are posted, compared and met in the same way.
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
from meshweave.runtime.lifelines import Lifelines

KEPT = 8  # calls that a rank posts: more than ranks run ahead of each other
_SHORTEST_PAUSE, _LONGEST_PAUSE = 5e-5, 0.02  # seconds between two polls of the store
_WHAT = {
    "ended": "a rank has ended its script while others go on",
    "calls": "ranks call different things",
    "sizes": "ranks pass batches of different sizes",
    "choices": "ranks choose differently within a call: model, optimizer or batch have changed on some ranks only",
}
_HINTS = {
    "ended": "let all ranks leave the loop together: share the decision (torch.distributed.broadcast, all_reduce), "
    "give every rank as many batches (drop_last=True), and call save, evaluate and the like on every rank",
    "calls": "mw.compile, step, evaluate, forward_only, save, async_save, load, parameters and, with sharded "
    "parameters, model(x) communicate: call them on every rank, in the same order, not under `if rank == 0`; print and "
    "write files there",
    "sizes": "give every rank as many rows (drop_last=True), padded to the same length on all ranks: to a fixed "
    "length, or to that of the longest on any rank",
    "choices": "train(), eval(), requires_grad_(), options of the optimizer, shapes of batches, and writes to "
    "parameters, buffers and optimizer state (also swaps with their average) must be the same on every "
    "rank: not under `if rank == 0`, and decided by values that all ranks have (broadcast them)",
}


@dataclass(frozen=True, slots=True)
class Posted:
    """What a rank posts: how many calls it has begun, whether it is in the latest call, the latest calls as text, the
    latest call's choice, whether the script has ended, and the exception that ended it."""

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
        """The call of that number as text; None if it is not among those posted."""
        index = num - self.num + len(self.calls) - 1
        return _text(self.calls[index]) if 0 <= index < len(self.calls) else None

    def differs_from(self, other: Posted) -> int | None:
        """The first call that differs from that of `other`, or that `other` has ended without; None if there is
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
    """What detects failures of other ranks: a `Watch`."""

    @property
    def has_failed(self) -> bool: ...

    def check(self) -> None: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...


class Calls:
    """The calls of this process. `now` is replaced by each call, so that another thread reads it atomically."""

    def __init__(self, store: Any, rank: int, num_ranks: int, lifelines: Lifelines | None = None) -> None:
        self.store, self.rank, self.num_ranks, self.lifelines = store, rank, num_ranks, lifelines
        self.now = Posted()
        self.watches: list[Health] = []  # of the worlds that are open
        self.failure: dict[str, Any] | None = None  # the first of any world of this job: its ranks do not end together
        self._before: tuple[str, Any] = ("", ())
        # for each name of a call, the choice of the latest call of that name
        self._chosen: dict[str, tuple[str, ...]] = {}
        self._met = ""

    @contextmanager
    def call(self, name: str, detail: Any, is_compared: bool, check: Callable[[], None]) -> Iterator[None]:
        """A call that communicates. `detail` are the shapes of its batch by name; `is_compared`: the call itself
        compares those first, so that a different detail needs no meeting. `check` raises once a rank has failed."""
        is_like_the_last = self._before == (name, detail) or (is_compared and self._before[0] == name)
        shown = (name, () if is_compared else detail)
        with self._posted(name, detail, shown) as num:
            if not is_like_the_last:
                self._meet(f"{num}/{_text(shown)}", check)
            yield

    def choose(self, choice: str, check: Callable[[], None]) -> None:
        """This rank's choice in the current call. A choice that differs from that of the previous call of the same name
        meets; ranks with different choices are an error on every rank, before a communication that depends on the
        choice."""
        now, name = self.now, self._before[0]
        chosen = (*now.choices, choice)
        self.now = replace(now, choices=chosen)
        if self._chosen.get(name, ())[: len(chosen)] != chosen:
            self._chosen[name] = chosen
            self._meet(f"{now.num}.{len(chosen)}/{choice}", check)

    @contextmanager
    def exchange(self, name: str) -> Iterator[Callable[[], None]]:
        """A call in which ranks meet only through the store (`runtime/consensus.py`), however long a rank takes: it has
        no meeting of its own. Yields a check that raises, while they wait, once a healthy world sees that a rank has
        failed or is in another call. Inside another call it is part of that call. Worlds created in it end if it
        fails."""
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
            for watch in [watch for watch in sound if watch.has_failed]:
                watch.settle()  # this process may end with the error, and the store with it
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
        """Wait until every rank is at this call. The key of the previous meeting, which all have left, is deleted."""
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
    """The error of ranks that make different calls, from what each has posted: parts of an error. `num` is the first
    call that differs."""
    ended = {rank: its for rank, its in posted.items() if its.has_ended and its.num < num}
    states = {rank: _state_at(num, its) for rank, its in posted.items()}
    kind = "ended" if ended else "sizes" if _differ_in_sizes(num, posted) else "calls"
    if len(set(states.values())) == 1:
        kind = "choices"
        states = {rank: f"{text}, which {_choice_at(num, rank, posted)}" for rank, text in states.items()}
    by_state: dict[str, list[int]] = {}
    for rank, state in states.items():
        by_state.setdefault(state, []).append(rank)
    shown = "; ".join(f"{named(ranks)}: {text}" for text, ranks in by_state.items())
    raised = [f"rank {rank} by {its.ended_by}" for rank, its in ended.items() if its.ended_by]
    got = f"call {num} that communicates is {shown}" + (f"; ended {', '.join(raised)}" if raised else "")
    hint = f"fix what {raised[0].partition(' by ')[0]} raises" if raised else _HINTS[kind]
    return {"what": _WHAT[kind], "got": got, "hint": hint, "rank": -1}


def _differ_in_sizes(num: int, posted: Mapping[int, Posted]) -> bool:
    """Whether all ranks make the same call, with batches of different sizes."""
    calls = [(its.at(num) or "").partition(" (") for its in posted.values()]
    return len({name for name, _, _ in calls}) == 1 and all(sizes for _, _, sizes in calls)


def uncaught_exception() -> str:
    """The exception that ends this script, as text; empty if none does. Python records it when it prints it."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # Python 3.12 and later
    return "" if error is None else f"{type(error).__name__}: {error}".rstrip(": ")


def _choice_at(num: int, rank: int, posted: Mapping[int, Posted]) -> str:
    """A rank's choice in its call `num`, where ranks first differ."""
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


_CALLS: WeakKeyDictionary[Any, Calls] = WeakKeyDictionary()  # by the store of a job, as torch stores its groups


def has_failed_world() -> bool:
    """Whether a world of this process's job has failed."""
    calls = _CALLS.get(default_store())
    return calls is not None and calls.failure is not None


def calls_of_job() -> Calls:
    """The calls of this process in the current torch.distributed job: those of all its worlds."""
    store = default_store()
    if store not in _CALLS:
        prefixed = PrefixStore("meshweave/calls", store)
        lifelines = Lifelines(PrefixStore("meshweave/lines", store), dist.get_rank())
        _CALLS[store] = Calls(prefixed, dist.get_rank(), dist.get_world_size(), lifelines)
    return _CALLS[store]
