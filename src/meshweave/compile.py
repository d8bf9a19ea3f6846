"""The public entry point: compiles a model, a mesh and a plan into a training step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshweave.build import Target, build_program
from meshweave.calibrate import SMALL_BYTES, costs_for
from meshweave.capture.batch import Batch, call_model, listed_batches
from meshweave.capture.guards import check_autocast
from meshweave.capture.model_checks import check_loss, check_new_tensors, check_not_compiled, check_shapes
from meshweave.capture.optimizer_groups import optimizer_of
from meshweave.capture.optimizers import OptimizerSpec, read_optimizer
from meshweave.capture.step import CaptureOptions, LossScale, Part, Precision, StepSource
from meshweave.cost.hardware import Costs, MachineProfile
from meshweave.errors import CaptureError, PlanError
from meshweave.ir.mesh import Mesh
from meshweave.passes import PassList, Recompute, parse_passes, pass_list_of
from meshweave.passes.options import PassesArgument
from meshweave.pipeline import PipelineArgument, PipelineChoice
from meshweave.place.plan_text import plan_of
from meshweave.place.plans import Plan
from meshweave.program import Program
from meshweave.runtime.cluster import make_world, numbers_of_all
from meshweave.runtime.interfaces import World
from meshweave.runtime.optimizer_state import follow_replaced
from meshweave.runtime.regions.compiler import backend_for
from meshweave.runtime.rows import batch_shard, global_example
from meshweave.runtime.session import RunOptions, SessionSettings
from meshweave.runtime.together import agree, argument_texts, program_texts, together
from meshweave.runtime.weight_agreement import align_weights
from meshweave.runtime.world import home_of
from meshweave.search import Budget
from meshweave.train_step import CompiledStep, TrainStep
from meshweave.variants import Build

_LOG = logging.getLogger("meshweave")
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """The arguments of `compile`; its docstring says what they mean."""

    source: StepSource
    example: Any
    optimizer: torch.optim.Optimizer | None
    mesh: Mesh | str | Mapping[str, int]
    plan: Plan | str | None
    profile: Costs | str | None
    passes: PassesArgument
    memory_cap_bytes: int | None
    capture: CaptureOptions
    shapes: Sequence[Any]
    batch: Literal["global", "local"]
    weights: str | None
    device: torch.device | str | None
    run: RunOptions

    def checked(self) -> tuple[OptimizerSpec | None, str]:
        """The update of the optimizer, and why there is none, if its own `step()` has to run instead. Raises
        MeshweaveError for arguments that do not define a step."""
        model = self.source.model
        check_not_compiled(model)
        check_shapes(model)
        check_loss(self.source.loss, self.example)
        if self.optimizer is None and self.capture.clip_grad_norm is not None:
            raise PlanError("clip_grad_norm needs an optimizer", hint="pass optimizer=")
        if self.optimizer is not None:
            follow_replaced(self.optimizer, model.parameters())
        check_autocast(self.capture.precision.autocast)
        if self.optimizer is None:
            return None, ""
        try:
            return read_optimizer(self.optimizer, model), ""
        except CaptureError as error:
            return None, f"the optimizer's own step() runs eagerly: {error.what} ({error.got}; {error.where})"

    @property
    def is_small(self) -> bool:
        """Whether parameters and batch are too few bytes to measure links for, unless passes that need it are asked
        for."""
        tensors = [*self.source.model.parameters(), *Batch.of(self.example).tensors]
        num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        return num_bytes < SMALL_BYTES and self.passes is None and self.memory_cap_bytes is None

    def settings(self, has_gradients: bool) -> SessionSettings:
        """The settings of a session; `has_gradients`: whether gradients are results of the step."""
        run = replace(self.run, keep_gradients=self.run.keep_gradients or has_gradients)
        scale = self.capture.precision.loss_scale
        return SessionSettings(
            accumulate=self.capture.accumulate,
            seed=self.capture.seed,
            weights=self.weights,
            loss_scale=scale if isinstance(scale, LossScale) else LossScale(),
            run=run,
        )

    def texts(self, mesh: Mesh, plan: Plan | None, pass_list: PassList) -> Any:
        """The options on which all ranks must agree, as text."""
        arguments = {
            "batch": self.batch,
            "memory_cap_bytes": self.memory_cap_bytes,
            "weights": self.weights,
            "device": str(self.device).partition(":")[0],
            "backend": str(dist.get_backend_config()) if dist.is_initialized() else "",
        }
        options = {"capture": self.capture, "passes": pass_list, "run": self.run, "argument": arguments}
        same: dict[str, Any] = {"mesh": (mesh, mesh.devices), "plan": plan, "profile": self.profile, "options": options}
        calls = {"loss": self.source.loss, "forward": self.source.forward}
        shapes = {f"shapes[{index}]": shape for index, shape in enumerate(self.shapes)}
        return argument_texts(self.source.model, self.optimizer, {"example batch": self.example, **shapes}, calls, same)

    def build(self, spec: OptimizerSpec | None, target: Target, pass_list: PassList, costs_from: str) -> Build:
        """A function that compiles a program for a batch."""

        def build(example: Any, part: Part, count: int, like: Program | None) -> Program:
            options = replace(self.capture, accumulate=count, part=part)
            update = spec if part == "train" else None
            program = build_program(self.source, example, update, target, options, pass_list, self.run.progress, like)
            agree(lambda: program_texts(program.captured, program.roles))
            return replace(program, costs=target.costs, costs_from=costs_from)

        return build

    def passes_on(self, asked: PassList, world: World, costs: Costs) -> PassList:
        """The passes asked for, and those that a step on this machine has by default: with recompute alone, too."""
        pass_list = asked
        is_compiled = backend_for(self.run.backend, world.device, len(world.devices)) != "eager"
        if self.passes in (None, "default") and is_compiled and world.device.type == "cuda":
            pass_list = pass_list.having(Recompute("pointwise", is_optional=True))
        if self.passes is None or [each_pass.name for each_pass in asked.passes] == [Recompute.name]:
            pass_list = with_default_passes(pass_list, world, costs, self.run.passes_seconds, self.is_small)
        return replace(pass_list, recalls=partial(numbers_of_all, world)) if world.is_distributed else pass_list

    def compiled(self) -> CompiledStep:
        """The compiled step, with its state on the current world."""
        check_new_tensors()
        model, run = self.source.model, self.run
        with together(self.device):
            mesh, plan = Mesh.of(self.mesh), plan_of(self.plan)
            spec, why_eager = self.checked()
            if why_eager:
                _LOG.warning(why_eager)
            settings = self.settings(spec is None)
            pass_list = pass_list_of(
                self.passes, memory_cap_bytes=self.memory_cap_bytes, keeps_gradients=settings.run.keep_gradients
            )
            agree(partial(self.texts, mesh, plan, pass_list))
            world = make_world(mesh, self.device, home_of(model))
            align_weights(model, self.optimizer, world, run.on_different_weights)
            shard = batch_shard(mesh, plan)[0]
            example = global_example(self.example, self.batch, shard)
            numbers_of_all(world, 0)  # connects them: later a rank that waits learns of the failure of another
            chosen = costs_for(self.profile, world, run.progress, self.is_small)
            pass_list = self.passes_on(pass_list, world, chosen.costs)
            target = Target(mesh, plan, chosen.costs, own_parts=shard if self.batch == "local" else 1)
            build = self.build(spec, target, pass_list, chosen.origin)
            program = build(example, "train", self.capture.accumulate, None)
            # torch's weight_norm and spectral_norm set such attributes from a parameter.
            derived = {"model." + n.removesuffix("_v").removesuffix("_orig") for n, _ in model.named_parameters()}
            note_computed(program.contract.computed - derived)
            run.progress("start")
            program = replace(program, eager_update=why_eager)
            step = CompiledStep(program, model, self.optimizer, world, settings, build, run.keep_gradients)
            for shape in self.shapes:
                step.variants.prepare(Batch.of(global_example(shape, self.batch, shard)))
            step.variants.is_local = self.batch == "local" and world.is_distributed
            return step


def note_computed(places: Collection[str]) -> None:
    """Warn of attributes that forward sets to values of the step: between steps they are as before compile."""
    if places:
        shown = ", ".join(sorted(places)[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
        _LOG.warning(
            "forward assigns a value of the step to %s. The compiled step does not: it stays as it was at compile. To "
            "read the value after a step let the loss return it: return loss, {'name': value}; step.metrics['name']",
            shown,
        )


# Messages between chunks suffer more from other load on the machine than the simulator predicts (docs/overlap.md), and
# measured costs vary by some percent from day to day. On a quiet machine a step simulated 9% faster (rows in chunks) or
# 7% (rings) measured 4% and 6% faster: tensor parallelism, batch 4, 2 processes, Gloo at 1 Gbit/s.
_LEAST_GAIN = 0.08


def with_default_passes(
    pass_list: PassList, world: World, costs: Costs, seconds: float, is_small: bool = False
) -> PassList:
    """The passes of a step whose caller named no pass that is chosen by gain: "default" within a time budget if there
    is real communication with known costs, else unchanged. Rewritten sums round differently, so a rewrite has to gain
    at least `_LEAST_GAIN`; a step that `is_small`, whose messages take their start-up alone, is not rewritten."""
    if not world.is_distributed or world.mesh.num_devices == 1 or not isinstance(costs, MachineProfile):
        return pass_list
    own, gathered = {each_pass.name for each_pass in pass_list.passes}, partial(numbers_of_all, world)
    usual = tuple(
        each_pass
        for each_pass in parse_passes("default")
        if each_pass.name not in own and not (is_small and each_pass.numerics == "reassociates")
    )
    return replace(
        pass_list,
        passes=(*pass_list.passes, *usual),
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
    passes: PassesArgument = None,
    memory_cap_bytes: int | None = None,
    accumulate: int = 1,
    pipeline: PipelineArgument = None,
    clip_grad_norm: float | None = None,
    precision: Precision | torch.dtype | None = None,
    seed: int = 0,
    forward: Callable[[nn.Module, Any], Any] = call_model,
    shapes: Sequence[Any] = (),
    batch: Literal["global", "local"] = "global",
    weights: str | None = None,
    device: torch.device | str | None = None,
    run: RunOptions | None = None,
) -> TrainStep:
    """Compile a training step of `model` on `mesh`.

    model: any nn.Module, also on the meta device (its parameters are then initialised piece by piece from `seed`).
    loss: (outputs, batch) -> scalar, or (scalar, {"name": number}) with further numbers for `step.metrics`.
        They are those of the whole batch, with `accumulate`, too.
    example: dict, tuple, list or dataclass of tensors, or a nest of them, with the global shapes (see `batch`) and
        dtypes of every batch. The model is called with the keys (fields) that its forward names, or with the leading
        items of a tuple; `forward(model, batch)` says otherwise.
    optimizer: any but LBFGS and SparseAdam, or a list of several over disjoint parameters. Those of torch.optim are
        part of the step; others, until `register_update` knows them, run their own step() after it. param_groups are
        read at every step, so schedulers work. Without one, the step computes loss and gradients.
    mesh, plan: "dp=2,tp=2", {"dp": 2, "tp": 2} or a Mesh; a `Plan`, or its text ("fsdp:dp+hf_tp:tp", a file). Without a
        plan the axes dp, fsdp, cp, tp and pp have their usual meaning.
    profile: the costs by which moves are chosen: an AlphaBeta, a MachineProfile, the name of a profile ("h100") or its
        file. Without it (or with "auto") a job of several processes measures machine and links once (about 10 s; known
        GPUs only links) and caches the figures on disk (docs/calibrate.md). "alpha-beta" opts out;
        virtual devices, which have no links, use it, and without profile= steps of less than 1 MiB of parameters and
        batch. `program.costs_from` reports the choice.
    passes: the passes over the step, as a list of `meshweave.passes` or as text: "exact" (keep, overlap: values
        stay the same to the bit), "default" (keep, split, decompose, overlap: sums may round differently), "none",
        "default,split=4,recompute=full" (docs/passes.md). Without it, or with recompute alone, a job of several
        processes whose costs are a machine profile uses "default" and keeps the variant that simulates fastest (split
        and decompose where they gain 8%), possibly the plain step; virtual devices, which hide no communication, use
        "none". `program.optimized` lists the variants compared. On a GPU, unless the backend is "eager", models with
        repeated blocks recompute "pointwise" without it or with "default".
    memory_cap_bytes: the most that may be live on a device at once: parameters, optimizer state, batch and all values
        of the step. It implies the pass overlap. If no order stays under the cap, the error names the least possible
        peak and its tensors.
    accumulate: microbatches per step. Loss, metrics and gradients are those of the whole batch, means over valid tokens
        among them; a warning names what is not (an op that needs rows of several microbatches), and
        `RunOptions(exact_microbatches=True)` makes it an error. clip_grad_norm: clip by global norm.
    pipeline: how the stages of a model (axis pp) take the microbatches: the name of a schedule ("1f1b", "interleaved",
        "zbv", ...), a .csv file in the form of torch.distributed.pipelining, or a `Schedule` (docs/pipelines.md).
        Without it microbatches pass all stages one after the other.
    precision: the dtype of autocast, or a `Precision` with other dtypes of parameters and sums. Where gradients are
        computed through float16 the loss is scaled as by `torch.amp.GradScaler` (`Precision.loss_scale`).
    seed: of initial parameters, dropout and other random numbers.
    shapes: further batches to compile for at once; only their shapes count. A batch of another shape is compiled for
        when first seen. All programs share the same state.
    batch: on several processes, whether `example` is the global batch, the same on every rank, or ("local") the rows
        of this rank alone, as DistributedSampler makes them (see docs/ranks.md).
    weights: a folder of safetensors files, as `save_pretrained` of Hugging Face writes it, with the initial parameters
        and buffers, also of a model on the meta device. Every process reads only its own pieces, file by file.
    run: how the step runs and what it keeps (`RunOptions`): backend, gradients, checks, progress.

    Runs on virtual devices in this process (on `device`, by default where the model's parameters are: a GPU or the
    processor), or as a rank of a job if torch.distributed is initialised or torchrun
    started several processes (then it is initialised here). Ranks must agree on all arguments except the values of the
    example; a rank that differs or fails is an error on every rank.
    Raises MeshError, PlanError, CaptureError or RuleError, each with the offending line or name.
    """
    if run is not None and not isinstance(run, RunOptions):
        raise PlanError("not options of a run", where="run=", got=repr(run), expected="mw.RunOptions(...)")
    options = CompileOptions(
        source=StepSource(model, loss, forward),
        example=example,
        optimizer=optimizer_of(optimizer),
        mesh=mesh,
        plan=plan,
        profile=profile,
        passes=passes,
        memory_cap_bytes=memory_cap_bytes,
        capture=CaptureOptions(
            clip_grad_norm=clip_grad_norm,
            accumulate=accumulate,
            seed=seed,
            precision=Precision.of(precision),
            exact_microbatches=run is not None and run.exact_microbatches,
            pipeline=PipelineChoice.of(pipeline),
        ),
        shapes=listed_batches(shapes),
        batch=batch,
        weights=weights,
        device=device,
        run=run or RunOptions(),
    )
    return TrainStep(options.compiled(), replace(options, weights=None).compiled)
