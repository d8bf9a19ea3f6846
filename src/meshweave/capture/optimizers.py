"""The update, from the table of updates: a graph for each parameter, and the numbers of each step.

`read_optimizer` looks up the row of the optimizer's class (`updates.py`) and traces its function. What Python computes
with options and step counts is not in the graph: `StepNumbers` computes it before every update, and the results are
inputs of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from meshweave.capture.optimizer_groups import (
    check_callable,
    check_hooks,
    check_param,
    name_of,
    names_by_id,
    numbers_in,
    parts_of,
)
from meshweave.capture.trace import fake_like, trace
from meshweave.capture.tracer import Traced
from meshweave.capture.updates import UpdateRule, update_of
from meshweave.errors import CaptureError, OutdatedUpdate
from meshweave.interop.fake import FakeTensorMode
from meshweave.ir.graph import Spec, Specs, map_nodes, returned_values, wide_dtype

_AGAIN = "step.save(path), compile again with it, step.load(path)"
State = Mapping[str, Tensor]
Switches = tuple[tuple[str, Any], ...]
RunOp = Callable[[Any, tuple[Any, ...], dict[str, Any], Specs], Any]


@dataclass(frozen=True, slots=True)
class ParameterState:
    """State of a parameter between steps: the slots that have tensors, and the optimizer's own numbers (counts)."""

    tensors: frozenset[str] = frozenset()
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """What distinguishes the states of two parameters of a group."""
        numbers = {k: v.item() if isinstance(v, Tensor) else v for k, v in self.numbers.items()}
        return f"{sorted(self.tensors)} {sorted(numbers.items())}"

    @property
    def values(self) -> dict[str, Any]:
        """The state as the function of a row takes it."""
        return {**dict.fromkeys(self.tensors, True), **self.numbers}


@dataclass(frozen=True, slots=True)
class UpdateKind:
    """What the optimizer does to parameters of a group that have the same slots and have taken the same steps.

    `switches` and `numbers`: what a step takes (`register_update`); `kept`: the numbers that a first step leaves.
    """

    group: int
    rule: UpdateRule
    switches: Switches
    numbers: tuple[str, ...]
    kept: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """What an optimizer does to each parameter. `kind_of` maps a parameter's name to its index in `kinds`, `slots` to
    the tensors of its state."""

    name: str
    kinds: tuple[UpdateKind, ...]
    kind_of: Mapping[str, int] = field(hash=False)
    params: Mapping[str, Spec] = field(hash=False)
    slots: Mapping[str, Mapping[str, Spec]] = field(hash=False)

    def renamed(self, names: Mapping[str, str]) -> OptimizerSpec:
        """What it does to the parameters with these names, by other names."""
        kept = [name for name in self.kind_of if name in names]
        tables = ({names[n]: table[n] for n in kept} for table in (self.kind_of, self.params, self.slots))
        kind_of, params, slots = tables
        return replace(self, kind_of=kind_of, params=params, slots=slots)  # type: ignore[arg-type]

    def numbers(self) -> list[str]:
        """Names of the numbers that a step takes: kind of update, and name of the number."""
        return [f"update{k}.{number}" for k, kind in enumerate(self.kinds) for number in kind.numbers]

    def update(
        self,
        name: str,
        param: Any,
        grad: Any,
        state: Mapping[str, Any],
        numbers: Mapping[str, Any],
        call: RunOp = lambda target, args, kwargs, spec: target(*args, **kwargs),
    ) -> tuple[Any, dict[str, Any]]:
        """A step: the new parameter and its new state. Nothing is written in place.

        Values are tensors, or whatever `call` returns for ops. `numbers` are 0-dim float64, by the names of
        `numbers()`.
        """
        index, slots = self.kind_of[name], self.slots[name]
        kind = self.kinds[index]
        traced = _traced(kind.rule, kind.switches, kind.numbers, self.params[name], tuple(slots.items()))
        inputs = [param, grad, *(state[slot] for slot in slots), *(numbers[f"update{index}.{n}"] for n in kind.numbers)]
        new, *rest = _evaluated(traced.graph, inputs, call)
        return new, dict(zip(slots, rest, strict=True))


