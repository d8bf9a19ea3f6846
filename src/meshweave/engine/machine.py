"""The event machine: which tasks may run, as a pure function of past events.

No clock, no threads, no tensors. Tasks are in streams, which run in order, and may need tasks of other streams. A
driver releases the parts of a step, runs the tasks that the machine returns, and reports back: worker threads, a
virtual clock, or a driver that answers at once that everything is done. So what is checked, what is simulated and what
runs cannot differ in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from meshweave.errors import VerifyError

ANY_PART = -1  # of no part: may start with the first release


@dataclass(frozen=True, slots=True)
class Release:
    """Event: tasks of the parts up to `part`, and tasks of no part, may start."""

    part: int


@dataclass(frozen=True, slots=True)
class Done:
    """Event: the run of a stream up to index `stop` (exclusive) is complete."""

    stream: int
    stop: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Event: the task at `index` of the stream's run failed; those before it are done, those after it do not run."""

    stream: int
    index: int
    cause: object


@dataclass(frozen=True, slots=True)
class Run:
    """Action: run the tasks of a stream from index `start` to `stop` (exclusive), in order."""

    stream: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Action: these tasks will never run, because they come after a failed task."""

    tasks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Idle:
    """Action: every task of the parts up to `part` is done, failed or cancelled."""

    part: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Action: every task is done, failed or cancelled."""


Event = Release | Done | Failed
Action = Run | Cancel | Idle | Finished


@dataclass(frozen=True, slots=True)
class Schedule:
    """Tasks 0 .. n-1: their order in streams, the tasks of other streams that each needs, and the part of each.

    A stream belongs to parts (0, 1, ..., nondecreasing along it) or to none (ANY_PART throughout). `needs` does not
    repeat that a task comes after the previous task of its stream. Raises VerifyError for anything else.
    """

    streams: tuple[tuple[int, ...], ...]
    needs: tuple[tuple[int, ...], ...]
    parts: tuple[int, ...]
    stream_of: tuple[int, ...] = field(init=False, repr=False, compare=False)
    index_of: tuple[int, ...] = field(init=False, repr=False, compare=False)
    users: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        stream_of, index_of = self._places()
        users: list[list[int]] = [[] for _ in self.needs]
        for task, needs in enumerate(self.needs):
            for need in needs:
                _check_need(task, need, stream_of)
                users[need].append(task)
            if len(set(needs)) != len(needs):
                raise VerifyError(f"task {task} names a need twice", got=str(list(needs)), expected="each need once")
        self._check_parts()
        object.__setattr__(self, "stream_of", tuple(stream_of))
        object.__setattr__(self, "index_of", tuple(index_of))
        object.__setattr__(self, "users", tuple(map(tuple, users)))

    @property
    def num_tasks(self) -> int:
        return len(self.needs)

    def _places(self) -> tuple[list[int], list[int]]:
        """Stream and index of every task."""
        num = len(self.needs)
        if len(self.parts) != num:
            raise VerifyError(
                "a schedule needs an entry in needs and in parts for every task",
                got=f"{num} entries in needs, {len(self.parts)} in parts",
            )
        stream_of, index_of = [-1] * num, [0] * num
        for stream, tasks in enumerate(self.streams):
            for index, task in enumerate(tasks):
                if not 0 <= task < num:
                    raise VerifyError(f"stream {stream} has an unknown task {task}", expected=f"0 to {num - 1}")
                if stream_of[task] >= 0:
                    raise VerifyError(
                        f"task {task} is in two places",
                        got=f"streams {stream_of[task]} and {stream}",
                        expected="each task in exactly one stream",
                    )
                stream_of[task], index_of[task] = stream, index
        if -1 in stream_of:
            raise VerifyError(f"task {stream_of.index(-1)} is in no stream", expected="each task in exactly one stream")
        return stream_of, index_of

    def _check_parts(self) -> None:
        for stream, tasks in enumerate(self.streams):
            parts = [self.parts[task] for task in tasks]
            if any(part < ANY_PART for part in parts):
                raise VerifyError(f"stream {stream} has a part below {ANY_PART}", got=str(min(parts)))
            if len(set(parts)) > 1 and ANY_PART in parts:
                raise VerifyError(f"stream {stream} mixes tasks of a part with tasks of none", got=str(parts))
            for index, (before, after) in enumerate(pairwise(parts)):
                if after < before:
                    raise VerifyError(
                        f"the parts of stream {stream} decrease",
                        got=f"part {after} of task {tasks[index + 1]} after part {before} of task {tasks[index]}",
                        expected="parts in their order along every stream",
                    )


