"""The best schedule for given times and memory: many constructions, the best of them improved, with a lower bound.

Constructions are the list scheduler's rules, the schedules by name with their weight parts placed anew, and
microbatches that follow each other at fixed distances, more or less slowly from stage to stage. The best are improved
along the chain of passes that ends last. Nothing is random but an order of trials with a fixed seed: equal arguments
give equal schedules.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product, zip_longest
from operator import add

from meshweave.engine.actions import Action, Actions, Schedule
from meshweave.engine.schedules.bounds import step_bound
from meshweave.engine.schedules.clock import PipelineTimes, StageTimes, pipeline_times, stage_times
from meshweave.engine.schedules.generators import SCHEDULES, make_schedule
from meshweave.engine.schedules.list_scheduling import (
    FORWARD,
    INPUT,
    WEIGHT,
    Fill,
    FillRule,
    ListScheduler,
    Orders,
    PassPlan,
    PipelinePass,
    PipelineProblem,
    action_of_pass,
    passes_of_actions,
)
from meshweave.engine.schedules.memory import ActivationMemory, PerStage
from meshweave.engine.sections import Kind
from meshweave.errors import PlanError

_IMPROVED = ", improved"
_NUM_FIRST = 5  # constructions that are always tried: one microbatch after another, and the rule
_MOST_TRIALS = 2000  # small pipelines are soon as good as they get
_EPSILON = 1e-9  # of a step's time: what counts as shorter


@dataclass(frozen=True, slots=True)
class ScheduleSearch:
    """What a search found. `bound_s`: no schedule of these stages, under this cap, is faster. `gap`: how much longer
    the schedule's step takes, as a share of the bound. `construction`: where the schedule comes from. `num_trials`: how
    many schedules were timed."""

    schedule: Schedule
    times: PipelineTimes
    bound_s: float
    gap: float
    construction: str
    num_trials: int


@dataclass(frozen=True, slots=True)
class _Trial:
    seconds: float
    total: float  # of all spans: of two schedules with equal steps, the one that leaves more time is better
    orders: Orders
    begins: tuple[tuple[float, ...], ...]
    rule: FillRule
    plan: PassPlan | None
    name: str


def best_schedule(
    placement: Sequence[int],
    microbatches: int,
    *,
    F: PerStage,
    B: PerStage,
    W: PerStage,
    comm: PerStage = 0.0,
    memory: ActivationMemory | None = None,
    cap: PerStage | None = None,
    synchronous: bool = True,
    split: bool = True,
    budget: int = 1_000_000,
) -> ScheduleSearch:
    """The fastest schedule found for stages whose ranks are `placement` (`place_stages`).

    `F`, `B`, `W`, `comm`, `synchronous`: as for `pipeline_times`; times are of a stage. `memory`: what a microbatch
    holds on a stage (default: one activation, which W frees), `cap`: the most that a rank may hold in the same unit, a
    number for all ranks or one for each; default: as many microbatches as there are ranks, on all stages of a rank, as
    1F1B holds on its first. `split`: whether I and W may run apart; else every backward is whole. `budget`: how many
    passes may be timed in all; 1,000,000 take about 3 s.

    The schedule is never slower than those by name that have this placement and fit under the cap. Backward is whole
    where that delays no other rank. Raises PlanError for
    a placement with gaps, and for a cap that no schedule meets, with the least that can be met."""
    _check_size(placement, microbatches)
    own = stage_times(len(placement), F, B, W, comm)
    pipeline = _pipeline(placement, microbatches, own, memory or ActivationMemory(), cap)
    if not split:  # all of backward is its first part
        whole = replace(own, input=tuple(map(add, own.input, own.weight)), weight=(0.0,) * len(placement))
        pipeline = replace(pipeline, times=whole, left=(0.0,) * len(placement))
    search = _Trials(pipeline, synchronous, budget)
    search.construct()
    search.improve()
    best = search.best
    schedule = Schedule("best", _actions(pipeline, best) if split else _whole_actions(best))
    times = pipeline_times(schedule, F=F, B=B, W=W, comm=comm, synchronous=synchronous)
    return ScheduleSearch(
        schedule=schedule,
        times=times,
        bound_s=search.bound,
        gap=max(0.0, times.step_s / search.bound - 1),
        construction=best.name,
        num_trials=search.num_trials,
    )


def _actions(pipeline: PipelineProblem, trial: _Trial) -> tuple[Actions, ...]:
    """The actions of a trial: where W follows its I and nobody would wait, they are a whole backward, which is less
    work on real machines."""
    times = pipeline.times
    begins = {
        each: begin
        for order, row in zip(trial.orders, trial.begins, strict=True)
        for each, begin in zip(order, row, strict=True)
    }

    def may_join(each: PipelinePass, following: PipelinePass | None) -> bool:
        kind, stage, m = each
        if kind != INPUT or following != (WEIGHT, stage, m):
            return False
        arrival = begins[following] + times.weight[stage] + (pipeline.latency(stage, stage - 1) if stage else 0.0)
        return stage == 0 or arrival <= begins[INPUT, stage - 1, m]

    result = []
    for order in trial.orders:
        actions: list[Action] = []
        is_joined = False  # with the pass before
        for each, following in zip_longest(order, order[1:]):
            if not is_joined:
                is_joined = may_join(each, following)
                actions.append(Action(("backward",), each[2], each[1]) if is_joined else action_of_pass(each))
            else:
                is_joined = False
        result.append(tuple(actions))
    return tuple(result)


def _whole_actions(trial: _Trial) -> tuple[Actions, ...]:
    """The actions of a trial whose weight parts take no time."""
    kinds: tuple[Kind, ...] = ("forward", "backward")
    return tuple(
        tuple(Action((kinds[kind],), m, stage) for kind, stage, m in order if kind != WEIGHT) for order in trial.orders
    )


def _check_size(placement: Sequence[int], microbatches: int) -> None:
    if not placement or sorted(set(placement)) != list(range(max(placement) + 1)):
        raise PlanError(
            "the ranks of a pipeline's stages are numbered from 0 without gaps",
            got=str(list(placement)),
            hint='the placements by name: place_stages(ranks, stages_per_rank, "v")',
        )
    if microbatches < 1:
        raise PlanError("a pipeline needs at least one microbatch", got=str(microbatches))


def _pipeline(
    placement: Sequence[int], microbatches: int, times: StageTimes, memory: ActivationMemory, cap: PerStage | None
) -> PipelineProblem:
    ranks = range(max(placement) + 1)
    stored, left = memory.of_stages(len(placement))
    whole = [sum(stored[s] for s, rank in enumerate(placement) if rank == r) for r in ranks]
    if cap is None:
        caps = [len(ranks) * each for each in whole]
    else:
        caps = [float(c) for c in cap] if isinstance(cap, Sequence) else [float(cap)] * len(ranks)
    if len(caps) != len(ranks):
        raise PlanError("a cap needs a value for each rank", got=f"{len(caps)} values", expected=f"{len(ranks)}")
    for rank, (most, least) in enumerate(zip(caps, whole, strict=True)):
        if most < least * (1 - _EPSILON):
            raise PlanError(
                "no schedule of this pipeline fits under its memory cap",
                where=f"rank {rank}",
                got=f"a cap of {most:g}",
                expected=f"at least {least:g}: a microbatch on all stages of the rank",
                hint=f"cap={max(whole):g} or more, smaller microbatches, or recomputation",
            )
    return PipelineProblem(tuple(placement), microbatches, times, stored, left, tuple(caps))


class _Trials:
    """Trials, the best so far, and the budget that is left."""

    def __init__(self, pipeline: PipelineProblem, synchronous: bool, budget: int) -> None:
        self.pipeline, self.synchronous = pipeline, synchronous
        self.size = 3 * pipeline.microbatches * len(pipeline.rank_of)
        self.left = max(1, min(budget // self.size, _MOST_TRIALS))
        self.bound = step_bound(pipeline, synchronous)
        self.num_trials = 0
        self.trials: list[_Trial] = []  # the best of each construction

    @property
    def best(self) -> _Trial:
        return min(self.trials, key=lambda trial: (trial.seconds, trial.total))

    @property
    def is_done(self) -> bool:
        """Whether a schedule is as fast as any can be."""
        return bool(self.trials) and self.best.seconds <= self.bound * (1 + _EPSILON)

    def run(self, name: str, rule: FillRule, plan: PassPlan | None = None) -> _Trial | None:
        """A schedule and its time; None if it does not fit under the cap."""
        self.num_trials += 1
        self.left -= 1
        its = ListScheduler(self.pipeline, rule, plan)
        if not its.is_complete:
            return None
        spans = [state.free - state.begins[0] for state in its.states]
        seconds = its.makespan() if self.synchronous else max(spans)
        return _Trial(seconds, sum(spans), its.orders, tuple(map(tuple, its.begins)), rule, plan, name)

    def construct(self) -> None:
        """Time the constructions, as far as half of the budget goes, but at least those as they are."""
        reserved = self.left // 2
        for at, (name, rule, plan) in enumerate(_constructions(self.pipeline)):
            is_needed = at < _NUM_FIRST or (plan is not None and plan.has_weights)
            if self.is_done or (self.left <= reserved and not is_needed):
                return
            trial = self.run(name, rule, plan)
            if trial is not None:
                self.trials.append(trial)

    def improve(self) -> None:
        """Improve the best trials in turn, with weight parts placed anew, then the best of all with its own."""
        starts = sorted(self.trials, key=lambda trial: (trial.seconds, trial.total))
        distinct = [trial for at, trial in enumerate(starts) if all(trial.orders != o.orders for o in starts[:at])]
        for at, start in enumerate(distinct[:3]):
            is_placed = start.plan is not None and not start.plan.has_weights
            plan = start.plan if is_placed and start.plan else PassPlan(_without_weights(start.orders))
            self._climb(start, plan, self.left // (4 - at))
        self._climb(self.best, PassPlan(self.best.orders), self.left)

    def _climb(self, start: _Trial, plan: PassPlan, budget: int) -> None:
        """Change a plan along the chain that its end waits for, as long as that makes its step no longer: the way to a
        shorter one often leads over others that are equal."""
        chance = random.Random(0)
        name = start.name.removesuffix(_IMPROVED) + _IMPROVED
        current, end = start, self.left - budget
        moves = _moves(self.pipeline, current, plan, self.synchronous)
        while moves and self.left > end and not self.is_done:
            changed = _changed(plan, moves.pop(chance.randrange(len(moves))))
            trial = self.run(name, start.rule, changed)
            if trial is None or trial.seconds > current.seconds * (1 + _EPSILON):
                continue
            if trial.seconds < self.best.seconds:
                self.trials.append(trial)
            # A plan runs in another order where a forward did not fit.
            current = trial
            plan = replace(changed, orders=trial.orders if plan.has_weights else _without_weights(trial.orders))
            moves = _moves(self.pipeline, current, plan, self.synchronous)


def _without_weights(orders: Orders) -> Orders:
    return tuple(tuple(each for each in order if each[0] != WEIGHT) for order in orders)


_Move = tuple[str, int, PipelinePass, PipelinePass]  # what to change, the rank, and two passes in a row there


def _moves(pipeline: PipelineProblem, trial: _Trial, plan: PassPlan, synchronous: bool) -> list[_Move]:
    """Changes of a plan on the chain of passes that the step's end waits for, each as soon as the one before ended."""
    index = {each: (rank, at) for rank, order in enumerate(trial.orders) for at, each in enumerate(order)}
    ends = [trial.begins[r][-1] + pipeline.seconds[order[-1][0]][order[-1][1]] for r, order in enumerate(trial.orders)]
    spans = [end - begins[0] for end, begins in zip(ends, trial.begins, strict=True)]
    measure = ends if synchronous else spans
    rank = measure.index(max(measure))
    at, moves = len(trial.orders[rank]) - 1, list[_Move]()
    tiny = trial.seconds * _EPSILON
    while True:
        each, begin = trial.orders[rank][at], trial.begins[rank][at]
        before = trial.orders[rank][at - 1] if at else None
        free = trial.begins[rank][at - 1] + pipeline.seconds[before[0]][before[1]] if before else 0.0
        if before is not None:
            moves += _moves_between(pipeline, plan, rank, before, each, free < begin - tiny)
        if before is not None and free >= begin - tiny:
            at -= 1
            continue
        source = _source(pipeline, each)
        if source is None:
            return moves
        rank, at = index[source]


