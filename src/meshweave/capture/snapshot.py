"""The Python state that forward can reach: attributes, containers, closures, globals; to compare and to restore.

State is in containers: dicts (including those of attributes), lists, sets, closures. A snapshot has a copy of each, and
all their keys and values in a list, so that a single comparison by identity, in C, tells whether anything has changed.
(By `==` 1 would be True, 0.0 be -0.0, and dicts in another order be equal.)
"""

from __future__ import annotations

import argparse
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain
from operator import is_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from meshweave.capture.variables import ATOMS, KEYS, MISSING, Length, Names, global_names

# Containers beyond this length (a data set, say) are compared only by their length.
_MAX_LENGTH = 10_000
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "meshweave"})
_HIDDEN = frozenset({"_modules", "_parameters", "_buffers"})  # dicts whose entries are attributes of a module
_INSTALLED = (str(Path(torch.__file__).parents[1]), str(Path(__file__).parents[1]), str(Path(random.__file__).parent))


@dataclass(frozen=True, slots=True)
class StateChange:
    """A value that has changed since a snapshot. `place` says where, in a user's words."""

    place: str
    old: Any
    new: Any
    container: int
    key: Any
    text: str = ""  # the exact difference, if the values are objects

    def __str__(self) -> str:
        return f"{self.place}: {shown(self.old)} -> {shown(self.new)}" + (f" ({self.text})" if self.text else "")