def _check_need(task: int, need: int, stream_of: Sequence[int]) -> None:
    if not 0 <= need < len(stream_of):
        raise VerifyError(f"task {task} needs an unknown task {need}", expected=f"0 to {len(stream_of) - 1}")
    if need == task:
        raise VerifyError(f"task {task} needs itself")
    if stream_of[need] == stream_of[task]:
        raise VerifyError(
            f"task {task} needs task {need} of its own stream",
            got=f"both in stream {stream_of[task]}",
            expected="needs in other streams only: a stream runs in order",
        )


class EventMachine:
    """A pass over a schedule.

    Equal events give equal actions; the order of events never changes what is run. A run is as long as possible, but
    ends after a task that another stream needs, so that its end is reported at once. After `Failed`, everything that
    comes after the failed task (in its stream, or by needs) is cancelled; other tasks continue. Amortised cost: O(1)
    per task and need.
    """

    schedule: Schedule
    cause: tuple[int, object] | None  # the first task that failed, and its error

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._num_needs = [len(needs) for needs in schedule.needs]
        self._lengths = [len(tasks) for tasks in schedule.streams]
        self.reset()

    def reset(self) -> None:
        """Forget all events. Nothing runs before the first Release."""
        streams = self.schedule.streams
        self.cause = None
        self._level = self._reported = ANY_PART - 1
        self._waiting = self._num_needs.copy()  # per task: needs that are not done
        self._done = [0] * len(streams)  # per stream: tasks before this index are done
        self._started = self._done.copy()  # per stream: tasks before this index were started
        self._ends = self._lengths.copy()  # per stream: tasks from here on never run
        self._limits = self._done.copy()  # per stream: tasks from here on may not run yet
        self._left = 0  # tasks of released parts that are not settled
        self._total = self.schedule.num_tasks  # tasks that are not settled; -1 after Finished

    def handle(self, event: Event) -> list[Action]:
        """The actions after an event. Runs come in a fixed order: of other streams first, the event's own stream
        last."""
        if isinstance(event, Done):
            actions = self._complete(event.stream, event.stop)
            self._advance(event.stream, actions)
        elif isinstance(event, Failed):
            actions = self._fail(event)
        else:
            actions = self._release(event.part)
        if not self._left and self._reported != self._level:
            self._reported = self._level
            actions.append(Idle(self._level))
        if not self._total:
            self._total = -1
            actions.append(Finished())
        return actions

    def _advance(self, stream: int, actions: list[Action]) -> None:
        """Start the next run of a stream that is idle."""
        tasks, waiting, users = self.schedule.streams[stream], self._waiting, self.schedule.users
        start = index = self._done[stream]
        limit = self._limits[stream]
        while index < limit:
            task = tasks[index]
            if waiting[task]:
                break
            index += 1
            if users[task]:
                break
        if index > start:
            self._started[stream] = index
            actions.append(Run(stream, start, index))

    def _settle(self, stream: int, stop: int) -> None:
        """Tasks before `stop` are done."""
        num = stop - self._done[stream]
        self._done[stream] = stop
        self._total -= num
        if self.schedule.parts[self.schedule.streams[stream][0]] != ANY_PART:
            self._left -= num

    def _complete(self, stream: int, stop: int) -> list[Action]:
        assert self._done[stream] < stop == self._started[stream], "a run is reported once, whole"
        self._settle(stream, stop)
        actions: list[Action] = []
        waiting, schedule = self._waiting, self.schedule
        free: list[int] = []
        for user in schedule.users[schedule.streams[stream][stop - 1]]:
            waiting[user] -= 1
            other = schedule.stream_of[user]
            if not waiting[user] and schedule.index_of[user] == self._started[other] == self._done[other]:
                free.append(other)
        for other in free:  # after all users are settled, so that a run is as long as possible
            self._advance(other, actions)
        return actions

    def _fail(self, event: Failed) -> list[Action]:
        stream, index = event.stream, event.index
        assert self._done[stream] <= index < self._started[stream], "a failed task was started"
        failed = self.schedule.streams[stream][index]
        if self.cause is None:
            self.cause = failed, event.cause
        if index > self._done[stream]:
            self._settle(stream, index)
        self._started[stream] = index
        cancelled = self._cancel_from(stream, index)
        return [Cancel(tuple(sorted(cancelled[1:])))] if len(cancelled) > 1 else []

    def _cancel_from(self, stream: int, index: int) -> list[int]:
        """Cancel the tasks of a stream from `index` on, and all that come after them; returns them."""
        schedule, pending, cut = self.schedule, [(stream, index)], list[int]()
        while pending:
            stream, index = pending.pop()
            end = self._ends[stream]
            if index >= end:
                continue
            tasks = schedule.streams[stream][index:end]
            self._total -= end - index
            if schedule.parts[tasks[0]] != ANY_PART:
                self._left -= max(0, self._limits[stream] - index)
            self._ends[stream] = index
            self._limits[stream] = min(self._limits[stream], index)
            cut += tasks
            for task in tasks:
                pending += [(schedule.stream_of[user], schedule.index_of[user]) for user in schedule.users[task]]
        return cut

    def _release(self, part: int) -> list[Action]:
        """Allow the tasks of all parts up to `part`, except cancelled tasks, to start."""
        actions: list[Action] = []
        self._level = max(self._level, part)
        parts = self.schedule.parts
        for stream, tasks in enumerate(self.schedule.streams):
            before = limit = self._limits[stream]
            end = self._ends[stream]
            while limit < end and parts[tasks[limit]] <= self._level:
                limit += 1
            self._limits[stream] = limit
            if limit > before:
                self._left += limit - before if parts[tasks[before]] != ANY_PART else 0
                if self._done[stream] == self._started[stream]:
                    self._advance(stream, actions)
        return actions

    # queries of a check when nothing more can run

    def unfinished(self) -> list[int]:
        """The tasks that are neither done nor cancelled nor failed, by stream and in order."""
        streams = self.schedule.streams
        return [task for s, tasks in enumerate(streams) for task in tasks[self._done[s] : self._ends[s]]]

    def _is_unfinished(self, task: int) -> bool:
        stream = self.schedule.stream_of[task]
        return self._done[stream] <= self.schedule.index_of[task] < self._ends[stream]

    def cycle(self) -> list[int]:
        """A cycle of tasks that wait for each other, or nothing: each needs the next task, or comes after it in the
        same stream; the last does so with the first. Only valid when nothing runs: then the first unfinished task of
        every stream blocks it."""
        left = set[int]()  # streams from which no cycle is reached
        for root in range(len(self.schedule.streams)):
            path, vias = [root], [-1]  # streams, and the task of each that the previous task needs
            branches = [self._needs_of_head(root)]
            while path:
                need = next(branches[-1], None)
                if need is None:
                    left.add(path.pop())
                    del branches[-1], vias[-1]
                    continue
                stream = self.schedule.stream_of[need]
                if stream in path:
                    at = path.index(stream)
                    return self._round(path[at:], [*vias[at + 1 :], need])
                if stream not in left:
                    path.append(stream)
                    vias.append(need)
                    branches.append(self._needs_of_head(stream))
        return []

    def _needs_of_head(self, stream: int) -> Iterator[int]:
        """The unfinished needs of the first unfinished task of a stream."""
        index, tasks = self._done[stream], self.schedule.streams[stream]
        needs = self.schedule.needs[tasks[index]] if index < self._ends[stream] else ()
        return (need for need in needs if self._is_unfinished(need))

    def _round(self, streams: Sequence[int], needs: Sequence[int]) -> list[int]:
        """The tasks of a cycle in which the head of `streams[i]` needs `needs[i]`, in the next stream."""
        heads = [self.schedule.streams[stream][self._done[stream]] for stream in streams]
        circle: list[int] = []
        for head, need, following in zip(heads, needs, [*heads[1:], heads[0]], strict=True):
            circle += [head] if need == following else [head, need]
        return circle