def _moves_between(
    pipeline: PipelineProblem, plan: PassPlan, rank: int, before: PipelinePass, each: PipelinePass, is_gap: bool
) -> Iterator[_Move]:
    """What may be changed between two passes in a row."""
    is_swappable = before[1:] != each[1:] and before[:2] != each[:2]  # microbatches keep their order
    if plan.has_weights:
        if is_swappable and not is_gap:
            yield "swap", rank, before, each
        return
    if each[0] == WEIGHT:
        return
    if is_gap and each not in plan.after_weight:
        yield "fill", rank, before, each
    elif before[0] == WEIGHT and each not in plan.without_weight:
        yield "clear", rank, before, each
    elif before[0] != WEIGHT and is_swappable:
        yield "swap", rank, before, each


def _source(pipeline: PipelineProblem, each: PipelinePass) -> PipelinePass | None:
    """The pass whose result another waits for; None for forward of the first stage."""
    kind, stage, m = each
    if kind == FORWARD:
        return (FORWARD, stage - 1, m) if stage else None
    if kind == INPUT:
        return (INPUT, stage + 1, m) if stage < pipeline.last else (FORWARD, stage, m)
    return INPUT, stage, m


def _changed(plan: PassPlan, move: _Move) -> PassPlan:
    what, rank, before, each = move
    if what == "fill":
        return replace(plan, after_weight=plan.after_weight | {each}, without_weight=plan.without_weight - {each})
    if what == "clear":
        return replace(plan, without_weight=plan.without_weight | {each}, after_weight=plan.after_weight - {each})
    order = list(plan.orders[rank])
    first, second = order.index(before), order.index(each)
    order[first], order[second] = order[second], order[first]
    return replace(plan, orders=(*plan.orders[:rank], tuple(order), *plan.orders[rank + 1 :]))


