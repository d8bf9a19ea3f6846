"""The search: as good as the published schedules under the same memory, optimal where that can be known."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest
from tests.engine.schedules.published import RANKS, RUNS, SETTINGS, Setting
from tests.engine.schedules.random_schedules import random_schedule

from meshweave.engine.actions import Action, Actions, Schedule
from meshweave.engine.schedules import (
    SCHEDULES,
    ActivationMemory,
    best_schedule,
    make_schedule,
    peak_activations,
    pipeline_times,
    place_stages,
    prove_schedule,
    schedule_csv,
    stage_times,
)
from meshweave.engine.schedules.bounds import step_bound
from meshweave.engine.schedules.list_scheduling import PipelineProblem
from meshweave.errors import PlanError

PLAIN = place_stages(RANKS, 1, "plain")
V = place_stages(RANKS, 2, "v")


@pytest.mark.parametrize(
    "setting",
    [pytest.param(each, marks=() if i % 3 == 0 else pytest.mark.slow) for i, each in enumerate(SETTINGS)],
    ids=lambda setting: f"{setting.model}-{setting.microbatches}",
)
@pytest.mark.parametrize(("memory", "names"), [(1, ("1f1b", "zb-h1", "zb-1p")), (2, ("zb-h2", "zb-2p"))])
def test_no_slower_than_the_paper_in_its_memory(setting: Setting, memory: int, names: tuple[str, ...]) -> None:
    best = min(run.rate for run in RUNS if run.setting is setting and run.schedule in names)
    search = best_schedule(
        PLAIN,
        setting.microbatches,
        **setting.seconds(),  # type: ignore[arg-type]
        memory=setting.memory,
        cap=memory * RANKS,
        synchronous=False,
        budget=500_000,
    )
    assert search.times.bubble_rate <= best + 0.00005  # rates are published in four digits
    assert max(peak_activations(search.schedule, setting.memory)) <= memory * RANKS * (1 + 1e-6)
    if memory == 1:
        assert search.gap < 1e-9  # nothing is faster: ZB-1P is optimal
    else:
        assert search.gap < 0.002


@pytest.mark.parametrize("setting", [SETTINGS[0], SETTINGS[-1]], ids=lambda setting: setting.model)
@pytest.mark.parametrize("synchronous", [False, True])
def test_no_slower_than_zbv_in_its_memory(setting: Setting, synchronous: bool) -> None:
    seconds = setting.seconds(2)
    zbv = pipeline_times(make_schedule("zbv", RANKS, setting.microbatches), **seconds, synchronous=synchronous)
    search = best_schedule(V, setting.microbatches, **seconds, synchronous=synchronous, budget=200_000)
    assert search.times.step_s <= zbv.step_s * (1.0 if synchronous else 0.9995)
    assert max(search.times.peak_activations) <= 2 * RANKS
    assert search.gap < 0.02


def test_no_slower_than_any_schedule_by_name_that_fits() -> None:
    for name, family in SCHEDULES.items():
        per_rank = family.stages_per_rank or 2
        stages = 4 * per_rank
        times = {"F": 1.0, "B": 1.3, "W": 0.8, "comm": 0.1}
        schedule = make_schedule(name, 4, 9, times=stage_times(stages, **times))
        memory = ActivationMemory(1.0, 0.4)
        for synchronous in (False, True):
            search = best_schedule(
                place_stages(4, per_rank, family.placement),
                9,
                **times,  # type: ignore[arg-type]
                memory=memory,
                cap=peak_activations(schedule, memory),
                synchronous=synchronous,
                budget=30_000,
            )
            assert search.times.step_s <= pipeline_times(schedule, **times, synchronous=synchronous).step_s * (1 + 1e-9)


def orders_of_rank(stage: int, microbatches: int) -> Iterator[Actions]:
    """All orders of F, I and W of a stage, each in the order of microbatches."""
    kinds = ("forward", "input", "weight")

    def extend(counts: tuple[int, int, int], actions: Actions) -> Iterator[Actions]:
        if min(counts) == microbatches:
            yield actions
        for at, kind in enumerate(kinds):
            if counts[at] < (microbatches if at == 0 else counts[at - 1]):
                more = tuple(n + (i == at) for i, n in enumerate(counts))
                yield from extend(more, (*actions, Action((kind,), counts[at], stage)))  # type: ignore[arg-type]

    return extend((0, 0, 0), ())


@pytest.mark.parametrize("seed", range(4))
def test_optimal_where_all_schedules_can_be_tried(seed: int) -> None:
    chance = random.Random(seed)
    times = {name: [float(chance.randint(1, 6)) for _ in range(2)] for name in "FBW"} | {"comm": float(seed % 3)}
    memory, cap = ActivationMemory(1.0, chance.choice([1.0, 0.5])), chance.choice([1.0, 1.5, 2.0])
    whole = [Schedule("one", pair) for pair in product(*(list(orders_of_rank(stage, 3)) for stage in (0, 1)))]
    fitting = [schedule for schedule in whole if max(peak_activations(schedule, memory)) <= cap]
    for synchronous in (False, True):
        optimum = float("inf")
        for schedule in fitting:
            try:
                result = pipeline_times(schedule, **times, synchronous=synchronous)  # type: ignore[arg-type]
            except PlanError:
                continue  # a deadlock
            optimum = min(optimum, result.step_s)
        search = best_schedule((0, 1), 3, **times, memory=memory, cap=cap, synchronous=synchronous)  # type: ignore[arg-type]
        assert search.bound_s <= optimum * (1 + 1e-9)
        assert search.times.step_s == pytest.approx(optimum)


def test_no_random_schedule_is_faster_than_the_bound() -> None:
    """Stages anywhere, in random orders; the cap is what each schedule holds."""
    ratios = []
    for seed in range(300):
        chance = random.Random(seed)
        schedule = random_schedule(seed)
        stages, ranks = schedule.num_stages, prove_schedule(schedule).ranks
        row = lambda n, values: tuple(chance.choice(values) for _ in range(n))  # noqa: B023, E731
        times = {name: row(stages, [0.5, 1.0, 3.0, 4.7]) for name in "FBW"} | {"comm": row(stages - 1, [0.0, 0.1, 2.0])}
        stored = row(stages, [0.5, 1.0, 2.0])
        left = tuple(each * chance.choice([0.0, 0.5, 1.0]) for each in stored)
        cap = peak_activations(schedule, ActivationMemory(stored, left))
        pipeline = PipelineProblem(ranks, schedule.num_microbatches, stage_times(stages, **times), stored, left, cap)
        for synchronous in (False, True):
            step = pipeline_times(schedule, **times, synchronous=synchronous).step_s
            ratios.append(step_bound(pipeline, synchronous) / step)
    assert max(ratios) <= 1 + 1e-9
    assert ratios.count(1.0) > 5  # some are optimal, so that the bound is no formality


def test_random_pipelines() -> None:
    """Any placement, times, memory and cap: proven, under its cap, no faster than its bound."""
    chance = random.Random(0)
    for _ in range(40):
        ranks, stages_per_rank, m = chance.randint(1, 5), chance.choice([1, 1, 2, 3]), chance.choice([1, 2, 5, 9])
        placement = [*range(ranks), *(chance.randrange(ranks) for _ in range(ranks * (stages_per_rank - 1)))]
        chance.shuffle(placement)
        stages = len(placement)
        row = lambda n, values: [chance.choice(values) for _ in range(n)]  # noqa: E731
        times = {name: row(stages, [0.5, 1.0, 3.0, 4.7]) for name in "FBW"}
        stored = row(stages, [0.5, 1.0, 2.0])
        memory = ActivationMemory(stored, [each * chance.choice([0.0, 0.5, 1.0]) for each in stored])
        least = [sum(stored[s] for s in range(stages) if placement[s] == r) for r in range(ranks)]
        cap = chance.choice([None, [each * chance.choice([1, 1.3, 3]) for each in least]])
        search = best_schedule(
            placement, m, **times, comm=row(stages - 1, [0.0, 0.1, 2.0]), memory=memory, cap=cap,
            synchronous=chance.random() < 0.5, budget=20_000,
        )  # fmt: skip
        assert prove_schedule(search.schedule, stages, m).ranks == tuple(placement)
        peaks = peak_activations(search.schedule, memory)
        assert all(
            peak <= most * (1 + 1e-6) for peak, most in zip(peaks, cap or [ranks * e for e in least], strict=True)
        )
        assert search.bound_s * (1 - 1e-9) <= search.times.step_s
        assert search.gap == pytest.approx(search.times.step_s / search.bound_s - 1, abs=1e-9)


def test_backward_is_whole_where_nobody_waits_for_its_first_part() -> None:
    times = {"F": 1.0, "B": 1.0, "W": 1.0, "comm": 0.1}
    search = best_schedule(range(3), 6, **times)  # type: ignore[arg-type]
    kinds = [{kind for action in actions for kind in action.kinds} for actions in search.schedule.of_role]
    assert kinds[0] == {"forward", "backward"}  # the first stage sends no gradients on
    assert "input" in kinds[2]
    apart = [
        tuple(Action((kind,), a.microbatch, a.stage) for a in actions for kind in PARTS.get(a.kinds[0], a.kinds))
        for actions in search.schedule.of_role
    ]
    assert pipeline_times(Schedule("apart", tuple(apart)), **times).step_s == search.times.step_s  # type: ignore[arg-type]


PARTS = {"backward": ("input", "weight")}


def test_without_split_backwards() -> None:
    times = {"F": 1.0, "B": 1.2, "W": 0.8, "comm": 0.1}
    for ranks, stages_per_rank, placement, name in ((4, 1, "plain", "1f1b"), (4, 2, "looped", "interleaved")):
        place = place_stages(ranks, stages_per_rank, placement)  # type: ignore[arg-type]
        schedule = make_schedule(name, ranks, 9, stages_per_rank)
        cap = max(peak_activations(schedule))
        search = best_schedule(place, 9, **times, cap=cap, split=False, budget=100_000)  # type: ignore[arg-type]
        kinds = {kind for actions in search.schedule.of_role for action in actions for kind in action.kinds}
        assert kinds == {"forward", "backward"}
        assert search.bound_s <= search.times.step_s <= pipeline_times(schedule, **times).step_s  # type: ignore[arg-type]
        assert max(search.times.peak_activations) <= cap


def test_more_memory_is_never_slower() -> None:
    steps = []
    for cap in (1, 2, 4, 6, 8, 12):
        search = best_schedule(range(4), 12, F=1.0, B=1.1, W=0.7, comm=0.1, cap=cap, budget=60_000)
        steps.append(search.times.step_s)
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > 2 * steps[-1]


def test_equal_arguments_give_equal_schedules() -> None:
    first, second = (best_schedule(V, 12, F=1.0, B=1.2, W=0.8, comm=0.1, cap=11, budget=60_000) for _ in range(2))
    assert schedule_csv(first.schedule) == schedule_csv(second.schedule)
    assert first.num_trials == second.num_trials <= 60_000 // (3 * 12 * 16)
    assert (first.bound_s, first.construction) == (second.bound_s, second.construction)


def test_a_cap_that_no_schedule_meets_says_the_least() -> None:
    memory = ActivationMemory([3, 1, 2, 1], [1, 1, 1, 1])
    with pytest.raises(PlanError) as error:
        best_schedule((0, 1, 1, 0), 4, F=1, B=1, W=1, memory=memory, cap=[4, 2.5])
    assert str(error.value) == (
        "no schedule of this pipeline fits under its memory cap\n"
        "  where: rank 1\n"
        "  got: a cap of 2.5\n"
        "  expected: at least 3: a microbatch on all stages of the rank\n"
        "  hint: cap=4 or more, smaller microbatches, or recomputation"
    )
    search = best_schedule((0, 1, 1, 0), 4, F=1, B=1, W=1, memory=memory, cap=[4, 3])
    assert peak_activations(search.schedule, memory) == (4, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"placement": (0, 2)}, r"numbered from 0 without gaps\n  got: \[0, 2\]"),
        ({"placement": ()}, "numbered from 0 without gaps"),
        ({"microbatches": 0}, "at least one microbatch"),
        ({"cap": [8, 8, 8]}, "a cap needs a value for each rank\n  got: 3 values\n  expected: 2"),
        ({"F": [1, 1, 1]}, "F needs a value for each stage"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        best_schedule(**({"placement": (0, 1), "microbatches": 2, "F": 1, "B": 1, "W": 1} | arguments))  # type: ignore[arg-type]
