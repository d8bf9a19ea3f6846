"""Which communications are exposed, for how long, and why."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from meshweave.cost.simulate.clock import Times
from meshweave.cost.simulate.result import Reason
from meshweave.cost.simulate.tasks import RoleTasks, Tasks
from meshweave.ir.graph import op_name, origin_of

_LOOK_AHEAD = 64  # kernels after a wait that are searched for independent work
_TICK = 1e-9  # seconds below which two times are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Per copy its exposed seconds and reasons; per role compute, communication, exposed and idle seconds."""

    exposed: dict[int, float]
    reasons: dict[int, tuple[Reason, ...]]
    compute: tuple[float, ...]
    communication: tuple[float, ...]
    total: tuple[float, ...]
    idle: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Gap:
    """A role computes nothing from `begin` to `end`: `wait` waits for the copy `stalled` (-1: the step's end)."""

    begin: float
    end: float
    wait: int
    stalled: int


@dataclass
class _Analysis:
    tasks: Tasks
    times: Times
    exposed: dict[int, float] = field(default_factory=dict)
    reasons: dict[int, list[Reason]] = field(default_factory=dict)

    @cached_property
    def copies(self) -> list[list[list[int]]]:
        """Per role and channel, its copies in order."""
        copies: list[list[list[int]]] = [[] for _ in self.tasks.roles]
        for stream in self.tasks.graph.streams[len(self.tasks.roles) :]:
            for role in self.tasks.tasks[stream[0]].roles if stream else ():
                copies[role].append([c for c in stream if self.tasks.tasks[c].seconds > 0])
        return copies

    @cached_property
    def channel_of(self) -> dict[int, int]:
        return {c: s for s, stream in enumerate(self.tasks.graph.streams) for c in stream}

    @cached_property
    def reads(self) -> dict[int, frozenset[int]]:
        """By task of a compute stream, the storages that it reads."""
        return {t: role.storages_read(self.tasks.tasks[t]) for role in self.tasks.roles for t in role.tasks}

    def run(self) -> Exposure:
        compute, communication, total, idle = [], [], [], []
        for index, role in enumerate(self.tasks.roles):
            busy = sum(self.times.ends[t] - self.times.starts[t] for t in role.tasks)
            gaps = list(self.gaps(role))
            shown = sum(self.attribute(index, gap) for gap in gaps)
            compute.append(busy)
            communication.append(
                covered_seconds(
                    [(self.times.starts[c], self.times.ends[c]) for line in self.copies[index] for c in line]
                )
            )
            total.append(shown)
            idle.append(max(0.0, self.times.seconds - busy - shown))
        reasons = {c: tuple(reasons_of) for c, reasons_of in self.reasons.items()}
        return Exposure(
            exposed=self.exposed,
            reasons=reasons,
            compute=tuple(compute),
            communication=tuple(communication),
            total=tuple(total),
            idle=tuple(idle),
        )

    def gaps(self, role: RoleTasks) -> Iterator[_Gap]:
        last = 0.0
        for task in role.tasks:
            begin = self.times.starts[task]
            if begin > last + _TICK:
                needs = self.tasks.graph.needs[task]
                stalled = max(needs, key=lambda n: self.times.ends[n], default=-1)
                yield _Gap(last, begin, task, stalled)
            last = self.times.ends[task]
        if self.times.seconds > last + _TICK:
            yield _Gap(last, self.times.seconds, -1, -1)

    def attribute(self, role: int, gap: _Gap) -> float:
        """Divide a gap among the communications that run in it, with reasons. Returns the seconds in which any runs."""
        running = [c for line in self.copies[role] for c in self._in(line, gap)]
        cuts = sorted({gap.begin, gap.end, *(t for c in running for t in (self.times.starts[c], self.times.ends[c]))})
        cuts = [t for t in cuts if gap.begin <= t <= gap.end]
        shares: dict[int, float] = {}
        for a, b in pairwise(cuts):
            active = [c for c in running if self.times.starts[c] <= a and self.times.ends[c] >= b]
            chosen = self._blocking_copies(active, gap.stalled)
            for c in chosen:
                shares[c] = shares.get(c, 0.0) + (b - a) / len(chosen)
        for c, seconds in shares.items():
            self.exposed[c] = self.exposed.get(c, 0.0) + seconds
            self.reasons.setdefault(c, []).extend(self.why(role, c, seconds, gap))
        return sum(shares.values())

    def _in(self, line: Sequence[int], gap: _Gap) -> Iterator[int]:
        at = bisect_left(line, gap.begin, key=lambda c: self.times.ends[c])
        while at < len(line) and self.times.starts[line[at]] < gap.end:
            yield line[at]
            at += 1

    def _blocking_copies(self, active: Sequence[int], stalled: int) -> list[int]:
        """The stalled copy if it runs, else the running copy of its channel, else all running copies."""
        if stalled in active:
            return [stalled]
        same = [c for c in active if stalled >= 0 and self.channel_of[c] == self.channel_of.get(stalled)]
        return same or list(active)

    # reasons

    def why(self, role: int, copy: int, seconds: float, gap: _Gap) -> Iterator[Reason]:
        if gap.stalled < 0:
            yield Reason("dependency", seconds, "the step ends with it: nothing is left to compute")
            return
        if copy != gap.stalled:
            text = f"{self.text(gap.stalled)}, which is waited for, comes after it"
            yield Reason("channel", seconds, text, gap.stalled)
            return
        left = seconds
        for reason in self._causes(role, copy, gap):
            if left > _TICK and reason.seconds > _TICK:
                explained = min(left, reason.seconds)
                left -= explained
                yield Reason(reason.kind, explained, reason.text, reason.blocker)
        if left > _TICK:
            yield Reason("dependency", left, f"{self.text(gap.wait)} needs it, and nothing else is ready to compute")

    def _causes(self, role: int, copy: int, gap: _Gap) -> Iterator[Reason]:
        """The causes of its length or delay, each with the most seconds that it can explain."""
        task, times = self.tasks.tasks[copy], self.times
        stretched = times.ends[copy] - times.starts[copy] - task.seconds
        if stretched > _TICK:
            other = self._sharing(role, copy)
            beside = f" with {self.text(other)}" if other >= 0 else ""
            yield Reason("link", stretched, f"its link is shared{beside}", other)
        starts = self.tasks.graph.needs[copy]
        own = next((s for s in starts if role in self.tasks.tasks[s].roles), None)
        last = max(starts, key=lambda s: times.ends[s])
        late = times.ends[last] - (times.ends[own] if own is not None else gap.begin)
        if late > _TICK and role not in self.tasks.tasks[last].roles:
            yield Reason("peer", late, f"role {self.tasks.tasks[last].roles[0]} starts it later", last)
        behind = self._before(copy)
        queued = times.starts[copy] - times.ends[last]
        if behind >= 0 and queued > _TICK:
            yield Reason("channel", queued, f"its channel was busy with {self.text(behind)}", behind)
        ready, before = self._ready(role, own) if own is not None else (0.0, -1)
        if own is not None and times.starts[own] - ready > _TICK:
            text = f"its input is ready {(times.starts[own] - ready) * 1e3:.3f} ms before it is started"
            after = f", after {self.text(before)}" if before >= 0 else ""
            yield Reason("late", times.starts[own] - ready, text + after, before)
        free, first = self._independent(role, gap.wait)
        if free > _TICK:
            text = f"{self.text(first)} does not need it but comes after its wait ({free * 1e3:.3f} ms of such compute)"
            yield Reason("order", free, text, first)

    def _sharing(self, role: int, copy: int) -> int:
        """The communication that runs beside it the longest on the same link."""
        levels = {level for level, _ in self.tasks.tasks[copy].usage}
        begin, end = self.times.starts[copy], self.times.ends[copy]
        best, busiest = 0.0, -1
        for line in self.copies[role]:
            for other in self._in(line, _Gap(begin, end, -1, -1)):
                shared = min(end, self.times.ends[other]) - max(begin, self.times.starts[other])
                if other != copy and shared > best and levels & {level for level, _ in self.tasks.tasks[other].usage}:
                    best, busiest = shared, other
        return busiest

    def _before(self, copy: int) -> int:
        stream, index = self.tasks.graph.stream_of[copy], self.tasks.graph.index_of[copy]
        return self.tasks.graph.streams[stream][index - 1] if index else -1

    def _ready(self, role: int, start: int) -> tuple[float, int]:
        """When the operand of a start is complete, and the kernel right before the start."""
        role_tasks = self.tasks.roles[role]
        wanted = self.reads[start]
        at = self.tasks.graph.index_of[start] - 1
        before = -1
        while at >= 0:
            number = role_tasks.tasks[at]
            task = self.tasks.tasks[number]
            if before < 0 and task.kernel is not None:
                before = number
            if task.kind != "start" and wanted & role_tasks.storages_written(task):
                return self.times.ends[number], before
            at -= 1
        return 0.0, before

    def _independent(self, role: int, wait: int) -> tuple[float, int]:
        """Seconds of compute after a wait that do not need it, and the first such kernel."""
        role_tasks = self.tasks.roles[role]
        tainted = set(role_tasks.storages_written(self.tasks.tasks[wait]))
        at, seen, seconds, first = self.tasks.graph.index_of[wait] + 1, 0, 0.0, -1
        while at < len(role_tasks.tasks) and seen < _LOOK_AHEAD:
            task = self.tasks.tasks[role_tasks.tasks[at]]
            if task.microbatch != self.tasks.tasks[wait].microbatch:
                break
            if task.kernel is None:
                tainted |= role_tasks.storages_written(task) if task.kind == "wait" else frozenset()
            elif not tainted.isdisjoint(self.reads[role_tasks.tasks[at]]):
                tainted |= role_tasks.storages_written(task)
            else:
                seconds += task.seconds
                first = role_tasks.tasks[at] if first < 0 else first
            seen += task.kernel is not None
            at += 1
        return seconds, first

    def text(self, number: int) -> str:
        node = self.tasks.tasks[number].node
        origin = origin_of(node)
        return f"{op_name(node.target)} {node.name}" + (f" ({origin.source})" if origin.source else "")


def covered_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds inside any of the intervals."""
    total, last = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


def exposure_of(tasks: Tasks, times: Times) -> Exposure:
    """Divides every interval in which a role computes nothing among the communications that run in it, with reasons.
    The reasons of a communication add up to its exposed seconds."""
    return _Analysis(tasks, times).run()
