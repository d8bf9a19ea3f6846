"""The pipeline and the public entry point: model, mesh and plan in, a training step out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.batch import Batch, call_model
from meshweave.capture.contract import Contract
from meshweave.capture.guards import Guards, check_autocast, check_not_compiled
from meshweave.capture.optimizer_guard import OptimizerGuard
from meshweave.capture.optimizers import OptimizerSpec, current_lrs, initial_state, read_optimizer
from meshweave.capture.recompute import recompute as recomputed
from meshweave.capture.recompute_check import check_recompute
from meshweave.capture.step import CaptureOptions, StepSource, capture_source
from meshweave.decompose import DecomposeOptions, SplitOptions
from meshweave.errors import LayoutError, PlanError
from meshweave.expand.expand import expand
from meshweave.hardware import AlphaBeta, Costs, load_profile
from meshweave.interop.optimizer import mark_stepped
from meshweave.ir.graph import Spec, StepGraph, tokens_of
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph
from meshweave.ir.verify import verify_placed, verify_rank, verify_step
from meshweave.movement.arrange import PlanMove, arrange
from meshweave.movement.plan import plan_move
from meshweave.movement.replay import proven
from meshweave.overlap import OverlapOptions, OverlapReport, settle
from meshweave.overlap import prefetch as prefetched
from meshweave.overlap.step import scheduling_of
from meshweave.passes import Optimized, Passes, accumulated, optimize, splitting_of
from meshweave.report.moves import MoveRow, move_rows
from meshweave.runtime.cluster import make_world
from meshweave.runtime.initialize import materialize
from meshweave.runtime.session import Session, Settings
from meshweave.runtime.world import World
from meshweave.sharding.assign import Price
from meshweave.sharding.decide import decide, infer_units
from meshweave.sharding.hooks import pinning
from meshweave.sharding.mapping import axes_of_operators, map_devices
from meshweave.sharding.place import place
from meshweave.sharding.placement import Placement
from meshweave.sharding.plan_text import plan_of
from meshweave.sharding.plans import Plan, Resolved
from meshweave.sharding.resolve import check_axes, resolve, usual_stages
from meshweave.sharding.search import choose_tp
from meshweave.sharding.sums import AccumulateIn
from meshweave.simulate.result import Simulation

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled training step at its three stages. Nothing in it grows with the number of devices.

    `optimized` holds the rank graphs, before and after the passes that were asked for.
    """

    captured: StepGraph
    placed: StepGraph
    optimized: Optimized
    placement: Placement
    options: CaptureOptions
    contract: Contract
    accumulation: str = ""  # where gradients of several microbatches are added up, and why there

    @property
    def roles(self) -> tuple[RankGraph, ...]:
        """What every role runs."""
        return self.optimized.roles

    @property
    def expanded(self) -> tuple[RankGraph, ...]:
        """The roles before all passes."""
        return self.optimized.expanded

    @property
    def as_expanded(self) -> Program:
        """The program without any pass."""
        return replace(self, optimized=Optimized(self.expanded, self.expanded, self.expanded))

    @property
    def overlap(self) -> tuple[OverlapReport, ...]:
        """By role what the scheduler did; nothing where it did not run."""
        return self.optimized.overlap

    @property
    def mesh(self) -> Mesh:
        return self.placement.mesh

    @property
    def rank(self) -> RankGraph:
        """The rank graph of the first role: of every device, where all do the same."""
        return self.roles[0]


def move_price(planner: PlanMove) -> Price:
    """Seconds of a move by its plan."""

    @cache
    def price(source: Layout, target: Layout, spec: Spec) -> float:
        return planner(source, target, spec.shape, spec.dtype).seconds

    return price


def _planner(profile: Costs, device_bytes: int | None) -> PlanMove:
    return lambda source, target, shape, dtype: plan_move(
        source, target, shape, dtype, profile, device_bytes=device_bytes
    )


def _proving(planner: PlanMove) -> PlanMove:
    """The planner's plans, each proven before it is taken for the first time."""
    return lambda source, target, shape, dtype: proven(planner(source, target, shape, dtype), shape)