def _constructions(pipeline: PipelineProblem) -> Iterator[tuple[str, FillRule, PassPlan | None]]:
    """What is tried, best guesses first: name, rule and plan."""
    ranks = len(pipeline.cap)
    fills: tuple[Fill, ...] = ("longest", "none", "all")
    own = [FillRule((0.0,) * ranks, fill=fill, least_gap=gap) for fill, gap in product(fills, (1.0, 0.5))]
    yield "one microbatch after another", own[0], _in_turn(pipeline)
    for late, ahead in product((0.0, 1.0), (False, True)):
        yield "list scheduling", FillRule((late,) * ranks, ahead), None
    named = list(_named(pipeline))
    for name, orders in named:
        yield name, own[0], PassPlan(orders)
    for name, orders in named:
        plan = PassPlan(_without_weights(orders))
        for rule in own:
            yield f"{name}, weight parts placed anew", rule, plan
    for rule in own:
        yield "list scheduling", rule, None
    for until in range(1, ranks):  # only the first ranks fill the gap before their first backward
        yield "list scheduling", FillRule((1.0,) * until + (0.0,) * (ranks - until)), None
    for plan, is_close in _waves(pipeline):
        for rule in own[:3] if is_close else own[:1]:
            yield "waves", rule, plan


def _in_turn(pipeline: PipelineProblem) -> PassPlan:
    """Each microbatch alone: what fits under every cap that any schedule meets."""
    orders = []
    for stages in pipeline.stages_of:
        order: list[PipelinePass] = []
        for m in range(pipeline.microbatches):
            order += ((FORWARD, stage, m) for stage in stages)
            order += ((kind, stage, m) for stage in reversed(stages) for kind in (INPUT, WEIGHT))
        orders.append(tuple(order))
    return PassPlan(tuple(orders))


