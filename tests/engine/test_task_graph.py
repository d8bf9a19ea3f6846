"""An order in which the tasks of a graph can run: exact small cases, and what holds of every graph."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshweave.engine.task_graph import TaskGraph, cycle, run_order

# Two devices and a channel: 1 and 4 start copy 6, which 2 and 5 need.
#   device 0:  0  1(start)  2(wait)  3
#   device 1:     4(start)  5(wait)
COLLECTIVE = TaskGraph(
    streams=((0, 1, 2, 3), (4, 5), (6,)),
    needs=((), (), (6,), (), (), (6,), (1, 4)),
    actions=(0, 0, 0, 0, 0, 0, -1),
)


@st.composite
def task_graphs(draw: st.DrawFn, is_acyclic: bool = True, num_actions: int = 3) -> TaskGraph:
    """Up to 24 tasks in up to 5 streams. Without `is_acyclic` needs may go round, so that not all of it can run.

    An acyclic one is drawn with an order in which it can run: needs and streams follow it, actions go up along it.
    """
    num = draw(st.integers(0, 24))
    order = draw(st.permutations(range(num)))
    num_streams = draw(st.integers(1, 5))
    is_channel = [draw(st.booleans()) for _ in range(num_streams)]
    streams: list[list[int]] = [[] for _ in range(num_streams)]
    stream_of: dict[int, int] = {}
    actions = [0] * num
    steps = sorted(draw(st.lists(st.integers(0, num_actions - 1), min_size=num, max_size=num)))
    for task, action in zip(order, steps, strict=True):
        stream_of[task] = draw(st.integers(0, num_streams - 1))
        streams[stream_of[task]].append(task)
        actions[task] = -1 if is_channel[stream_of[task]] else action
    needs: list[tuple[int, ...]] = [()] * num
    for at, task in enumerate(order):
        others = order[:at] if is_acyclic else order
        candidates = [t for t in others if stream_of[t] != stream_of[task]]
        chosen = draw(st.lists(st.sampled_from(candidates), unique=True, max_size=3)) if candidates else []
        needs[task] = tuple(chosen)
    return TaskGraph(tuple(map(tuple, streams)), tuple(needs), tuple(actions))


def predecessors(graph: TaskGraph) -> list[set[int]]:
    """Per task all tasks that come before it, in its stream or by needs, at any distance."""
    direct = [set(needs) for needs in graph.needs]
    for tasks in graph.streams:
        for before, after in pairwise(tasks):
            direct[after].add(before)
    found: list[set[int]] = []
    for task in range(graph.num_tasks):
        seen, pending = set[int](), list(direct[task])
        while pending:
            one = pending.pop()
            if one not in seen:
                seen.add(one)
                pending += direct[one]
        found.append(seen)
    return found


def test_a_device_runs_until_it_waits() -> None:
    assert run_order(COLLECTIVE) == [[0, 1, 4, 6, 5, 2, 3]]
    assert cycle(COLLECTIVE, run_order(COLLECTIVE)) == []


def test_actions_run_one_by_one() -> None:
    graph = TaskGraph(((0, 1, 2), (3,)), ((), (), (3,), (0,)), (0, 1, 2, -1))
    assert run_order(graph, 3) == [[0, 3], [1], [2]]


@pytest.mark.parametrize(
    ("streams", "needs", "circle"),
    [
        (((0, 1), (2, 3)), ((3,), (), (1,), ()), [0, 3, 2, 1]),  # each waits for what the other starts afterwards
        (((0,), (1,), (2,)), ((1,), (2,), (0,)), [0, 1, 2]),
        (((0,), (1,), (2,), (3,)), ((1,), (2,), (3,), (2,)), [2, 3]),  # and not the way to it
    ],
)
def test_tasks_that_wait_for_each_other(
    streams: tuple[tuple[int, ...], ...], needs: tuple[tuple[int, ...], ...], circle: list[int]
) -> None:
    graph = TaskGraph(streams, needs, (0,) * len(needs))
    assert run_order(graph) == [[]]
    assert cycle(graph, [[]]) == circle


@pytest.mark.parametrize(
    ("streams", "needs"), [(((0, 0),), ((),)), (((0,),), ((), ())), (((0, 1),), ((), (0,))), (((0,),), ((0,),))]
)
def test_no_schedule(streams: tuple[tuple[int, ...], ...], needs: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(AssertionError):
        TaskGraph(streams, needs, (0,) * len(needs))


@given(task_graphs())
def test_every_task_runs_once_in_its_action_after_its_needs(graph: TaskGraph) -> None:
    order = run_order(graph, 3)
    position = {task: i for i, task in enumerate(task for tasks in order for task in tasks)}
    assert sorted(position) == list(range(graph.num_tasks))
    for task, before in enumerate(predecessors(graph)):
        assert all(position[one] < position[task] for one in before)
    for action, tasks in enumerate(order):
        assert {t for t in tasks if graph.actions[t] >= 0} == {t for t, p in enumerate(graph.actions) if p == action}


@given(task_graphs(is_acyclic=False, num_actions=1))
def test_what_cannot_end_is_a_true_circle(graph: TaskGraph) -> None:
    order, before = run_order(graph), predecessors(graph)
    stuck = {task for task in range(graph.num_tasks) if any(one in before[one] for one in {task, *before[task]})}
    assert sorted(order[0]) == sorted({*range(graph.num_tasks)} - stuck)
    circle = cycle(graph, order)
    assert bool(circle) == bool(stuck)
    for task, following in zip(circle, [*circle[1:], *circle[:1]], strict=True):
        stream, place = graph.stream_of, graph.index_of
        is_behind = stream[task] == stream[following] and place[following] < place[task]
        assert following in graph.needs[task] or is_behind
    assert len(set(circle)) == len(circle)
