"""A compiled step as the user sees it: batches in, losses out; parameters, state and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from meshweave.capture.batch import Batch
from meshweave.capture.guards import Guards, StepKey
from meshweave.capture.optimizer_groups import OptimizerGuard, note_untrained, parts_of
from meshweave.capture.optimizers import StepNumbers, state_tensors
from meshweave.capture.step import Part
from meshweave.cost.simulate.result import Simulation
from meshweave.errors import OutdatedUpdate, StepError
from meshweave.interop.accelerate import refuse_accumulation
from meshweave.interop.hooks import mark_stepped
from meshweave.ir.graph import tokens_of
from meshweave.program import Program
from meshweave.report.moves import MoveRow, move_rows
from meshweave.runtime.eager_update import EagerUpdate
from meshweave.runtime.initialize import materialize
from meshweave.runtime.interfaces import World
from meshweave.runtime.optimizer_state import OptimizerState
from meshweave.runtime.session import Session, SessionSettings
from meshweave.runtime.state import State, full_values, is_here
from meshweave.runtime.weight_files import WeightFiles
from meshweave.variants import Build, Variant, Variants, evaluating, rows_check

if TYPE_CHECKING:
    from meshweave.runtime.checkpoint_contents import CheckpointContents

_LOG = logging.getLogger("meshweave")
T = TypeVar("T")


class CompiledStep:
    """The programs of a step on one state, that of a model and its optimizer. A step that is compiled again has a new
    one."""

    def __init__(
        self,
        program: Program,
        model: nn.Module,
        optimizer: Optimizer | None,
        world: World,
        settings: SessionSettings,
        build: Build | None = None,
        keeps_gradients: bool = True,
    ) -> None:
        """`build` compiles programs for other batches. `keeps_gradients`: whether gradients that an eager update has
        used are kept."""
        self.model, self.optimizer = model, optimizer
        note_untrained(model, optimizer)
        own = replace(settings, is_sum=program.is_sum, pipeline=program.pipeline, pairs=program.pairs)
        session = Session(program.roles, world, own)
        spec = program.optimizer
        session.state.fill(_initial_values(session.state, model, settings))
        session.bindings.bind(session.state, model, optimizer)
        guards = Guards(program.contract.roots, program.options.precision.autocast)
        keys = [StepKey.of(program.contract.batch)]
        first = Variant(program=program, session=session, keys=keys, rows=rows_check(program, world))
        self.variants = Variants(guards, first, build)
        self.last = first  # the program of the last step
        self.evaluated: Mapping[str, Tensor] = {}  # loss and metrics of the last evaluation
        self.numbers = None
        if optimizer is not None and spec is not None:
            self.numbers = StepNumbers(spec, optimizer, model)
        self.optimizer_guard = OptimizerGuard(optimizer) if optimizer is not None else None
        self._own_state = None if optimizer is None else OptimizerState.of(session.bindings, optimizer, model)
        trains = {i.name: i.requires_grad for i in program.captured.inputs if i.kind == "param"}
        self.eager_update = None
        if self._own_state is not None and self.numbers is None:
            clip = program.options.clip_grad_norm
            self.eager_update = EagerUpdate(self._own_state, model, clip, keeps_gradients)
            if world.is_distributed:
                from meshweave.runtime.dtensor_parameters import distribute_state  # importing DTensor is slow

                distribute_state(self._own_state.optimizer)
            session.state.num_steps = self.eager_update.num_steps
        self._trains = [(p, trains[name]) for name, p in model.named_parameters()]
        self.take_over()
        self._publish()

    @property
    def session(self) -> Session:
        """The session that runs the program of the example and owns the state."""
        return self.variants.first.session

    @property
    def is_refrozen(self) -> bool:
        """Whether parameters were frozen or unfrozen since the step was compiled."""
        return any(p.requires_grad != trains for p, trains in self._trains)

    def run(self, batch: Batch, accumulate: int | None = None) -> Tensor:
        """Take a step. Returns its loss. Raises OutdatedUpdate, before anything runs, if the optimizer needs an update
        that was not compiled."""
        variant, micros, numbers = self._prepared(batch, accumulate)
        return variant.session.run(micros, numbers, partial(self._stepped, variant))

    def trace(self, batch: Batch) -> Simulation:
        """`run`, measured."""
        variant, micros, numbers = self._prepared(batch)
        tokens = tokens_of(variant.program.captured) * len(micros)
        return variant.session.trace(micros, numbers, tokens=tokens, done=partial(self._stepped, variant))

    def evaluate(self, batch: Batch, part: Part, training: bool) -> tuple[Tensor, Any]:
        """The loss and the model's outputs, of which those that `part` does not compute are NaN or None."""
        with nullcontext() if training else evaluating(self.model):
            variant, inputs = self.variants.of(batch, part, 1)
            tensors = dict(zip(inputs.names, inputs.tensors, strict=True))
            numbers, outputs = variant.session.evaluate(tensors, variant.outputs)
            self.evaluated = numbers or self.evaluated
            shape = variant.program.contract.outputs
            loss = numbers["loss"].clone() if numbers else torch.tensor(torch.nan)
            return loss, shape.join(outputs) if shape is not None else None

    def _prepared(
        self, batch: Batch, accumulate: int | None = None
    ) -> tuple[Variant, list[dict[str, Tensor]], dict[str, float]]:
        """The program for a batch, its microbatches, and the numbers of its update, from what the user has written."""
        refuse_accumulation()
        self.take_over()
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        variant, inputs = self.variants.of(batch, "train", accumulate, groups)
        micros = variant.micros(inputs)
        if self.optimizer_guard is None:
            return variant, micros, {}
        self.optimizer_guard.check()
        if self.numbers is None:
            return variant, micros, {}
        numbers, fills = self.numbers.next(variant.updated)
        self.session.state.refill(fills)
        return variant, micros, numbers

    def take_over(self) -> None:
        """Use, from now on, the state that the user has loaded into the optimizer or written to it."""
        if self.optimizer is None or self._own_state is None or self.numbers is None:
            return
        if self._own_state.take_over(self.session.state):
            counts = [int(kept["step"]) for kept in self.optimizer.state.values() if "step" in kept]
            self.session.state.num_steps = max(counts, default=self.session.state.num_steps)
            self.numbers.read()

    def _stepped(self, variant: Variant, is_skipped: bool) -> None:
        self.last = variant
        if self.eager_update is not None and not is_skipped:
            self.eager_update.run(variant.session)
        if self.optimizer is not None and self.numbers is not None:
            for part in parts_of(self.optimizer):
                mark_stepped(part)
            if not is_skipped:
                self.numbers.commit()
                self._publish()

    def _publish(self) -> None:
        """Copy the optimizer's state into `optimizer.state`, that of parameters that have taken a step."""
        if self._own_state is not None and self.numbers is not None:
            stepped = self.numbers.stepped
            self._own_state.publish(self.session.state, self.numbers.kept(stepped), stepped)

    def optimizer_state(self) -> dict[str, Tensor]:
        """Full optimizer state by `slot/parameter`; of an eager update, that of this rank's parameters."""
        if self.optimizer is None or self.eager_update is None:
            return self.session.full("state")
        own = state_tensors(self.optimizer, self.model)
        tensors = {f"{slot}/{name}": x for name, xs in own.items() for slot, x in xs.items()}
        return {key: full_values(x) for key, x in tensors.items() if is_here(x)}

    def save(self, path: str) -> None:
        """Write a checkpoint."""
        saved = self._checkpoint_contents()
        saved.save(path, self.session.state, self.session.settings.seed)

    def async_save(self, path: str) -> Future[None]:
        """Write a checkpoint of the present state on a thread."""
        saved, session = self._checkpoint_contents(), self.session
        begin = partial(saved.async_save, path, session.state, session.settings.seed)
        return session.saves.begin(session.world, begin)

    def load(self, path: str) -> None:
        """Continue from a checkpoint."""
        state = self.session.state
        saved = self._checkpoint_contents(is_written=False)
        spec = self.numbers.spec if self.numbers is not None else None
        likes = {slot: x for kind in spec.kinds for slot, x in kind.kept.items()} if spec is not None else {}
        saved.load(path, state, self.session.settings.seed, likes)
        num_steps = state.num_steps
        self.take_over()
        state.num_steps = num_steps

    def _checkpoint_contents(self, is_written: bool = True) -> CheckpointContents:
        """What a checkpoint contains, after the previous one is written."""
        from meshweave.runtime.checkpoint_contents import CheckpointContents  # slow to import, and few programs need it

        self.session.saves.wait(self.session.world)
        if is_written:
            self.session.bindings.take_over(self.session.state)
            self.take_over()
        spec = self.numbers.spec if self.numbers is not None else None
        return CheckpointContents(self.session.bindings, self.model, self.optimizer, {} if spec is None else spec.slots)


