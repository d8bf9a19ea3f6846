"""Steps of experts in chunks of rows: split before placement, and compared as whole programs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from meshweave.cost.hardware import Costs
from meshweave.ir.graph import StepGraph
from meshweave.ir.rank import RankGraph
from meshweave.ir.verify import verify_step
from meshweave.optimize.batch_split import SplitReport
from meshweave.optimize.batch_split.captured import has_experts, split_captured
from meshweave.optimize.overlap.decide import NoOrderError
from meshweave.passes import MeshProgram, PassList, Split
from meshweave.passes.base import named
from meshweave.program import Planned
from meshweave.search import Candidate, Search

Build = Callable[[StepGraph, PassList], Planned]


@dataclass(frozen=True)
class _Built:
    """The program of a step in some chunks, or the reason why it cannot run under its memory cap."""

    rewrites: tuple[Split, ...]
    planned: Planned | NoOrderError
    report: SplitReport
    simulated: Callable[[tuple[RankGraph, ...]], float]

    @property
    def name(self) -> str:
        return named(self.rewrites)

    @cached_property
    def seconds(self) -> float:
        return math.inf if isinstance(self.planned, NoOrderError) else self.simulated(self.planned.optimized.roles)


def built_in_chunks(
    build: Build, step: StepGraph, pass_list: PassList, costs: Costs, num_devices: int, microbatches: int
) -> Planned:
    """The program that `build` returns for the step, or for the step in chunks of each device's rows if a pass
    splits it and it has experts: whichever simulates faster, unless the split is unconditional.

    `num_devices` share the batch. Rows of experts are sorted over all tokens, so after placement no op works row by
    row. Such a step is therefore split before placement, and every chunk has its own sort and dispatch.
    """
    split = next((each for each in pass_list.passes if isinstance(each, Split)), None)
    if split is None or not has_experts(step):
        return build(step, pass_list)
    search = Search[_Built](least_gain=pass_list.least_gain, budget=pass_list.budget)

    def seconds_of(roles: tuple[RankGraph, ...]) -> float:
        return MeshProgram(roles, microbatches=microbatches).seconds(costs).total

    written = {each: split_captured(step, each.num_chunks[0], num_devices) for each in split.alternatives}

    def try_step(rewrites: tuple[Split, ...], variant: StepGraph, passes: PassList, report: SplitReport) -> None:
        try:
            planned: Planned | NoOrderError = build(variant, passes)
        except NoOrderError as error:
            planned = error
        search.tried.append(_Built(rewrites, planned, report, seconds_of))

    in_chunks = {each: (chunked, report) for each, (chunked, report) in written.items() if chunked is not None}
    if split.is_compared or not in_chunks:
        *_, (_, report) = written.values()
        try_step((), step, pass_list, report)
    for each, (chunked, report) in in_chunks.items():
        if not split.is_compared or search.has_time_for(each.label):
            try_step((each,), verify_step(chunked), pass_list.without(split.name), report)
    return _fastest(search)


def _fastest(search: Search[_Built]) -> Planned:
    """The fastest of the programs, with its name and the outcome of the split in its reports."""
    at, rows, reason = search.fastest() if len(search.tried) > 1 else (0, tuple[Candidate, ...](), "")
    chosen, planned, report = search.tried[at], search.tried[at].planned, search.tried[at].report
    if isinstance(planned, NoOrderError):
        raise planned
    if rows:
        report = report if at else search.tried[-1].report.left(reason)
        after = chosen.seconds if at else min(each.seconds for each in search.tried[1:])
        report = replace(report, seconds_before=search.tried[0].seconds, seconds_after=after)
    its = planned.optimized
    optimized = replace(
        its,
        rewrites=(*chosen.rewrites, *its.rewrites),
        reports={**its.reports, "split": (report,) * len(its.roles)},
        variants=(*rows, *its.variants, *search.untried),
    )
    return replace(planned, optimized=optimized)
