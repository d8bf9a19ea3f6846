"""Programs on their way through a list of passes: those that are compared, and the one that is taken."""

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
AS_IT_IS = "as it is"  # the name of a program in which no ops are written anew


@dataclass(frozen=True, slots=True)
class Budget:
    """How long programs are tried beside the first. `agreed` makes what one process finds late the word of all of them,
    which call it together."""

    seconds: float = math.inf
    agreed: Callable[[bool], bool] = bool

    def is_over(self, began: float) -> bool:
        return self.seconds < math.inf and self.agreed(time.monotonic() - began > self.seconds)


@dataclass(frozen=True, slots=True)
class ProgramVariant:
    """One way to write a program. `seconds` are those in simulation, behind all passes; `reason` says why it has
    none."""

    name: str
    seconds: float = 0.0
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.reason or f'{self.seconds * 1e3:,.3f} ms'}"


@dataclass(frozen=True, slots=True)
class ProgramCandidate(Generic[Q]):
    """A program on its way through the passes; `written`: as it was before the passes that only order it; `unfit`: why
    it got no further."""

    name: str
    program: Q
    written: Q
    reports: Mapping[str, tuple[Report, ...]] = field(default_factory=dict)
    unfit: NoOrderError | None = None

    def behind(self, new_pass: Pass[Q], costs: Any) -> Iterator[ProgramCandidate[Q]]:
        """What becomes of it in a pass: with what that does and, if it is to be compared or does nothing, without.
        Raises VerifyError for what the pass did wrong."""
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
    """The program behind the passes, verified after each, and which ways to write it were compared, where several were.

    What a pass does by gain is taken only if the program, behind all passes, is simulated faster and stays under the
    cap: of all variants the fastest is taken, the first of equals; what is written anew has to be faster by the share
    `least_gain`. Raises NoOrderError where no variant is under the cap.
    """
    began, untried = time.monotonic(), dict[str, ProgramVariant]()
    candidates = [ProgramCandidate(AS_IT_IS, program, program)]
    for next_pass in passes:
        progress(next_pass.name)
        behind: list[ProgramCandidate[Q]] = []
        for i, candidate in enumerate(candidates):
            if i and budget.is_over(began):
                reason = f"not tried: {budget.seconds:g} s were over"
                untried[candidate.name] = ProgramVariant(candidate.name, reason=reason)
            else:
                behind += candidate.behind(next_pass, costs)
        candidates = behind
    if len(candidates) == 1 and not untried:
        chosen, variants = candidates[0], tuple[ProgramVariant, ...]()
    else:
        chosen, variants = _fastest(candidates, costs, least_gain)
    if chosen.unfit is not None:
        raise chosen.unfit
    return chosen, (*variants, *untried.values())


def _fastest(
    candidates: Sequence[ProgramCandidate[Q]], costs: Any, least_gain: float
) -> tuple[ProgramCandidate[Q], tuple[ProgramVariant, ...]]:
    """The fastest candidate and what each takes; its reports say of passes that others went through why it did not.
    Where none fits, the first."""
    variants: list[ProgramVariant] = []
    for candidate in candidates:
        seconds = candidate.program.seconds(costs) if candidate.unfit is None else math.inf
        reason = "" if seconds < math.inf else "does not fit under the cap"
        variants.append(ProgramVariant(candidate.name, 0.0 if reason else seconds, reason))
    handicap = [1.0 if variant.name == AS_IT_IS else 1.0 / (1.0 - least_gain) for variant in variants]
    at = min(range(len(variants)), key=lambda i: (variants[i].reason, variants[i].seconds * handicap[i]))
    chosen = candidates[candidates[0].program.agreed(at)]
    reason = "the program is not faster with it: " + "; ".join(map(str, variants))
    rejected: dict[str, tuple[Report, ...]] = {}
    for candidate in candidates:
        for name, reports in candidate.reports.items():
            rejected.setdefault(name, tuple(report.left(reason) for report in reports))
    return replace(chosen, reports={**rejected, **chosen.reports}), tuple(variants)
