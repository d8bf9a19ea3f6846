"""simulate: a MODEL's training step on any machine, present or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape

from meshweave.build import Target
from meshweave.cli.command import option
from meshweave.cli.hugging_face import is_configuration
from meshweave.cli.job import MachineOptions, StepOptions, meshes_like, parse_bytes
from meshweave.cli.levers import Peak, Setting, levers
from meshweave.cli.screen import Screen, attributes_of, check_outputs, write_text
from meshweave.cli.sources import Source
from meshweave.cost.simulate.frameworks import framework_named
from meshweave.cost.simulate.result import Simulation
from meshweave.errors import MeshweaveError
from meshweave.ir.mesh import Mesh
from meshweave.passes import Overlap
from meshweave.place.plan_text import parse_plan
from meshweave.program import Program
from meshweave.report.diff import diff_rows, diff_table
from meshweave.report.html import html_page
from meshweave.report.moves import move_rows
from meshweave.report.pipeline import pipeline_of
from meshweave.report.simulation import simulation_table
from meshweave.report.tables import bytes_text, plain_table
from meshweave.report.trace import trace_json
from meshweave.study import Answer, StepQuestion, Study
from meshweave.whatif import best_of

MatmulDtype = Literal["float8_e4m3fn", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateCommandOptions(MachineOptions):
    mesh: list[str] = option(help="named axes, such as fsdp=8,tp=8; several are compared", autocompletion=meshes_like)
    plan: list[str] = option(list, "as for plan; a single plan for all meshes, or a plan per mesh")
    matmul_dtype: MatmulDtype | None = option(None, "dtype of the matmuls in repeated blocks")
    buckets: str = option("", "which collectives are merged: none, 'blocks' (as FSDP does), or a size (25MiB)")
    report: Path | None = option(None, "write one HTML page")
    trace: Path | None = option(None, "write a Chrome trace, for Perfetto")
    diff: bool = option(False, "difference of two meshes: which moves changed, where time went")

    @property
    def is_whole(self) -> bool:
        """Whether spans are shown one by one, so that all layers and microbatches are simulated."""
        return self.report is not None or self.trace is not None or self.diff

    def answer(self, screen: Screen, studies: Studies, mesh: str, plan: str) -> Answer:
        """The step on a mesh, simulated as the options say."""
        on_mesh, its_plan = Mesh(mesh), parse_plan(plan)
        costs, source = self.costs_on(on_mesh), self.load_unrun(on_mesh, its_plan)
        is_name = self.buckets in ("", "none", "blocks")
        buckets: Any = (
            (self.buckets or None) if is_name else parse_bytes(self.buckets, "--buckets", "none, blocks, or ")
        )
        question = StepQuestion(
            example=source.batch,
            target=Target(on_mesh, its_plan, costs),
            options=self.capture_options,
            pass_list=self.pass_list,
        )
        with screen.stages(mesh or "one device") as stage:
            study = studies.of(self, source)
            study.progress = stage
            return study.answer(
                question,
                self.machine,
                framework=framework_named(self.framework),
                every_layer=self.is_whole,
                fusion=self.fusion,
                matmul_dtype=self.matmul_dtype,
                buckets=buckets,
                every_microbatch=self.is_whole,
                title=" ".join(filter(None, (self.model_name, f"on {mesh or 'one device'}", plan))),
            )


@dataclass(slots=True)
class Studies:
    """The studies of a command: the questions about a configuration share one; a factory may make another model for
    each batch."""

    known: dict[tuple[Any, ...], Study] = field(default_factory=dict)

    def of(self, options: StepOptions, source: Source) -> Study:
        key = (options.model, options.seq, options.dtype, options.optimizer, options.lr, options.seed)
        if key not in self.known or not is_configuration(options.model):
            optimizer = options.make_optimizer(source.model)
            self.known[key] = Study(source.model, loss=source.loss, optimizer=optimizer)
        return self.known[key]


def simulate(screen: Screen, options: SimulateCommandOptions) -> int:
    """Predict a training step on a machine: time, exposed communication and why, memory. Several meshes are compared,
    and the best is marked. The machine need not be present."""
    check_outputs(options.report, options.trace)
    options = options.as_framework()
    if options.diff and len(options.mesh) != 2:
        raise MeshweaveError(
            "--diff compares two", got=f"{len(options.mesh)} meshes", expected="--mesh A --mesh B --diff"
        )
    pairs = list(zip(options.mesh, _plans(options.plan, len(options.mesh)), strict=True))
    stated, options = options, options.with_batch(pairs)
    programs, simulations, studies = list[Program](), list[Simulation](), Studies()
    gains, details = list[dict[str, Any]](), list[str]()
    for mesh, plan in pairs:
        answer = options.answer(screen, studies, mesh, plan)
        program, simulation = answer.program, answer.simulation
        note = options.assumptions(program, answer.num_parameters)
        programs.append(program)
        simulations.append(replace(simulation, notes=(note, *simulation.notes), advice=()))
        if answer.before is not None:
            gains.append(_gain_row(program, answer.before, simulation))
            details += _gain_lines(program, answer.before, simulation)
    _show(screen, simulations)
    known: dict[Setting, Peak | None] = {}
    for i, (mesh, plan) in enumerate(pairs):
        first = _setting(options, programs[i], mesh, plan)
        advice = _advice(screen, studies, (stated, options), first, simulations[i], known)
        simulations[i] = replace(simulations[i], advice=advice)
    for line in details:
        screen.detail(line)
    rows = _show_difference(screen, simulations) if options.diff else None
    _write(screen, list(zip(programs, simulations, strict=True)), options.report, options.trace)
    _result(screen, simulations, rows, gains)
    return 0


def _setting(options: SimulateCommandOptions, program: Program, mesh: str, plan: str) -> Setting:
    shapes = [item.spec.shape for item in program.captured.inputs if item.kind == "batch" and item.spec.shape]
    return Setting(
        mesh=mesh,
        plan=plan,
        passes=options.passes,
        accumulate=options.accumulate,
        batch=options.batch,
        local_batch=options.local_batch,
        rows=shapes[0][0] if shapes else 1,
    )


def _advice(
    screen: Screen,
    studies: Studies,
    options: tuple[SimulateCommandOptions, SimulateCommandOptions],
    first: Setting,
    simulation: Simulation,
    known: dict[Setting, Peak | None],
) -> tuple[str, ...]:
    """What would make a step fit at the same global batch, shown; nothing if it fits. `options`: as stated, and with
    the batch that was chosen for all meshes."""
    if not simulation.verdict:
        return ()
    stated, chosen = options

    def simulated(changed: SimulateCommandOptions, mesh: str, plan: str) -> Simulation:
        return changed.answer(screen, studies, mesh, plan).simulation

    advice = levers(stated, first, simulation, simulated, known)
    screen.say(f"{simulation.mesh}: {simulation.verdict}" if len(chosen.mesh) > 1 else "")
    screen.say("what makes it fit, at the same global batch:")
    for line in advice:
        screen.say(f"  {line}")
    return advice


def _plans(plans: Sequence[str], count: int) -> list[str]:
    if len(plans) not in (0, 1, count):
        raise MeshweaveError(
            "the numbers of plans and meshes differ",
            got=f"{len(plans)} plans, {count} meshes",
            expected="a single plan, or a plan per mesh",
        )
    return list(plans) if len(plans) == count else [*(plans or [""])] * count


def _show(screen: Screen, simulations: Sequence[Simulation]) -> None:
    """A simulation, or a table of several with the best marked."""
    if len(simulations) == 1:
        screen.out.print(simulation_table(simulations[0]))
        return
    best = best_of(simulations)
    table = plain_table("", "mesh", "plan", ">step ms", ">tokens/s/GPU", ">MFU", ">exposed ms", ">peak", ">fits")
    for i, simulation in enumerate(simulations):
        table.add_row(
            "[green]best[/]" if i == best and not simulation.verdict else "",
            simulation.mesh,
            escape(simulation.title.partition(f" on {simulation.mesh}")[2].strip()),
            f"{simulation.seconds * 1e3:,.2f}",
            f"{simulation.tokens_per_s_per_gpu:,.0f}",
            f"{simulation.mfu:.1%}" if simulation.mfu is not None else "",
            f"{simulation.exposed_seconds * 1e3:,.2f}",
            bytes_text(simulation.peak_bytes),
            "[red]no[/]" if simulation.fit == "no" else simulation.fit,
        )
    screen.out.print(table)
    screen.say(f"[dim]{escape(simulations[0].notes[0])}[/]")


def _show_difference(screen: Screen, simulations: Sequence[Simulation]) -> list[dict[str, Any]]:
    first, second = simulations
    for shown in diff_table(first, second):
        screen.out.print(shown)
    return [row.as_dict() for row in diff_rows(first, second)]


def _result(
    screen: Screen,
    simulations: Sequence[Simulation],
    rows: list[dict[str, Any]] | None,
    gains: Sequence[dict[str, Any]],
) -> None:
    scheduled: dict[str, Any] = {"overlap": gains} if gains else {}
    if len(simulations) == 1:
        if (picture := pipeline_of(simulations[0])) is not None:
            scheduled["pipeline"] = attributes_of(picture, "schedule", "stages_of_role", "bubble", "activations")
        screen.result(True, mesh=simulations[0].mesh, **scheduled, **simulations[0].as_dict())
        return
    each = [{"mesh": item.mesh, "title": item.title, **item.as_dict()} for item in simulations]
    screen.result(True, best=best_of(simulations), simulations=each, diff=rows, **scheduled)


def _write(
    screen: Screen, pairs: Sequence[tuple[Program, Simulation]], report: Path | None, trace: Path | None
) -> None:
    program, first = pairs[best_of([simulation for _, simulation in pairs])]
    compared = [simulation for _, simulation in pairs if simulation is not first]
    if report is not None:
        page = html_page(
            first, move_rows(program.placed, program.mesh, program.expanded), other=compared[0] if compared else None
        )
        write_text(report, page)
        screen.say(f"page: {report}")
    if trace is not None:
        write_text(trace, trace_json([first]))
        screen.say(f"trace: {trace} (open it in ui.perfetto.dev or chrome://tracing)")


def _gain_row(program: Program, before: Simulation, after: Simulation) -> dict[str, Any]:
    """The simulated step before and after, and the passes' reports of each role."""
    return {
        "seconds_before": before.seconds,
        "seconds": after.seconds,
        "exposed_before": before.exposed_seconds,
        "exposed_seconds": after.exposed_seconds,
        "roles": [
            attributes_of(r, "seconds_before", "seconds", "bound_seconds", "peak_before", "peak_bytes", "cap_bytes")
            | {"num_merged": sum(len(m.names) for m in r.merges if m.is_taken), "notes": list(r.notes)}
            for r in program.overlap
        ],
        "variants": [attributes_of(variant, "name", "seconds", "reason") for variant in program.optimized.variants],
        "kept": [attributes_of(report, "num_kept", "num_repeated", "kept_bytes") for report in program.optimized.keeps],
        "taken": program.optimized.name,
        "taken_apart": [
            {
                "way": row.scheme,
                **attributes_of(row, "name", "op", "group", "num_steps", "is_taken", "reason", "numerics"),
            }
            for report in program.optimized.rings
            for row in report.rows
        ],
    }


def _gain_lines(program: Program, before: Simulation, after: Simulation) -> Iterable[str]:
    """`overlap: 71.7 -> 40.4 ms`, and a line per role and pass."""
    passes = "overlap" if program.overlap else "chunks"
    yield (
        f"{program.mesh}, {passes}: step {before.seconds * 1e3:,.3f} -> {after.seconds * 1e3:,.3f} ms "
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
