"""The public entry point: compiles a model, a mesh and a plan into a training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshweave.build import Target, build_program
from meshweave.calibrate import costs_for
from meshweave.capture.batch import Batch, call_model, listed_batches
from meshweave.capture.guards import check_autocast, check_loss, check_new_tensors, check_not_compiled, check_shapes
from meshweave.capture.optimizer_several import optimizer_of
from meshweave.capture.optimizers import OptimizerSpec, read_optimizer
from meshweave.capture.step import CaptureOptions, Part, StepSource
from meshweave.errors import PlanError
from meshweave.hardware import Costs, MachineProfile
from meshweave.ir.mesh import Mesh
from meshweave.passes import Budget, Pipeline, Recompute, pass_list, pipeline_of
from meshweave.passes.options import PassesArgument
from meshweave.program import Program
from meshweave.regions.compiler import checked_backend
from meshweave.rings import DecomposeOptions
from meshweave.rows import SplitOptions
from meshweave.runtime.cluster import make_world, numbers_of_all
from meshweave.runtime.fuse import compiles_for_gpu, prepare_compiler
from meshweave.runtime.identity import argument_texts, program_texts
from meshweave.runtime.replaced import follow_replaced
from meshweave.runtime.rows import batch_shard, global_example
from meshweave.runtime.session import SessionSettings
from meshweave.runtime.together import together
from meshweave.runtime.weights import align_weights
from meshweave.runtime.world import World, home_of
from meshweave.schedule import OverlapOptions
from meshweave.sharding.plan_text import plan_of
from meshweave.sharding.plans import Plan
from meshweave.sharding.sums import AccumulateIn
from meshweave.train_step import TrainStep
from meshweave.variants import Build, ShapeOptions

Loss = Callable[[Any, Any], Tensor]
# Ranks compare these arguments in another form than by value; `progress` may differ. All others have to be equal.
_IN_OTHER_FORM = frozenset(
    ["model", "loss", "example", "optimizer", "mesh", "plan", "profile", "forward", "shapes", "device", "progress"]
)


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """The arguments of `compile`; its docstring says what they mean."""

    model: nn.Module
    loss: Loss
    example: Any
    optimizer: torch.optim.Optimizer | None
    mesh: Mesh | str | Mapping[str, int]
    plan: Plan | str | None
    profile: Costs | str | None
    memory_cap_bytes: int | None
    clip_grad_norm: float | None
    accumulate: int
    accumulate_in: AccumulateIn
    autocast: torch.dtype | None
    reduce_after_cast: bool
    recompute: str | None
    param_dtype: torch.dtype | None
    backend: str
    cuda_graphs: bool
    passes: PassesArgument
    passes_seconds: float
    prefetch: int
    overlap: bool | OverlapOptions | None
    decompose: bool | DecomposeOptions | None
    split: bool | int | SplitOptions | None
    seed: int
    forward: Callable[[nn.Module, Any], Any]
    keep_gradients: bool
    check_finite: bool
    shapes: Sequence[Any]
    max_programs: int
    pad: Mapping[str, float] | None
    weights: str | None
    device: torch.device | str | None
    batch: Literal["global", "local"]
    on_different_weights: Literal["broadcast", "error"]
    progress: Callable[[str], None]

    def checked(self) -> OptimizerSpec | None:
        """The optimizer to capture. Raises MeshweaveError for arguments that do not define a step."""
        check_not_compiled(self.model)
        check_shapes(self.model)
        check_loss(self.loss)
        check_seconds(self.passes_seconds)
        if self.optimizer is None and self.clip_grad_norm is not None:
            raise PlanError("clip_grad_norm needs an optimizer", hint="pass optimizer=")
        if self.optimizer is not None:
            follow_replaced(self.optimizer, self.model.parameters())
        spec = None if self.optimizer is None else read_optimizer(self.optimizer, self.model)
        check_autocast(self.autocast)
        return spec

    @property
    def capture(self) -> CaptureOptions:
        return CaptureOptions(
            self.clip_grad_norm,
            self.accumulate,
            self.autocast,
            self.seed,
            self.reduce_after_cast,
            self.param_dtype,
            self.accumulate_in,
        )

    @property
    def keeps_gradients(self) -> bool:
        return self.keep_gradients or self.optimizer is None

    @property
    def session(self) -> SessionSettings:
        keeps, backend = self.keeps_gradients, checked_backend(self.backend)
        return SessionSettings(
            self.accumulate, self.seed, keeps, self.check_finite, backend, self.weights, self.cuda_graphs
        )

    @property
    def pipeline(self) -> Pipeline:
        return pipeline_of(
            self.passes,
            recompute=self.recompute or "none",
            prefetch=self.prefetch,
            split=self.split,
            decompose=self.decompose,
            overlap=self.overlap,
            memory_cap_bytes=self.memory_cap_bytes,
            keeps_gradients=self.keeps_gradients,
        )

    @property
    def leaves_passes_open(self) -> bool:
        """Whether `passes` asks for no pass that is chosen by gain."""
        return self.passes is None and not self.prefetch and self.overlap is self.decompose is self.split is None

    def texts(self, mesh: Mesh, plan: Plan | None) -> Any:
        """The options on which all ranks must agree, as text."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _IN_OTHER_FORM}
        arguments = {**values, "device": str(self.device).partition(":")[0]}
        options = {
            "capture": self.capture,
            "passes": self.pipeline,
            "session": self.session,
            "argument": arguments,
        }
        same: dict[str, Any] = {"mesh": (mesh, mesh.devices), "plan": plan, "profile": self.profile, "options": options}
        calls = {"loss": self.loss, "forward": self.forward}
        shapes = {f"shapes[{index}]": shape for index, shape in enumerate(self.shapes)}
        return argument_texts(self.model, self.optimizer, {"example batch": self.example, **shapes}, calls, same)

    def build(self, spec: OptimizerSpec | None, target: Target, pipeline: Pipeline, costs_from: str) -> Build:
        """A function that compiles a program for a batch."""
        source = StepSource(self.model, self.loss, self.forward)

        def build(example: Any, part: Part, count: int, like: Program | None) -> Program:
            options = replace(self.capture, accumulate=count, part=part)
            update = spec if part == "train" else None
            program = build_program(source, example, update, target, options, pipeline, self.progress, like)
            return replace(program, costs=target.costs, costs_from=costs_from)

        return build

    def compiled(self) -> TrainStep:
        """The compiled step, with its state on the current world."""
        check_new_tensors()
        with together(self.device) as ranks:
            mesh, plan = Mesh.of(self.mesh), plan_of(self.plan)
            spec = self.checked()
            ranks.agree(self.texts(mesh, plan))
            world = make_world(mesh, self.device, home_of(self.model))
            align_weights(self.model, self.optimizer, ranks, world, self.on_different_weights)
            shard = batch_shard(mesh, plan)[0]
            example = global_example(self.example, self.batch, shard)
            with world.guard():  # all ranks measure and choose together
                numbers_of_all(world, 0)  # connects them: later a rank that waits learns of the failure of another
                is_eager = self.session.backend == "eager"
                chosen = costs_for(self.profile, world, self.progress, is_eager=is_eager)
                prepare_compiler(self.session.backend, world, sum(x.numel() for x in self.model.parameters()))
                pipeline = self.pipeline
                is_open = self.recompute is None and self.passes in (None, "default")
                if is_open and compiles_for_gpu(self.session.backend, world):
                    pipeline = pipeline.having(Recompute("pointwise", is_optional=True))
                if self.leaves_passes_open:
                    pipeline = by_default(pipeline, world, chosen.costs, self.passes_seconds)
                if world.is_distributed:
                    pipeline = replace(pipeline, recalls=partial(numbers_of_all, world))
                build = self.build(spec, Target(mesh, plan, chosen.costs), pipeline, chosen.origin)
                program = build(example, "train", self.accumulate, None)
                self.progress("start")
            ranks.agree(program_texts(program.captured, program.roles))
            shapes = ShapeOptions(build, self.max_programs, self.pad or {})
            step = TrainStep(
                program,
                self.model,
                self.optimizer,
                world,
                self.session,
                shapes,
                again=replace(self, weights=None).compiled,
            )
            for shape in self.shapes:
                step.variants.prepare(Batch.of(global_example(shape, self.batch, shard)))
            step.variants.is_local = True if self.batch == "local" and world.is_distributed else None
            return step


