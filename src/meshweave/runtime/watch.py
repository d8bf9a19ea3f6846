"""What differs between ranks, and the failure of any, is an error on every rank within seconds.

Each process has one daemon thread with a connection to rank 0 (`runtime/coordinator.py`), by which ranks exchange
small values: no collective runs, so a rank that does not come is an error with its name. Calls are numbered in each
process. In a call that differs from the previous call (a batch of another size, an evaluation) all ranks meet first, so
that communications of two calls never mix; with MESHWEAVE_DEBUG=ranks in every call. A rank that stays in a call for
STUCK seconds posts its latest calls: different calls of the same number are the error.

A step fails on all ranks (a loss that is not finite) or on some. A failing rank waits briefly for the others to fail at
the same point; if they do, nothing is broken and the job goes on. If not, it declares its failure.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from meshweave.capture.batch import shapes_text
from meshweave.capture.trace import line_of, user_line
from meshweave.errors import MeshweaveError, StepError
from meshweave.interop.process_groups import default_store
from meshweave.runtime.coordinator import GRACE, Coordinator, MessageLink, message

if TYPE_CHECKING:
    from meshweave.runtime.process_groups import ClusterCommunicator

# Seconds.
POLL = 0.25  # between two looks at a known failure while something is waited for
STUCK = 4.0  # in a call, after which it is posted
NOTE = 30.0  # of waiting for other ranks, after which a rank says so
ABSENT = 600.0  # of waiting for other ranks: compiling a graph of 10,000 nodes takes minutes
LOCKSTEP = 2.0  # how long a failing rank waits for the others to fail at the same point
END = 300.0  # how long rank 0, which often hosts the store, waits at its end for other ranks: as long as a collective
_LOOK = 1.0  # between two looks of a process at its own calls
_CONNECT = 60.0  # how long a rank tries to reach rank 0
_KEPT = 8  # calls that a rank remembers: more than ranks run ahead of each other
_MAX_TEXT = 4000
_KEY = "meshweave/watch"
_NOTES = logging.getLogger("meshweave")


class ConnectionLost(StepError):
    """A communication that was interrupted. The rank that failed first knows the cause."""


class Watch:
    """A process's view of the health of all, and its calls: one per job (`watch_of_job`)."""

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self.rank, self.num_worlds = rank, 0
        self.failure: dict[str, Any] | None = None
        self._communicators: list[ClusterCommunicator] = []  # of the worlds that are open
        self._active: ClusterCommunicator | None = None  # of the world that was guarded last
        self._calls: tuple[tuple[int, str, Any], ...] = ((0, "", ()),)  # number, name, shapes; replaced by each call
        self._before: tuple[str, Any] = ("", ())
        self._is_inside, self._depth, self._num_guards, self._num_gathers = False, 0, 0, 0
        self._meets_always = "ranks" in os.environ.get("MESHWEAVE_DEBUG", "").split(",")
        self._changed = threading.Condition()
        self._values: dict[str, Any] = {}  # that have come
        self._link: MessageLink | None = None
        self._unsent: list[bytes] = []  # until there is a link
        self._is_closed, self._has_left, self._is_left = False, False, False  # the last: by rank 0, in good order
        self._coordinator = Coordinator(num_ranks) if rank == 0 else None
        if self._coordinator is not None:
            address = address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
            store.set(_KEY, json.dumps([address, self._coordinator.port, self._coordinator.token]))
        # Its own connection: the main thread may block in the store.
        own = store.clone() if hasattr(store, "clone") else store
        self._thread = threading.Thread(target=self._run, args=(own,), name="meshweave-watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # failures

    def check(self) -> None:
        """Raises StepError, with the first failure, when some rank has failed."""
        if self.failure is not None:
            raise self._error()

    def _error(self) -> StepError:
        assert self.failure is not None
        missed, place = "", ""
        if self._active is not None:
            missed = self._active.missed(self.failure.get("late", {}))
            place = "" if missed else self._active.place()
        return StepError(
            missed or self.failure["what"],
            where=f"seen by rank {self.rank}" + (f" at {place}" if place else ""),
            got=self.failure["got"],
            hint=self.failure.get("hint", "the job cannot go on: restart it from its last checkpoint"),
        )

    @contextmanager
    def guard(self, communicator: ClusterCommunicator | None = None) -> Iterator[None]:
        """A context in which a failure of a rank is an error on every rank, within seconds.

        The rank that failed raises its own error, the others StepError with the first error. When all ranks fail at the
        same point (a loss that is not finite), each raises its own error and the job goes on; otherwise it does not.
        """
        self._active = communicator or self._active
        if self._depth:
            yield
            return
        if self.failure is not None:
            raise StepError(
                "this job has failed, and its steps cannot be used again",
                where=f"seen by rank {self.rank}",
                got=f"{self.failure['what']}: {self.failure['got']}",
                hint="restart the job from its last checkpoint",
            )
        for each in self._communicators:
            each.log.clear()
        self._num_guards += 1
        self._depth += 1
        try:
            yield
            self.check()
        except BaseException as error:
            if not self._recovers(error, communicator):
                self._spread(error)
                if self.failure is not None and self.failure["rank"] != self.rank:
                    raise self._error() from error
            raise
        finally:
            self._depth -= 1

    def _recovers(self, error: BaseException, communicator: ClusterCommunicator | None) -> bool:
        """Whether all ranks failed at the same point, after the same number of collectives."""
        if self.failure is not None or _is_lost(error) or not isinstance(error, Exception):
            return False
        counts = [] if communicator is None else [communicator.num_started, communicator.num_waited]
        key = f"failure at {[self._num_guards, self._num_gathers, *counts]}"
        self._send("value", key, None)
        if self._await_values(key, LOCKSTEP) is None:
            return False
        try:
            if communicator is not None:
                communicator.drain()
        except StepError:
            return False
        return True

    def _spread(self, error: BaseException) -> None:
        """Make sure that the first failure is known everywhere."""
        failure = {"what": f"rank {self.rank} failed", "got": _text_of(error), "rank": self.rank}
        is_lost = _is_lost(error)  # because of another failure, for which rank 0 waits
        if is_lost:
            failure |= {"what": f"a communication of rank {self.rank} has broken", "rank": -1}
        if self.failure is None:
            self._send("broken" if is_lost else "failed", failure)
            self._await(lambda: self.failure is not None or self._is_left, LOCKSTEP + is_lost * 2 * GRACE)
        if self.failure is None:
            what = "rank 0 has ended its script while others go on" if self._is_left else failure["what"]
            self._fail({**failure, "what": what})
        if self._coordinator is not None:
            self._coordinator.await_others(LOCKSTEP, is_healthy=False)

    def _fail(self, failure: dict[str, Any]) -> None:
        with self._changed:
            if self.failure is not None:
                return
            self.failure = failure
            self._changed.notify_all()
        for communicator in self._communicators:
            communicator.abort()

    def add(self, communicator: ClusterCommunicator) -> None:
        """A world has begun: a failure ends what it waits for."""
        self._communicators = [*self._communicators, communicator]

    def remove(self, communicator: ClusterCommunicator) -> None:
        """A world has ended."""
        self._communicators = [each for each in self._communicators if each is not communicator]
        if self.failure is not None:
            communicator.release(False)

    # calls and values

    @contextmanager
    def call(
        self,
        name: str,
        detail: Any = (),
        *,
        meets: bool | None = None,
        communicator: ClusterCommunicator | None = None,
    ) -> Iterator[None]:
        """`guard`, for a call that every rank makes. `detail` are the shapes of its batch by name. All ranks meet first
        if it differs from the call before, or as `meets` says: not if ranks exchange values before anything else,
        always before a communication that no failure ends. A call inside another is part of that call."""
        with self.guard(communicator):
            if self._is_inside:
                yield
                return
            now = (self._calls[-1][0] + 1, name, detail)
            is_another = self._before != (name, detail)
            self._before, self._calls, self._is_inside = (name, detail), (*self._calls[1 - _KEPT :], now), True
            try:
                if self._meets_always or (is_another if meets is None else meets):
                    self.gather(f"call {now[0]}, {_text(name, detail)}", None)
                yield
            finally:
                self._is_inside = False

    def note(self, choice: str) -> None:
        """What this rank does in its call, by its own decision: shown if ranks differ. The call is not compared until
        it is posted with it."""
        *before, (num, name, detail) = self._calls
        self._calls = (*before, (num, f"{name}, which {choice}", detail))
        self._send("calls", _texts(before), "", "")

    def gather(self, name: str, value: Any, seconds: float = ABSENT) -> dict[int, Any]:
        """The values of all ranks, which are JSON, by rank. All ranks call it, with the same name.
        Raises StepError, on every rank, if one does not come or has failed."""
        self._num_gathers += 1
        key, begun = f"{self._num_gathers} {name}", time.monotonic()
        self._send("value", key, value)
        values = self._await_values(key, min(seconds, NOTE))
        if values is None and not (self.failure or self._is_left):
            _NOTES.warning("rank %d has waited %g s for other ranks to come to %s", self.rank, NOTE, name)
            values = self._await_values(key, seconds - NOTE)
        while values is None:
            self.check()
            if self._is_left:
                raise ConnectionLost("rank 0 has ended its script", got=name)
            self._send("absent", key, round(time.monotonic() - begun))
            values = self._await_values(key, LOCKSTEP)
        return {rank: value for value, ranks in values for rank in ranks}

    def _await_values(self, key: str, seconds: float) -> Any:
        self._await(lambda: key in self._values or self.failure is not None or self._is_left, seconds)
        return self._values.pop(key, None)

    def _await(self, is_so: Callable[[], bool], seconds: float) -> bool:
        end = time.monotonic() + seconds
        with self._changed:
            while not is_so() and time.monotonic() < end:
                self._changed.wait(POLL)
        return is_so()

    # the end

    def close(self) -> None:
        """This rank makes no further calls. Rank 0 waits for the others."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if not self._has_left:
            self._leave(uncaught_exception())
        if self._coordinator is not None:
            is_healthy = self.failure is None
            self._coordinator.await_others(END if is_healthy else LOCKSTEP, is_healthy=is_healthy)
            self._coordinator.tell(message("bye"))
            self._coordinator.close()
        self._thread.join(timeout=2 * POLL)
        if self.failure is not None:
            for communicator in self._communicators:
                communicator.release(True)

    def _leave(self, by: str = "") -> None:
        """Tell that this rank's script has ended, `by` an exception or in good order."""
        self._has_left = True
        self._send("ended", _texts(self._calls), by, "")
        if self._link is not None:
            with suppress(OSError):
                self._link.connection.shutdown(socket.SHUT_WR)

    def forget(self) -> None:
        """Close everything without a word, in a process that was forked: it would keep connections open."""
        self._is_closed = True
        if self._link is not None:
            self._link.connection.close()
        if self._coordinator is not None:
            self._coordinator.close()

    # the thread

    def _send(self, kind: str, *parts: Any) -> None:
        with self._changed:
            if self._link is None:
                self._unsent.append(message(kind, *parts))
                return
        self._link.send(message(kind, *parts))

    def _run(self, store: Any) -> None:
        link = self._connected(store)
        if link is None:
            return
        with self._changed:
            self._link = link
            link.send(b"".join(self._unsent))
        with selectors.DefaultSelector() as selector:
            selector.register(link.connection, selectors.EVENT_READ)
            self._listen(link, selector)
        link.connection.close()

    def _listen(self, link: MessageLink, selector: selectors.BaseSelector) -> None:
        seen, since, is_posted = self._progress(), time.monotonic(), False
        is_overdue = False
        while self.failure is None:
            messages = link.receive() if selector.select(_LOOK) else []
            if messages is None:
                break
            for kind, *parts in messages:
                self._hear(kind, *parts)
            if self._progress() != seen:
                seen, since, is_posted = self._progress(), time.monotonic(), False
            seconds = time.monotonic() - since
            if not (is_posted or self._has_left) and seconds > STUCK:
                is_posted = True
                self._send("calls", _texts(self._calls), "", _line_of_script())
            if self._depth and not is_overdue and any(each.is_overdue(seconds) for each in self._communicators):
                is_overdue = True
                error = ConnectionLost("a communication does not end", got=f"nothing in {seconds:.0f} s")
                threading.Thread(target=self._spread, args=(error,), daemon=True).start()
            if not (self._has_left or dist.is_initialized()):
                self._leave()  # the process may end at any time
        if not (self.failure or self._has_left or self._is_left):
            time.sleep(GRACE)
            if not self._has_left and dist.is_initialized():
                self._fail({"what": "rank 0 is gone", "got": "its process has ended", "rank": 0})

    def _progress(self) -> tuple[Any, int]:
        return self._calls, sum(len(each.log) for each in self._communicators)

    def _place(self) -> str:
        """What this rank does: its call, and the line of the script."""
        number, name, _ = self._calls[-1]
        line = _line_of_script()
        return f"{'is in' if self._depth else 'is past'} call {number} ({name})" + (f" at {line}" if line else "")

    def _hear(self, kind: str, *parts: Any) -> None:
        if kind == "failed":
            self._fail(parts[0])
        elif kind == "where":
            begun = {} if self._active is None else self._active.num_begun()
            self._send("place", self._num_guards, begun, self._place())
        with self._changed:
            self._is_left |= kind == "bye"
            if kind == "values":
                self._values[parts[0]] = parts[1]
            self._changed.notify_all()

    def _connected(self, store: Any) -> MessageLink | None:
        """A connection to rank 0, which has said hello; a failure if there is none in time."""
        end, trouble = float("inf"), ""
        while not self._is_closed and time.monotonic() < end:
            time.sleep(0.02)
            try:
                if not store.check([_KEY]):
                    continue
                address, port, token = json.loads(store.get(_KEY))
            except RuntimeError:
                got = "the job's store does not answer: the process that hosts it, rank 0 or torchrun, has ended"
                self._fail({"what": "rank 0 is gone", "got": got, "rank": 0})
                return None
            end = min(end, time.monotonic() + _CONNECT)
            for host in dict.fromkeys([os.environ.get("MASTER_ADDR", "127.0.0.1"), address]):
                try:
                    link = MessageLink(socket.create_connection((host, port), timeout=5.0))
                    link.send(message("hello", token, self.rank))
                    answer, *others = link.receive() or [None]
                    if answer == ["hello", token]:
                        for kind, *parts in others:
                            self._hear(kind, *parts)
                        return link
                    link.connection.close()
                    trouble = f"another process answers at {host}:{port}"
                except (OSError, ValueError) as error:
                    trouble = f"{host}:{port}: {error}"
        if not self._is_closed:
            self._fail({"what": f"rank {self.rank} cannot reach rank 0", "got": trouble, "rank": -1})
        return None


def _line_of_script() -> str:
    """The line of the script that the main thread is at."""
    return user_line(sys._current_frames().get(threading.main_thread().ident or 0))


def _text(name: str, detail: Any) -> str:
    return f"{name} ({shapes_text(detail)})" if detail else name


def _texts(calls: Sequence[tuple[int, str, Any]]) -> dict[int, str]:
    return {num: _text(name, detail) for num, name, detail in calls if num}


def _is_lost(error: BaseException | None) -> bool:
    """Whether `error` results from a broken connection: meshweave's collectives say so, torch's name their library."""
    while error is not None:
        if isinstance(error, ConnectionLost | dist.DistError) or "gloo/transport" in str(error):
            return True
        error = error.__cause__
    return False


def uncaught_exception() -> str:
    """The exception that ends this script, as text; empty if none does. Python records it when it prints it."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)  # Python 3.12 and later
    return "" if error is None else _text_of(error)


def _text_of(error: BaseException) -> str:
    """An error as text, with its line of the script if it does not say one itself."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")[:_MAX_TEXT]
    line = "" if isinstance(error, MeshweaveError) else line_of(error)
    return f"{text} at {line}" if line else text


def address_towards(host: str) -> str:
    """The address from which this machine sends to `host`, empty if it cannot; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""


_WATCHES: WeakKeyDictionary[Any, Watch] = WeakKeyDictionary()  # by the store of a job, as torch stores its groups


def watch_of_job() -> Watch:
    """The watch of the current torch.distributed job."""
    store = default_store()
    if store not in _WATCHES:
        _WATCHES[store] = Watch(store, dist.get_rank(), dist.get_world_size())
    return _WATCHES[store]


def close_watch() -> bool:
    """Close the watch of the current job, if there is one. Whether a rank has failed."""
    watch = _WATCHES.get(default_store())
    if watch is not None:
        watch.close()
    return watch is not None and watch.failure is not None


def _forget_in_child() -> None:
    for watch in list(_WATCHES.values()):
        watch.forget()


os.register_at_fork(after_in_child=_forget_in_child)
