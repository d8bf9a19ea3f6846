"""Values of an optimizer that belong to no parameter and that its own `step()` changes: a step count in a group
(`group["k"] += 1`) or in an attribute, a rate that decays.

`step()` runs on stand-ins several times for each step of training. So every run begins with the values of the user's
optimizer, and only a step that was taken writes to them.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from meshweave.capture.optimizer_attributes import attributes_of, own_containers
from meshweave.capture.optimizer_several import name_of
from meshweave.capture.rest import Form, TensorVersion, difference, form_of
from meshweave.capture.variables import ATOMS
from meshweave.errors import CaptureError

# ("group", index of the group, option) or ("attribute", index of the optimizer, name)
Place = tuple[str, int, str]
Mark = str | Form  # what a value is compared by: the text of numbers and texts, else its contents
_HINT = 'keep Python numbers in param_groups (group["k"] += 1) or in attributes, and tensors in optimizer.state[param]'


class SharedValues:
    """The options of groups and the attributes of `copies`, which stand for the optimizers `sources`.

    `groups`: the groups of all copies, in order; `memo` maps parameters to their stand-ins for copies of attributes.
    """

    def __init__(
        self,
        sources: Sequence[torch.optim.Optimizer],
        copies: Sequence[torch.optim.Optimizer],
        groups: Sequence[dict[str, Any]],
        memo: Mapping[int, Any],
    ) -> None:
        self._sources, self._copies, self._groups, self._memo = sources, copies, groups, memo
        self._own = {i for own in copies for i in own_containers(own)}.union(map(id, groups))
        self._outside = _names_outside(sources)
        self._is_watched = any(map(own_classes, sources))
        self._stand_ins = {id(stand_in) for stand_in in memo.values()}
        self.note()

    def note(self) -> None:
        """The present values are those of the user's optimizer."""
        self._before = self._marks(range(len(self._groups)))
        self._before_outside = self._marks_outside()

    def _marks(self, groups: Iterable[int]) -> dict[Place, Mark]:
        if not self._is_watched:
            return {}
        values = {("group", i, k): v for i in groups for k, v in self._groups[i].items() if k != "params"}
        values |= {("attribute", j, k): v for j, own in enumerate(self._copies) for k, v in attributes_of(own).items()}
        for place in (place for place, value in values.items() if isinstance(value, Iterator)):
            raise self._error(f"may advance {_text(place)}, an iterator", type(values[place]).__name__)
        return {place: self._mark(value) for place, value in values.items()}

    def _mark(self, value: Any) -> Mark:
        if _is_plain(value):
            return repr(value)
        # the values of parameters are not the container's
        return tuple(
            (at, "" if isinstance(x, TensorVersion) and id(x.tensor) in self._stand_ins else x)
            for at, x in form_of(value, skip=self._own)
        )

    def _marks_outside(self) -> dict[str, str]:
        values = [(text, space[name]) for text, space, name in self._outside if name in space]
        return {text: repr(value) for text, value in values if _is_plain(value)}

    def begin(self, values: Mapping[Place, Any]) -> None:
        """Use other values than the user's optimizer has, in the next run."""
        for place, value in values.items():
            self._container(place)[place[2]] = copy.deepcopy(value)

    def taken(self, groups: Iterable[int]) -> dict[Place, Any]:
        """The values that a run of some groups changed. The copies have those of the user's optimizer again.

        Raises CaptureError for other values than numbers, texts and containers of them, class attributes and globals.
        """
        changed: dict[Place, Any] = {}
        for place, mark in self._marks(groups).items():
            if _is_same(self._before.get(place), mark):
                continue
            value = self._container(place)[place[2]]
            if not _is_plain(value):
                raise self._error(f"changes {_text(place)} to a value that is no number", f"a {type(value).__name__}")
            changed[place] = value
            self._restore(place)
        for name, mark in self._marks_outside().items():
            if mark != self._before_outside.get(name):
                raise self._error(f"changes {name}, which is not the optimizer's own", mark)
        return changed

    def commit(self, values: Mapping[Place, Any]) -> None:
        """Write the values after a step to the user's optimizer."""
        for place, value in values.items():
            self._container_of_user(place)[place[2]] = copy.deepcopy(value)

    def _container_of_user(self, place: Place) -> dict[str, Any]:
        if place[0] == "attribute":
            return vars(self._sources[place[1]])
        return [group for source in self._sources for group in source.param_groups][place[1]]  # type: ignore[no-any-return]

    def _container(self, place: Place) -> dict[str, Any]:
        return self._groups[place[1]] if place[0] == "group" else vars(self._copies[place[1]])

    def _restore(self, place: Place) -> None:
        name, source = place[2], self._container_of_user(place)
        if name in source:
            self._container(place)[name] = copy.deepcopy(source[name], dict(self._memo))
        else:
            self._container(place).pop(name, None)

    def _error(self, what: str, got: str) -> CaptureError:
        where = " and ".join(name_of(source) for source in self._sources)
        return CaptureError(f"the optimizer's step() {what}", where=where, got=got, hint=_HINT)


def own_classes(optimizer: torch.optim.Optimizer) -> list[type]:
    """The classes of an optimizer that are not torch's: torch's change no number of a group or attribute, and do not
    tell parameters apart by them."""
    return [c for c in type(optimizer).__mro__ if c.__module__.partition(".")[0] not in ("torch", "builtins")]


def merged(changes: Iterable[Mapping[Place, Any]], name: str) -> dict[Place, Any]:
    """The values after a step of all parameters. Raises CaptureError if they depend on the parameters of a run."""
    result: dict[Place, Any] = {}
    for place, value in (entry for each in changes for entry in each.items()):
        if repr(result.setdefault(place, value)) != repr(value):
            raise CaptureError(
                f"the optimizer's step() changes {_text(place)} by a number that depends on its parameters",
                where=name,
                got=f"{result[place]!r} and {value!r}",
                expected="the same value, whichever parameters have a gradient",
                hint="count once per step or per group, not once per parameter; a count for each: state[param]",
            )
    return result


def _names_outside(optimizers: Iterable[torch.optim.Optimizer]) -> list[tuple[str, Mapping[str, Any], str]]:
    """Class attributes, and globals that methods name, of users' own classes: as text, where they are, and the name."""
    classes = {c for optimizer in optimizers for c in own_classes(optimizer)}
    names = [
        (f"the class attribute {c.__qualname__}.{k}", vars(c), k) for c in classes for k in vars(c) if k[:2] != "__"
    ]
    methods = [inspect.unwrap(v) for c in classes for v in vars(c).values() if inspect.isfunction(v)]
    return names + [(f"the global {k}", m.__globals__, k) for m in methods for k in m.__code__.co_names]


def _is_same(before: Mark | None, now: Mark) -> bool:
    if isinstance(before, tuple) and isinstance(now, tuple):
        return difference(before, now) is None
    return before == now


def _is_plain(value: Any) -> bool:
    """Whether a value consists of numbers and texts."""
    if type(value) in (list, tuple, deque):
        return all(_is_plain(item) for item in value)
    if type(value) in (dict, OrderedDict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return type(value) in ATOMS


def _text(place: Place) -> str:
    kind, index, name = place
    return f"param_groups[{index}]['{name}']" if kind == "group" else f"its attribute '{name}'"
