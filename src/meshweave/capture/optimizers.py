"""The update, captured from the user's own optimizer: a graph for each kind of parameter, and the numbers of each step.

`read_optimizer` traces the optimizer's `step()` on a copy (`optimizer_copy`): what it does to a parameter is a graph.
Values that Python computes are not in the graph: before every update the tapes of their computation are replayed with
the present options (`StepNumbers`); the numbers that are passed to ops are inputs of the graph.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.optimizer_copy import (
    NumberPath,
    OptimizerCopy,
    OptimizerOptions,
    ParameterState,
    Place,
    TracedStep,
)
from meshweave.capture.optimizer_graph import (
    Outputs,
    RunOp,
    Values,
    evaluate,
    run_op,
)
from meshweave.capture.optimizer_groups import (
    check_callable,
    check_hooks,
    check_param,
    names_by_id,
)
from meshweave.capture.optimizer_tape import untraceable
from meshweave.errors import OutdatedUpdate
from meshweave.ir.graph import Spec

aten = torch.ops.aten

# The first steps are traced, and must do the same where they begin alike.
_TRACED = 3
# Steps whose numbers are computed in advance, so that other paths in them are in the graph from the start: RAdam
# rectifies from the sixth step on.
_AHEAD = 8
_MOST_PATHS = 5
_AGAIN = "step.save(path), compile again with it, step.load(path)"
State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class PathNumbers:
    """The numbers of a step that takes the path `index` of its kind: of its graph, and by slot."""

    index: int
    numbers: Sequence[float]
    fills: Mapping[str, complex]
    kept: Mapping[str, Any]


def numbers_of(paths: Iterable[NumberPath], start: ParameterState, options: Mapping[Place, Any]) -> PathNumbers | None:
    """The numbers of a step that begins with state `start`; None if it takes none of the paths."""
    form = start.form
    for index, path in enumerate(paths):
        if path.start == form and (results := path.replay(options, start.numbers)) is not None:
            numbers, fills, kept = results
            by_slot = dict(zip(path.fills, fills, strict=True)), dict(zip(path.kept, kept, strict=True))
            return PathNumbers(index, numbers, *by_slot)
    return None


@dataclass(frozen=True, slots=True)
class UpdateKind:
    """What the optimizer does to some parameters of the same group, shape and dtype.

    `slots`: their state tensors; `paths`: the possible steps, and `variants`: the variant of the graph that each takes;
    `num_numbers`: how many numbers the longest path has; `kept`: the optimizer's own numbers after the first step.
    """

    group: int
    slots: Mapping[str, Spec]
    paths: tuple[NumberPath, ...]
    variants: tuple[int, ...]
    num_numbers: int
    outputs: Outputs
    kept: Mapping[str, Any]

    @property
    def num_variants(self) -> int:
        return 1 + max(self.variants)

    @property
    def num_inputs(self) -> int:
        return self.num_numbers + self.num_variants - 1

    def inputs_of(self, step: PathNumbers) -> list[float]:
        """The input numbers in a step: those of its path, with 1 for numbers that the path lacks; and for each variant
        but the last whether it is taken."""
        variant = self.variants[step.index]
        numbers = [*map(float, step.numbers), *[1.0] * (self.num_numbers - len(step.numbers))]
        return numbers + [float(v == variant) for v in range(self.num_variants - 1)]


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """What an optimizer does to each parameter. `kind_of` maps a parameter's name to its index in `kinds`, `leaders`
    maps each kind to the first kind with the same numbers in each step. `forms` are those of the optimizer's options
    (`OptimizerOptions.forms`)."""

    name: str
    kinds: tuple[UpdateKind, ...]
    leaders: tuple[int, ...]
    forms: Mapping[Place, Any] = field(hash=False)
    kind_of: Mapping[str, int] = field(hash=False)
    group_of: Mapping[str, int] = field(hash=False)

    def slots(self, name: str) -> Mapping[str, Spec]:
        """The state tensors of parameter `name`."""
        return self.kinds[self.kind_of[name]].slots

    def numbers(self) -> list[str]:
        """Names of the numbers that a step takes: kind of update, and index among its numbers."""
        return [f"update{k}.{i}" for k in sorted({*self.leaders}) for i in range(self.kinds[k].num_inputs)]

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
        inputs: dict[Any, Any] = {("param", ""): param, ("grad", ""): grad}
        inputs |= {("state", slot): value for slot, value in state.items()}
        inputs |= {i: numbers[f"update{self.leaders[index]}.{i}"] for i in range(kind.num_inputs)}
        results = evaluate(kind.outputs, inputs.__getitem__, call)
        return results["param", ""], {key[1]: value for key, value in results.items() if key[0] == "state"}


def read_optimizer(optimizer: torch.optim.Optimizer, names: nn.Module | Mapping[int, str]) -> OptimizerSpec:
    """Read `optimizer`. `names` is the model, or a map from id(parameter) to its name.

    Raises PlanError for an optimizer whose step needs a closure, hooks, and parameters that the
    model lacks; CaptureError, with the line, for a step that cannot be traced.
    """
    check_callable(optimizer)
    check_hooks(optimizer)
    named = names_by_id(names)
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            check_param(p, named, optimizer, index)
    own = OptimizerCopy(optimizer, named)
    states = {named[id(p)]: state for p, state in optimizer.state.items() if state and id(p) in named}
    fresh = own.trace({name: ParameterState() for name in own.trained()})
    starts = {name: kept_of(states.get(name, {}), step.after) for name, step in fresh.items()}
    is_fresh = all(start == ParameterState() for start in starts.values())
    steps = _ahead(own, starts, fresh if is_fresh else own.trace(starts))
    kinds: dict[Any, UpdateKind] = {}
    kind_of: dict[str, int] = {}
    for name, (paths, slots) in steps.items():
        at, shown = own.group_of[name], starts[name].shown
        outputs = tuple((id(path.path), tuple(path.outputs.items())) for path in paths)
        key = at, own.params[name].dtype, repr(slots), outputs, shown
        if key not in kinds:
            kinds[key] = _kind(own.values, at, paths, slots, fresh[name].after.numbers)
        kind_of[name] = [*kinds].index(key)
    unique = tuple(kinds.values())
    alike = [(kind.group, kind.paths, kind.variants, key[-1]) for key, kind in kinds.items()]
    leaders = tuple(alike.index(same) for same in alike)
    groups = MappingProxyType({name: own.group_of[name] for name in kind_of})
    return OptimizerSpec(own.name, unique, leaders, own.options.forms, MappingProxyType(kind_of), groups)


def _ahead(
    own: OptimizerCopy, starts: Mapping[str, ParameterState], steps: Mapping[str, TracedStep]
) -> dict[str, tuple[list[TracedStep], Mapping[str, Spec]]]:
    """By parameter, the different steps that it takes next, and its state tensors. A step is traced unless all
    parameters take known paths."""
    known: dict[str, list[TracedStep]] = {name: [] for name in starts}
    options = own.options.numbers
    for i in range(_AHEAD):
        numbers = {
            name: numbers_of([step.path for step in known[name]], start, options) for name, start in starts.items()
        }
        if i and (i < _TRACED or None in numbers.values()):
            steps = own.trace(starts)
        for name in starts if i < _TRACED or None in numbers.values() else ():
            taken, step = numbers[name], steps[name]
            if taken is None:
                known[name].append(step)
            elif not known[name][taken.index].equals(step):
                raise untraceable(
                    "the optimizer does something else in a step than in an equal step before", name, own.name
                )
            others = [path for path in known[name][:-1] if path.path.start == known[name][-1].path.start]
            is_exact = any(path.path.replay.differs_exactly(known[name][-1].path.replay) for path in others)
            if is_exact or len(known[name]) > _MOST_PATHS:
                raise untraceable(
                    "step() takes another path from step to step: int(), math or many branches", name, own.name
                )
        starts = {
            name: ParameterState(known[name][taken.index].after.tensors, taken.kept)
            if taken is not None
            else steps[name].after
            for name, taken in numbers.items()
        }
    return {name: (paths, starts[name].tensors) for name, paths in known.items()}


def _kind(
    values: Values, group: int, steps: Sequence[TracedStep], slots: Mapping[str, Spec], kept: Mapping[str, Any]
) -> UpdateKind:
    """The kind of a parameter that takes these steps."""
    variants: list[Outputs] = []
    for step in steps:
        if step.outputs not in variants:
            variants.append(step.outputs)
    paths, taken = tuple(step.path for step in steps), tuple(variants.index(step.outputs) for step in steps)
    num_numbers = max(len(path.replay.results[0]) for path in paths)
    return UpdateKind(group, dict(slots), paths, taken, num_numbers, _merged(values, variants, num_numbers), kept)


def _merged(values: Values, variants: Sequence[Outputs], num_numbers: int) -> Outputs:
    """The outputs of an update in all variants. Each number is that of the variant which is taken. A slot that a
    variant lacks has the value that the variant leaves there."""
    result = variants[-1]
    for v, outputs in reversed(list(enumerate(variants[:-1]))):
        number = values.input(num_numbers + v, Spec((), torch.float64))
        is_taken = values.op(aten.ne.Scalar, (number, 0), (), Spec((), torch.bool))
        result = {k: values.merge(is_taken, outputs.get(k, result[k]), result[k]) for k in result}
    return result


def scalars_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The slots of a parameter's state that are single numbers. A DTensor of one element is not: it is the state of a
    parameter of one element, and only some ranks know it."""
    return {
        slot: v.item() if isinstance(v, Tensor) else v
        for slot, v in state.items()
        if not isinstance(v, Tensor) or (v.numel() == 1 and not hasattr(v, "placements"))
    }