def _evaluated(graph: fx.Graph, inputs: Sequence[Any], call: RunOp) -> list[Any]:
    """The results of a graph."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    env = dict(zip(placeholders, inputs, strict=True))
    for node in graph.nodes:
        if node.op == "call_function":
            env[node] = call(node.target, *map_nodes(node, env.__getitem__), node.meta["spec"])
    return [env[node] for node in returned_values(graph)]


@lru_cache(maxsize=1 << 10)
def _traced(
    rule: UpdateRule, switches: Switches, names: tuple[str, ...], param: Spec, slots: tuple[tuple[str, Spec], ...]
) -> Traced:
    """The graph of a row: (param, grad, *state, *numbers) -> (param, *state). CaptureError for a function that fails,
    that uses tensors of its own, or whose results are of another form."""
    where = f"{rule.function.__module__}.{rule.function.__qualname__}, for a parameter {param}"

    def function(_: Any, *flat: Tensor) -> list[Tensor]:
        own, rest = flat[: 2 + len(slots)], flat[2 + len(slots) :]
        wide, grad, *state = map(_widened, own)
        numbers = {"dtype": param.dtype, **dict(switches)}
        # of two tensors without dims the wider dtype would win
        numbers |= zip(names, rest if wide.dim() else [x.to(wide.dtype) for x in rest], strict=True)
        with torch.no_grad():
            new, after = rule.function(wide, grad, dict(zip((slot for slot, _ in slots), state, strict=True)), numbers)
        got = {"the parameter": new.shape, **{slot: x.shape for slot, x in after.items()}}
        expected = {"the parameter": wide.shape, **{s: x.shape for (s, _), x in zip(slots, state, strict=True)}}
        if got != expected:
            raise CaptureError("an update returns other tensors", where=where, got=str(got), expected=str(expected))
        results = [new, *(after[slot] for slot, _ in slots)]
        return [_narrowed(x, like.dtype) for x, like in zip(results, (own[0], *own[2:]), strict=True)]

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    specs = [param, param, *(spec for _, spec in slots), *[Spec((), torch.float64)] * len(names)]
    traced = trace(function, [fake_like(mode, torch.empty(s.shape, dtype=s.dtype, device="meta")) for s in specs])
    if traced.constants:
        raise CaptureError("an update uses a tensor of its own", where=where, expected="a number, or a slot of state")
    return traced


def _widened(x: Tensor) -> Tensor:
    """A tensor as a row takes it: real, of at least 32 bits."""
    return torch.view_as_real(x) if x.is_complex() else x.to(wide_dtype(x.dtype))


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_complex(x.contiguous()) if dtype.is_complex else x.to(dtype)


def _slots_of(rule: UpdateRule, options: Mapping[str, Any], param: Spec) -> dict[str, tuple[Spec, complex]]:
    """The tensors of a parameter's state, and the value with which each begins."""
    slots: dict[str, tuple[Spec, complex]] = {}
    for slot, first in rule.state(options, param.shape).items():
        fill, shape = first if isinstance(first, tuple) else (first, param.shape)
        slots[slot] = Spec(shape, param.dtype), complex(fill, fill) if param.dtype.is_complex else fill
    return slots


def _split(values: Mapping[str, Any]) -> tuple[Switches, dict[str, float]]:
    """The switches and the numbers of a step."""
    numbers = {name: x for name, x in values.items() if isinstance(x, float)}
    return tuple((name, x) for name, x in values.items() if name not in numbers), numbers


