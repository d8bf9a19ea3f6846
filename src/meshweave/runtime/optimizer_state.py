"""Binds `optimizer.state` to the step's state: it shows every update, under PyTorch's own keys, and what the user loads
into it counts in the next step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.optimizer_groups import parts_of
from meshweave.interop.storages import version_of
from meshweave.ir.graph import Input
from meshweave.ir.layout import Layout
from meshweave.runtime.bindings import Bindings, Bound
from meshweave.runtime.state import Key, State

_SUCCESSOR = "replaced_by"  # an attribute of a replaced parameter: the parameter in its place
Numbers = Mapping[str, Mapping[str, Any]]  # values of an optimizer that are not pieces, such as step counts: by
# parameter and slot


@dataclass(slots=True)
class OptimizerState:
    """Tensors of `optimizer.state` bound to the slots of a state, `slot/parameter`; numbers beside them. A parameter
    that has taken no step has no entries, as in PyTorch. `marks` are those of the numbers when the step last wrote
    them."""

    bindings: Bindings
    optimizer: torch.optim.Optimizer
    params: Mapping[str, Tensor]
    marks: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    @staticmethod
    def of(bindings: Bindings, optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerState:
        """The state of an optimizer over the parameters of `model`, which are bound already."""
        return OptimizerState(bindings, optimizer, dict(model.named_parameters()))

    def publish(self, state: State, numbers: Numbers, names: Collection[str]) -> None:
        """Copy slots of the parameters `names`, and numbers, to `optimizer.state`. Bound tensors have the values of the
        last update already. All processes call it."""
        written, fresh = list[Tensor](), list[Tensor]()
        for name, values in numbers.items():
            entries = self.optimizer.state[self.params[name]]
            for slot, value in values.items():
                before = entries.get(slot)
                if isinstance(before, Tensor) and isinstance(value, Tensor):
                    written.append(before)
                    fresh.append(value)
                elif isinstance(before, Tensor):
                    before.fill_(value)
                else:
                    entries[slot] = value.clone() if isinstance(value, Tensor) else value
        if written:
            torch.ops.aten._foreach_copy_.default(written, fresh)  # a call for all step counts
        for name, values in numbers.items():
            entries = self.optimizer.state[self.params[name]]
            for slot in values:
                self.marks[name, slot] = _mark(entries[slot])
        for item, layout in state.items:
            is_new = item.kind == "state" and ("state", item.name) not in self.bindings.bound
            if is_new and item.name.partition("/")[2] in names:
                slot, entries = self._entries(item)
                entries[slot] = self._bind(state, item, layout)

    def take_over(self, state: State) -> bool:
        """Cut new pieces of the tensors that the user has put into `optimizer.state`, or written, since the step last
        did.

        Missing slots begin as zeros. Returns whether anything has changed: then its numbers are to be read, too. On a
        cluster all ranks change the same entries. StepError for a torn state."""
        state.check_usable()
        changed = [(item, layout) for item, layout in state.items if item.kind == "state" and self._is_changed(item)]
        now = {(p, slot): self.optimizer.state.get(self.params[p], {}).get(slot) for p, slot in self.marks}
        numbers = [key for key, value in now.items() if _mark(value) != self.marks[key]]
        for item, layout in changed:
            self._take(state, item, layout)
        for key in numbers:
            del self.marks[key]
        return bool(changed or numbers)

    def _entries(self, item: Input) -> tuple[str, dict[str, Any]]:
        slot, _, name = item.name.partition("/")
        return slot, self.optimizer.state[self.params[name]]

    def _is_changed(self, item: Input) -> bool:
        slot, _, name = item.name.partition("/")
        now = self.optimizer.state.get(self.params[name], {}).get(slot)
        bound = self.bindings.bound.get(("state", item.name))
        if bound is None:
            return now is not None
        return now is not bound.tensor or bound.is_written

    def _take(self, state: State, item: Input, layout: Layout) -> None:
        key: Key = "state", item.name
        slot, _, name = item.name.partition("/")
        now = self.optimizer.state.get(self.params[name], {}).get(slot)
        self.bindings.bound.pop(key, None)
        if now is None:
            state.put(item, layout, state.zeros(item))
            return
        if state.holders(layout):  # else other stages' devices have it, and this rank none of its values
            state.put(item, layout, now)
        self.optimizer.state[self.params[name]][slot] = self._bind(state, item, layout)

    def _bind(self, state: State, item: Input, layout: Layout) -> Tensor:
        """A new tensor that is bound to a slot."""
        key: Key = "state", item.name
        param = self.bindings.bound.get(("param", item.name.partition("/")[2]))
        form = self.bindings.form_of(item, layout, param is not None and param.form == "dtensor")
        piece = next(iter(state.pieces[key]), None)
        if form == "dtensor":
            from meshweave.runtime.dtensor_parameters import dtensor_of

            tensor: Tensor = dtensor_of(piece, item, layout, self.bindings.world.device.type)
        elif form == "shared" and piece is not None:
            tensor = piece.detach()
        else:
            tensor = self.bindings.world.assemble(item.spec, layout, state.pieces[key])
        bound = self.bindings.bound[key] = Bound(item, layout, tensor, form)
        bound.settle()
        return tensor


def _mark(value: Any) -> tuple[int, int]:
    """The identity and version of a value."""
    return id(value), version_of(value) if isinstance(value, Tensor) else 0


def replace_in_optimizer(optimizer: torch.optim.Optimizer, replaced: Mapping[Tensor, Tensor]) -> None:
    """Replace parameters in an optimizer's groups and in its state, also in an optimizer that it wraps."""
    for part in parts_of(optimizer):
        for inner in (x for x in vars(part).values() if isinstance(x, torch.optim.Optimizer)):
            replace_in_optimizer(inner, replaced)
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(p, p) for p in group["params"]]
    for p in [p for p in optimizer.state if p in replaced]:
        optimizer.state[replaced[p]] = optimizer.state.pop(p)


def note_replaced(replaced: Mapping[Tensor, Tensor]) -> None:
    """Let replaced parameters refer to those in their places."""
    for old, new in replaced.items():
        setattr(old, _SUCCESSOR, new)


def follow_replaced(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
    """Let an optimizer have the present parameters of a model, `params`, where an earlier compile for another optimizer
    has replaced them. The values are those of the present parameters."""
    present = {id(p) for p in params}
    replaced: dict[Tensor, Tensor] = {}
    for old in [p for group in optimizer.param_groups for p in group["params"]]:
        new = old
        while id(new) not in present and (successor := getattr(new, _SUCCESSOR, None)) is not None:
            new = successor
        if new is not old and id(new) in present:
            replaced[old] = new
    if replaced:
        replace_in_optimizer(optimizer, replaced)
