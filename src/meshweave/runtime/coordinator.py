"""The coordinator of a job, a thread of rank 0: it gathers small values of all ranks, compares their calls, and
declares which failure was the first. The other side of every connection is `runtime/watch.py`.

Every rank has a connection to it. The kernel of a process closes that connection when the process ends, however it
ends, and keeps it as long as the process lives: a process that is slow, stopped, or owns the interpreter lock is not
taken for dead. While nothing has failed and all make equal calls, nothing is sent.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

GRACE = 2.0  # seconds between the end of a process and its declaration as a failure: it may have made its last call
_SEND_SECONDS = 30.0  # a send that takes longer is given up: that process is stopped
# Seconds. A host that vanishes with its connections: probes begin after IDLE, and the connection breaks after COUNT of
# them, EVERY so often, without an answer. Kernels answer for stopped processes.
_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
_SHOWN = 16  # the most ranks that an error names
_DIFFERENT_CALLS = (
    "mw.compile, step, evaluate, forward_only, save, async_save, load, parameters and, with sharded parameters, "
    "model(x) communicate: call them on every rank, in the same order, not under `if rank == 0` (for a loss without an "
    "update write step.evaluate(batch) on every rank), with batches of the "
    "same sizes (drop_last=True, padded to one length on all ranks); train(), eval(), requires_grad_() and options of "
    "the optimizer, too, are the same on every rank"
)
_ENDED = (
    "let all ranks leave the loop together: share the decision (torch.distributed.broadcast, all_reduce), give every "
    "rank as many batches (drop_last=True), and call save, evaluate and the like on every rank"
)


def names_of_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1`: at most 16 ranks."""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def different_calls(
    posted: Mapping[int, Mapping[int, str]], ended: Mapping[int, int], lines: Mapping[int, str] | None = None
) -> dict[str, Any] | None:
    """The error of ranks that make different calls, as parts of an error; None if they don't. `posted`: the latest
    calls of each rank, by number; `ended`: the last call of ranks whose scripts have ended; `lines`: where the script
    of a rank makes its last call."""
    last = {rank: max(calls, default=0) for rank, calls in posted.items()}
    for num in sorted({num for calls in posted.values() for num in calls}):
        texts = {calls[num] for calls in posted.values() if num in calls}
        is_left = any(its_last < num for its_last in ended.values())
        if len(texts) == 1 and not is_left:
            continue
        states: dict[str, list[int]] = {}
        for rank, calls in sorted(posted.items()):
            after = f"after call {last[rank]} ({calls.get(last[rank], 'none')})"
            other = f"never, its script has ended {after}" if rank in ended else f"not begun, {after}"
            other = f"past, now in call {last[rank]} ({calls[last[rank]]})" if last[rank] > num else other
            line = (lines or {}).get(rank, "") if last[rank] == num else ""
            states.setdefault(calls.get(num, other) + f" at {line}" * bool(line), []).append(rank)
        return {
            "what": "a rank has ended its script while others go on" if is_left else "ranks make different calls",
            "got": f"call {num} is " + "; ".join(f"{names_of_ranks(ranks)}: {text}" for text, ranks in states.items()),
            "hint": _ENDED if is_left else _DIFFERENT_CALLS,
            "rank": -1,
        }
    return None


