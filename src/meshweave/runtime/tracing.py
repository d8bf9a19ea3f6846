"""Records a real step: when each task ran on each local device, when each communication was done, and the memory in use
meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from meshweave.runtime.executor import Compiled, Task
from meshweave.runtime.state import State

Mark = Any  # a point in time as recorded by a clock
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # Linux: processes with equal values read the same monotonic clock
_NUM_ROUNDS = 5  # barriers that align the clocks of two machines
_PATIENCE_SECONDS = 1.0  # seconds to wait for the last callback of a communication that has been waited for


@dataclass(frozen=True, slots=True)
class Event:
    """What a device did from `begin` to `end`, in seconds: it ran the node `name`, or (`is_copy`) ran the communication
    that the node `name` starts. `fused`: all nodes that ran as a single function, `name` the first of them."""

    name: str
    begin: float
    end: float
    is_copy: bool
    fused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """At `at` seconds the value of node `name` appeared (`bytes` of new memory, 0 for a view) or, if negative, was
    freed."""

    name: str
    at: float
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTrace:
    """A step on a device, from `began` to `ended`. `persistent_bytes` were in use before, `reserved_bytes` is the
    maximum that PyTorch's caching allocator reserved; 0 on CPU, which has none."""

    device: int
    began: float
    ended: float
    events: tuple[Event, ...]
    changes: tuple[Change, ...]
    persistent_bytes: int
    reserved_bytes: int = 0


class HostClock:
    """The host's monotonic clock: it records points in time, and resolves them to seconds afterwards. Gloo works report
    their end on a thread of their own."""

    def __init__(self) -> None:
        self._asked, self._ends = 0, list[int]()

    def mark(self) -> Mark:
        return time.perf_counter_ns()

    def when_done(self, work: Any, into: list[Mark]) -> None:
        """Append to a list the time at which a started communication is done."""

        def tell(_: Any) -> None:
            now = time.perf_counter_ns()
            into.append(now)
            self._ends.append(now)

        self._asked += 1
        work.get_future().add_done_callback(tell)

    def settle(self) -> None:
        """Called when all is done, before `seconds`. The wait for a work and the report of its end happen on two
        threads: the second may be late."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while len(self._ends) < self._asked and time.monotonic() < end:
            time.sleep(1e-3)

    def seconds(self, mark: Mark) -> float:
        return float(mark) * 1e-9

    def reserved_bytes(self) -> int:
        """The most memory that the device's caching allocator has reserved."""
        return 0


