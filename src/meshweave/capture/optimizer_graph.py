"""The update of a parameter as a graph of values: records in functional form, with all variants of a step merged.

Values are hash-consed, so that a value common to two records is a single value. Where they differ, a `where` chooses,
pushed down as far as possible, so that of two ways to compute a number only the number is chosen.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from meshweave.capture.optimizer_arithmetic import SUMS, base_of, in_place, scaled
from meshweave.capture.optimizer_tracer import Key, Num, NumRef, OptimizerCall, OptimizerRecord, Ref
from meshweave.capture.tracer import GraphTracer
from meshweave.interop import pytree
from meshweave.interop.fake import FakeTensorMode
from meshweave.ir.graph import Spec, Specs, map_nodes, returned_values
from meshweave.ir.traits import IDENTITIES, is_pointwise

aten = torch.ops.aten


# Where a number comes from: pairs of a variant of the update, and the index among the numbers of its record. Several,
# if it is the number of the current step's variant; the index -1 stands for 1 in the variant and 0 in others.
NumberSource = frozenset[tuple[int, int]]


@dataclass(frozen=True, slots=True, eq=False)
class UpdateValue:
    """A value: an op on others, or an input if `target` is None and `args` is its key or its `NumberSource`."""

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

    def input(self, key: Any, spec: Spec) -> UpdateValue:
        return self.known.setdefault(("input", key), UpdateValue(None, (key,), (), spec, ()))

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

    def merge(self, condition: UpdateValue, yes: UpdateValue, no: UpdateValue) -> UpdateValue:
        """`where(condition, yes, no)`, pushed down. Two numbers are a single input: that of the current variant."""
        if yes is no:
            return yes
        key = (id(condition), id(yes), id(no))
        if key not in self._merged:
            self._merged[key] = self._choose(condition, yes, no)
        return self._merged[key]

    def _choose(self, condition: UpdateValue, yes: UpdateValue, no: UpdateValue) -> UpdateValue:
        if _is_number(yes) and _is_number(no):
            return self.input(yes.args[0] | no.args[0], Spec((), torch.float64))
        if _same_op(yes, no):
            differing = [i for i, (a, b) in enumerate(zip(yes.uses, no.uses, strict=True)) if a is not b]
            large = [i for i in differing if not _may_merge(yes.uses[i], no.uses[i])]
            if len(large) <= 1 and all(yes.uses[i].spec == no.uses[i].spec for i in differing):
                merged = [self.merge(condition, a, b) for a, b in zip(yes.uses, no.uses, strict=True)]
                return self.op(yes.target, *_with_uses(yes, merged), yes.spec)
        return self.op(aten.where.self, (condition, yes, no), (), yes.spec)


def _is_number(value: UpdateValue) -> bool:
    return value.target is None and isinstance(value.args[0], frozenset)


def _may_merge(a: UpdateValue, b: UpdateValue) -> bool:
    """Whether a choice between two values is cheap."""
    both_numbers = _is_number(a) and _is_number(b)
    return both_numbers or all(isinstance(x.spec, Spec) and not x.spec.shape for x in (a, b))


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


def values_of(
    values: Values, record: OptimizerRecord, specs: Mapping[Key, Spec], number: Callable[[int], UpdateValue]
) -> Outputs:
    """The outputs of a record. `number` has the input for each of its numbers."""
    keys = [*record.inputs]
    mode = FakeTensorMode()
    with mode:
        fakes = [torch.empty(specs[k].shape, dtype=specs[k].dtype) for k in keys]
        fakes += [torch.empty((), dtype=torch.float64) for _ in record.numbers]
    names: list[Key] = []

    def run(*flat: Tensor) -> list[Tensor]:
        results = replay(record, dict(zip(keys, flat, strict=False)), flat[len(keys) :])
        names[:] = list(results)
        return list(results.values())

    with mode:
        graph = GraphTracer.trace(lambda _, *flat: torch.func.functionalize(run)(*flat), fakes).graph
    inputs = [values.input(k, specs[k]) for k in keys] + [number(i) for i in range(len(record.numbers))]
    return dict(zip(names, _import(values, graph, inputs), strict=True))


def replay(record: OptimizerRecord, inputs: Mapping[Key, Tensor], numbers: Sequence[Tensor]) -> dict[Key, Tensor]:
    """Runs the record on other tensors and numbers, which are not modified."""
    env = {index: inputs[key].clone() for key, index in record.inputs.items()}

    def value(x: Any) -> Any:
        if isinstance(x, Ref):
            return env[x.index]
        if isinstance(x, Num):
            return numbers[x.index]
        return [value(y) for y in x] if isinstance(x, tuple) else x

    for call in record.calls:
        out = _called(call, [value(x) for x in call.args], {k: value(x) for k, x in call.kwargs})
        tensors = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        env |= {ref.index: x for ref, x in zip(call.results, tensors, strict=True)}
    return {key: env[index] for key, index in record.outputs.items()}


def _called(call: OptimizerCall, args: list[Any], kwargs: dict[str, Any]) -> Any:
    has_number = any(isinstance(x, (Num, NumRef)) for x in pytree.tree_leaves((call.args, [v for _, v in call.kwargs])))
    if not has_number and base_of(call.func) not in SUMS:
        return call.func(*args, **kwargs)
    into = kwargs.pop("out") if "out" in kwargs else args[0] if in_place(call.func) else None
    return scaled(base_of(call.func), args, kwargs, into, call.dtypes[0])


def _import(values: Values, graph: fx.Graph, inputs: Sequence[UpdateValue]) -> list[UpdateValue]:
    env: dict[fx.Node, Any] = {}
    left = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(left)
        elif node.op == "call_function":
            args, kwargs = map_nodes(node, lambda n: env[n])
            if node.target in IDENTITIES:
                env[node] = args[0]
            elif node.target is operator.getitem and isinstance(args[0], (list, tuple)):
                env[node] = args[0][args[1]]
            else:
                options = tuple((k, v) for k, v in kwargs.items() if k not in ("device", "pin_memory", "memory_format"))
                env[node] = values.op(node.target, tuple(args), options, node.meta["spec"])
    return [env[n] for n in returned_values(graph)]


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
