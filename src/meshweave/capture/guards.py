"""Guards: the checks before every step that model, batch and surroundings still match the captured step.

No change is ignored. Changes that may be harmless (an attribute, a number in the batch, `model.eval()` where no op
depends on it) are tried: forward, loss and backward run again on fake tensors and are compared with the record of
capture.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.batch import Batch
from meshweave.capture.contract import Contract
from meshweave.capture.record import Difference
from meshweave.capture.refusals import check_unwrapped
from meshweave.capture.rest import Form, alike, difference, forms_of
from meshweave.capture.snapshot import Snapshot, StateChange, is_users, shown
from meshweave.capture.unread import Unread, WasRead
from meshweave.capture.variables import KEYS, MISSING
from meshweave.errors import CaptureError, LayoutError, StepError
from meshweave.interop.fake import FakeTensor
from meshweave.interop.hooks import MODULE_HOOKS, TENSOR_HOOKS, hooks_of_all_modules
from meshweave.interop.modules import compiled_modules
from meshweave.interop.storages import version_of

Rebind = Callable[[], None]
_AGAIN = "compile again for it: step.save(path), mw.compile(...), step.load(path)"


@dataclass(slots=True)
class _Marks:
    """The properties of tensors that are compared: whether they were frozen or got hooks; for tensors without a name,
    which are neither parameters nor buffers, also whether they were written. `names` are by id."""

    tensors: list[Tensor]
    names: Mapping[int, tuple[str, str]]
    others: list[Tensor] = field(init=False)
    stored: list[Tensor] = field(init=False)
    flags: list[Any] = field(init=False)
    versions: list[int] = field(init=False)
    addresses: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.others = [t for t in self.tensors if id(t) not in self.names and not t.is_inference()]
        self.stored = [t for t in self.others if not (isinstance(t, FakeTensor) or t.is_meta)]
        self.flags = [tuple(dict(v) if isinstance(v, dict) else v for v in flag) for flag in self._flags()]
        self.versions, self.addresses = self._versions(), self._addresses()

    def _flags(self) -> list[Any]:
        return list(map(_FLAGS, self.tensors))

    def _versions(self) -> list[int]:
        return list(map(version_of, self.others))

    def _addresses(self) -> list[int]:
        return list(map(Tensor.data_ptr, self.stored))

    def is_current(self) -> bool:
        return self._flags() == self.flags and self._versions() == self.versions and self._addresses() == self.addresses

    def check_flags(self) -> None:
        """StepError for a tensor that was frozen or unfrozen, or whose hooks changed."""
        for tensor, old, new in zip(self.tensors, self.flags, self._flags(), strict=True):
            kind, name = self.names.get(id(tensor), ("tensor", ""))
            if old[0] != new[0] and kind == "param":
                raise _changed(f"requires_grad of the parameter '{name}'", old[0], new[0])
            for i, method in enumerate(TENSOR_HOOKS.values(), start=1):
                if (old[i] or {}) != (new[i] or {}):
                    raise _changed(f"{method} on {kind} '{name}'", "no such hook", "a hook, which would not run")

    def written(self) -> list[Tensor]:
        """Tensors without a name whose values may have changed."""
        now = zip(self.others, self.versions, self._versions(), strict=True)
        written = [t for t, old, new in now if old != new]
        moved = zip(self.stored, self.addresses, self._addresses(), strict=True)
        return [*written, *(t for t, old, new in moved if old != new and not any(t is w for w in written))]


_FLAGS = attrgetter("requires_grad", *TENSOR_HOOKS)


class Guards:
    """The guards of a compiled step.

    `rebind()` takes the tensors that were assigned to buffers; `autocast` is the dtype that the step was compiled
    with."""

    def __init__(self, contract: Contract, autocast: torch.dtype | None, rebind: Rebind) -> None:
        self.contract, self.autocast, self.rebind = contract, autocast, rebind
        self.batch = contract.batch
        self.default_dtype = torch.get_default_dtype()
        self.forms = forms_of(self.batch.rest)
        self.asking = tuple(tensor.requires_grad for tensor in self.batch.tensors)
        self.orders = {self.batch.order}  # of the entries of a batch, which forward may go through
        self._unread: set[str] = set()  # places that the step is known not to read
        self._refresh()

    def _refresh(self) -> None:
        self.snapshot = Snapshot.of(self.contract.roots)
        model: nn.Module = self.contract.roots["model"]
        named = {id(p): ("param", n) for n, p in model.named_parameters()}
        named |= {id(b): ("buffer", n) for n, b in model.named_buffers()}
        reached = {id(t): t for _, _, t in self.snapshot.tensors}
        self.marks = _Marks(list(reached.values()), named)
        self.hooks = [dict(hooks) for hooks in hooks_of_all_modules()]
        self.modules = list(model.named_modules())
        self.kinds = [type(module) for _, module in self.modules]
        # The user's own classes are containers of the snapshot.
        self.classes = [kind for kind in {*self.kinds} if not is_users(sys.modules.get(kind.__module__))]
        self.forwards = [kind.forward for kind in self.classes]

    def check(self, batch: Batch) -> None:
        """Raises StepError (LayoutError for its tensors) if the compiled step is not the step that this call needs."""
        check_autocast(self.autocast)
        self._check_default_dtype()
        forms = forms_of(batch.rest)
        if batch.order not in self.orders or not alike(forms, self.forms):
            self._check_batch(batch, forms)
        self._check_tensors(dict(zip(batch.names, batch.tensors, strict=True)))
        self._check_classes()
        if not (self.snapshot.is_current() and self.marks.is_current()):
            self._check_model()
        if self.hooks != hooks_of_all_modules():
            raise _changed("the global module hooks", "those when the step was compiled", "others")

    def _check_default_dtype(self) -> None:
        """Whether the step would differ under the present default dtype."""
        now = torch.get_default_dtype()
        if now is self.default_dtype:
            return
        difference = self.contract.difference(self.batch)
        if difference is not None:
            raise StepError(
                "the default dtype has changed since the step was compiled, and forward creates tensors of it",
                where=difference.where,
                got=f"{now}: {difference.got} for {difference.expected}",
                expected=str(self.default_dtype),
                hint=f"call the step under torch.set_default_dtype({self.default_dtype}); or {_AGAIN}",
            )
        self.default_dtype = now

    # the batch

    def _check_batch(self, batch: Batch, forms: dict[str, Form]) -> None:
        missing = [name for name in self.batch.names if name not in batch.names]
        if missing:
            raise LayoutError(
                "the batch lacks entries of the example",
                where=f"entry '{missing[0]}'",
                got=", ".join(batch.names),
                expected=", ".join(self.batch.names),
            )
        more = {n: t for n, t in zip(batch.names, batch.tensors, strict=True) if n not in self.batch.names}
        old, new = self.batch.rest, {**batch.rest, **more}
        texts = {name: difference(self.forms.get(name, ()), forms.get(name, ())) for name in {**old, **new}}
        changes = [
            StateChange(
                f"the batch entry '{name}'", old.get(name, MISSING), new.get(name, MISSING), -1, name, text or ""
            )
            for name, text in texts.items()
            if text is not None or name in more
        ]

        both = set(self.batch.order) & set(batch.order)
        before, now = (tuple(n for n in order if n in both) for order in (self.batch.order, batch.order))
        if batch.order not in self.orders and before != now:
            changes.append(StateChange("the order of the batch's entries", before, now, -1, KEYS))

        def put(values: Sequence[tuple[StateChange, Any]]) -> Batch:
            rest = {**new, **{change.key: value for change, value in values if change.key is not KEYS}}
            return Batch(self.batch.names, self.batch.tensors, rest, batch.join, batch.order)

        self._try(changes, put)
        self.batch = Batch(self.batch.names, self.batch.tensors, batch.rest, batch.join, self.batch.order)
        self.forms = forms
        self.orders.add(batch.order)

    def _check_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Whether gradients of tensors are requested; and their memory layout, if the step depends on it."""
        asking = tuple(tensors[name].requires_grad for name in self.batch.names)
        if asking != self.asking:
            flags = zip(self.batch.names, self.asking, asking, strict=True)
            places = {n: f"requires_grad of the batch entry '{n}'" for n in self.batch.names}
            changes = [StateChange(places[n], old, new, -1, n) for n, old, new in flags if old != new]
            fakes = [t.detach().requires_grad_(new) for t, new in zip(self.batch.tensors, asking, strict=True)]
            changed = Batch(self.batch.names, tuple(fakes), self.batch.rest, self.batch.join, self.batch.order)
            self._try(changes, lambda _: changed)
            self.batch, self.asking = changed, asking
        if self.contract.written or self.contract.strided:
            self._check_memory(tensors)

    def _check_memory(self, tensors: Mapping[str, Tensor]) -> None:
        shared = Batch(tuple(tensors), tuple(tensors.values()), {}, dict).shared()
        if written := self.contract.written.intersection(shared):
            raise StepError(
                "the step writes into an entry of the batch that shares memory with another",
                where=f"entry '{min(written)}'",
                got=" and ".join(f"'{name}'" for name in shared) + " in shared memory",
                expected="an entry with its own memory, as in the example",
                hint="clone() the entry that is written",
            )
        for name, fake in zip(self.batch.names, self.batch.tensors, strict=True):
            if name in self.contract.strided and not _lies_alike(tensors[name], fake):
                raise StepError(
                    "the step depends on the strides of a batch entry",
                    where=f"entry '{name}'",
                    got=f"strides {tensors[name].stride()} of shape {tuple(tensors[name].shape)}",
                    expected=f"strides as in the example, {fake.stride()} of shape {tuple(fake.shape)}",
                    hint="pass x.contiguous()"
                    if fake.is_contiguous()
                    else "pass all batches with the example's strides",
                )

    # the model

    def _check_classes(self) -> None:
        """StepError for a module whose class has changed, and for a class of a package whose forward has changed."""
        if [type(module) for _, module in self.modules] != self.kinds:
            now = ((name, kind, type(module)) for (name, module), kind in zip(self.modules, self.kinds, strict=True))
            name, old, new = next((name, old, new) for name, old, new in now if old is not new)
            raise _changed(f"the class of model.{name}", old.__qualname__, new.__qualname__)
        if [kind.forward for kind in self.classes] != self.forwards:
            before = zip(self.classes, self.forwards, strict=True)
            kind = next(kind for kind, forward in before if kind.forward != forward)
            raise _changed(
                f"{kind.__qualname__}.forward", "the function when the step was compiled", "another function"
            )

    def _check_model(self) -> None:
        self.marks.check_flags()
        replaced, others = list[StateChange](), list[StateChange]()
        changes = self.snapshot.changes()
        if not changes and self.marks.is_current() and self.snapshot.renew():
            return
        for change in changes:
            kind = str(self.snapshot.parents[change.container][1])
            if kind == "_modules" and change.old is not MISSING:
                raise _changed(change.place, "the modules when the step was compiled", str(change))
            if kind in MODULE_HOOKS:
                raise _changed(change.place, "the hooks when the step was compiled", "others")
            (replaced if isinstance(change.old, Tensor) and kind in _TENSORS else others).append(change)
        for change in replaced:
            self._check_replaced(change)
        places = {id(t): (i, k) for i, k, t in self.snapshot.tensors}
        for tensor in self.marks.written():
            container, key = places[id(tensor)]
            others.append(StateChange(self.snapshot.place(container, key), tensor, tensor, container, key))
        self._try(others, self._with)
        if replaced:
            self.rebind()
        self._refresh()

    def _check_replaced(self, change: StateChange) -> None:
        """StepError unless it is a buffer that was assigned another tensor."""
        kind, name = self.marks.names.get(id(change.old), ("", ""))
        if kind != "buffer" or not isinstance(change.new, Tensor):
            raise replaced_tensor(kind, name, change.place, shown(change.new))

    def _with(self, values: Sequence[tuple[StateChange, Any]]) -> Batch | None:
        done = [self.snapshot.set(change, value) for change, value in values]
        return self.batch if all(done) else None

    # trying

    def _try(
        self, changes: Sequence[StateChange], put: Callable[[Sequence[tuple[StateChange, Any]]], Batch | None]
    ) -> None:
        """Run the step again on fake tensors, in the present state. StepError if it differs from the captured step.

        A value that it does not read at all is remembered, so that it may change with every step: `put` substitutes a
        value that cannot be read.
        """
        changes = [c for c in changes if not (_is_plain(c) and c.place in self._unread)]
        if not changes:
            return
        unread = Unread()
        if all(map(_is_plain, changes)):
            try:
                batch = put([(c, unread) for c in changes])
            except WasRead:  # the code that takes the value inspects it: an array
                batch = None
            difference = self.contract.difference(batch) if batch is not None else Difference("", "", "")
            put([(c, c.new) for c in changes])
            if difference is None and not unread.was_read:
                self._unread.update(c.place for c in changes)
                return
        difference = self.contract.difference(put([(c, c.new) for c in changes if c.new is not MISSING]) or self.batch)
        if difference is not None:
            raise StepError(
                "the step would differ from the compiled step",
                where=", ".join(c.place for c in changes[:3]),
                got=f"{'; '.join(map(str, changes[:3]))}; with it {difference.got} for {difference.expected}",
                expected="the values when the step was compiled",
                hint=f"pass the changing value in the batch, as a tensor; or {_AGAIN}",
            )