@dataclass(slots=True)
class Snapshot:
    """Containers and their contents. `styles` say how a key is written, `parents` where a container was reached."""

    live: list[Any] = field(default_factory=list)
    copies: list[Any] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)
    parents: list[tuple[int, Any]] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)
    caches: list[tuple[Any, int]] = field(default_factory=list)  # functions under functools.cache, and their sizes
    tensors: list[tuple[int, Any, Tensor]] = field(default_factory=list)
    # The containers again: those that were empty, which most are, what iterates over the others, with their elements,
    # and those of which the length counts.
    empty: list[Any] = field(default_factory=list)
    views: list[Any] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    elements: list[Any] = field(default_factory=list)
    long: list[Length] = field(default_factory=list)

    @staticmethod
    def of(roots: Mapping[str, Any], skip: Collection[int] = ()) -> Snapshot:
        """The snapshot of everything that the roots (a model, a loss, a function) reach, but through objects whose ids
        are in `skip`."""
        return _Walk(skip).run(roots)

    def is_current(self) -> bool:
        """Whether every value is the same object. A number that was computed anew is not."""
        return (
            not any(self.empty)
            and all(map(Length.is_current, self.long))
            and list(map(len, self.views)) == self.lengths
            and all(map(is_, chain.from_iterable(self.views), self.elements))
        )

    def renew(self) -> bool:
        """Take values as they are now that do not differ by `changes`. False where a container may have been replaced,
        which only a new snapshot sees into."""
        now = list(chain.from_iterable(self.views))
        if any(old is not new and type(new) not in ATOMS for old, new in zip(self.elements, now, strict=True)):
            return False
        self.elements = now
        return True

    def changes(self) -> list[StateChange]:
        """Differences from the snapshot: values, types, and the order of keys."""
        changes = []
        for i, (live, copy) in enumerate(zip(self.live, self.copies, strict=True)):
            now, before = _entries(live), _entries(copy)
            keys = [k for k in {**before, **now} if not same(before.get(k, MISSING), now.get(k, MISSING))]
            changes += [StateChange(self.place(i, k), before.get(k, MISSING), now.get(k, MISSING), i, k) for k in keys]
            if not keys and not same(tuple(before), tuple(now)):
                place = f"the keys of {self.place(*self.parents[i])}"
                changes.append(StateChange(place, tuple(before), tuple(now), i, KEYS))
        return changes

    def restore(self) -> None:
        """Restore every container, and empty the function caches that have grown."""
        for function, size in self.caches:
            if function.cache_info().currsize != size:
                function.cache_clear()
        if self.is_current():
            return
        for i in sorted({change.container for change in self.changes()}):
            _write(self.live[i], self.copies[i])

    def set(self, change: StateChange, value: Any) -> bool:
        """Put a value at the place of a change. False if the container does not accept it."""
        live = self.live[change.container]
        if change.key is KEYS:
            return False
        if isinstance(live, Names):
            live.write(change.key, value)
        elif isinstance(live, dict):
            live[change.key] = value
        return isinstance(live, Names | dict)

    def watch(self, views: Sequence[Any]) -> None:
        """Their elements, as they are now, are compared by `is_current`."""
        for view in views:
            elements = list(view)
            self.views.append(view)
            self.lengths.append(len(elements))
            self.elements += elements

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """Every value that is not a container, by its place."""
        for i, live in enumerate(self.live):
            for key, value in _entries(live).items():
                yield self.place(i, key), value

    def orders(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """The keys of every dict, by its place, but for attributes."""
        for live, style, parent in zip(self.live, self.styles, self.parents, strict=True):
            if isinstance(live, dict) and style.startswith("["):
                yield self.place(*parent), tuple(live)

    def place(self, container: int, key: Any) -> str:
        """`model.layers.0.attention.cache['k']`."""
        parts: list[str] = []
        while container >= 0:
            style = self.styles[container]
            if not (style == ".{}" and key in _HIDDEN):
                parts.append(style.format(key))
            if not style.startswith((".", "[")):  # a variable, which has a full name
                break
            container, key = self.parents[container]
        return "".join([*([] if container >= 0 else [str(key)]), *reversed(parts)])


class _Walk:
    """Visits every container once, starting from the roots."""

    def __init__(self, skip: Collection[int]) -> None:
        self.snapshot = Snapshot()
        self.seen = set(skip)
        self.stack: list[tuple[Any, int, Any]] = []

    def run(self, roots: Mapping[str, Any]) -> Snapshot:
        self.stack = [(value, -1, name) for name, value in reversed(list(roots.items()))]
        while self.stack:
            value, parent, key = self.stack.pop()
            self.visit(value, parent, key)
        return self.snapshot

    def visit(self, value: Any, parent: int, key: Any) -> None:
        if isinstance(value, UninitializedTensorMixin):
            return
        if isinstance(value, Tensor):
            self.snapshot.tensors.append((parent, key, value))
            return
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        if isinstance(value, dict | list | set | deque):
            of_module = parent >= 0 and self.snapshot.styles[parent] == ".{}" and key in _HIDDEN
            self.add(value, ".{}" if of_module else "[{!r}]", parent, key)
        elif isinstance(value, tuple | frozenset):
            self.push(enumerate(value), parent, key)
        elif isinstance(value, partial):
            self.push(enumerate((value.func, value.args, value.keywords)), parent, key)
        elif isinstance(value, types.FunctionType):
            self.function(value, parent, key)
        elif isinstance(value, types.MethodType | staticmethod | classmethod):
            self.push(enumerate((value.__func__, getattr(value, "__self__", None))), parent, key)
        elif isinstance(value, property):
            self.push(enumerate((value.fget, value.fset)), parent, key)
        elif isinstance(value, type):
            if is_users(sys.modules.get(value.__module__)):
                self.add(Names.of_class(value), f"{value.__qualname__}.{{}}", parent, key)
        elif isinstance(value, types.ModuleType):
            if is_users(value):
                self.add(Names.of_module(value), f"{value.__name__}.{{}}", parent, key)
        elif isinstance(value, type(global_names)):
            self.snapshot.caches.append((value, value.cache_info().currsize))
            self.push([("function", value.__wrapped__)], parent, key)
        elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            if value.size <= _MAX_LENGTH and not value.dtype.hasobject and value.ndim:
                self.add(Names.of_array(value), ".{}", parent, key)
        elif is_generator(value):
            self.snapshot.generators.append(value)
        else:
            self.object(value, parent, key)

    def object(self, value: Any, parent: int, key: Any) -> None:
        kind = type(value)
        if _has_attributes(value):
            attributes = getattr(value, "__dict__", None)
            slots = Names.of_slots(value)
            if slots.names and not isinstance(value, nn.Module):
                self.add(slots, ".{}", parent, key)
            if isinstance(attributes, dict) and not isinstance(value, Enum):
                self.add(attributes, ".{}", parent, key)
                for base in kind.__mro__:
                    if base is not object and base.__module__.partition(".")[0] not in _LIBRARIES:
                        self.visit(base, parent, key)

    def function(self, function: types.FunctionType, parent: int, key: Any) -> None:
        if not is_users(sys.modules.get(function.__module__)):
            return
        name = function.__qualname__
        if function.__closure__:
            self.add(Names.of_closure(function), f"variable {{}} in the closure of {name}", parent, key)
        variables = Names.of_globals(function)
        if variables.names:
            self.add(variables, f"global variable {{}} of {name}", parent, key)
        if vars(function):
            self.add(vars(function), f"{name}.{{}}", parent, key)
        self.push([("defaults", function.__defaults__), ("defaults", function.__kwdefaults__)], parent, key)

    def add(self, container: Any, style: str, parent: int, key: Any) -> None:
        snapshot, index = self.snapshot, len(self.snapshot.live)
        is_long = not isinstance(container, Names) and len(container) > _MAX_LENGTH
        live = Length(container) if is_long else container
        copy = len(container) if is_long else _copy(container)
        snapshot.live.append(live)
        snapshot.copies.append(copy)
        if isinstance(live, Length):
            snapshot.long.append(live)
        elif isinstance(container, dict | list | set | deque) and not container:
            snapshot.empty.append(container)
        else:
            kind: Any = OrderedDict if isinstance(container, OrderedDict) else dict  # whatever its class makes of them
            is_dict = isinstance(container, dict)
            snapshot.watch([kind.keys(container), kind.values(container)] if is_dict else [container])
        snapshot.styles.append(style)
        snapshot.parents.append((parent, key))
        if not is_long:
            self.push(_entries(container).items(), index, None)

    def push(self, entries: Any, parent: int, key: Any) -> None:
        """Visit the objects that entries refer to next; with a `key`, as if the entries were there themselves."""
        entries_left = [(v, parent, k if key is None else key) for k, v in entries if type(v) not in ATOMS]
        self.stack += reversed(entries_left)


def _has_attributes(value: Any) -> bool:
    root = type(value).__module__.partition(".")[0]
    return isinstance(value, nn.Module | types.SimpleNamespace | argparse.Namespace) or root not in _LIBRARIES


def is_walked(value: Any) -> bool:
    """Whether a snapshot covers all contents of a value."""
    if isinstance(value, dict | list | set | deque):
        return True
    has_names = isinstance(getattr(value, "__dict__", None), dict) or bool(Names.of_slots(value).names)
    return _has_attributes(value) and has_names and not isinstance(value, Enum | tuple | type)


def is_generator(value: Any) -> bool:
    """Whether it is a random number generator of Python or numpy."""
    return isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random")


def generator_state(generator: Any) -> Any:
    """The state of a generator, for `set_generator_state`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return (generator.bit_generator if hasattr(generator, "bit_generator") else generator._bit_generator).state


def set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        (generator.bit_generator if hasattr(generator, "bit_generator") else generator._bit_generator).state = state


def same(a: Any, b: Any) -> bool:
    """Whether either may replace the other: the same object, or equal values without identity, of equal types. Objects
    of classes with their own `==` are compared by identity alone: their `==` may ignore something."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b) or isinstance(a, Tensor):
        return False
    if isinstance(a, weakref.ReferenceType):  # caches of an RNN's weights
        return True
    if isinstance(a, float | complex):
        return repr(a) == repr(b)  # -0.0 is not 0.0, NaN is itself
    if isinstance(a, slice):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, tuple | list | deque | set | frozenset | dict):
        parts, others = (tuple(v.items() if isinstance(v, dict) else v) for v in (a, b))
        try:
            return len(parts) == len(others) and all(map(same, parts, others))
        except RecursionError:  # it contains itself
            return False
    equality = next(base for base in kind.__mro__ if "__eq__" in vars(base))
    if equality.__module__.partition(".")[0] not in _LIBRARIES - {"numpy"}:
        return False
    try:
        return bool(a == b)
    except Exception:  # whatever error the class raises on comparison
        return False


