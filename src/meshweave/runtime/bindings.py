"""The tensors of the user's module as the step's state: what an update makes is in them, and what the user has written
into them counts in the next step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from meshweave.errors import StepError
from meshweave.interop.storages import version_of
from meshweave.ir.graph import Input, Spec
from meshweave.ir.layout import Layout
from meshweave.runtime.state import Key, State
from meshweave.runtime.world import World

Mark = tuple[int, int]  # address and count of writes: what tells a tensor that somebody has written from one that not


@dataclass(slots=True)
class Bound:
    """A tensor of the module that stands for a value of the state.

    `is_shared`: its memory is that of the piece held here, which is the whole value. Otherwise it is a copy, whole,
    beside the pieces. `mark` is that of the tensor when the step last wrote or read it.
    """

    item: Input
    layout: Layout
    tensor: Tensor
    is_shared: bool
    mark: Mark = (0, -1)

    @property
    def key(self) -> Key:
        return self.item.kind, self.item.name

    def share(self, piece: Tensor) -> None:
        """Let the tensor have the memory of a piece. The tensor stays the same object, whoever holds it."""
        set_values(self.tensor, piece)
        self.mark = mark_of(self.tensor)


@dataclass(slots=True)
class Bindings:
    """Which tensor of the module stands for which parameter or buffer of the state."""

    world: World
    bound: dict[Key, Bound] = field(default_factory=dict)

    def bind(self, state: State, model: nn.Module) -> None:
        """Bind the parameters and buffers of `model` to a state that is filled. All processes call it."""
        named: dict[Key, Tensor] = {("param", n): p for n, p in model.named_parameters()}
        named |= {("buffer", n): b for n, b in model.named_buffers()}
        for item, layout in state.items:
            if (tensor := named.get((item.kind, item.name))) is not None:
                holders = state.holders(layout)
                is_shared = len(holders) == 1 and layout.box_of(item.spec.shape, holders[0]).size == item.spec.shape
                self.bound[item.kind, item.name] = Bound(item, layout, tensor, is_shared)
        self.publish(state)

    def renew(self, key: Key, piece: Tensor) -> None:
        """An update has made a new piece: a tensor that shares the old one's memory lets go of it at once."""
        bound = self.bound.get(key)
        if bound is not None and bound.is_shared:
            bound.share(piece)

    def publish(self, state: State, keys: Iterable[Key] | None = None) -> None:
        """Bring the state's values, or those of `keys`, into the module's tensors. All processes call it."""
        chosen = None if keys is None else set(keys)
        for key, bound in self.bound.items():
            if chosen is not None and key not in chosen:
                continue
            if bound.is_shared:
                bound.share(state.pieces[key][0])
                continue
            whole = self.world.assemble(bound.item.spec, bound.layout, state.pieces[key])
            if bound.tensor.is_meta:
                set_values(bound.tensor, whole)
            else:
                bound.tensor.detach().copy_(whole)
            bound.mark = mark_of(bound.tensor)

    def take_over(self, state: State) -> None:
        """Cut new pieces of the tensors that somebody has written since the step last did: load_state_dict, weights
        swapped with their average, an assignment to `.data`. StepError for another shape or dtype."""
        for key, bound in self.bound.items():
            if bound.mark == mark_of(bound.tensor) and (bound.is_shared or self._is_same(state, bound)):
                continue
            _check_spec(bound.item, bound.tensor)
            if not bound.is_shared:
                state.put(bound.item, bound.layout, bound.tensor)
                bound.mark = mark_of(bound.tensor)
                continue
            state.pieces[key] = [bound.tensor.detach().to(state.device).contiguous()]
            bound.share(state.pieces[key][0])

    def replace(self, kind: str, name: str, tensor: Tensor) -> None:
        """Bind another tensor, which the user has assigned to a buffer of the module. StepError for another shape or
        dtype."""
        bound = self.bound[kind, name]
        _check_spec(bound.item, tensor)
        bound.tensor, bound.mark = tensor, (0, -1)

    def _is_same(self, state: State, bound: Bound) -> bool:
        """Whether a copy has the values of its pieces: writes through `.data` leave no other trace. Virtual devices
        compare; a process that holds a part of the mesh takes the count of writes for it."""
        return self.world.is_distributed or state.matches(*bound.key, bound.tensor)


def mark_of(tensor: Tensor) -> Mark:
    return tensor.data_ptr(), version_of(tensor)


def set_values(tensor: Tensor, piece: Tensor) -> None:
    """Give a tensor the memory of another one, and so its device; the object stays the same, and with it what a module
    ties and an optimizer holds."""
    if not tensor.is_meta:
        tensor.data = piece
        return
    real = nn.Parameter(piece, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else piece.detach()
    torch.utils.swap_tensors(tensor, real)


def _check_spec(item: Input, tensor: Tensor) -> None:
    got = Spec(tuple(tensor.shape), tensor.dtype)
    if got != item.spec:
        raise StepError(
            f"the {'parameter' if item.kind == 'param' else 'buffer'} '{item.name}' of the model has become another",
            got=str(got),
            expected=str(item.spec),
            hint="values may change between steps, shapes and dtypes may not: compile again for others",
        )