_TENSORS = ("_parameters", "_buffers")


def _lies_alike(x: Tensor, fake: Tensor) -> bool:
    """Whether two tensors, of which one may have a subset of the other's rows, have the same order of dims in memory,
    with gaps in the same places."""
    if x.is_contiguous() or fake.is_contiguous():
        return x.is_contiguous() and fake.is_contiguous()
    return x.stride() == fake.stride()


def _is_plain(change: StateChange) -> bool:
    """Whether the new value cannot be told from others by `is` alone."""
    return change.key is not KEYS and not (change.new is None or change.new is MISSING or isinstance(change.new, bool))


def _changed(place: str, old: Any, new: Any) -> StepError:
    return StepError(
        "the model has changed since the step was compiled",
        where=place,
        got=shown(new) if not isinstance(new, str) else new,
        expected=shown(old) if not isinstance(old, str) else old,
        hint=_AGAIN,
    )


def replaced_tensor(kind: str, name: str, where: str, got: str) -> StepError:
    """The error about a parameter that is another object than the optimizer's, or a buffer that is no tensor."""
    return StepError(
        f"the {'parameter' if kind == 'param' else 'buffer'} '{name}' of the model was replaced after compile",
        where=where,
        got=got,
        expected="the same parameter, with any values",
        hint="write into it (load_state_dict, copy_, p.data = ...), because the optimizer still has the old "
        f"parameter; or {_AGAIN}",
    )