def build_program(
    model: nn.Module,
    loss: Loss,
    example: Any,
    optimizer: OptimizerSpec | None,
    mesh: Mesh,
    plan: Plan | None,
    profile: Costs,
    options: CaptureOptions,
    forward: Callable[[nn.Module, Any], Any] = call_model,
    progress: Callable[[str], None] = lambda stage: None,
    prefetch: int = 0,
    passes: Passes | None = None,
) -> Program:
    """Capture, place, plan, expand, optimize; the verifier runs after each. `progress(stage)` is called as each begins.

    `prefetch`: how many blocks ahead parameters are gathered (see `overlap.prefetch`).
    """
    progress("capture")
    resolved = resolve(plan, model, mesh)
    micro = Batch.of(example).micros(options.accumulate)[0]
    step, contract = capture_source(StepSource(model, loss, forward, pinning(resolved)), micro, optimizer, options)
    captured = verify_step(step)
    named = axes_of_operators(captured, mesh)
    usual_stages(resolved, model, mesh, named)
    check_axes(resolved, mesh, named)
    progress("place")
    passes = passes or Passes()
    planner = _planner(profile, passes.room(profile))
    price = move_price(planner)
    units = infer_units(captured)
    homes = map_devices(captured, resolved.homes, mesh)

    def place_with(found: Resolved, decided: dict[Any, Any]) -> StepGraph:
        return place(captured, decide(found, captured, mesh, units, homes), price, decided)

    # Without a plan, an axis that operators in the model use is theirs.
    for axis in (a for a in resolved.auto_axes if not (resolved.is_default and a in named)):
        resolved = choose_tp(model, captured, resolved, axis, place_with, price)
    step = _with_recompute(captured, options.recompute, resolved)
    placement = decide(resolved, step, mesh, units, map_devices(step, resolved.homes, mesh))

    def expanded(accumulate_in: str) -> tuple[StepGraph, tuple[RankGraph, ...]]:
        how = replace(placement, accumulate_in=accumulate_in)
        placed = arrange(place(step, how, price), planner, reduce_after_cast=options.reduce_after_cast)
        progress("expand")
        roles = expand(verify_placed(placed), mesh, _proving(planner))
        return placed, tuple(verify_rank(settle(prefetched(rank, prefetch))) for rank in roles)

    placed, roles, told = accumulated(expanded, options.accumulate, options.accumulate_in, passes.room(profile))
    made = optimize(placed, roles, mesh, profile, passes, options.accumulate, progress)
    return Program(step, placed, made, placement, options, contract, told)


def _with_recompute(captured: StepGraph, policy: str, resolved: Resolved) -> StepGraph:
    """The step that is placed, proven to be the captured one."""
    cuts = {name: tuple(dims.values()) for name, dims in resolved.shards.items()}
    step = recomputed(captured, policy, cuts)
    check_recompute(captured, step, policy, cuts)
    return verify_step(step)