def kept_of(state: Mapping[str, Any], fresh: ParameterState) -> ParameterState:
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
    return ParameterState(tensors, numbers)


def resting_state(
    optimizer: torch.optim.Optimizer, trained: Container[str], names: nn.Module | Mapping[int, str]
) -> dict[str, tuple[State, dict[str, Any]]]:
    """An optimizer's state of parameters that are not among those trained by a compiled update (they are frozen): by
    name its tensors, and its numbers."""
    named = names_by_id(names)
    by_name: dict[str, tuple[State, dict[str, Any]]] = {}
    for param, kept in optimizer.state.items():
        name = named.get(id(param), "")
        if name and kept and name not in trained:
            tensors = {slot: v for slot, v in kept.items() if isinstance(v, Tensor) and _is_of_elements(slot, v, param)}
            by_name[name] = tensors, scalars_of({slot: v for slot, v in kept.items() if slot not in tensors})
    return by_name


def _is_of_elements(slot: str, value: Tensor, param: Tensor) -> bool:
    """Whether a slot has a value per element of a parameter, rather than a single number."""
    return slot != "step" and (value.shape == param.shape or value.numel() != 1)


class StepNumbers:
    """The numbers of each step, and what the optimizer's own code keeps between steps, for every parameter.

    `next()` computes them from the present options, once for all parameters that have the same numbers; `commit()`
    records that the step was taken. Parameters that a step does not update (the loss of its program does not use them)
    keep their values. `stepped` are those that have taken a step which left state.
    """

    def __init__(
        self, spec: OptimizerSpec, optimizer: torch.optim.Optimizer, names: nn.Module | Mapping[int, str]
    ) -> None:
        named = names_by_id(names)
        self.spec, self._optimizer = spec, optimizer
        self._named = {named[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        self._members = {k: spec.members(k) for k in spec.leaders}
        self._kept: dict[str, ParameterState] = {}
        self.stepped: set[str] = set()
        self.read()

    def read(self) -> None:
        """Continue from the optimizer's present state."""
        state = self._optimizer.state
        self._begin_with({n: kept_of(state.get(p, {}), self._leaves(n)) for n, p in self._named.items()})

    def _leaves(self, name: str) -> ParameterState:
        """The state that a first step of a parameter leaves."""
        kind = self.spec.kinds[self.spec.kind_of[name]] if name in self.spec.kind_of else None
        return ParameterState(kind.slots, kind.kept) if kind is not None else ParameterState()

    def _begin_with(self, kept: Mapping[str, ParameterState]) -> None:
        """Parameters of the same kind with the same numbers share them from now on."""
        known: dict[Any, ParameterState] = {}
        self._kept = {n: known.setdefault((k, kept[n].shown), kept[n]) for n, k in self._leaders()}
        self._after: dict[str, ParameterState] = {}
        self.stepped = {name for name, own in self._kept.items() if own.tensors or own.numbers}

    def _leaders(self) -> Iterable[tuple[str, int]]:
        return ((name, k) for k, names in self._members.items() for name in names)

    def next(self, updated: Collection[str] | None = None) -> tuple[dict[str, float], dict[tuple[str, str], complex]]:
        """The numbers of the next step, which updates the parameters `updated` (None: all), by name; and by slot and
        parameter the initial values of state in it.

        Raises OutdatedUpdate if the optimizer would do something else than what was captured: because of other options,
        or because parameters have since taken different numbers of steps where a single number was captured for them.
        """
        numbers: dict[str, float] = {}
        fills: dict[tuple[str, str], complex] = {}
        options, self._after = OptimizerOptions.of(self._optimizer), {}
        if options.forms != self.spec.forms:
            raise self._other_options(options)
        for k, members in self._members.items():
            kind = self.spec.kinds[k]
            names = members if updated is None else [name for name in members if name in updated]
            step = numbers_of(kind.paths, self._kept_by_all(names or members[:1]), options.numbers)
            if step is None:
                raise self._changed(
                    f"param_groups[{kind.group}], parameter {(names or members)[0]}",
                    "other operations in step(): an option was switched on or off (0 and nonzero differ)",
                )
            self._after |= dict.fromkeys(names, ParameterState(kind.slots, step.kept))
            numbers |= {f"update{k}.{i}": x for i, x in enumerate(kind.inputs_of(step))}
            fills |= {(slot, name): x for slot, x in step.fills.items() for name in names}
        return numbers, fills

    def _other_options(self, options: OptimizerOptions) -> OutdatedUpdate:
        before, now = self.spec.forms, options.forms
        place = next(
            place
            for place in {**before, **now}
            if place not in now or place not in before or before[place] != now[place]
        )
        return self._changed(
            f"{place[0]} {place[1]}", f"{place[2]}: {before.get(place)!r} has become {now.get(place)!r}"
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
                expected="the same number of steps for all parameters of a group and shape",
                hint=_AGAIN,
            )
        return self._kept[next(iter(names))]

    def commit(self) -> None:
        """Record that the step of the last `next()` was taken."""
        self._kept |= self._after
        self.stepped.update(name for name, after in self._after.items() if after.tensors or after.numbers)
        self._after = {}

    def kept(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """What the optimizer's code keeps for some parameters beside their tensors, in its own form."""
        wanted = {*names}
        return {name: dict(kept.numbers) for name, kept in self._kept.items() if name in wanted}

    def _changed(self, place: str, got: str) -> OutdatedUpdate:
        return OutdatedUpdate(
            "the optimizer's options require another update than the compiled one",
            where=f"{self.spec.name}, {place}",
            got=got,
            expected="the operations of the step that was compiled; numbers may change",
            hint=_AGAIN,
        )


def number_like(value: Any, like: Any) -> Any:
    """A number in the form in which an optimizer keeps it: a tensor, an integer or a float. A checkpoint of a step that
    ran the optimizer eagerly has the dtype beside the number."""
    if isinstance(value, list):
        dtype, value = value
        like = torch.zeros((), dtype=getattr(torch, dtype)) if like is None else like
    if isinstance(like, Tensor):
        return torch.tensor(value, dtype=like.dtype).reshape(like.shape)
    return type(like)(value) if isinstance(like, (int, float)) else value