class TrainStep:
    """A compiled training step: call it with a batch, get the loss.

    `program` has the graphs, `metrics` the numbers of the last step (loss, grad_norm, those that the loss returned).
    """

    def __init__(self, compiled: CompiledStep, compile_again: Callable[[], CompiledStep] | None = None) -> None:
        """`compile_again` compiles the step anew for the current model and optimizer."""
        self.model, self.optimizer = compiled.model, compiled.optimizer
        self._compiled, self._compile_again = compiled, compile_again

    @property
    def program(self) -> Program:
        """The program of the example batch."""
        return self._compiled.variants.first.program

    @property
    def session(self) -> Session:
        """The session that runs the program of the example and owns the state."""
        return self._compiled.session

    def __call__(self, batch: Any, *, accumulate: int | None = None) -> Tensor:
        """Train on one global batch (or, on a cluster, this rank's piece of it). Returns the loss: a 0-dim tensor
        without gradient, of its own memory on the step's device.

        A batch of another shape, another number of microbatches (`accumulate`), `model.train()`, `model.eval()` each
        have a program of their own on the same state, compiled when first needed. Where parameters were frozen or
        unfrozen (`requires_grad_`), or the optimizer needs another update, the step is compiled again.

        Raises LayoutError for a batch that does not match the example or exceeds the number of shapes, StepError for a
        loss that is not finite and if model, batch or optimizer have changed since compilation (docs/capture.md).
        """
        name = "step" if self.model.training else "step in eval mode"
        name = name if accumulate is None else f"{name}, accumulate={accumulate}"
        return self._run(name, batch, lambda compiled, checked: compiled.run(checked, accumulate))

    def trace(self, batch: Any) -> Simulation:
        """Train on one batch as a call does, and measure when every task and communication ran on every device.

        The result has the form of a simulated step, so that `meshweave.report` shows both side by side. On a cluster
        all ranks call it, and all get the times of all ranks. The first steps of a process are slower than the others.
        """
        return self._run("trace", batch, CompiledStep.trace)

    def evaluate(self, batch: Any, *, training: bool = False) -> Tensor:
        """The loss of a batch, with `model.eval()` (or, for `training`, with the current modes of the modules). Neither
        parameters nor buffers are updated. On a cluster all ranks call it."""
        return self._run("evaluate", batch, lambda compiled, checked: compiled.evaluate(checked, "loss", training))[0]

    def forward_only(self, batch: Any, *, training: bool = False) -> Any:
        """The model's outputs for a batch, as whole tensors on every process; the batch needs no labels. Modes and
        state are as in `evaluate`."""
        part: Part = "outputs"
        return self._run("forward_only", batch, lambda compiled, checked: compiled.evaluate(checked, part, training))[1]

    def _run(self, name: str, batch: Any, work: Callable[[CompiledStep, Batch], T]) -> T:
        """Run a call on a batch; every rank makes this call with the same shapes."""
        world, rows = self.session.world, self._compiled.variants.first.rows
        with world.guard():
            checked = Batch.of(batch)
            is_compared = rows is not None and rows.is_due and name.startswith("step")
            with world.call(name, () if is_compared or not world.is_distributed else checked.shapes):
                if self._compile_again is not None and self._compiled.is_refrozen:
                    self._renew("parameters were frozen or unfrozen")
                try:
                    return work(self._compiled, checked)
                except OutdatedUpdate as change:
                    if self._compile_again is None:
                        raise
                    self._renew(f"{change.what} ({change.where})")
                return work(self._compiled, checked)

    def recompile(self) -> None:
        """Compile again for the present model and optimizer, on the same state: after a change of anything that the
        step was traced from and that it does not see (docs/contract.md). On a cluster all ranks call it."""
        with self.session.world.call("recompile"):
            self._compiled.take_over()
            self._renew("recompile() was called")

    def _renew(self, why: str) -> None:
        """Compile again, for the current model and optimizer."""
        if self._compile_again is None:
            raise StepError("this step cannot be compiled again", hint="it was not made by mw.compile")
        self.session.world.note(f"compiles again: {why}")
        _LOG.warning("the step is compiled again: %s", why)
        before = self.session
        self._compiled = self._compile_again()
        state = self.session.state
        self.session.saves, state.num_steps, state.scaler = before.saves, before.state.num_steps, before.state.scaler

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of the last step: `loss`, with `clip_grad_norm` `grad_norm`, and what a loss function returned as
        `(loss, {"name": number})`, of the global batch, averaged over microbatches. If the loss is scaled, also
        `grad_norm`, the `loss_scale` of the next step, and the number of `skipped_steps` so far. On CUDA this waits for
        the step."""
        return {name: float(value) for name, value in self._compiled.last.session.values.items()}

    @property
    def evaluated(self) -> dict[str, float]:
        """The numbers of the last `evaluate`: `loss`, and what the loss function returned beside it."""
        return {name: float(value) for name, value in self._compiled.evaluated.items()}

    @property
    def num_steps(self) -> int:
        """Number of completed steps."""
        return self.session.state.num_steps

    def parameters(self) -> dict[str, Tensor]:
        """Full parameters by name."""
        return self.session.full("param")

    def buffers(self) -> dict[str, Tensor]:
        """Full buffers by name."""
        return self.session.full("buffer")

    def optimizer_state(self) -> dict[str, Tensor]:
        """Full optimizer state by `slot/parameter`."""
        return self._compiled.optimizer_state()

    def gradients(self) -> dict[str, Tensor]:
        """Full gradients of the last step by name; needs `RunOptions(keep_gradients=True)`."""
        return self._compiled.last.session.gradients()

    def save(self, path: str) -> None:
        """Write a torch.distributed.checkpoint. After a crash during the write `path` has its previous contents."""
        with self.session.world.call("save"):
            self._compiled.save(path)

    def save_pretrained(self, folder: str, *, max_file_bytes: int = 5 << 30) -> None:
        """Write the parameters and persistent buffers as safetensors files, and the model's `config` where it has one:
        a folder that `from_pretrained` and `mw.compile(weights=folder)` take. On a cluster all ranks call it; a rank
        has at most a single whole tensor at a time, the first rank, which writes, those of a file.
        """
        with self.session.world.call("save_pretrained"):
            self.session.save_pretrained(Path(folder), self.model, max_file_bytes)

    def async_save(self, path: str) -> Future[None]:
        """`save` as `torch.distributed.checkpoint.async_save` does it: copies the state to CPU memory and returns; a
        thread writes it and publishes it at `path` while steps go on. On a cluster all ranks call it.

        The future is done when the checkpoint is at `path`: wait for it (`.result()`) before
        `torch.distributed.destroy_process_group()`. The next `save`, `async_save` or `load` waits for it, and so does
        the end of the program. An error in the thread is a CheckpointError: logged when it occurs, raised by
        `.result()` and by that next call.
        """
        with self.session.world.call("async_save"):
            return self._compiled.async_save(path)

    def load(self, path: str) -> None:
        """Continue from a checkpoint of the same model, saved on any mesh, with any parameters frozen. Options of the
        optimizer's groups (lr, ...) come from the checkpoint, as with `optimizer.load_state_dict`. No code in it is
        unpickled."""
        with self.session.world.call("load"):
            self._compiled.load(path)

    def explain(self) -> list[MoveRow]:
        """Every move of the step, before passes: reason, layouts from and to, steps, bytes, seconds, and how many times
        it is made: those of forward, loss and backward in every microbatch."""
        program = self.program
        return move_rows(program.placed, program.mesh, program.expanded, program.options.accumulate)


def _initial_values(state: State, model: nn.Module, settings: SessionSettings) -> Iterator[tuple[str, Tensor]]:
    """The initial values of parameters and buffers, except those in weight files, which are read directly."""
    if settings.weights is None:
        return materialize(model, settings.seed)
    files = WeightFiles.of(settings.weights, model)
    state.read(files)
    return materialize(model, settings.seed, [i.name for i, _ in state.items if (i.kind, i.name) not in state.pieces])
