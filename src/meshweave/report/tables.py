"""Tables for the terminal: the moves of a plan, and the result of a check."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.table import Table

from meshweave.check.completeness import Completeness
from meshweave.check.deadlock import DeadlockFreedom
from meshweave.check.numerics import NumericsReport, TensorError
from meshweave.ir.graph import fold_numbers
from meshweave.report.moves import MoveRow

_LEAST_FOLDED = 7  # width of a folded column


@dataclass(frozen=True, slots=True)
class FoldedRow:
    """Moves that differ only in the number of their layer, and how often a step makes them. `name` is the module or
    parameter, `*` for the number."""

    row: MoveRow
    name: str
    count: int


def fold(rows: Iterable[MoveRow], *, twins: bool = True) -> list[FoldedRow]:
    """Rows in the order of their first appearance; with `twins`, those of repeated layers combined."""
    counts: dict[Any, int] = {}
    first: dict[Any, MoveRow] = {}
    for i, row in enumerate(rows):
        module = fold_numbers(row.module)
        key = replace(row, name="", seconds=0.0, why="", module=module) if twins else i
        first.setdefault(key, row)
        counts[key] = counts.get(key, 0) + row.times
    return [
        FoldedRow(row, fold_numbers(row.module) if twins else row.module, counts[key]) for key, row in first.items()
    ]


def moves_table(rows: Sequence[MoveRow], *, show_all: bool = False) -> Table:
    """A line per move: bytes are those that a device receives. Twins share a line unless `show_all`."""
    table = plain_table("phase", "kind", "~from", "~to", "~value", ">bytes", ">times", "~of", "~line")
    phase = ""
    for item in fold(rows, twins=not show_all):
        row = item.row
        if phase and row.phase != phase:
            table.add_section()
        shown = (row.phase if row.phase != phase else "", row.kind, row.source, row.target, row.value)
        table.add_row(
            *shown, bytes_text(row.bytes_received), str(item.count), item.name or row.name, short_line(row.line)
        )
        phase = row.phase
    return table


def short_line(line: str) -> str:
    """`models/llama/modeling_llama.py:306 in forward` as `modeling_llama.py:306`."""
    return line.partition(" in ")[0].rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class Total:
    """All moves of a kind in a phase of a step."""

    phase: str
    kind: str
    count: int
    bytes_received: int


def totals(rows: Iterable[MoveRow]) -> list[Total]:
    """A total per phase and kind, in the order of their first appearance."""
    by_kind: dict[tuple[str, str], Total] = {}
    for row in rows:
        previous = by_kind.get((row.phase, row.kind), Total(row.phase, row.kind, 0, 0))
        count, received = previous.count + row.times, previous.bytes_received + row.bytes_received * row.times
        by_kind[row.phase, row.kind] = Total(row.phase, row.kind, count, received)
    return list(by_kind.values())


def totals_table(rows: Sequence[MoveRow]) -> Table:
    """Number and bytes of the moves of a step, per kind and phase and in total."""
    table = plain_table("phase", "kind", ">moves", ">bytes per device")
    sums = totals(rows)
    for total in sums:
        table.add_row(total.phase, total.kind, str(total.count), bytes_text(total.bytes_received))
    table.add_section()
    table.add_row("all", "", str(sum(s.count for s in sums)), bytes_text(sum(s.bytes_received for s in sums)))
    return table


def proof_text(complete: Completeness, deadlock: DeadlockFreedom) -> str:
    """What was proven about the rank graphs, in two lines."""
    roles = "all devices" if complete.num_roles == 1 else f"{complete.num_roles} roles"
    return (
        f"[green]complete[/]: {complete.num_values:,} values on {complete.num_devices} devices ({roles}) have every "
        f"contribution; {complete.num_steps} steps of moves replayed, {complete.num_twins} more are equal to "
        f"these\n[green]free of deadlock[/]: {deadlock.num_communications:,} communications in a consistent order"
    )


def numerics_table(report: NumericsReport) -> Table:
    """For each run and kind of tensor the worst tensor, with its bound."""
    table = plain_table("run", "against", "kind", ">tensors", ">worst error", ">bound", "~worst tensor", "~")
    groups: dict[tuple[str, str, str], list[TensorError]] = {}
    for error in report.errors:
        groups.setdefault((error.run, error.reference, error.kind), []).append(error)
    last = ""
    for (run, reference, kind), errors in sorted(groups.items(), key=lambda item: (item[0][0] != "mesh", *item[0])):
        if last and run != last:
            table.add_section()
        names = (run, reference) if run != last else ("", "")
        worst, last = errors[0], run
        table.add_row(*names, kind, str(len(errors)), _error(worst), f"{worst.bound:.0e}", worst.name, _mark(worst))
    return table


def _error(error: TensorError) -> str:
    return error.problem or f"{error.error:.2e}"


def _mark(error: TensorError) -> str:
    if not error.ok:
        return "[bold red]FAIL[/]"
    return "[green]ok[/]" if error.rounding is None else f"ok: its rounding is {error.rounding:.1e}"


def failures_table(failed: Sequence[TensorError]) -> Table:
    """The tensors that differ, worst first, with the element that differs the most."""
    table = plain_table("~tensor", "kind", "run", ">error", "~at", ">got", ">expected")
    for e in failed:
        at = str(list(e.index)) if e.index else ""
        table.add_row(
            e.name, e.kind, f"{e.run} against {e.reference}", _error(e), at, f"{e.got:.9g}", f"{e.expected:.9g}"
        )
    return table


def bytes_text(num_bytes: float) -> str:
    """Bytes with a unit: 512 B, 16.0 KiB, 2.3 GiB."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def milliseconds_text(seconds: float) -> str:
    """Milliseconds to the microsecond."""
    return f"{seconds * 1e3:,.3f} ms"


def plain_table(*columns: str) -> Table:
    """A plain table; a column that begins with > is aligned to the right, a column with ~ is folded on a narrow
    terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        can_fold = column.startswith("~")
        name = column.lstrip(">~")
        least = _LEAST_FOLDED if can_fold else None
        table.add_column(name, justify=justify, no_wrap=not can_fold, overflow="fold", min_width=least)
    return table