def check_shapes(model: nn.Module) -> None:
    """Raises CaptureError for a parameter of a lazy module that has not been called."""
    for name, param in model.named_parameters():
        if isinstance(param, nn.UninitializedParameter):
            raise CaptureError(
                f"the parameter '{name}' has no shape yet", hint="call the model once on a batch before mw.compile"
            )


def check_loss(loss: Any) -> None:
    """Raises CaptureError for a loss module of torch.nn, which takes (outputs, target) instead of (outputs, batch)."""
    if isinstance(loss, nn.Module) and type(loss).__module__ == "torch.nn.modules.loss":
        raise CaptureError(
            "this loss takes (outputs, targets)",
            where="loss=",
            got=f"torch.nn.{type(loss).__name__}",
            expected="a function of (outputs, batch)",
            hint="loss=lambda outputs, batch: criterion(outputs, batch[1]), or batch['y'] for a dict",
        )


def check_not_compiled(model: nn.Module) -> None:
    """CaptureError for modules wrapped by torch.compile, whose graphs no tracer sees into, or by another library."""
    if not isinstance(model, nn.Module):
        raise CaptureError("not a model", got=type(model).__name__, expected="a torch.nn.Module")
    if names := compiled_modules(model):
        raise CaptureError(
            "the model, or a part of it, is compiled by torch.compile",
            where=f"module '{names[0]}' ({type(model.get_submodule(names[0])).__name__})",
            got=f"{len(names)} compiled modules",
            expected="the plain model",
            hint="pass the plain model to meshweave: remove torch.compile(model), model.compile()",
        )
    check_unwrapped(model)


def check_autocast(expected: torch.dtype | None) -> None:
    """StepError under a torch.autocast other than the step's own, which would be ignored."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != expected:
            raise StepError(
                "a compiled step ignores torch.autocast around it",
                got=f"autocast of {device} to {torch.get_autocast_dtype(device)}",
                expected="no autocast" if expected is None else f"none, or {expected}",
                hint="compile with precision=dtype, and call the step outside of torch.autocast",
            )


def check_new_tensors() -> None:
    """Raises CaptureError if new tensors have no data: compile creates some that need data."""
    new = torch.empty(0)
    if new.is_meta or isinstance(new, FakeTensor):
        raise CaptureError(
            "compile is called where new tensors have no data",
            got="a default device meta, or a FakeTensorMode",
            expected="compile outside of such a block; only the model may be on the meta device",
            hint="leave the block, torch.device('meta') or FakeTensorMode(), before you call compile",
        )
