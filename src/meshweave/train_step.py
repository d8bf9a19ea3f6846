"""A compiled step as the user sees it: batches in, losses out; parameters, state and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.batch import Batch
from meshweave.capture.guards import Guards, StepKey
from meshweave.capture.optimizer_groups import OptimizerGuard, note_untrained, options_of, parts_of, put_options
from meshweave.capture.optimizers import StepNumbers, initial_state, resting_state
from meshweave.capture.step import Part
from meshweave.cost.simulate.result import Simulation
from meshweave.errors import OutdatedUpdate, StepError
from meshweave.interop.accelerate import refuse_accumulation
from meshweave.interop.optimizer import mark_stepped
from meshweave.ir.graph import Spec, tokens_of
from meshweave.program import Program
from meshweave.report.moves import MoveRow, move_rows
from meshweave.runtime.eager_update import EagerUpdate
from meshweave.runtime.initialize import materialize
from meshweave.runtime.optimizer_state import OptimizerState
from meshweave.runtime.session import Session, SessionSettings
from meshweave.runtime.state import State
from meshweave.runtime.weight_files import WeightFiles
from meshweave.runtime.world import World
from meshweave.variants import Build, Variant, Variants, evaluating, rows_check

_LOG = logging.getLogger("meshweave")
_PARTS = "forward, backward or update"


class TrainStep:
    """A compiled training step: call it with a batch, get the loss.

    `program` has the graphs, `metrics` the numbers of the last step (loss, grad_norm).
    """

    def __init__(
        self,
        program: Program,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        world: World,
        settings: SessionSettings,
        build: Build | None = None,
        again: Callable[[], TrainStep] | None = None,
        keeps_gradients: bool = True,
    ) -> None:
        """`build` compiles programs for other batches; `again()` compiles the step anew for the current model and
        optimizer. `keeps_gradients`: whether gradients that an eager update has used are kept."""
        self.again = again
        self.model, self.optimizer = model, optimizer
        note_untrained(model, optimizer)
        session = Session(program.roles, world, settings)
        spec = program.optimizer
        optimizer_state = initial_state(optimizer, spec, model) if optimizer is not None and spec is not None else None
        initial = _initial_values(session.state, model, settings)
        session.state.fill(initial, optimizer_state.tensors if optimizer_state else None)
        session.state.num_steps = optimizer_state.num_steps if optimizer_state else 0
        rests = resting_state(optimizer, spec.kind_of, model) if optimizer is not None and spec is not None else {}
        for name, (tensors, _) in rests.items():
            session.state.rest(name, {slot: Spec(tuple(x.shape), x.dtype) for slot, x in tensors.items()}, tensors)
        session.bindings.bind(session.state, model, optimizer)
        guards = Guards(program.contract.roots, program.options.precision.autocast, session.bindings.follow)
        first = Variant(program, session, [StepKey.of(program.contract.batch)], rows_check(program, world))
        self.variants = Variants(guards, first, build)
        self._last = first
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
            self.eager_update.distribute(session.state)
            session.state.num_steps = self.eager_update.num_steps
        self._trains = [(p, trains[name]) for name, p in model.named_parameters()]
        if optimizer_state or rests:
            self._publish(rests)

    @property
    def program(self) -> Program:
        """The program of the example batch."""
        return self.variants.first.program

    @property
    def session(self) -> Session:
        """The session that runs the program of the example and owns the state."""
        return self.variants.first.session

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
        with self._call(name if accumulate is None else f"{name}, accumulate={accumulate}", batch) as checked:
            variant, micros, numbers = self._prepared(checked, accumulate)
            loss = variant.session.run(micros, numbers, partial(self._stepped, variant))
        return loss

    def trace(self, batch: Any) -> Simulation:
        """Train on one batch as a call does, and measure when every task and communication ran on every device.

        The result has the form of a simulated step, so that `meshweave.report` shows both side by side. On a cluster
        all ranks call it, and all get the times of all ranks. The first steps of a process are slower than the others.
        """
        with self._call("trace", batch) as checked:
            variant, micros, numbers = self._prepared(checked)
            tokens = tokens_of(variant.program.captured) * len(micros)
            done = partial(self._stepped, variant)
            timeline = variant.session.trace(micros, numbers, tokens=tokens, done=done)
        return timeline

    def evaluate(self, batch: Any, *, training: bool = False) -> Tensor:
        """The loss of a batch, with `model.eval()` (or, for `training`, with the current modes of the modules). Neither
        parameters nor buffers are updated. On a cluster all ranks call it."""
        return self._forward_alone(batch, "loss", training)[0]

    def forward_only(self, batch: Any, *, training: bool = False) -> Any:
        """The model's outputs for a batch, as whole tensors on every process; the batch needs no labels. Modes and
        state are as in `evaluate`."""
        return self._forward_alone(batch, "outputs", training)[1]

    def _forward_alone(self, batch: Any, part: Part, training: bool) -> tuple[Tensor, Any]:
        name = "evaluate" if part == "loss" else "forward_only"
        with self._call(name, batch) as batch_checked, nullcontext() if training else evaluating(self.model):
            variant, inputs = self.variants.of(batch_checked, part, 1)
            loss, tensors = variant.session.evaluate(
                dict(zip(inputs.names, inputs.tensors, strict=True)), variant.outputs
            )
            shape = variant.program.contract.outputs
            return loss, shape.join(tensors) if shape is not None else None

    def forward(self, batch: Any) -> Tensor:
        """Forward and loss of one microbatch (the batch, unless gradients are accumulated); returns its loss.

        `forward`, `backward` (for each microbatch) and `update` together do to the bit what calling the step does. Each
        raises StepError when it is called out of order; a failure ends the step.
        """
        with self._call(_PARTS, batch) as checked:
            self._first_numbers(self.variants.first)
            self.variants.check_first(checked)
            self.variants.compare(self.variants.first, checked, self._groups)
            return self.session.forward(dict(zip(checked.names, checked.tensors, strict=True)))

    def backward(self) -> None:
        """Gradients of the microbatch that went through `forward`, reduced over the mesh."""
        with self.session.world.call(_PARTS):
            self.session.backward()

    def update(self) -> None:
        """New parameters and optimizer state, after all backwards. StepError if any were written since `forward`."""
        with self.session.world.call(_PARTS):
            refuse_accumulation()
            if self._own_state is not None and self.session.progress.due == "update":
                self._own_state.check_unwritten(self.session)
            self.session.update(self._numbers(), partial(self._stepped, self.variants.first))

    @contextmanager
    def _call(self, name: str, batch: Any) -> Iterator[Batch]:
        """Run a call on a batch; every rank makes this call with the same shapes."""
        world, rows = self.session.world, self.variants.first.rows
        with world.guard():
            checked = Batch.of(batch)
            is_compared = rows is not None and rows.is_due and name.startswith("step")
            with world.call(name, () if is_compared or not world.is_distributed else checked.shapes):
                if self._is_refrozen:
                    self._renew("parameters were frozen or unfrozen")
                yield checked

    @property
    def _groups(self) -> Sequence[Mapping[str, Any]]:
        return self.optimizer.param_groups if self.optimizer is not None else ()

    def _micros(self, batch: Batch, accumulate: int | None = None) -> tuple[Variant, list[Mapping[str, Tensor]]]:
        variant, inputs = self.variants.of(batch, "train", accumulate, self._groups)
        return variant, [dict(zip(inputs.names, part, strict=True)) for part in inputs.split(variant.accumulate)]

    def _prepared(
        self, batch: Batch, accumulate: int | None = None
    ) -> tuple[Variant, list[Mapping[str, Tensor]], dict[str, float]]:
        """The program for a batch, its microbatches, and the numbers of its update."""
        refuse_accumulation()
        numbers = self._first_numbers(first := self.variants.first)
        variant, micros = self._micros(batch, accumulate)
        if variant.updated != first.updated:
            known = self.variants
            numbers = self._first_numbers(variant)
            if self.variants is not known:  # the step was compiled again
                variant, micros = self._micros(batch, accumulate)
        return variant, micros, numbers

    def _numbers(self, variant: Variant | None = None) -> dict[str, float]:
        """The numbers that the optimizer's code computes for the next step of a program from its current options."""
        if self.optimizer_guard is None or self.numbers is None:
            return {}
        self.optimizer_guard.check()
        numbers, fills = self.numbers.next((variant or self.variants.first).updated)
        self.session.state.refill(fills)
        return numbers

    def _first_numbers(self, variant: Variant) -> dict[str, float]:
        """`_numbers`, before anything else of a step runs, from the state that the user has written. If the optimizer
        needs an update that was not compiled, the step is compiled again with the same arguments, on the same state."""
        self._take_over()
        if self.again is None or self.session.progress.num_done:
            return self._numbers(variant)
        try:
            numbers = self._numbers(variant)
        except OutdatedUpdate as change:
            self._renew(f"{change.what} ({change.where})")
            numbers = self._numbers(variant)
        return numbers

    @property
    def _is_refrozen(self) -> bool:
        """Whether parameters were frozen or unfrozen since the step was compiled, and it can be compiled again."""
        is_idle = self.again is not None and not self.session.progress.num_done
        return is_idle and any(p.requires_grad != trains for p, trains in self._trains)

    def recompile(self) -> None:
        """Compile again for the present model and optimizer, on the same state: after a change of anything that the
        step was traced from and that it does not see (docs/contract.md). On a cluster all ranks call it."""
        with self.session.world.call("recompile"):
            self.session.progress.check_idle("compiling again")
            self._take_over()
            self._renew("recompile() was called")

    def _renew(self, why: str) -> None:
        """Compile again, for the current model and optimizer."""
        if self.again is None:
            raise StepError("this step cannot be compiled again", hint="it was not made by mw.compile")
        self.session.world.note(f"compiles again: {why}")
        _LOG.warning("the step is compiled again: %s", why)
        num_steps, saves, renewed = self.num_steps, self.session.saves, self.again()
        self.__dict__.update(renewed.__dict__)
        self.session.saves, self.session.state.num_steps = saves, num_steps

    def _take_over(self) -> None:
        """Use, from now on, the state that the user has loaded into the optimizer or written to it."""
        if self.optimizer is None or self._own_state is None or self.numbers is None or self.session.progress.num_done:
            return
        if self._own_state.take_over(self.session.state):
            names = {id(p): name for name, p in self._own_state.params.items()}
            optimizer_state = initial_state(self.optimizer, self.numbers.spec, names)
            self.session.state.num_steps = optimizer_state.num_steps if optimizer_state else 0
            self.numbers.read()

    def _stepped(self, variant: Variant) -> None:
        self._last = variant
        if self.eager_update is not None:
            self.eager_update.run(variant.session)
        if self.optimizer is not None and self.numbers is not None:
            self.numbers.commit()
            for part in parts_of(self.optimizer):
                mark_stepped(part)
            self._publish()

    def _publish(self, others: Collection[str] = ()) -> None:
        """Copy the optimizer's state into `optimizer.state`: that of parameters that have taken a step, and tensors of
        `others`."""
        if self._own_state is not None and self.numbers is not None:
            stepped = self.numbers.stepped
            self._own_state.publish(self.session.state, self.numbers.kept(stepped), stepped.union(others))

    @property
    def metrics(self) -> dict[str, float]:
        """The numbers of the last step. On CUDA this waits for the step."""
        return {name: float(value) for name, value in self._last.session.values.items()}

    @property
    def num_steps(self) -> int:
        """Number of completed steps."""
        return self.session.state.num_steps

    def parameters(self, *, sharded: bool = False) -> dict[str, Tensor]:
        """Parameters by name: full tensors, or on a cluster DTensors of this rank's pieces."""
        return self.session.sharded("param") if sharded else self.session.full("param")

    def buffers(self) -> dict[str, Tensor]:
        """Full buffers by name."""
        return self.session.full("buffer")

    def optimizer_state(self) -> dict[str, Tensor]:
        """Full optimizer state by `slot/parameter`."""
        if self.eager_update is not None:
            self.eager_update.keep(self.session.state)
        return self.session.full("state")

    def gradients(self) -> dict[str, Tensor]:
        """Full gradients of the last step by name; needs `RunOptions(keep_gradients=True)`."""
        return self._last.session.gradients()

    def save(self, path: str) -> None:
        """Write a torch.distributed.checkpoint. After a crash during the write `path` has its previous contents."""
        with self.session.world.call("save"):
            self._take_numbers()
            self.session.save(path)

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
            self._take_numbers()
            return self.session.async_save(path)

    def _take_numbers(self) -> None:
        if self.eager_update is not None:
            self.eager_update.keep(self.session.state)
        if self.optimizer is not None and self.numbers is not None:
            self._take_over()
            rests = resting_state(self.optimizer, self.numbers.spec.kind_of, self.model)
            self.session.state.options = options_of(self.optimizer)
            self.session.state.numbers = self.numbers.values() | {name: kept for name, (_, kept) in rests.items()}

    def load(self, path: str) -> None:
        """Continue from a checkpoint of the same model, saved on any mesh, with any parameters frozen. Options of the
        optimizer's groups (lr, ...) come from the checkpoint, as with `optimizer.load_state_dict`. No code in it is
        unpickled."""
        with self.session.world.call("load"):
            fresh = self.session.load(path)
            for variant in self.variants.all:
                variant.session.state = self.session.state
            if self.eager_update is not None:
                self.eager_update.load(self.session.state)
            if self.numbers is None or self._own_state is None:
                return
            state = self.session.state
            put_options(self._own_state.optimizer, state.options)
            self._own_state.put_numbers(state, self.numbers.spec, fresh)
            if not fresh:
                self.numbers.load(state.numbers, state.num_steps)
                self._publish({item.name.partition("/")[2] for item, _ in state.resting})
            else:
                self._own_state.publish(state, {}, {item.name.partition("/")[2] for item, _ in state.items} - {*fresh})
                self._renew("some parameters have taken no step in the checkpoint")

    def explain(self) -> list[MoveRow]:
        """Every move of the step: reason, layouts from and to, steps, bytes, seconds. `str(table(rows))` prints it."""
        return move_rows(self.program.placed, self.program.mesh)


def _initial_values(state: State, model: nn.Module, settings: SessionSettings) -> Iterator[tuple[str, Tensor]]:
    """The initial values of parameters and buffers, except those in weight files, which are read directly."""
    if settings.weights is None:
        return materialize(model, settings.seed)
    files = WeightFiles.of(settings.weights, model)
    state.read(files)
    return materialize(model, settings.seed, [item.name for item, _ in state.items if not state.has(item)])
