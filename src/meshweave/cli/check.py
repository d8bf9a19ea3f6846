"""check: prove MODEL's program, and compare it with one device and with eager PyTorch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from meshweave.capture.batch import Batch, call_model, in_float64
from meshweave.check.numerics import CHECK_LR, Bounds, NumericsReport, check_numerics
from meshweave.check.runs import CHECK_STEPS, Recipe, Training
from meshweave.cli.command import option
from meshweave.cli.job import MeshStepOptions, compiled
from meshweave.cli.screen import Screen
from meshweave.engine.actions import Schedule
from meshweave.engine.schedules.memory import peak_activations
from meshweave.ir.mesh import Mesh
from meshweave.passes import prove
from meshweave.place.plan_text import parse_plan
from meshweave.place.plans import Plan
from meshweave.report import tables
from meshweave.report.moves import rounded_sums
from meshweave.report.pipeline import schedule_text
from meshweave.runtime.cluster import check_devices, make_world
from meshweave.runtime.world import LocalWorld
from meshweave.train_step import CompiledStep, TrainStep


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions(MeshStepOptions):
    steps: int = option(CHECK_STEPS, "number of steps to compare", min=1)


def check(screen: Screen, job: CheckOptions) -> int:
    """Prove that MODEL's program on a mesh is complete and free of deadlock, and compare it with one device, and that
    with eager PyTorch. Exit code 0 when all holds."""
    mesh, plan = Mesh(job.mesh), parse_plan(job.plan)
    check_devices(mesh)
    source = job.load(mesh, plan)
    lr = None if job.optimizer == "sgd" else CHECK_LR

    def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = job.load(mesh, plan).model
        return model, job.make_optimizer(model, lr)

    def compiler(model: nn.Module, optimizer: torch.optim.Optimizer, on: Mesh, planned: Plan | None) -> TrainStep:
        is_wide = any(p.dtype == torch.float64 for p in model.parameters())
        job_options, batch = (
            (replace(job, dtype="float64", param_dtype=None), in_float64(source.batch))
            if is_wide
            else (job, source.batch)
        )
        fresh = replace(source, model=model, batch=batch)
        job_options = replace(job_options, pipeline=job.pipeline if on is mesh else "")  # one device has no stages
        program = compiled(job_options, fresh, on, planned, optimizer, lambda stage: None)
        world = make_world(on) if on is mesh else LocalWorld(on)
        backend = "eager" if job.backend == "auto" else job.backend  # the same on one device and on several
        settings = job.settings(backend=backend, keep_gradients=True)
        return TrainStep(CompiledStep(program, model, optimizer, world, settings))

    def split(batch: Any) -> list[Any]:
        return [batch] if program.is_sum else Batch.of(batch).micros(job.accumulate)

    autocast = job.precision.autocast
    cast = None if job.param_dtype is None else getattr(torch, job.param_dtype)
    recipe = Recipe(
        loss=source.loss,
        split=split,
        clip_grad_norm=job.clip_grad_norm,
        autocast=autocast,
        seed=job.seed,
        forward=call_model,
        param_dtype=cast,
    )
    with screen.stages() as stage:
        program = compiled(job, source, mesh, plan, job.make_optimizer(source.model, lr), stage)
        stage("prove")
        complete, deadlock = prove(program.placed, program.optimized)
        report = check_numerics(
            Training(make_model, source.make_batch, recipe, job.steps), mesh, plan, compiler,
            bounds=Bounds.under(autocast or cast), progress=stage,
        )  # fmt: skip
    screen.say(tables.proof_text(complete, deadlock))
    if program.pipeline is not None:
        screen.say(_schedule_line(program.pipeline))
    narrow, count = rounded_sums(program.placed)
    if count:
        screen.say(
            f"{count} sums over devices add parts in {narrow}, each rounded: within that dtype's bounds, not to the bit"
        )
    _show_check(screen, report)
    screen.result(rounded_sums=count, **report.as_dict(), complete=asdict(complete), deadlock=asdict(deadlock))
    return 0 if report.ok else 1


def _schedule_line(schedule: Schedule) -> str:
    """A schedule in a line: its stages, and what a rank holds at most."""
    text = schedule_text(schedule.name, schedule.stages_of_role, schedule.num_microbatches)
    return f"{text}, at most {max(peak_activations(schedule)):g} activations"


def _show_check(screen: Screen, report: NumericsReport) -> None:
    screen.out.print(tables.numerics_table(report))
    if report.failed:
        screen.say(f"\n{len(report.failed)} of {len(report.errors)} comparisons failed, the worst first:")
        screen.out.print(tables.failures_table(report.failed[:20]))
    if report.within_rounding:
        screen.say(
            f"{len(report.within_rounding)} tensors exceed the bound by rounding only: a single device does, too"
        )
    screen.say(report.note)
    verdict = "[green]equal[/]" if report.ok else "[bold red]NOT equal[/]"
    where = f"mesh {report.mesh}" if report.mesh else "one device"
    screen.say(f"{verdict}: {len(report.errors)} comparisons over {report.num_steps} steps on {where}")
