"""The virtual clock: when each task of a set of streams begins and ends.

Communications that exceed a link's bandwidth together slow each other, and compute slows beside communication. The
simulator of steps, the scheduler's search and the gate of ring algorithms all use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from meshweave.errors import VerifyError

Slowdown = Callable[[frozenset[str]], float]
Usage = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Times:
    """When each task began and ended, and the end of all, in seconds."""

    starts: Sequence[float]
    ends: Sequence[float]
    seconds: float


@dataclass(slots=True)
class Work:
    """The tasks of all streams. `seconds` is a task's duration on an otherwise idle machine; it begins after the
    previous task of its stream and after its `needs`, and (if it takes time) not before the time `issued`. A
    communication takes the share `usage` of each link level of its `roles`. `is_kernel`: compute, which is slower
    beside the communications of its role. `names`, for errors, may be omitted.
    """

    seconds: list[float] = field(default_factory=list)
    needs: list[Sequence[int]] = field(default_factory=list)
    usage: list[Usage] = field(default_factory=list)
    roles: list[Sequence[int]] = field(default_factory=list)
    is_kernel: list[bool] = field(default_factory=list)
    issued: list[float] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def add(
        self,
        seconds: float,
        needs: Sequence[int] = (),
        usage: Usage = (),
        roles: Sequence[int] = (0,),
        *,
        is_kernel: bool = False,
        issued: float = 0.0,
    ) -> int:
        """Add a task; returns its number."""
        self.seconds.append(seconds)
        self.needs.append(needs)
        self.usage.append(usage)
        self.roles.append(roles)
        self.is_kernel.append(is_kernel)
        self.issued.append(issued)
        return len(self.seconds) - 1


@dataclass(slots=True)
class _Stream:
    """The task at `index` has to wait if `left` is 0; else `left` seconds of it at rate 1 remained at time `since`."""

    tasks: Sequence[int]
    index: int = 0
    usage: Usage = ()  # of a running communication
    left: float = 0.0
    rate: float = 1.0
    since: float = 0.0
    version: int = 0  # version of its entry in the heap: older entries are void


@dataclass(frozen=True, slots=True)
class _Rates:
    """The rates of concurrent communications, by their usage of links, and the speed of compute beside them."""

    of: dict[Usage, float]
    compute: float


@dataclass(slots=True)
class _Clock:
    work: Work
    streams: list[_Stream]
    num_roles: int
    slowdown: Slowdown
    now: float = 0.0
    starts: list[float] = field(init=False)
    ends: list[float] = field(init=False)  # -1: not done
    ready: list[int] = field(init=False)  # compute streams whose next task may be able to begin
    waiting: dict[int, list[int]] = field(default_factory=dict)  # task -> streams that are blocked until it is done
    heap: list[tuple[float, int, int]] = field(default_factory=list)  # (end, stream, version)
    active: list[list[int]] = field(init=False)  # by role: streams of running communications
    changed: set[int] = field(default_factory=set)  # roles of communications that have begun or ended at this moment
    rates: list[_Rates] = field(init=False)  # by role
    known: dict[tuple[Usage, ...], _Rates] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num = len(self.work.seconds)
        self.starts, self.ends = [0.0] * num, [-1.0] * num
        self.active = [[] for _ in range(self.num_roles)]
        self.rates = [_Rates({}, 1.0)] * self.num_roles
        self.ready = list(range(self.num_roles))

    def run(self) -> Times:
        heap, streams = self.heap, self.streams
        for number in range(self.num_roles, len(streams)):
            self.advance(number)
        while True:
            if self.ready:
                self.advance(self.ready.pop())
            elif self.changed:
                self.share()
            elif heap:
                now, number, version = heappop(heap)
                if streams[number].version == version:
                    self.now = now
                    self.finish(number)
            else:
                break
        left = [stream.tasks[stream.index] for stream in streams if stream.index < len(stream.tasks)]
        if left:
            name = self.work.names[left[0]] if self.work.names else f"task {left[0]}"
            raise VerifyError(f"{len(left)} streams of the simulated step never end: deadlock", got=name)
        return Times(self.starts, self.ends, self.now)

    def advance(self, number: int) -> None:
        """Run a stream up to a task that has to wait, or during which other events may occur."""
        stream, work, now = self.streams[number], self.work, self.now
        needs, usages, lengths, is_kernel, issued = work.needs, work.usage, work.seconds, work.is_kernel, work.issued
        tasks, starts, ends, waiting = stream.tasks, self.starts, self.ends, self.waiting
        is_role = number < self.num_roles
        pace, limit = (self.rates[number].compute, self.limit()) if is_role else (1.0, now)
        for index in range(stream.index, len(tasks)):
            task = tasks[index]
            for need in needs[task]:
                if ends[need] < 0:
                    waiting.setdefault(need, []).append(number)
                    stream.index = index
                    return
            starts[task] = begin = now
            if seconds := lengths[task]:
                if issued[task] > now:
                    starts[task] = begin = issued[task]
                if self.changed and is_role:
                    self.share()
                    pace, limit = self.rates[number].compute, self.limit()
                end = begin + (seconds / pace if is_kernel[task] else seconds)
                if end > limit or usages[task]:
                    stream.index, stream.left, stream.since = index, seconds, begin
                    self.begin(number, task)
                    return
                now = self.now = end
            ends[task] = now
            if task in waiting:
                self.wake(task)
                limit = now
        stream.index = len(tasks)

    def limit(self) -> float:
        """The time until which only this stream has events."""
        if self.ready:
            return self.now
        return self.heap[0][0] if self.heap else inf

    def begin(self, number: int, task: int) -> None:
        """Begin a task during which other events may occur."""
        stream, work = self.streams[number], self.work
        if usage := work.usage[task]:
            stream.rate, stream.usage = 0.0, usage  # until links are shared
            for role in work.roles[task]:
                self.active[role].append(number)
            self.changed.update(work.roles[task])
        else:
            stream.rate = self.rates[number].compute if work.is_kernel[task] else 1.0
            self.push(number)

    def wake(self, task: int) -> None:
        """Unblock the streams that wait for `task`."""
        for number in self.waiting.pop(task):
            if number < self.num_roles:
                self.ready.append(number)
            else:
                self.advance(number)

    def finish(self, number: int) -> None:
        """The task that a stream runs is done."""
        stream, work = self.streams[number], self.work
        task = stream.tasks[stream.index]
        stream.version, stream.left = stream.version + 1, 0.0
        stream.index += 1
        self.ends[task] = self.now
        if stream.usage:
            stream.usage = ()
            for role in work.roles[task]:
                self.active[role].remove(number)
            self.changed.update(work.roles[task])
        if task in self.waiting:
            self.wake(task)
        if number < self.num_roles:
            self.ready.append(number)
        else:
            self.advance(number)

    def push(self, number: int) -> None:
        stream = self.streams[number]
        stream.version += 1
        heappush(self.heap, (stream.since + stream.left / stream.rate, number, stream.version))

    def share(self) -> None:
        """Update the rates of everything that runs beside communications that began or ended."""
        streams, work, rates = self.streams, self.work, self.rates
        for role in self.changed:
            usages = tuple([streams[other].usage for other in self.active[role]])
            if usages not in self.known:
                self.known[usages] = self.shared(usages)
            rates[role] = self.known[usages]
        for role in self.changed:
            for number in self.active[role]:
                stream = streams[number]
                roles = work.roles[stream.tasks[stream.index]]
                rate = (
                    rates[role].of[stream.usage] if len(roles) == 1 else min([rates[r].of[stream.usage] for r in roles])
                )
                if stream.rate != rate:
                    self.change(number, rate)
            stream = streams[role]
            if stream.left and stream.rate != rates[role].compute and work.is_kernel[stream.tasks[stream.index]]:
                self.change(role, rates[role].compute)
        self.changed.clear()

    def shared(self, usages: Sequence[Usage]) -> _Rates:
        """The rate of each: 1, or less if together they exceed the bandwidth of a link."""
        wanted: dict[str, float] = {}
        for usage in usages:
            for level, share in usage:
                wanted[level] = wanted.get(level, 0.0) + share
        of = {usage: 1.0 / max(1.0, *(wanted[level] for level, _ in usage)) for usage in usages}
        return _Rates(of, 1.0 / self.slowdown(frozenset(wanted)) if wanted else 1.0)

    def change(self, number: int, rate: float) -> None:
        stream, now = self.streams[number], self.now
        stream.left = max(0.0, stream.left - max(0.0, now - stream.since) * stream.rate)
        stream.since, stream.rate = max(now, stream.since), rate
        self.push(number)


def play(work: Work, streams: Sequence[Sequence[int]], num_roles: int, slowdown: Slowdown) -> Times:
    """Begin and end of every task. Streams 0 .. num_roles - 1 are the compute of the roles. `slowdown(levels)` is the
    factor by which compute is slower while communications on these link levels run. Raises VerifyError for a
    deadlock."""
    return _Clock(work, [_Stream(tasks) for tasks in streams], num_roles, slowdown).run()


def makespan(
    order: Sequence[int],
    seconds: Sequence[float],
    channel: Sequence[int],
    copy: Sequence[float],
    host: Sequence[float],
    num_channels: int,
) -> float:
    """The seconds of `play` for a single role whose communications slow nothing, in a single pass over the order of its
    stream.

    An entry i of `order` is a kernel of `seconds[i]`, or starts the communication i, of `copy[i]`, on `channel[i]` (-1:
    a kernel); ~i waits for that, and then takes `host[i]` itself.
    """
    free, end, now = [0.0] * num_channels, [0.0] * len(seconds), 0.0
    for x in order:
        if x < 0:
            if end[~x] > now:
                now = end[~x]
            now += host[~x]
        elif channel[x] < 0:
            now += seconds[x]
        else:
            c = channel[x]
            begun = free[c] if free[c] > now else now
            free[c] = end[x] = begun + copy[x]
    return max(now, *free) if free else now
