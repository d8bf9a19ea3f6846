"""The options of commands that compile a MODEL, and the compilation."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import typer
from torch import nn

from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.sources import Source, load_source
from meshweave.capture.step import CaptureOptions, Precision, StepSource
from meshweave.cli.command import Options
from meshweave.cli.costs import parse_costs
from meshweave.cli.screen import Screen, Stage
from meshweave.errors import MeshweaveError
from meshweave.ir.mesh import Mesh
from meshweave.passes import Pipeline, pipeline_of
from meshweave.program import Program
from meshweave.regions.compiler import BackendName
from meshweave.runtime.session import RunOptions, SessionSettings
from meshweave.sharding.plan_text import data_parallel_size, parse_plan
from meshweave.sharding.plans import Plan

Dtype = Literal["float32", "bfloat16", "float64"]
OptimizerName = Literal["sgd", "adam", "adamw"]
ParamDtype = Literal["bfloat16", "float32"]

_CAST = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_LR = {"sgd": 1e-2, "adam": 1e-3, "adamw": 1e-3}
_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions(Options):
    """A training step of a MODEL, except its mesh and plan."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="file.py:factory, or hf:MODEL_TYPE?field=value&...")]
    optimizer: Annotated[OptimizerName, typer.Option("--optimizer", help="sgd, adam or adamw")] = "adamw"
    lr: Annotated[float | None, typer.Option("--lr", min=0, help="learning rate; by default the optimizer's")] = None
    local_batch: Annotated[
        int | None, typer.Option("--local-batch", min=1, help="batch size per data-parallel device")
    ] = None
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="global batch size, instead of --local-batch")] = (
        None
    )
    seq: Annotated[int, typer.Option("--seq", min=2, help="tokens per sequence")] = 64
    dtype: Annotated[Dtype, typer.Option("--dtype", help="bfloat16 is autocast: parameters stay float32")] = "float32"
    accumulate: Annotated[int, typer.Option("--accumulate", min=1, help="microbatches per step")] = 1
    clip_grad_norm: Annotated[
        float | None, typer.Option("--clip-grad-norm", help="clip gradients by their global norm")
    ] = None
    param_dtype: Annotated[ParamDtype | None, typer.Option("--param-dtype", help="cast parameters before forward")] = (
        None
    )
    passes: Annotated[
        str,
        typer.Option("--passes", help="passes over the step, such as default or overlap,split=2,recompute=full"),
    ] = "none"
    backend: Annotated[
        BackendName,
        typer.Option("--backend", help="backend of the compute between communications: eager, inductor or auto"),
    ] = "auto"
    seed: Annotated[int, typer.Option("--seed", help="random seed of parameters, data and dropout")] = 0
    memory_cap: Annotated[
        str,
        typer.Option("--memory-cap", help="memory cap of a device, such as 40GB; implies the pass overlap"),
    ] = ""

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.dtype == "bfloat16" else None

    @property
    def cast(self) -> torch.dtype | None:
        """The dtype that parameters are cast to."""
        if self.param_dtype is not None and self.dtype == "float64":
            raise MeshweaveError(
                "--dtype float64 and --param-dtype contradict each other", hint="leave one of them out"
            )
        return None if self.param_dtype is None else _CAST[self.param_dtype]

    @property
    def capture(self) -> CaptureOptions:
        return CaptureOptions(
            clip_grad_norm=self.clip_grad_norm,
            accumulate=self.accumulate,
            seed=self.seed,
            precision=Precision(autocast=self.autocast, param_dtype=self.cast),
        )

    @property
    def pass_pipeline(self) -> Pipeline:
        """The passes over the step."""
        return pipeline_of(self.passes, memory_cap_bytes=parse_bytes(self.memory_cap) if self.memory_cap else None)

    def settings(self, **changes: Any) -> SessionSettings:
        run = RunOptions(**{"backend": self.backend, **changes})
        return SessionSettings(accumulate=self.accumulate, seed=self.seed, run=run)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshStepOptions(StepOptions):
    """A step on a mesh: what run, check and plan share, and what every program is compiled from."""

    mesh: Annotated[str, typer.Option("--mesh", help="named axes, such as dp=2,tp=2; empty for one device")] = ""
    plan: Annotated[str, typer.Option("--plan", help="scheme:axis+scheme:axis, or a TOML or JSON file of globs")] = ""
    profile: Annotated[
        str,
        typer.Option(
            "--profile", help="costs for choosing moves: a machine such as h100, its file, or alpha=s,axis=B/s"
        ),
    ] = ""


def compiled(
    job: MeshStepOptions, source: Source, mesh: Mesh, plan: Plan | None, optimizer: Any, stage: Stage
) -> Program:
    """The program of a job, its moves chosen by the job's costs."""
    spec = read_optimizer(optimizer, source.model)
    costs = parse_costs(job.profile, mesh.axis_names)
    return build_program(
        StepSource(source.model, source.loss),
        source.batch,
        spec,
        Target(mesh, plan, costs),
        job.capture,
        job.pass_pipeline,
        stage,
    )


def compiled_unrun(screen: Screen, job: MeshStepOptions) -> Program:
    """The program of a job that will not run: an hf: model takes no memory."""
    mesh, plan = Mesh(job.mesh), parse_plan(job.plan)
    source = job.load(mesh, plan, "meta" if job.model.startswith("hf:") else "cpu")
    with screen.stages() as stage:
        return compiled(job, source, mesh, plan, job.make_optimizer(source.model), stage)


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str, option: str = "--memory-cap") -> int:
    """A size in bytes: 40e9, 40GB or 37.5GiB. Raises MeshweaveError for other text."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    try:
        return int(float(match.group(1)) * _UNITS[match.group(2).upper()])  # type: ignore[union-attr]
    except (AttributeError, KeyError, ValueError, OverflowError):
        raise MeshweaveError(
            "not a size", where=option, got=repr(text), expected="something like 40GB, 37.5GiB or 40e9"
        ) from None
