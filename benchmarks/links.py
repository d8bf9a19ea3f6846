"""Jobs of several processes of this machine: over the loopback, or in network namespaces with shaped links between."""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Link:
    """How processes reach each other: what stands before each command, and their environment."""

    name: str
    prefixes: tuple[tuple[str, ...], ...]
    address: str
    per_node: int
    interfaces: tuple[str, ...]
    is_one_gpu: bool = False  # shared by all processes

    def run(self, *command: str) -> str:
        """stdout of rank 0, when all have ended. Raises RuntimeError when one fails or they take too long."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            processes = self._start(command, out, errors)
            end = time.monotonic() + TIMEOUT_S
            while any(each.poll() is None for each in processes) and not any(each.poll() for each in processes):
                if time.monotonic() > end:
                    break
                time.sleep(0.2)
            codes = [each.poll() for each in processes]
            _end(processes)
            out.seek(0)
            if any(code != 0 for code in codes):
                raise RuntimeError(f"{' '.join(command[:3])} on {self.name}: {codes}\n{_tail(errors)}")
            return out.read()

    @contextmanager
    def talk(self, *command: str) -> Iterator[Job]:
        """A job whose rank 0 is asked by lines of stdin and answers with JSON objects on lines of stdout."""
        with tempfile.TemporaryFile("w+") as errors:
            processes = self._start(command, subprocess.PIPE, errors, subprocess.PIPE)
            try:
                yield Job(f"{' '.join(command[:3])} on {self.name}", processes, errors)
            finally:
                _end(processes)

    def _start(self, command: Sequence[str], out: Any, errors: Any, into: Any = None) -> list[subprocess.Popen[str]]:
        port, processes = _free_port(), []
        for rank, prefix in enumerate(self.prefixes):
            streams = {"stdin": into, "stdout": out} if rank == 0 else {"stdout": subprocess.DEVNULL}
            line = [*prefix, sys.executable, *command]
            environment = self._environment(rank, port)
            processes.append(
                subprocess.Popen(line, stderr=errors, env=environment, cwd=ROOT, text=True, **streams)  # type: ignore[call-overload]
            )
        return processes

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """What torchrun sets, on as many nodes as there are. NCCL refuses two ranks of a host on the same GPU, and
        takes those with different ids for hosts of their own."""
        shared = {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        return {
            **os.environ,
            **(shared if self.is_one_gpu else {}),
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.prefixes)),
            "LOCAL_RANK": "0" if self.is_one_gpu else str(rank % self.per_node),
            "LOCAL_WORLD_SIZE": str(self.per_node),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2)),
            "GLOO_SOCKET_IFNAME": self.interfaces[rank],
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        }


@dataclass(frozen=True)
class Job:
    """Processes that wait between questions: jobs of a link take turns."""

    name: str
    processes: list[subprocess.Popen[str]]
    errors: IO[str]

    def ask(self, question: str) -> dict[str, Any]:
        """The answer of rank 0. Raises RuntimeError when a process has ended before or answers too late."""
        first = self.processes[0]
        assert first.stdin is not None
        assert first.stdout is not None
        late = threading.Timer(TIMEOUT_S, _end, (self.processes,))
        late.start()
        try:
            first.stdin.write(question + "\n")
            first.stdin.flush()
            for line in first.stdout:
                if line.startswith("{"):  # else something that a library prints
                    return dict(json.loads(line))
        except BrokenPipeError:
            pass
        finally:
            late.cancel()
        raise RuntimeError(f"{self.name}, {question}: {[each.poll() for each in self.processes]}\n{_tail(self.errors)}")


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for each in processes:
        each.kill()
    for each in processes:
        each.wait()


def _tail(errors: IO[str]) -> str:
    errors.seek(0)
    return errors.read()[-3000:]


_PORTS = itertools.count(random.randrange(10000, 20000))  # below those that connections get: jobs start at once


def _free_port() -> int:
    """One that no job of this process has had."""
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError


@contextmanager
def loopback(count: int = 2) -> Iterator[Link]:
    yield Link("loopback", ((),) * count, "127.0.0.1", count, ("lo",) * count)


@contextmanager
def one_gpu(count: int = 2) -> Iterator[Link]:
    yield Link("one GPU", ((),) * count, "127.0.0.1", count, ("lo",) * count, is_one_gpu=True)


def shape_of(gbit: int) -> tuple[str, ...]:
    """Arguments of `tc qdisc add` for a link of so many Gbit/s. The burst is what passes in 2 ms: less would be below
    the timer's resolution. The queue takes what neighbours send at the same time: where it overflows, TCP waits 200 ms
    before it sends again, for any of the peers."""
    return ("root", "tbf", "rate", f"{gbit}gbit", "burst", f"{256 * gbit}kb", "latency", "400ms")


@contextmanager
def shaped(gbit: int = 1) -> Iterator[Link]:
    """Two network namespaces with a shaped link between them, gone afterwards."""
    names = [f"meshweave{os.getpid()}{side}" for side in "ab"]
    devices = [f"mw{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", devices[0], "type", "veth", "peer", "name", devices[1])
        for i, (name, device) in enumerate(zip(names, devices, strict=True), 1):
            _ip("link", "set", device, "netns", name)
            _ip("-n", name, "addr", "add", f"10.77.0.{i}/24", "dev", device)
            _ip("-n", name, "link", "set", device, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            _checked("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, *shape_of(gbit))
        prefixes = tuple(("ip", "netns", "exec", name) for name in names)
        yield Link(f"{gbit} Gbit/s", prefixes, "10.77.0.1", 1, (devices[0], devices[1]))
    finally:
        for name in names:  # the devices go with them
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextmanager
def star(count: int, gbit: int = 1) -> Iterator[Link]:
    """Network namespaces around one with a bridge, each at the end of a shaped link, gone afterwards."""
    hub, names = f"meshweave{os.getpid()}hub", [f"meshweave{os.getpid()}n{i}" for i in range(count)]
    outer, inner = ([f"mw{os.getpid()}{side}{i}" for i in range(count)] for side in "on")
    try:
        for name in (hub, *names):
            _ip("netns", "add", name)
        _ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", hub, "link", "set", "bridge0", "up")
        for i, name in enumerate(names):
            _ip("link", "add", inner[i], "type", "veth", "peer", "name", outer[i])
            _ip("link", "set", inner[i], "netns", name)
            _ip("link", "set", outer[i], "netns", hub)
            _ip("-n", hub, "link", "set", outer[i], "master", "bridge0", "up")
            _ip("-n", name, "addr", "add", f"10.78.0.{i + 1}/24", "dev", inner[i])
            _ip("-n", name, "link", "set", inner[i], "up")
            _ip("-n", name, "link", "set", "lo", "up")
            for space, device in ((name, inner[i]), (hub, outer[i])):
                _checked("ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", device, *shape_of(gbit))
        prefixes = tuple(("ip", "netns", "exec", name) for name in names)
        yield Link(f"{gbit} Gbit/s", prefixes, "10.78.0.1", 1, tuple(inner))  # type: ignore[arg-type]
    finally:
        for name in (hub, *names):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextmanager
def joined(count: int, gbit: int = 1) -> Iterator[Link]:
    with shaped(gbit) if count == 2 else star(count, gbit) as link:
        yield link


def _ip(*arguments: str) -> None:
    _checked("ip", *arguments)


def _checked(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def running() -> float:
    """Processes of others that want a processor, the mean of a second: what is above 0 disturbs what is measured."""
    counts = []
    for _ in range(20):
        counts.append(int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]) - 1)
        time.sleep(0.05)
    return sum(counts) / len(counts)
