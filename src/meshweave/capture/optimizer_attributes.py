"""The attributes of a user's optimizer, on the copy whose `step()` runs on stand-ins."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from functools import partial
from typing import Any

import torch

from meshweave.capture.rest import Form, TensorVersion, difference, form_of
from meshweave.capture.snapshot import Snapshot
from meshweave.capture.variables import ATOMS
from meshweave.errors import CaptureError

# Leaves of a form that cannot change, or whose contents are in the form, too.
_VISIBLE = (*ATOMS, type, tuple, frozenset, Enum, partial, types.ModuleType, types.FunctionType,
            types.BuiltinFunctionType, types.MethodType)  # fmt: skip

_PARAMETER = "a parameter"


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes of an optimizer except its groups and their state."""
    return {k: v for k, v in vars(optimizer).items() if k not in ("state", "step", "param_groups")}


def own_containers(optimizer: torch.optim.Optimizer) -> set[int]:
    """The ids of an optimizer, its groups and its state, to which an attribute may refer."""
    groups = optimizer.param_groups
    return {id(optimizer), id(optimizer.state), id(groups), *map(id, groups)}


class OptimizerAttributes:
    """The attributes of the optimizer `source`, of which `stand_in` is a copy. `params`: the ids of all parameters."""

    def __init__(self, source: torch.optim.Optimizer, stand_in: torch.optim.Optimizer, params: Collection[int]) -> None:
        self._source, self._stand_in, self._params = source, stand_in, frozenset(params)
        self.has_moved = False  # whether an attribute has come to refer to other parameters
        self._note(attributes_of(source))

    def _note(self, attributes: Mapping[str, Any]) -> None:
        own = own_containers(self._source)
        self._values, self._contents = dict(attributes), Snapshot.of(attributes, own)
        self._forms = {name: self._form(value, own) for name, value in attributes.items()}

    def _form(self, value: Any, own: Collection[int]) -> Form:
        """The form of an attribute, in which parameters count as objects: every step writes to their values."""
        return tuple(
            (at, (_PARAMETER, id(x.tensor)) if isinstance(x, TensorVersion) and id(x.tensor) in self._params else x)
            for at, x in form_of(value, skip=own)
        )

    def take(self, memo: Callable[[], dict[int, Any]]) -> None:
        """Copy to the stand-in what the user has changed, and delete what is gone. `memo()` maps ids of objects to
        their stand-ins, as in `copy.deepcopy`."""
        attributes = attributes_of(self._source)
        if self._is_current(attributes):
            return
        before = self._forms
        self._note(attributes)
        for name, form in self._forms.items():
            if name not in before or not _is_visible(form) or difference(before[name], form) is not None:
                self.has_moved |= _parameters_in(form) != _parameters_in(before.get(name, ()))
                vars(self._stand_in)[name] = copied(self._source, attributes[name], memo())
        for name in before.keys() - attributes.keys():
            self.has_moved |= bool(_parameters_in(before[name]))
            vars(self._stand_in).pop(name, None)

    def _is_current(self, attributes: Mapping[str, Any]) -> bool:
        """Whether nothing can have changed."""
        values = self._values
        is_same = attributes.keys() == values.keys() and all(attributes[k] is v for k, v in values.items())
        return is_same and self._contents.is_current() and all(map(_is_visible, self._forms.values()))


def _parameters_in(form: Form) -> list[tuple[str, Any]]:
    """Where a value refers to which parameters."""
    return [(at, leaf) for at, leaf in form if isinstance(leaf, tuple) and leaf[:1] == (_PARAMETER,)]


def _is_visible(form: Form) -> bool:
    """Whether a form shows every change of a value: not that of a tensor through `.data`, or of an object of C."""
    return all(isinstance(leaf, _VISIBLE) for _, leaf in form)


def copied(optimizer: torch.optim.Optimizer, value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of a value of an optimizer. CaptureError if it cannot be copied."""
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise CaptureError(
            "the optimizer cannot be copied, to trace its step without data",
            where=type(optimizer).__name__,
            got=f"{type(error).__name__}: {error}",
            hint="keep in the optimizer's attributes only objects that copy.deepcopy can copy",
        ) from error
