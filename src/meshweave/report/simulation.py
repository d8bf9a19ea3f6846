"""A simulated step in the terminal: totals, time by class, the most exposed communications, memory at the peak."""

from __future__ import annotations

from functools import reduce

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from meshweave.cost.simulate.memory import bytes_by_kind
from meshweave.cost.simulate.result import Simulation, Span
from meshweave.ir.graph import fold_numbers
from meshweave.report.pipeline import pipeline_of
from meshweave.report.spans import COMPUTE_CLASSES, Sum, class_sums
from meshweave.report.tables import bytes_text, milliseconds_text, plain_table, short_line

_NUM_EXPOSED = 10  # communications listed
_NUM_GROUPS = 3  # groups of tensors listed of each kind that has at least this share of the peak
_LEAST_SHARE = 0.05


def simulation_table(simulation: Simulation) -> Group:
    """The totals of a simulated step, time by class, exposed communications with reason and line, memory."""
    picture = pipeline_of(simulation)
    parts: list[RenderableType] = [
        _totals(simulation),
        Text(f"{picture}\n" if picture is not None else ""),
        _classes(simulation),
        Text(),
        _exposed_table(simulation),
        Text(),
        _memory(simulation),
    ]
    if simulation.verdict:
        parts.append(Text(simulation.verdict, style="bold red"))
        parts += [Text(f"what would make it fit: {text}") for text in simulation.advice]
    parts += [Text(note, style="dim") for note in simulation.notes]
    return Group(*parts)


def _totals(simulation: Simulation) -> Table:
    table = plain_table(f"{simulation.source}: {simulation.profile} {simulation.profile_version}", ">")
    table.add_row("step", milliseconds_text(simulation.seconds))
    if simulation.tokens:
        table.add_row("tokens/s per device", f"{simulation.tokens_per_s_per_gpu:,.0f}")
    if simulation.mfu is not None:
        table.add_row(f"MFU ({simulation.mfu_dtype})", f"{simulation.mfu:.1%}")
    worst = max(simulation.roles, key=lambda role: role.exposed_seconds)
    which = f" of role {worst.index}" if len(simulation.roles) > 1 else ""
    for name, seconds in (
        ("compute", worst.compute_seconds),
        ("exposed", worst.exposed_seconds),
        ("idle", worst.idle_seconds),
    ):
        table.add_row(name + which, f"{milliseconds_text(seconds)} ({seconds / max(simulation.seconds, 1e-12):.1%})")
    room = f" of {bytes_text(simulation.memory_bytes)}" if simulation.memory_bytes else ""
    table.add_row("peak memory", bytes_text(simulation.peak_bytes) + room)
    table.add_row("reserved by the allocator", bytes_text(simulation.reserved_bytes))
    return table


def _classes(simulation: Simulation) -> Table:
    table = plain_table("class", ">tasks", ">time", ">exposed", ">bytes")
    for name, total in class_sums(simulation.spans).items():
        is_kernel = name in COMPUTE_CLASSES
        exposed = "" if is_kernel else milliseconds_text(total.exposed_seconds)
        table.add_row(
            name, f"{total.count:,}", milliseconds_text(total.seconds), exposed, bytes_text(total.bytes)
        )  # fmt: skip
    return table


def _exposed_table(simulation: Simulation) -> Table:
    """The most exposed communications, with those of repeated layers combined: their sum, and the main reason of the
    worst."""
    table = plain_table(">exposed", ">of", ">times", "op", "over", "phase", "~module", "~line", "~why")
    table.columns[-1].no_wrap = False
    twins: dict[tuple[str, ...], list[Span]] = {}
    for span in simulation.spans:
        if span.exposed_seconds > 0:
            key = (span.phase, span.op, span.group, span.layout, fold_numbers(span.module), span.line)
            twins.setdefault(key, []).append(span)
    sums = {names: reduce(Sum.plus, spans, Sum()) for names, spans in twins.items()}
    shown = sorted(twins.items(), key=lambda item: (-sums[item[0]].exposed_seconds, item[0]))
    for names, spans in shown[:_NUM_EXPOSED]:
        phase, op, group, _, module, line = names
        worst = max(spans, key=lambda s: (s.exposed_seconds, -s.index))
        reason = max(worst.reasons, key=lambda r: r.seconds, default=None)
        why = f"{reason.kind}: {reason.text}" if reason else ""
        total = sums[names]
        times = (milliseconds_text(total.exposed_seconds), milliseconds_text(total.seconds), f"{total.count:,}")
        cells = (op, group, phase, module, short_line(line), why)
        table.add_row(*times, *(escape(cell) for cell in cells))
    return table


def _memory(simulation: Simulation) -> Table:
    """The memory of the role that needs the most, at its peak: each kind, with its largest groups of tensors."""
    role = max(simulation.roles, key=lambda role: role.peak_bytes)
    table = plain_table(f"at the peak of role {role.index}", ">bytes", ">tensors", "~module", "~line")
    for kind, num_bytes in bytes_by_kind(role.at_peak).items():
        alike = [live for live in role.at_peak if live.kind == kind]
        table.add_row(f"[bold]{kind}[/]", bytes_text(num_bytes), f"{sum(live.count for live in alike):,}", "", "")
        for live in alike[:_NUM_GROUPS] if num_bytes > _LEAST_SHARE * role.peak_bytes else ():
            cells = (bytes_text(live.bytes), f"{live.count:,}", escape(live.module), escape(short_line(live.line)))
            table.add_row("", *cells)
    return table
