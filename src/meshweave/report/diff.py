"""Differences between two simulated steps: which communications appear, vanish or change, and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from meshweave.cost.simulate.result import Simulation, Span
from meshweave.errors import MeshweaveError
from meshweave.ir.graph import fold_numbers
from meshweave.report.spans import COMPUTE_CLASSES, Sum, class_of, class_sums, sums_by
from meshweave.report.tables import bytes_text, milliseconds_text, plain_table

_SHOWN_SECONDS = 5e-7  # smaller changes do not count: milliseconds are shown with three decimals
_PHASES = ("forward", "loss", "backward", "update")


@dataclass(frozen=True, slots=True)
class DiffRow:
    """Communications of a phase, op, group, layouts and module (`*` for layer numbers), in step `a` and in step `b`.
    `kind` is `same`, `changed`, `appears`, `vanishes` or `moved`: then `a` has another group, layout or op, which
    `change` names. `change` describes the difference in words."""

    phase: str
    op: str
    group: str
    layout: str
    module: str
    a: Sum
    b: Sum
    kind: str
    change: str = ""

    def as_dict(self) -> dict[str, Any]:
        own = asdict(self)
        sums = {which: own.pop(which) for which in ("a", "b")}
        return own | {f"{which}_{name}": value for which, total in sums.items() for name, value in total.items()}


@dataclass(frozen=True, slots=True)
class SplitRow:
    """Seconds of a phase and class in both steps, averaged over the roles. The rows of a split add up to the seconds of
    the steps. `part` is the class of a kernel, `exposed` with the op of a communication, or `idle`."""

    phase: str
    part: str
    a: float
    b: float

    @property
    def change(self) -> float:
        return self.b - self.a


_Key = tuple[str, str, str, str, str]


def _key(span: Span) -> _Key:
    return span.phase, span.op, span.group, span.layout, fold_numbers(span.module)


def diff_rows(a: Simulation, b: Simulation) -> tuple[DiffRow, ...]:
    """A row per phase, op, group, layouts and module of the communications of both steps, those whose exposed seconds
    differ the most first, then by seconds, then in the order of the key.

    Communications that are only in the first step are matched with those only in the second in the same phase and
    module, for the same value: they moved.
    """
    sums_a, sums_b = _sums(a), _sums(b)
    only_in_a = {key: total for key, total in sums_a.items() if key not in sums_b}
    rows = []
    for key, total in sums_b.items():
        if key in sums_a:
            kind, change = _change_text(sums_a[key], total)
            rows.append(DiffRow(*key, sums_a[key], total, kind, change))
            continue
        before = _moved_from(key, total, only_in_a)
        if before is None:
            text = f"{_times(total.count)} appear: {bytes_text(total.bytes)}, {_sum_text(total)}"
            rows.append(DiffRow(*key, Sum(), total, "appears", text))
        else:
            rows.append(DiffRow(*key, sums_a[before], total, "moved", _moved_text(before, key, sums_a[before], total)))
            del only_in_a[before]
    for key, total in only_in_a.items():
        text = f"{_times(total.count)} vanish: {bytes_text(total.bytes)}, {_sum_text(total)}"
        rows.append(DiffRow(*key, total, Sum(), "vanishes", text))
    return tuple(sorted(rows, key=_weight))


def _weight(row: DiffRow) -> tuple[Any, ...]:
    exposed = abs(row.b.exposed_seconds - row.a.exposed_seconds)
    seconds = abs(row.b.seconds - row.a.seconds)
    return -exposed, -seconds, row.phase, row.op, row.group, row.layout, row.module


def _sums(simulation: Simulation) -> dict[_Key, Sum]:
    return sums_by((span for span in simulation.spans if span.kind != "compute"), _key)


def _moved_from(key: _Key, total: Sum, candidates: Mapping[_Key, Sum]) -> _Key | None:
    """The candidate that became this communication: same phase, module and value, preferably the same op and number."""
    phase, op, _, layout, module = key
    value = layout.partition(": ")[0]
    near = [k for k in candidates if (k[0], k[4], k[3].partition(": ")[0]) == (phase, module, value)]
    return min(near, key=lambda k: (k[1] != op, abs(candidates[k].count - total.count), k), default=None)


def _times(count: int) -> str:
    return f"{count:,}"


def _sum_text(total: Sum) -> str:
    return f"{milliseconds_text(total.seconds)}, {milliseconds_text(total.exposed_seconds)} of them exposed"


def _moved_text(before: _Key, after: _Key, a: Sum, b: Sum) -> str:
    """Which of op, group and layouts differ, and the effect."""
    names = (("", 1), ("over ", 2), ("", 3))
    parts = [f"{word}{after[at]} instead of {before[at] or 'none'}" for word, at in names if before[at] != after[at]]
    _, change = _change_text(a, b)
    return "; ".join([*parts, *([change] if change else [])])


def _change_text(a: Sum, b: Sum) -> tuple[str, str]:
    """`same` or `changed`, and how number, bytes, seconds and exposed seconds differ."""
    parts = []
    if a.count != b.count:
        parts.append(f"{b.count:,} instead of {a.count:,}")
    if round(a.bytes) != round(b.bytes):
        parts.append(f"{bytes_text(b.bytes)} instead of {bytes_text(a.bytes)}")
    parts += _longer(a.seconds, b.seconds, "longer", "shorter")
    parts += _longer(a.exposed_seconds, b.exposed_seconds, "more exposed", "less exposed")
    return ("changed" if parts else "same"), ", ".join(parts)


def _longer(a: float, b: float, more: str, less: str) -> list[str]:
    if abs(b - a) < _SHOWN_SECONDS:
        return []
    return [f"{milliseconds_text(abs(b - a))} {more if b > a else less}"]


def step_split(a: Simulation, b: Simulation) -> tuple[SplitRow, ...]:
    """Where the time of two steps goes. A role computes, exposes a communication or is idle: kernels per phase and
    class, exposed communications per phase and op, and the rest is idle. Sums over roles are divided by their
    number."""
    parts_a, parts_b = _parts(a), _parts(b)
    keys = sorted({*parts_a, *parts_b}, key=_order)
    rows = [
        SplitRow(phase, part, parts_a.get((phase, part), 0.0), parts_b.get((phase, part), 0.0)) for phase, part in keys
    ]
    return tuple(row for row in rows if row.a or row.b)


def _order(key: tuple[str, str]) -> tuple[Any, ...]:
    phase, part = key
    at = COMPUTE_CLASSES.index(part) if part in COMPUTE_CLASSES else len(COMPUTE_CLASSES)
    return part == "idle", _PHASES.index(phase) if phase in _PHASES else len(_PHASES), phase, at, part


def _parts(simulation: Simulation) -> dict[tuple[str, str], float]:
    num_roles = len(simulation.roles)
    if not num_roles:
        raise MeshweaveError("a step without roles cannot be compared", where=simulation.title)
    parts: dict[tuple[str, str], float] = {}
    for span in simulation.spans:
        is_kernel = span.kind == "compute"
        part = class_of(span) if is_kernel else f"exposed {span.op}"
        seconds = span.seconds if is_kernel else span.exposed_seconds
        parts[span.phase, part] = parts.get((span.phase, part), 0.0) + seconds / num_roles
    parts["", "idle"] = simulation.seconds - sum(parts.values())
    return parts


@dataclass(frozen=True, slots=True)
class ClassError:
    """A class of tasks in a modelled and a measured step: their number, total seconds."""

    name: str
    num_modelled: int
    num_measured: int
    modelled: float
    measured: float


def class_errors(modelled: Simulation, measured: Simulation) -> tuple[ClassError, ...]:
    """Per class of tasks the error of the model: kernels first, then communications by name; last the exposed time of
    the role that has the most, and the step. The host's part of a measured step is not modelled."""
    ours, theirs = class_sums(modelled.spans), class_sums(measured.spans)
    rows = []
    for name in class_sums([*modelled.spans, *measured.spans]):
        a, b = ours.get(name, Sum()), theirs.get(name, Sum())
        rows.append(ClassError(name, a.count, b.count, a.seconds, b.seconds))
    exposed = ClassError("exposed", 0, 0, modelled.exposed_seconds, measured.exposed_seconds)
    return (*rows, exposed, ClassError("step", 1, 1, modelled.seconds, measured.seconds))


