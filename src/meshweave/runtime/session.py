"""A compiled step with its state: runs the sections of a step on batches, and has the pieces of parameters, buffers and
optimizer state. Writes weights; `runtime/checkpoint_contents.py` writes and reads checkpoints."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshweave.capture.step import LossScale, unscaled
from meshweave.capture.step_inputs import LOSS_SCALE
from meshweave.cost.simulate.result import Simulation
from meshweave.engine.actions import Action, Actions, Schedule, forms_of
from meshweave.engine.for_roles import scheduled
from meshweave.engine.pairs import PairKey, PairTurns
from meshweave.engine.sections import READ_BEFORE
from meshweave.errors import PlanError, StepError
from meshweave.ir.graph import Spec
from meshweave.ir.liveness import peak_bytes
from meshweave.ir.rank import RankGraph
from meshweave.runtime.batched_updates import batched_updates
from meshweave.runtime.bindings import Bindings
from meshweave.runtime.cluster import on_any
from meshweave.runtime.cuda_graphs import CudaGraphs
from meshweave.runtime.executor import Compiled, Env, Meter, compile_tasks
from meshweave.runtime.inputs import Inputs, numbers_on
from meshweave.runtime.interfaces import World
from meshweave.runtime.measured import measured
from meshweave.runtime.recorded import can_be_recorded
from meshweave.runtime.regions.compile_process import CompileProcess, begin_compiling
from meshweave.runtime.regions.compiler import (
    BackendName,
    Kernels,
    RegionCompiler,
    RegionFunction,
    backend_for,
    checked_backend,
    region_functions,
)
from meshweave.runtime.serial import SerialExecutor
from meshweave.runtime.state import LASTING, LossScaler, State
from meshweave.runtime.tracing import DeviceClock, HostClock, Recorder, gathered
from meshweave.runtime.turns import Turns
from meshweave.runtime.update import Replacements, Update, has_scalar, metrics_of, outputs, pieces_by_name, scalar
from meshweave.runtime.watch import POLL
from meshweave.runtime.weight_agreement import WAYS
from meshweave.runtime.weight_files import write_weights
from meshweave.runtime.world import free_bytes

Done = Callable[[bool], None] | None
# What `compile_tasks` fuses by, for a role and its devices of this process.
Fuser = Callable[[RankGraph, Sequence[int], torch.device, Any, Any], Sequence[Sequence[Any]]]
_MEMORY_SHARE = 0.8  # of the memory that is free: steps op by op also have the allocator's gaps and kernels' scratch
_ASKED = 16  # steps, before each of which processes ask each other for compiled regions; then once in so many
# Whether processes of a job record, too, between their communications. With kernels that each process had tuned for
# itself two of four cases gave other bits than single launches (NVIDIA H200, torch 2.11, 2026-11). Kernels of jobs are
# not tuned any more, but nobody has tried again (benchmarks/nccl.py does).
IN_JOBS = False
# A link that becomes 10 times slower is seen where communication took 2/9 of a step; other work on a machine mostly
# costs less than a factor of 3.
_WINDOW, _SLOWER = 16, 3.0
_NOTES = logging.getLogger("meshweave")
# The user's calls that return full tensors of each kind.
_FULL = {"param": "parameters", "buffer": "buffers", "state": "optimizer_state", "grad": "gradients"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a compiled step runs and what it keeps: nothing that changes what it computes.

    backend: what runs the compute between communications. "eager": op by op; "inductor": compiled before the first
        step, equal regions of repeated layers once; "background": op by op, until a process beside this has compiled
        what "inductor" compiles; "auto": "background" in a process with a GPU of its own ("inductor" where PyTorch's
        deterministic algorithms are on), "eager" on processors and virtual devices. Compiled values differ from eager
        ones by rounding (docs/regions.md).
    cuda_graphs: on a GPU, record compiled regions in the third step and replay them from then on, so that the host
        launches a few CUDA graphs instead of every kernel: same values, and the memory of a step stays reserved. Not
        with accumulation or keep_gradients.
    keep_gradients: keep the gradients of the last step for `step.gradients()`; a step without optimizer always does.
    check_finite: raise before the update when the loss, or with clip_grad_norm the norm of the gradients, is NaN or
        infinite. The host reads the norm after backward, before it launches the update. (A step that scales its loss
        is skipped instead.)
    exact_microbatches: with `accumulate`, raise CaptureError for what needs the rows of several microbatches (a
        contrastive loss, batch norm, a quantile), which is otherwise computed in each microbatch, with a warning.
    max_programs: the most programs of a step (see `shapes`).
    on_different_weights: if ranks start with other weights, buffers or optimizer state than rank 0, copy those of rank
        0 to all ("broadcast", with a warning), or raise ("error").
    passes_seconds: no further variant of the step is tried after so many seconds, unless the caller asked for passes.
    progress: called with the name of each stage of the compilation as it begins; it may differ between ranks.
    """

    backend: BackendName = "auto"
    cuda_graphs: bool = True
    keep_gradients: bool = False
    check_finite: bool = True
    exact_microbatches: bool = False
    max_programs: int = 8
    on_different_weights: Literal["broadcast", "error"] = "broadcast"
    passes_seconds: float = 60.0
    progress: Callable[[str], None] = field(default=lambda stage: None, repr=False, compare=False)

    def __post_init__(self) -> None:
        checked_backend(self.backend)
        if self.on_different_weights not in WAYS:
            raise PlanError(
                "unknown on_different_weights", got=repr(self.on_different_weights), expected=" or ".join(WAYS)
            )
        if not isinstance(self.max_programs, int) or self.max_programs < 1:
            raise PlanError("invalid number of programs", got=f"max_programs={self.max_programs}", expected="1 or more")
        if not isinstance(self.passes_seconds, Real) or math.isnan(self.passes_seconds):
            raise PlanError(
                "passes_seconds is not a number of seconds",
                got=repr(self.passes_seconds),
                expected="0 for no further variant, float('inf') for all",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """What a session runs by. `accumulate` is the number of microbatches of a step, whose losses and metrics are added
    up if `is_sum`, else averaged; `pipeline` the schedule of the stages, if they work on several at a time, `pairs` the
    turns of actions that run as one; `weights` a folder of files with initial parameters, `loss_scale` the rules of a
    step that scales its loss."""

    accumulate: int = 1
    pipeline: Schedule | None = None
    pairs: Mapping[PairKey, PairTurns] = field(default_factory=dict)
    is_sum: bool = False
    seed: int = 0
    weights: str | None = None
    loss_scale: LossScale = field(default_factory=LossScale)
    run: RunOptions = field(default_factory=RunOptions)


def graphs_of(world: World, settings: SessionSettings) -> CudaGraphs | None:
    """CUDA graphs, if steps may be recorded: on a GPU of a process, if nothing of a pass is in use after it."""
    is_own = world.device.type == "cuda" and len(world.devices) == 1 and (IN_JOBS or not world.is_distributed)
    is_last = settings.accumulate == 1 and not settings.run.keep_gradients
    return CudaGraphs(world.device) if settings.run.cuda_graphs and is_own and is_last else None


class Saves:
    """Asynchronous saves of a state, at most a single save at a time.

    Every process makes the same calls. The threads that write communicate over their own Gloo group, so that their
    collectives never meet those of a step. Python waits for these threads before it exits.
    """

    def __init__(self) -> None:
        self._pending: Future[None] | None = None
        self._group: dist.ProcessGroup | None = None

    def begin(self, world: World, save: Callable[[dist.ProcessGroup | None], Future[None]]) -> Future[None]:
        """Begin a save over the group of these saves, after `wait`."""
        assert self._pending is None
        if world.is_distributed and self._group is None:
            self._group = dist.new_group(backend="gloo", group_desc="checkpoints")
        self._pending = save(self._group)
        return self._pending

    def wait(self, world: World) -> None:
        """Wait for the current save; all processes call it. Raises its CheckpointError, once; StepError when another
        process has failed meanwhile."""
        if self._pending is None:
            return
        while not wait_for([self._pending], POLL).done:
            world.check()
        pending, self._pending = self._pending, None
        pending.result()


class Fetched:
    """A 0-dim tensor. On CUDA it is copied to the host right after it is computed, so that reading it does not wait for
    later work: checking the loss before the update adds no pause between forward and backward."""

    def __init__(self, value: Tensor, is_read: bool) -> None:
        self.value = value
        if value.is_cuda and is_read:
            self._host = torch.empty((), dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._host = value

    def number(self) -> float:
        if self._host is not self.value:
            self._done.synchronize()
        return float(self._host)


@dataclass(slots=True)
class Pace:
    """Warns of steps that take far longer than earlier ones: by the fastest of `_WINDOW`, so that a pause counts for
    nothing."""

    fastest: float = math.inf
    window: list[float] = field(default_factory=list)

    def add(self, seconds: float) -> None:
        """A step has taken so long."""
        self.window.append(seconds)
        if len(self.window) < _WINDOW:
            return
        recent, self.window = min(self.window), []
        if recent > _SLOWER * self.fastest:
            _NOTES.warning(
                "steps take %.1f times as long as before (%.3g s, before %.3g s): other work on these machines, or a "
                "slower link. For that link start again from a checkpoint: mw.compile compares links with those that "
                "were measured, and measures them anew (profile='auto') or says how to (profile=FILE)",
                recent / self.fastest, recent, self.fastest,
            )  # fmt: skip
            self.fastest = math.inf  # these steps are the measure from now on
        self.fastest = min(self.fastest, recent)


def joined(numbers: Sequence[Tensor], is_sum: bool) -> Tensor:
    """The sum or mean of a number of each microbatch, in their dtype."""
    if len(numbers) == 1:
        return numbers[0]
    wide = torch.stack([*numbers]).double()
    return (wide.sum() if is_sum else wide.mean()).to(numbers[0].dtype)


def check_finite(losses: Sequence[float], step: int) -> None:
    """StepError if the mean loss of a step is NaN or infinite."""
    loss = sum(losses) / len(losses)
    if not math.isfinite(loss):
        raise StepError(
            f"the loss of step {step} is {loss}",
            got="a loss that is not finite; nothing was updated",
            hint="lower the learning rate, clip gradients or check the batch; or run=mw.RunOptions(check_finite=False)",
        )


def check_norm(norm: float, step: int) -> None:
    """StepError if the global norm of gradients is NaN or infinite."""
    if not math.isfinite(norm):
        raise StepError(
            f"the norm of the gradients of step {step} is {norm}",
            where="clip_grad_norm",
            got="gradients that are not finite; nothing was updated",
            hint="lower the learning rate or check the batch; or run=mw.RunOptions(check_finite=False)",
        )


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C until the block is done, so that an update is never left half-way. Then it is delivered as usual: to
    a handler that stops all processes after the same step, or as KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before: Callable[..., Any] | int | None = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)


class Session:
    """Runs the rank graphs of a program step by step on the devices of a world.

    A step is the actions of a schedule: forward and backward, once per microbatch, then update. A failed step leaves
    the state of the last completed step, unless it failed during the update: then the state is torn and raises errors.
    """

    def __init__(
        self,
        roles: Sequence[RankGraph],
        world: World,
        settings: SessionSettings,
        meter: Meter | None = None,
        share: Session | None = None,
    ) -> None:
        """`share`: another session of the same model, whose state this session trains, too."""
        self.roles, self.world, self.settings = tuple(roles), world, settings
        backend = backend_for(settings.run.backend, world.device, len(world.devices))
        self.compiler: RegionCompiler = (
            RegionCompiler(backend, partial(on_any, world)) if share is None else share.compiler
        )
        self.graphs: CudaGraphs | None = graphs_of(world, settings) if share is None else share.graphs
        if share is None:
            # the host launches each kernel; replicas of a value must be equal
            self.compiler.kernels = Kernels(self.graphs is None, world.is_distributed)
        self.sections, self.schedule = scheduled(self.roles, settings.pipeline, settings.accumulate)
        self._has_regions = False
        self._process: CompileProcess | None = None
        self._has_begun, self._num_asked = False, 0
        self._build(meter)
        if share is None:
            scaler = LossScaler(settings.loss_scale)
            self.state = State(roles=self.roles, devices=world.devices, device=world.device, scaler=scaler)
        else:
            self.state = share.state
        self.bindings: Bindings = Bindings(world) if share is None else share.bindings
        self.saves: Saves = Saves() if share is None else share.saves
        if share is not None:
            self.state.extend(self.roles)
        self._lasting_outputs = frozenset(key for role in self.roles for key in role.outputs if key[0] in LASTING)
        self.is_scaled = any(item.name == LOSS_SCALE for role in self.roles for item in role.inputs)
        self.has_norm = any(("norm", "") in role.outputs for role in self.roles)
        self.values: dict[str, Tensor] = {}  # loss, grad_norm and metrics of the last step
        self.gradient_pieces: dict[str, list[Tensor]] | None = None  # of the last step, by name
        self.was_skipped = False  # the last step
        is_awaited = world.device.type == "cpu" or settings.run.check_finite  # the host waits for every step
        is_first = world.devices[0] == world.mesh.devices[0]
        self.pace = Pace() if world.is_distributed and is_first and is_awaited else None

    def _recorder(self, has_regions: bool) -> CudaGraphs | None:
        """What records the passes of a step. Before a recording a process waits for the device, and so for the others:
        in the same order everywhere if all run the same graph, but not stages, which could wait for each other."""
        if not has_regions or self.graphs is None or self.settings.accumulate > 1 or len(self.roles) > 1:
            return None
        return self.graphs if can_be_recorded(self.ranks[0]) else None

    def _build(self, meter: Meter | None, fuse: Fuser | None = None) -> None:
        """The tasks of each local device, and their executor. Unless `fuse` says what runs together, small updates do
        on processors."""
        together = batched_updates if self.world.device.type == "cpu" else None
        compiled = self._compile_with(fuse or together)
        self.turns = Turns(self.world, self.sections, self.schedule, compiled, meter, self.settings.pairs)
        self.ranks = self.turns.ranks
        graphs = self._recorder(fuse is not None)
        for executor in self.turns.executors:
            if graphs is not None and isinstance(executor, SerialExecutor):
                executor.record_passes(graphs)
        self.inputs = Inputs(self.world, self.ranks, self.settings.accumulate)
        self.replacements = Replacements.of(self.ranks)

    def compile_regions(self, waits: bool = False) -> None:
        """Compile the regions, or begin to, beside steps that run op by op until all processes have them (with `waits`
        now). Not before the first step: until then a program may only be simulated, on a machine that could not run
        it. All processes call it."""
        if self._has_regions or self.compiler.backend == "eager":
            return
        if self.compiler.backend == "background" and not self._has_begun:
            self._has_begun = True
            self._begin_compiling()
        if self._process is not None and self._is_pending(self._process, waits):
            return
        self._build(self.turns.meter, self.compiler.fuse)
        self._has_regions, self._process = True, None

    def _begin_compiling(self) -> None:
        """Begin to compile in a process of its own, if every process can, and has the memory for steps op by op."""
        functions = list[RegionFunction]()

        def note(rank: RankGraph, own: Sequence[int], device: torch.device, parts: Any, kept: Any) -> Any:
            functions.extend(region_functions(rank, own, device, parts, kept))
            return parts

        compiled = self._compile_with(note)
        for device in self.world.devices:
            role = next(number for number, role in enumerate(self.roles) if device in role.devices)
            for form in dict.fromkeys(forms_of(self.schedule.of_role[role])):
                compiled(role, form)
        missing = {function.key: function for function in functions if function.key not in self.compiler.compiled}
        needed = max(peak_bytes(role) for role in self.roles if set(role.devices) & set(self.world.devices))
        fits = needed <= _MEMORY_SHARE * free_bytes(self.world.device)
        process = begin_compiling(self.compiler, missing.values()) if missing and fits else None
        if not on_any(self.world, process is None):
            self._process = process
        elif process is not None:
            process.close()

    def _is_pending(self, process: CompileProcess, waits: bool) -> bool:
        """Whether any process still compiles. Regions run from the same step on everywhere, or replicas of a value
        would diverge by rounding, so the processes ask each other: before early steps, and now and then."""
        self._num_asked += 1
        if waits:
            while process.is_running:
                self.world.check()
                process.wait(POLL)
        elif self._num_asked > _ASKED and self._num_asked % _ASKED:
            return True
        if on_any(self.world, process.is_running):
            return True
        if failure := process.close():
            _NOTES.warning("the process that compiles regions has failed (%s): they are compiled now", failure)
        return False

    def _compile_with(self, fuser: Fuser | None) -> Callable[[int, Actions], Compiled]:
        """A function that compiles the tasks of a role in a microbatch of a form, once."""

        @cache
        def compiled(number: int, form: Actions) -> Compiled:
            its = self.sections[number]
            kept = READ_BEFORE["backward"] | READ_BEFORE["update"]
            renewed = {"param", "state", *(["grad"] if self.settings.run.keep_gradients else ())}
            if self.schedule.is_pipelined:
                kept |= renewed
            elif form[-1].name == "update":  # no other microbatch adds gradients to the sums
                kept = kept - {"acc"} | renewed
            own = [d for d in self.world.devices if d in its.role.devices]
            fuse = partial(fuser, its.role, own, self.world.device) if fuser is not None else None
            return compile_tasks(its.role, self.world.device, lambda kind, _: kind in kept, form, fuse, its)

        return compiled

    # running

    def run(self, micros: Sequence[Mapping[str, Tensor]], numbers: Mapping[str, float], done: Done = None) -> Tensor:
        """Run a step over its microbatches; the loss is their mean. `numbers` are those of the optimizer
        (`capture.optimizers.StepNumbers`). `done(is_skipped)` is called once the step is taken; Ctrl-C waits for its
        end. Raises StepError when loss or norm are not finite, before anything is updated; a step that scales its loss
        is skipped if the norm is not: only its buffers are new."""
        self.state.check_usable()
        began = time.perf_counter()
        try:
            with self.world.guard():
                self.compile_regions()
                self.bindings.take_over(self.state, is_guarded=True)
                losses, metrics = self._differentiate(micros)
                norm = self._norm()
                self.was_skipped = self._is_skipped(losses, norm)
                self.world.check()  # a communication of a GPU that was aborted leaves no result
                with uninterrupted():
                    self._update(numbers)
                    self._keep_results(losses, metrics, norm)
                    if done is not None:
                        done(self.was_skipped)
        finally:
            self._release()
        if self.pace is not None:
            self.pace.add(time.perf_counter() - began)
        return self.values["loss"].clone()

    def trace(
        self,
        micros: Sequence[Mapping[str, Tensor]],
        numbers: Mapping[str, float],
        devices: Sequence[int] = (),
        tokens: int = 0,
        done: Done = None,
    ) -> Simulation:
        """`run`, recorded: see `measured`. On a cluster all ranks call it, and all get the records of all ranks."""
        clock = DeviceClock(self.world.device) if self.world.device.type == "cuda" else HostClock()
        self.compile_regions(waits=True)
        recorder = Recorder(clock, len(self.ranks))
        usual_meter = self.turns.meter
        with self.world.guard():
            self.bindings.take_over(self.state)
            recorder.hold(self.state, self.ranks)
            self.world.meet()
            began = recorder.mark()
            self.turns.meter = recorder
            for executor in self.turns.executors:
                executor.record(recorder)
            try:
                self.run(micros, numbers, done)
            finally:
                self.turns.meter = usual_meter
                for executor in self.turns.executors:
                    executor.record(None)
            traces = recorder.traces(self.world.devices, began, recorder.mark())
            all_traces = gathered(traces) if self.world.is_distributed else traces
        return measured(self.sections, self.schedule, all_traces, devices, tokens)

    def _differentiate(self, micros: Sequence[Mapping[str, Tensor]]) -> tuple[list[Fetched], list[dict[str, Tensor]]]:
        """Forward, loss and backward of each microbatch. Its gradients are added to those of earlier ones; the last
        reduces their sums over the mesh. Returns losses and metrics."""
        losses, metrics = dict[int, Fetched](), dict[int, dict[str, Tensor]]()
        # in a pipeline stages tell each other the losses at the end
        teller = "report" if self.schedule.is_pipelined and "report" in self.sections[0].kinds.values() else "forward"

        def fill(envs: list[Env], number: int) -> None:
            draw = self.state.num_steps * self.settings.accumulate + number
            self.inputs.fill(envs, self.state, micros[number] if number < len(micros) else None, draw)

        def done(action: Action, envs: list[Env]) -> None:
            ranks, env = self.ranks[:1], envs[:1]
            if action.name == teller and has_scalar(ranks, env, "loss"):
                losses[action.microbatch] = Fetched(scalar(ranks, env, "loss"), self.settings.run.check_finite)
                metrics[action.microbatch] = metrics_of(ranks, env)

        self.turns.begin(fill, self.inputs.zeros)
        self.turns.run(done)
        return [losses[number] for number in sorted(losses)], [metrics[number] for number in sorted(metrics)]

    def _norm(self) -> Fetched | None:
        """The global norm of the gradients, if the program has it."""
        if not self.has_norm:
            return None
        return Fetched(scalar(self.ranks, self.turns.last, "norm"), self.is_scaled or self.settings.run.check_finite)

    def _is_skipped(self, losses: Sequence[Fetched], norm: Fetched | None) -> bool:
        """Whether scaled gradients are not finite. Raises StepError if loss or norm are not finite otherwise. On a GPU
        the host waits for the norm: for the end of backward."""
        step = self.state.num_steps + 1
        if self.is_scaled and norm is not None and not math.isfinite(norm.number()):
            self.state.scaler.check(step)
            return True
        if self.settings.run.check_finite:
            check_finite([loss.number() for loss in losses], step)
            if norm is not None:
                check_norm(norm.number(), step)
        return False

    def evaluate(
        self, batch: Mapping[str, Tensor], specs: Mapping[str, Spec]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Forward only, which changes nothing: loss and metrics (none if the program computes no loss) and the full
        tensors of the model's outputs, whose `specs` are by name. All processes call it."""
        self.state.check_usable()
        with self.world.guard():
            try:
                self.compile_regions()
                self.bindings.take_over(self.state, is_guarded=True)
                fill = lambda envs, _: self.inputs.fill(envs, self.state, batch, self.state.num_steps)  # noqa: E731
                self.turns.begin(fill, self.inputs.zeros)
                envs = self.turns.run_first()
                has_loss = any(("loss", "") in rank.graph.outputs for rank in self.ranks)
                loss = {"loss": scalar(self.ranks, envs, "loss")} if has_loss else {}
                return loss | metrics_of(self.ranks, envs), self._outputs(specs, envs)
            finally:
                self._release()

    def _outputs(self, specs: Mapping[str, Spec], envs: Sequence[Env]) -> dict[str, Tensor]:
        values = pieces_by_name(self.ranks, envs, "output")
        layouts = {
            key[1]: layout
            for role in self.roles
            for key, layout in zip(role.outputs, role.output_layouts, strict=True)
            if key[0] == "output"
        }
        return {n: self.world.assemble(spec, layouts[n], values.get(n, [])) for n, spec in specs.items()}

    def _release(self) -> None:
        """Free the values of a step that has ended, completed or not."""
        self.turns.end()

    def _update(self, numbers: Mapping[str, float]) -> None:
        """New parameters and optimizer state, unless the step is skipped, and what forward has changed: buffers, and
        frozen parameters."""
        update = Update(self.state, self.bindings, self.replacements, self.turns.last)
        buffers = [
            (key, env[slot])
            for rank, env in zip(self.ranks, self.turns.last, strict=True)
            for key, slot in outputs(rank)
            if key[0] == "buffer"
        ]
        if not self.was_skipped:
            update.begin(numbers_on(self.world.device, numbers, torch.float64))
            self.turns.update(update.commit)
        update.finish(buffers)
        self.bindings.publish(self.state, self._lasting_outputs)
        self.state.num_steps += 1
        self.state.torn = False

    def _keep_results(
        self, losses: Sequence[Fetched], metrics: Sequence[Mapping[str, Tensor]], norm: Fetched | None
    ) -> None:
        """What can be read after a step: its loss, norm and metrics, and its gradients if they are kept."""
        scaler = self.state.scaler
        if self.settings.run.keep_gradients:
            self.gradient_pieces = None if self.was_skipped else pieces_by_name(self.ranks, self.turns.last, "grad")
        if self.is_scaled:
            for pieces in (self.gradient_pieces or {}).values():
                pieces[:] = [unscaled(piece, 1.0 / scaler.scale) for piece in pieces]
            scaler.adjust(self.was_skipped)
        is_sum = self.settings.is_sum
        whole = {name: joined([each[name] for each in metrics], is_sum) for name in metrics[0]}
        self.values = {"loss": joined([loss.value for loss in losses], is_sum), **whole}
        if norm is not None:
            self.values["grad_norm"] = norm.value
        if self.is_scaled:
            counts = {LOSS_SCALE: scaler.scale, "skipped_steps": scaler.skipped_steps}
            self.values |= {name: torch.tensor(count) for name, count in counts.items()}

    # reading values

    def full(self, kind: str, pieces: Mapping[str, list[Tensor]] | None = None) -> dict[str, Tensor]:
        """Full tensors by name of a kind (param, buffer, state), or of the gradients passed. All processes call it."""
        source = "param" if kind == "grad" else kind
        if kind in ("param", "buffer"):
            self.bindings.take_over(self.state)
        named = {name for rank in self.roles for its_kind, name in rank.outputs if its_kind == kind}
        items = [pair for pair in self.state.items if pair[0].kind == source]
        if pieces is None:
            wanted = [(*pair, self.state.pieces[kind, pair[0].name]) for pair in items]
        else:
            wanted = [(*pair, pieces.get(pair[0].name, [])) for pair in items if pair[0].name in named]
        is_here = all(self.world.has_whole(layout) for _, layout, _ in wanted)
        with nullcontext() if is_here else self.world.call(_FULL[kind]):
            return {item.name: self.world.assemble(item.spec, layout, own) for item, layout, own in wanted}

    def gradients(self) -> dict[str, Tensor]:
        """Full gradients of the last step by parameter name. StepError unless the session keeps them."""
        if not self.settings.run.keep_gradients:
            raise StepError("gradients were not kept", hint="compile with run=mw.RunOptions(keep_gradients=True)")
        if self.was_skipped:
            raise StepError(
                "the last step was skipped: it has no gradients",
                got="gradients of the scaled loss that are not finite in float16",
                expected="a step that is taken; step.metrics['skipped_steps'] counts the others",
            )
        if self.gradient_pieces is None and self.state.num_steps:
            raise StepError("gradients were not kept", hint="compile with run=mw.RunOptions(keep_gradients=True)")
        if self.gradient_pieces is None:
            raise StepError("there are no gradients before the first step", hint="take a step first: step(batch)")
        return self.full("grad", self.gradient_pieces)

    def save_pretrained(self, folder: Path, model: nn.Module, max_file_bytes: int) -> None:
        """Write parameters and persistent buffers as safetensors files, and the model's own configuration. All
        processes assemble the tensors, each when it is read; the first one writes."""
        is_first = self.world.devices[0] == self.world.mesh.devices[0]
        self.bindings.take_over(self.state)
        kept = {item.name: (item, at) for item, at in self.state.items if item.kind != "state"}
        wanted = [kept[name] for name in model.state_dict() if name in kept]
        values = (
            (item.name, self.world.assemble(item.spec, at, self.state.pieces[item.kind, item.name]))
            for item, at in wanted
        )
        write_weights(folder, {item.name: item.spec for item, _ in wanted}, values, max_file_bytes, is_first)
        for part in ("config", "generation_config") if is_first else ():
            save = getattr(getattr(model, part, None), "save_pretrained", None)
            if save is not None:
                save(str(folder))
