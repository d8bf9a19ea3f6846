"""Threads of a process that start large Gloo sends and receives, and wait for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Any
from weakref import finalize

import torch

# A send blocks until the socket has taken its bytes: a larger send runs on a thread while the caller continues. 768 KiB
# to a process behind a shaped link, 2 cores, torch 2.13, 2026-11: 1.3 ms of the caller's time, 0.3 ms with a thread.
INLINE_BYTES = 64 << 10


class TransferThreads:
    """Threads that start large Gloo sends and receives and wait for them, a thread per pending transfer, so that none
    queues behind another. A timed-out wait for a send or receive closes its connection (torch 2.13,
    gloo/transport/tcp/unbound_buffer.cc), so it cannot be watched like a collective."""

    def __init__(self) -> None:
        self._pool = _IdleThreads()
        finalize(self, self._pool.close)

    def add(self, post: Callable[[], Sequence[Any]], num_bytes: int) -> Job | Posted:
        """Start what `post` starts, which sends so many bytes. Returns a work to wait for. Small messages are sent at
        once: their errors are raised here, other errors by the wait."""
        if num_bytes > INLINE_BYTES:
            return self.run(lambda: wait_all(post()))
        return Posted(tuple(post()), self)

    def run(self, job: Callable[[], None]) -> Job:
        """Run a job, which may wait for messages, on its own thread."""
        task = Job(job)
        self._pool.put(task)
        return task

    def join(self, seconds: float) -> None:
        """End the threads, and wait for them. Nothing may be added afterwards."""
        self._pool.close()
        end = time.monotonic() + seconds
        for thread in self._pool.threads:
            thread.join(max(0.0, end - time.monotonic()))


class _IdleThreads:
    """Threads that are started when none is idle."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._lock, self._num_idle = Lock(), 0
        self.threads: list[Thread] = []

    def put(self, job: Job) -> None:
        with self._lock:
            if self._num_idle:
                self._num_idle -= 1
            else:
                self.threads.append(Thread(target=self._serve, name="meshweave transfers", daemon=True))
                self.threads[-1].start()
        self._queue.put(job)

    def close(self) -> None:
        for _ in self.threads:
            self._queue.put(None)

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            job.run()
            del job
            with self._lock:
                self._num_idle += 1


class Job:
    """A job of a thread; `wait` behaves like that of a torch Work."""

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
        """A future that completes with the job, whether it succeeds or fails."""
        return self._future

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Raises RuntimeError after the timeout, or with the job's error."""
        if not self._done.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("a transfer is not done before the timeout")
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error


class Posted:
    """Small messages that were started by their caller, who waits for them without a thread: to hand a wait over and
    back costs 0.2 ms of a processor. The wait has no timeout; breaking the connections ends it."""

    def __init__(self, works: Sequence[Any], threads: TransferThreads) -> None:
        self._works, self._threads = works, threads
        self._job: Job | None = None
        self._error: RuntimeError | None = None

    def get_future(self) -> torch.futures.Future[None]:
        """A future that completes with the messages, for which a thread waits from now on."""
        if self._job is None:
            self._job = self._threads.run(lambda: wait_all(self._works))
        return self._job.get_future()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Raises RuntimeError with the error of a message."""
        if self._job is not None:
            self._job.wait()
            return
        works, self._works = self._works, ()
        try:
            wait_all(works)
        except RuntimeError as error:
            self._error = error
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Whether a wait has ended."""
        return not self._works if self._job is None else self._job.is_completed()


def wait_all(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
