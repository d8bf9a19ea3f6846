"""The event machine: exact small cases, and what holds of every schedule and every order of events."""

from __future__ import annotations

import random
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.schedules import Driver, predecessors, schedules

from meshweave.engine.machine import Cancel, Done, EventMachine, Failed, Finished, Idle, Release, Run, Schedule
from meshweave.errors import VerifyError

SEEDS = st.integers(0, 2**32 - 1)

# Two devices and a channel: 1 and 4 start copy 6, which 2 and 5 need.
#   device 0:  0  1(start)  2(wait)  3
#   device 1:     4(start)  5(wait)
COLLECTIVE = Schedule(
    streams=((0, 1, 2, 3), (4, 5), (6,)),
    needs=((), (), (6,), (), (), (6,), (1, 4)),
    parts=(0, 0, 0, 0, 0, 0, -1),
)


def test_a_collective_step_by_step() -> None:
    machine = EventMachine(COLLECTIVE)
    assert machine.handle(Release(0)) == [Run(0, 0, 2), Run(1, 0, 1)]  # each ends with its start, which 6 needs
    assert machine.handle(Done(1, 1)) == []  # 5 needs the copy
    assert machine.handle(Done(0, 2)) == [Run(2, 0, 1)]
    assert machine.handle(Done(2, 1)) == [Run(0, 2, 4), Run(1, 1, 2)]
    assert machine.handle(Done(1, 2)) == []
    assert machine.unfinished() == [2, 3]
    assert machine.handle(Done(0, 4)) == [Idle(0), Finished()]
    assert (machine.unfinished(), machine.cause) == ([], None)


def test_a_run_goes_on_in_its_own_stream_last() -> None:
    schedule = Schedule(((0, 1), (2,), (3,)), ((), (), (0,), (0,)), (0,) * 4)
    machine = EventMachine(schedule)
    assert machine.handle(Release(0)) == [Run(0, 0, 1)]
    assert machine.handle(Done(0, 1)) == [Run(1, 0, 1), Run(2, 0, 1), Run(0, 1, 2)]


def test_a_run_does_not_end_before_a_need_that_is_done() -> None:
    schedule = Schedule(((0,), (1, 2, 3)), ((), (), (0,), ()), (0,) * 4)
    machine = EventMachine(schedule)
    machine.handle(Release(0))
    early = EventMachine(schedule)
    assert early.handle(Release(0)) == [Run(0, 0, 1), Run(1, 0, 1)]
    assert early.handle(Done(0, 1)) == []  # stream 1 is at work
    assert early.handle(Done(1, 1)) == [Run(1, 1, 3)]
    later = EventMachine(Schedule(((0,), (1, 2, 3)), ((), (0,), (0,), ()), (0,) * 4))
    assert later.handle(Release(0)) == [Run(0, 0, 1)]
    assert later.handle(Done(0, 1)) == [Run(1, 0, 3)]


def test_parts_are_released_one_by_one() -> None:
    schedule = Schedule(((0, 1, 2), (3,)), ((), (), (3,), (0,)), (0, 1, 2, -1))
    machine = EventMachine(schedule)
    assert machine.handle(Release(0)) == [Run(0, 0, 1)]
    assert machine.handle(Done(0, 1)) == [Run(1, 0, 1), Idle(0)]  # the copy is of no part
    assert machine.handle(Release(1)) == [Run(0, 1, 2)]
    assert machine.handle(Release(2)) == []  # stream 0 is at work
    assert machine.handle(Done(1, 1)) == []
    assert machine.handle(Done(0, 2)) == [Run(0, 2, 3)]
    assert machine.handle(Done(0, 3)) == [Idle(2), Finished()]


def test_a_part_without_tasks_is_idle_at_once() -> None:
    machine = EventMachine(Schedule(((0,), ()), ((),), (1,)))
    assert machine.handle(Release(0)) == [Idle(0)]
    assert machine.handle(Release(1)) == [Run(0, 0, 1)]
    assert machine.handle(Done(0, 1)) == [Idle(1), Finished()]
    assert EventMachine(Schedule((), (), ())).handle(Release(0)) == [Idle(0), Finished()]


def test_a_failure_cancels_what_comes_after_it_and_nothing_else() -> None:
    """1 fails: with it go 2 and 3 behind it, the copy 6 that needs it, and 5 that needs the copy."""
    machine = EventMachine(COLLECTIVE)
    machine.handle(Release(0))
    assert machine.handle(Failed(0, 1, "broken")) == [Cancel((2, 3, 5, 6))]
    assert machine.cause == (1, "broken")
    assert machine.unfinished() == [4]
    assert machine.handle(Done(1, 1)) == [Idle(0), Finished()]


def test_the_first_cause_is_kept() -> None:
    machine = EventMachine(Schedule(((0,), (1,)), ((), ()), (0, 0)))
    machine.handle(Release(0))
    assert machine.handle(Failed(1, 0, "first")) == []
    assert machine.handle(Failed(0, 0, "second")) == [Idle(0), Finished()]
    assert machine.cause == (1, "first")