def read_optimizer(optimizer: Optimizer, names: nn.Module | Mapping[int, str]) -> OptimizerSpec:
    """Read `optimizer`. `names` is the model, or a map from id(parameter) to its name.

    Raises PlanError for an optimizer whose step needs a closure, hooks, and parameters that the
    model lacks; CaptureError for an optimizer without a row in the table of updates.
    """
    check_callable(optimizer)
    check_hooks(optimizer)
    named = names_by_id(names)
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            check_param(p, named, optimizer, index)
    kinds: dict[Any, UpdateKind] = {}
    kind_of, params, slots = dict[str, int](), dict[str, Spec](), dict[str, Mapping[str, Spec]]()
    for index, (group, rule) in enumerate(zip(optimizer.param_groups, _rules(optimizer), strict=True)):
        options = numbers_in(group)
        for p in (p for p in group["params"] if p.requires_grad):
            name, spec = named[id(p)], Spec(tuple(p.shape), p.dtype)
            params[name] = spec
            slots[name] = {slot: own for slot, (own, _) in _slots_of(rule, options, spec).items()}
            start = kept_of(optimizer.state.get(p, {}), slots[name])
            key = index, start.shown, tuple(slots[name])
            if key not in kinds:
                switches, numbers = _split(rule.numbers(options, start.values)[0])
                kinds[key] = UpdateKind(index, rule, switches, tuple(numbers), rule.numbers(options, {})[1])
            kind_of[name] = [*kinds].index(key)
    maps = MappingProxyType(kind_of), MappingProxyType(params), MappingProxyType(slots)
    return OptimizerSpec(name_of(optimizer), tuple(kinds.values()), *maps)


def _rules(optimizer: Optimizer) -> list[UpdateRule]:
    """The row of each group. CaptureError for an optimizer without one."""
    rules: list[UpdateRule] = []
    for part in parts_of(optimizer):
        rule, cls = update_of(part), type(part).__name__
        if rule is None:
            raise CaptureError(
                "no update is registered for its class",
                where=f"mw.register_update({cls}, ...) gives it a compiled update",
                got=f"{type(part).__module__}.{cls}",
            )
        rules += [rule] * len(part.param_groups)
    return rules


def kept_of(state: Mapping[str, Any], slots: Container[str]) -> ParameterState:
    """A parameter's state in the optimizer, of which `slots` are tensors."""
    numbers = {
        slot: value.detach().cpu().clone() if isinstance(value, Tensor) else value
        for slot, value in state.items()
        if slot not in slots and value is not None and not (isinstance(value, Tensor) and value.numel() != 1)
    }
    return ParameterState(frozenset(s for s, value in state.items() if s in slots and value is not None), numbers)


def state_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, State]:
    """An optimizer's own state by parameter: the tensors that have a value per element, or several."""
    named = names_by_id(model)
    return {
        named[id(p)]: {slot: v for slot, v in kept.items() if isinstance(v, Tensor) and _is_of_elements(slot, v, p)}
        for p, kept in optimizer.state.items()
        if id(p) in named and kept
    }


def _is_of_elements(slot: str, value: Tensor, param: Tensor) -> bool:
    """Whether a slot has a value per element of a parameter, rather than a single number."""
    return slot != "step" and (value.shape == param.shape or value.numel() != 1)


