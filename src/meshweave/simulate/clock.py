"""The virtual clock: plays a schedule against durations. Communications that share a link slow each other, and compute
slows while communication runs beside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from meshweave.engine.machine import Done, Machine, Release, Run, Schedule
from meshweave.errors import VerifyError
from meshweave.simulate.tasks import Task

Slowdown = Callable[[frozenset[str]], float]


@dataclass(frozen=True, slots=True)
class Times:
    """When each task began and ended, in seconds."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]


@dataclass(slots=True)
class _Stream:
    """What a stream runs now: tasks from `index` up to `stop` of it; `left` seconds of the first at rate 1."""

    index: int = 0
    stop: int = 0
    left: float = 0.0
    rate: float = 1.0
    since: float = 0.0
    version: int = 0  # of its entry in the heap: older ones are void


@dataclass(slots=True)
class _Clock:
    schedule: Schedule
    tasks: Sequence[Task]
    num_roles: int
    slowdown: Slowdown
    machine: Machine = field(init=False)
    streams: list[_Stream] = field(init=False)
    starts: list[float] = field(init=False)
    ends: list[float] = field(init=False)
    heap: list[tuple[float, int, int]] = field(default_factory=list)  # (end, stream, version)
    instant: deque[int] = field(default_factory=deque)  # streams whose task takes no time
    active: list[list[int]] = field(init=False)  # per role: streams of running communications
    factors: dict[frozenset[str], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.machine = Machine(self.schedule)
        self.streams = [_Stream() for _ in self.schedule.streams]
        self.starts = [0.0] * len(self.tasks)
        self.ends = [0.0] * len(self.tasks)
        self.active = [[] for _ in range(self.num_roles)]

    def play(self) -> Times:
        machine, heap, streams = self.machine, self.heap, self.streams
        now, instant = 0.0, self.instant
        self.act(machine.handle(Release(0)), now)
        while heap or instant:
            if instant:
                self.finish(instant.popleft(), now)
                continue
            now, number, version = heappop(heap)
            if streams[number].version == version:
                self.finish(number, now)
        if left := machine.unfinished():
            raise VerifyError(
                f"{len(left)} tasks of the simulated step wait for ever", got=self.tasks[left[0]].node.name
            )
        return Times(tuple(self.starts), tuple(self.ends))

    def act(self, actions: Sequence[object], now: float) -> None:
        for action in actions:
            if type(action) is Run:
                stream = self.streams[action.stream]
                stream.index, stream.stop = action.start, action.stop
                self.begin(action.stream, now)

    def begin(self, number: int, now: float) -> None:
        """Begin the first task of a stream's run."""
        stream = self.streams[number]
        task = self.schedule.streams[number][stream.index]
        held = self.tasks[task]
        self.starts[task] = begin = max(now, held.issued if held.kernel is not None else 0.0)
        stream.left, stream.since, stream.rate = held.seconds, begin, 1.0
        if not held.seconds:
            self.instant.append(number)
            return
        if held.usage:
            for role in held.roles:
                self.active[role].append(number)
            self.share(held.roles, now)
            return
        if held.kernel is not None and self.active[number]:
            stream.rate = self.compute_rate(number)
        self.push(number, stream)

    def push(self, number: int, stream: _Stream) -> None:
        stream.version += 1
        heappush(self.heap, (stream.since + stream.left / stream.rate, number, stream.version))

    def finish(self, number: int, now: float) -> None:
        """The first task of a stream's run is done: begin the next, or report the run."""
        stream = self.streams[number]
        task = self.schedule.streams[number][stream.index]
        self.ends[task] = now
        held = self.tasks[task]
        stream.version += 1
        if held.usage and held.seconds:
            for role in held.roles:
                self.active[role].remove(number)
            self.share(held.roles, now)
        stream.index += 1
        if stream.index < stream.stop:
            self.begin(number, now)
        else:
            self.act(self.machine.handle(Done(number, stream.stop)), now)

    def share(self, roles: Sequence[int], now: float) -> None:
        """Set the rates anew of everything that runs beside a communication that began or ended."""
        touched = dict.fromkeys(number for role in roles for number in self.active[role])
        for number in touched:
            self.change(number, self.copy_rate(number), now)
        for role in roles:
            stream = self.streams[role]
            if stream.index < stream.stop and self.tasks[self.schedule.streams[role][stream.index]].kernel is not None:
                self.change(role, self.compute_rate(role), now)

    def change(self, number: int, rate: float, now: float) -> None:
        stream = self.streams[number]
        if stream.rate != rate or stream.since == now:
            stream.left = max(0.0, stream.left - max(0.0, now - stream.since) * stream.rate)
            stream.since, stream.rate = max(now, stream.since), rate
            self.push(number, stream)

    def task_of(self, number: int) -> Task:
        return self.tasks[self.schedule.streams[number][self.streams[number].index]]

    def copy_rate(self, number: int) -> float:
        """1, or less where the communications of a role want more of a link than there is."""
        held, rate = self.task_of(number), 1.0
        for role in held.roles:
            total: dict[str, float] = {}
            for other in self.active[role]:
                for level, share in self.task_of(other).usage:
                    total[level] = total.get(level, 0.0) + share
            rate = min(rate, *(1.0 / max(1.0, total[level]) for level, _ in held.usage))
        return rate

    def compute_rate(self, role: int) -> float:
        levels = frozenset(level for other in self.active[role] for level, _ in self.task_of(other).usage)
        if levels not in self.factors:
            self.factors[levels] = 1.0 / self.slowdown(levels) if levels else 1.0
        return self.factors[levels]


def play(schedule: Schedule, tasks: Sequence[Task], num_roles: int, slowdown: Slowdown) -> Times:
    """Begin and end of every task. Streams 0 .. num_roles - 1 are the compute of the roles. `slowdown(levels)` says by
    how much compute is slower while communications on these link levels run. Raises VerifyError for a deadlock."""
    return _Clock(schedule, tasks, num_roles, slowdown).play()
