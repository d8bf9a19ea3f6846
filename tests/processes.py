"""Jobs of several processes on Gloo, for tests: forked from one server that has imported everything once."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from typing import Any

import pytest
import torch

from meshweave.calibrate import automatic
from meshweave.runtime.cluster import init_from_env, shutdown

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "meshweave",
        "torch.distributed.checkpoint",
        __name__,
        "tests.runtime.test_cluster",
        "tests.torch_compile.test_gloo_rings",
    ]
)
# Modules whose jobs measure this machine, which takes 10 s.
MEASURING = ("tests.calibrate.test_automatic", "tests.test_default_passes", "tests.test_examples_cluster")


@dataclass
class Job:
    """Processes of one job, each with a pipe on which it sends what it has to say, its outcome last."""

    processes: list[Any]
    pipes: list[Connection]

    def await_ready(self) -> None:
        for pipe in self.pipes:
            assert pipe.poll(120)
            assert pipe.recv() == "ready"

    def finish(self, timeout: float) -> list[dict[str, Any]]:
        """What each process sent last: its result or {"error", "text"}; of one that was killed, its signal."""
        end = time.monotonic() + timeout
        outcomes = []
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            outcome = _received(pipe, end - time.monotonic())
            process.join(max(0.1, end - time.monotonic()))
            assert process.exitcode is not None, f"still running after {timeout} s: {outcomes}"
            outcomes.append(outcome if process.exitcode >= 0 else {"signal": -process.exitcode})
        return outcomes


def _received(pipe: Connection, seconds: float) -> Any:
    """What comes first; None where nothing does in time, or the other end has gone. It is read before the sender has
    ended, who otherwise waits where it is larger than the buffer of the pipe."""
    try:
        return pipe.recv() if pipe.poll(max(0.1, seconds)) else None
    except EOFError:
        return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def go(name: str, num_ranks: int, *args: str) -> Job:
        port, job = free_port(), Job([], [])
        jobs.append(job)
        for rank in range(num_ranks):
            ours, theirs = CONTEXT.Pipe()
            job.processes.append(CONTEXT.Process(target=main, args=(theirs, rank, num_ranks, port, name, args)))
            job.pipes.append(ours)
            job.processes[-1].start()
            theirs.close()
        return job

    yield go
    for job in jobs:
        for process in job.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _refuse_to_measure(*args: Any) -> Any:
    raise AssertionError('this job measures the machine, which takes 10 s: pass profile="alpha-beta" to mw.compile')


def main(pipe: Connection, rank: int, num_ranks: int, port: int, name: str, args: tuple[str, ...]) -> None:
    """Run a job, named `module:function`, as torchrun would start it, and send its outcome."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    os.environ.update({k: str(v) for k, v in variables.items()}, MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    if name.partition(":")[0] not in MEASURING:
        automatic.calibrate = _refuse_to_measure
    try:
        assert init_from_env("gloo") == (rank, num_ranks)
        outcome = resolve_name(name)(pipe, *args) or {}
    except BaseException as error:
        outcome = {"error": type(error).__name__, "text": str(error)}
    pipe.send(outcome)
    shutdown()