class StepNumbers:
    """The numbers of each step, and what the optimizer itself keeps between steps, for every parameter.

    `next()` computes them from the present options, once for all parameters that have the same numbers; `commit()`
    records that the step was taken. Parameters that a step does not update (the loss of its program does not use them)
    keep their values. `stepped` are those that have taken a step which left state.
    """

    def __init__(self, spec: OptimizerSpec, optimizer: Optimizer, names: nn.Module | Mapping[int, str]) -> None:
        named = names_by_id(names)
        self.spec, self._optimizer = spec, optimizer
        self._params = {named[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        self._members = [[name for name, k in spec.kind_of.items() if k == i] for i in range(len(spec.kinds))]
        self._kept: dict[str, ParameterState] = {}
        self._after: dict[str, ParameterState] = {}
        self.stepped: set[str] = set()
        self.read()

    def read(self) -> None:
        """Continue from the optimizer's present state. Parameters of the same kind with the same numbers share them
        from now on."""
        known: dict[Any, ParameterState] = {}
        self._after = {}
        for name, kind in self.spec.kind_of.items():
            own = kept_of(self._optimizer.state.get(self._params[name], {}), self.spec.slots[name])
            self._kept[name] = known.setdefault((kind, own.shown), own)
        self.stepped = {name for name, own in self._kept.items() if own.tensors or own.numbers}

    def next(self, updated: Collection[str] | None = None) -> tuple[dict[str, float], dict[tuple[str, str], complex]]:
        """The numbers of the next step, which updates the parameters `updated` (None: all), by name; and by slot and
        parameter the initial values of state in it.

        Raises OutdatedUpdate if the optimizer would do something else than what was captured: because of other options,
        or because parameters have since taken different numbers of steps where a single number was captured for them.
        """
        results: dict[str, float] = {}
        fills: dict[tuple[str, str], complex] = {}
        self._after = {}
        groups = [numbers_in(group) for group in self._optimizer.param_groups]
        for k, (kind, members) in enumerate(zip(self.spec.kinds, self._members, strict=True)):
            names = members if updated is None else [name for name in members if name in updated]
            before, options = self._kept_by_all(names or members[:1]), groups[kind.group]
            values, kept = kind.rule.numbers(options, before.values)
            switches, numbers = _split(values)
            if switches != kind.switches or tuple(numbers) != kind.numbers:
                raise self._changed(kind, dict(switches))
            results |= {f"update{k}.{number}": x for number, x in numbers.items()}
            slots = frozenset(self.spec.slots[members[0]])
            missing = slots - before.tensors
            for name in names if missing else ():
                first = _slots_of(kind.rule, options, self.spec.params[name])
                fills |= {(slot, name): first[slot][1] for slot in missing}
            self._after |= dict.fromkeys(names, ParameterState(slots, kept))
        return results, fills

    def _changed(self, kind: UpdateKind, now: Mapping[str, Any]) -> OutdatedUpdate:
        before = dict(kind.switches)
        other = next((name for name in {**before, **now} if before.get(name) != now.get(name)), "")
        return OutdatedUpdate(
            "the optimizer's options require another update than the compiled one",
            where=f"{self.spec.name}, param_groups[{kind.group}]",
            got=f"an option was switched on or off (0 and nonzero differ): '{other}', then {before.get(other)!r}",
            expected="the operations of the step that was compiled; numbers may change",
            hint=_AGAIN,
        )

    def _kept_by_all(self, names: Collection[str]) -> ParameterState:
        """What each of some parameters of the same kind keeps. OutdatedUpdate if they differ."""
        distinct = {id(self._kept[name]): name for name in names}
        shown = sorted({self._kept[name].shown for name in distinct.values()}) if len(distinct) > 1 else []
        if len(shown) > 1:
            raise OutdatedUpdate(
                "parameters have taken different numbers of steps since the step was compiled",
                where=f"state of the optimizer {self.spec.name}: {', '.join(sorted(distinct.values()))}",
                got=" and ".join(shown),
                expected="the same number of steps for all parameters of a group",
                hint=_AGAIN,
            )
        return self._kept[next(iter(names))]

    def commit(self) -> None:
        """Record that the step of the last `next()` was taken."""
        self._kept |= self._after
        self.stepped.update(name for name, after in self._after.items() if after.tensors or after.numbers)
        self._after = {}

    def kept(self, names: Collection[str]) -> dict[str, Mapping[str, Any]]:
        """What the optimizer keeps for some parameters beside their tensors, in its own form."""
        return {name: kept.numbers for name, kept in self._kept.items() if name in names}


def number_like(value: Any, like: Any) -> Any:
    """A number in the form in which an optimizer keeps it: a tensor, an integer or a float. A checkpoint of a step that
    ran the optimizer eagerly has the dtype beside the number."""
    if isinstance(value, list):
        dtype, value = value
        like = torch.zeros((), dtype=getattr(torch, dtype)) if like is None else like
    if isinstance(like, Tensor):
        return torch.tensor(value, dtype=like.dtype).reshape(like.shape)
    return type(like)(value) if isinstance(like, (int, float)) else value
