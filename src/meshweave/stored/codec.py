"""Values as JSON and back. Only the classes, functions and operators of `allowed` have a form.

Numbers, booleans and None stand for themselves, "$text" is a string, "%3" the node 3 of the graph, "#5" the entry 5 of
the table; an array is a tuple, {"l": [...]} a list, {"d": [[key, value], ...]} a dict, {"s": [...]} a frozenset. The
table has each other value once, as an array whose first element is its class; it refers to earlier entries only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import fx

from meshweave.interop.ops import OpOverload, is_operator
from meshweave.ir.mesh import Mesh
from meshweave.schedule.report import Deferred
from meshweave.stored.allowed import (
    CLASSES,
    FIELDS,
    FUNCTION_NAMES,
    FUNCTIONS,
    is_stored_operator,
    operator_named,
    torch_constant,
    torch_form,
)

NO_NODES: Mapping[fx.Node, int] = {}


class NoFormError(Exception):
    """A value that has no form on disk: the program is not stored."""


@dataclass(slots=True)
class Encoder:
    """`known` are values that the reader has too, by name; they are stored as their names. `operators` are those of the
    captured step, by name."""

    known: Mapping[str, Any] = field(default_factory=dict)
    operators: Mapping[str, OpOverload] = field(default_factory=dict)
    table: list[Any] = field(default_factory=list)
    _by_id: dict[int, tuple[Any, str]] = field(default_factory=dict)  # with the value, so that ids stay unique
    _by_form: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.known.items():
            self._by_id[id(value)] = value, self._entry(["known", name])

    def value(self, value: Any, nodes: Mapping[fx.Node, int] = NO_NODES) -> Any:
        """The form of a value. Raises NoFormError if it has none."""
        cls = type(value)
        if value is None or cls is bool or cls is int or cls is float:
            return value
        if cls is str:
            return "$" + value
        if cls is fx.Node:
            return f"%{nodes[value]}"
        if cls is tuple or cls is torch.Size:
            return [self.value(each, nodes) for each in value]
        if isinstance(value, list):
            return {"l": [self.value(each, nodes) for each in value]}
        if isinstance(value, dict):
            return {"d": [[self.value(key, nodes), self.value(each, nodes)] for key, each in value.items()]}
        if isinstance(value, set | frozenset):
            return {"s": sorted((self.value(each) for each in value), key=json.dumps)}
        if cls is Deferred:
            return self.value(value.rows())
        seen = self._by_id.get(id(value))
        if seen is None:
            seen = self._by_id[id(value)] = value, self._entry(self._form(value))
        return seen[1]

    def _entry(self, form: list[Any]) -> str:
        text = json.dumps(form)
        if text not in self._by_form:
            self._by_form[text] = f"#{len(self.table)}"
            self.table.append(form)
        return self._by_form[text]

    def _form(self, value: Any) -> list[Any]:
        if (pair := torch_form(value)) is not None:
            return list(pair)
        if isinstance(value, torch.device):
            return ["device", str(value)]
        if isinstance(value, complex):
            return ["complex", value.real, value.imag]
        if isinstance(value, Mesh):
            return ["mesh", value.text]
        if is_operator(value) and is_stored_operator(str(value), self.operators):
            return ["operator", str(value)]
        if callable(value) and value in FUNCTION_NAMES:
            return ["function", FUNCTION_NAMES[value]]
        if (name := next((name for name, each in self.known.items() if _is_equal(each, value)), None)) is not None:
            return ["known", name]
        return self._of_class(value)

    def _of_class(self, value: Any) -> list[Any]:
        cls = type(value)
        if CLASSES.get(cls.__name__) is not cls:
            name = getattr(value, "__qualname__", cls.__qualname__)
            raise NoFormError(f"{name} of {getattr(value, '__module__', cls.__module__)} has no form")
        return [cls.__name__, *(self.value(getattr(value, name)) for name in FIELDS[cls.__name__])]


def _is_equal(known: Any, value: Any) -> bool:
    """Whether a frozen value equals one that the reader has; tensors are compared by identity alone."""
    return type(known) is type(value) and not isinstance(known, torch.Tensor) and bool(known == value)


@dataclass(slots=True)
class KeyEncoder(Encoder):
    """The encoder of keys: nothing is read back, so all dataclasses of meshweave have a form, with their modules."""

    def _form(self, value: Any) -> list[Any]:
        if isinstance(value, torch.Tensor):
            return ["tensor", str(value.dtype), list(value.shape), _content(value)]
        return Encoder._form(self, value)

    def _of_class(self, value: Any) -> list[Any]:
        cls = type(value)
        if not is_dataclass(cls) or not cls.__module__.startswith("meshweave."):
            raise NoFormError(f"{cls.__module__}.{cls.__qualname__} is not code of meshweave")
        parts = [self.value(getattr(value, each.name)) for each in fields(cls) if each.init]
        return [f"{cls.__module__}.{cls.__qualname__}", *parts]


def _content(tensor: torch.Tensor) -> str:
    if tensor.device.type == "meta":
        raise NoFormError("a tensor without data is not stored")
    raw = tensor.detach().cpu().contiguous().flatten()
    return sha256(raw.view(torch.uint8).numpy().tobytes()).hexdigest()


@dataclass(slots=True)
class Decoder:
    """Reads what an `Encoder` with the same `known` and `operators` wrote. Raises ArithmeticError, LookupError,
    TypeError, ValueError or MeshweaveError for any other text."""

    known: Mapping[str, Any] = field(default_factory=dict)
    operators: Mapping[str, OpOverload] = field(default_factory=dict)
    table: list[Any] = field(default_factory=list)

    def read_table(self, forms: Sequence[Sequence[Any]]) -> None:
        for form in forms:
            self.table.append(self._entry(*form))

    def value(self, form: Any, nodes: Sequence[fx.Node] = ()) -> Any:
        cls = type(form)
        if cls is str:
            mark = form[0]
            if mark == "#":
                return self.table[int(form[1:])]
            if mark == "%":
                return nodes[int(form[1:])]
            if mark == "$":
                return form[1:]
            raise ValueError(f"{form[:20]} is not a value")
        if cls is list:
            return tuple([self.value(each, nodes) for each in form])
        if cls is dict:
            ((kind, forms),) = form.items()
            return self._container(kind, forms, nodes)
        return form

    def _container(self, kind: str, forms: Sequence[Any], nodes: Sequence[fx.Node]) -> Any:
        if kind == "l":
            return [self.value(each, nodes) for each in forms]
        if kind == "d":
            return {self.value(key): self.value(each, nodes) for key, each in forms}
        if kind == "s":
            return frozenset(self.value(each) for each in forms)
        raise ValueError(f"{kind} is not a container")

    def _entry(self, kind: str, *parts: Any) -> Any:
        if kind == "known":
            return self.known[parts[0]]
        if kind == "operator":
            return operator_named(parts[0], self.operators)
        if kind == "function":
            return FUNCTIONS[parts[0]]
        if kind == "mesh":
            return Mesh.parse(parts[0])
        if kind == "device":
            return torch.device(parts[0])
        if kind == "complex":
            return complex(*parts)
        if kind not in CLASSES:
            return torch_constant(kind, *parts)
        cls = CLASSES[kind]
        if len(parts) != len(FIELDS[kind]):
            raise ValueError(f"{kind} has other fields")
        return cls(**dict(zip(FIELDS[kind], map(self.value, parts), strict=True)))
