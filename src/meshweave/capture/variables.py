"""Variables that are not entries of their own dict, as containers: of closures, classes, modules, slots, arrays."""

from __future__ import annotations

import dis
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from meshweave.capture.unread import Unread


class _Missing:
    """Represents the absence of a value."""

    def __repr__(self) -> str:
        return "nothing"


class _Keys:
    """Stands for all keys of a container, where their order or their types have changed."""


MISSING = _Missing()
KEYS = _Keys()
ATOMS = frozenset(
    {int, float, bool, str, bytes, complex, type(None), type(...), slice, range, Unread}
    | {torch.dtype, torch.device, torch.Size}
)


class Names:
    """Variables that are not entries of their own dict, as a container: of a closure, a class, a module."""

    def __init__(self, read: Callable[[str], Any], write: Callable[[str, Any], None], names: Sequence[str]) -> None:
        self.read, self.write, self.names = read, write, tuple(names)

    def values(self) -> dict[str, Any]:
        return {name: self.read(name) for name in self.names}

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Any]:
        return map(self.read, self.names)

    @staticmethod
    def of_closure(function: types.FunctionType) -> Names:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

        def read(name: str) -> Any:
            try:
                return cells[name].cell_contents
            except ValueError:  # not bound yet
                return MISSING

        return Names(read, lambda name, value: setattr(cells[name], "cell_contents", value), list(cells))

    @staticmethod
    def of_globals(function: types.FunctionType) -> Names:
        known = function.__globals__
        names = [n for n in global_names(function.__code__) if n in known]
        return Names(lambda name: known.get(name, MISSING), known.__setitem__, names)

    @staticmethod
    def of_class(kind: type) -> Names:
        names = [n for n in vars(kind) if not n.startswith("__")]
        return Names(lambda name: vars(kind).get(name, MISSING), partial(setattr, kind), names)

    @staticmethod
    def of_slots(value: Any) -> Names:
        slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
        names = [n for own in slots for n in ((own,) if isinstance(own, str) else own) if not n.startswith("__")]
        return Names(lambda name: getattr(value, name, MISSING), partial(setattr, value), names)

    @staticmethod
    def of_array(array: Any) -> Names:
        """The elements as a tuple, which is the same object as long as no byte changes."""
        data = values = None

        def read(name: str) -> tuple[Any, ...]:
            nonlocal data, values
            if values is None or array.tobytes() != data:
                data, values = array.tobytes(), tuple(array.ravel().tolist())
            return values

        def write(name: str, values: tuple[Any, ...]) -> None:
            array.flat = values

        return Names(read, write, ["elements"])

    @staticmethod
    def of_module(module: types.ModuleType) -> Names:
        data = {*ATOMS, list, dict, set, tuple, Tensor}
        names = [n for n, v in vars(module).items() if type(v) in data and not n.startswith("__")]
        return Names(lambda name: vars(module).get(name, MISSING), partial(setattr, module), names)


class Length:
    """A long container that is compared by its length."""

    def __init__(self, container: Any) -> None:
        self.container, self.length = container, len(container)

    def is_current(self) -> bool:
        return len(self.container) == self.length


@cache
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The global variables that a function, or a function within it, reads or writes."""
    names = {i.argval: None for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names |= dict.fromkeys(global_names(inner))
    return tuple(names)
