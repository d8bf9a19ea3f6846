"""The command line: run | check | plan. Exit code 0 when all it claims holds, 1 when a step or check fails, 2 for bad
input, 130 after Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.markup import escape
from torch import nn

from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.sources import Source, load_source
from meshweave.capture.step import Batch, CaptureOptions
from meshweave.check.completeness import check_complete
from meshweave.check.deadlock import check_deadlock
from meshweave.check.numerics import CHECK_LR, CHECK_STEPS, NumericsReport, Recipe, check_numerics
from meshweave.compile import Program, TrainStep, build_program, make_world
from meshweave.errors import MeshweaveError, StepError, VerifyError
from meshweave.hardware import AlphaBeta
from meshweave.ir.mesh import Mesh
from meshweave.report import tables
from meshweave.report.moves import MoveRow, move_rows
from meshweave.runtime.session import Settings
from meshweave.runtime.world import LocalWorld
from meshweave.sharding.plan_text import data_parallel_size, parse_plan
from meshweave.sharding.plans import Plan

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A communication compiler for distributed PyTorch training. MODEL is file.py:factory or "
    "hf:MODEL_TYPE?num_hidden_layers=2&hidden_size=64.",
)

Dtype = Literal["float32", "bfloat16", "float64"]
OptimizerName = Literal["sgd", "adam", "adamw"]

Model = Annotated[str, typer.Argument(metavar="MODEL", help="file.py:factory, or hf:MODEL_TYPE?field=value&...")]
MeshText = Annotated[str, typer.Option("--mesh", help="named axes, such as dp=2,tp=2; empty for one device")]
PlanText = Annotated[str, typer.Option("--plan", help="scheme:axis+scheme:axis, or a TOML or JSON file of globs")]
OptimizerOption = Annotated[OptimizerName, typer.Option("--optimizer", help="sgd, adam or adamw")]
Lr = Annotated[float | None, typer.Option("--lr", min=0, help="learning rate; without it the optimizer's usual one")]
LocalBatch = Annotated[int | None, typer.Option("--local-batch", min=1, help="batch size per data-parallel device")]
GlobalBatch = Annotated[int | None, typer.Option("--batch", min=1, help="global batch size, instead of --local-batch")]
Seq = Annotated[int, typer.Option("--seq", min=2, help="tokens per sequence")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="bfloat16 is autocast: parameters stay float32")]
Accumulate = Annotated[int, typer.Option("--accumulate", min=1, help="microbatches per step")]
Clip = Annotated[float | None, typer.Option("--clip-grad-norm", help="clip gradients by their global norm")]
Seed = Annotated[int, typer.Option("--seed", help="of parameters, data and dropout")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object as the last line of stdout")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]

_LR = {"sgd": 1e-2, "adam": 1e-3, "adamw": 1e-3}
_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True, slots=True)
class Job:
    """What was asked for: the options that all commands share."""

    model: str
    mesh: str
    plan: str
    optimizer: str
    lr: float | None
    local_batch: int | None
    batch: int | None
    seq: int
    dtype: str
    accumulate: int
    clip_grad_norm: float | None
    seed: int
    json: bool
    debug: bool

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.dtype == "bfloat16" else None

    @property
    def options(self) -> CaptureOptions:
        return CaptureOptions(self.clip_grad_norm, self.accumulate, self.autocast, self.seed)

    def load(self, mesh: Mesh, plan: Plan | None, device: str = "cpu") -> Source:
        if self.batch is not None and self.local_batch is not None:
            raise MeshweaveError("--batch and --local-batch say the same thing", hint="leave one of them out")
        batch = self.batch
        if self.local_batch is not None or (batch is None and self.model.startswith("hf:")):
            batch = (self.local_batch or 2) * self.accumulate * data_parallel_size(mesh, plan)
        dtype = torch.float64 if self.dtype == "float64" else torch.float32
        return load_source(self.model, batch=batch, seq=self.seq, dtype=dtype, seed=self.seed, device=device)

    def make_optimizer(self, model: nn.Module, lr: float | None = None) -> torch.optim.Optimizer:
        chosen = next(rate for rate in (self.lr, lr, _LR[self.optimizer]) if rate is not None)
        return _OPTIMIZERS[self.optimizer](model.parameters(), lr=chosen)


Stage = Callable[[str], None]


@dataclass(slots=True)
class Screen:
    """Where a command writes: stdout, or stderr under --json; nowhere on any rank but the first."""

    command: str
    json: bool
    out: Console = field(init=False)

    def __post_init__(self) -> None:
        self.out = Console(stderr=self.json, quiet=rank() != 0, highlight=False)
        if not self.out.is_terminal:
            self.out.width = 200

    def say(self, text: str) -> None:
        self.out.print(text, soft_wrap=True)

    @contextmanager
    def stages(self) -> Iterator[Stage]:
        """Shows each stage as it begins, and when all are done how long they took."""
        began = time.perf_counter()
        with self.out.status("start") if self.out.is_terminal else nullcontext() as status:
            yield lambda stage: status.update(stage) if status else self.say(f"[dim]{stage} ...[/]")
        self.say(f"[dim]compiled in {time.perf_counter() - began:.1f} s[/]")

    def result(self, ok: bool, **values: Any) -> None:
        """The last line of stdout under --json."""
        if self.json and rank() == 0:
            sys.stdout.write(json.dumps({"command": self.command, "ok": ok, **values}) + "\n")
            sys.stdout.flush()


def rank() -> int:
    """This process's rank under torchrun, else 0."""
    return int(os.environ.get("RANK", "0"))