def _named(pipeline: PipelineProblem) -> Iterator[tuple[str, Orders]]:
    """The schedules by name whose stages are where the pipeline's are, backward in two parts."""
    ranks, per_rank = len(pipeline.cap), len(pipeline.rank_of) // len(pipeline.cap)
    for name, family in SCHEDULES.items():
        if family.stages_per_rank not in (None, per_rank) or per_rank * ranks != len(pipeline.rank_of):
            continue
        schedule = make_schedule(name, ranks, pipeline.microbatches, per_rank, pipeline.times)
        if any(set(s) != set(own) for s, own in zip(schedule.stages_of_role, pipeline.stages_of, strict=True)):
            continue
        yield name, tuple(map(passes_of_actions, schedule.of_role))


# How much slower than it could a microbatch passes from stage to stage: of forward through the first stages of all
# ranks, input through the last, and so on in turn; then of the others. More holds more memory and lets ranks work
# longer between two passes of a microbatch (Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024,
# section 3).
_SLOWER = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
_APART = (1.0, 1.15, 1.4, 1.8, 2.5, 4.0)


def _waves(pipeline: PipelineProblem) -> Iterator[tuple[PassPlan, bool]]:
    """Microbatches pass the stages at a fixed pace and begin at a fixed distance: that of the slowest rank's work, as
    close as they can be on average, or, for small caps, further apart."""
    work = pipeline.times.whole
    closest = max(sum(work[stage] for stage in stages) for stages in pipeline.stages_of)
    choices = sorted(product(_APART, product(_SLOWER, _SLOWER)), key=lambda each: (2 * each[0] + sum(each[1]), each))
    for apart, pace in choices:
        times, distance = _wave(pipeline, pace), closest * apart
        orders = []
        for stages in pipeline.stages_of:
            passes = [
                (times[kind, stage] + m * distance, -kind, stage, m)
                for stage in stages for kind in (FORWARD, INPUT) for m in range(pipeline.microbatches)
            ]  # fmt: skip
            orders.append(tuple((-kind, stage, m) for _, kind, stage, m in sorted(passes)))
        yield PassPlan(tuple(orders)), apart == 1


def _wave(pipeline: PipelineProblem, pace: tuple[float, float]) -> dict[tuple[int, int], float]:
    """When a microbatch comes to each stage, in forward and in input. A leg is its way through all ranks once."""
    ranks, now, passes = len(pipeline.cap), 0.0, 0
    times: dict[tuple[int, int], float] = {}
    for kind in (FORWARD, INPUT):
        stages = range(pipeline.last + 1) if kind == FORWARD else range(pipeline.last, -1, -1)
        for stage in stages:
            times[kind, stage] = now
            onward = stage + (1 if kind == FORWARD else -1)
            latency = pipeline.latency(stage, onward) if 0 <= onward <= pipeline.last else 0.0
            now += (pipeline.seconds[kind][stage] + latency) * pace[passes // ranks % 2]
            passes += 1
    return times
