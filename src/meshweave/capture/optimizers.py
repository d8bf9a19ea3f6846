"""The update, captured from the user's own optimizer: a graph for each kind of parameter, and the numbers of each step.

`read_optimizer` runs the optimizer's `step()` on stand-ins (`optimizer_stand_ins`) and turns what it does to a
parameter into a graph. Values computed in Python are not in the graph: `optimizer_steps` runs `step()` on the stand-ins
again before every update, with the options at that time; the numbers that it passes to ops are inputs of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.optimizer_graph import (
    Number,
    Outputs,
    RunOp,
    UpdateSource,
    UpdateValue,
    Values,
    evaluate,
    merged_paths,
    ordered,
    reshaped,
    run_op,
    values_of,
)
from meshweave.capture.optimizer_record import Key, Num, OptimizerRecord, Prepared, TakenBranch
from meshweave.capture.optimizer_several import name_of, parts_of
from meshweave.capture.optimizer_shared import Place, merged
from meshweave.capture.optimizer_stand_ins import Kept, StandIns, check_callable
from meshweave.errors import CaptureError, PlanError
from meshweave.interop import pytree
from meshweave.interop.hooks import optimizer_hooks
from meshweave.ir.graph import Spec

aten = torch.ops.aten

# Steps traced in advance, so that changes during the first steps are in the graph from the start: SGD creates its
# momentum in the first step, RAdam rectifies from the sixth on.
_AHEAD = 8
State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class UpdateKind:
    """What the optimizer does to some parameters of the same group, shape and dtype.

    `slots`: their state tensors; `fills`: their initial values before the first step; `variants`: the possible steps,
    by signature; `numbers`: its input numbers; `kept`: the optimizer's own numbers after the first step.
    """

    group: int
    slots: Mapping[str, Spec]
    fills: Mapping[str, complex]
    variants: tuple[tuple[Any, ...], ...]
    numbers: tuple[Number, ...]
    outputs: Outputs
    kept: Mapping[str, Any]
    reads_shape: bool

    def has_numbers_of(self, other: UpdateKind) -> bool:
        """Whether each step's numbers equal those of another kind of the same group: only the shape differs, and the
        code does not read it."""
        if self.reads_shape or other.reads_shape or self.group != other.group:
            return False
        mine, theirs = ((k.variants, k.numbers, k.fills, str(scalars_of(k.kept))) for k in (self, other))
        return mine == theirs

    def with_shape(self, old: torch.Size, new: torch.Size) -> UpdateKind | None:
        """The update of parameters of another shape; None if it is not elementwise."""
        outputs = reshaped(self.outputs, old, new)
        is_element = all(spec.shape in ((), old) for spec in self.slots.values())
        if outputs is None or self.reads_shape or not is_element:
            return None
        slots = {slot: Spec(tuple(new), spec.dtype) if spec.shape else spec for slot, spec in self.slots.items()}
        return replace(self, slots=slots, outputs=outputs)


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """What an optimizer does to each parameter. `kind_of` maps a parameter's name to its index in `kinds`, `leaders`
    maps each kind to the first kind with the same numbers in each step."""

    name: str
    kinds: tuple[UpdateKind, ...]
    leaders: tuple[int, ...]
    kind_of: Mapping[str, int] = field(hash=False)
    group_of: Mapping[str, int] = field(hash=False)

    def slots(self, name: str) -> Mapping[str, Spec]:
        """The state tensors of parameter `name`."""
        return self.kinds[self.kind_of[name]].slots

    def numbers(self) -> list[str]:
        """Names of the numbers that a step takes: kind of update, and index among its numbers."""
        return [f"update{k}.{i}" for k in sorted({*self.leaders}) for i in range(len(self.kinds[k].numbers))]

    def members(self, leader: int) -> list[str]:
        """The parameters whose numbers are those of a kind."""
        return [name for name, k in self.kind_of.items() if self.leaders[k] == leader]

    def update(
        self,
        name: str,
        param: Any,
        grad: Any,
        state: Mapping[str, Any],
        numbers: Mapping[str, Any],
        call: RunOp = run_op,
    ) -> tuple[Any, dict[str, Any]]:
        """A step: the new parameter and its new state. Nothing is written in place.

        Values are tensors, or whatever `call` returns for ops. `numbers` are 0-dim float64, by the names of
        `numbers()`.
        """
        index = self.kind_of[name]
        kind = self.kinds[index]
        places = {number: f"update{self.leaders[index]}.{i}" for i, number in enumerate(kind.numbers)}
        inputs: dict[Key, Any] = {("param", 0, ""): param, ("grad", 0, ""): grad}
        inputs |= {("state", 0, slot): value for slot, value in state.items()}
        numbered = {number: numbers[place] for number, place in places.items()}
        results = evaluate(kind.outputs, lambda key: inputs[key] if isinstance(key, tuple) else numbered[key], call)
        return results["param", 0, ""], {key[2]: value for key, value in results.items() if key[0] == "state"}


@dataclass(frozen=True, slots=True)
class InitialOptimizerState:
    """State of an optimizer that has taken steps already: the number of the last step, and tensors by name and slot.

    An optimizer that does not count its steps counts as having taken 1. A parameter that has taken no step has no
    entry.
    """

    num_steps: int
    tensors: Mapping[str, State]


def read_optimizer(optimizer: torch.optim.Optimizer, names: nn.Module | Mapping[int, str]) -> OptimizerSpec:
    """Read `optimizer`. `names` is the model, or a map from id(parameter) to its name.

    Raises PlanError for an optimizer whose step needs a closure, unsupported options, hooks, complex parameters and
    parameters that the model lacks; CaptureError, with the line, for a step that cannot be traced.
    """
    check_callable(optimizer)
    check_hooks(optimizer)
    named = names_by_id(names)
    for index, group in enumerate(optimizer.param_groups):
        check_options(optimizer, index, group)
        for p in group["params"]:
            _check_param(p, named, optimizer, index)
    stand_ins = StandIns(optimizer, named)
    stand_ins.take_options()
    runs, changed = stand_ins.runs_of(stand_ins.trained())
    kinds: dict[Any, UpdateKind] = {}
    kind_of: dict[str, int] = {}
    kept = {named[id(p)]: state for p, state in optimizer.state.items() if id(p) in named}
    for name in stand_ins.trained():
        param, at = stand_ins.params[name], stand_ins.group_of[name]
        own = {slot: value for slot, value in kept.get(name, {}).items() if value is not None}
        start = repr((sorted(own), sorted(scalars_of(own).items())))
        key = at, param.shape, param.dtype, start, runs[name]
        if key not in kinds:
            _check_alone(stand_ins, name, runs[name], changed)
            same = (k for k in kinds if not kept and (k[0], *k[2:]) == (key[0], *key[2:]))
            of_other = next(filter(None, (kinds[k].with_shape(k[1], param.shape) for k in same)), None)
            kinds[key] = of_other or _kind(stand_ins, name, kept.get(name, {}))
        kind_of[name] = [*kinds].index(key)
    group_of = {n: stand_ins.group_of[n] for n in kind_of}
    unique_kinds, states = tuple(kinds.values()), [key[2:] for key in kinds]
    leaders = tuple(
        next(i for i in range(k + 1) if i == k or (states[i] == states[k] and kind.has_numbers_of(unique_kinds[i])))
        for k, kind in enumerate(unique_kinds)
    )
    name = name_of(optimizer)
    return OptimizerSpec(name, unique_kinds, leaders, MappingProxyType(kind_of), MappingProxyType(group_of))


def _check_alone(stand_ins: StandIns, name: str, run: tuple[Any, ...], changed: Mapping[Place, Any]) -> None:
    """Raises CaptureError if the update of a parameter, or what the step changes in groups and attributes, differs
    between updating it alone and with others."""
    runs, alone = stand_ins.runs_of([name])
    merged((changed, alone), name_of(stand_ins.source))
    if runs[name] != run:
        raise CaptureError(
            f"the update of the parameter '{name}' depends on the optimizer's other parameters",
            where=name_of(stand_ins.source),
            got="other operations or numbers in step() with it alone than with all",
            expected="an update of each parameter by its group's options, its gradient and its state",
            hint="mark the parameter with an attribute (p.is_first = True), or give it a group of its own",
        )


def scalars_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The slots of a parameter's state that are single numbers. A DTensor of one element is not: it is the state of a
    parameter of one element, and only some ranks know it."""
    return {
        slot: v.item() if isinstance(v, Tensor) else v
        for slot, v in state.items()
        if not isinstance(v, Tensor) or (v.numel() == 1 and not hasattr(v, "placements"))
    }