def late_ranks(
    broken: Mapping[str, Any], places: Mapping[int, tuple[int, Mapping[str, int], str]], num_ranks: int
) -> dict[str, Any]:
    """The failure of a communication, with the ranks that have not come to it. `places`: the number of a rank's call,
    how many communications it has begun there by channel (whose name ends with its ranks), and its place in words."""
    latest = max((number for number, _, _ in places.values()), default=0)
    begun = {rank: counts for rank, (number, counts, _) in places.items() if number == latest}
    late: dict[str, tuple[int, list[int]]] = {}
    for channel in sorted({channel for counts in begun.values() for channel in counts}):
        ranks = [int(rank) for rank in channel.rpartition(" ")[2].split(",")]
        counts_here = [begun[rank].get(channel, 0) if rank in begun else 0 for rank in ranks]
        least = min(counts_here)
        if least < max(counts_here):
            late[channel] = (least, [rank for rank, count in zip(ranks, counts_here, strict=True) if count == least])
    behind = sorted({*range(num_ranks)} - {*begun} | {rank for _, ranks in late.values() for rank in ranks})
    if not behind:
        return dict(broken)
    states = [f"rank {rank} {places[rank][2] if rank in places else 'does not answer'}" for rank in behind[:_SHOWN]]
    what = f"{names_of_ranks(behind)} did not come to a communication"
    return {**broken, "what": what, "got": f"{'; '.join(states)}; {broken['got']}", "late": late}


@dataclass(eq=False)
class MessageLink:
    """A connection that carries messages, one JSON text a line."""

    connection: socket.socket
    rank: int = -1  # at the other end, once it has said hello
    unread: bytes = b""
    _sending: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.connection.settimeout(_SEND_SECONDS)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            with suppress(OSError, AttributeError):  # names of Linux
                self.connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: bytes) -> None:
        """What reads from a broken connection sees its end."""
        with self._sending, suppress(OSError):
            self.connection.sendall(message)

    def receive(self) -> list[Any] | None:
        """The messages that have come; None at the end of the connection."""
        try:
            received = self.connection.recv(1 << 16)
        except OSError:  # reset, or no answer to probes
            return None
        *lines, self.unread = (self.unread + received).split(b"\n")
        return [json.loads(line) for line in lines] if received else None


def message(kind: str, *parts: Any) -> bytes:
    return json.dumps([kind, *parts]).encode() + b"\n"


