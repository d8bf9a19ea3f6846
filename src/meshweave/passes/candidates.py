"""Candidate programs on their way through a list of passes, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

from torch import fx

from meshweave.cost.simulate.step import StepSeconds
from meshweave.optimize.overlap.decide import NoOrderError
from meshweave.passes.base import Pass, PassProgram, Report, named
from meshweave.search import Budget, Candidate, Search

Progress = Callable[[str], None]
Q = TypeVar("Q", bound=PassProgram)
# By how much a rewrite that is meant to run communication beside compute may shorten one of them: chunks add copies,
# launches and messages, but a sum may be computed with a matmul. In the benchmarks none shortened either.
_LESS_BUSY = 0.02
# A slower program is not rewritten further. In the benchmarks a rewrite of a program that was slower by more never was
# the fastest program.
_BEAM = 0.1


@dataclass(frozen=True, slots=True)
class ProgramCandidate(Generic[Q]):
    """A program on its way through the passes.

    written: the program before the ordering passes. rewrites: the passes that may have changed values of the program.
    unfit: why it got no further.
    """

    program: Q
    written: Q
    rewrites: tuple[Pass[Q], ...] = ()
    reports: Mapping[str, tuple[Report, ...]] = field(default_factory=dict)
    unfit: NoOrderError | None = None

    @property
    def name(self) -> str:
        return named(self.rewrites)

    def after(self, next_pass: Pass[Q], costs: Any) -> ProgramCandidate[Q]:
        """The candidate after a pass. Raises VerifyError for what the pass broke."""
        if self.unfit is not None:
            return self
        try:
            program, reports = next_pass.run(self.program, costs)
        except NoOrderError as error:
            return replace(self, unfit=error)
        program.verify(self.program)
        reports_by_pass = {**self.reports, next_pass.name: reports}
        if next_pass.stage == "ordered":
            return replace(self, program=program, reports=reports_by_pass)
        is_same = next_pass.numerics == "exact" or _is_same(program.graphs, self.program.graphs)
        rewrites = self.rewrites if is_same else (*self.rewrites, next_pass)
        return replace(self, program=program, written=program, rewrites=rewrites, reports=reports_by_pass)


def _is_same(graphs: Sequence[fx.Graph], before: Sequence[fx.Graph]) -> bool:
    return all(new is old for new, old in zip(graphs, before, strict=True))


@dataclass(frozen=True)
class Branch(Generic[Q]):
    """A candidate before the next compared pass, and the same after all later passes that are not compared."""

    open: ProgramCandidate[Q]
    finished: ProgramCandidate[Q]
    costs: Any

    @property
    def name(self) -> str:
        return self.finished.name

    @cached_property
    def simulated(self) -> StepSeconds:
        """Simulated seconds of a step; infinite if it does not run under its cap."""
        return self.finished.program.seconds(self.costs) if self.finished.unfit is None else StepSeconds(math.inf)

    @property
    def seconds(self) -> float:
        return self.simulated.total


@dataclass(kw_only=True)
class ProgramSearch(Search[Branch[Q]], Generic[Q]):
    """Explores which compared passes to take, one pass after the other.

    The alternatives of a compared pass (rows in 2 chunks, in 4, ...) are tried in order until an alternative is no
    faster than the program before it. The fastest of them is rewritten further, as is the program without the pass,
    unless it is slower than the fastest of all by more than `_BEAM`. Each program that is tried goes through all later
    passes that are not compared before its simulated seconds count. Processes that decide together agree on each
    decision, so they all try the same programs.
    """

    passes: Sequence[Pass[Q]]
    costs: Any
    progress: Progress

    def run(self, program: Q) -> None:
        """Fill `tried`, the program as it is first, and `untried`."""
        compared = [i for i, each_pass in enumerate(self.passes) if each_pass.is_compared]
        ends = [*compared, len(self.passes)]
        branches = [self._branch(ProgramCandidate(program, program), 0, ends[0])]
        self.tried += branches
        hopeless = self._hopeless(branches[0], [self.passes[i] for i in compared])
        for at, end in zip(compared, ends[1:], strict=True):
            if len(hopeless) == len(compared):
                return
            promising = branches if len(branches) == 1 else [each for each in branches if self._is_promising(each)]
            alternatives = () if self.passes[at].name in hopeless else self.passes[at].alternatives
            branches = [each for branch in promising for each in self._behind(branch, at, end, alternatives)]

    def _hopeless(self, branch: Branch[Q], compared: Sequence[Pass[Q]]) -> set[str]:
        """Names of the passes by which no rewrite can gain `least_gain`: what they do not shorten takes longer by
        itself. `untried` says so."""
        hopeless = set[str]()
        if self.least_gain <= 0 or branch.finished.unfit is not None or not compared:
            return hopeless
        limit = branch.seconds * (1 - self.least_gain)
        least = {"compute": branch.simulated.compute, "communication": branch.simulated.communication}
        for each in compared:  # what one has shortened may help those after it
            least["compute"] *= not each.saves_compute
            least["communication"] *= not each.saves_communication
            what, seconds = max(least.items(), key=lambda item: item[1])
            if self._agreed(branch, seconds * (1 - _LESS_BUSY) >= limit):
                hopeless.add(each.name)
                reason = f"cannot gain {self.least_gain:.0%}: {what} alone takes {seconds * 1e3:,.3f} ms"
                self.untried.append(Candidate(each.label, reason=reason))
        return hopeless

    def _branch(self, candidate: ProgramCandidate[Q], at: int, end: int) -> Branch[Q]:
        """The candidate after the passes from `at` to `end`, none of which is compared, and finished."""
        candidate = finished = self._through(candidate, self.passes[at:end])
        return Branch(candidate, self._through(finished, self.passes[end:]), self.costs)

    def _through(self, candidate: ProgramCandidate[Q], passes: Sequence[Pass[Q]]) -> ProgramCandidate[Q]:
        for each_pass in passes:
            if not each_pass.is_compared:
                candidate = self._after(candidate, each_pass)
        return candidate

    def _after(self, candidate: ProgramCandidate[Q], next_pass: Pass[Q]) -> ProgramCandidate[Q]:
        self.progress(next_pass.name)
        return candidate.after(next_pass, self.costs)

    def _is_promising(self, branch: Branch[Q]) -> bool:
        limit = min(each.seconds for each in self.tried) * (1 + _BEAM)
        return self._agreed(branch, branch.finished.unfit is not None or branch.seconds <= limit)

    def _agreed(self, branch: Branch[Q], decision: bool) -> bool:
        return bool(branch.open.program.agreed(int(decision)))

    def _behind(self, branch: Branch[Q], at: int, end: int, alternatives: Sequence[Pass[Q]]) -> list[Branch[Q]]:
        """Try the alternatives of the compared pass at `at`. Returns what is rewritten further: the branch without the
        pass, then that with its fastest alternative."""
        compared, changed = self.passes[at], list[Branch[Q]]()
        if branch.open.unfit is not None:
            return [branch]
        for alternative in alternatives:
            if not self.has_time_for(named((*branch.open.rewrites, alternative))):
                continue
            candidate = self._after(branch.open, alternative)
            if candidate.program is branch.open.program and candidate.unfit is None:
                branch = self._with_reports(branch, compared.name, candidate.reports[compared.name])
                continue
            before = min(each.seconds for each in (branch, *changed))
            changed.append(self._branch(candidate, at + 1, end))
            if not self._agreed(branch, changed[-1].seconds < before or before == math.inf):
                break
        self.tried += changed
        if end == len(self.passes):
            return []  # no pass follows that is compared
        opened = self._through(branch.open, self.passes[at + 1 : end])
        without = Branch(opened, branch.finished, self.costs)
        return [without, *([min(changed, key=lambda each: each.seconds)] if changed else [])]

    def _with_reports(self, branch: Branch[Q], of: str, reports: tuple[Report, ...]) -> Branch[Q]:
        """The branch with the reports of a pass that did not change it."""
        opened, finished = (
            replace(each, reports={**each.reports, of: reports}) for each in (branch.open, branch.finished)
        )
        noted = Branch(opened, finished, self.costs)
        self.tried = [noted if each.finished is branch.finished else each for each in self.tried]
        return noted


_UNLIMITED = Budget()


def run_passes(
    program: Q,
    passes: Sequence[Pass[Q]],
    costs: Any,
    least_gain: float = 0.0,
    budget: Budget = _UNLIMITED,
    progress: Progress = lambda stage: None,
) -> tuple[ProgramCandidate[Q], tuple[Candidate, ...]]:
    """Run the passes, verified after each. Returns the program and, if there were several, the candidates that were
    compared.

    A pass that is taken by gain is kept only if the program after all passes simulates faster and stays under the
    cap: the fastest candidate wins, the first of equals; a rewrite has to be faster by the share `least_gain`. Raises
    NoOrderError if no candidate is under the cap.
    """
    search = ProgramSearch(passes=passes, costs=costs, progress=progress, least_gain=least_gain, budget=budget)
    search.run(program)
    chosen, rows = search.tried[0].finished, tuple[Candidate, ...]()
    if len(search.tried) > 1 or search.untried:
        at, rows, reason = search.fastest()
        chosen = search.tried[program.agreed(at)].finished
        rejected: dict[str, tuple[Report, ...]] = {}
        for branch in search.tried:
            for name, reports in branch.finished.reports.items():
                rejected.setdefault(name, tuple(report.left(reason) for report in reports))
        chosen = replace(chosen, reports={**rejected, **chosen.reports})
    if chosen.unfit is not None:
        raise chosen.unfit
    return chosen, (*rows, *search.untried)
