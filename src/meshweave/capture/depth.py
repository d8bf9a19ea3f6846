"""Models of many equal layers: the list that has them, and the same model with fewer.

Layers are equal if their modules, parameters and attributes are, except for their own number. What forward does with a
layer may depend on the layer, not on its number or on how many there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_MOST_PERIOD = 8  # layers after which a pattern repeats: 6 in Gemma 3, 4 in Llama 4, 8 in Jamba
# Of every module: its children, parameters and buffers, which are compared one by one, and counts of its own.
_OF_TORCH = frozenset({"_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "_is_full_backward_hook"})


@dataclass(frozen=True, slots=True)
class EqualLayers:
    """The `count` layers of the list at `path` from `first` on, each equal to that `period` layers before it; `count`
    is a multiple of the period."""

    path: str
    first: int
    count: int
    period: int = 1

    @property
    def num_periods(self) -> int:
        return self.count // self.period

    def name_of_all(self, name: str) -> str:
        """A name of a module or parameter that is the same for equal ones of all equal layers."""
        number, rest = _number_in(name, self.path)
        is_equal = self.first <= number < self.first + self.count
        return _entry(self.path, f"*{(number - self.first) % self.period}", rest) if is_equal else name


@dataclass(frozen=True, slots=True)
class Omitted:
    """Equal layers that a shorter model lacks: `count` of the list at `path`, before entry `before` of the shorter
    list, which is the first of its last period of equal layers; `first` is the first equal layer of all."""

    path: str
    first: int
    before: int
    count: int
    period: int = 1

    def place_of(self, module: str) -> str | None:
        """The name of a module with its layer counted from the nearer end: the same whatever is missing. None for one
        between the first and the last period of equal layers."""
        number, rest = _number_in(module, self.path)
        if number < self.first + self.period:
            return module
        return _entry(self.path, f"-{number - self.before}", rest) if number >= self.before else None

    def has(self, module: str) -> bool:
        """Whether a module is in an entry of the list."""
        return _number_in(module, self.path)[0] >= 0


@dataclass(frozen=True, slots=True)
class ShorterModel:
    """A model with the parameters of another, but for those of `omitted` layers. `twins`: of every module and parameter
    of the whole model the name of the equal one here; `names`: of those that are here, theirs."""

    model: nn.Module
    omitted: Omitted
    twins: Mapping[str, str]
    names: Mapping[str, str]


def find_equal_layers(model: nn.Module) -> EqualLayers | None:
    """The most equal layers that a list of the model has, one after the other, of which none shares a parameter with
    another module. None if a forward was replaced, or no list has two."""
    modules = list(model.named_modules())
    if any("forward" in vars(module) for _, module in modules):
        return None
    runs = [layers for path, module in modules if _is_list(module) for layers in _runs(path, list(module.children()))]
    best = max(runs, key=lambda each: (each.count, -each.period), default=None)
    return best if best is not None and _is_alone(model, best) else None


def shortened(model: nn.Module, layers: EqualLayers, count: int) -> ShorterModel:
    """The model with `count` of the equal layers, at least two periods: all but those before the last period. It shares
    parameters, buffers and other modules with the model."""
    items = list(model.get_submodule(layers.path).children())
    missing = layers.count - count
    at = layers.first + count - layers.period  # of the first that is missing; then of the last period
    shorter = _with_list(model, layers.path.split(".") if layers.path else (), [*items[:at], *items[at + missing :]])
    names, twins = dict[str, str](), dict[str, str]()
    for name in _names(model):
        number, rest = _number_in(name, layers.path)
        is_missing = at <= number < at + missing
        twin = at - layers.period + (number - at) % layers.period if is_missing else number - missing
        twins[name] = name if number < at else _entry(layers.path, twin, rest)
        if not is_missing:
            names[name] = twins[name]
    return ShorterModel(shorter, Omitted(layers.path, layers.first, at, missing, layers.period), twins, names)


def _names(model: nn.Module) -> Iterator[str]:
    """The names of all modules and parameters."""
    yield from (name for name, _ in model.named_modules(remove_duplicate=False))
    yield from (name for name, _ in model.named_parameters(remove_duplicate=False))


def _number_in(name: str, path: str) -> tuple[int, str]:
    """The number of the entry of the list at `path` that has this name, -1 if none has, and the name inside it."""
    prefix = f"{path}." if path else ""
    if not name.startswith(prefix):
        return -1, ""
    number, dot, rest = name.removeprefix(prefix).partition(".")
    return (int(number), dot + rest) if number.isdecimal() else (-1, "")


def _entry(path: str, number: int | str, rest: str) -> str:
    """The name of what is in an entry of the list at `path`."""
    return f"{path}.{number}{rest}" if path else f"{number}{rest}"


def _is_list(module: nn.Module) -> bool:
    """Whether a module is a list of modules, numbered from 0."""
    numbers = [*vars(module)["_modules"]]
    return isinstance(module, nn.ModuleList | nn.Sequential) and numbers == [str(i) for i in range(len(numbers))]


def _with_list(module: nn.Module, path: Sequence[str], items: Iterable[nn.Module]) -> nn.Module:
    """A copy of a module, in which the list at `path` has these items; what is not on the way there is shared."""
    own = copy(module)
    children = dict(vars(module)["_modules"])
    if path:
        children[path[0]] = _with_list(children[path[0]], path[1:], items)
    else:
        children = {str(i): item for i, item in enumerate(items)}
    vars(own)["_modules"] = children
    return own


def _runs(path: str, items: Sequence[nn.Module]) -> Iterator[EqualLayers]:
    """Equal layers in a list, the longest of each period."""
    for period in range(1, min(_MOST_PERIOD, len(items) // 2) + 1):
        equal = [_is_equal(items[i], items[i + period], (i, i + period)) for i in range(len(items) - period)]
        first, length = _longest_run(equal)
        if length:
            count = (length + period) // period * period
            yield EqualLayers(path, first, count, period)
            if count == len(items):
                return


def _longest_run(values: Sequence[bool]) -> tuple[int, int]:
    """Begin and length of the longest run of True, the last of several."""
    best, length = (0, 0), 0
    for i, value in enumerate(values):
        length = length + 1 if value else 0
        best = max(best, (i + 1 - length, length), key=lambda run: (run[1], run[0]))
    return best


def _is_alone(model: nn.Module, layers: EqualLayers) -> bool:
    """Whether no parameter or buffer of the layers is one of another module, too."""
    owners: dict[int, set[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            number, _ = _number_in(name, layers.path)
            is_inside = layers.first <= number < layers.first + layers.count
            owners.setdefault(id(tensor), set()).add(f"{number}" if is_inside else "")
    return all(len(each) == 1 for each in owners.values())


def _is_equal(first: Any, second: Any, numbers: tuple[int, int]) -> bool:
    """Whether two modules, or what they have as attributes, are equal but for these numbers of their layers."""
    if first is second:
        return True
    if isinstance(first, int) and not isinstance(first, bool) and (first, second) == numbers:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, nn.Module):
        return _has_equal_state(first, second, numbers)
    if isinstance(first, Tensor):
        of_both = ((x.shape, x.dtype, x.requires_grad, x.device) for x in (first, second))
        return len({*of_both}) == 1
    if isinstance(first, Mapping):
        return [*first] == [*second] and all(_is_equal(first[key], second[key], numbers) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_is_equal, first, second, [numbers] * len(first)))
    if isinstance(first, partial):
        return _is_equal((first.func, first.args, first.keywords), (second.func, second.args, second.keywords), numbers)
    return isinstance(first, _PLAIN) and bool(first == second)


_PLAIN = (bool, int, float, complex, str, bytes, set, frozenset, slice, torch.dtype, torch.device, torch.Size)


def _has_equal_state(first: nn.Module, second: nn.Module, numbers: tuple[int, int]) -> bool:
    """Whether two modules of one class have equal parameters, buffers, children and attributes."""
    own, other = vars(first), vars(second)
    tables = ("_parameters", "_buffers", "_modules")
    attributes = (own.keys() | other.keys()) - _OF_TORCH
    return all(_is_equal(own[table], other[table], numbers) for table in tables) and all(
        name in own and name in other and _is_equal(own[name], other[name], numbers) for name in attributes
    )
