"""Playing, folding, bounding and scheduling of bare problems, against a plain clock and against all orders."""

from __future__ import annotations

import random

import pytest
from tests.event_clock import play_by_events
from tests.overlap.by_hand import all_orders

from meshweave.cost.simulate.clock import Times, Work
from meshweave.optimize.overlap.bounds import bound_of
from meshweave.optimize.overlap.model import Order, Problem
from meshweave.optimize.overlap.outline import FOLDS, Outline, fold
from meshweave.optimize.overlap.play import live_at_peak, peak_of, play, seconds_of
from meshweave.optimize.overlap.ready_queue import Policy, schedule
from meshweave.optimize.overlap.waits import with_waits


def problem_of(seed: int, num_items: int = 24, levels: bool = False) -> Problem:
    """Random kernels and communications in two channels; every communication is waited for."""
    rng, hosts = random.Random(seed), random.Random(1000 + seed)
    made = Problem(channels=["a", "b"])
    for i in range(num_items):
        is_start = rng.random() < 0.4
        before = [d for d in range(i) if rng.random() < 2.0 / num_items]
        waits = tuple(d for d in before if made.channel[d] >= 0)
        made.names.append(f"{'start' if is_start else 'kernel'}_{i}")
        made.deps.append(tuple(before))
        made.waits.append(waits)
        made.channel.append(rng.randrange(2) if is_start else -1)
        made.seconds.append(0.0 if is_start else rng.choice([0.0, 1.0, 2.0, 3.0]))
        made.copy.append(rng.choice([0.5, 1.0, 4.0]) if is_start else 0.0)
        made.host.append(hosts.choice([0.0, 0.0, 0.5]) if is_start else 0.0)
        made.startup.append(0.25 if is_start else 0.0)
        made.usage.append((("net", rng.choice([0.5, 1.0])),) if is_start and levels else ())
        made.is_waited.append(is_start)
        made.sizes.append(rng.choice([1, 4, 16]))
        made.kept.append(rng.random() < 0.2)
        made.before.append(False)
        made.allocs.append((i,))
        made.uses.append(tuple(before))
    made.order = with_waits(made, range(num_items))
    return made


def on_plain_clock(problem: Problem, order: Order, slowdown: float) -> Times:
    """The same order on a plain clock: an entry of the order is a task of the compute stream, and a start has the
    communication behind all entries."""
    work, lines, copies = Work(), [list[int]() for _ in problem.channels], dict[int, int]()
    for x in order:
        is_kernel = x >= 0 and problem.channel[x] < 0
        own = problem.host[~x] if x < 0 else problem.seconds[x] if is_kernel else 0.0
        work.add(own, [~x] if x < 0 else [], is_kernel=is_kernel)
    for number, x in enumerate(order):
        if x >= 0 and problem.channel[x] >= 0:
            copies[x] = work.add(problem.copy[x], [number], problem.usage[x])
            lines[problem.channel[x]].append(copies[x])
    work.needs = [
        [copies[x] for x in needs] if number < len(order) else needs for number, needs in enumerate(work.needs)
    ]
    return play_by_events(work, [range(len(order)), *lines], 1, lambda levels: slowdown if levels else 1.0)


@pytest.mark.parametrize("seed", range(40))
def test_an_order_takes_as_long_as_on_a_plain_clock(seed: int) -> None:
    problem = problem_of(seed)
    assert seconds_of(problem, problem.order) == pytest.approx(on_plain_clock(problem, problem.order, 1.0).seconds)
    assert play(problem, problem.order).seconds == pytest.approx(seconds_of(problem, problem.order))
    shared = problem_of(seed, levels=True)
    expected = on_plain_clock(shared, shared.order, 1.3)
    played = play(shared, shared.order, lambda levels: 1.3 if levels else 1.0)
    assert seconds_of(shared, shared.order, lambda levels: 1.3 if levels else 1.0) == played.seconds
    assert played.seconds == pytest.approx(expected.seconds)
    for at, x in enumerate(shared.order):
        if x >= 0 and shared.channel[x] >= 0:
            assert played.issued[x] == pytest.approx(expected.starts[at])
        elif x >= 0:
            assert (played.begin[x], played.end[x]) == pytest.approx((expected.starts[at], expected.ends[at]))
    busy = sum(played.end[x] - played.begin[x] for x, c in enumerate(shared.channel) if c < 0)
    waiting = sum(b - a for _, a, b in played.stalls)
    assert busy + sum(shared.host) + waiting == pytest.approx(played.seconds)


@pytest.mark.parametrize("seed", range(12))
def test_no_order_is_below_the_bound_and_the_scheduler_is_near_the_best(seed: int) -> None:
    problem = problem_of(seed, 7)
    best = min(seconds_of(problem, with_waits(problem, order)) for order in all_orders(problem))
    assert bound_of(problem) <= best + 1e-9
    found = min(
        seconds_of(problem, schedule(Outline(problem), Policy(w, fit=f))[0]) for w in (0, 64) for f in (False, True)
    )
    assert best <= found + 1e-9
    assert found <= 1.35 * best


@pytest.mark.parametrize("seed", range(40))
def test_schedules_are_orders_and_keep_what_the_cap_allows(seed: int) -> None:
    problem = problem_of(seed, 40)
    before = peak_of(problem, problem.order)
    several = [fold(problem, which) for which in FOLDS]
    assert not any(folded.problem.check(folded.problem.order) for folded in several)
    for window in (0, 8, 64):
        for policy in (Policy(window), Policy(window, fit=True), Policy(window, 3.0), Policy(window, ahead=1.0)):
            for folded in several:
                order = folded.unfold(schedule(Outline(folded.problem), policy)[0])
                assert problem.check(order) == ""
            assert problem.check(schedule(Outline(problem), policy, before)[0]) == ""


@pytest.mark.parametrize("seed", range(20))
def test_the_ledger_is_that_of_sets(seed: int) -> None:
    """Bytes recounted at every entry of the order from what has been made and what is still to be used."""
    problem = problem_of(seed, 30)
    order, levels = problem.order, list[int]()
    for at, x in enumerate(order):
        made = {s for y in order[: at + 1] if y >= 0 for s in problem.allocs[y]}
        later = {s for y in order[at:] for s in _used(problem, y)}
        kept = {s for s in made if problem.kept[s]}
        live = (made & (later | kept)) | (set(problem.allocs[x]) if x >= 0 else set())
        levels.append(sum(problem.sizes[s] for s in live))
    most = max(levels)
    assert peak_of(problem, order) == most
    at, live = live_at_peak(problem, order)
    assert sum(problem.sizes[s] for s in live) == most
    assert levels[at] == most > max(levels[:at], default=0)


def _used(problem: Problem, x: int) -> tuple[int, ...]:
    if x < 0:
        return problem.holds(~x)
    return problem.uses[x] if problem.channel[x] < 0 else ()


def test_an_order_that_is_none_is_told() -> None:
    problem = problem_of(3)
    assert problem.check(problem.order) == ""
    assert "occurs twice" in problem.check([*problem.order, problem.order[0]])
    assert "is missing" in problem.check(problem.order[:-1])
    late = next(i for i, deps in enumerate(problem.deps) if deps)
    swapped = [late, *(x for x in problem.order if x != late)]
    assert "comes before" in problem.check(swapped)
