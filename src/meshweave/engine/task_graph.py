"""The tasks of a step: their streams, what each needs, and an order in which they can run.

What is checked for deadlock and what runs on virtual devices have the same order, from `run_order`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ANY_ACTION = -1  # of no action: may run with the first


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """Tasks 0 .. n-1: their order in streams, the tasks of other streams that each needs, and the action of each.

    A stream belongs to actions (0, 1, ..., nondecreasing along it) or to none (ANY_ACTION throughout). `needs` does not
    repeat that a task comes after the previous task of its stream.
    """

    streams: tuple[tuple[int, ...], ...]
    needs: tuple[tuple[int, ...], ...]
    actions: tuple[int, ...]
    stream_of: tuple[int, ...] = field(init=False, repr=False, compare=False)
    index_of: tuple[int, ...] = field(init=False, repr=False, compare=False)
    users: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        places = {task: (s, i) for s, tasks in enumerate(self.streams) for i, task in enumerate(tasks)}
        num = len(self.needs)
        assert sorted(places) == list(range(num)), "each task in a stream"
        assert len(self.actions) == num == sum(map(len, self.streams)), "an action for each task, and a single stream"
        users: list[list[int]] = [[] for _ in range(num)]
        for task, needs in enumerate(self.needs):
            for need in needs:
                assert places[need][0] != places[task][0], "needs of other streams: a stream runs in order"
                users[need].append(task)
        object.__setattr__(self, "stream_of", tuple(places[task][0] for task in range(num)))
        object.__setattr__(self, "index_of", tuple(places[task][1] for task in range(num)))
        object.__setattr__(self, "users", tuple(map(tuple, users)))

    @property
    def num_tasks(self) -> int:
        return len(self.needs)


def run_order(graph: TaskGraph, num_actions: int = 1) -> list[list[int]]:
    """By action, the tasks in a topological order: each stream in turn as far as it gets, without tasks of later
    actions. Tasks that wait for each other, and all tasks after them, are missing."""
    waiting, done = [len(needs) for needs in graph.needs], [0] * len(graph.streams)
    order: list[list[int]] = []
    for action in range(num_actions):
        tasks_of_action: list[int] = []
        ready = list(reversed(range(len(graph.streams))))
        while ready:
            stream = ready.pop()
            tasks = graph.streams[stream]
            while done[stream] < len(tasks):
                task = tasks[done[stream]]
                if waiting[task] or graph.actions[task] > action:
                    break
                done[stream] += 1
                tasks_of_action.append(task)
                for user in graph.users[task]:
                    waiting[user] -= 1
                    if not waiting[user]:
                        ready.append(graph.stream_of[user])
        order.append(tasks_of_action)
    return order


def cycle(graph: TaskGraph, order: Sequence[Sequence[int]]) -> list[int]:
    """Tasks that wait for each other, and so are missing in an order: each needs the next task, or comes after it in
    the same stream; the last does so with the first. Empty if no task is missing."""
    done = {task for tasks in order for task in tasks}
    heads = [next((task for task in tasks if task not in done), None) for tasks in graph.streams]
    stream = next((s for s, head in enumerate(heads) if head is not None), None)
    hops: dict[int, tuple[int, int]] = {}  # by stream, its head and a task that the head needs
    while stream is not None and stream not in hops:
        head = heads[stream]
        assert head is not None, "a task that is needed is missing"
        need = next(task for task in graph.needs[head] if task not in done)
        hops[stream] = head, need
        stream = graph.stream_of[need]
    circle: list[int] = []
    for head, need in [*hops.values()][[*hops].index(stream) :] if stream is not None else ():
        circle += [head] if need == heads[graph.stream_of[need]] else [head, need]
    return circle
