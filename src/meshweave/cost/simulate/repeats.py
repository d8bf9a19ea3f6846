"""A step of many microbatches from steps of few: in the middle of a step each microbatch repeats the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isclose

from meshweave.cost.hardware import MachineProfile
from meshweave.cost.simulate.growth import grown, grown_roles
from meshweave.cost.simulate.result import Simulation
from meshweave.cost.simulate.step import SimulateOptions, simulate_roles
from meshweave.engine.actions import Schedule
from meshweave.engine.schedules import SCHEDULES, make_schedule, pipeline_times
from meshweave.engine.sections import PASSES
from meshweave.ir.rank import RankGraph

_FEW = (3, 4, 5)  # microbatches that come one after the other: the first and the last are unlike those between
_ROUNDS = 4  # of as many microbatches as a pipeline has stages: after so many a pipeline is full
_WORTH = 2  # times as many microbatches as are simulated, from which on it is worth it
_ROUNDING = 1e-6  # of the seconds of a step
_LITTLE = 0.01  # of a round of microbatches: what messages between stages may come to where stages drift
_MORE = 1e-3  # of a peak: the losses of microbatches, which live until the end. More are activations, as in gpipe


def simulate_few(roles: Sequence[RankGraph], profile: MachineProfile, options: SimulateOptions) -> Simulation | None:
    """What `simulate_roles` says, from steps of fewer microbatches; its spans are those of such a step. None where that
    would save little, or where three such steps do not grow by the same: with a schedule that has no name, or whose
    memory grows. In a pipeline stages that drift against each other may meet on a link later on (0.8% of a step)."""
    count, schedule = options.microbatches, options.pipeline
    few = _FEW if schedule is None else _few_of_pipeline(schedule)
    if few is None or count < _WORTH * sum(few):
        return None
    results = list[Simulation]()
    for number in few:
        pipeline = None if schedule is None else _of(schedule, number)
        tokens = options.tokens // count * number
        results.append(
            simulate_roles(roles, profile, replace(options, microbatches=number, pipeline=pipeline, tokens=tokens))
        )
    first, low, high = results
    if not isclose(low.seconds - first.seconds, high.seconds - low.seconds, rel_tol=_ROUNDING):
        return None
    if schedule is not None and not _is_steady(high, high.seconds - low.seconds, few[2], few[2] - few[1]):
        return None
    return _extended(low, high, (count - few[2]) / (few[2] - few[1]), options, few[2])


def _of(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule of this name for another number of microbatches."""
    ranks = schedule.stages_of_role
    return make_schedule(schedule.name, len(ranks), microbatches, len(ranks[0]))


def _few_of_pipeline(schedule: Schedule) -> tuple[int, int, int] | None:
    """Numbers of microbatches, whole rounds apart from each other and `schedule`, if its clock goes on as between
    them."""
    ranks, count = schedule.stages_of_role, schedule.num_microbatches
    if schedule.name not in SCHEDULES or _of(schedule, count) != schedule:
        return None
    size = len(ranks)
    low = _ROUNDS * len(ranks[0]) * size + count % size
    few = low, low + size, low + 2 * size
    if count < _WORTH * sum(few):
        return None
    first, second, last = (pipeline_times(_of(schedule, n), F=1.0, B=1.0, W=1.0).step_s for n in (*few[1:], count))
    expected = second + (second - first) * (count - few[2]) / size
    return few if isclose(expected, last, rel_tol=_ROUNDING) else None


def _is_steady(simulation: Simulation, seconds: float, microbatches: int, size: int) -> bool:
    """Whether rounds of `size` microbatches that last so many seconds go on like this, but for 1% of them.

    Losses are reported after all passes: while another stage still computes that costs nothing, with more microbatches
    it does. Stages of which one is faster drift against each other, until it waits in every round or their messages
    meet on a link. Either costs at most the time of these messages, which has to be little."""
    middle = microbatches // 2
    starts = dict[tuple[int, int, int], float]()
    reports, others = ({role.index: 0.0 for role in simulation.roles} for _ in range(2))
    for span in simulation.spans:
        if span.kind == "compute" and span.action == "forward" and span.microbatch in (middle, middle + size):
            starts.setdefault((span.role, span.stage, span.microbatch), span.start)
        elif span.kind == "transfer" and middle <= span.microbatch < middle + size:
            (others if span.action in PASSES else reports)[span.role] += span.seconds
    rounds = [starts[role, stage, m + size] - start for (role, stage, m), start in starts.items() if m == middle]
    is_even = all(isclose(each, rounds[0], rel_tol=_ROUNDING) for each in rounds)
    return max(reports[role] + (0 if is_even else others[role]) for role in reports) < _LITTLE * seconds


def _extended(
    low: Simulation, high: Simulation, times: float, options: SimulateOptions, shown: int
) -> Simulation | None:
    """The step that grows `times` more as it does from `low` to `high`."""
    roles = grown_roles(low, high, times)
    if any(new.peak_bytes > (1 + _MORE) * old.peak_bytes for new, old in zip(roles, high.roles, strict=True)):
        return None
    middle = shown // 2 if options.pipeline is None else -1  # which stands for those that are not played
    spans = tuple(replace(span, repeats=round(1 + times)) if span.microbatch == middle else span for span in high.spans)
    rest = f"microbatches 1 to {shown} of {options.microbatches} were played: the others repeat them"
    return replace(grown(low, high, times, roles), spans=spans, tokens=options.tokens, notes=(*high.notes, rest))