class TrainStep:
    """A compiled training step: call it with a batch, get the loss.

    `program` holds the graphs, `metrics` the numbers of the last step (loss, grad_norm).
    """

    def __init__(
        self,
        program: Program,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        world: World,
        settings: Settings,
    ) -> None:
        self.program, self.optimizer = program, optimizer
        self.session = Session(program.roles, world, settings)
        held = initial_state(optimizer, model, program.captured.updated) if optimizer is not None else None
        self.session.state.fill(materialize(model, settings.seed), held.tensors if held else None)
        self.session.state.num_steps = held.num_steps if held else 0
        values = lambda *key: self.session.state.matches(*key)  # noqa: E731 (a load gives the session another state)
        self.guards = Guards(program.contract, program.options.autocast, values)
        self.optimizer_guard = OptimizerGuard(optimizer) if optimizer is not None else None

    def __call__(self, batch: Any) -> float:
        """Train on one global batch (or, on a cluster, this rank's piece of it). Returns the loss.

        Raises LayoutError for a batch of another shape than the example, StepError for a loss that is not finite and
        where model, batch or optimizer are no longer what was compiled (docs/capture.md).
        """
        with self.session.world.guard():
            micros = self._micros(batch, self.program.options.accumulate)
            loss = self.session.run(micros, self._lrs())
        if self.optimizer is not None:
            mark_stepped(self.optimizer)
        return loss

    def trace(self, batch: Any) -> Simulation:
        """Train on one batch as a call does, and measure when every task and communication ran on every device.

        The result has the form of a simulated step, so that `meshweave.report` shows both side by side. On a cluster
        all ranks call it, and all get the whole picture. The first steps of a process are slower than the others.
        """
        with self.session.world.guard():
            micros = self._micros(batch, self.program.options.accumulate)
            tokens = tokens_of(self.program.captured) * len(micros)
            found = self.session.trace(micros, self._lrs(), tokens=tokens)
        if self.optimizer is not None:
            mark_stepped(self.optimizer)
        return found

    def forward(self, batch: Any) -> float:
        """Forward and loss of one microbatch (the batch, unless gradients are accumulated); returns its loss.

        `forward`, `backward` (for each microbatch) and `update` together do to the bit what calling the step does.
        Each raises StepError when it is not what comes next; a failure ends the step.
        """
        with self.session.world.guard():
            (micro,) = self._micros(batch, 1)
            return self.session.forward(micro)

    def backward(self) -> None:
        """Gradients of the microbatch that went forward, reduced over the mesh."""
        self.session.backward()

    def update(self) -> None:
        """New parameters and optimizer state, when every microbatch has gone backward."""
        with self.session.world.guard():
            self.session.update(self._lrs())
        if self.optimizer is not None:
            mark_stepped(self.optimizer)

    def _micros(self, batch: Any, parts: int) -> list[Mapping[str, Tensor]]:
        held = Batch.of(batch)
        self.guards.check(held)
        return [dict(zip(held.names, tensors, strict=True)) for tensors in held.split(parts)]

    def _lrs(self) -> list[float]:
        if self.optimizer_guard is None:
            return []
        self.optimizer_guard.check()
        return current_lrs(self.optimizer_guard.optimizer)

    @property
    def metrics(self) -> dict[str, float]:
        return self.session.metrics

    @property
    def num_steps(self) -> int:
        """Number of completed steps."""
        return self.session.state.num_steps

    def parameters(self, *, sharded: bool = False) -> dict[str, Tensor]:
        """Parameters by name: full tensors, or on a cluster DTensors of this rank's pieces."""
        return self._sharded("param") if sharded else self.session.full("param")

    def buffers(self) -> dict[str, Tensor]:
        """Full buffers by name."""
        return self.session.full("buffer")

    def optimizer_state(self) -> dict[str, Tensor]:
        """Full optimizer state by `slot/parameter`."""
        return self.session.full("state")

    def gradients(self) -> dict[str, Tensor]:
        """Full gradients of the last step by name; needs keep_gradients=True."""
        return self.session.gradients()

    def _sharded(self, kind: str) -> dict[str, Tensor]:
        if not self.session.world.is_distributed:
            raise LayoutError(
                "virtual devices have no DTensor", hint="run under torchrun, or take full tensors with sharded=False"
            )
        from meshweave.runtime.dtensor import dtensors_from_pieces  # takes long to import, and few programs do

        return dict(dtensors_from_pieces(self.session.pieces(kind), self.session.world.device.type))

    def save(self, path: str) -> None:
        """Write a torch.distributed.checkpoint. A crash on the way leaves what was at `path` as it was."""
        self.session.save(path)

    def load(self, path: str) -> None:
        """Continue from a checkpoint of the same model, saved on any mesh. Nothing in it is unpickled as code."""
        self.session.load(path)

    def explain(self) -> list[MoveRow]:
        """Every move of the step: why, from, to, steps, bytes, seconds. `str(table(rows))` prints it."""
        return move_rows(self.program.placed, self.program.mesh)


