"""plan and explain: the moves of MODEL's step, without running it, and why they are exposed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from torch import fx

from meshweave import whatif
from meshweave.cli.command import option
from meshweave.cli.job import MachineOptions, MeshStepOptions, compiled_unrun, meshes_like
from meshweave.cli.screen import Screen, attributes_of
from meshweave.cost.simulate.result import Simulation, Span
from meshweave.errors import MeshweaveError
from meshweave.ir.graph import origin_of
from meshweave.optimize.overlap.unmerge import merged_results
from meshweave.program import Program
from meshweave.report import tables
from meshweave.report.moves import MoveRow, move_rows
from meshweave.report.tables import bytes_text


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(MeshStepOptions):
    show_all: bool = option(False, "show every repeated layer", flags=("--all",))


def plan(screen: Screen, job: PlanOptions) -> int:
    """Show every move of data in one step, without running it. A model of transformers takes no memory."""
    program = compiled_unrun(screen, job)
    rows: Sequence[MoveRow] = move_rows(program.placed, program.mesh, program.expanded, program.options.accumulate)
    screen.out.print(tables.moves_table(rows, show_all=job.show_all))
    screen.out.print(tables.totals_table(rows))
    if (microbatches := program.options.accumulate) > 1:
        screen.say(f"times and bytes of a step: moves of forward, loss and backward in {microbatches} microbatches")
    for note in program.notes:
        screen.say(note)
    folded = tables.fold(rows, twins=not job.show_all)
    shown = [asdict(r.row) | {"name": r.name or r.row.name, "count": r.count} for r in folded]
    sums = tables.totals(rows)
    screen.result(
        True,
        mesh=str(program.mesh),
        num_moves=sum(total.count for total in sums),
        bytes_received=sum(total.bytes_received for total in sums),
        moves=shown,
        totals=[asdict(total) for total in sums],
    )
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions(MachineOptions):
    mesh: str = option("", "named axes", autocompletion=meshes_like)
    plan: str = option("", "as for plan")
    why: str = option("", "a node, module or source line, or part of one")


def explain(screen: Screen, options: ExplainOptions) -> int:
    """Explain for every communication why it moves and why it is exposed; with --why only for those that match a
    text."""
    options = options.with_batch([(options.mesh, options.plan)])
    program = options.compiled(screen, options.mesh, options.plan)
    screen.say(options.assumptions(program))
    return _explain(screen, program, whatif.simulate(program, options.machine, fusion=options.fusion), options.why)


_SHOWN = ["name", "op", "group", "phase", "module", "line", "layout", "start", "seconds", "bytes", "exposed_seconds"]


def _is_meant(span: Span, parts: Sequence[fx.Node], why: str) -> bool:
    """Whether --why matches a communication, or a part of a merged communication."""
    origins = [origin_of(node) for node in parts]
    texts = (span.name, span.module, span.line, *(text for o in origins for text in (o.module, o.source)))
    return why == span.op or any(why in text for text in texts)


def _explain(screen: Screen, program: Program, simulation: Simulation, why: str) -> int:
    spans = [s for s in simulation.spans if s.kind != "compute"]
    parts = _merged_parts(program)
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
        modules = list(dict.fromkeys(origin_of(n).module for n in parts.get(span.name, ())))
        merged = {"merged": modules} if modules else {}
        reasons = [attributes_of(reason, "kind", "seconds", "text") for reason in span.reasons]
        rows.append({**attributes_of(span, *_SHOWN), "reasons": reasons, **merged})
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


def _merged_parts(program: Program) -> Mapping[str, tuple[fx.Node, ...]]:
    """For each merged communication, over all roles: the nodes that it consists of."""
    return {node.name: results for role in program.roles for node, results in merged_results(role).items()}
