"""explain: why each communication of a MODEL's step moves, and why it is exposed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.markup import escape
from torch import fx

from meshweave import whatif
from meshweave.cli.costs import parse_machine
from meshweave.cli.machine import MachineOptions, compiled_for
from meshweave.cli.scheduled import is_named, modules_of, parts_of
from meshweave.cli.screen import Screen
from meshweave.errors import MeshweaveError
from meshweave.program import Program
from meshweave.report.tables import bytes_text
from meshweave.simulate.result import Simulation, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions(MachineOptions):
    mesh: Annotated[str, typer.Option("--mesh", help="named axes")] = ""
    plan: Annotated[str, typer.Option("--plan", help="as for plan")] = ""
    why: Annotated[str, typer.Option("--why", help="a node, module or source line, or part of one")] = ""


def explain(screen: Screen, options: ExplainOptions) -> int:
    """Explain for every communication why it moves and why it is exposed; with --why only for those that match a
    text."""
    machine = parse_machine(options.profile, options.scale)
    program = compiled_for(screen, options.job(options.mesh, options.plan), machine)
    return _explain(screen, program, whatif.simulate(program, machine, fusion=options.fusion), options.why)


def _is_meant(span: Span, parts: Sequence[fx.Node], why: str) -> bool:
    """Whether --why matches a communication, or a part of a merged communication."""
    return why in span.name or why in span.module or why in span.line or why == span.op or is_named(parts, why)


def _explain(screen: Screen, program: Program, simulation: Simulation, why: str) -> int:
    spans = [s for s in simulation.spans if s.kind != "compute"]
    parts = parts_of(program)
    chosen = [s for s in spans if _is_meant(s, parts.get(s.name, ()), why)]
    if not chosen:
        raise MeshweaveError(
            "no communication matches",
            where="--why",
            got=why,
            expected=f"part of a name, module or source line, such as {', '.join(s.name for s in spans[:3])}",
        )
    rows: list[dict[str, Any]] = []
    for span in sorted(chosen, key=lambda s: -s.exposed_seconds) if not why else chosen:
        merged = {"merged": modules_of(parts[span.name])} if span.name in parts else {}
        rows.append(
            {"name": span.name, "op": span.op, "group": span.group, "phase": span.phase, "module": span.module}
            | {"line": span.line, "layout": span.layout, "start": span.start, "seconds": span.seconds}
            | {"bytes": span.bytes, "exposed_seconds": span.exposed_seconds}
            | {"reasons": [{"kind": r.kind, "seconds": r.seconds, "text": r.text} for r in span.reasons]}
            | merged
        )
    for row in rows if why else rows[:20]:
        screen.say(
            f"[bold]{escape(row['name'])}[/] {row['op']} over {row['group']} in {row['phase']} {escape(row['module'])} "
            f"{escape(row['line'])}\n  moves {escape(row['layout'])}: {bytes_text(row['bytes'])} received in "
            f"{row['seconds'] * 1e3:.3f} ms from {row['start'] * 1e3:.3f} ms"
        )
        if "merged" in row:
            screen.say(f"  merged from {escape(', '.join(row['merged']))}")
        if not row["exposed_seconds"]:
            screen.say("  hidden under compute")
        for reason in row["reasons"]:
            screen.say(f"  exposed {reason['seconds'] * 1e3:.3f} ms ({reason['kind']}): {escape(reason['text'])}")
    hidden = sum(1 for s in spans if not s.exposed_seconds)
    screen.say(
        f"{len(spans)} communications, {hidden} hidden; exposed {simulation.exposed_seconds * 1e3:.3f} of "
        f"{simulation.seconds * 1e3:.3f} ms, modelled by {simulation.profile} {simulation.profile_version}"
    )
    screen.result(True, mesh=simulation.mesh, communications=rows, **simulation.as_dict())
    return 0
