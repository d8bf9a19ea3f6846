"""The update, captured from the user's own optimizer: a graph for each kind of parameter, and the numbers of each step.

`read_optimizer` runs the optimizer's `step()` on stand-ins (`optimizer_stand_ins`) and makes a graph of what it does to
a parameter. Whatever it computes in Python is no part of the graph: `StepNumbers` runs `step()` on the stand-ins again
before every update, with the options as they are then, and the graph takes the numbers that it hands to ops as inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.optimizer_graph import (
    Number,
    Outputs,
    Source,
    Value,
    Values,
    evaluate,
    merged_paths,
    ordered,
    values_of,
)
from meshweave.capture.optimizer_record import Decision, Key, Num, Prepared, Record
from meshweave.capture.optimizer_stand_ins import Kept, StandIns, check_callable
from meshweave.errors import OutdatedUpdate, PlanError, StepError
from meshweave.interop import pytree
from meshweave.interop.hooks import optimizer_hooks
from meshweave.ir.graph import Spec

aten = torch.ops.aten

# Steps that are looked at ahead, so that what changes at the beginning is in the graph from the start: SGD makes its
# momentum in the first step, RAdam rectifies from the sixth on.
_AHEAD = 8
State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class UpdateKind:
    """What the optimizer does to some parameters of one group, shape and dtype.

    `slots`: their state tensors; `fills`: the numbers that these hold before the first step; `variants`: what a step
    may be, by its signature; `numbers`: what it takes as inputs; `kept`: the optimizer's own numbers as the first step
    leaves them.
    """

    group: int
    slots: Mapping[str, Spec]
    fills: Mapping[str, float]
    variants: tuple[tuple[Any, ...], ...]
    numbers: tuple[Number, ...]
    outputs: Outputs
    kept: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """What an optimizer does to each parameter. `kind_of` maps a parameter's name to its index in `kinds`."""

    name: str
    kinds: tuple[UpdateKind, ...]
    kind_of: Mapping[str, int] = field(hash=False)
    group_of: Mapping[str, int] = field(hash=False)

    def slots(self, name: str) -> Mapping[str, Spec]:
        """The state tensors of parameter `name`."""
        return self.kinds[self.kind_of[name]].slots

    def numbers(self) -> list[str]:
        """Names of the numbers that a step takes: kind of update, and place among its numbers."""
        return [f"update{k}.{i}" for k, kind in enumerate(self.kinds) for i in range(len(kind.numbers))]

    def members(self, kind: int) -> list[str]:
        return [name for name, k in self.kind_of.items() if k == kind]

    def update(
        self, name: str, param: Tensor, grad: Tensor, state: State, numbers: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One step: the new parameter and its new state. Nothing is written in place.

        `numbers` are 0-dim float64, by the names of `numbers()`.
        """
        index = self.kind_of[name]
        kind = self.kinds[index]
        places = {number: f"update{index}.{i}" for i, number in enumerate(kind.numbers)}
        tensors: dict[Key, Tensor] = {("param", 0, ""): param, ("grad", 0, ""): grad}
        tensors |= {("state", 0, slot): tensor for slot, tensor in state.items()}
        results = evaluate(kind.outputs, lambda key: tensors[key] if isinstance(key, tuple) else numbers[places[key]])
        return results["param", 0, ""], {key[2]: value for key, value in results.items() if key[0] == "state"}


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """State of an optimizer that has taken steps already: the number of the last step, and tensors by name and slot.

    An optimizer that does not count its steps has taken 1. A parameter that has taken no step has no entry.
    """

    num_steps: int
    tensors: Mapping[str, State]


def read_optimizer(optimizer: torch.optim.Optimizer, names: nn.Module | Mapping[int, str]) -> OptimizerSpec:
    """Read `optimizer`. `names` is the model, or a map from id(parameter) to its name.

    Raises PlanError for an optimizer whose step needs a closure, options that are not supported, hooks, complex
    parameters and parameters that the model does not have; CaptureError, with the line, for a step that cannot be
    traced.
    """
    check_callable(optimizer)
    check_hooks(optimizer)
    named = _names(names)
    for index, group in enumerate(optimizer.param_groups):
        check_options(optimizer, index, group)
        for p in group["params"]:
            _check_param(p, named, optimizer, index)
    stand_ins = StandIns(optimizer, named)
    stand_ins.take_options()
    stand_ins.check_apart()
    kinds: dict[Any, UpdateKind] = {}
    kind_of: dict[str, int] = {}
    kept = {named[id(p)]: state for p, state in optimizer.state.items() if id(p) in named}
    for name in stand_ins.trained():
        param, at = stand_ins.params[name], stand_ins.group_of[name]
        key = at, param.shape, param.dtype, repr(sorted(_scalars(kept.get(name, {})).items()))
        if key not in kinds:
            kinds[key] = _kind(stand_ins, name, kept.get(name, {}))
        kind_of[name] = [*kinds].index(key)
    group_of = {n: stand_ins.group_of[n] for n in kind_of}
    return OptimizerSpec(
        type(optimizer).__name__, tuple(kinds.values()), MappingProxyType(kind_of), MappingProxyType(group_of)
    )


def _scalars(state: Mapping[str, Any]) -> dict[str, Any]:
    """What of a parameter's state is one number."""
    return {
        slot: v.item() if isinstance(v, Tensor) else v
        for slot, v in state.items()
        if not isinstance(v, Tensor) or v.numel() == 1
    }


def _kind(stand_ins: StandIns, name: str, state: Mapping[str, Any]) -> UpdateKind:
    paths, kept = stand_ins.step(name, Kept())
    fresh, fills = kept, {key[2]: value for key, value in paths[0].fills.items()}
    variants: dict[tuple[Any, ...], list[Prepared]] = {}
    if state:
        kept = kept_of(state, fresh)
    else:
        variants[_signature(paths)] = paths
    for _ in range(_AHEAD - len(variants)):
        paths, kept = stand_ins.step(name, kept)
        variants.setdefault(_signature(paths), paths)
    param = stand_ins.params[name]
    shape = Spec(tuple(param.shape), param.dtype)
    specs: dict[Key, Spec] = {("param", 0, ""): shape, ("grad", 0, ""): shape}
    specs |= {("state", 0, slot): spec for slot, spec in kept.tensors.items()}
    outputs = _merged(Values(), list(variants.values()), specs)
    numbers = [v.args[0] for v in ordered(outputs.values()) if v.target is None and isinstance(v.args[0], frozenset)]
    return UpdateKind(
        stand_ins.group_of[name], dict(kept.tensors), fills, tuple(variants), tuple(numbers), outputs, fresh.numbers
    )


def _signature(paths: Iterable[Prepared]) -> tuple[Any, ...]:
    return tuple(path.signature for path in paths)


def _merged(values: Values, variants: list[list[Prepared]], specs: Mapping[Key, Spec]) -> Outputs:
    """The outputs of one update in all variants. A slot that a variant does not have yet is what it leaves there."""
    each = [
        merged_paths(
            values,
            {
                path.record.outcomes: values_of(values, path.record, specs, _numbers_of(values, v, path.record))
                for path in paths
            },
        )
        for v, paths in enumerate(variants)
    ]
    result = each[-1]
    for v, outputs in reversed(list(enumerate(each[:-1]))):
        number = values.input(frozenset({Source(v, (), -1)}), Spec((), torch.float64))
        is_taken = values.op(aten.ne.Scalar, (number, 0), (), Spec((), torch.bool))
        result = {k: values.merge(is_taken, outputs.get(k, result[k]), result[k], True) for k in result}
    return result


def _numbers_of(values: Values, variant: int, record: Record) -> Any:
    """The inputs that stand for the numbers of a record. Paths share those before the branch at which they part."""
    paths: dict[int, tuple[bool, ...]] = {}
    taken: tuple[bool, ...] = ()
    for call in record.calls:
        if isinstance(call, Decision):
            taken = (*taken, call.outcome)
            continue
        used = pytree.tree_leaves((call.args, [v for _, v in call.kwargs]))
        paths |= {x.index: taken for x in used if isinstance(x, Num)}

    def number(index: int) -> Value:
        return values.input(frozenset({Source(variant, paths[index], index)}), Spec((), torch.float64))

    return number


def kept_of(state: Mapping[str, Any], fresh: Kept) -> Kept:
    """A parameter's state in the optimizer, as its step keeps it. `fresh`: what a first step leaves."""
    tensors: dict[str, Spec] = {}
    numbers: dict[str, Any] = {}
    for slot, value in state.items():
        is_tensor = (
            isinstance(value, Tensor) and slot not in fresh.numbers and (slot in fresh.tensors or value.numel() != 1)
        )
        if is_tensor:
            tensors[slot] = Spec(tuple(value.shape), value.dtype)
        elif value is not None:
            numbers[slot] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return Kept(tensors, numbers)


class StepNumbers:
    """The numbers of each step, and what the optimizer's own code keeps between steps.

    `next()` runs `step()` on stand-ins with the options as they are now; `commit()` says that the step was taken.
    """

    def __init__(
        self,
        spec: OptimizerSpec,
        optimizer: torch.optim.Optimizer,
        names: nn.Module | Mapping[int, str],
        updated: Collection[str] | None = None,
    ) -> None:
        named = _names(names)
        self.spec, self._stand_ins = spec, StandIns(optimizer, named)
        self._named = {named[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        members = [spec.members(k) for k in range(len(spec.kinds))]
        self._members = [[n for n in each if updated is None or n in updated] or each for each in members]
        self._kept: list[Kept] = []
        self.read()

    def read(self) -> None:
        """Continue from the state that the optimizer has now. StepError where parameters of one kind differ in it."""
        state = self._stand_ins.source.state
        known: dict[str, dict[str, Any]] = {name: dict(state.get(p, {})) for name, p in self._named.items()}
        self._check_alike({name: _scalars(kept) for name, kept in known.items()})
        kinds = zip(self.spec.kinds, self._members, strict=True)
        self._kept = [kept_of(known[names[0]], Kept(kind.slots, kind.kept)) for kind, names in kinds]
        self._after = self._kept

    def _check_alike(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        for kind, names in zip(self.spec.kinds, self._members, strict=True):
            given = [values.get(name, {}) for name in names]
            shown = sorted({str({slot: kept.get(slot) for slot in kind.kept}) for kept in given})
            if len(shown) > 1:
                raise StepError(
                    "the parameters have taken different numbers of steps",
                    where=f"state of the optimizer {self.spec.name}",
                    got=", ".join(shown),
                    expected="parameters of one group and shape with one number of steps",
                    hint="load it into the optimizer before mw.compile: optimizer.load_state_dict",
                )

    def next(self) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
        """The numbers of the next step by name; and by slot and parameter what state begins with in it.

        Raises StepError where the optimizer would do something else than was captured.
        """
        numbers: dict[str, float] = {}
        fills: dict[tuple[str, str], float] = {}
        self._after = []
        self._stand_ins.take_options()
        for k, kind in enumerate(self.spec.kinds):
            paths, after = self._stand_ins.step(self._members[k][0], self._kept[k])
            signature = _signature(paths)
            if signature not in kind.variants:
                raise self._changed(kind, self._members[k][0])
            variant = kind.variants.index(signature)
            for i, number in enumerate(kind.numbers):
                numbers[f"update{k}.{i}"] = _value(number, variant, paths)
            fills |= {(key[2], name): v for key, v in paths[0].fills.items() for name in self.spec.members(k)}
            self._after.append(after)
        return numbers, fills

    def commit(self) -> None:
        """The step of the last `next()` was taken."""
        self._kept = self._after

    def kept(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """What the optimizer's code keeps of some parameters beside their tensors, as it keeps it."""
        return {n: dict(self._kept[self.spec.kind_of[n]].numbers) for n in names if n in self.spec.kind_of}

    def values(self) -> dict[str, dict[str, float]]:
        """What the optimizer's code keeps of each parameter: counts of steps and the like, by parameter and slot."""
        shown = [_scalars(kept.numbers) for kept in self._kept]
        return {name: dict(shown[k]) for name, k in self.spec.kind_of.items() if shown[k]}

    def load(self, values: Mapping[str, Mapping[str, float]], num_steps: int) -> None:
        """Continue from what `values()` gave after so many steps. StepError where parameters of one kind differ."""
        self._check_alike(values)
        self._kept = []
        for k, kind in enumerate(self.spec.kinds):
            given = values.get(self._members[k][0], {})
            numbers = {slot: _as(value, kind.kept.get(slot)) for slot, value in given.items()}
            self._kept.append(Kept(kind.slots, numbers) if num_steps else Kept())
        self._after = self._kept

    def _changed(self, kind: UpdateKind, name: str) -> StepError:
        return OutdatedUpdate(
            "the optimizer's options call for another update than was compiled",
            where=f"{self.spec.name}, param_groups[{kind.group}], parameter {name}",
            got="other operations in step(): an option was switched on or off (0 and not 0 are two ways)",
            expected="the operations of the step that was compiled; numbers may change",
            hint="step.save(path), compile again with it, step.load(path)",
        )


def _as(value: float, like: Any) -> Any:
    if isinstance(like, Tensor):
        return torch.tensor(value, dtype=like.dtype).reshape(like.shape)
    return type(like)(value) if isinstance(like, (int, float)) else value


def _value(number: Number, variant: int, paths: list[Prepared]) -> float:
    """What a number is in a step of a variant; 1 for those of other variants, which are not used then."""
    for source in number:
        if source.index < 0:
            return float(source.variant == variant)
        if source.variant == variant:
            path = next(p for p in paths if p.record.outcomes[: len(source.path)] == source.path)
            return path.record.numbers[source.index]
    return 1.0


def check_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raises PlanError for what would run with the optimizer's own step and not with a compiled one."""
    hooks = optimizer_hooks(optimizer)
    if hooks:
        raise PlanError(
            "the optimizer has hooks, which a compiled step would not call",
            where=type(optimizer).__name__,
            got=", ".join(hooks),
            expected="the optimizer's own step alone",
            hint="remove them, and do before or after each call of the compiled step what they do",
        )


def initial_state(
    optimizer: torch.optim.Optimizer, spec: OptimizerSpec, names: nn.Module | Mapping[int, str]
) -> OptimizerState | None:
    """The state of an optimizer that has taken steps already, or None for a fresh one. Its tensors are not copied."""
    named = _names(names)
    tensors: dict[str, State] = {}
    counts: list[int] = []
    for param, kept in optimizer.state.items():
        name = named.get(id(param), "")
        if name in spec.kind_of and kept:
            tensors[name] = {slot: kept[slot] for slot in spec.slots(name) if kept.get(slot) is not None}
            counts.append(int(kept.get("step", 1)))
    return OptimizerState(max(counts), tensors) if counts else None


def _names(names: nn.Module | Mapping[int, str]) -> Mapping[int, str]:
    return {id(p): name for name, p in names.named_parameters()} if isinstance(names, nn.Module) else names


def _check_param(param: Tensor, named: Mapping[int, str], optimizer: torch.optim.Optimizer, index: int) -> None:
    where = f"{type(optimizer).__name__}, param_groups[{index}]"
    if id(param) not in named:
        raise PlanError(
            "the optimizer holds a parameter that the model does not have",
            where=where,
            got=f"a parameter of shape {tuple(param.shape)}",
            hint="make the optimizer from model.parameters() of the same model, after it was last changed",
        )
    if param.is_complex():
        raise PlanError("a complex parameter is not supported", where=where, got=f"{named[id(param)]}: {param.dtype}")


def check_options(optimizer: torch.optim.Optimizer, index: int, group: Mapping[str, Any]) -> None:
    """Raises PlanError for an option of a group that is not supported."""
    if group.get("differentiable"):
        raise PlanError(
            "the option 'differentiable' is not supported",
            where=f"{type(optimizer).__name__}, param_groups[{index}]",
            got="differentiable=True",
            hint="leave differentiable=False",
        )