def diff_table(a: Simulation, b: Simulation, *, num_rows: int = 30) -> tuple[Table, Table]:
    """Where the time of the steps goes, and the communications that differ, for the terminal."""
    split = plain_table("phase", "what", ">A ms", ">B ms", ">change ms")
    for row in step_split(a, b):
        split.add_row(
            row.phase, row.part, *(f"{value * 1e3:.3f}" for value in (row.a, row.b)), f"{row.change * 1e3:+.3f}"
        )
    split.add_section()
    total = SplitRow("step", "", a.seconds, b.seconds)
    split.add_row("step", "", f"{a.seconds * 1e3:.3f}", f"{b.seconds * 1e3:.3f}", f"{total.change * 1e3:+.3f}")
    return split, _changes_table([row for row in diff_rows(a, b) if row.kind != "same"], num_rows)


def _changes_table(rows: Sequence[DiffRow], num_rows: int) -> Table:
    table = plain_table("", "phase", "op", "over", ">A", ">B", "~module", "~what changes")
    for row in rows[:num_rows]:
        counts = (str(row.a.count), str(row.b.count))
        texts = (row.kind, row.phase, row.op, row.group, *counts, row.module, row.change)
        table.add_row(*(escape(text) for text in texts))
    if len(rows) > num_rows:
        table.add_row("", "", "", "", "", "", "", f"and {len(rows) - num_rows:,} more")
    return table
