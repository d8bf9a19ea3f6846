"""The attributes and options of a user's optimizer, for the copy whose `step()` runs on stand-ins."""

from __future__ import annotations

import copy
import logging
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum, IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshweave.capture.rest import Form, TensorVersion, difference, form_of
from meshweave.capture.snapshot import Snapshot
from meshweave.capture.variables import ATOMS
from meshweave.errors import CaptureError

# Leaves of a form that cannot change, or whose contents are in the form, too.
_VISIBLE = (*ATOMS, type, tuple, frozenset, Enum, partial, types.ModuleType, types.FunctionType,
            types.BuiltinFunctionType, types.MethodType, weakref.ReferenceType, logging.Logger)  # fmt: skip

_PARAMETER = "a parameter"


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer except its groups and their state."""
    return {k: v for k, v in vars(optimizer).items() if k not in ("state", "step", "param_groups")}


def own_containers(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of an optimizer, its groups and its state, to which an attribute may refer."""
    groups = optimizer.param_groups
    return {id(optimizer), id(optimizer.state), id(groups), *map(id, groups)}


class Followed:
    """Values of the user's optimizer, by name, of which the optimizer that runs on stand-ins has copies: attributes, or
    the options of a group.

    `copies` has the copies of `values`; `params` are the ids of all parameters, `own` those of the optimizer's own
    containers, to which values may refer. `distinguishes` says whether a value may tell parameters apart.
    """

    def __init__(
        self, values: Mapping[str, Any], copies: dict[str, Any], params: Collection[int], own: Collection[int]
    ) -> None:
        self._copies, self._params = copies, frozenset(params)
        self._note(values, own)

    def _note(self, values: Mapping[str, Any], own: Collection[int]) -> None:
        self._values, self._contents = dict(values), Snapshot.of(values, own)
        self._forms = {name: self._form(value, own) for name, value in values.items()}
        self._is_visible = all(map(_is_visible, self._forms.values()))
        self.distinguishes = any(map(self._distinguishes, self._forms.values()))

    def _form(self, value: Any, own: Collection[int]) -> Form:
        """The form of a value, in which parameters count as objects: every step writes to their values."""
        return tuple(
            (at, (_PARAMETER, x.tensor) if isinstance(x, TensorVersion) and id(x.tensor) in self._params else x)
            for at, x in form_of(value, skip=own)
        )

    def _distinguishes(self, form: Form) -> bool:
        """Whether a value refers to parameters, also by the keys of a dict, or to what cannot be seen into."""
        leaves = [(at, leaf) for at, leaf in form if not isinstance(leaf, TensorVersion)]
        refers = any(id(x) in self._params for _, leaf in leaves if isinstance(leaf, tuple) for x in leaf)
        return refers or not _is_visible(leaves)

    def take(self, values: Mapping[str, Any], own: Collection[int], memo: Callable[[], dict[int, Any]]) -> ValueChange:
        """Copy what the user has changed, and delete what is gone. `memo()` maps ids of objects to their stand-ins, as
        in `copy.deepcopy`."""
        if self._is_current(values):
            return ValueChange.NONE
        before, change = self._forms, ValueChange.NONE
        self._note(values, own)
        for name, form in self._forms.items():
            if name not in before or not _is_visible(form) or difference(before[name], form) is not None:
                value, is_plain = values[name], _is_plain(values[name])
                self._copies[name] = value if is_plain else copied(name, value, memo())
                is_number = is_plain or (isinstance(value, Tensor) and value.numel() == 1)
                change = max(change, ValueChange.NUMBER if is_number else ValueChange.ANY)
        for name in before.keys() - values.keys():
            self._copies.pop(name, None)
            change = ValueChange.ANY
        return change

    def _is_current(self, values: Mapping[str, Any]) -> bool:
        """Whether nothing can have changed."""
        before = self._values
        is_same = values.keys() == before.keys() and all(values[k] is v for k, v in before.items())
        return is_same and self._is_visible and self._contents.is_current()


class ValueChange(IntEnum):
    """What the user has changed: nothing, numbers and texts only, or containers, which may tell parameters apart."""

    NONE = 0
    NUMBER = 1
    ANY = 2


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or a tuple of them (`betas`)."""
    return all(type(x) in ATOMS for x in (value if type(value) is tuple else (value,)))


def _is_visible(form: Iterable[tuple[str, Any]]) -> bool:
    """Whether a form shows every change of a value: not that of a tensor through `.data`, or of an object of C."""
    return all(isinstance(leaf, _VISIBLE) for _, leaf in form)


def copied(where: str, value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of a value of an optimizer. CaptureError if it cannot be copied."""
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise CaptureError(
            "the optimizer cannot be copied, to trace its step without data",
            where=where,
            got=f"{type(error).__name__}: {error}",
            hint="keep in its attributes and options only objects that copy.deepcopy can copy",
        ) from error