def _kind(stand_ins: StandIns, name: str, state: Mapping[str, Any]) -> UpdateKind:
    paths, kept = stand_ins.step(name, Kept())
    fresh, fills = kept, {key[2]: value for key, value in paths[0].fills.items()}
    variants: dict[tuple[Any, ...], list[Prepared]] = {}
    if state:
        kept = kept_of(state, fresh)
    else:
        variants[signature_of(paths)] = paths
    for _ in range(_AHEAD - len(variants)):
        before = kept
        paths, kept = stand_ins.step(name, before)
        if removed := sorted(before.tensors.keys() - kept.tensors.keys()):
            raise CaptureError(
                "the optimizer removes a state tensor that an earlier step created",
                where=name_of(stand_ins.source),
                got=f"step() without state['{removed[0]}'] of {name}",
                expected="state tensors that stay once they are there",
                hint="keep the tensor, and beside it a number that says whether it counts",
            )
        variants.setdefault(signature_of(paths), paths)
    param = stand_ins.params[name]
    shape = Spec(tuple(param.shape), param.dtype)
    specs: dict[Key, Spec] = {("param", 0, ""): shape, ("grad", 0, ""): shape}
    specs |= {("state", 0, slot): spec for slot, spec in kept.tensors.items()}
    outputs = _merged(Values(), list(variants.values()), specs)
    numbers = [v.args[0] for v in ordered(outputs.values()) if v.target is None and isinstance(v.args[0], frozenset)]
    return UpdateKind(
        stand_ins.group_of[name],
        dict(kept.tensors),
        fills,
        tuple(variants),
        tuple(numbers),
        outputs,
        fresh.numbers,
        any(path.record.reads_shape for paths in variants.values() for path in paths),
    )


