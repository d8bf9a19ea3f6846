"""The batch split on the graphs of benchmarks/overlap.py: forward and backward of a step, as Inductor schedules them,
as we do, and as we do when the rows of the batch run in chunks (`meshweave.optimize.batch_split.split_batch`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from overlap_graphs import Direction, Groups, Shape, trace
from overlap_judge import Costs, Verdict
from overlap_passes import Result, run_ours
from torch import fx

from meshweave.optimize.batch_split import split_batch

CHUNKS = (2, 4)
DEMAND = 1.2  # seconds of Inductor's best over ours
DEMANDED = Shape(8, 4)
BOTH: tuple[Direction, Direction] = ("forward", "backward")


@dataclass(frozen=True)
class SplitRow:
    """A way to run a step. `is_split` says of forward and of backward whether it runs in chunks; `seconds` are those of
    the passes, of processor time."""

    name: str
    forward: Verdict
    backward: Verdict
    is_split: tuple[bool, bool]
    split_seconds: float = 0.0
    order_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward.seconds + self.backward.seconds


@dataclass(frozen=True)
class SplitOutcome:
    """The rows of one shape: Inductor's best of each graph, ours of each, then ours in chunks."""

    name: str
    shape: Shape
    rows: tuple[SplitRow, ...]

    @property
    def best(self) -> SplitRow:
        return min(self.rows[2:], key=lambda row: row.seconds)


def run_split(
    name: str,
    shape: Shape,
    groups: Groups,
    costs: Costs,
    modules: Mapping[Direction, fx.GraphModule],
    known: Mapping[Direction, tuple[Result, Result]],
    show: Callable[[str], None],
) -> SplitOutcome:
    """`known`: Inductor's best and ours of both graphs. No cap but the one that our pass sets itself: the peaks stand
    in the table."""
    theirs, ours = ({d: known[d][i] for d in BOTH} for i in (0, 1))
    rows = [_row("Inductor's best", theirs), _row("meshweave, not split", ours)]
    for row in _ways(shape, groups, costs, modules, ours):
        rows.append(row)
        show(f"  {row.name:34} {row.seconds * 1e3:8.2f} ms, Inductor's over it {rows[0].seconds / row.seconds:.3f}")
    return SplitOutcome(name, shape, tuple(rows))


def _row(name: str, results: Mapping[Direction, Result]) -> SplitRow:
    taken = sum(results[d].taken.cpu for d in BOTH)
    return SplitRow(name, results["forward"].verdict, results["backward"].verdict, (False, False), 0.0, taken)


def _ways(
    shape: Shape,
    groups: Groups,
    costs: Costs,
    modules: Mapping[Direction, fx.GraphModule],
    ours: Mapping[Direction, Result],
) -> Iterator[SplitRow]:
    for n in CHUNKS:
        begun = time.process_time()
        split = {d: split_batch(modules[d], n)[0] for d in BOTH}
        seconds = time.process_time() - begun
        made = {d: run_ours(split[d], costs, groups.ranks, None, 1)[0] for d in BOTH}
        taken = {d: made[d] if made[d].verdict.seconds < ours[d].verdict.seconds else ours[d] for d in BOTH}
        yield _split_row(f"each graph by itself, {n} chunks", taken, made, seconds)
    for n in CHUNKS:
        begun = time.process_time()
        parts = trace(shape, groups, n)
        seconds = time.process_time() - begun
        made = {d: run_ours(parts[d], costs, groups.ranks, None, 1)[0] for d in BOTH}
        yield _split_row(f"before partitioning, {n} chunks", made, made, seconds)


def _split_row(
    name: str, taken: Mapping[Direction, Result], made: Mapping[Direction, Result], seconds: float
) -> SplitRow:
    forward, backward = (taken[d] is made[d] for d in BOTH)
    order = sum(made[d].taken.cpu for d in BOTH)
    return SplitRow(name, taken["forward"].verdict, taken["backward"].verdict, (forward, backward), seconds, order)


def split_table(outcomes: Sequence[SplitOutcome]) -> str:
    titles = (
        "graph | way | forward ms | backward ms | both ms | Inductor's over it | demand | met | exposed ms | "
        "peak GB forward | backward | split s (CPU) | order s (CPU)"
    )
    rows = [f"| {titles} |", "|" + "---|" * (titles.count("|") + 1)]
    for outcome in outcomes:
        theirs = outcome.rows[0].seconds
        for row in outcome.rows:
            ratio = theirs / row.seconds
            is_due = outcome.shape == DEMANDED and row is outcome.best
            parts = zip((row.forward, row.backward), row.is_split, strict=True)
            times = (
                f"{v.seconds * 1e3:.1f}{'' if is_split or not any(row.is_split) else ' (whole)'}"
                for v, is_split in parts
            )
            cells = (
                outcome.name,
                row.name,
                *times,
                f"{row.seconds * 1e3:.1f}",
                f"{ratio:.3f}",
                f">= {DEMAND:.2f}" if is_due else "",
                ("yes" if ratio >= DEMAND else "**no**") if is_due else "",
                f"{(row.forward.exposed + row.backward.exposed) * 1e3:.1f}",
                f"{row.forward.peak_bytes / 1e9:.2f}",
                f"{row.backward.peak_bytes / 1e9:.2f}",
                f"{row.split_seconds:.1f}" if any(row.is_split) else "",
                f"{row.order_seconds:.1f}",
            )
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)
