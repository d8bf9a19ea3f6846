"""A lower bound of a pipeline's step: no schedule of its stages, under its cap, is faster."""

from __future__ import annotations

from meshweave.engine.schedules.list_scheduling import PipelineProblem


def step_bound(pipeline: PipelineProblem, synchronous: bool) -> float:
    """Seconds that every schedule takes: to the last rank's end (`synchronous`), or in the longest span of a rank.

    The largest of, for each rank, its work with the gaps before its first and after its last backward, and what its cap
    lets through; and, for each two stages, the way of a microbatch from one to the other, the other's work on all
    microbatches, and the way back."""
    spans = [max(_work_bound(pipeline, r), _memory_bound(pipeline, r)) for r in range(len(pipeline.cap))]
    chains = [_chain_bound(pipeline, first, slow) for slow in range(pipeline.last + 1) for first in range(slow + 1)]
    if not synchronous:
        return max(*spans, *chains)
    heads = [_way(pipeline, 0, stages[0]) for stages in pipeline.stages_of]
    return max(*(head + span for head, span in zip(heads, spans, strict=True)), *chains)


def _way(pipeline: PipelineProblem, first: int, last: int) -> float:
    """Of a microbatch from the begin of F on a stage to that on a later one."""
    times = pipeline.times.forward
    return sum(times[s] + pipeline.latency(s, s + 1) for s in range(first, last))


def _way_back(pipeline: PipelineProblem, first: int, last: int) -> float:
    """Of a microbatch from the end of I on stage `last` to that on stage `first`."""
    times = pipeline.times.input
    return sum(times[s] + pipeline.latency(s, s + 1) for s in range(first, last))


def _round_trip(pipeline: PipelineProblem, first: int, last: int) -> float:
    """From the begin of F on stage `first` to the begin of I on stage `last`, which is `first` or later."""
    end = pipeline.last
    to_end = _way(pipeline, first, end) + pipeline.times.forward[end]
    return to_end + (
        _way_back(pipeline, last, end) + pipeline.times.input[end] - pipeline.times.input[last] if last < end else 0.0
    )


def _work_bound(pipeline: PipelineProblem, rank: int) -> float:
    """A rank's work, and what it has to wait: before its first backward it can only run the forwards that fit under
    its cap; while the last forward's microbatch is on its way, only what it holds then."""
    times, stages, m = pipeline.times, pipeline.stages_of[rank], pipeline.microbatches
    cap, first, last = pipeline.cap[rank], stages[0], stages[-1]
    work = m * sum(times.whole[stage] for stage in stages)
    # Per unit of memory, what a stage's forwards take at most.
    rates = [times.forward[s] / pipeline.stored[s] if pipeline.stored[s] else float("inf") for s in stages]
    forwards = min(m * sum(times.forward[s] for s in stages), cap * max(rates))
    before = max(0.0, _round_trip(pipeline, first, last) - forwards)
    if len(stages) > 1:
        return work + before
    window = _round_trip(pipeline, first, first) + times.input[first]
    stored, left = pipeline.stored[first], pipeline.left[first]
    backward = times.input[first] + times.weight[first]
    most = max(backward / stored if stored else float("inf"), times.weight[first] / left if left else float("inf"))
    rest = min(cap * most, m * backward) - times.weight[first]
    after = max(0.0, window - times.forward[first] - rest)
    all_fit = not stored or m * stored <= cap * (1 + 1e-9)
    return work + (max(before, after) if all_fit else before + after)


def _memory_bound(pipeline: PipelineProblem, rank: int) -> float:
    """While a microbatch is on its way through later stages and back, a stage holds it: no more fit than the cap."""
    occupied = sum(
        pipeline.stored[s] * (_round_trip(pipeline, s, s) + pipeline.times.input[s])
        + pipeline.left[s] * pipeline.times.weight[s]
        for s in pipeline.stages_of[rank]
    )
    return pipeline.microbatches * occupied / pipeline.cap[rank] if occupied else 0.0


def _chain_bound(pipeline: PipelineProblem, first: int, slow: int) -> float:
    """From the first F on stage `first` to its last W. In between, from the first F on stage `slow` to the last I
    there, its rank runs all F and I of this stage and its later ones, and the weight parts that do not fit under its
    cap when that I ends."""
    times, m, rank = pipeline.times, pipeline.microbatches, pipeline.rank_of[slow]
    stages = [stage for stage in pipeline.stages_of[rank] if stage >= slow]
    rates = [
        times.weight[s] / pipeline.left[s] if pipeline.left[s] else float("inf") for s in stages if times.weight[s]
    ]
    outstanding = pipeline.cap[rank] * max(rates, default=0.0)
    weights = m * sum(times.weight[s] for s in stages)
    work = m * sum(times.forward[s] + times.input[s] for s in stages) + max(0.0, weights - outstanding)
    way = _way(pipeline, first, slow) + _way_back(pipeline, first, slow)
    return way + work + times.weight[first]
