"""A clock without tricks, driven by the event machine of the runtimes: what `simulate.clock` must be equal to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from meshweave.cost.simulate.clock import Slowdown, Times, Work
from meshweave.engine.machine import Action, Done, EventMachine, Release, Run, Schedule


class _EventClock:
    """At every event all rates are counted anew; then it is the time of the next event."""

    def __init__(self, work: Work, streams: Sequence[Sequence[int]], num_roles: int, slowdown: Slowdown) -> None:
        self.work, self.num_roles, self.slowdown, self.now = work, num_roles, slowdown, 0.0
        num = len(work.seconds)
        schedule = Schedule(tuple(map(tuple, streams)), tuple(map(tuple, work.needs)), (0,) * num)
        self.streams, self.machine = schedule.streams, EventMachine(schedule)
        self.starts, self.ends = [0.0] * num, [0.0] * num
        self.runs: dict[int, list[int]] = {}  # by stream: index of the task that runs, and where the run stops
        self.left: dict[int, float] = {}  # by stream: seconds of that task

    def play(self) -> Times:
        self.act(self.machine.handle(Release(0)))
        while self.runs:
            rates = {stream: self.rate(stream) for stream in self.runs}
            first = min(self.runs, key=lambda stream: self.until(stream, rates[stream]))
            has_begun = self.starts[self.task(first)] <= self.now
            until = self.until(first, rates[first])
            for stream in self.left:
                if self.starts[self.task(stream)] <= self.now:
                    self.left[stream] -= (until - self.now) * rates[stream]
            self.now = until
            if has_begun:
                self.finish(first)
        assert not self.machine.unfinished()
        return Times(self.starts, self.ends, self.now)

    def act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Run):
                self.runs[action.stream] = [action.start, action.stop]
                self.begin(action.stream)

    def begin(self, stream: int) -> None:
        task = self.task(stream)
        self.left[stream] = seconds = self.work.seconds[task]
        self.starts[task] = max(self.now, self.work.issued[task]) if seconds else self.now

    def task(self, stream: int) -> int:
        return self.streams[stream][self.runs[stream][0]]

    def until(self, stream: int, rate: float) -> float:
        """When what runs in a stream ends; where that has not begun yet, when it does."""
        begin = self.starts[self.task(stream)]
        return begin if begin > self.now else self.now + max(0.0, self.left[stream]) / rate

    def finish(self, stream: int) -> None:
        run = self.runs[stream]
        self.ends[self.task(stream)] = self.now
        run[0] += 1
        if run[0] < run[1]:
            self.begin(stream)
            return
        del self.runs[stream], self.left[stream]
        self.act(self.machine.handle(Done(stream, run[1])))

    def wanted(self, role: int) -> dict[str, float]:
        """What the running communications of a role want of each level; one without seconds does not run."""
        found: dict[str, float] = {}
        for task in map(self.task, self.runs):
            if role in self.work.roles[task] and self.work.seconds[task]:
                for level, share in self.work.usage[task]:
                    found[level] = found.get(level, 0.0) + share
        return found

    def rate(self, stream: int) -> float:
        task = self.task(stream)
        if not self.work.seconds[task]:
            return 1.0
        if self.work.is_kernel[task]:
            levels = frozenset(self.wanted(stream))
            return 1.0 / self.slowdown(levels) if levels else 1.0
        wanted = [self.wanted(role)[level] for role in self.work.roles[task] for level, _ in self.work.usage[task]]
        return 1.0 / max([1.0, *wanted])


def play_on_machine(work: Work, streams: Sequence[Sequence[int]], num_roles: int, slowdown: Slowdown) -> Times:
    """As `simulate.clock.play`. Times of the same instant may differ in their last digits."""
    return _EventClock(work, streams, num_roles, slowdown).play()
