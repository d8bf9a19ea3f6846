"""Schedules for tests: random ones, and drivers that answer the machine in a random order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import strategies as st

from meshweave.engine.machine import Action, Cancel, Done, Event, EventMachine, Failed, Release, Run, Schedule


@st.composite
def schedules(draw: st.DrawFn, is_acyclic: bool = True, num_parts: int = 3) -> Schedule:
    """Up to 24 tasks in up to 5 streams. Without `is_acyclic` needs may go round, so that not all of it can run.

    An acyclic one is drawn with an order in which it can run: needs and streams follow it, parts go up along it.
    """
    num = draw(st.integers(0, 24))
    order = draw(st.permutations(range(num)))
    num_streams = draw(st.integers(1, 5))
    is_channel = [draw(st.booleans()) for _ in range(num_streams)]
    streams: list[list[int]] = [[] for _ in range(num_streams)]
    stream_of: dict[int, int] = {}
    parts = [0] * num
    steps = sorted(draw(st.lists(st.integers(0, num_parts - 1), min_size=num, max_size=num)))
    for task, part in zip(order, steps, strict=True):
        stream_of[task] = draw(st.integers(0, num_streams - 1))
        streams[stream_of[task]].append(task)
        parts[task] = -1 if is_channel[stream_of[task]] else part
    needs: list[tuple[int, ...]] = [()] * num
    for at, task in enumerate(order):
        others = order[:at] if is_acyclic else order
        candidates = [t for t in others if stream_of[t] != stream_of[task]]
        chosen = draw(st.lists(st.sampled_from(candidates), unique=True, max_size=3)) if candidates else []
        needs[task] = tuple(chosen)
    return Schedule(tuple(map(tuple, streams)), tuple(needs), tuple(parts))


def predecessors(schedule: Schedule) -> list[set[int]]:
    """Per task all tasks that come before it, in its stream or by needs, at any distance."""
    direct = [set(needs) for needs in schedule.needs]
    for tasks in schedule.streams:
        for before, after in pairwise(tasks):
            direct[after].add(before)
    found: list[set[int]] = []
    for task in range(schedule.num_tasks):
        seen, pending = set[int](), list(direct[task])
        while pending:
            one = pending.pop()
            if one not in seen:
                seen.add(one)
                pending += direct[one]
        found.append(seen)
    return found


@dataclass
class Driver:
    """Answers runs in an order of its own. `fails(task)` says which tasks fail. `ran` are the tasks in the order in
    which they ended, `checked` is called when a run begins."""

    schedule: Schedule
    chooser: random.Random = field(default_factory=lambda: random.Random(0))
    fails: Callable[[int], bool] = lambda task: False
    ran: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = EventMachine(self.schedule)
        self.open: list[Run] = []

    def tell(self, event: Event) -> list[Action]:
        told = self.machine.handle(event)
        self.actions += told
        for action in told:
            if isinstance(action, Run):
                self.open.append(action)
            if isinstance(action, Cancel):
                self.cancelled += action.tasks
        return told

    def drain(self) -> None:
        """Answer every run that there is, in a random order, each with what follows from it."""
        while self.open:
            run = self.open.pop(self.chooser.randrange(len(self.open)))
            self.answer(run)

    def answer(self, run: Run) -> None:
        for index in range(run.start, run.stop):
            task = self.schedule.streams[run.stream][index]
            if self.fails(task):
                self.failed.append(task)
                self.tell(Failed(run.stream, index, f"task {task} broke"))
                return
            self.ran.append(task)
        self.tell(Done(run.stream, run.stop))

    def run(self, parts: Sequence[int] = (0, 1, 2)) -> Driver:
        for part in parts:
            self.tell(Release(part))
            self.drain()
        return self