# Messages between chunks suffer more from other load on the machine than the simulator predicts (docs/overlap.md), and
# measured costs vary by some percent from day to day. On a quiet machine a step simulated 9% faster (rows in chunks) or
# 7% (rings) measured 4% and 6% faster: tensor parallelism, batch 4, 2 processes, Gloo at 1 Gbit/s.
_LEAST_GAIN = 0.08


def check_seconds(passes_seconds: float) -> None:
    """Raise PlanError for a time budget that is no number."""
    if not isinstance(passes_seconds, Real) or math.isnan(passes_seconds):
        raise PlanError(
            "passes_seconds is not a number of seconds",
            got=repr(passes_seconds),
            expected="0 for no further variant, float('inf') for all",
        )


def by_default(pipeline: Pipeline, world: World, costs: Costs, seconds: float) -> Pipeline:
    """The pipeline of a step whose caller named no pass that is chosen by gain: "default" within a time budget if there
    is real communication with known costs, else unchanged. Rewritten sums round differently, so a rewrite has to gain
    at least `_LEAST_GAIN`."""
    if not world.is_distributed or world.mesh.num_devices == 1 or not isinstance(costs, MachineProfile):
        return pipeline
    own, gathered = {each_pass.name for each_pass in pipeline.passes}, partial(numbers_of_all, world)
    usual = tuple(each_pass for each_pass in pass_list("default") if each_pass.name not in own)
    return replace(
        pipeline,
        passes=(*pipeline.passes, *usual),
        least_gain=_LEAST_GAIN,
        is_default=True,
        budget=Budget(seconds, gathered),
    )


