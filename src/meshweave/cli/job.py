"""The options of commands that compile a MODEL, and the compilation."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

import torch
from torch import nn

from meshweave.build import Target, build_program
from meshweave.capture.batch import shapes_text
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, Precision, StepSource
from meshweave.cli.command import Options, argument, option
from meshweave.cli.costs import parse_costs, parse_machine
from meshweave.cli.hugging_face import is_configuration
from meshweave.cli.named_models import named_models
from meshweave.cli.screen import Screen, Stage
from meshweave.cli.sources import Source, load_source
from meshweave.cost.hardware import Costs, MachineProfile, load_profile, profile_names
from meshweave.cost.simulate.frameworks import FRAMEWORKS, MESHWEAVE, framework_named
from meshweave.cost.simulate.kernels import Fusion
from meshweave.errors import MeshweaveError
from meshweave.ir.mesh import Mesh
from meshweave.passes import PassList, pass_list_of
from meshweave.pipeline import PipelineChoice
from meshweave.place.plan_text import data_parallel_size, parse_plan
from meshweave.place.plans import Plan
from meshweave.program import Program
from meshweave.runtime.regions.compiler import BackendName
from meshweave.runtime.session import RunOptions, SessionSettings
from meshweave.whatif import precision_in

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
OptimizerName = Literal["sgd", "adam", "adamw"]
ParamDtype = Literal["bfloat16", "float16", "float32"]
FrameworkName = Literal["meshweave", "torchtitan", "megatron", "nemo", "fsdp1", "deepspeed", "nanotron"]
AccumulateIn = Literal["auto", "whole", "shards"]

_AXES = ("dp", "fsdp", "tp", "cp", "pp", "ep")  # with a usual meaning
# By name: how an optimizer is made, and its learning rate.
_OPTIMIZERS: Mapping[str, tuple[Callable[..., torch.optim.Optimizer], float]] = {
    "sgd": (lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9), 1e-2),
    "adam": (torch.optim.Adam, 1e-3),
    "adamw": (torch.optim.AdamW, 1e-3),
}


def _models_like(incomplete: str) -> list[str]:
    """Names of models, for shell completion."""
    return [name for name in named_models() if name.startswith(incomplete)]


def _profiles_like(incomplete: str) -> list[str]:
    return [name for name in profile_names() if name.startswith(incomplete)]


def _count_text(number: int) -> str:
    """A large number in four digits: 8.030 B, 124.4 M."""
    for unit, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return f"{number:,}"


def meshes_like(incomplete: str) -> list[str]:
    """A mesh with its last axis completed."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{axis}=" for axis in _AXES if axis.startswith(last)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions(Options):
    """A training step of a MODEL, except its mesh and plan."""

    model: str = argument(
        "MODEL",
        "a name such as llama3-8b, hf:ORG/NAME, a folder with a config.json, hf:MODEL_TYPE (small), each with "
        "?field=value&...; or file.py:factory",
        autocompletion=_models_like,
    )
    optimizer: OptimizerName = option("adamw", "sgd, adam or adamw")
    lr: float | None = option(None, "learning rate; by default the optimizer's", min=0)
    local_batch: int | None = option(None, "batch size per data-parallel device", min=1)
    batch: int | None = option(None, "global batch size, instead of --local-batch", min=1)
    seq: int | None = option(64, "tokens per sequence", min=2)
    dtype: Dtype = option("float32", "bfloat16 and float16 are autocast: parameters stay float32")
    param_dtype: ParamDtype | None = option(None, "cast parameters before forward")
    accumulate: int = option(1, "microbatches per step", min=1, flags=("--accumulate", "--microbatches"))
    pipeline: str = option("", "how stages take the microbatches: 1f1b, interleaved, zbv, ... or a .csv file")
    clip_grad_norm: float | None = option(None, "clip gradients by their global norm")
    passes: str = option("none", "passes over the step, such as default or overlap,split=2,recompute=full")
    memory_cap: str = option("", "memory cap of a device, such as 40GB; implies the pass overlap")
    accumulate_in: AccumulateIn = option("auto", "where gradients of microbatches are added up: whole or in shards")
    backend: BackendName = option("auto", "of the compute between communications: eager, inductor, background or auto")
    seed: int = option(0, "random seed of parameters, data and dropout")
    verbose: bool = option(False, "also show stages and passes", flags=("--verbose", "-v"))

    @property
    def is_verbose(self) -> bool:
        return self.verbose

    @property
    def model_name(self) -> str:
        """MODEL without the fields that it changes."""
        return self.model.partition("?")[0]

    @property
    def precision(self) -> Precision:
        if self.param_dtype is not None and self.dtype == "float64":
            raise MeshweaveError(
                "--dtype float64 and --param-dtype contradict each other", hint="leave one of them out"
            )
        return Precision(
            autocast=getattr(torch, self.dtype) if self.dtype in ("bfloat16", "float16") else None,
            param_dtype=None if self.param_dtype is None else getattr(torch, self.param_dtype),
            accumulate_in=self.accumulate_in,
        )

    @property
    def capture_options(self) -> CaptureOptions:
        return CaptureOptions(
            clip_grad_norm=self.clip_grad_norm,
            accumulate=self.accumulate,
            seed=self.seed,
            precision=self.precision,
            pipeline=PipelineChoice.of(self.pipeline or None),
        )

    @property
    def pass_list(self) -> PassList:
        return pass_list_of(self.passes, memory_cap_bytes=parse_bytes(self.memory_cap) if self.memory_cap else None)

    def settings(self, **changes: Any) -> SessionSettings:
        """The settings of a session, with other values of some `RunOptions`."""
        run = RunOptions(**{"backend": self.backend, **changes})
        return SessionSettings(accumulate=self.accumulate, seed=self.seed, run=run)

    def load(self, mesh: Mesh, plan: Plan | None, device: str = "cpu") -> Source:
        if self.batch is not None and self.local_batch is not None:
            raise MeshweaveError("--batch and --local-batch say the same thing", hint="leave one of them out")
        batch = self.batch
        if self.local_batch is not None or (batch is None and is_configuration(self.model)):
            batch = (self.local_batch or 2) * self.accumulate * data_parallel_size(mesh, plan)
        dtype = torch.float64 if self.dtype == "float64" else torch.float32
        return load_source(self.model, batch=batch, seq=self.seq, dtype=dtype, seed=self.seed, device=device)

    def load_unrun(self, mesh: Mesh, plan: Plan | None) -> Source:
        """For a step that will not run: a model of transformers takes no memory."""
        return self.load(mesh, plan, "meta" if is_configuration(self.model) else "cpu")

    def make_optimizer(self, model: nn.Module, lr: float | None = None) -> torch.optim.Optimizer:
        make, usual = _OPTIMIZERS[self.optimizer]
        return make(model.parameters(), lr=next(rate for rate in (self.lr, lr, usual) if rate is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshStepOptions(StepOptions):
    """A step on a mesh: what run, check and plan share, and what every program is compiled from."""

    mesh: str = option("", "named axes, such as dp=2,tp=2; empty for one device", autocompletion=meshes_like)
    plan: str = option("", "scheme:axis+scheme:axis, or a TOML or JSON file of globs")
    profile: str = option("", "costs for choosing moves: a machine such as h100, its file, or alpha=s,axis=B/s")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions(StepOptions):
    """The machine of a simulated step. It need not be present. The defaults are those of training."""

    seq: int | None = option(None, "tokens per sequence; by default the model's context, at most 8192", min=2)
    dtype: Dtype = option("bfloat16", "bfloat16 and float16 are autocast: parameters stay float32")
    passes: str = option("default", "passes over the step, such as none or overlap,split=2,recompute=full")
    profile: str = option(
        "h100", f"machine: {', '.join(profile_names())}, or a file (profile.toml)", autocompletion=_profiles_like
    )
    scale: str = option("", "what-if factors of the machine: net_bandwidth=2,attention=cudnn")
    fusion: Fusion | None = option(None, "what runs as a single kernel; by default as the machine profile says")
    framework: FrameworkName = option(
        "meshweave", f"predict another framework's step: {', '.join(FRAMEWORKS)}", flags=("--as",)
    )

    @property
    def machine(self) -> MachineProfile:
        return parse_machine(self.profile, self.scale, self.framework)

    def as_framework(self) -> Self:
        """With the passes of the framework, beside those asked for."""
        return replace(self, passes=framework_named(self.framework).passes_with(self.passes))

    def compiled(self, screen: Screen, mesh: str, plan: str) -> Program:
        """The program of the step on a mesh; moves are chosen by the unscaled profile, with the scaled memory."""
        shared = {each.name: getattr(self, each.name) for each in fields(StepOptions)}
        precision = precision_in(framework_named(self.framework), self.precision, parse_plan(plan))
        shared["accumulate_in"] = precision.accumulate_in
        job = MeshStepOptions(mesh=mesh, plan=plan, profile=self.profile, **shared)
        return compiled_unrun(screen, job, self.costs_on(Mesh(mesh)))

    def costs_on(self, mesh: Mesh) -> MachineProfile:
        """The costs by which moves are chosen: those of the unscaled machine, with the scaled memory."""
        machine = self.machine
        machine.check_mesh(mesh)
        costs = load_profile(self.profile)
        if machine.usable_bytes != costs.usable_bytes:
            costs = costs.scaled(memory_bytes=machine.memory.bytes)
        return costs

    def with_batch(self, meshes: Sequence[tuple[str, str]]) -> Self:
        """The same with a global batch for all meshes and plans: unless stated, of a Hugging Face model, one sequence
        for each data-parallel device and microbatch of the mesh that has most of them."""
        if not is_configuration(self.model) or self.batch is not None or self.local_batch is not None:
            return self
        most = max(data_parallel_size(Mesh(mesh), parse_plan(plan)) for mesh, plan in meshes)
        return replace(self, batch=most * self.accumulate)

    def assumptions(self, program: Program, num_parameters: int | None = None) -> str:
        """What a simulation assumes of the training, in a line. `num_parameters`: of the model, if the program is of
        one with fewer layers."""
        batch = {item.name: item.spec.shape for item in program.captured.inputs if item.kind == "batch"}
        params = (item.spec.shape for item in program.captured.inputs if item.kind == "param")
        num = sum(map(math.prod, params)) if num_parameters is None else num_parameters
        changed = self.model.partition("?")[2].replace("&", ", ")
        model = f"{_count_text(num)} parameters{f' ({changed})' if changed else ''}"
        dtype = f"parameters in {self.param_dtype}" if self.param_dtype else f"{self.dtype} compute, float32 parameters"
        times = f" in each of {self.accumulate} microbatches" if self.accumulate > 1 else ""
        recompute = f", recompute {program.recompute}" if program.recompute != "none" else ""
        return (
            f"assumed: {model}; global batch {shapes_text(batch.items())}{times}; {dtype}; {self.optimizer}; "
            f"passes {self.passes}{recompute}{f'; as {self.framework}' if self.framework != MESHWEAVE else ''}"
        )


def compiled(
    job: MeshStepOptions,
    source: Source,
    mesh: Mesh,
    plan: Plan | None,
    optimizer: Any,
    stage: Stage,
    costs: Costs | None = None,
) -> Program:
    """The program of a job, its moves chosen by `costs`, by default the job's."""
    return build_program(
        StepSource(source.model, source.loss),
        source.batch,
        read_optimizer(optimizer, source.model),
        Target(mesh, plan, costs or parse_costs(job.profile, mesh.axis_names)),
        job.capture_options,
        job.pass_list,
        stage,
    )


def compiled_unrun(screen: Screen, job: MeshStepOptions, costs: Costs | None = None) -> Program:
    """The program of a job that will not run."""
    mesh, plan = Mesh(job.mesh), parse_plan(job.plan)
    source = job.load_unrun(mesh, plan)
    with screen.stages(job.mesh or "one device") as stage:
        return compiled(job, source, mesh, plan, job.make_optimizer(source.model), stage, costs)


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str, where: str = "--memory-cap", words: str = "") -> int:
    """A size in bytes: 40e9, 40GB or 37.5GiB. Raises MeshweaveError for other text, which names the `words` that may
    stand in place of a size."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", text, re.IGNORECASE)
    try:
        return int(float(match.group(1)) * _UNITS[match.group(2).upper()])  # type: ignore[union-attr]
    except (AttributeError, KeyError, ValueError, OverflowError):
        raise MeshweaveError(
            "not a size", where=where, got=repr(text), expected=f"{words}something like 40GB, 37.5GiB or 40e9"
        ) from None
