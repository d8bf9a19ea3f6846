"""What the scheduler did to a program, for people: seconds before and after, and which communications became one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import fx

from meshweave.compile import Program
from meshweave.ir.graph import origin_of
from meshweave.overlap.unmerge import merged_results
from meshweave.report.tables import bytes_text
from meshweave.simulate.result import Simulation


def gain_row(program: Program, before: Simulation, after: Simulation) -> dict[str, Any]:
    """The simulated step before and after, and what the scheduler says of each role."""
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
    }


def gain_lines(program: Program, before: Simulation, after: Simulation) -> Iterable[str]:
    """`overlap: 71.7 -> 40.4 ms`, and a line per role."""
    yield (
        f"overlap: step {before.seconds * 1e3:,.3f} -> {after.seconds * 1e3:,.3f} ms "
        f"({before.seconds / after.seconds:.2f}x), exposed {before.exposed_seconds * 1e3:,.3f} -> "
        f"{after.exposed_seconds * 1e3:,.3f} ms"
    )
    for i, report in enumerate(program.overlap):
        taken = [m for m in report.merges if m.is_taken]
        num_merged = sum(len(m.names) for m in taken)
        yield (
            f"  role {i}: no order is below {report.bound_seconds * 1e3:,.3f} ms; holds "
            f"{bytes_text(report.peak_before)} -> {bytes_text(report.peak_bytes)} at most, cap "
            f"{bytes_text(report.cap_bytes)}; {num_merged} communications merged into {len(taken)}"
        )


def parts_of(program: Program) -> Mapping[str, tuple[fx.Node, ...]]:
    """By name of a merged communication, over all roles: the nodes that stand for its results."""
    return {node.name: results for role in program.roles for node, results in merged_results(role).items()}


def is_named(nodes: Iterable[fx.Node], text: str) -> bool:
    """Whether a text is in the module or the source line of one of the nodes."""
    return any(text in origin_of(n).module or text in origin_of(n).source for n in nodes)


def modules_of(nodes: Iterable[fx.Node]) -> list[str]:
    return list(dict.fromkeys(origin_of(n).module for n in nodes))
