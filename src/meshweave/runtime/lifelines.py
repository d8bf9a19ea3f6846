"""Whether the process of another rank lives: a connection that its kernel closes when the process ends.

A process that is slow, stopped, or owns the interpreter lock keeps its connections, and its kernel answers keep-alive
probes. However it ends, its kernel closes them at once. So silence is no sign of death, and death needs no silence.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

# Seconds. Of a host that vanishes with its connections: probes begin after IDLE, and the connection breaks after COUNT
# of them, EVERY so often, without an answer: one minute.
IDLE, EVERY, COUNT = 15, 5, 9
RETRY = 1.0  # between two attempts to connect
_CONNECT = 1.0  # a kernel accepts for a process that is stopped
_TOKEN_BYTES = 16


@dataclass(slots=True)
class _Line:
    """A connection to a rank. Its process sends the token that it has published: another process may be behind its
    address, on another host's loopback."""

    connection: socket.socket | None
    token: bytes
    tried_at: float
    is_known: bool = False
    is_dead: bool = False


class Lifelines:
    """Lines to other ranks of a job, opened when they are first asked for. `store` must be a name space of its own, the
    same on all ranks; each process creates one object per job, which lasts as long as the process."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store.clone() if hasattr(store, "clone") else store  # used by threads of watches
        self._lock = threading.Lock()
        self._lines: dict[int, _Line] = {}
        self._own: list[socket.socket] = []
        _ALL.add(self)
        address = address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        token = secrets.token_bytes(_TOKEN_BYTES)
        if not address:
            return
        try:
            listener = socket.create_server((address, 0), backlog=128)
        except OSError:  # the other ranks then know this process only by its heartbeat
            return
        self._own.append(listener)
        store.set(f"line/{rank}", json.dumps([address, listener.getsockname()[1], token.hex(), _place()]))
        threading.Thread(target=self._serve, args=(listener, token), name="meshweave-line", daemon=True).start()

    def is_dead(self, rank: int) -> bool | None:
        """Whether the process of `rank` has ended; None if that is unknown, because there is no connection yet or none
        is possible. Does not wait for that process."""
        with self._lock:
            line = self._lines.get(rank)
            if line is None or (line.connection is None and time.monotonic() - line.tried_at > RETRY):
                line = self._lines[rank] = self._opened(rank)
            if line.is_dead:
                return True
            if line.connection is None:
                return None
            try:
                sent = line.connection.recv(_TOKEN_BYTES)
            except BlockingIOError:
                return False if line.is_known else None
            except OSError:  # reset, or no answer to keep-alive probes
                sent = b""
            if sent and not line.is_known:
                line.is_known = sent == line.token
            if sent and line.is_known:
                return False
            line.connection.close()
            line.connection, line.is_dead = None, line.is_known
            return True if line.is_known else None

    def _opened(self, rank: int) -> _Line:
        key, now = f"line/{rank}", time.monotonic()
        if not self._store.check([key]):
            return _Line(None, b"", now)
        address, port, token, place = json.loads(self._store.get(key))
        try:
            connection = socket.create_connection((address, port), timeout=_CONNECT)
        except ConnectionRefusedError:  # by this kernel: nobody listens. A firewall may refuse what is elsewhere.
            return _Line(None, b"", now, is_dead=place == _place())
        except OSError:
            return _Line(None, b"", now)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", IDLE), ("TCP_KEEPINTVL", EVERY), ("TCP_KEEPCNT", COUNT)):
            with suppress(OSError, AttributeError):  # names of Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        connection.setblocking(False)
        return _Line(connection, bytes.fromhex(token), now)

    def _serve(self, listener: socket.socket, token: bytes) -> None:
        while True:
            try:
                connection, _ = listener.accept()
                connection.sendall(token)
            except ConnectionError:  # that rank has gone again
                continue
            except OSError:  # the listener is closed
                return
            self._own.append(connection)

    def forget(self) -> None:
        """Close everything, in a process that was forked: it would keep the connections of its parent open."""
        for connection in (*self._own, *(line.connection for line in self._lines.values())):
            if connection is not None:
                with suppress(OSError):
                    connection.close()


def _place() -> str:
    """The kernel and the network namespace of this process; unique if they are unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # not Linux
        return secrets.token_hex(8)


_ALL: WeakSet[Lifelines] = WeakSet()  # of this process


def _forget_in_child() -> None:
    for lifelines in list(_ALL):
        lifelines.forget()


os.register_at_fork(after_in_child=_forget_in_child)


def address_towards(host: str) -> str:
    """The address from which this machine sends to `host`, empty if it cannot; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
        except OSError:
            return ""