# commands


@app.command()
def run(
    model: Model, mesh: MeshText = "", plan: PlanText = "", optimizer: OptimizerOption = "adamw", lr: Lr = None,
    local_batch: LocalBatch = None, batch: GlobalBatch = None, seq: Seq = 64, dtype: DtypeOption = "float32",
    accumulate: Accumulate = 1, clip_grad_norm: Clip = None, seed: Seed = 0, json: Json = False, debug: Debug = False,
    steps: Annotated[int, typer.Option("--steps", min=1, help="train until this step")] = 20,
    checkpoint: Annotated[str, typer.Option("--checkpoint", metavar="DIR", help="resume from it, save to it")] = "",
    save_every: Annotated[int, typer.Option("--save-every", min=0, help="steps between saves; 0: at the end")] = 0,
) -> None:  # fmt: skip
    """Train MODEL on virtual devices in this process, or under torchrun on its processes."""
    job = Job(
        model, mesh, plan, optimizer, lr, local_batch, batch, seq, dtype, accumulate, clip_grad_norm, seed, json, debug
    )
    _guarded(Screen("run", json), job, lambda screen: _run(screen, job, steps, checkpoint, save_every))


@app.command()
def check(
    model: Model, mesh: MeshText = "", plan: PlanText = "", optimizer: OptimizerOption = "adamw", lr: Lr = None,
    local_batch: LocalBatch = None, batch: GlobalBatch = None, seq: Seq = 64, dtype: DtypeOption = "float32",
    accumulate: Accumulate = 1, clip_grad_norm: Clip = None, seed: Seed = 0, json: Json = False, debug: Debug = False,
    steps: Annotated[int, typer.Option("--steps", min=1, help="steps to compare")] = CHECK_STEPS,
) -> None:  # fmt: skip
    """Prove that MODEL's program on a mesh is complete and free of deadlock, and compare it with one device, and that
    with eager PyTorch. Exit code 0 when all holds."""
    job = Job(
        model, mesh, plan, optimizer, lr, local_batch, batch, seq, dtype, accumulate, clip_grad_norm, seed, json, debug
    )
    _guarded(Screen("check", json), job, lambda screen: _check(screen, job, steps))


@app.command("plan")
def plan_command(
    model: Model, mesh: MeshText = "", plan: PlanText = "", optimizer: OptimizerOption = "adamw", lr: Lr = None,
    local_batch: LocalBatch = None, batch: GlobalBatch = None, seq: Seq = 64, dtype: DtypeOption = "float32",
    accumulate: Accumulate = 1, clip_grad_norm: Clip = None, seed: Seed = 0, json: Json = False, debug: Debug = False,
    show_all: Annotated[bool, typer.Option("--all", help="show each twin of repeated layers")] = False,
) -> None:  # fmt: skip
    """Show every move of data in one step, without running it: no memory is taken for an hf: model."""
    job = Job(
        model, mesh, plan, optimizer, lr, local_batch, batch, seq, dtype, accumulate, clip_grad_norm, seed, json, debug
    )
    _guarded(Screen("plan", json), job, lambda screen: _plan(screen, job, show_all))


