"""Binds the tensors of the user's module to the step's state: they show every update, and values that the user writes
to them count in the next step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from meshweave.capture.guards import replaced_tensor
from meshweave.errors import StepError
from meshweave.interop.storages import increase_versions, is_stored_in, sharing, version_of
from meshweave.ir.graph import Input, Spec
from meshweave.ir.layout import Layout
from meshweave.runtime.fingerprint import fingerprint
from meshweave.runtime.state import Key, State
from meshweave.runtime.world import World
from meshweave.runtime.written import Written, check_separate, check_written

Mark = tuple[int, int]  # address and versions: tells whether a tensor has been written


Form = Literal["shared", "dtensor", "copy"]


@dataclass(slots=True)
class Bound:
    """A tensor of the module that is bound to a value of the state.

    `form`: "shared": it shares the memory of the local piece, which is the whole value; "dtensor": it is a DTensor with
    the memory of the local piece, if there is one; "copy": a whole copy beside the pieces. `mark` is the tensor's mark
    when the step last wrote or read it, `values` the fingerprint of a copy that processes cannot compare with pieces.
    """

    item: Input
    layout: Layout
    tensor: Tensor
    form: Form
    mark: Mark = (0, -1)
    values: int = 0
    wrapper: torch.UntypedStorage | None = field(init=False, default=None)  # of a DTensor, at the first `settle`

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
    def is_unwritten(self) -> bool:
        """Whether the tensor is unwritten since `settle`, as far as version and address show."""
        return self._mark_now() == self.mark

    def _mark_now(self) -> Mark:  # of every tensor, several times a step
        memory = self.memory
        version = version_of(memory)
        if memory is not self.tensor:  # an op on a DTensor increases its own version alone
            version += version_of(self.tensor)
        return memory.data_ptr(), version

    def share(self, piece: Tensor) -> None:
        """Make the tensor share the memory of a piece. The tensor stays the same object for all its users."""
        if self.form == "dtensor":
            from meshweave.runtime.dtensor_parameters import set_piece

            set_piece(self.tensor, piece)
        else:
            set_values(self.tensor, piece)
        self.settle()

    def settle(self) -> None:
        """Record the tensor's present state as the step's."""
        self.mark = self._mark_now()
        if self.form == "dtensor" and self.wrapper is None:
            self.wrapper = self.tensor.untyped_storage()

    def check_assigned(self) -> None:
        """StepError if the user has assigned to `.data` of a DTensor: PyTorch does not copy the values into it."""
        if self.wrapper is None or is_stored_in(self.tensor, self.wrapper):
            return
        if self.mark[0] == self.memory.data_ptr():
            raise StepError(
                f"other values were assigned to .data of {_shown(self.item)}, and are lost",
                got="p.data = ... on a DTensor, which does not change its memory, in plain PyTorch either",
                expected="values written in place",
                hint="with torch.no_grad(): p.copy_(values), or p.data.copy_(values)",
            )
        self.wrapper = self.tensor.untyped_storage()  # it was swapped with another tensor, including its memory


@dataclass(slots=True)
class Bindings:
    """Which tensor of the module is bound to which parameter or buffer of the state."""

    world: World
    bound: dict[Key, Bound] = field(default_factory=dict)
    written: dict[Key, None] = field(default_factory=dict)  # taken over, but not yet compared over ranks
    model: nn.Module | None = None
    keys: dict[Key, Key] = field(default_factory=dict)  # by kind and any name of a tensor; tied tensors have several
    changing: set[Key] = field(default_factory=set)  # the values that steps change

    def bind(self, state: State, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Bind the parameters and buffers of `model` to a filled state. All processes call it.

        On a cluster parameters become DTensors if any of them is sharded: all of them, because hardly any op of PyTorch
        mixes plain tensors and DTensors. Values that DTensor cannot express stay whole on every rank.
        """
        self.model, named, known = model, dict[Key, Tensor](), dict[int, Key]()
        for key, tensor in _tensors_of(model):
            self.keys[key] = known.setdefault(id(tensor), key)
            named.setdefault(self.keys[key], tensor)
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
            bound = self.bound[item.kind, item.name] = Bound(item, layout, own, "dtensor")
            bound.settle()
            if own is not known[item.name]:
                replaced[known[item.name]] = own
        dtensors.replace_parameters(model, optimizer, replaced)
        dtensors.gather_in_forward(model, self.world)
        dtensors.accept_full_tensors(model, {item.name: layout for item, layout in chosen})

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

    def written_by_step(self, keys: Sequence[Key]) -> None:
        """Count an update as a write in place, as it is in eager PyTorch: the version of each tensor increases, so that
        a backward pass of the user's own that needs the old values is an error."""
        bounds = [b for b in map(self.bound.get, keys) if b is not None and b.form != "copy" and b.mark[1] >= 0]
        increase_versions([*(b.tensor for b in bounds), *(b.memory for b in bounds if b.form == "dtensor")])
        for bound in bounds:
            bound.mark = bound.mark[0], bound.mark[1] + (2 if bound.form == "dtensor" else 1)

    def publish(self, state: State, keys: Collection[Key] | None = None) -> None:
        """Copy the state's values to the module's tensors: all, or after an update those of `keys` that it has not
        renewed. All processes call it."""
        for key, bound in self.bound.items():
            if keys is None or (key in keys and (bound.form == "copy" or key[0] == "buffer")):
                self._bring(state, bound)

    def _bring(self, state: State, bound: Bound) -> None:
        pieces = state.pieces[bound.key]
        if bound.form == "copy":
            whole = self.world.assemble(bound.item.spec, bound.layout, pieces)
            if bound.tensor.is_meta:
                set_values(bound.tensor, whole)
            else:
                bound.tensor.detach().copy_(whole)
            self.settle(bound)
        elif pieces:
            bound.share(pieces[0])

    def settle(self, bound: Bound) -> None:
        """Record the tensor's present state as the step's."""
        bound.settle()
        if bound.form == "copy" and self.world.is_distributed:
            bound.values = int(fingerprint(bound.tensor))

    def keep(self, state: State) -> None:
        """Drop the tensors of `optimizer.state` that another state does not have."""
        self.bound = {key: bound for key, bound in self.bound.items() if key in state.pieces}

    def take_over(self, state: State, *, is_compared: bool = False) -> None:
        """Cut new pieces of the tensors that the user has written since the step last did: load_state_dict, weights
        swapped with their average, an assignment to `.data`.

        StepError for another shape or dtype, and for a torn state; and, on every rank, if values taken over since the
        last comparison differ among ranks (`is_compared`: all processes call it)."""
        state.check_usable()
        if not is_compared:  # else the guards of the step have seen to it
            self.follow(is_strict=False)
        written = [b for b in self.bound.values() if b.item.kind != "state" and self._is_written(state, b)]
        if written:
            self._check_separate()
        for bound in written:
            _check_spec(bound.item, bound.tensor)
            self._take(state, bound)
            self.note_written(bound)
        if is_compared:
            compared = [self._written(self.bound[key]) for key in self.written if key in self.bound]
            self.written.clear()
            check_written(self.world, compared)

    def written_since(self, state: State) -> list[str]:
        """The parameters and buffers that were written since the step last did."""
        bounds = [bound for bound in self.bound.values() if bound.item.kind != "state"]
        return [b.item.name for b in bounds if self.differs(state, b)]

    def _is_written(self, state: State, bound: Bound) -> bool:
        bound.check_assigned()
        return self.differs(state, bound)

    def differs(self, state: State, bound: Bound) -> bool:
        """Whether the user has written a tensor since `settle`, by whatever way."""
        return not bound.is_unwritten or (bound.form == "copy" and not self._is_same(state, bound))

    def _check_separate(self) -> None:
        """StepError if the user has put a value that steps change into the memory of another parameter or buffer."""
        its = [b for b in self.bound.values() if b.item.kind != "state"]
        check_separate(
            {_shown(b.item): b.memory for b in its if b.key in self.changing},
            {_shown(b.item): b.memory for b in its if b.key not in self.changing},
        )

    def note_written(self, bound: Bound) -> None:
        """Compare a tensor over ranks next time."""
        if self.is_everywhere(bound):
            self.written[bound.key] = None

    def is_everywhere(self, bound: Bound) -> bool:
        """Whether every rank sees a write to a tensor: ranks without a piece of a DTensor, as in another stage of a
        pipeline, do not, nor do those whose piece has no elements (a bias of a single number, on two ranks)."""
        if bound.form != "dtensor":
            return True
        shape, devices = bound.item.spec.shape, self.world.mesh.devices
        return bound.layout.mesh.covers(devices) and all(bound.layout.box_of(shape, d).num_elements for d in devices)

    def _written(self, bound: Bound) -> Written:
        ranks, layout, shape = self.world.mesh.devices, bound.layout, bound.item.spec.shape
        is_piece = bound.form == "dtensor"
        places = {r: layout.box_of(shape, r) if is_piece else None for r in ranks if r in layout.mesh or not is_piece}
        return Written(_shown(bound.item), bound.memory, places)

    def _take(self, state: State, bound: Bound) -> None:
        if bound.form == "copy":
            state.put(bound.item, bound.layout, bound.tensor)
            self.settle(bound)
        for piece in state.pieces[bound.key] if bound.form != "copy" else ():
            if bound.memory.shape != piece.shape:
                raise _another(bound.item, f"a piece of shape {list(bound.memory.shape)}", f"{list(piece.shape)}")
            state.pieces[bound.key] = [bound.memory.detach().to(state.device).contiguous()]
            bound.share(*state.pieces[bound.key])

    def follow(self, *, is_strict: bool = True) -> None:
        """Bind the buffers that the user has assigned to the module. StepError, if `is_strict`, for another parameter,
        and for tensors that were tied or separate when they were bound, and no longer are: then a step is impossible,
        but the state can still be saved."""
        now: dict[Key, Tensor] = {}
        owners: dict[int, Key] = {}
        for key, tensor in _tensors_of(self.model) if self.model is not None else ():
            own = self.keys.get(key, key)
            if own not in self.bound:
                continue
            is_other = own[0] == "param" and tensor is not self.bound[own].tensor
            is_retied = now.setdefault(own, tensor) is not tensor or owners.setdefault(id(tensor), own) != own
            if (is_other or is_retied) and not is_strict:
                return
            if is_other:
                raise replaced_tensor("param", own[1], f"model.{key[1]}", str(Spec(tuple(tensor.shape), tensor.dtype)))
            if is_retied:
                raise _retied(key, owners.get(id(tensor), own))
        for key, tensor in now.items():
            if tensor is not self.bound[key].tensor:
                self._replace(*key, tensor)

    def _replace(self, kind: str, name: str, tensor: Tensor) -> None:
        """Bind another tensor that the user has assigned to a buffer of the module. StepError for another shape or
        dtype."""
        bound = self.bound[kind, name]
        _check_spec(bound.item, tensor)
        bound.tensor, bound.mark = tensor, (0, -1)

    def _is_same(self, state: State, bound: Bound) -> bool:
        """Whether a copy has the values that the step gave it: writes through `.data` leave no other trace. A process
        may not have the pieces, but all have to see the same."""
        if self.world.is_distributed:
            return bound.values == int(fingerprint(bound.tensor))
        return state.matches(bound.item, bound.layout, bound.tensor)


def _tensors_of(model: nn.Module) -> Iterator[tuple[Key, Tensor]]:
    """The parameters and buffers of a model, under each of their names."""
    yield from ((("param", n), p) for n, p in model.named_parameters(remove_duplicate=False))
    yield from ((("buffer", n), b) for n, b in model.named_buffers(remove_duplicate=False))


def _retied(key: Key, other: Key) -> StepError:
    return StepError(
        "tensors of the model were tied or untied after compile",
        where=f"'{key[1]}', which was or is the tensor '{other[1]}'",
        expected="the same names for each tensor as when the step was compiled",
        hint="step.save(path), compile again, step.load(path)",
    )


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
        raise _another(item, str(got), str(item.spec))


def _another(item: Input, got: str, expected: str) -> StepError:
    return StepError(
        f"{_shown(item)} of the model has changed its shape or dtype",
        got=got,
        expected=expected,
        hint="between steps only values may change: compile again for other shapes or dtypes",
    )
