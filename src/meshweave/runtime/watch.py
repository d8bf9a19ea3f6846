"""Failure detection: the first failure of a process becomes known to all others within seconds.

Each process has one daemon thread with its own connection to the job's store. It polls for a declared failure, posts
its calls with a heartbeat, and watches its neighbour in the ring of ranks: those calls, and whether its process lives.
So the store serves a constant number of requests per process, and any set of dead processes has a live neighbour. A
process is dead when its kernel closes its lifeline (`runtime/lifelines.py`), however long it is silent: it may be slow,
stopped, or own the interpreter lock. Only without a lifeline its heartbeat tells, after the timeout of a collective.

A step fails on all ranks (a loss that is not finite) or on some. A failing rank waits briefly for the others to fail at
the same point; if they do, nothing is broken and the job continues. If not, it declares its failure.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from meshweave.errors import StepError
from meshweave.runtime.calls import Calls, Posted, failure_of, uncaught_exception
from meshweave.runtime.consensus import named

# Seconds. A failure is known everywhere after LOCKSTEP + POLL, a killed process after 2 * POLL.
POLL = 0.25
BEAT = 1.0
LOCKSTEP = 2.0  # how long a failing rank waits for the others to fail at the same point
SUSPECT = 3.5  # how long others have to say which process has ended, once a connection has broken
LINGER = 5.0  # how long rank 0, which often hosts the store, waits at its end for the others
SLOW_POLL = 0.25  # between two looks at ranks that are behind
_MAX_TEXT = 4000


class Watch:
    """A process's view of the health of all. `on_failure` is called once, on any thread; `release(is_end)` when the
    watch closes after a failure, at the end of the process or before: it must end what waits for other ranks.
    `timeout_seconds`: that of a collective. `store` must be a name space of its own. Every process creates its watches
    in the same order."""

    def __init__(
        self,
        store: Store,
        calls: Calls,
        on_failure: Callable[[], None],
        release: Callable[[bool], None] = lambda is_end: None,
        timeout_seconds: float = 300.0,
    ) -> None:
        self.rank, self.num_ranks, self.calls = calls.rank, calls.num_ranks, calls
        # Its own connection: if the main thread blocked in a shared connection, the watch would block, too.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._on_failure, self._release, self._timeout = on_failure, release, timeout_seconds
        self._failure: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._beat, self._posted, self._has_ended = 0, calls.now, False
        self._post(calls.now)
        self._thread = threading.Thread(target=self._run, name="meshweave-watch", daemon=True)
        self._thread.start()
        calls.watches.append(self)
        atexit.register(self.close, LINGER)

    # the failure, if any

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def error(self) -> StepError:
        """The first failure, as the other ranks report it."""
        assert self._failure is not None
        return StepError(
            self._failure["what"],
            where=f"seen by rank {self.rank}",
            got=self._failure["got"],
            hint=self._failure.get("hint", "the job cannot continue: restart it from its last checkpoint"),
        )

    def check(self) -> None:
        """Raises StepError when some process has failed."""
        if self._failure is not None:
            raise self.error()

    def is_own(self) -> bool:
        """Whether the failure is this rank's own."""
        return self._failure is not None and self._failure["rank"] == self.rank

    def declare(self, what: str, got: str, rank: int) -> None:
        """Declare a failure of `rank`, unless another is declared already: the first counts."""
        self._declare({"what": what, "got": got[:_MAX_TEXT], "rank": rank})

    def _declare(self, failure: dict[str, Any]) -> None:
        text = json.dumps(failure)
        try:
            first = self._store.compare_set("first", "", text)
        except RuntimeError:  # the store is gone as well, and this process is on its own
            first = text.encode()
        self._fail(json.loads(first))

    def agree(self, point: str) -> bool:
        """Whether every rank reaches this `point` within LOCKSTEP seconds and none declares a failure."""
        end = time.monotonic() + LOCKSTEP
        try:
            self._store.add(f"at/{point}", 1)
            while not self.has_failed and time.monotonic() < end:
                if self._store.add(f"at/{point}", 0) >= self.num_ranks:
                    return True
                time.sleep(0.02)
        except RuntimeError:
            self._lost_store()
        return False

    def declare_silent(self) -> None:
        """After a broken connection: declare the process that has ended, unless another rank does; if none has, declare
        the connection."""
        try:
            seen = self._beats()
            posted = [_posted(beat) for beat in seen]
            if any(self._differs(its) for its in posted):
                return
            ended = [rank for rank, its in enumerate(posted) if its.has_ended]
            if ended:
                self._declare_gone(ended[0])
            self._until(lambda: self.has_failed or self._declares_dead(), SUSPECT)
            now = seen if self.has_failed else self._beats()
        except RuntimeError:
            self._lost_store()
            return
        silent = [r for r in range(self.num_ranks) if r != self.rank and seen[r] == now[r]]
        if not self.has_failed and silent:
            self.declare(
                f"{named(silent)} does not answer, and a connection has broken",
                f"nothing in {SUSPECT:g} s, as rank {self.rank} found",
                silent[0],
            )

    def settle(self) -> None:
        """Called with the failure known. Rank 0 waits until the others know it, because the store may end with it."""
        if self.rank == 0:
            with suppress(RuntimeError):
                self._until(lambda: self._store.add("seen", 0) >= self.num_ranks, LOCKSTEP)

    def close(self, linger: float = 0.0) -> None:
        """Stop watching. While nothing has failed, rank 0 waits for the others to stop: up to `linger` seconds, and up
        to the timeout of a collective for live processes that have not ended its last call yet."""
        if self._stop.is_set():
            return
        atexit.unregister(self.close)
        self.calls.watches.remove(self)
        with suppress(RuntimeError):  # the store ended first
            self._has_ended = linger > 0
            self._post(self._mine)
            self._store.set(f"closed/{self.rank}", "")
            if self.rank == 0 and linger:
                self._await_others(linger)
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2 * POLL)
        if self.has_failed:
            self._release(linger > 0)

    def _await_others(self, linger: float) -> None:
        others = [f"closed/{rank}" for rank in range(1, self.num_ranks)]
        begun = time.monotonic()
        while not self.has_failed and not self._store.check(others) and time.monotonic() - begun < self._timeout:
            has_slow = any([self._is_behind(rank) for rank in range(1, self.num_ranks)])  # opens all lifelines
            if time.monotonic() - begun >= linger and not has_slow:
                return
            time.sleep(0.05 if time.monotonic() - begun < linger else SLOW_POLL)

    def _is_behind(self, rank: int) -> bool:
        """Whether a process is known to live and has not ended this process's last call: it still needs the store."""
        if self._store.check([f"closed/{rank}"]) or self._is_dead(rank) is not False:
            return False
        its = _posted(self._beat_of(rank))
        return not its.has_ended and (its.num < self.calls.now.num or its.is_inside)

    # the thread

    def _run(self) -> None:
        neighbour = (self.rank + 1) % self.num_ranks
        heard, heard_at, beat_at, before = b"", time.monotonic(), 0.0, self.calls.now
        try:
            while not self._stop.wait(POLL) and not self.has_failed:
                if self._store.check(["first"]):
                    self._fail(json.loads(self._store.get("first")))
                    return
                is_dead = self._is_dead(neighbour)
                if is_dead and not self._differs(_posted(self._beat_of(neighbour))) and not self._ended(neighbour):
                    self._declare_gone(neighbour)
                    return
                calls, now = self._mine, time.monotonic()
                is_due, is_stuck = now - beat_at >= BEAT, calls == before
                before = calls
                # If this process's own beat was late, it was stopped, and perhaps its neighbour with it.
                was_stopped = is_due and now - beat_at > 3 * BEAT
                if is_due:
                    self._beat, beat_at = self._beat + 1, now
                if is_due or (is_stuck and calls != self._posted):
                    self._post(calls)
                if not (is_due or (is_stuck and calls.is_inside)):
                    continue
                beat = self._beat_of(neighbour)
                if self._differs(_posted(beat)):
                    return
                if beat != heard or was_stopped or _posted(beat).has_ended:
                    heard, heard_at = beat, now
                if is_dead is None and now - heard_at > self._timeout:
                    self._declare_gone(neighbour, f"it has not answered for {self._timeout:g} s")
        except RuntimeError:
            if not self._stop.is_set():
                self._lost_store()

    @property
    def _mine(self) -> Posted:
        has_ended = self._has_ended or not dist.is_initialized()
        if not has_ended:
            return self.calls.now
        return replace(self.calls.now, has_ended=True, ended_by=uncaught_exception()[:_MAX_TEXT])

    def _post(self, calls: Posted) -> None:
        self._posted = calls
        self._store.set(f"beat/{self.rank}", json.dumps([self._beat, calls.write()]))

    def _differs(self, other: Posted) -> bool:
        """Whether a rank is in another call than this rank; that is then declared."""
        num = self.calls.now.differs_from(other)
        if num is None:
            num = other.differs_from(self.calls.now)
        if num is None:
            return False
        posted = {rank: _posted(beat) for rank, beat in enumerate(self._beats())} | {self.rank: self.calls.now}
        self._declare(failure_of(num, posted))
        return True

    def _is_dead(self, rank: int) -> bool | None:
        """Whether the process of a rank has ended; None if unknown."""
        return None if self.calls.lifelines is None else self.calls.lifelines.is_dead(rank)

    def _declares_dead(self) -> bool:
        """Whether any other process has ended; the first that has is declared."""
        dead = next((rank for rank in range(self.num_ranks) if rank != self.rank and self._is_dead(rank)), None)
        if dead is not None:
            self._declare_gone(dead)
        return dead is not None

    def _ended(self, rank: int) -> bool:
        """Whether a rank has said that its script has ended."""
        return _posted(self._beat_of(rank)).has_ended

    def _beat_of(self, rank: int) -> bytes:
        key = f"beat/{rank}"
        return self._store.get(key) if self._store.check([key]) else b""

    def _beats(self) -> list[bytes]:
        return [self._beat_of(rank) for rank in range(self.num_ranks)]

    def _until(self, done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not done():
            time.sleep(0.05)

    def _declare_gone(self, rank: int, why: str = "its process has ended") -> None:
        self.declare(f"rank {rank} is gone", f"{why}, as rank {self.rank} found", rank)

    def _lost_store(self) -> None:
        """If a world of this process knows a failure, that is why the store has ended; else rank 0 is gone."""
        self._fail(
            self.calls.failure
            or {
                "what": "rank 0 is gone",
                "got": "the job's store does not answer: the process that hosts it, rank 0 or torchrun, has ended",
                "rank": 0,
            }
        )

    def _fail(self, failure: dict[str, Any]) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            self.calls.failure = self.calls.failure or failure
        with suppress(RuntimeError):
            self._store.add("seen", 1)
        self._on_failure()


def _posted(beat: bytes) -> Posted:
    return Posted.read(json.loads(beat)[1]) if beat else Posted()


def await_work(work: Any, check: Callable[[], None]) -> None:
    """Wait for a Gloo work (or an object with the same `wait`), calling `check` (which may raise) every POLL seconds.

    It costs nothing while the work runs, because `wait` with a timeout sleeps on the work's own condition variable.
    """
    while True:
        try:
            work.wait(timedelta(seconds=POLL))
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # returns, or raises what went wrong
                return
        check()