class Coordinator:
    """Serves the connections of all ranks, on one thread of rank 0."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks, self.token = num_ranks, secrets.token_hex(16)
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=is_dual)
        self.port = int(self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._links: set[MessageLink] = set()
        self._failure: dict[str, Any] | None = None
        self._gathers: dict[str, dict[int, Any]] = {}  # values that have come, by name and rank
        self._posted: dict[int, dict[int, str]] = {}
        self._lines: dict[int, str] = {}  # of the calls that were posted last
        self._ended: dict[int, int] = {}
        self._silent = set(range(num_ranks))  # ranks that have not said hello
        self._lost: dict[int, float] = {}  # when the connection of a rank ended
        self._consequence: tuple[float, dict[str, Any]] | None = None  # since when: a collective that broke
        self._places: dict[int, tuple[int, Mapping[str, int], str]] = {}  # where ranks are since then
        self._is_closed = False
        threading.Thread(target=self._run, name="meshweave-coordinator", daemon=True).start()

    def await_others(self, seconds: float, *, is_healthy: bool = True) -> None:
        """Wait until all other ranks have closed their connections: at their end, or with a failure known. A job that
        `is_healthy` is waited for no longer once it fails."""
        end = time.monotonic() + seconds
        while any(link.rank > 0 for link in list(self._links)) and time.monotonic() < end:
            if is_healthy and self._failure is not None:
                return
            time.sleep(0.02)

    def close(self) -> None:
        """Close all connections: also in a process that was forked, which would keep them open."""
        self._is_closed = True
        for connection in [self._listener, *(link.connection for link in list(self._links))]:
            with suppress(OSError):
                connection.close()

    def tell(self, text: bytes) -> None:
        for link in list(self._links):
            if link.rank >= 0:
                link.send(text)

    def _run(self) -> None:
        with suppress(OSError, ValueError, KeyError):  # closed
            while not self._is_closed:
                is_waiting = self._failure is None and (self._lost or self._consequence)
                for key, _ in self._selector.select(GRACE / 8 if is_waiting else None):
                    if key.data is None:
                        self._accept()
                    else:
                        self._serve(key.data)
                self._declare_late()

    def _declare_late(self) -> None:
        """Failures that were given time. A collective that broke is no cause if a process or a script has ended, or
        a process was killed before it said hello."""
        now = time.monotonic()
        for rank, since in list(self._lost.items()):
            if now - since >= GRACE:
                self._declare(_gone(rank))
        if self._consequence is not None and now - self._consequence[0] >= GRACE:
            ended = next(iter(self._lost or self._ended or self._silent), None)
            broken = late_ranks(self._consequence[1], self._places, self.num_ranks)
            self._declare(broken if ended is None else _gone(ended))

    def _accept(self) -> None:
        try:
            link = MessageLink(self._listener.accept()[0])
        except OSError:  # that process has gone again
            return
        self._links.add(link)
        self._selector.register(link.connection, selectors.EVENT_READ, link)

    def _serve(self, link: MessageLink) -> None:
        try:
            messages = link.receive()
            for kind, *parts in messages or ():
                self._hear(link, kind, *parts)
        except (ValueError, TypeError, KeyError):  # not a rank of this job
            messages = None
        if messages is None:
            self._selector.unregister(link.connection)
            link.connection.close()
            self._links.discard(link)
            if link.rank >= 0 and link.rank not in self._ended and self._failure is None:
                self._lost[link.rank] = time.monotonic()

    def _hear(self, link: MessageLink, kind: str, *parts: Any) -> None:
        if link.rank < 0:
            token, rank = parts
            if token != self.token:
                raise ValueError("a stranger")
            link.rank = rank
            self._silent.discard(rank)
            link.send(message("hello", token))
            if self._failure is not None:
                link.send(message("failed", self._failure))
        elif kind == "value":
            name, value = parts
            values = self._gathers.setdefault(name, {})
            values[link.rank] = value
            if len(values) == self.num_ranks:
                self.tell(message("values", name, _ranks_by_value(self._gathers.pop(name))))
        elif kind == "absent":
            name, seconds = parts
            absent = sorted({*range(self.num_ranks)} - {*self._gathers.get(name, range(self.num_ranks))})
            if absent:
                self._declare(_absence(name, absent, seconds))
        elif kind == "failed":
            self._declare(*parts)
        elif kind == "broken" and self._consequence is None:
            self._consequence = (time.monotonic(), parts[0])
            self.tell(message("where"))
        elif kind == "place":
            num_guards, begun, text = parts
            self._places[link.rank] = (num_guards, begun, text)
        elif kind in ("calls", "ended"):
            calls, by, self._lines[link.rank] = parts
            self._posted[link.rank] = {int(num): text for num, text in calls.items()}
            if kind == "ended":
                self._ended[link.rank] = max(self._posted[link.rank], default=0)
            failure = {"what": f"rank {link.rank} failed", "got": by, "rank": link.rank} if by else None
            if failure := failure or different_calls(self._posted, self._ended, self._lines):
                self._declare(failure)

    def _declare(self, failure: dict[str, Any]) -> None:
        """The first failure counts."""
        if self._failure is not None:
            return
        self._failure, self._consequence = failure, None
        self._lost.clear()
        self.tell(message("failed", failure))


def _gone(rank: int) -> dict[str, Any]:
    return {"what": f"rank {rank} is gone", "got": "its process or its script has ended", "rank": rank}


def _absence(name: str, ranks: Sequence[int], seconds: float) -> dict[str, Any]:
    return {
        "what": f"{names_of_ranks(ranks)} did not come to {name.partition(' ')[2]}",
        "got": f"nothing in {seconds:g} s",
        "hint": "a rank hangs, runs another script, or does not call mw.compile",
        "rank": -1,
    }


def _ranks_by_value(values: Mapping[int, Any]) -> list[list[Any]]:
    """Each value once, with its ranks."""
    groups: dict[str, list[Any]] = {}
    for rank, value in values.items():
        groups.setdefault(json.dumps(value), [value, []])[1].append(rank)
    return list(groups.values())
