"""`optimizer.state` as the step's state: what an update makes is in it, under PyTorch's own keys, and what the user
loads into it counts in the next step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.optimizer_steps import number_like
from meshweave.capture.optimizers import OptimizerSpec
from meshweave.interop.storages import version_of
from meshweave.ir.graph import Input
from meshweave.ir.layout import Layout
from meshweave.runtime.bindings import Bindings, Bound
from meshweave.runtime.initialize import full_values
from meshweave.runtime.state import Key, State

Numbers = Mapping[str, Mapping[str, Any]]  # what an optimizer keeps that is no piece, such as counts of steps: by
# parameter and slot


@dataclass(slots=True)
class OptimizerState:
    """Tensors of `optimizer.state` bound to the slots of a state, `slot/parameter`; numbers beside them.

    A parameter that has taken no step has no entries, as in PyTorch. `marks` are of the numbers as the step left them.
    """

    bindings: Bindings
    optimizer: torch.optim.Optimizer
    params: Mapping[str, Tensor]
    marks: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    @staticmethod
    def of(bindings: Bindings, optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerState:
        """That of an optimizer over the parameters of `model`, which are bound already."""
        return OptimizerState(bindings, optimizer, dict(model.named_parameters()))

    def publish(self, state: State, numbers: Numbers, names: Collection[str] | None = None) -> None:
        """Bring slots (of the parameters `names` alone) and numbers into `optimizer.state`. What is bound has the
        values of the last update.

        All processes call it.
        """
        for name, values in numbers.items():
            entries = self.optimizer.state[self.params[name]]
            for slot, value in values.items():
                before = entries.get(slot)
                if isinstance(before, Tensor):
                    before.fill_(value)
                else:
                    entries[slot] = value.clone() if isinstance(value, Tensor) else value
                self.marks[name, slot] = _mark(entries[slot])
        for item, layout in state.items:
            if names is not None and item.name.partition("/")[2] not in names:
                continue
            if item.kind == "state" and ("state", item.name) not in self.bindings.bound:
                slot, entries = self._entries(item)
                entries[slot] = self._bind(state, item, layout)

    def put_numbers(self, state: State, spec: OptimizerSpec, fresh: Collection[str]) -> None:
        """Write the numbers of a state that was loaded into `optimizer.state`; parameters `fresh` have taken no step
        and have no entries."""
        likes = {slot: value for kind in spec.kinds for slot, value in kind.kept.items()}
        for name in fresh:
            self.optimizer.state.pop(self.params[name], None)
        for name, values in state.numbers.items():
            entries = self.optimizer.state[self.params[name]] if name in self.params else {}
            entries |= {slot: number_like(value, likes.get(slot)) for slot, value in values.items()}
            self.marks |= {(name, slot): _mark(entries[slot]) for slot in values}

    def take_over(self, state: State) -> bool:
        """Cut new pieces of the tensors that somebody has put into `optimizer.state`, or written, since the step last
        did. Slots that are gone begin as zeros. Whether anything has changed: then its numbers are to be read, too."""
        changed = [self._take(state, item, layout) for item, layout in state.items if item.kind == "state"]
        for (name, slot), mark in list(self.marks.items()):
            value = self.optimizer.state.get(self.params[name], {}).get(slot)
            if _mark(value) != mark:
                changed.append(True)
                del self.marks[name, slot]
        return any(changed)

    def _entries(self, item: Input) -> tuple[str, dict[str, Any]]:
        slot, _, name = item.name.partition("/")
        return slot, self.optimizer.state[self.params[name]]

    def _take(self, state: State, item: Input, layout: Layout) -> bool:
        key = "state", item.name
        slot, _, name = item.name.partition("/")
        now = self.optimizer.state.get(self.params[name], {}).get(slot)
        bound = self.bindings.bound.get(key)
        if bound is None and now is None:
            return False
        if bound is not None and now is bound.tensor and bound.is_unwritten:
            return False
        self.bindings.bound.pop(key, None)
        if now is None:
            state.put(item, layout, state.zeros(item))
            return True
        state.put(item, layout, full_values(now).to(item.spec.dtype).expand(item.spec.shape))
        self.optimizer.state[self.params[name]][slot] = self._bind(state, item, layout)
        return True

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
    """Which object it is, and how often it was written."""
    return id(value), version_of(value) if isinstance(value, Tensor) else 0
