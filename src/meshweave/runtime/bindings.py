"""Binds the tensors of the user's module to the step's state: they show every update, and values that the user writes
to them count in the next step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from meshweave.capture.guards import replaced_tensor
from meshweave.errors import StepError
from meshweave.interop.storages import sharing
from meshweave.ir.graph import Input, Spec
from meshweave.ir.layout import Layout
from meshweave.runtime.fingerprint import fingerprint
from meshweave.runtime.interfaces import World
from meshweave.runtime.state import Key, State

Form = Literal["shared", "dtensor", "copy"]


@dataclass(slots=True)
class Bound:
    """A tensor of the module that is bound to a value of the state.

    `form`: "shared": it shares the memory of the local piece, which is the whole value; "dtensor": it is a DTensor with
    the memory of the local piece, if there is one; "copy": a whole copy beside the pieces, with its fingerprint when
    the step last wrote or read it.
    """

    item: Input
    layout: Layout
    tensor: Tensor
    form: Form
    fingerprint: int | None = None

    @property
    def key(self) -> Key:
        return self.item.kind, self.item.name

    @property
    def memory(self) -> Tensor:
        """The tensor, or this rank's piece of it."""
        if self.form != "dtensor":
            return self.tensor
        from meshweave.runtime.dtensor_parameters import piece_of

        return piece_of(self.tensor)

    @property
    def is_written(self) -> bool:
        """Whether the user has written a copy since `settle`. In shared memory the state has what is written, too."""
        return self.form == "copy" and int(fingerprint(self.tensor)) != self.fingerprint

    def share(self, piece: Tensor) -> None:
        """Make the tensor share the memory of a piece. The tensor stays the same object for all its users."""
        if self.form == "dtensor":
            from meshweave.runtime.dtensor_parameters import set_piece

            set_piece(self.tensor, piece)
        else:
            set_values(self.tensor, piece)

    def settle(self) -> None:
        """Record the present values of a copy as the step's."""
        if self.form == "copy":
            self.fingerprint = int(fingerprint(self.tensor))


