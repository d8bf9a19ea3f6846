"""Slow processes and dead ones: a lifeline tells them apart, and a watch takes only the dead for dead."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.processes import CONTEXT, Job, free_port
from torch.distributed.distributed_c10d import PrefixStore

import meshweave as mw
from meshweave.ir.collectives import functional
from meshweave.runtime import lifelines
from meshweave.runtime.calls import Calls
from meshweave.runtime.cluster import ClusterWorld, shutdown
from meshweave.runtime.lifelines import Lifelines
from meshweave.runtime.watch import Watch

pytestmark = pytest.mark.multiprocess


def until(found: Callable[[], Any], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found():
            return True
        time.sleep(0.02)
    return False


def other(pipe: Connection, port: int) -> None:
    """Rank 1: it has a lifeline, and does nothing."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    _lines = Lifelines(store, 1)
    pipe.send("ready")
    pipe.recv()


class Peer:
    def __init__(self) -> None:
        port = free_port()
        self.store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=other, args=(theirs, port))
        self.process.start()
        assert self.pipe.poll(120)
        assert self.pipe.recv() == "ready"
        self.lines = Lifelines(self.store, 0)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.lines.forget()
    made.process.kill()
    made.process.join()


def test_a_stopped_process_is_not_dead_and_a_killed_one_is_at_once(peer: Peer) -> None:
    assert until(lambda: peer.lines.is_dead(1) is False)
    peer.signal(signal.SIGSTOP)
    time.sleep(0.5)
    assert peer.lines.is_dead(1) is False
    assert peer.lines.is_dead(2) is None  # of a rank that never came
    peer.signal(signal.SIGKILL)
    assert until(lambda: peer.lines.is_dead(1), 2.0)


def test_a_process_that_was_stopped_before_anyone_connected_is_unknown(peer: Peer) -> None:
    peer.signal(signal.SIGSTOP)
    assert not until(lambda: peer.lines.is_dead(1) is not None, 0.3)
    peer.signal(signal.SIGCONT)
    assert until(lambda: peer.lines.is_dead(1) is False)


def test_another_process_behind_the_address_says_nothing(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifelines, "RETRY", 0.0)
    address, port, token, place = json.loads(peer.store.get("line/1"))
    peer.store.set("line/1", json.dumps([address, port, token[:-2] + ("00" if token[-2:] != "00" else "01"), place]))
    assert not until(lambda: peer.lines.is_dead(1) is not None, 0.3)


def test_a_process_that_ended_before_anyone_connected_is_dead_on_this_host_and_unknown_on_others(peer: Peer) -> None:
    peer.signal(signal.SIGKILL)
    peer.process.join()
    assert peer.lines.is_dead(1)
    peer.store.set("line/2", json.dumps([*json.loads(peer.store.get("line/1"))[:3], "another host"]))
    assert peer.lines.is_dead(2) is None


def test_a_child_does_not_keep_the_connections_of_its_parent(peer: Peer) -> None:
    assert until(lambda: peer.lines.is_dead(1) is False)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if all(each.fileno() == -1 for each in peer.lines._own) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert peer.lines.is_dead(1) is False


@pytest.mark.parametrize("has_lifeline", [True, False])
def test_silence_is_death_only_where_there_is_no_lifeline(peer: Peer, has_lifeline: bool) -> None:
    assert until(lambda: peer.lines.is_dead(1) is False)
    calls = Calls(PrefixStore("calls", peer.store), 0, 2, peer.lines if has_lifeline else None)
    watch = Watch(PrefixStore("watch", peer.store), calls, lambda: None, timeout_seconds=0.5)
    try:
        peer.signal(signal.SIGSTOP)
        assert until(lambda: watch.has_failed, 3.0) is not has_lifeline
        if has_lifeline:
            peer.signal(signal.SIGKILL)
            assert until(lambda: watch.has_failed, 3.0)
        assert "rank 1 is gone" in str(watch.error())
    finally:
        watch.close()


def job_failing_beside_a_silent_rank(pipe: Connection) -> dict[str, Any]:
    """Rank 0 fails while it waits for bytes of rank 1, which is stopped: it must be able to end."""
    world = ClusterWorld(mw.Mesh(a=2))
    comm = world.communicator
    with world.guard():
        group = comm.group(("a",))
        comm.wait(comm.collect(functional.all_reduce.default, group, torch.ones(4), ["sum"]))
    pipe.send("ready")
    if dist.get_rank():
        time.sleep(60)
        return {}
    assert pipe.recv() == "stopped"
    try:
        with world.guard():
            comm.collect(functional.all_reduce.default, group, torch.ones(4 << 20), ["sum"])
            raise ValueError("the disk is on fire")
    except ValueError:
        shutdown(world)
    return {"alive": [thread.name for thread in comm._background._pool.threads if thread.is_alive()]}


def test_a_process_ends_after_a_failure_though_another_rank_is_silent(start: Callable[..., Job]) -> None:
    job = start(f"{__name__}:job_failing_beside_a_silent_rank", 2)
    job.await_ready()
    os.kill(job.processes[1].pid, signal.SIGSTOP)
    job.pipes[0].send("stopped")
    assert job.pipes[0].poll(30)
    assert job.pipes[0].recv() == {"alive": []}
    job.processes[0].join(30)
    assert job.processes[0].exitcode == 0


def job_slow_at_the_end(pipe: Connection) -> dict[str, Any]:
    """Rank 0, which hosts the store, has ended its last step long before rank 1, which is stopped in it."""
    world = ClusterWorld(mw.Mesh(a=2))
    with world.guard():
        comm = world.communicator
        comm.wait(comm.collect(functional.all_reduce.default, comm.group(("a",)), torch.ones(4), ["sum"]))
    with world.call("step"):
        pipe.send("ready")
        if dist.get_rank():
            pipe.recv()
            store = dist.distributed_c10d._get_default_store()
            store.set("still", "here")
    shutdown(world)
    return {"fine": True}


def test_rank_0_waits_at_its_end_for_a_slow_rank(start: Callable[..., Job]) -> None:
    job = start(f"{__name__}:job_slow_at_the_end", 2)
    job.await_ready()
    os.kill(job.processes[1].pid, signal.SIGSTOP)
    time.sleep(6.5)  # longer than rank 0 waits for ranks that are done
    os.kill(job.processes[1].pid, signal.SIGCONT)
    job.pipes[1].send("go on")
    assert job.finish(30) == [{"fine": True}] * 2
