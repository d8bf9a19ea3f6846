"""The update of an optimizer that is not in the table of updates: after a compiled backward pass its own `step()` runs
on the tensors that the user sees, with reduced gradients in `p.grad`."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshweave.capture.optimizer_groups import evaluates_loss, parts_of
from meshweave.runtime.bindings import Bound
from meshweave.runtime.optimizer_state import OptimizerState
from meshweave.runtime.session import Session


class EagerUpdate:
    """Runs the own `step()` of an optimizer over a model whose tensors are bound to the state of a session.

    The optimizer's state is its own, and not the session's. Gradients are DTensors where parameters are, else whole
    tensors.
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
        with _on_dtensors(bounds), _same_random_numbers(session):
            for part in parts_of(self.optimizer):
                _step(part)
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

    @property
    def num_steps(self) -> int:
        """How many steps the optimizer has taken, by its own counts."""
        return max((int(kept.get("step", 1)) for kept in self.optimizer.state.values() if kept), default=0)


def _step(optimizer: torch.optim.Optimizer) -> None:
    """A step of an optimizer. PlanError if it calls a closure, which it does not get."""
    try:
        optimizer.step()
    except TypeError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if "closure(" not in (last.line or ""):
            raise
        where = f"{last.filename}:{last.lineno} in {last.name}"
        raise evaluates_loss(type(optimizer).__name__, where, f"TypeError: {error}") from error


@contextmanager
def _on_dtensors(bounds: Sequence[Bound]) -> Iterator[None]:
    """A context in which sums of DTensors are complete, and plain tensors that `step()` makes (torch.eye, a count) are
    the same on every rank."""
    if all(bound.form != "dtensor" for bound in bounds):
        yield
        return
    from torch.distributed.tensor.experimental import implicit_replication  # importing DTensor is slow

    from meshweave.runtime.dtensor_parameters import WholeSums

    with WholeSums(), implicit_replication():
        yield


@contextmanager
def _same_random_numbers(session: Session) -> Iterator[None]:
    """A context in which ranks draw the same random numbers, wherever their own generators are."""
    if not session.world.is_distributed:
        yield
        return
    device = session.world.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(session.settings.seed + session.state.num_steps)
        yield
