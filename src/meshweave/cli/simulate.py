"""simulate and explain: a MODEL's training step on any machine, present or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.markup import escape
from rich.table import Table
from torch import fx

from meshweave import whatif
from meshweave.cli.costs import parse_machine
from meshweave.cli.job import MeshStepOptions, StepOptions, compiled, parse_bytes
from meshweave.cli.scheduled import gain_lines, gain_row, is_named, modules_of, parts_of
from meshweave.cli.screen import Screen, check_outputs, write_text
from meshweave.errors import MeshweaveError
from meshweave.hardware import MachineProfile, profile_names
from meshweave.ir.mesh import Mesh
from meshweave.program import Program
from meshweave.report.diff import diff_rows, diff_table
from meshweave.report.html import html_page
from meshweave.report.moves import move_rows
from meshweave.report.simulation import simulation_table
from meshweave.report.tables import bytes_text
from meshweave.report.trace import trace_json
from meshweave.sharding.plan_text import parse_plan
from meshweave.simulate.buckets import OF_BLOCKS
from meshweave.simulate.kernels import Fusion
from meshweave.simulate.pipelines import Pipeline
from meshweave.simulate.result import Simulation, Span
from meshweave.whatif import best_of

MatmulDtype = Literal["float8_e4m3fn", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions(StepOptions):
    """The machine of a simulated step."""

    profile: Annotated[
        str, typer.Option("--profile", help=f"machine: {', '.join(profile_names())}, or a file (profile.toml)")
    ] = "h100"
    scale: Annotated[
        str, typer.Option("--scale", help="what-if factors of the machine: net_bandwidth=2,attention=cudnn")
    ] = ""
    fusion: Annotated[
        Fusion | None,
        typer.Option("--fusion", help="what runs as a single kernel; by default as the machine profile says"),
    ] = None

    def job(self, mesh: str, plan: str) -> MeshStepOptions:
        """The step on a mesh; moves are chosen by the unscaled profile."""
        shared = {f.name: getattr(self, f.name) for f in fields(StepOptions)}
        return MeshStepOptions(mesh=mesh, plan=plan, profile=self.profile, **shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateCommandOptions(MachineOptions):
    mesh: Annotated[list[str], typer.Option("--mesh", help="named axes, such as fsdp=8,tp=8; several are compared")]
    plan: Annotated[
        list[str], typer.Option("--plan", help="as for plan; a single plan for all meshes, or a plan per mesh")
    ] = field(default_factory=list)
    pipeline: Annotated[Pipeline, typer.Option("--pipeline", help="how stages take the --accumulate microbatches")] = (
        "sequential"
    )
    matmul_dtype: Annotated[
        MatmulDtype | None, typer.Option("--matmul-dtype", help="dtype of the matmuls in repeated blocks")
    ] = None
    buckets: Annotated[
        str,
        typer.Option(
            "--buckets",
            help="which collectives are merged: 'blocks' or 'blocks+root' (as FSDP does), or a size (25MiB)",
        ),
    ] = "none"
    report: Annotated[Path | None, typer.Option("--report", help="write one HTML page")] = None
    trace: Annotated[Path | None, typer.Option("--trace", help="write a Chrome trace, for Perfetto")] = None
    diff: Annotated[
        bool, typer.Option("--diff", help="difference of two meshes: which moves changed, where time went")
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions(MachineOptions):
    mesh: Annotated[str, typer.Option("--mesh", help="named axes")] = ""
    plan: Annotated[str, typer.Option("--plan", help="as for plan")] = ""
    why: Annotated[str, typer.Option("--why", help="a node, module or source line, or part of one")] = ""


def simulate(screen: Screen, options: SimulateCommandOptions) -> int:
    """Predict a training step on a machine: time, exposed communication and why, memory. Several meshes are compared,
    and the best is marked. The machine need not be present."""
    check_outputs(options.report, options.trace)
    machine = parse_machine(options.profile, options.scale)
    if options.diff and len(options.mesh) != 2:
        raise MeshweaveError(
            "--diff compares two", got=f"{len(options.mesh)} meshes", expected="--mesh A --mesh B --diff"
        )
    is_stated = options.buckets in ("none", *OF_BLOCKS)
    buckets: Any = options.buckets if is_stated else parse_bytes(options.buckets, "--buckets")
    played = partial(
        whatif.simulate,
        profile=machine,
        fusion=options.fusion,
        pipeline=options.pipeline,
        matmul_dtype=getattr(torch, options.matmul_dtype) if options.matmul_dtype else None,
        buckets=buckets,
    )
    simulations, gains = list[tuple[Program, Simulation]](), list[dict[str, Any]]()
    for mesh, plan in zip(options.mesh, _plans(options.plan, len(options.mesh)), strict=True):
        program = _compiled(screen, options.job(mesh, plan), machine)
        title = " ".join(filter(None, (options.model, f"on {mesh or 'one device'}", plan)))
        simulations.append((program, played(program, title=title)))
        if program.roles is not program.expanded or program.optimized.variants:
            before = played(program.as_expanded, title=title)
            gains.append(gain_row(program, before, simulations[-1][1]))
            for line in gain_lines(program, before, simulations[-1][1]):
                screen.say(line)
    _show(screen, [simulation for _, simulation in simulations], options.diff, gains)
    _write(screen, simulations, options.report, options.trace)
    return 0


def explain(screen: Screen, options: ExplainOptions) -> int:
    """Explain for every communication why it moves and why it is exposed; with --why only for those that match a
    text."""
    machine = parse_machine(options.profile, options.scale)
    program = _compiled(screen, options.job(options.mesh, options.plan), machine)
    return _explain(screen, program, whatif.simulate(program, machine, fusion=options.fusion), options.why)


def _plans(plans: Sequence[str], count: int) -> list[str]:
    if len(plans) not in (0, 1, count):
        raise MeshweaveError(
            "the numbers of plans and meshes differ",
            got=f"{len(plans)} plans, {count} meshes",
            expected="a single plan, or a plan per mesh",
        )
    return list(plans) if len(plans) == count else [*(plans or [""])] * count


def _compiled(screen: Screen, job: MeshStepOptions, machine: MachineProfile) -> Program:
    mesh, plan = Mesh(job.mesh), parse_plan(job.plan)
    machine.check_mesh(mesh)
    source = job.load(mesh, plan, "meta" if job.model.startswith("hf:") else "cpu")
    with screen.stages() as stage:
        return compiled(job, source, mesh, plan, job.make_optimizer(source.model), stage)


def _show(screen: Screen, simulations: Sequence[Simulation], diff: bool, gains: Sequence[dict[str, Any]]) -> None:
    scheduled = {"overlap": gains} if gains else {}
    if len(simulations) == 1:
        screen.out.print(simulation_table(simulations[0]))
        screen.result(True, mesh=simulations[0].mesh, **scheduled, **simulations[0].as_dict())
        return
    best = best_of(simulations)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "mesh", "plan"):
        table.add_column(column)
    for column in ("step ms", "tokens/s/GPU", "MFU", "exposed ms", "peak", "fits"):
        table.add_column(column, justify="right")
    for i, simulation in enumerate(simulations):
        table.add_row(
            "[green]best[/]" if i == best else "",
            simulation.mesh,
            escape(simulation.title.partition(f" on {simulation.mesh}")[2].strip()),
            f"{simulation.seconds * 1e3:,.2f}",
            f"{simulation.tokens_per_s_per_gpu:,.0f}",
            f"{simulation.mfu:.1%}" if simulation.mfu is not None else "",
            f"{simulation.exposed_seconds * 1e3:,.2f}",
            bytes_text(simulation.peak_bytes),
            "yes" if not simulation.verdict else "[red]no[/]",
        )
    screen.out.print(table)
    for simulation in simulations:
        if simulation.verdict:
            screen.say(f"{simulation.mesh}: {simulation.verdict}")
    if diff:
        for shown in diff_table(simulations[0], simulations[1]):
            screen.out.print(shown)
    rows = [r.as_dict() for r in diff_rows(simulations[0], simulations[1])] if diff else None
    screen.result(
        True,
        best=best,
        simulations=[
            {"mesh": simulation.mesh, "title": simulation.title, **simulation.as_dict()} for simulation in simulations
        ],
        diff=rows,
        **scheduled,
    )


def _write(
    screen: Screen, pairs: Sequence[tuple[Program, Simulation]], report: Path | None, trace: Path | None
) -> None:
    program, first = pairs[best_of([simulation for _, simulation in pairs])]
    compared = [simulation for _, simulation in pairs if simulation is not first]
    if report is not None:
        page = html_page(first, move_rows(program.placed, program.mesh), other=compared[0] if compared else None)
        write_text(report, page)
        screen.say(f"page: {report}")
    if trace is not None:
        write_text(trace, trace_json([first]))
        screen.say(f"trace: {trace} (open it in ui.perfetto.dev or chrome://tracing)")


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