def signature_of(paths: Iterable[Prepared]) -> tuple[Any, ...]:
    return tuple(path.signature for path in paths)


def _merged(values: Values, variants: list[list[Prepared]], specs: Mapping[Key, Spec]) -> Outputs:
    """The outputs of an update in all variants. A slot that a variant lacks has the value that the variant leaves
    there."""
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
        number = values.input(frozenset({UpdateSource(v, (), -1)}), Spec((), torch.float64))
        is_taken = values.op(aten.ne.Scalar, (number, 0), (), Spec((), torch.bool))
        result = {k: values.merge(is_taken, outputs.get(k, result[k]), result[k], True) for k in result}
    return result


def _numbers_of(values: Values, variant: int, record: OptimizerRecord) -> Any:
    """The inputs for the numbers of a record. Paths share the numbers before the branch at which they diverge."""
    paths: dict[int, tuple[bool, ...]] = {}
    outcomes: tuple[bool, ...] = ()
    for call in record.calls:
        if isinstance(call, TakenBranch):
            outcomes = (*outcomes, call.outcome)
            continue
        used = pytree.tree_leaves((call.args, [v for _, v in call.kwargs]))
        paths |= {x.index: outcomes for x in used if isinstance(x, Num)}

    def number(index: int) -> UpdateValue:
        return values.input(frozenset({UpdateSource(variant, paths[index], index)}), Spec((), torch.float64))

    return number


def kept_of(state: Mapping[str, Any], fresh: Kept) -> Kept:
    """A parameter's state in the optimizer, in the form in which its step keeps it. `fresh`: what a first step
    leaves."""
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


def check_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raises PlanError for hooks that would run with the optimizer's own step but not with a compiled step."""
    hooks = [hook for part in parts_of(optimizer) for hook in optimizer_hooks(part)]
    if hooks:
        raise PlanError(
            "the optimizer has hooks, which a compiled step would not call",
            where=name_of(optimizer),
            got=", ".join(hooks),
            expected="an optimizer without hooks",
            hint="remove them, and do their work before or after each call of the compiled step",
        )


def initial_state(
    optimizer: torch.optim.Optimizer, spec: OptimizerSpec, names: nn.Module | Mapping[int, str]
) -> InitialOptimizerState | None:
    """The state of an optimizer that has taken steps already, or None for a fresh optimizer. Its tensors are not
    copied."""
    named = names_by_id(names)
    tensors: dict[str, State] = {}
    counts: list[int] = []
    for param, kept in optimizer.state.items():
        name = named.get(id(param), "")
        if name in spec.kind_of and kept:
            tensors[name] = {slot: kept[slot] for slot in spec.slots(name) if kept.get(slot) is not None}
            counts.append(int(kept.get("step", 1)))
    return InitialOptimizerState(max(counts), tensors) if counts else None


def resting_state(
    optimizer: torch.optim.Optimizer, spec: OptimizerSpec, names: nn.Module | Mapping[int, str]
) -> dict[str, tuple[State, dict[str, Any]]]:
    """An optimizer's state of parameters that no step trains now (they are frozen): by name its tensors, and its
    numbers."""
    named = names_by_id(names)
    by_name: dict[str, tuple[State, dict[str, Any]]] = {}
    for param, kept in optimizer.state.items():
        name = named.get(id(param), "")
        if name and kept and name not in spec.kind_of:
            tensors = {slot: v for slot, v in kept.items() if isinstance(v, Tensor) and _is_of_elements(slot, v, param)}
            by_name[name] = tensors, scalars_of({slot: v for slot, v in kept.items() if slot not in tensors})
    return by_name


def _is_of_elements(slot: str, value: Tensor, param: Tensor) -> bool:
    """Whether a slot has a value per element of a parameter, rather than a single number."""
    return slot != "step" and (value.shape == param.shape or value.numel() != 1)


def names_by_id(names: nn.Module | Mapping[int, str]) -> Mapping[int, str]:
    return {id(p): name for name, p in names.named_parameters()} if isinstance(names, nn.Module) else names


def _check_param(param: Tensor, named: Mapping[int, str], optimizer: torch.optim.Optimizer, index: int) -> None:
    where = f"{name_of(optimizer)}, param_groups[{index}]"
    if id(param) not in named:
        raise PlanError(
            "the optimizer has a parameter that the model lacks",
            where=where,
            got=f"a parameter of shape {tuple(param.shape)}",
            hint="create the optimizer from model.parameters() of the same model, after its last change; parameters "
            "of a loss belong in the model (self.criterion = ... in it, and loss=model.criterion)",
        )


def check_options(optimizer: torch.optim.Optimizer, index: int, group: Mapping[str, Any]) -> None:
    """Raises PlanError for an option of a group that is not supported."""
    if group.get("differentiable"):
        raise PlanError(
            "the option 'differentiable' is not supported",
            where=f"{name_of(optimizer)}, param_groups[{index}]",
            got="differentiable=True",
            hint="leave differentiable=False",
        )
