"""The attributes of modules, and lists, dicts and sets in them: what a trace changes there is compared and undone."""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

_MAX_LENGTH = 10_000  # longer containers (a data set, say) are not looked into
_HIDDEN = frozenset({"_modules", "_parameters", "_buffers"})  # dicts whose entries are attributes of a module
_PLAIN = (int, float, bool, str, bytes, complex, type(None), type(...), slice, range, Enum)
_WALKED = (nn.Module, list, tuple, dict, set, deque)
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Nothing:
    """Represents the absence of a value."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = _Nothing()


def is_plain(value: Any) -> bool:
    """Whether the text of a value says all about it: a number, a text, None, a tuple of these."""
    if isinstance(value, tuple):
        return all(map(is_plain, value))
    return value is MISSING or isinstance(value, _PLAIN + _PLAIN_OF_TORCH)


def shown(value: Any) -> str:
    """A value in a message: short, and without running its class's code."""
    if isinstance(value, Tensor):
        return f"a tensor {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if is_plain(value):
        text = repr(value)
        return text if len(text) < 80 else text[:77] + "..."
    if isinstance(value, list | tuple | set | dict | deque):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__qualname__}"


def module_roots(**values: Any) -> dict[str, nn.Module]:
    """The modules among these values, and those whose methods they are, each under the first of its names."""
    roots: dict[str, nn.Module] = {}
    for name, value in values.items():
        module = getattr(value, "__self__", value)
        if isinstance(module, nn.Module) and all(module is not root for root in roots.values()):
            roots[name] = module
    return roots


def attribute(place: str, key: Any) -> str:
    """`model.layers.0.scale`."""
    return place if key in _HIDDEN else f"{place}.{key}"


class ModuleState:
    """A copy of every container that modules reach through attributes, lists, dicts and sets, by its place; and the
    states of random number generators, Python's, NumPy's and those among the attributes."""

    def __init__(self, roots: Mapping[str, nn.Module]) -> None:
        self._containers = [(place, style, c, _entries(c)) for place, style, c in _containers(roots)]
        values = (value for _, _, _, entries in self._containers for value in entries.values())
        generators = [*_global_generators(), *(value for value in values if _is_generator(value))]
        self._generators = [(generator, _generator_state(generator)) for generator in generators]

    def changes(self) -> dict[str, tuple[Any, Any]]:
        """By place, values that are other objects than before, and what they were; MISSING where there is nothing."""
        changes = {}
        for place, style, container, before in self._containers:
            now = _entries(container)
            for key in {**before, **now}:
                old, new = before.get(key, MISSING), now.get(key, MISSING)
                if old is not new and not (is_plain(old) and is_plain(new) and repr(old) == repr(new)):
                    changes[style(place, key)] = old, new
        return changes

    def used_generator(self) -> str:
        """The package of a generator of random numbers that has drawn since; empty if none has."""
        used = (g for g, state in self._generators if pickle.dumps(_generator_state(g)) != pickle.dumps(state))
        return next((type(generator).__module__.partition(".")[0] for generator in used), "")

    def restore(self) -> None:
        for _, _, container, before in self._containers:
            now = _entries(container)
            if list(now) != list(before) or any(now[key] is not value for key, value in before.items()):
                _write(container, before)
        for generator, state in self._generators:
            if isinstance(generator, random.Random):
                generator.setstate(state)
            else:
                _bits(generator).state = state


def _containers(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, Callable[[str, Any], str], Any]]:
    """Each container with its place and how the place of an entry is written."""
    stack: list[tuple[str, Any, bool]] = [(name, root, False) for name, root in reversed(list(roots.items()))]
    seen = set[int]()
    while stack:
        place, value, is_of_module = stack.pop()
        container = vars(value) if isinstance(value, nn.Module) else value
        if id(value) in seen or len(container) > _MAX_LENGTH:
            continue
        seen.add(id(value))
        style = attribute if is_of_module or isinstance(value, nn.Module) else _item
        if not isinstance(value, tuple):
            yield place, style, container
        for key, entry in reversed(_entries(container).items()):
            if isinstance(entry, _WALKED):
                stack.append((style(place, key), entry, isinstance(value, nn.Module) and key in _HIDDEN))


def _item(place: str, key: Any) -> str:
    return f"{place}[{key!r}]"


def _entries(container: Any) -> dict[Any, Any]:
    if isinstance(container, dict):
        return dict(container)
    return dict.fromkeys(container) if isinstance(container, set) else dict(enumerate(container))


def _write(container: Any, entries: Mapping[Any, Any]) -> None:
    container.clear()
    if isinstance(container, dict | set):
        container.update(entries)
    else:
        container.extend(entries.values())


def _global_generators() -> list[Any]:
    numpy = sys.modules.get("numpy.random.mtrand")
    return [random._inst, *([numpy._rand] if numpy is not None else [])]  # type: ignore[attr-defined]


def _is_generator(value: Any) -> bool:
    return isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random")


def _bits(generator: Any) -> Any:
    return generator.bit_generator if hasattr(generator, "bit_generator") else generator._bit_generator


def _generator_state(generator: Any) -> Any:
    return generator.getstate() if isinstance(generator, random.Random) else _bits(generator).state
