"""The non-tensor contents of a batch, in a form that two batches can be compared by: down to attributes, whatever `==`
says."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import zip_longest
from typing import Any

from torch import Tensor

from meshweave.capture.snapshot import Snapshot, is_walked, same, shown
from meshweave.capture.variables import ATOMS, MISSING
from meshweave.interop.storages import version_of

# By place, in order, the numbers, texts and tensors of a value, and the classes of their containers.
Form = tuple[tuple[str, Any], ...]


def forms_of(rest: Mapping[str, Any]) -> dict[str, Form]:
    """The form of each entry. Later writes to an object of the entry do not change it."""
    return {name: form_of(value, name) for name, value in rest.items()}


def form_of(value: Any, name: str = "", skip: Collection[int] = ()) -> Form:
    """The form of a value, without the contents of the containers whose ids are in `skip`."""
    if type(value) in ATOMS:
        return ((name, value),)
    snapshot = Snapshot.of({name: value}, skip)
    places = [(place, _leaf(leaf)) for place, leaf in snapshot.leaves()]
    places += [(f"the keys of {place}", keys) for place, keys in snapshot.orders()]
    return ((name, _leaf(value)), *sorted(places, key=lambda pair: pair[0]))


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorVersion(value)
    if type(value).__module__ == "numpy" and hasattr(value, "shape"):
        return type(value), value.shape, str(value.dtype), None if value.shape else value.item()
    return type(value) if is_walked(value) else value


class TensorVersion:
    """A tensor at its present version: it differs after the next write."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, version_of(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorVersion) and self.tensor is other.tensor and self.version == other.version

    __hash__ = object.__hash__


def alike(before: Mapping[str, Form], now: Mapping[str, Form]) -> bool:
    return before.keys() == now.keys() and all(same(form, now[name]) for name, form in before.items())


def difference(before: Form, now: Form) -> str | None:
    """The first place in which two forms of an entry differ, as text, empty if the values themselves show it; None if
    they are equal."""
    for (place, old), (other, new) in zip_longest(before, now, fillvalue=("", MISSING)):
        if place != other or not same(old, new):
            return f"{place or other}: {_text(old)} -> {_text(new)}" if len(before) > 1 and len(now) > 1 else ""
    return None


def _text(leaf: Any) -> str:
    if isinstance(leaf, TensorVersion):
        return shown(leaf.tensor)
    return f"a {leaf.__qualname__}" if isinstance(leaf, type) else shown(leaf)
