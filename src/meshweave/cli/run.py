"""run: train a MODEL."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshweave.cli.command import option
from meshweave.cli.job import MeshStepOptions, compiled
from meshweave.cli.screen import Screen, check_outputs, rank, write_text
from meshweave.cli.sources import Source
from meshweave.cost.simulate.result import Simulation
from meshweave.ir.mesh import Mesh
from meshweave.place.plan_text import parse_plan
from meshweave.report.html import html_page
from meshweave.report.moves import move_rows
from meshweave.runtime.cluster import make_world
from meshweave.train_step import CompiledStep, TrainStep
from meshweave.whatif import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommandOptions(MeshStepOptions):
    steps: int = option(20, "last step to train", min=1)
    checkpoint: str = option("", "directory to resume from and save to", metavar="DIR")
    save_every: int = option(0, "steps between saves; 0: only at the end", min=0)
    report: Path | None = option(None, "measure the last step, and write an HTML page")


def run(screen: Screen, job: RunCommandOptions) -> int:
    """Train MODEL on virtual devices in this process, or under torchrun on its processes."""
    check_outputs(job.report, folder=job.checkpoint)
    mesh, plan = Mesh(job.mesh), parse_plan(job.plan)
    world = make_world(mesh)
    source = job.load(mesh, plan)
    optimizer = job.make_optimizer(source.model)
    with screen.stages() as stage:
        program = compiled(job, source, mesh, plan, optimizer, stage)
        step = TrainStep(CompiledStep(program, source.model, optimizer, world, job.settings()))
    if job.checkpoint and Path(job.checkpoint).exists():
        step.load(job.checkpoint)
        screen.say(f"continuing from {job.checkpoint} after step {step.num_steps}")
    first = step.num_steps
    if first >= job.steps:
        screen.say(f"nothing to do: the checkpoint is of step {first}, and --steps is {job.steps}")
    measured: list[Simulation] = []
    traced = partial(_traced, step, measured) if job.report is not None else None
    losses, rate = _train(screen, step, source, job, traced)
    if job.report is not None and measured and rank() == 0:
        _compare(screen, step, job, measured[0], job.report)
    screen.result(True, mesh=str(mesh), num_devices=mesh.num_devices, first_step=first, num_steps=step.num_steps,
                  losses=losses, loss=losses[-1] if losses else None, checkpoint=job.checkpoint or None,
                  **{f"{source.unit}_per_s": rate})  # fmt: skip
    return 0


def _train(
    screen: Screen,
    step: TrainStep,
    source: Source,
    job: RunCommandOptions,
    last: Callable[[Any], float] | None = None,
) -> tuple[list[float], float | None]:
    """Losses of the steps and tokens per second, not counting the first step, which warms up. `last` runs the last
    step."""
    losses: list[float] = []
    steps, checkpoint, save_every = job.steps, job.checkpoint, job.save_every
    saved = step.num_steps
    shown_every = max(1, (steps - step.num_steps) // 20)
    began = time.perf_counter()
    with _interruptible(step) as check_interrupt:
        try:
            for i in range(step.num_steps, steps):
                run_step = last if last is not None and i + 1 == steps else step
                losses.append(float(run_step(source.make_batch(i))))
                began = time.perf_counter() if len(losses) == 1 else began
                if len(losses) == 1 or (i + 1) % shown_every == 0 or i + 1 == steps:
                    screen.say(_progress_line(i + 1, steps, losses, source, time.perf_counter() - began))
                if save_every and (i + 1) % save_every == 0:
                    step.save(checkpoint)
                    saved = i + 1
                check_interrupt()
        except KeyboardInterrupt:
            if checkpoint and step.num_steps > saved:
                step.save(checkpoint)
                screen.say(f"saved step {step.num_steps} to {checkpoint}")
            raise
    if checkpoint and step.num_steps > saved:
        step.save(checkpoint)
        screen.say(f"saved step {step.num_steps} to {checkpoint}")
    return losses, _rate(losses, source, time.perf_counter() - began)


def _traced(step: TrainStep, measured: list[Simulation], batch: Any) -> float:
    """Run and measure a step; returns its loss."""
    measured.append(step.trace(batch))
    return step.metrics["loss"]


def _compare(screen: Screen, step: TrainStep, job: MeshStepOptions, measured: Simulation, report: Path) -> None:
    """Write the page of a measured step beside the machine profile's prediction."""
    profile = job.profile if job.profile and "=" not in job.profile else "cpu-gloo"
    modelled = simulate(step.program, profile, title=f"{job.model} on {job.mesh or 'one device'}")
    page = html_page(
        modelled, move_rows(step.program.placed, step.program.mesh, step.program.expanded), measured=measured
    )
    write_text(report, page)
    screen.say(
        f"measured {measured.seconds * 1e3:.2f} ms, {modelled.profile} predicts {modelled.seconds * 1e3:.2f} ms; "
        f"both on {report}"
    )


def _rate(losses: Sequence[float], source: Source, seconds: float) -> float | None:
    return (len(losses) - 1) * source.tokens_per_batch / seconds if len(losses) > 1 and seconds > 0 else None


def _progress_line(number: int, steps: int, losses: Sequence[float], source: Source, seconds: float) -> str:
    rate = _rate(losses, source, seconds)
    shown = f"  {rate:,.0f} {source.unit}/s" if rate else ""
    return f"step {number:>{len(str(steps))}}/{steps}  loss {losses[-1]:.4f}{shown}"


@contextmanager
def _interruptible(step: TrainStep) -> Iterator[Callable[[], None]]:
    """Where several processes run, note Ctrl-C, so that `check_interrupt()` stops all of them after the same step. A
    single process is interrupted at once; the step itself keeps an update whole."""
    if not step.session.world.is_distributed:
        yield lambda: None
        return
    pressed = torch.zeros((), dtype=torch.int32, device=step.session.world.device)
    before = signal.signal(signal.SIGINT, lambda *_: pressed.fill_(1) and None)

    def check_interrupt() -> None:
        with step.session.world.guard():  # a missing rank is reported as everywhere else
            dist.all_reduce(pressed, dist.ReduceOp.MAX)
        if pressed.item():
            raise KeyboardInterrupt

    try:
        yield check_interrupt
    finally:
        signal.signal(signal.SIGINT, before)
