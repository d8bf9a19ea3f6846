"""The virtual clock, on schedules written by hand and drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.event_clock import play_by_events

from meshweave.cost.simulate.clock import Slowdown, Times, Usage, Work, makespan, play
from meshweave.errors import VerifyError


@dataclass(frozen=True)
class Task:
    seconds: float
    roles: tuple[int, ...] = (0,)
    usage: Usage = ()
    is_kernel: bool = False
    issued: float = 0.0


def kernel(seconds: float, role: int = 0, issued: float = 0.0) -> Task:
    return Task(seconds, (role,), (), True, issued)


def copy(seconds: float, *usage: tuple[str, float], roles: tuple[int, ...] = (0,)) -> Task:
    return Task(seconds, roles, usage or (("net", 1.0),))


def mark(seconds: float = 0.0, role: int = 0) -> Task:
    """A start or a wait, which may take the processor some time."""
    return Task(seconds, (role,))


def work_of(tasks: Sequence[Task], needs: Sequence[Sequence[int]]) -> Work:
    work = Work()
    for t, need in zip(tasks, needs, strict=True):
        work.add(t.seconds, need, t.usage, t.roles, is_kernel=t.is_kernel, issued=t.issued)
    return work


def by_levels(slower: float) -> Slowdown:
    return lambda levels: slower ** len(levels)


def run(
    streams: list[list[int]], needs: list[list[int]], tasks: list[Task], roles: int = 1, slower: float = 1.0
) -> Times:
    return play(work_of(tasks, needs), streams, roles, by_levels(slower))


def test_a_stream_runs_one_task_after_the_other() -> None:
    times = run([[0, 1, 2]], [[], [], []], [kernel(1.0), kernel(2.0), kernel(0.5)])
    assert times.starts == [0.0, 1.0, 3.0]
    assert times.ends == [1.0, 3.0, 3.5]
    assert times.seconds == 3.5


def test_a_communication_runs_beside_compute_and_is_waited_for() -> None:
    tasks = [mark(), kernel(2.0), mark(), kernel(1.0), copy(5.0)]
    times = run([[0, 1, 2, 3], [4]], [[], [], [4], [], [0]], tasks)
    assert times.starts[4] == 0.0
    assert times.starts[3] == 5.0


def test_a_share_ends_when_the_other_does() -> None:
    """2 s alone, then half speed beside a copy of 1 s of work (2 s), then alone again."""
    tasks = [mark(), kernel(2.0), mark(), copy(4.0), copy(1.0)]
    times = run([[0, 1, 2], [3], [4]], [[], [], [], [0], [2]], tasks)
    assert times.starts[4] == 2.0
    assert times.ends[4] == 4.0
    assert times.ends[3] == 5.0


def test_compute_is_slower_beside_communication() -> None:
    """At half speed for the 2 s of the copy, which does 1 s of the 3 s of work."""
    tasks = [mark(), kernel(3.0), copy(2.0)]
    times = run([[0, 1], [2]], [[], [], [0]], tasks, slower=2.0)
    assert times.ends[1] == 4.0


def test_a_copy_between_roles_needs_both() -> None:
    tasks = [kernel(1.0), mark(), kernel(3.0, 1), mark(role=1), copy(1.0, roles=(0, 1))]
    times = run([[0, 1], [2, 3], [4]], [[], [], [], [], [1, 3]], tasks, roles=2)
    assert times.starts[4] == 3.0


def test_a_deadlock_is_an_error() -> None:
    tasks = [mark(), mark(), copy(1.0)]
    with pytest.raises(VerifyError, match="deadlock"):
        run([[0, 1], [2]], [[2], [], [1]], tasks)


Program = tuple[list[list[int]], list[list[int]], list[Task], int]
SECONDS = st.integers(0, 8).map(lambda n: n / 4)
USAGES = st.sampled_from([(), (("net", 1.0),), (("net", 0.5),), (("net", 0.7), ("node", 0.4)), (("node", 1.0),)])


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Compute streams of one to three roles, with communications of some of them in three channels. A communication
    is waited for by each of its roles later, at the end, or never; starts and waits may take a processor time, kernels
    may be issued late, and anything may take no time."""
    roles = draw(st.integers(1, 3))
    tasks: list[Task] = []
    needs: list[list[int]] = []
    streams: list[list[int]] = [[] for _ in range(roles + 3)]
    waiting: list[tuple[int, int]] = []  # role, communication

    def add(stream: int, task: Task, *need: int) -> int:
        tasks.append(task)
        needs.append(list(need))
        streams[stream].append(len(tasks) - 1)
        return len(tasks) - 1

    for _ in range(draw(st.integers(1, 25))):
        choice = draw(st.sampled_from(["kernel", "kernel", "start", "wait"]))
        if choice == "kernel":
            role = draw(st.integers(0, roles - 1))
            add(role, kernel(draw(SECONDS), role, draw(st.sampled_from([0.0, 0.0, 1.5]))))
        elif choice == "start":
            members = draw(st.sets(st.integers(0, roles - 1), min_size=1))
            begun = [add(role, mark(draw(st.sampled_from([0.0, 0.0, 0.25])), role)) for role in sorted(members)]
            channel = roles + draw(st.integers(0, 2))
            started = add(channel, Task(draw(SECONDS), tuple(sorted(members)), draw(USAGES)), *begun)
            waiting += [(role, started) for role in sorted(members)]
        elif waiting:
            role, started = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
            add(role, mark(draw(st.sampled_from([0.0, 0.0, 0.25])), role), started)
    for role, started in waiting if draw(st.booleans()) else ():
        add(role, mark(0.0, role), started)
    return streams, needs, tasks, roles