def shown(value: Any) -> str:
    """A value in a message: short, and without running its class's code."""
    if isinstance(value, Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    is_short = isinstance(value, tuple) and len(value) <= 4 and all(type(v) in ATOMS for v in value)
    if type(value) in ATOMS or value is MISSING or is_short:
        text = repr(value)
    elif isinstance(value, list | tuple | set | dict | deque):
        text = f"a {type(value).__name__} of {len(value)}"
    else:
        text = f"a {type(value).__qualname__}"
    return text if len(text) < 80 else text[:77] + "..."


def _entries(container: Any) -> Mapping[Any, Any]:
    if isinstance(container, Names):
        return container.values()
    if isinstance(container, Mapping):
        return container
    if isinstance(container, Length | int):
        return {"length": len(container.container) if isinstance(container, Length) else container}
    if isinstance(container, set):
        return dict.fromkeys(container, None)
    return dict(enumerate(container))


def _copy(container: Any) -> Any:
    if isinstance(container, Names):
        return container.values()
    if isinstance(container, Mapping):
        return dict(container)
    return type(container)(container) if type(container) in (list, set, deque) else list(container)


def _write(live: Any, copy: Any) -> None:
    if isinstance(live, Names):
        for name, value in copy.items():
            live.write(name, value)
    elif isinstance(live, dict):
        live.clear()
        live.update(copy)
    elif isinstance(live, list | deque | set):
        live.clear()
        (live.update if isinstance(live, set) else live.extend)(copy)


def is_users(module: types.ModuleType | None) -> bool:
    """Whether a module is neither in the standard library nor in an installed package."""
    file = getattr(module, "__file__", None)
    return module is not None and (not file.startswith(_INSTALLED) if file else module.__name__ == "__main__")
