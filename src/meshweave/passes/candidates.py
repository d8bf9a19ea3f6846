"""Candidate programs on their way through a list of passes, and the choice among them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from torch import fx

from meshweave.passes.base import Pass, PassProgram, Report
from meshweave.schedule.decide import NoOrderError

Progress = Callable[[str], None]
Q = TypeVar("Q", bound=PassProgram)
AS_IT_IS = "as it is"  # the name of a program whose ops no pass rewrote


@dataclass(frozen=True, slots=True)
class Budget:
    """How long further programs are tried. `agreed` turns the time-out of a process into that of all; all processes
    call it together."""

    seconds: float = math.inf
    agreed: Callable[[bool], bool] = bool

    def is_over(self, began: float) -> bool:
        return self.seconds < math.inf and self.agreed(time.monotonic() - began > self.seconds)


@dataclass(frozen=True, slots=True)
class ProgramVariant:
    """A variant of the program. `seconds` is its simulated time after all passes; `reason` says why it has none."""

    name: str
    seconds: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.reason or f'{self.seconds * 1e3:,.3f} ms'}"


@dataclass(frozen=True, slots=True)
class ProgramCandidate(Generic[Q]):
    """A program on its way through the passes; `written`: the program before the ordering passes; `unfit`: why it got
    no further."""

    name: str
    program: Q
    written: Q
    reports: Mapping[str, tuple[Report, ...]] = field(default_factory=dict)
    unfit: NoOrderError | None = None

    def behind(self, new_pass: Pass[Q], costs: Any) -> Iterator[ProgramCandidate[Q]]:
        """The candidates after a pass: the changed program and, if it is to be compared or nothing changed, the
        unchanged program.
        Raises VerifyError for what the pass broke."""
        if self.unfit is not None:
            yield self
            return
        try:
            tried = [self.after(other, *other.run(self.program, costs)) for other in new_pass.alternatives]
        except NoOrderError as error:
            yield replace(self, unfit=error)
            return
        changed = [candidate for candidate in tried if candidate.program is not self.program]
        if not changed:
            yield tried[-1]
        elif new_pass.is_compared:
            yield self
        yield from changed

    def after(self, done_pass: Pass[Q], program: Q, reports: tuple[Report, ...]) -> ProgramCandidate[Q]:
        program.verify(self.program)
        reports_by_pass = {**self.reports, done_pass.name: reports}
        if done_pass.stage == "ordered":
            return replace(self, program=program, reports=reports_by_pass)
        is_same = done_pass.numerics == "exact" or _is_same(program.graphs, self.program.graphs)
        name = self.name if is_same else _joined(self.name, done_pass.label)
        return ProgramCandidate(name, program, program, reports_by_pass)


def _is_same(graphs: Sequence[fx.Graph], before: Sequence[fx.Graph]) -> bool:
    return all(new is old for new, old in zip(graphs, before, strict=True))


def _joined(name: str, label: str) -> str:
    return label if name == AS_IT_IS else f"{name}, {label}"


def run_passes(
    program: Q,
    passes: Sequence[Pass[Q]],
    costs: Any,
    least_gain: float = 0.0,
    budget: Budget = Budget(),
    progress: Progress = lambda stage: None,
) -> tuple[ProgramCandidate[Q], tuple[ProgramVariant, ...]]:
    """Run the passes, verified after each. Returns the program and, if there were several, the variants that were
    compared.

    A pass that is taken by gain is kept only if the program after all passes simulates faster and stays under the
    cap: the fastest variant wins, the first of equals; a rewrite has to be faster by the share `least_gain`. Raises
    NoOrderError if no variant is under the cap.
    """
    began, untried = time.monotonic(), dict[str, ProgramVariant]()
    candidates = [ProgramCandidate(AS_IT_IS, program, program)]
    for next_pass in passes:
        progress(next_pass.name)
        behind: list[ProgramCandidate[Q]] = []
        for i, candidate in enumerate(candidates):
            if i and budget.is_over(began):
                reason = f"not tried: the {budget.seconds:g} s were used up"
                untried[candidate.name] = ProgramVariant(candidate.name, reason=reason)
            else:
                behind += candidate.behind(next_pass, costs)
        candidates = behind
    if len(candidates) == 1 and not untried:
        chosen, variants = candidates[0], tuple[ProgramVariant, ...]()
    else:
        chosen, variants = _fastest_candidate(candidates, costs, least_gain)
    if chosen.unfit is not None:
        raise chosen.unfit
    return chosen, (*variants, *untried.values())


def fastest(
    names: Sequence[str], seconds: Sequence[float], least_gain: float
) -> tuple[int, tuple[ProgramVariant, ...], str]:
    """The index of the fastest program, the time of each, and why a pass of the others is not taken. Programs that are
    not `AS_IT_IS` have to be faster by `least_gain`; if none fits (infinite seconds), the first."""
    variants = tuple(
        ProgramVariant(name, took) if took < math.inf else ProgramVariant(name, reason="does not fit under the cap")
        for name, took in zip(names, seconds, strict=True)
    )
    handicap = [1.0 if name == AS_IT_IS else 1.0 / (1.0 - least_gain) for name in names]
    at = min(range(len(names)), key=lambda i: seconds[i] * handicap[i])
    return at, variants, "the program is not faster with it: " + "; ".join(map(str, variants))


def _fastest_candidate(
    candidates: Sequence[ProgramCandidate[Q]], costs: Any, least_gain: float
) -> tuple[ProgramCandidate[Q], tuple[ProgramVariant, ...]]:
    """The fastest candidate and the time of each. Its reports say why passes of other candidates were not taken."""
    seconds = [each.program.seconds(costs) if each.unfit is None else math.inf for each in candidates]
    at, variants, reason = fastest([each.name for each in candidates], seconds, least_gain)
    chosen = candidates[candidates[0].program.agreed(at)]
    rejected: dict[str, tuple[Report, ...]] = {}
    for candidate in candidates:
        for name, reports in candidate.reports.items():
            rejected.setdefault(name, tuple(report.left(reason) for report in reports))
    return replace(chosen, reports={**rejected, **chosen.reports}), variants