@given(programs(), st.sampled_from([1.0, 1.5]))
def test_times_are_those_of_a_plain_clock(program: Program, slower: float) -> None:
    streams, needs, tasks, roles = program
    times, expected = (
        clock(work_of(tasks, needs), streams, roles, by_levels(slower)) for clock in (play, play_by_events)
    )
    assert times.starts == pytest.approx(expected.starts, rel=1e-12, abs=1e-12)
    assert times.ends == pytest.approx(expected.ends, rel=1e-12, abs=1e-12)
    assert times.seconds == max(times.ends, default=0.0)


@given(programs(), st.sampled_from([1.0, 1.5]))
def test_time_is_between_the_longest_stream_and_the_sum(program: Program, slower: float) -> None:
    streams, needs, tasks, roles = program
    times = run(streams, needs, tasks, roles, slower)
    total = sum(t.seconds + t.issued for t in tasks)
    longest = max(sum(tasks[i].seconds for i in s) for s in streams)
    assert longest - 1e-9 <= times.seconds <= total * 3.0 + 1e-9
    for stream in streams:
        for before, after in pairwise(stream):
            assert times.starts[after] >= times.ends[before] - 1e-12
    for task, needed in enumerate(needs):
        assert all(times.starts[task] >= times.ends[n] - 1e-12 for n in needed)
        assert times.ends[task] - times.starts[task] >= tasks[task].seconds - 1e-9
    assert run(streams, needs, tasks, roles, slower) == times


@st.composite
def orders(draw: st.DrawFn) -> tuple[list[int], list[float], list[int], list[float], list[float]]:
    """An order as `makespan` reads it: kernels, starts on two channels, waits that stand anywhere or nowhere."""
    order: list[int] = []
    channel = [draw(st.sampled_from([-1, -1, 0, 1])) for _ in range(draw(st.integers(1, 25)))]
    for i in range(len(channel)):
        order.append(i)
        open_starts = [x for x in order if x >= 0 and channel[x] >= 0 and ~x not in order]
        if open_starts and draw(st.booleans()):
            order.append(~draw(st.sampled_from(open_starts)))
    seconds = [draw(SECONDS) if c < 0 else 0.0 for c in channel]
    copies, hosts = ([draw(SECONDS) if c >= 0 else 0.0 for c in channel] for _ in range(2))
    return order, seconds, channel, copies, hosts


@given(orders(), st.booleans())
def test_one_pass_takes_as_long_where_nothing_slows(
    program: tuple[list[int], list[float], list[int], list[float], list[float]], uses_links: bool
) -> None:
    order, seconds, channel, copies, hosts = program
    n = len(seconds)
    numbers = {x: k for k, x in enumerate(order)}
    tasks = [kernel(hosts[~x] if x < 0 else seconds[x]) if x < 0 or channel[x] < 0 else mark() for x in order]
    needs = [[len(order) + ~x] if x < 0 else [] for x in order]
    tasks += [copy(copies[i], (f"link {channel[i]}", 1.0)) if uses_links else Task(copies[i]) for i in range(n)]
    needs += [[numbers[i]] for i in range(n)]
    lines = [[len(order) + x for x in order if x >= 0 and channel[x] == c] for c in (0, 1)]
    for i in (i for i in range(n) if channel[i] < 0):  # tasks that stand for nothing
        lines.append([len(order) + i])
    work = work_of(tasks, needs)
    found = makespan(order, seconds, channel, copies, hosts, 2)
    assert play(work, [list(range(len(order))), *lines], 1, by_levels(1.0)).seconds == found
    assert play_by_events(work, [list(range(len(order))), *lines], 1, by_levels(1.0)).seconds == pytest.approx(found)
