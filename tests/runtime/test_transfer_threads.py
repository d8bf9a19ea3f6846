"""Threads that wait for messages."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta
from threading import Event

import pytest

from meshweave.runtime.transfer_threads import INLINE_BYTES, TransferThreads


class Work:
    """A message that is done when somebody says so."""

    def __init__(self, error: str = "") -> None:
        self.done, self.error = Event(), error

    def wait(self) -> None:
        assert self.done.wait(10)
        if self.error:
            raise RuntimeError(self.error)


def test_no_message_stands_behind_another() -> None:
    threads, works = TransferThreads(), [Work() for _ in range(12)]
    jobs = [threads.add(lambda work=work: [work], INLINE_BYTES + 1) for work in works]
    for work, job in reversed(list(zip(works, jobs, strict=True))):
        assert not job.is_completed()
        work.done.set()
        job.wait(timedelta(seconds=5))
        assert job.is_completed()
    for job in jobs:
        job.get_future().wait()


def test_threads_are_used_again_and_end_with_their_owner() -> None:
    others = set(threading.enumerate())  # those of other tests may end meanwhile

    def serving() -> int:
        return sum(t.name == "meshweave transfers" for t in threading.enumerate() if t not in others)

    threads = TransferThreads()
    for _ in range(20):
        threads.run(lambda: None).wait(timedelta(seconds=5))
        time.sleep(0.005)  # until it is idle
    assert 1 <= serving() <= 5
    del threads
    gc.collect()
    end = time.monotonic() + 5
    while serving() and time.monotonic() < end:
        time.sleep(0.01)
    assert not serving()


def test_what_goes_wrong_is_raised_by_the_wait() -> None:
    def broken() -> list[Work]:
        raise RuntimeError("no route")

    threads, failing = TransferThreads(), Work("reset by peer")
    with pytest.raises(RuntimeError, match="no route"):
        threads.add(broken, 0)
    with pytest.raises(RuntimeError, match="no route"):
        threads.add(broken, INLINE_BYTES + 1).wait()
    job = threads.add(lambda: [failing], INLINE_BYTES + 1)
    with pytest.raises(RuntimeError, match="not done before the timeout"):
        job.wait(timedelta(seconds=0.01))
    failing.done.set()
    with pytest.raises(RuntimeError, match="reset by peer"):
        job.wait(timedelta(seconds=5))
    assert job.get_future().wait() is None


def test_small_messages_are_waited_for_without_a_thread() -> None:
    threads, works = TransferThreads(), [Work(), Work("reset by peer")]
    jobs = [threads.add(lambda work=work: [work], 0) for work in works]
    assert not any(job.is_completed() for job in jobs)
    for work in works:
        work.done.set()
    jobs[0].wait(timedelta(seconds=5))
    assert jobs[0].is_completed()
    with pytest.raises(RuntimeError, match="reset by peer"):
        jobs[1].wait(timedelta(seconds=5))


def test_a_future_of_small_messages_completes_without_a_wait() -> None:
    threads, work = TransferThreads(), Work()
    job = threads.add(lambda: [work], 0)
    future = job.get_future()
    assert not future.done()
    work.done.set()
    future.wait()
    job.wait(timedelta(seconds=5))
    assert job.is_completed()