def _guarded(screen: Screen, job: Job, body: Callable[[Screen], int]) -> None:
    """Run a command and leave with its exit code."""
    try:
        with _cluster():
            code = body(screen)
    except KeyboardInterrupt:
        screen.say("[yellow]interrupted[/]")
        screen.result(False, error={"kind": "KeyboardInterrupt", "what": "interrupted"})
        code = 130
    except MeshweaveError as error:
        if job.debug:
            Console(stderr=True).print_exception()
        code = 1 if isinstance(error, (StepError, VerifyError)) else 2
        _show_error(screen, error)
    raise typer.Exit(code)


def _show_error(screen: Screen, error: MeshweaveError) -> None:
    title, _, rest = str(error).partition("\n")
    prefix = f"rank {rank()}: " if rank() else ""
    console = Console(stderr=True, highlight=False)
    console.print(
        f"{prefix}[bold red]error:[/] {escape(title)}" + (f"\n{escape(rest)}" if rest else ""), soft_wrap=True
    )
    parts = {name: getattr(error, name) for name in ("what", "where", "got", "expected", "hint")}
    screen.result(False, error={"kind": type(error).__name__, **parts})


def _cluster() -> AbstractContextManager[None]:
    """Under torchrun: this process's place among the others, for as long as the context lasts."""
    return _joined() if "RANK" in os.environ and "WORLD_SIZE" in os.environ else nullcontext()


@contextmanager
def _joined() -> Iterator[None]:
    from meshweave.runtime import cluster

    cluster.init_from_env()
    yield
    cluster.shutdown()  # not after an error: others may be waiting for this rank, and torchrun ends them


def _compiled(job: Job, source: Source, mesh: Mesh, plan: Plan | None, optimizer: Any, stage: Stage) -> Program:
    spec = read_optimizer(optimizer, source.model)
    return build_program(
        source.model, source.loss, source.batch, spec, mesh, plan, AlphaBeta(), job.options, progress=stage
    )


def _plan(screen: Screen, job: Job, show_all: bool) -> int:
    mesh, plan = Mesh(job.mesh), parse_plan(job.plan)
    source = job.load(mesh, plan, "meta" if job.model.startswith("hf:") else "cpu")
    with screen.stages() as stage:
        program = _compiled(job, source, mesh, plan, job.make_optimizer(source.model), stage)
    rows: Sequence[MoveRow] = move_rows(program.placed, program.mesh)
    screen.out.print(tables.moves_table(rows, show_all=show_all))
    screen.out.print(tables.totals_table(rows))
    folded = tables.fold(rows, twins=not show_all)
    shown = [r.row.as_dict() | {"name": r.name or r.row.name, "count": r.count} for r in folded]
    sums, received = [total.as_dict() for total in tables.totals(rows)], sum(r.bytes_received for r in rows)
    screen.result(True, mesh=str(mesh), num_moves=len(rows), bytes_received=received, moves=shown, totals=sums)
    return 0


def _check(screen: Screen, job: Job, steps: int) -> int:
    mesh, plan = Mesh(job.mesh), parse_plan(job.plan)
    source = job.load(mesh, plan)
    lr = None if job.optimizer == "sgd" else CHECK_LR

    def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = job.load(mesh, plan).model
        return model, job.make_optimizer(model, lr)

    def compiler(model: nn.Module, optimizer: torch.optim.Optimizer, on: Mesh, planned: Plan | None) -> TrainStep:
        fresh = Source(source.name, model, source.loss, source.batch, source.make_batch, 0, "")
        program = _compiled(job, fresh, on, planned, optimizer, lambda stage: None)
        world = make_world(on) if on is mesh else LocalWorld(on)
        return TrainStep(program, model, optimizer, world, Settings(job.accumulate, job.seed, keep_gradients=True))

    def split(batch: Any) -> list[Any]:
        return Batch.of(batch).micros(job.accumulate)

    recipe, batches = Recipe(source.loss, split, job.clip_grad_norm, job.autocast, job.seed), source.make_batch
    with screen.stages() as stage:
        program = _compiled(job, source, mesh, plan, job.make_optimizer(source.model, lr), stage)
        stage("prove")
        complete, deadlock = check_complete(program.placed, program.roles), check_deadlock(program.roles)
        report = check_numerics(make_model, batches, recipe, mesh, plan, compiler, steps=steps, progress=stage)
    screen.say(tables.proof_text(complete, deadlock))
    _show_check(screen, report)
    screen.result(**report.as_dict(), complete=asdict(complete), deadlock=asdict(deadlock))
    return 0 if report.ok else 1


