"""Sends and receives of Gloo that threads begin and wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any
from weakref import finalize

import torch

# A send writes what the socket takes before it returns: beyond this a thread does it, and the caller goes on. Of
# 768 KiB to a process behind a shaped link, 2 cores, torch 2.13, 2026-11: 1.3 ms of the caller's time, by a thread 0.3.
INLINE_BYTES = 64 << 10


class Background:
    """Threads that begin sends and receives of Gloo and wait for them, as many as there are under way at once: none
    stands behind another. A wait for one of them that times out closes its connection (torch 2.13,
    gloo/transport/tcp/unbound_buffer.cc), so it cannot be watched like a collective."""

    def __init__(self) -> None:
        self._pool = _Pool()
        finalize(self, self._pool.close)

    def add(self, post: Callable[[], Sequence[Any]], num_bytes: int) -> Job:
        """What `post` begins, which sends so many bytes, as one that may be waited for with a timeout. A few bytes are
        sent right away; what goes wrong then is raised here, else by the wait."""
        if num_bytes > INLINE_BYTES:
            return self.run(lambda: wait_all(post()))
        works = tuple(post())
        return self.run(lambda: wait_all(works))

    def run(self, job: Callable[[], None]) -> Job:
        """Run a job, which may wait for messages, on a thread of its own."""
        task = Job(job)
        self._pool.put(task)
        return task


class _Pool:
    """Threads that are made when none is idle."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._lock, self._num_idle, self._num_threads = Lock(), 0, 0

    def put(self, job: Job) -> None:
        with self._lock:
            if self._num_idle:
                self._num_idle -= 1
            else:
                self._num_threads += 1
                Thread(target=self._serve, name="meshweave transfers", daemon=True).start()
        self._queue.put(job)

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._queue.put(None)

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            job.run()
            del job
            with self._lock:
                self._num_idle += 1


class Job:
    """What a thread does; `wait` is that of a torch Work."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run
        self._done = Event()
        self._future: torch.futures.Future[None] = torch.futures.Future()
        self._error: BaseException | None = None

    def run(self) -> None:
        assert self._run is not None
        try:
            self._run()
        except BaseException as error:
            self._error = error
        self._run = None
        self._done.set()
        self._future.set_result(None)

    def get_future(self) -> torch.futures.Future[None]:
        """Completed when the job is, whether it went well or not."""
        return self._future

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """RuntimeError when the time is over, or with what went wrong."""
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("a transfer is not done yet")
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error


def wait_all(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