def compile(
    model: nn.Module,
    *,
    loss: Loss,
    example: Any,
    optimizer: torch.optim.Optimizer | None = None,
    mesh: Mesh | str | Mapping[str, int],
    plan: Plan | str | None = None,
    profile: Costs | str | None = None,
    memory_cap_bytes: int | None = None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    accumulate_in: AccumulateIn = "auto",
    autocast: torch.dtype | None = None,
    reduce_after_cast: bool = False,
    recompute: str = "none",
    param_dtype: torch.dtype | None = None,
    prefetch: int = 0,
    overlap: bool | OverlapOptions | None = None,
    decompose: bool | DecomposeOptions | None = None,
    split: bool | int | SplitOptions | None = None,
    seed: int = 0,
    forward: Callable[[nn.Module, Any], Any] = call_model,
    keep_gradients: bool = False,
    check_finite: bool = True,
    device: torch.device | str | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> TrainStep:
    """A training step of `model` on `mesh`.

    model: any nn.Module, also on the meta device (its parameters are then made piece by piece from `seed`).
    loss: (outputs, batch) -> scalar. With accumulation it should be a mean: microbatches are averaged.
    example: dict or tuple of tensors with the global shapes and dtypes of every batch. The model is called with the
        keys that its forward names, or with the leading items of a tuple; `forward(model, batch)` says otherwise.
    optimizer: a torch SGD, Adam or AdamW over the model's parameters; its learning rates are read at every step, so
        schedulers work. Without one, the step computes loss and gradients.
    mesh, plan: "dp=2,tp=2", {"dp": 2, "tp": 2} or a Mesh; a `Plan`, or its text ("fsdp:dp+hf_tp:tp", a file). Without a
        plan the axes dp, fsdp, tp and pp mean the usual.
    clip_grad_norm: clip by global norm. accumulate: microbatches per step. autocast: dtype of the forward pass.
    accumulate_in: where gradients of microbatches are added up. "whole": as backward gives them, so that devices reduce
        them once a step, and hold whole what fsdp stores in shards; "shards": reduce-scattered over what shards the
        parameter in each microbatch; "auto": whole, unless a device would hold more than memory_cap_bytes or, without
        it, than the machine profile's memory. `program.accumulation` and `meshweave plan` say which it was.
    reduce_after_cast: cast before a sum over devices where its result is cast to a smaller dtype: rounds each part.
    recompute: what the backward pass makes again instead of keeping it, in each repeated block of the model. "none";
        "full": all but what enters a block; "selective": all but attention, every second matmul, sums over devices.
    param_dtype: cast floating-point parameters to this dtype before the forward pass. What is stored, gradients as they
        are summed over devices, and optimizer state stay in the parameters' own dtype; batch and buffers stay theirs.
    profile: the costs by which moves are chosen: an AlphaBeta, a MachineProfile, the name of one ("h100") or its file.
    prefetch: how many blocks ahead parameters are gathered: hides their gathers, holds that many more blocks whole.
    overlap: order the step and merge collectives, so that communication runs beside compute (see `OverlapOptions`). It
        needs a machine profile, by which it is never slower than it was; values are the same to the bit.
    memory_cap_bytes: no device holds more at once: parameters, optimizer state, batch and all that the step makes. It
        implies overlap, and is an error, naming the least possible and the tensors, where no order keeps under it.
    decompose: take collectives beside matmuls apart into messages between chunks of the matmuls, where the whole step
        is simulated faster so (see `DecomposeOptions`; it needs a machine profile, but with when="always"). Gathers
        stay exact; sums over devices may round otherwise.
    split: run the rows of a device's batch in chunks (a number of them, True: 2), so that the tensor-parallel
        communication of one hides under the compute of another; where the simulated step is faster so (see
        `SplitOptions`). Sums over rows are added chunk by chunk, and may round otherwise.
    check_finite: raise before the update when the loss is NaN or infinite.

    Runs on virtual devices in this process, or, when torch.distributed is initialised, on this rank of it.
    Raises MeshError, PlanError, CaptureError or RuleError, each naming the line or name at fault.
    """
    mesh, plan = Mesh.of(mesh), plan_of(plan)
    check_not_compiled(model)
    costs = load_profile(profile) if isinstance(profile, str) else profile or AlphaBeta()
    if optimizer is None and (clip_grad_norm is not None):
        raise PlanError("clip_grad_norm needs an optimizer", hint="pass optimizer=")
    spec = None if optimizer is None else read_optimizer(optimizer, model)
    check_autocast(autocast)
    options = CaptureOptions(
        clip_grad_norm, accumulate, autocast, seed, reduce_after_cast, recompute, param_dtype, accumulate_in
    )
    world = make_world(mesh, device)
    keeps_gradients = keep_gradients or optimizer is None
    passes = Passes(
        splitting_of(split), DecomposeOptions.of(decompose), scheduling_of(overlap, memory_cap_bytes, keeps_gradients)
    )
    program = build_program(model, loss, example, spec, mesh, plan, costs, options, forward, progress, prefetch, passes)
    progress("start")
    settings = Settings(accumulate, seed, keeps_gradients, check_finite)
    return TrainStep(program, model, optimizer, world, settings)
