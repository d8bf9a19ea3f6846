"""Prints what passes did to a program: seconds before and after, which communications were merged or decomposed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from meshweave.buckets.unmerge import merged_results
from meshweave.ir.graph import origin_of
from meshweave.passes import Overlap
from meshweave.program import Program
from meshweave.report.tables import bytes_text
from meshweave.simulate.result import Simulation


def gain_row(program: Program, before: Simulation, after: Simulation) -> dict[str, Any]:
    """The simulated step before and after, and the passes' reports of each role."""
    return {
        "seconds_before": before.seconds,
        "seconds": after.seconds,
        "exposed_before": before.exposed_seconds,
        "exposed_seconds": after.exposed_seconds,
        "roles": [
            {"seconds_before": r.seconds_before, "seconds": r.seconds, "bound_seconds": r.bound_seconds}
            | {"peak_before": r.peak_before, "peak_bytes": r.peak_bytes, "cap_bytes": r.cap_bytes}
            | {"num_merged": sum(len(m.names) for m in r.merges if m.is_taken), "notes": list(r.notes)}
            for r in program.overlap
        ],
        "variants": [{"name": v.name, "seconds": v.seconds, "reason": v.reason} for v in program.optimized.variants],
        "kept": [
            {"num_kept": kept.num_kept, "num_repeated": kept.num_repeated, "kept_bytes": kept.kept_bytes}
            for kept in program.optimized.keeps
        ],
        "taken": program.optimized.name,
        "taken_apart": [
            {"name": row.name, "op": row.op, "group": row.group, "way": row.scheme, "num_steps": row.num_steps}
            | {"is_taken": row.is_taken, "reason": row.reason, "numerics": row.numerics}
            for report in program.optimized.rings
            for row in report.rows
        ],
    }


def gain_lines(program: Program, before: Simulation, after: Simulation) -> Iterable[str]:
    """`overlap: 71.7 -> 40.4 ms`, and a line per role and pass."""
    passes = "overlap" if program.overlap else "chunks"
    yield (
        f"{passes}: step {before.seconds * 1e3:,.3f} -> {after.seconds * 1e3:,.3f} ms "
        f"({before.seconds / after.seconds:.2f}x), exposed {before.exposed_seconds * 1e3:,.3f} -> "
        f"{after.exposed_seconds * 1e3:,.3f} ms"
    )
    if program.optimized.variants:
        yield f"  taken: {program.optimized.name}; of {'; '.join(map(str, program.optimized.variants))}"
    for name, reports in program.optimized.reports.items():
        if name != Overlap.name:
            yield from (f"  role {i}, {name}: {str(report).splitlines()[0]}" for i, report in enumerate(reports))
    for i, report in enumerate(program.overlap):
        merges_taken = [m for m in report.merges if m.is_taken]
        num_merged = sum(len(m.names) for m in merges_taken)
        yield (
            f"  role {i}: no order is below {report.bound_seconds * 1e3:,.3f} ms; peak memory "
            f"{bytes_text(report.peak_before)} -> {bytes_text(report.peak_bytes)}, cap "
            f"{bytes_text(report.cap_bytes)}; {num_merged} communications merged into {len(merges_taken)}"
        )
        yield from (f"    {note}" for note in report.notes)


def parts_of(program: Program) -> Mapping[str, tuple[fx.Node, ...]]:
    """For each merged communication, over all roles: the nodes that it consists of."""
    return {node.name: results for role in program.roles for node, results in merged_results(role).items()}


def is_named(nodes: Iterable[fx.Node], text: str) -> bool:
    """Whether the module or the source line of any of the nodes contains a text."""
    return any(text in origin_of(n).module or text in origin_of(n).source for n in nodes)


def modules_of(nodes: Iterable[fx.Node]) -> list[str]:
    return list(dict.fromkeys(origin_of(n).module for n in nodes))
