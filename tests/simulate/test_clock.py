"""The virtual clock, on schedules written by hand and drawn at random."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from meshweave.engine.machine import Schedule
from meshweave.errors import VerifyError
from meshweave.simulate.clock import Times, play
from meshweave.simulate.kernels import Kernel
from meshweave.simulate.tasks import Task

NODE = fx.Graph().placeholder("x")
KERNEL = Kernel((NODE,), 0.0, (), (), ())


def kernel(seconds: float, role: int = 0) -> Task:
    return Task("kernel", NODE, (role,), seconds, 0, KERNEL)


def copy(seconds: float, *usage: tuple[str, float], roles: tuple[int, ...] = (0,)) -> Task:
    return Task("copy", NODE, roles, seconds, 0, usage=usage or (("net", 1.0),))


def mark(kind: str) -> Task:
    return Task(kind, NODE, (0,), 0.0, 0)  # type: ignore[arg-type]


def run(
    streams: list[list[int]], needs: list[list[int]], tasks: list[Task], roles: int = 1, slower: float = 1.0
) -> Times:
    schedule = Schedule(tuple(map(tuple, streams)), tuple(map(tuple, needs)), (0,) * len(tasks))
    return play(schedule, tasks, roles, lambda levels: slower)


def test_a_stream_runs_one_task_after_the_other() -> None:
    times = run([[0, 1, 2]], [[], [], []], [kernel(1.0), kernel(2.0), kernel(0.5)])
    assert times.starts == (0.0, 1.0, 3.0)
    assert times.ends == (1.0, 3.0, 3.5)


def test_a_communication_runs_beside_compute_and_is_waited_for() -> None:
    tasks = [mark("start"), kernel(2.0), mark("wait"), kernel(1.0), copy(5.0)]
    times = run([[0, 1, 2, 3], [4]], [[], [], [4], [], [0]], tasks)
    assert times.starts[4] == 0.0
    assert times.starts[3] == 5.0


def test_two_communications_on_one_link_share_it() -> None:
    """Alone each takes 4 s at full bandwidth; begun together, both take 8 s."""
    tasks = [mark("start"), mark("start"), copy(4.0), copy(4.0)]
    times = run([[0, 1], [2], [3]], [[], [], [0], [1]], tasks)
    assert times.ends[2:] == (8.0, 8.0)


def test_links_that_are_not_full_are_not_slow() -> None:
    tasks = [mark("start"), mark("start"), copy(4.0, ("net", 0.5)), copy(4.0, ("net", 0.5))]
    assert run([[0, 1], [2], [3]], [[], [], [0], [1]], tasks).ends[2:] == (4.0, 4.0)


def test_a_share_ends_when_the_other_does() -> None:
    """2 s alone, then half speed beside a copy of 1 s of work (2 s), then alone again."""
    tasks = [mark("start"), kernel(2.0), mark("start"), copy(4.0), copy(1.0)]
    times = run([[0, 1, 2], [3], [4]], [[], [], [], [0], [2]], tasks)
    assert times.starts[4] == 2.0
    assert times.ends[4] == 4.0
    assert times.ends[3] == 5.0


def test_different_links_do_not_meet() -> None:
    tasks = [mark("start"), mark("start"), copy(4.0, ("node", 1.0)), copy(4.0, ("net", 1.0))]
    assert run([[0, 1], [2], [3]], [[], [], [0], [1]], tasks).ends[2:] == (4.0, 4.0)


def test_compute_is_slower_beside_communication() -> None:
    """At half speed for the 2 s of the copy, which does 1 s of the 3 s of work."""
    tasks = [mark("start"), kernel(3.0), copy(2.0)]
    times = run([[0, 1], [2]], [[], [], [0]], tasks, slower=2.0)
    assert times.ends[1] == 4.0


def test_a_copy_between_roles_needs_both() -> None:
    tasks = [kernel(1.0), mark("start"), kernel(3.0, 1), Task("start", NODE, (1,), 0.0, 0), copy(1.0, roles=(0, 1))]
    times = run([[0, 1], [2, 3], [4]], [[], [], [], [], [1, 3]], tasks, roles=2)
    assert times.starts[4] == 3.0


def test_a_deadlock_is_an_error() -> None:
    tasks = [mark("wait"), mark("start"), copy(1.0)]
    with pytest.raises(VerifyError, match="wait for ever"):
        run([[0, 1], [2]], [[2], [], [1]], tasks)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[Task]]:
    """A compute stream with communications, each waited for later or never, in two channels."""
    tasks: list[Task] = []
    stream: list[int] = []
    waiting: list[int] = []
    links: list[tuple[int, int | None, int, float]] = []
    for _ in range(draw(st.integers(1, 25))):
        choice = draw(st.sampled_from(["kernel", "start", "wait"]))
        if choice == "kernel":
            tasks.append(kernel(draw(st.integers(0, 8)) / 4))
        elif choice == "start":
            tasks.append(mark("start"))
            waiting.append(len(tasks) - 1)
            links.append((len(tasks) - 1, None, draw(st.integers(0, 1)), draw(st.integers(1, 8)) / 4))
        elif waiting:
            start = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
            tasks.append(mark("wait"))
            links = [(s, len(tasks) - 1 if s == start else w, c, t) for s, w, c, t in links]
        else:
            continue
        stream.append(len(tasks) - 1)
    channels: list[list[int]] = [[], []]
    needs: list[list[int]] = [[] for _ in tasks]
    for start, wait, channel, seconds in links:
        usage = draw(st.sampled_from([(("net", 1.0),), (("net", 0.5),), (("node", 1.0),)]))
        tasks.append(copy(seconds, *usage))
        needs.append([start])
        channels[channel].append(len(tasks) - 1)
        if wait is not None:
            needs[wait].append(len(tasks) - 1)
    return [stream, *filter(None, channels)], needs, tasks


@settings(max_examples=200, deadline=None)
@given(programs(), st.sampled_from([1.0, 1.5]))
def test_time_is_between_the_longest_stream_and_the_sum(
    program: tuple[list[list[int]], list[list[int]], list[Task]], slower: float
) -> None:
    streams, needs, tasks = program
    times = run(streams, needs, tasks, slower=slower)
    makespan = max(times.ends, default=0.0)
    total = sum(t.seconds for t in tasks)
    longest = max((sum(tasks[i].seconds for i in s) for s in streams), default=0.0)
    assert longest - 1e-9 <= makespan <= total * max(slower, 2.0) + 1e-9
    for stream in streams:
        for before, after in pairwise(stream):
            assert times.starts[after] >= times.ends[before] - 1e-12
    for task, needed in enumerate(needs):
        assert all(times.starts[task] >= times.ends[n] - 1e-12 for n in needed)
        assert times.ends[task] - times.starts[task] >= tasks[task].seconds - 1e-9
    assert run(streams, needs, tasks, slower=slower) == times