def _show_check(screen: Screen, report: NumericsReport) -> None:
    screen.out.print(tables.numerics_table(report))
    if report.failed:
        screen.say(f"\n{len(report.failed)} of {len(report.errors)} comparisons failed, the worst first:")
        screen.out.print(tables.failures_table(report.failed[:20]))
    if report.within_rounding:
        screen.say(
            f"{len(report.within_rounding)} tensors are beyond the bound, as one device is: nothing but rounding"
        )
    verdict = "[green]equal[/]" if report.ok else "[bold red]NOT equal[/]"
    where = f"mesh {report.mesh}" if report.mesh else "one device"
    screen.say(f"{verdict}: {len(report.errors)} comparisons over {report.num_steps} steps on {where}")


def _run(screen: Screen, job: Job, steps: int, checkpoint: str, save_every: int) -> int:
    mesh, plan = Mesh(job.mesh), parse_plan(job.plan)
    world = make_world(mesh)
    source = job.load(mesh, plan)
    optimizer = job.make_optimizer(source.model)
    with screen.stages() as stage:
        program = _compiled(job, source, mesh, plan, optimizer, stage)
        step = TrainStep(program, source.model, optimizer, world, Settings(job.accumulate, job.seed))
    if checkpoint and Path(checkpoint).exists():
        step.load(checkpoint)
        screen.say(f"continuing from {checkpoint} after step {step.num_steps}")
    first = step.num_steps
    if first >= steps:
        screen.say(f"nothing to do: the checkpoint is of step {first}, and --steps is {steps}")
    losses, rate = _train(screen, step, source, steps, checkpoint, save_every)
    screen.result(True, mesh=str(mesh), num_devices=mesh.num_devices, first_step=first, num_steps=step.num_steps,
                  losses=losses, loss=losses[-1] if losses else None, checkpoint=checkpoint or None,
                  **{f"{source.unit}_per_s": rate})  # fmt: skip
    return 0


def _train(
    screen: Screen, step: TrainStep, source: Source, steps: int, checkpoint: str, save_every: int
) -> tuple[list[float], float | None]:
    """Losses of the steps and tokens per second, without the first step, which warms up."""
    losses: list[float] = []
    saved = step.num_steps
    shown_every = max(1, (steps - step.num_steps) // 20)
    began = time.perf_counter()
    with _interruptible(step) as check_interrupt:
        try:
            for i in range(step.num_steps, steps):
                losses.append(step(source.make_batch(i)))
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


def _rate(losses: Sequence[float], source: Source, seconds: float) -> float | None:
    return (len(losses) - 1) * source.tokens_per_batch / seconds if len(losses) > 1 and seconds > 0 else None


def _progress_line(number: int, steps: int, losses: Sequence[float], source: Source, seconds: float) -> str:
    rate = _rate(losses, source, seconds)
    shown = f"  {rate:,.0f} {source.unit}/s" if rate else ""
    return f"step {number:>{len(str(steps))}}/{steps}  loss {losses[-1]:.4f}{shown}"


@contextmanager
def _interruptible(step: TrainStep) -> Iterator[Callable[[], None]]:
    """Ctrl-C where several processes run is noted, and `check_interrupt()` stops all of them after the same step.

    In one process Ctrl-C interrupts at once, as ever; the step itself keeps an update whole.
    """
    if not step.session.world.is_distributed:
        yield lambda: None
        return
    pressed = torch.zeros((), dtype=torch.int32, device=step.session.world.device)
    before = signal.signal(signal.SIGINT, lambda *_: pressed.fill_(1) and None)

    def check_interrupt() -> None:
        with step.session.world.guard():  # a rank that is gone is told as everywhere
            dist.all_reduce(pressed, dist.ReduceOp.MAX)
        if pressed.item():
            raise KeyboardInterrupt

    try:
        yield check_interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def main() -> None:
    """The entry point of the command `meshweave`."""
    app()
