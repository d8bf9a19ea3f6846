"""Guards: a shallow look before every step at what the step was traced from.

Plain attributes of modules and the non-tensor entries of a batch belong to the key by which a program is chosen. Any
other change of a module that the look notices is an error. What is inside lists, dicts and other objects, and what is
in globals, closures and classes, it does not see (docs/contract.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.batch import Batch
from meshweave.capture.module_state import MISSING, attribute, is_plain, shown
from meshweave.errors import LayoutError, StepError
from meshweave.interop.fake import FakeTensor
from meshweave.interop.hooks import MODULE_HOOKS, TENSOR_HOOKS, hooks_of_all_modules
from meshweave.interop.storages import version_of

RECOMPILE = "call step.recompile() after such a change: the state stays"
_FLAGS = attrgetter("requires_grad", *TENSOR_HOOKS)
_DICTS = ("_parameters", "_buffers", "_modules", *sorted(MODULE_HOOKS))  # of a module, looked at entry by entry


@dataclass(frozen=True, slots=True)
class StepKey:
    """What a step is called with besides the shapes of tensors: plain attributes that differ from those at compile, as
    text by place; names of the batch's tensors, and which of them require gradients; its other entries."""

    attributes: tuple[tuple[str, str], ...]
    names: tuple[str, ...]
    requires_grad: tuple[bool, ...]
    rest: tuple[tuple[str, Hashable], ...]

    @staticmethod
    def of(batch: Batch, attributes: tuple[tuple[str, str], ...] = ()) -> StepKey:
        flags = tuple(tensor.requires_grad for tensor in batch.tensors)
        return StepKey(attributes, batch.names, flags, tuple((n, _form(value)) for n, value in batch.rest.items()))

    def changes(self, other: StepKey) -> list[str]:
        """The places in which it differs from another key."""
        places = {place for place, _ in set(self.attributes) ^ set(other.attributes)}
        entries = {name for name, _ in set(self.rest) ^ set(other.rest)} | {*self.names} ^ {*other.names}
        places |= set(map(entry_place, entries))
        if (self.names, self.requires_grad) != (other.names, other.requires_grad) and not places:
            places.add("requires_grad or the order of the batch's entries")
        return sorted(places)


def entry_place(name: str) -> str:
    """An entry of a batch as a place for people."""
    return f"the batch entry '{name}'"


