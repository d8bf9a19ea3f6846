"""The update of a parameter as a graph of values, with all variants of a step merged.

Values are hash-consed, so that a value common to two variants is a single value. Where they differ, a `where` chooses,
pushed down as far as possible, so that of two ways to compute a number only the number is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshweave.ir.graph import Spec, Specs
from meshweave.ir.traits import is_pointwise

aten = torch.ops.aten


Key = tuple[str, str]  # ("param", ""), ("grad", "") or ("state", slot)


@dataclass(frozen=True, slots=True, eq=False)
class UpdateValue:
    """A value: an op on others, or an input if `target` is None and `args` is its key (of a number, its index)."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    spec: Specs
    uses: tuple[UpdateValue, ...]


Outputs = dict[Key, UpdateValue]
RunOp = Callable[[UpdateValue, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(slots=True)
class Values:
    """Creates values, each once."""

    known: dict[Any, UpdateValue] = field(default_factory=dict)
    _merged: dict[Any, UpdateValue] = field(default_factory=dict)

    def input(self, key: Any, spec: Specs) -> UpdateValue:
        return self.known.setdefault(("input", key, spec), UpdateValue(None, (key,), (), spec, ()))

    def op(self, target: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], spec: Specs) -> UpdateValue:
        uses: list[UpdateValue] = []

        def described(x: Any) -> Any:
            if isinstance(x, UpdateValue):
                uses.append(x)
                return ("value", id(x))
            if isinstance(x, (list, tuple)):
                return tuple(described(y) for y in x)
            return (type(x).__name__, repr(x))

        key = (target, described(args), described([v for _, v in kwargs]), tuple(k for k, _ in kwargs), spec)
        if key not in self.known:
            self.known[key] = UpdateValue(target, args, kwargs, spec, tuple(uses))
        return self.known[key]

    def replaced(self, outputs: Outputs, inputs: Mapping[UpdateValue, UpdateValue]) -> Outputs:
        """The outputs with other values in place of inputs."""
        env = dict(inputs)
        for value in ordered(outputs.values()):
            if value not in env:
                uses = [env[u] for u in value.uses]
                is_same = all(a is b for a, b in zip(uses, value.uses, strict=True))
                env[value] = value if is_same else self.op(value.target, *_with_uses(value, uses), value.spec)
        return {key: env[value] for key, value in outputs.items()}

    def merge(self, condition: UpdateValue, yes: UpdateValue, no: UpdateValue) -> UpdateValue:
        """`where(condition, yes, no)`, pushed down."""
        if yes is no:
            return yes
        key = (id(condition), id(yes), id(no))
        if key not in self._merged:
            self._merged[key] = self._choose(condition, yes, no)
        return self._merged[key]

    def _choose(self, condition: UpdateValue, yes: UpdateValue, no: UpdateValue) -> UpdateValue:
        if _same_op(yes, no):
            differing = [i for i, (a, b) in enumerate(zip(yes.uses, no.uses, strict=True)) if a is not b]
            large = [i for i in differing if not _may_merge(yes.uses[i], no.uses[i])]
            if len(large) <= 1 and all(yes.uses[i].spec == no.uses[i].spec for i in differing):
                merged = [self.merge(condition, a, b) for a, b in zip(yes.uses, no.uses, strict=True)]
                return self.op(yes.target, *_with_uses(yes, merged), yes.spec)
        return self.op(aten.where.self, (condition, yes, no), (), yes.spec)


def _may_merge(a: UpdateValue, b: UpdateValue) -> bool:
    """Whether a choice between two values is cheap."""
    return all(isinstance(x.spec, Spec) and not x.spec.shape for x in (a, b))


def _same_op(a: UpdateValue, b: UpdateValue) -> bool:
    if a.target is None or a.target is not b.target or a.spec != b.spec or not is_pointwise(a.target):
        return False
    blank = lambda v: str(_with_uses(v, [None] * len(v.uses)))  # noqa: E731
    return blank(a) == blank(b)


def _with_uses(value: UpdateValue, uses: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """The arguments of a value with substituted values."""
    left = iter(uses)

    def replaced(x: Any) -> Any:
        if isinstance(x, UpdateValue):
            return next(left)
        return type(x)(replaced(y) for y in x) if isinstance(x, (list, tuple)) else x

    return replaced(value.args), tuple((k, replaced(v)) for k, v in value.kwargs)


def ordered(outputs: Iterable[UpdateValue]) -> list[UpdateValue]:
    """All values that the outputs need, in topological order."""
    done: dict[UpdateValue, None] = {}
    stack = [(v, False) for v in reversed(list(outputs))]
    while stack:
        value, is_ready = stack.pop()
        if value in done:
            continue
        if is_ready:
            done[value] = None
            continue
        stack.append((value, True))
        stack += [(u, False) for u in reversed(value.uses)]
    return list(done)


def run_op(value: UpdateValue, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op of a value on tensors."""
    return value.target(*args, **kwargs)


def evaluate(outputs: Mapping[Key, UpdateValue], inputs: Callable[[Any], Any], call: RunOp = run_op) -> dict[Key, Any]:
    """The outputs of a graph. `inputs(key)` returns the value of an input, `call` the result of an op."""
    env: dict[UpdateValue, Any] = {}
    for value in ordered(outputs.values()):
        if value.target is None:
            env[value] = inputs(value.args[0])
        else:
            args, kwargs = _with_uses(value, [env[u] for u in value.uses])
            env[value] = call(value, args, dict(kwargs))
    return {key: env[value] for key, value in outputs.items()}
