"""The update of an optimizer whose `step()` cannot be traced: after a compiled backward pass its own `step()` runs on
the tensors that the user sees, with reduced gradients in `p.grad`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshweave.capture.optimizer_groups import options_of, parts_of, put_options
from meshweave.capture.optimizers import number_like, resting_state
from meshweave.errors import CheckpointError
from meshweave.ir.graph import Spec
from meshweave.runtime.bindings import Bound
from meshweave.runtime.optimizer_state import OptimizerState
from meshweave.runtime.session import Session
from meshweave.runtime.state import State

Described = tuple[dict[str, Spec], dict[str, Any]]  # of a parameter's state: tensors by slot, numbers by slot


class EagerUpdate:
    """Runs the own `step()` of an optimizer over a model whose tensors are bound to the state of a session.

    The optimizer's state is its own. The session's state has it only while a checkpoint is written or read, as
    `State.resting`. Gradients are DTensors where parameters are, else whole tensors.
    """

    def __init__(self, own_state: OptimizerState, model: nn.Module, clip: float | None, keeps_gradients: bool) -> None:
        """`clip`: the largest global norm of gradients. `keeps_gradients`: whether the session keeps them after the
        update."""
        self.own_state, self.optimizer, self.model = own_state, own_state.optimizer, model
        self._clip, self._keeps_gradients = clip, keeps_gradients

    def run(self, session: Session) -> None:
        """Update the parameters after a backward pass of `session`. All ranks call it. What the optimizer writes is the
        session's state from then on; an error in it leaves the state torn."""
        state, bindings = session.state, session.bindings
        self._forget(state)
        scale = None
        if self._clip is not None:
            scale = torch.clamp(self._clip / (session.values["grad_norm"] + 1e-6), max=1.0)
        named = {name for role in session.roles for kind, name in role.outputs if kind == "grad"}
        bounds = [bound for (kind, name), bound in bindings.bound.items() if kind == "param" and name in named]
        state.torn = True
        for bound in bounds:
            grad = self._gradient(session, bound)
            if grad is not None:
                bound.tensor.grad = grad.clone() if scale is None else (grad * scale).to(grad.dtype)
        if not self._keeps_gradients:
            session.gradient_pieces = None
        with _whole_sums(bounds):
            for part in parts_of(self.optimizer):
                part.step()
        for bound in bounds:
            bound.tensor.grad = None
        state.torn = False
        bindings.take_over(state)

    def _gradient(self, session: Session, bound: Bound) -> Tensor | None:
        """The gradient of a parameter; None for a DTensor of which another stage's ranks have all pieces."""
        pieces: Sequence[Tensor] = (session.gradient_pieces or {}).get(bound.item.name, ())
        if bound.form == "dtensor":
            from meshweave.runtime.dtensor_parameters import dtensor_of  # importing DTensor is slow

            return dtensor_of(pieces[0], bound.item, bound.layout, session.world.device.type) if pieces else None
        if bound.form == "shared":
            return pieces[0]
        return session.world.assemble(bound.item.spec, bound.layout, list(pieces))

    def keep(self, state: State) -> None:
        """Copy the optimizer's state into the session's, for a checkpoint. All ranks call it."""
        self._forget(state)
        own = resting_state(self.optimizer, (), self.model)
        described: dict[str, Described] = {}
        for name, (tensors, others) in own.items():
            kept = self.optimizer.state[self.own_state.params[name]]
            specs = {slot: Spec(tuple(value.shape), value.dtype) for slot, value in tensors.items()}
            described[name] = specs, {slot: _saved(name, slot, kept[slot]) for slot in others}
        everything = self._of_all_stages(described)
        for name in sorted(everything):
            state.rest(name, everything[name][0], own[name][0] if name in own else {})
        state.options = options_of(self.optimizer)
        state.numbers = {name: numbers for name, (_, numbers) in everything.items()}

    def _of_all_stages(self, described: dict[str, Described]) -> dict[str, Described]:
        """What all ranks have: those of a pipeline have the state of their own stage."""
        bindings = self.own_state.bindings
        devices = bindings.world.mesh.devices
        if not bindings.world.is_distributed or all(b.layout.mesh.covers(devices) for b in bindings.bound.values()):
            return described
        received: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(received, described)
        return {name: entry for its in received for name, entry in its.items()}

    def load(self, state: State) -> None:
        """Continue with the state that a checkpoint was read into. All ranks call it."""
        put_options(self.optimizer, state.options)
        numbers: dict[str, dict[str, Any]] = {}
        for name, p in self.own_state.params.items():
            before = self.optimizer.state.pop(p, {})
            kept = state.numbers.get(name, {})
            numbers[name] = {slot: number_like(value, before.get(slot)) for slot, value in kept.items()}
        self._publish(state, {name: kept for name, kept in numbers.items() if kept})

    @property
    def num_steps(self) -> int:
        """How many steps the optimizer has taken, by its own counts."""
        return max((int(kept.get("step", 1)) for kept in self.optimizer.state.values() if kept), default=0)

    def _publish(self, state: State, numbers: Mapping[str, Mapping[str, Any]]) -> None:
        """Move state from the session to the optimizer, in the form of the parameters."""
        self.own_state.publish(state, numbers, {item.name.partition("/")[2] for item, _ in state.resting})
        bound = self.own_state.bindings.bound
        for item, _ in state.resting:
            bound.pop(("state", item.name), None)
        self._forget(state)

    def distribute(self, state: State) -> None:
        """Let state that is older than the DTensors in place of its parameters become DTensors, too."""
        older = {
            name: tensors
            for name, (tensors, _) in resting_state(self.optimizer, (), self.model).items()
            if self.own_state.bindings.bound["param", name].form == "dtensor"
            and not any(hasattr(x, "placements") for x in tensors.values())
        }
        for name, tensors in older.items():
            state.rest(name, {slot: Spec(tuple(x.shape), x.dtype) for slot, x in tensors.items()}, tensors)
        self._publish(state, {})

    @staticmethod
    def _forget(state: State) -> None:
        for item, _ in state.resting:
            state.pieces.pop(("state", item.name), None)
        state.resting.clear()


def _whole_sums(bounds: Sequence[Bound]) -> AbstractContextManager[Any]:
    if all(bound.form != "dtensor" for bound in bounds):
        return nullcontext()
    from meshweave.runtime.dtensor_parameters import WholeSums

    return WholeSums()


def _saved(name: str, slot: str, value: Any) -> Any:
    """A number of the optimizer's state in a checkpoint; of a tensor with its dtype."""
    if isinstance(value, Tensor):
        return [str(value.dtype).removeprefix("torch."), value.item()]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(
        "the optimizer's state cannot be written to a checkpoint",
        where=f"optimizer.state of {name}",
        got=f"'{slot}' is a {type(value).__name__}",
        expected="tensors and numbers",
    )