def test_what_was_cancelled_is_not_waited_for_in_a_later_part() -> None:
    machine = EventMachine(Schedule(((0, 1), (2,)), ((), (), (0,)), (0, 1, 1)))
    machine.handle(Release(0))
    assert machine.handle(Failed(0, 0, "x")) == [Cancel((1, 2)), Idle(0), Finished()]
    assert machine.handle(Release(1)) == [Idle(1)]


def test_after_a_reset_a_pass_is_the_same_again() -> None:
    driver = Driver(COLLECTIVE, fails=lambda task: task == 1).run((0,))
    assert driver.machine.cause is not None
    driver.machine.reset()
    again = Driver(COLLECTIVE)
    again.machine = driver.machine
    again.run((0,))
    assert again.actions == Driver(COLLECTIVE).run((0,)).actions
    assert driver.machine.cause is None


# what cannot end


def test_two_devices_that_wait_for_each_other() -> None:
    """Each waits, first of all, for what the other starts afterwards."""
    machine = EventMachine(Schedule(((0, 1), (2, 3)), ((3,), (), (1,), ()), (0,) * 4))
    assert machine.handle(Release(0)) == []
    assert machine.unfinished() == [0, 1, 2, 3]
    assert machine.cycle() == [0, 3, 2, 1]


def test_a_circle_of_heads_names_each_once() -> None:
    machine = EventMachine(Schedule(((0,), (1,), (2,)), ((1,), (2,), (0,)), (0,) * 3))
    machine.handle(Release(0))
    assert machine.cycle() == [0, 1, 2]


def test_the_circle_and_not_the_way_to_it() -> None:
    """0 waits for 1, which waits for the circle of 2 and 3."""
    machine = EventMachine(Schedule(((0,), (1,), (2,), (3,)), ((1,), (2,), (3,), (2,)), (0,) * 4))
    machine.handle(Release(0))
    assert machine.cycle() == [2, 3]


def test_a_need_of_a_part_that_was_not_released_is_no_circle() -> None:
    machine = EventMachine(Schedule(((0,), (1,)), ((1,), ()), (0, 1)))
    assert machine.handle(Release(0)) == []
    assert machine.cycle() == []
    assert machine.unfinished() == [0, 1]
    assert machine.handle(Release(1)) == [Run(1, 0, 1)]


# what is no schedule


@pytest.mark.parametrize(
    ("streams", "needs", "parts", "message"),
    [
        (((0, 2),), ((), ()), (0, 0), "stream 0 has an unknown task 2\n  expected: 0 to 1"),
        (
            ((0, 1), (1,)),
            ((), ()),
            (0, 0),
            "task 1 is in two places\n  got: streams 0 and 1\n  expected: each task in exactly one stream",
        ),
        (
            ((0, 0),),
            ((),),
            (0,),
            "task 0 is in two places\n  got: streams 0 and 0\n  expected: each task in exactly one stream",
        ),
        (((0,),), ((), ()), (0, 0), "task 1 is in no stream\n  expected: each task in exactly one stream"),
        (((0,),), ((0,),), (0,), "task 0 needs itself"),
        (((0,),), ((7,),), (0,), "task 0 needs an unknown task 7\n  expected: 0 to 0"),
        (
            ((0, 1),),
            ((), (0,)),
            (0, 0),
            "task 1 needs task 0 of its own stream\n  got: both in stream 0\n"
            "  expected: needs in other streams only: a stream runs in order",
        ),
        (
            ((0,), (1,)),
            ((), (0, 0)),
            (0, 0),
            "task 1 names a need twice\n  got: [0, 0]\n  expected: each need once",
        ),
        (
            ((1, 0),),
            ((), ()),
            (0, 1),
            "the parts of stream 0 decrease\n  got: part 0 of task 0 after part 1 of task 1\n"
            "  expected: parts in their order along every stream",
        ),
        (((0, 1),), ((), ()), (-1, 0), "stream 0 mixes tasks of a part with tasks of none\n  got: [-1, 0]"),
        (((0,),), ((),), (-2,), "stream 0 has a part below -1\n  got: -2"),
        (
            ((0,),),
            ((),),
            (0, 0),
            "a schedule needs an entry in needs and in parts for every task\n  got: 1 entries in needs, 2 in parts",
        ),
    ],
)
def test_what_is_no_schedule_is_refused(
    streams: tuple[tuple[int, ...], ...], needs: tuple[tuple[int, ...], ...], parts: tuple[int, ...], message: str
) -> None:
    with pytest.raises(VerifyError) as error:
        Schedule(streams, needs, parts)
    assert str(error.value) == message


@pytest.mark.parametrize("event", [Done(0, 1), Done(0, 3), Failed(0, 2, "x")], ids=str)
def test_only_what_was_told_to_run_can_be_reported(event: Done | Failed) -> None:
    machine = EventMachine(COLLECTIVE)
    machine.handle(Release(0))
    with pytest.raises(AssertionError):
        machine.handle(event)


