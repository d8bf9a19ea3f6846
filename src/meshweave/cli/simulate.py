"""simulate: a MODEL's training step on any machine, present or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.markup import escape
from rich.table import Table

from meshweave import whatif
from meshweave.cli.costs import parse_machine
from meshweave.cli.job import parse_bytes
from meshweave.cli.machine import MachineOptions, compiled_for
from meshweave.cli.scheduled import gain_lines, gain_row
from meshweave.cli.screen import Screen, check_outputs, write_text
from meshweave.errors import MeshweaveError
from meshweave.program import Program
from meshweave.report.diff import diff_rows, diff_table
from meshweave.report.html import html_page
from meshweave.report.moves import move_rows
from meshweave.report.simulation import simulation_table
from meshweave.report.tables import bytes_text
from meshweave.report.trace import trace_json
from meshweave.simulate.buckets import OF_BLOCKS
from meshweave.simulate.pipelines import Pipeline
from meshweave.simulate.result import Simulation
from meshweave.whatif import best_of

MatmulDtype = Literal["float8_e4m3fn", "bfloat16"]


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
        program = compiled_for(screen, options.job(mesh, plan), machine)
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


def _plans(plans: Sequence[str], count: int) -> list[str]:
    if len(plans) not in (0, 1, count):
        raise MeshweaveError(
            "the numbers of plans and meshes differ",
            got=f"{len(plans)} plans, {count} meshes",
            expected="a single plan, or a plan per mesh",
        )
    return list(plans) if len(plans) == count else [*(plans or [""])] * count


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
