"""Sends and receives of Gloo that a thread waits for."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any
from weakref import finalize

import torch


class Background:
    """A thread that waits for sends and receives of Gloo: a wait for one of them that times out closes its connection
    (torch 2.13, gloo/transport/tcp/unbound_buffer.cc), so it cannot be watched like a collective."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Sends | None] = SimpleQueue()
        self._started = False

    def add(self, works: Sequence[Any]) -> Sends:
        """The works as one, which may be waited for with a timeout."""
        if not self._started:
            self._started = True
            Thread(target=_serve, args=(self._queue,), name="meshweave transfers", daemon=True).start()
            finalize(self, self._queue.put, None)
        sends = Sends(tuple(works))
        self._queue.put(sends)
        return sends


def _serve(queue: SimpleQueue[Sends | None]) -> None:
    while (sends := queue.get()) is not None:
        sends.finish()


class Sends:
    """Sends and receives that a thread waits for; `wait` is that of a torch Work."""

    def __init__(self, works: tuple[Any, ...]) -> None:
        self._works, self._done = works, Event()
        self._future: torch.futures.Future[None] = torch.futures.Future()
        self._error: BaseException | None = None

    def finish(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except BaseException as error:
            self._error = error
        self._works = ()
        self._done.set()
        self._future.set_result(None)

    def get_future(self) -> torch.futures.Future[None]:
        """Completed when the works are, whether they went well or not."""
        return self._future

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """RuntimeError when the time is over, or with what went wrong."""
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("a transfer is not done yet")
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
