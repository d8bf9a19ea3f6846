"""From a problem with costs to an order in the graph: search, choice, report, rewrite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

from meshweave.cost.simulate.clock import Slowdown
from meshweave.errors import MeshweaveError
from meshweave.optimize.overlap.bounds import bound_of
from meshweave.optimize.overlap.choose import OrderChoice, choose
from meshweave.optimize.overlap.explain import collective_rows, exposed_of, merge_rows
from meshweave.optimize.overlap.merge import Merger
from meshweave.optimize.overlap.model import Order, Problem
from meshweave.optimize.overlap.play import SCENARIOS, live_at_peak, peak_of, play, seconds_of
from meshweave.optimize.overlap.read import Reading
from meshweave.optimize.overlap.report import INPUT, CandidateRow, Deferred, OverlapReport
from meshweave.optimize.overlap.search import OrderCandidate, OrderSearch
from meshweave.optimize.overlap.waits import hoist_continuations, sunk_waits, with_waits
from meshweave.optimize.overlap.write_buckets import rewrite

_SLACK = 0.05  # how far above the input order's peak an order may go if the caller sets no cap
_SLACK_BYTES = 512 << 20
_SUNK = 5e-4  # with `choose._NEAR` 0.2%: what a looser cap may cost at most


class NoOrderError(MeshweaveError):
    """No order whose peak is under the cap was found."""


@dataclass(frozen=True, slots=True)
class OverlapOptions:
    """How the pass searches for an order.

    bucket: whether collectives may be merged. communication_factor: factor on all estimates of communication, if they
    are known to be off.
    choose: "regret" chooses, among orders within 0.15% of the fastest under the nominal costs, that with the least
    worst-case loss over `play.SCENARIOS`, or a slower one, by 1.25% at most, that loses far less with slower
    communication; "nominal" the fastest.
    orders: orders to compare with, as names of nodes: the result is never slower than any of them. They contain starts
    and kernels, and optionally waits; views are placed where they are needed.
    """

    bucket: bool = True
    communication_factor: float = 1.0
    choose: str = "regret"
    orders: tuple[tuple[str, ...], ...] = ()

    def check(self) -> None:
        if self.choose not in ("regret", "nominal"):
            raise MeshweaveError("unknown value of choose", got=repr(self.choose), expected="regret or nominal")
        if not (isfinite(self.communication_factor) and self.communication_factor > 0):
            raise MeshweaveError(
                "communication_factor is not a factor", got=f"{self.communication_factor}", expected="more than 0"
            )


def cap_of(before: int, memory_cap_bytes: int | None, ceiling: float | None) -> int:
    """The cap of the caller; without it a little above `before`, the peak of the input order, but no more than
    `ceiling` bytes if the input order fits under these."""
    if memory_cap_bytes is not None:
        return memory_cap_bytes
    cap = max(int(before * (1 + _SLACK)), before + _SLACK_BYTES)
    return cap if ceiling is None else max(before, min(cap, int(ceiling)))


def decide(
    merger: Merger,
    slowdown: Slowdown | None,
    memory_cap_bytes: int | None,
    options: OverlapOptions,
    orders: Sequence[tuple[str, Order]] = (),
    notes: tuple[str, ...] = (),
    ceiling: int | None = None,
) -> OverlapReport:
    """Search, choose and write the order into the graph; `orders` are the caller's, by name. Without a cap the default
    cap applies, but at most `ceiling` bytes if the input order needs no more. Raises MeshweaveError if nothing fits."""
    problem = merger.reading.problem
    before = peak_of(problem, problem.order)
    cap = cap_of(before, memory_cap_bytes, ceiling)
    search = OrderSearch(merger, cap, slowdown, options.bucket)
    choice = _search(search, [(INPUT, problem.order), *orders], options.choose)
    report = _report(choice, search, before, notes)
    rewrite(merger.reading, choice.chosen.merged, choice.chosen.order)
    return report


def _search(search: OrderSearch, orders: Sequence[tuple[str, Order]], rule: str) -> OrderChoice:
    """Raises NoOrderError where nothing fits."""
    candidates = search.run(orders)
    if not candidates:
        assert search.least is not None, "it is kept where nothing fits"
        raise _no_order(search.merger.reading, search.least, search.cap)
    names = {name for name, _ in orders}
    choice = choose(candidates, search.slowdown, rule, sum(c.name in names for c in candidates))
    chosen = _delay_waits(choice.chosen, search.slowdown, search.cap)
    judged = tuple(chosen if c is choice.chosen else c for c in choice.candidates)
    return OrderChoice(chosen, judged, choice.regret)


def _delay_waits(chosen: OrderCandidate, slowdown: Slowdown | None, cap: float) -> OrderCandidate:
    """The candidate with chains of kernels in one piece (`hoisted`) and its waits as late as memory allows
    (`sunk_waits`), as far as that changes its nominal time by no more than `_SUNK`: other caps chose among orders whose
    items were not moved."""
    problem = chosen.merged.problem
    for items in (hoist_continuations(problem, with_waits(problem, chosen.order)), chosen.order):
        order = tuple(sunk_waits(problem, items, slowdown))
        seconds, peak = seconds_of(problem, order, slowdown), peak_of(problem, order)
        if peak <= cap and (1 - _SUNK) * chosen.seconds[0] <= seconds <= chosen.seconds[0]:
            others = [scenario.seconds(problem, order, slowdown) for scenario in SCENARIOS[1:]]
            return replace(chosen, order=order, seconds=(seconds, *others), peak=peak)
    return chosen


def _report(choice: OrderChoice, search: OrderSearch, before: int, notes: tuple[str, ...]) -> OverlapReport:
    problem, chosen, slowdown = search.merger.reading.problem, choice.chosen, search.slowdown
    as_given = play(problem, problem.order, slowdown)
    return OverlapReport(
        seconds_before=as_given.seconds,
        seconds=chosen.seconds[0],
        exposed_before=exposed_of(as_given),
        exposed_seconds=exposed_of(play(chosen.merged.problem, chosen.order, slowdown)),
        bound_seconds=bound_of(problem),
        peak_before=before,
        peak_bytes=chosen.peak,
        cap_bytes=int(search.cap),
        regret=choice.regret,
        collectives=Deferred(lambda: collective_rows(search.merger, chosen, slowdown)),
        merges=Deferred(lambda: merge_rows(search, chosen)),
        candidates=tuple(
            CandidateRow(
                c.name,
                tuple((s.name, seconds) for s, seconds in zip(SCENARIOS, c.seconds, strict=True)),
                c.peak,
                c is chosen,
            )
            for c in choice.candidates
        ),
        notes=notes,
    )


def report_as_given(problem: Problem, slowdown: Slowdown | None, memory_cap_bytes: int | None) -> OverlapReport:
    """The report of a graph that stays in its order because the search failed."""
    as_given, peak = play(problem, problem.order, slowdown), peak_of(problem, problem.order)
    seconds, exposed = as_given.seconds, exposed_of(as_given)
    return OverlapReport(
        seconds_before=seconds,
        seconds=seconds,
        exposed_before=exposed,
        exposed_seconds=exposed,
        bound_seconds=0.0,
        peak_before=peak,
        peak_bytes=peak,
        cap_bytes=cap_of(peak, memory_cap_bytes, None),
        regret=0.0,
        notes=("the search failed, see the warning: it stays as it was",),
    )


def _no_order(reading: Reading, least: OrderCandidate, cap: float) -> NoOrderError:
    """The error if nothing fits: a peak under which an order can be found again, and the tensors alive then."""
    problem = least.merged.problem
    at, live = live_at_peak(problem, least.order)
    makers = {x.storage: node for node in reversed(list(reading.graph.nodes)) for x in reading.values.get(node, ())}
    largest = [(makers[s].name if s in makers else "a bucket", problem.sizes[s]) for s in live[:8] if problem.sizes[s]]
    x = least.order[at] if least.order else 0
    return NoOrderError(
        "no order was found whose peak is under the cap",
        where=f"at {problem.names[x if x >= 0 else ~x]}",
        got=f"{least.peak} bytes at least ({least.peak / 1e9:.3f} GB, {least.name}); cap {cap}",
        expected=f"memory_cap_bytes={least.peak} or more",
        hint="the largest tensors then: " + ", ".join(f"{name} {size / 1e6:.3f} MB" for name, size in largest),
    )
