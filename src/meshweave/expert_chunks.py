"""Steps of experts in chunks of rows: split before placement, and compared as whole programs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from meshweave.hardware import Costs
from meshweave.ir.graph import StepGraph
from meshweave.ir.verify import verify_step
from meshweave.passes import MeshProgram, Pipeline, ProgramVariant, Split
from meshweave.passes.candidates import AS_IT_IS, fastest
from meshweave.program import Planned
from meshweave.rows import SplitReport
from meshweave.rows.captured import has_experts, split_captured
from meshweave.schedule.decide import NoOrderError

Build = Callable[[StepGraph, Pipeline], Planned]


def built_in_chunks(
    build: Build, step: StepGraph, pipeline: Pipeline, costs: Costs, num_devices: int, microbatches: int
) -> Planned:
    """The program that `build` returns for the step, or for the step in chunks of each device's rows if the pipeline
    splits it and it has experts: whichever simulates faster, unless the split is unconditional.

    `num_devices` share the batch. Rows of experts are sorted over all tokens, so after placement no op works row by
    row. Such a step is therefore split before placement, and every chunk has its own sort and dispatch.
    """
    split = next((each for each in pipeline.passes if isinstance(each, Split)), None)
    if split is None or not has_experts(step):
        return build(step, pipeline)
    began = time.monotonic()
    rewrites = [
        (alternative.label, *split_captured(step, alternative.num_chunks[0], num_devices))
        for alternative in split.alternatives
    ]
    chunked = [(label, written, report) for label, written, report in rewrites if written is not None]
    rest = pipeline.without(split.name)
    if not split.is_compared:
        for label, written, report in chunked:
            return _named(build(verify_step(written), rest), label, report)
    whole = _built(build, step, pipeline)
    tried = [(AS_IT_IS, whole, rewrites[-1][2])]
    untried: list[ProgramVariant] = []
    for label, written, report in chunked:
        if pipeline.budget.is_over(began):
            untried.append(ProgramVariant.untried(label, pipeline.budget.seconds))
        else:
            tried.append((label, _built(build, verify_step(written), rest), report))
    seconds = [_seconds(planned, costs, microbatches) for _, planned, _ in tried] if len(tried) > 1 else [0.0]
    planned = _fastest(tried, seconds, pipeline.least_gain)
    optimized = planned.optimized
    return replace(planned, optimized=replace(optimized, variants=(*optimized.variants, *untried)))


def _built(build: Build, step: StepGraph, pipeline: Pipeline) -> Planned | NoOrderError:
    """The program, or the reason why it cannot run under its memory cap."""
    try:
        return build(step, pipeline)
    except NoOrderError as error:
        return error


def _fastest(
    tried: list[tuple[str, Planned | NoOrderError, SplitReport]], seconds: list[float], least_gain: float
) -> Planned:
    """The fastest of the programs. The first is not in chunks; the others have to be faster by `least_gain`."""
    at, variants, reason = fastest([label for label, _, _ in tried], seconds, least_gain)
    label, planned, report = tried[at]
    if isinstance(planned, NoOrderError):
        raise planned
    if len(tried) == 1:
        return _named(planned, label, report)
    if label == AS_IT_IS:
        report = tried[-1][2].left(reason)
    report = replace(report, seconds_before=seconds[0], seconds_after=seconds[at] if at else min(seconds[1:]))
    return _named(planned, label, report, variants)


def _seconds(planned: Planned | NoOrderError, costs: Costs, microbatches: int) -> float:
    if isinstance(planned, NoOrderError):
        return math.inf
    return MeshProgram(planned.optimized.roles, microbatches=microbatches).seconds(costs)


def _named(planned: Planned, label: str, report: SplitReport, variants: tuple[ProgramVariant, ...] = ()) -> Planned:
    """The program, with its name and the outcome of the split in its reports."""
    optimized = planned.optimized
    name = (
        optimized.name if label == AS_IT_IS else label if optimized.name == AS_IT_IS else f"{label}, {optimized.name}"
    )
    reports = {**optimized.reports, "split": (report,) * len(optimized.roles)}
    changed = replace(optimized, name=name, reports=reports, variants=(*variants, *optimized.variants))
    return replace(planned, optimized=changed)