# what holds of all


@given(schedules(), SEEDS)
def test_every_task_runs_once_after_its_needs_and_in_the_order_of_its_stream(schedule: Schedule, seed: int) -> None:
    driver = Driver(schedule, random.Random(seed)).run()
    position = {task: i for i, task in enumerate(driver.ran)}
    assert sorted(driver.ran) == list(range(schedule.num_tasks))
    for task, before in enumerate(predecessors(schedule)):
        assert all(position[one] < position[task] for one in before)
    assert (driver.machine.unfinished(), driver.machine.cycle(), driver.cancelled) == ([], [], [])
    assert driver.actions.count(Finished()) == 1
    assert [a.part for a in driver.actions if isinstance(a, Idle)] == [0, 1, 2]


@given(schedules(), SEEDS)
def test_a_run_begins_when_its_needs_are_done_and_ends_where_others_wait(schedule: Schedule, seed: int) -> None:
    """And it is as long as can be: it ends at the end of what is released, before a need that is not done, or after a
    task that another stream needs."""
    driver = Driver(schedule, random.Random(seed))
    for part in range(3):
        pending = [Release(part)]
        while pending or driver.open:
            if pending:
                told = driver.tell(pending.pop())
            else:
                count = len(driver.actions)
                driver.answer(driver.open.pop(driver.chooser.randrange(len(driver.open))))
                told = driver.actions[count:]
            for run in (a for a in told if isinstance(a, Run)):
                tasks = schedule.streams[run.stream]
                done = set(driver.ran)
                assert all(set(schedule.needs[t]) <= done for t in tasks[run.start : run.stop])
                assert all(schedule.parts[t] <= part for t in tasks[run.start : run.stop])
                assert not any(schedule.users[t] for t in tasks[run.start : run.stop - 1])
                following = tasks[run.stop] if run.stop < len(tasks) else None
                assert (
                    following is None
                    or schedule.users[tasks[run.stop - 1]]
                    or schedule.parts[following] > part
                    or not set(schedule.needs[following]) <= done
                )


@given(schedules(), SEEDS)
def test_no_task_runs_before_its_part_is_released(schedule: Schedule, seed: int) -> None:
    driver = Driver(schedule, random.Random(seed))
    for part in range(3):
        driver.run((part,))
        assert all(schedule.parts[task] <= part for task in driver.ran)
        assert {t for t in range(schedule.num_tasks) if 0 <= schedule.parts[t] <= part} <= set(driver.ran)


@given(schedules(), SEEDS)
def test_equal_events_give_equal_actions(schedule: Schedule, seed: int) -> None:
    first, second = (Driver(schedule, random.Random(seed)).run() for _ in range(2))
    assert list(map(astuple, first.actions)) == list(map(astuple, second.actions))


@given(schedules(), SEEDS, SEEDS, st.sets(st.integers(0, 23), max_size=3))
def test_what_comes_after_a_failure_is_cancelled_and_nothing_else(
    schedule: Schedule, seed: int, other: int, broken: set[int]
) -> None:
    before = predecessors(schedule)
    tasks = range(schedule.num_tasks)
    lost = {task for task in tasks if before[task] & broken}
    for chooser in (random.Random(seed), random.Random(other)):
        driver = Driver(schedule, chooser, lambda task: task in broken).run()
        assert sorted(driver.cancelled) == sorted(lost)
        assert sorted(driver.failed) == sorted({t for t in tasks if t in broken} - lost)
        assert sorted(driver.ran) == sorted(set(tasks) - lost - broken)
        first = driver.failed[0] if driver.failed else None
        assert driver.machine.cause == (None if first is None else (first, f"task {first} broke"))
        assert driver.machine.unfinished() == []
        assert driver.actions[-1] == Finished() or isinstance(driver.actions[-1], Idle)
        assert driver.actions.count(Finished()) == 1


@given(schedules(is_acyclic=False, num_parts=1), SEEDS)
def test_what_cannot_end_is_told_with_a_true_circle(schedule: Schedule, seed: int) -> None:
    driver = Driver(schedule, random.Random(seed)).run((0,))
    machine, before = driver.machine, predecessors(schedule)
    stuck = {task for task in range(schedule.num_tasks) if any(one in before[one] for one in {task, *before[task]})}
    assert sorted(machine.unfinished()) == sorted(stuck)
    assert set(driver.ran).isdisjoint(stuck)
    circle = machine.cycle()
    assert bool(circle) == bool(stuck)
    for task, following in zip(circle, [*circle[1:], *circle[:1]], strict=True):
        stream, place = schedule.stream_of, schedule.index_of
        is_behind = stream[task] == stream[following] and place[following] < place[task]
        assert following in schedule.needs[task] or is_behind
    assert len(set(circle)) == len(circle)