@dataclass(slots=True)
class Bindings:
    """Which tensor of the module is bound to which parameter or buffer of the state."""

    world: World
    bound: dict[Key, Bound] = field(default_factory=dict)
    model: nn.Module | None = None

    def bind(self, state: State, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Bind the parameters and buffers of `model` to a filled state. All processes call it.

        On a cluster parameters become DTensors if any of them is sharded: all of them, because hardly any op of PyTorch
        mixes plain tensors and DTensors. Values that DTensor cannot express stay whole on every rank.
        """
        self.model, named = model, _tensors_of(model)
        chosen = [(item, layout) for item, layout in state.items if item.kind != "state"]
        params = [(item, layout) for item, layout in chosen if item.kind == "param"]
        if self.world.is_distributed and not all(self._is_whole(*entry) for entry in params):
            self._distribute(state, model, optimizer, params)
        # A write to the one shows in the other, which is lost if each gets memory of its own.
        pairs = sharing({key: x for key, x in named.items() if key not in self.bound})
        overlapping = {key for pair in pairs for key in pair}
        for item, layout in chosen:
            key = item.kind, item.name
            if key not in self.bound:
                form = "copy" if key in overlapping else self.form_of(item, layout)
                bound = self.bound[key] = Bound(item, layout, named[key], form)
                self._bring(state, bound)

    def _distribute(
        self,
        state: State,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        params: Sequence[tuple[Input, Layout]],
    ) -> None:
        """Make the parameters DTensors that can still be loaded from full tensors."""
        from meshweave.runtime import dtensor_parameters as dtensors  # importing DTensor is slow, here and below
        from meshweave.runtime.dtensor import has_placements, make_device_meshes

        known, device = dict(model.named_parameters()), self.world.device.type
        make_device_meshes((layout for _, layout in params), device)
        chosen = [(item, layout) for item, layout in params if has_placements(layout, item.spec.shape)]
        replaced: dict[Tensor, Tensor] = {}
        for item, layout in chosen:
            piece = next(iter(state.pieces[item.kind, item.name]), None)
            own = dtensors.dtensor_parameter(known[item.name], piece, item, layout, device)
            self.bound[item.kind, item.name] = Bound(item, layout, own, "dtensor")
            if own is not known[item.name]:
                replaced[known[item.name]] = own
        dtensors.replace_parameters(model, optimizer, replaced)

    def form_of(self, item: Input, layout: Layout, as_dtensor: bool = False) -> Form:
        """How a tensor can be bound to a value."""
        if as_dtensor:
            from meshweave.runtime.dtensor import has_placements

            return "dtensor" if has_placements(layout, item.spec.shape) else "copy"
        return "shared" if self._is_whole(item, layout) else "copy"

    def _is_whole(self, item: Input, layout: Layout) -> bool:
        """Whether every process has the whole value, once."""
        if self.world.is_distributed:
            return self.world.has_whole(layout)
        devices = [device for device in self.world.devices if device in layout.mesh]
        return len(devices) == 1 and layout.box_of(item.spec.shape, devices[0]).size == item.spec.shape

    def renew(self, key: Key, piece: Tensor) -> None:
        """Release the old piece in an update: a tensor that shares its memory drops it at once."""
        bound = self.bound.get(key)
        if bound is not None and bound.form != "copy":
            bound.share(piece)

    def publish(self, state: State, keys: Collection[Key] | None = None) -> None:
        """Copy the state's values to the module's tensors: all, or after an update those of `keys` that it has not
        renewed. All processes call it."""
        renewed = list[Tensor]()
        for key, bound in self.bound.items():
            if keys is None or (key in keys and (bound.form == "copy" or key[0] == "buffer")):
                self._bring(state, bound)
            elif key in keys and not bound.memory.is_inference():
                renewed.append(bound.memory)
        # An update is a write in place: a backward pass of the user's own that needs old values is an error.
        torch.autograd.graph.increment_version(renewed)

    def _bring(self, state: State, bound: Bound) -> None:
        pieces = state.pieces[bound.key]
        if bound.form == "copy":
            whole = self.world.assemble(bound.item.spec, bound.layout, pieces)
            if bound.tensor.is_meta:
                set_values(bound.tensor, whole)
            else:
                bound.tensor.detach().copy_(whole)
            bound.settle()
        elif pieces:
            bound.share(pieces[0])

    def take_over(self, state: State, *, is_guarded: bool = False) -> None:
        """Cut new pieces of the tensors that the user has written since the step last did: load_state_dict, weights
        swapped with their average. `is_guarded`: the guards of the step have seen that they are the same tensors.
        StepError for others, for another shape or dtype, and for a torn state."""
        state.check_usable()
        if not is_guarded and self.model is not None:
            for (kind, name), tensor in _tensors_of(self.model).items():
                if (bound := self.bound.get((kind, name))) is None or bound.tensor is not tensor:
                    raise replaced_tensor(kind, name, f"model.{name}", str(Spec(tuple(tensor.shape), tensor.dtype)))
        for bound in self.bound.values():
            if bound.item.kind != "state":
                self._take(state, bound)

    def _take(self, state: State, bound: Bound) -> None:
        """Copy what was written into the pieces, unless they have it already."""
        if bound.form == "copy":
            if bound.is_written:
                _check_spec(bound.item, bound.tensor)
                state.put(bound.item, bound.layout, bound.tensor)
                bound.settle()
            return
        memory = bound.memory
        for piece in state.pieces[bound.key]:
            if (memory.data_ptr(), memory.stride()) != (piece.data_ptr(), piece.stride()):  # assigned by .data
                _check_spec(bound.item, bound.tensor)
                piece.copy_(memory.detach())
                bound.share(piece)


def _tensors_of(model: nn.Module) -> dict[Key, Tensor]:
    """The parameters and buffers of a model, tied tensors under their first name."""
    return {("param", n): p for n, p in model.named_parameters()} | {("buffer", n): b for n, b in model.named_buffers()}


def set_values(tensor: Tensor, piece: Tensor) -> None:
    """Give a tensor another tensor's memory, and so its device; the object stays the same, so tied modules and
    optimizers still refer to it."""
    if not tensor.is_meta:
        tensor.data = piece
        return
    real = nn.Parameter(piece, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else piece.detach()
    torch.utils.swap_tensors(tensor, real)


def _shown(item: Input) -> str:
    kind = {"param": "the parameter", "buffer": "the buffer"}.get(item.kind, "the optimizer's state")
    return f"{kind} '{item.name}'"


def _check_spec(item: Input, tensor: Tensor) -> None:
    got = Spec(tuple(tensor.shape), tensor.dtype)
    if got != item.spec:
        raise StepError(
            f"{_shown(item)} of the model has changed its shape or dtype",
            got=str(got),
            expected=str(item.spec),
            hint="between steps only values may change: compile again for other shapes or dtypes",
        )
