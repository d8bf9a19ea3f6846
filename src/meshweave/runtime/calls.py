"""Which calls that communicate a process makes, in order. Ranks that call different things (evaluate on one rank alone,
a loop that one rank leaves early) are an error on every rank, before their communications meet.

A call is numbered and kept here; the watch posts the last ones with its heartbeat and compares them with its
neighbour's (`runtime/watch.py`). A call that is like the one before costs no message. Any other meets: it waits until
all ranks are at this number with the same call, so that none of its communications begins beside those of another call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from meshweave.interop.process_groups import default_store
from meshweave.runtime.consensus import named

KEPT = 8  # calls that a rank posts: more than ranks run ahead of each other
_SHORTEST_PAUSE, _LONGEST_PAUSE = 5e-5, 0.02  # seconds between two looks at the store
_HINTS = {
    True: "let all ranks leave the loop together: share the decision (torch.distributed.broadcast, all_reduce), give "
    "every rank as many batches (drop_last=True), and call save, evaluate and the like on every rank",
    False: "mw.compile, step, evaluate, forward_only, save, async_save, load, parameters and, with sharded parameters, "
    "model(x) communicate: call them on every rank, in the same order, not under `if rank == 0`; print and write files "
    "there",
}


@dataclass(frozen=True, slots=True)
class Posted:
    """What a rank posts: how many calls it has begun, whether it is in the last one, whether its script has ended, and
    the last calls as text."""

    num: int = 0
    is_inside: bool = False
    calls: tuple[Any, ...] = ()
    has_ended: bool = False

    @staticmethod
    def read(value: Mapping[str, Any]) -> Posted:
        return Posted(value["num"], value["inside"], tuple(value["calls"]), value["ended"])

    def write(self) -> dict[str, Any]:
        calls = [_text(call) for call in self.calls]
        return {"num": self.num, "inside": self.is_inside, "calls": calls, "ended": self.has_ended}

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
        return other.num + 1 if other.has_ended and self.is_inside and other.num < self.num else None


def _text(call: Any) -> str:
    if isinstance(call, str):
        return call
    name, detail = call
    return f"{name} ({', '.join(f'{key} {list(shape)}' for key, shape in detail)})" if detail else str(name)


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
            self.now = Posted(now.num, False, now.calls)

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
    by_call: dict[str, list[int]] = {}
    for rank, its in posted.items():
        by_call.setdefault(_state_at(num, its), []).append(rank)
    shown = "; ".join(f"{named(ranks)}: {text}" for text, ranks in by_call.items())
    has_ended = any(its.has_ended and its.num < num for its in posted.values())
    what = "a rank has ended its script while others go on" if has_ended else "ranks call different things"
    return {"what": what, "got": f"call {num} that communicates is {shown}", "hint": _HINTS[has_ended], "rank": -1}


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