def compile(
    model: nn.Module,
    *,
    loss: Loss,
    example: Any,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    mesh: Mesh | str | Mapping[str, int],
    plan: Plan | str | None = None,
    profile: Costs | str | None = None,
    memory_cap_bytes: int | None = None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    accumulate_in: AccumulateIn = "auto",
    autocast: torch.dtype | None = None,
    reduce_after_cast: bool = False,
    recompute: str | None = None,
    param_dtype: torch.dtype | None = None,
    backend: str = "auto",
    cuda_graphs: bool = True,
    passes: PassesArgument = None,
    passes_seconds: float = 60.0,
    prefetch: int = 0,
    overlap: bool | OverlapOptions | None = None,
    decompose: bool | DecomposeOptions | None = None,
    split: bool | int | SplitOptions | None = None,
    seed: int = 0,
    forward: Callable[[nn.Module, Any], Any] = call_model,
    keep_gradients: bool = False,
    check_finite: bool = True,
    shapes: Sequence[Any] = (),
    max_programs: int = 8,
    pad: Mapping[str, float] | None = None,
    weights: str | None = None,
    device: torch.device | str | None = None,
    batch: Literal["global", "local"] = "global",
    on_different_weights: Literal["broadcast", "error"] = "broadcast",
    progress: Callable[[str], None] = lambda stage: None,
) -> TrainStep:
    """Compile a training step of `model` on `mesh`.

    model: any nn.Module, also on the meta device (its parameters are then initialised piece by piece from `seed`).
    loss: (outputs, batch) -> scalar. With accumulation it should be a mean: microbatches are averaged.
    example: dict, tuple, list or dataclass of tensors, or a nest of them, with the global shapes (see `batch`) and
        dtypes of every batch. The model is called with the keys (fields) that its forward names, or with the leading
        items of a tuple; `forward(model, batch)` says otherwise.
    optimizer: any optimizer whose step() updates each parameter by its gradient and state: those of torch.optim except
        LBFGS and SparseAdam, subclasses, your own; or a list of several over disjoint parameters. Its param_groups are
        read at every step, so schedulers work. Without one, the step computes loss and gradients.
    mesh, plan: "dp=2,tp=2", {"dp": 2, "tp": 2} or a Mesh; a `Plan`, or its text ("fsdp:dp+hf_tp:tp", a file). Without a
        plan the axes dp, fsdp, cp, tp and pp have their usual meaning.
    clip_grad_norm: clip by global norm. accumulate: microbatches per step. autocast: dtype of the forward pass.
    accumulate_in: where gradients of microbatches are added up. "whole": unsharded, so that devices reduce them once a
        step but store whole gradients where fsdp stores shards; "shards": reduce-scattered in each microbatch over the
        axes that shard the parameter; "auto": whole, unless a device would then exceed memory_cap_bytes or, without it,
        the machine profile's memory. `program.accumulation` and `meshweave plan` report the choice.
    reduce_after_cast: cast to the smaller dtype before a sum over devices instead of after it. This rounds each part.
    recompute: which values of each repeated block the backward pass recomputes. "none"; "full": all but the block's
        inputs; "selective": all but attention, every second matmul and sums over devices; "pointwise": what elementwise
        ops compute from the fewest saved bytes, which a compiler fuses into the kernels of backward: so it is the
        default on a GPU unless backend="eager", for models with repeated blocks. Elsewhere the default is "none".
    param_dtype: cast floating-point parameters to this dtype before the forward pass. Stored parameters, gradients in
        sums over devices, and optimizer state keep the parameters' own dtype; batch and buffers keep theirs.
    profile: the costs by which moves are chosen: an AlphaBeta, a MachineProfile, the name of a profile ("h100") or its
        file. Without it (or with "auto") a job of several processes uses the known profile of its GPUs, else measures
        machine and links once (about 10 s) and caches the figures on disk (docs/calibrate.md). "alpha-beta" opts out,
        and virtual devices, which have no links, use it. `program.costs_from` reports the choice.
    backend: what runs the compute between communications. "eager": op by op; "inductor": compiled, equal regions of
        repeated layers once; "auto": compiled by a background process during the first steps, where that is measured to
        be faster and 1,000 steps save the compile time; on virtual devices eager. Compiled values differ from eager
        ones by rounding (docs/regions.md).
    cuda_graphs: on a GPU, record compiled regions in the third step and replay them from then on, so that the host
        launches a few CUDA graphs instead of every kernel: same values, and the memory of a step stays reserved. Not
        with accumulation or keep_gradients.
    passes: the passes over the step, as a list of `meshweave.passes` or as text: "exact" (keep, carry, overlap: values
        stay the same to the bit), "default" (keep, split, decompose, overlap: sums may round differently), "none",
        "default,split=4,recompute=full". The arguments recompute, prefetch, overlap, decompose and split are short
        forms of the same list. Without any of them (recompute aside), a job of several processes whose costs are a
        machine profile uses "default" and keeps the variant that simulates fastest (split and decompose where they gain
        8%), possibly the plain step; virtual devices, which hide no communication, use "none". `program.optimized`
        lists the variants compared.
    passes_seconds: no further variant of the step is tried after so many seconds, unless the caller asked for
        "default".
    prefetch: how many blocks ahead parameters are gathered. This hides gathers and keeps that many more blocks whole.
    overlap: order the step and merge collectives, so that communication runs beside compute (see `OverlapOptions`). It
        needs a machine profile; the simulated step is never slower than before. Values are the same to the bit.
    memory_cap_bytes: the most that may be live on a device at once: parameters, optimizer state, batch and all values
        of the step. It implies overlap. If no order stays under the cap, the error names the least possible peak and
        its tensors.
    decompose: decompose collectives beside matmuls into messages between chunks of the matmuls, where the whole step
        then simulates faster (see `DecomposeOptions`; needs a machine profile, except with when="always"). Gathers stay
        exact; sums over devices may round differently.
    split: run the rows of a device's batch in chunks (a number of them, True: 2 or 4), so that the tensor-parallel
        communication of a chunk hides under the compute of another, where the step then simulates faster (see
        `SplitOptions`). Sums over rows are added chunk by chunk and may round differently.
    check_finite: raise before the update when the loss is NaN or infinite.
    batch: on several processes, whether `example` is the global batch, the same on every rank, or ("local") the rows
        of this rank alone, as DistributedSampler makes them (see docs/ranks.md).
    on_different_weights: if ranks start with other weights, buffers or optimizer state than rank 0, copy those of rank
        0 to all ("broadcast", with a warning), or raise ("error").
    shapes: further batches to compile for at once; only their shapes count. A batch of another shape is compiled for
        when first seen. All programs share the same state. max_programs: the most programs of a step.
    pad: for each entry of the batch, the value that pads the ends of its dims up to the next compiled shape
        ({"input_ids": 0, "labels": -100}). The loss has to ignore padded rows and tokens.

    weights: a folder of safetensors files, as `save_pretrained` of Hugging Face writes it, with the initial parameters
        and buffers, also of a model on the meta device. Every process reads only its own pieces, file by file.

    Runs on virtual devices in this process (on `device`, by default where the model's parameters are: a GPU or the
    processor), or as a rank of a job if torch.distributed is initialised or torchrun
    started several processes (then it is initialised here). Ranks must agree on all arguments except the values of the
    example; a rank that differs or fails is an error on every rank.
    Raises MeshError, PlanError, CaptureError or RuleError, each with the offending line or name.
    """
    arguments = locals()
    changed = {"optimizer": optimizer_of(optimizer), "shapes": listed_batches(shapes)}
    return CompileOptions(**arguments | changed).compiled()