class DeviceClock:
    """Events in the streams of a CUDA device, on the host's time axis: they mark when work really ran."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        self._zero, self._began = self.mark(), time.perf_counter()

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def when_done(self, work: Any, into: list[Mark]) -> None:
        with torch.cuda.stream(self._side):
            work.wait()  # orders the side stream after the communication, and returns
            into.append(self.mark())

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def seconds(self, mark: Mark) -> float:
        return self._began + float(self._zero.elapsed_time(mark)) * 1e-3

    def reserved_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)


Clock = HostClock | DeviceClock


@dataclass(slots=True)
class _Communication:
    """A communication that `start` began at `began`. `rounds` are the times at which its works reported their end, on a
    thread of the backend and perhaps late. `waited` is when its wait returned: it had ended by then."""

    start: fx.Node
    began: Mark
    rounds: list[list[Mark]]
    waited: Mark | None = None

    def seconds(self, clock: Clock) -> tuple[float, float] | None:
        """When it ran; None if nothing had to move."""
        done = [clock.seconds(mark) for marks in self.rounds for mark in marks]
        if not done:
            return None
        latest = max(done) if self.waited is None else min(max(done), clock.seconds(self.waited))
        return clock.seconds(self.began), latest


@dataclass(slots=True)
class Recorder:
    """Receives the events of executors, as their meter and recorder. `posted` are the times at which the rounds of a
    communication started by the current task ended, on the rank of a cluster."""

    clock: Clock
    num_local_devices: int
    posted: list[list[Mark]] = field(default_factory=list)
    _tasks: list[list[tuple[Task, Mark, Mark]]] = field(init=False)
    _copies: list[list[_Communication]] = field(init=False)
    _values: list[list[tuple[fx.Node, Mark, tuple[tuple[int, int], ...] | None]]] = field(init=False)

    def __post_init__(self) -> None:
        self._tasks = [[] for _ in range(self.num_local_devices)]
        self._copies = [[] for _ in range(self.num_local_devices)]
        self._values = [[] for _ in range(self.num_local_devices)]

    def mark(self) -> Mark:
        return self.clock.mark()

    def ran(self, index: int, task: Task, began: Mark) -> None:
        """A task of local device `index` ran from `began` until now."""
        now = self.clock.mark()
        self._tasks[index].append((task, began, now))
        posted, self.posted = self.posted, []
        if task.is_wait:
            start = task.node.all_input_nodes[0]
            own = next((copy for copy in reversed(self._copies[index]) if copy.start is start), None)
            if own is not None:  # None if nothing had to move
                own.rounds.extend(posted)  # a further round of the same communication
                own.waited = now
        elif posted:
            self._copies[index].append(_Communication(task.node, began, posted))

    def copied(self, index: int, start: fx.Node, began: Mark) -> None:
        """The communication that `start` began on local device `index` ran from `began` until now."""
        self._copies[index].append(_Communication(start, began, [[self.clock.mark()]]))

    def action_begins(self) -> None:
        """Tasks run from now on. Communications posted earlier (comparisons of ranks, parameters gathered before the
        step) belong to none of them."""
        self.posted = []

    def begun(self, works: Iterable[Any]) -> None:
        """Communications of torch.distributed have begun, as a part of the current task."""
        done: list[Mark] = []
        for work in works:
            self.clock.when_done(work, done)
        self.posted.append(done)

    def on_value(self, index: int, node: fx.Node, value: Any) -> None:
        values = value if isinstance(value, (tuple, list)) else (value,)
        storages = tuple(_storage(x) for x in values if isinstance(x, Tensor))
        self._values[index].append((node, self.clock.mark(), storages))

    def freed(self, index: int, node: fx.Node) -> None:
        self._values[index].append((node, self.clock.mark(), None))

    def hold(self, state: State, ranks: Sequence[Compiled]) -> None:
        """Treat the pieces of the state as values that exist already."""
        nodes = [
            {(i.kind, i.name): node for i, node in zip(rank.graph.inputs, rank.nodes, strict=False)} for rank in ranks
        ]
        for item, layout in state.items:
            pieces = state.pieces[item.kind, item.name]
            for device, piece in zip(state.holders(layout), pieces, strict=True):
                index = state.devices.index(device)
                if (item.kind, item.name) in nodes[index]:
                    self.on_value(index, nodes[index][item.kind, item.name], piece)

    def traces(self, devices: Sequence[int], began: Mark, ended: Mark) -> list[DeviceTrace]:
        """The recorded traces, per local device. Called once, when all is done."""
        self.clock.settle()
        at = self.clock.seconds
        traces = []
        for i, device in enumerate(devices):
            events = [Event(t.node.name, at(b), at(e), False, _fused_names(t)) for t, b, e in self._tasks[i]]
            for copy in self._copies[i]:
                if (times := copy.seconds(self.clock)) is not None:
                    events.append(Event(copy.start.name, *times, True))
            events.sort(key=lambda event: (event.begin, event.end))
            changes, before = _changes(self._values[i], at, at(began))
            reserved = self.clock.reserved_bytes()
            traces.append(
                DeviceTrace(
                    device=device,
                    began=at(began),
                    ended=at(ended),
                    events=tuple(events),
                    changes=changes,
                    persistent_bytes=before,
                    reserved_bytes=reserved,
                )
            )
        return traces


def _storage(x: Tensor) -> tuple[int, int]:
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _fused_names(task: Task) -> tuple[str, ...]:
    return () if task.fused is None else tuple(node.name for node in task.fused.nodes)


def _changes(
    values: Sequence[tuple[fx.Node, Mark, tuple[tuple[int, int], ...] | None]],
    at: Callable[[Mark], float],
    began: float,
) -> tuple[tuple[Change, ...], int]:
    """Changes of memory, and the bytes before the first change: a storage counts once, however many views it has."""
    users: dict[int, int] = {}
    owner: dict[int, tuple[str, int]] = {}
    seen: dict[fx.Node, tuple[tuple[int, int], ...]] = {}
    changes: list[Change] = []
    before = 0
    for node, mark, results in values:
        for pointer, size in results or ():
            users[pointer] = users.get(pointer, 0) + 1
            if users[pointer] == 1:
                owner[pointer] = (node.name, size)
                changes.append(Change(node.name, at(mark), size))
                before += size if at(mark) <= began else 0
        if results is not None:
            seen[node] = results
            continue
        for pointer, _ in seen.pop(node, ()):
            users[pointer] -= 1
            if not users[pointer]:
                name, size = owner.pop(pointer)
                changes.append(Change(name, at(mark), -size))
    return tuple(changes), before


def gathered(own: Sequence[DeviceTrace]) -> list[DeviceTrace]:
    """The traces of all ranks, on every rank, in the time of rank 0. All ranks of the job call it together.

    Processes on the same machine share a clock. Clocks of other machines are aligned with rank 0's by the times at
    which they leave the same barriers, which is as exact as a barrier is short.
    """
    boot = _BOOT.read_text() if _BOOT.exists() else ""
    moments = []
    for _ in range(_NUM_ROUNDS):
        dist.barrier()
        moments.append(time.perf_counter())
    received: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(received, (boot, moments, list(own)))
    first_boot, first_moments, _ = received[0]
    shifted = []
    for its_boot, its_moments, traces in received:
        same = bool(first_boot) and its_boot == first_boot
        ahead = 0.0 if same else median(a - b for a, b in zip(its_moments, first_moments, strict=True))
        shifted += [_shifted(trace, -ahead) for trace in traces]
    return shifted


def _shifted(trace: DeviceTrace, by: float) -> DeviceTrace:
    if not by:
        return trace
    return replace(
        trace,
        began=trace.began + by,
        ended=trace.ended + by,
        events=tuple(replace(e, begin=e.begin + by, end=e.end + by) for e in trace.events),
        changes=tuple(replace(c, at=c.at + by) for c in trace.changes),
    )
