"""A plain clock, which counts all rates anew at each event: what `simulate.clock` must be equal to."""

from __future__ import annotations

from collections.abc import Sequence

from meshweave.cost.simulate.clock import Slowdown, Times, Work


class _EventClock:
    """At every event all rates are counted anew; then it is the time of the next event."""

    def __init__(self, work: Work, streams: Sequence[Sequence[int]], num_roles: int, slowdown: Slowdown) -> None:
        self.work, self.num_roles, self.slowdown, self.now = work, num_roles, slowdown, 0.0
        self.streams, num = streams, len(work.seconds)
        self.starts, self.ends = [0.0] * num, [0.0] * num
        self.done = [0] * len(streams)  # by stream, the tasks that have ended
        self.ended = set[int]()
        self.left: dict[int, float] = {}  # by stream: seconds of the task that runs

    def play(self) -> Times:
        self.begin()
        while self.left:
            rates = {stream: self.rate(stream) for stream in self.left}
            first = min(self.left, key=lambda stream: self.until(stream, rates[stream]))
            has_begun = self.starts[self.task(first)] <= self.now
            until = self.until(first, rates[first])
            for stream in self.left:
                if self.starts[self.task(stream)] <= self.now:
                    self.left[stream] -= (until - self.now) * rates[stream]
            self.now = until
            if has_begun:
                self.finish(first)
        assert len(self.ended) == len(self.ends)
        return Times(self.starts, self.ends, self.now)

    def begin(self) -> None:
        """The next task of each stream that is idle, if its needs have ended."""
        for stream, tasks in enumerate(self.streams):
            if stream in self.left or self.done[stream] == len(tasks):
                continue
            task = self.task(stream)
            if self.ended.issuperset(self.work.needs[task]):
                self.left[stream] = seconds = self.work.seconds[task]
                self.starts[task] = max(self.now, self.work.issued[task]) if seconds else self.now

    def task(self, stream: int) -> int:
        return self.streams[stream][self.done[stream]]

    def until(self, stream: int, rate: float) -> float:
        """When what runs in a stream ends; where that has not begun yet, when it does."""
        begin = self.starts[self.task(stream)]
        return begin if begin > self.now else self.now + max(0.0, self.left[stream]) / rate

    def finish(self, stream: int) -> None:
        self.ends[self.task(stream)] = self.now
        self.ended.add(self.task(stream))
        self.done[stream] += 1
        del self.left[stream]
        self.begin()

    def wanted(self, role: int) -> dict[str, float]:
        """What the running communications of a role want of each level; one without seconds does not run."""
        found: dict[str, float] = {}
        for task in map(self.task, self.left):
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


def play_by_events(work: Work, streams: Sequence[Sequence[int]], num_roles: int, slowdown: Slowdown) -> Times:
    """As `simulate.clock.play`. Times of the same instant may differ in their last digits."""
    return _EventClock(work, streams, num_roles, slowdown).play()