class _Other:
    """An object without plain contents, equal to itself alone."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Other) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _form(value: Any) -> Hashable:
    """An entry of a batch in comparable form."""
    if is_plain(value):
        return repr(value)
    if isinstance(value, list | tuple | set | frozenset | deque):
        return type(value), tuple(map(_form, value))
    if isinstance(value, dict):
        return type(value), tuple((_form(key), _form(entry)) for key, entry in value.items())
    return _Other(value)


class Guards:
    """The look at modules before every step. `roots` are the model, by that name, and other modules that the step
    calls; `autocast` is the dtype that the step was compiled with. `written` are places of attributes that forward
    itself assigns, which are not looked at."""

    def __init__(self, roots: Mapping[str, nn.Module], autocast: torch.dtype | None) -> None:
        self.autocast = autocast
        self.modules = [
            (f"{root}.{name}" if name else root, module)
            for root, top in roots.items()
            for name, module in top.named_modules()
        ]
        self.written = set[str]()
        self.kinds = [type(module) for _, module in self.modules]
        self.classes = list({*self.kinds})
        self.forwards = [kind.forward for kind in self.classes]
        self.attributes = [dict(vars(module)) for _, module in self.modules]
        self.entries = [{key: dict(own[key]) for key in _DICTS} for own in self.attributes]
        self.global_hooks = [dict(hooks) for hooks in hooks_of_all_modules()]
        self.parameters = [pair for top in roots.values() for pair in top.named_parameters()]
        self.flags = [tuple(dict(v) if isinstance(v, dict) else v for v in flags) for flags in self._flags()]
        values = ((attribute(place, key), v) for place, m in self.modules for key, v in vars(m).items())
        self.tensors = [
            (place, v)
            for place, v in values
            if isinstance(v, Tensor) and not (v.is_inference() or isinstance(v, FakeTensor))
        ]
        self.versions = self._versions()
        self.changed: tuple[tuple[str, str], ...] = ()  # plain attributes that differ from those at compile
        self._remember()

    def check(self, batch: Batch) -> StepKey:
        """The key of a call, by which its program is chosen. Raises StepError for a change of the modules, or of their
        surroundings, for which there are no programs."""
        check_autocast(self.autocast)
        if not self._is_current():
            self._check_classes()
            self.changed = tuple(self._changes())
            self._check_tensors()
            self._remember()
        return StepKey.of(batch, self.changed)

    def _remember(self) -> None:
        """Remember the entries of every dict as they are now, for a comparison by identity, in C."""
        dicts = [own for _, module in self.modules for own in (vars(module), *(vars(module)[key] for key in _DICTS))]
        self._empty = [own for own in dicts if not own]
        self._views = [own.values() for own in dicts if own]
        self._lengths = list(map(len, self._views))
        self._elements = list(chain.from_iterable(self._views))

    def _is_current(self) -> bool:
        return (
            not any(self._empty)
            and list(map(len, self._views)) == self._lengths
            and all(map(is_, chain.from_iterable(self._views), self._elements))
            and [type(module) for _, module in self.modules] == self.kinds
            and [kind.forward for kind in self.classes] == self.forwards
            and self._flags() == self.flags
            and self._versions() == self.versions
            and self.global_hooks == hooks_of_all_modules()
        )

    def _flags(self) -> list[Any]:
        return [_FLAGS(parameter) for _, parameter in self.parameters]

    def _versions(self) -> list[int]:
        return [version_of(tensor) for _, tensor in self.tensors]

    def _check_classes(self) -> None:
        for (place, module), kind in zip(self.modules, self.kinds, strict=True):
            if type(module) is not kind:
                raise _changed(f"the class of {place}", kind.__qualname__, type(module).__qualname__)
        for kind, forward in zip(self.classes, self.forwards, strict=True):
            if kind.forward is not forward:
                raise _changed(f"{kind.__qualname__}.forward", "the function at compile", "another function")
        if self.global_hooks != hooks_of_all_modules():
            raise _changed("the global module hooks", "those at compile", "others")

    def _changes(self) -> Iterator[tuple[str, str]]:
        """Plain attributes that differ from those at compile; StepError for any other change of a module."""
        for (place, module), own, entries in zip(self.modules, self.attributes, self.entries, strict=True):
            now = vars(module)
            for key, before in entries.items():
                for name, old, new in _differences(before, now[key]):
                    if key in ("_parameters", "_buffers") and isinstance(old, Tensor):
                        kind, where = ("param" if key == "_parameters" else "buffer"), f"{place}.{name}"
                        raise replaced_tensor(kind, where.partition(".")[2], where, shown(new))
                    else:
                        raise _changed(attribute(place, key) if key in MODULE_HOOKS else f"{place}.{name}", old, new)
            for name, old, new in _differences(own, now):
                where = attribute(place, name)
                if name in _DICTS or (where in self.written and name != "training"):
                    continue
                if not (is_plain(old) and is_plain(new)):
                    raise _changed(where, old, new)
                if repr(old) != repr(new):
                    yield where, repr(new)

    def _check_tensors(self) -> None:
        """StepError for a parameter that was frozen or unfrozen, or whose hooks changed, and for an attribute that is a
        tensor and was written."""
        for (name, _), old, new in zip(self.parameters, self.flags, self._flags(), strict=True):
            if old[0] != new[0]:
                raise _changed(f"requires_grad of the parameter '{name}'", old[0], new[0])
            for method, before, now in zip(TENSOR_HOOKS.values(), old[1:], new[1:], strict=True):
                if (before or {}) != (now or {}):
                    raise _changed(f"{method} on the parameter '{name}'", "no such hook", "a hook, which would not run")
        for (place, tensor), before, now in zip(self.tensors, self.versions, self._versions(), strict=True):
            if before != now and place not in self.written:
                raise _changed(place, "the values at compile", f"{shown(tensor)} with other values")
        self.versions = self._versions()


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Names whose values are other objects than before, with both."""
    for name in {**before, **now}:
        old, new = before.get(name, MISSING), now.get(name, MISSING)
        if old is not new:
            yield name, old, new


def _changed(place: str, old: Any, new: Any) -> StepError:
    return StepError(
        "the model has changed since the step was compiled",
        where=place,
        got=shown(new) if not isinstance(new, str) else new,
        expected=shown(old) if not isinstance(old, str) else old,
        hint=RECOMPILE,
    )


def replaced_tensor(kind: str, name: str, where: str, got: str) -> StepError:
    """The error about a parameter or buffer in whose place the module has another tensor."""
    return StepError(
        f"the {'parameter' if kind == 'param' else 'buffer'} '{name}' of the model was replaced after compile",
        where=where,
        got=got,
        expected="the same tensor, with any values",
        hint=f"write into it (load_state_dict, x.data.copy_(...)); or {RECOMPILE}",
    )


def check_entries(example: Batch, batch: Batch) -> None:
    """LayoutError if a batch lacks tensors of the example."""
    missing = [name for name in example.names if name not in batch.names]
    if missing:
        raise LayoutError(
            "the batch lacks entries of the example",
            where=f"entry '{missing[0]}'",
            got=", ".join(batch.names),
            expected=", ".join(example.names),
            hint="pass a value that changes nothing (a mask of ones); or compile a second step for such batches, with "
            "the same model and optimizer",
        )


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
