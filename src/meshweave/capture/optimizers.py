"""The update, captured from the user's own optimizer: a graph for each kind of parameter, and the numbers of each step.

`read_optimizer` traces the optimizer's `step()` on a copy (`optimizer_copy`) and turns what it does to a parameter into
a graph. Values that Python computes are not in the graph: before every update the tapes of their computation are
replayed with the present options (`StepNumbers`); the numbers that are passed to ops are inputs of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.optimizer_copy import (
    Kept,
    Leaves,
    OptimizerCopy,
    Place,
    Shared,
    SharedReader,
    TracedStep,
    leaves_of,
    structure_of,
)
from meshweave.capture.optimizer_graph import (
    NumberSource,
    Outputs,
    RunOp,
    UpdateValue,
    Values,
    evaluate,
    ordered,
    run_op,
    values_of,
)
from meshweave.capture.optimizer_groups import (
    check_callable,
    check_hooks,
    check_options,
    check_param,
    names_by_id,
)
from meshweave.capture.optimizer_tape import Computed, NumberGuard, Replay, untraceable
from meshweave.capture.optimizer_tracer import Key, OptimizerRecord, prepared
from meshweave.errors import OutdatedUpdate
from meshweave.ir.graph import Spec

aten = torch.ops.aten

# Steps traced in advance, so that changes during the first steps are in the graph from the start: SGD creates its
# momentum in the first step, RAdam rectifies from the sixth on.
_AHEAD = 8
_AGAIN = "step.save(path), compile again with it, step.load(path)"
State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class NumberPath:
    """The numbers of a traced step. A step with the same `start` (structure of state, options and attributes), in which
    all guards among `entries` hold, takes this path; its update is the kind's `variant`.

    `results` are numbers of the record, initial values of state (by slot), state and shared values after the step, with
    references to the tape; `replay` has their values for those of `inputs`.
    """

    start: Any
    inputs: tuple[tuple[Any, ...], ...]
    entries: tuple[Computed | NumberGuard, ...]
    results: tuple[Any, ...]
    fills: tuple[str, ...]
    slots: tuple[str, ...]
    places: tuple[Place, ...]
    variant: int
    replay: Replay = field(compare=False, repr=False)

    def numbers(self, start: Any, leaves: Leaves) -> PathNumbers | None:
        """The numbers of a step that begins with the values `leaves`; None if it takes another path."""
        if start != self.start:
            return None
        results = self.replay(*(leaves[key] for key in self.inputs))
        if results is None:
            return None
        numbers, fills, kept, shared = results
        by_slot = dict(zip(self.fills, fills, strict=True)), dict(zip(self.slots, kept, strict=True))
        return PathNumbers(self.variant, numbers, *by_slot, dict(zip(self.places, shared, strict=True)))


@dataclass(frozen=True, slots=True)
class PathNumbers:
    """The numbers of a step: of the record of its variant, and by slot and place."""

    variant: int
    numbers: Sequence[float]
    fills: Mapping[str, complex]
    kept: Mapping[str, Any]
    shared: Shared


@dataclass(frozen=True, slots=True)
class UpdateKind:
    """What the optimizer does to some parameters of the same group, shape and dtype.

    `slots`: their state tensors; `paths`: the possible steps; `numbers`: its input numbers; `kept`: the optimizer's own
    numbers after the first step.
    """

    group: int
    slots: Mapping[str, Spec]
    paths: tuple[NumberPath, ...]
    numbers: tuple[NumberSource, ...]
    outputs: Outputs
    kept: Mapping[str, Any]

    @property
    def num_variants(self) -> int:
        return 1 + max(path.variant for path in self.paths)

    def has_numbers_of(self, other: UpdateKind) -> bool:
        """Whether each step's numbers equal those of another kind."""
        return (self.group, self.paths, self.numbers) == (other.group, other.paths, other.numbers)

    def step(self, kept: Kept, structure: Any, shared: Leaves) -> PathNumbers | None:
        """The numbers of a step from a parameter's state; None if no traced step did the same."""
        start = kept.structure, structure
        leaves = {**shared, **{(slot,): value for slot, value in kept.numbers.items()}}
        steps = (path.numbers(start, leaves) for path in self.paths)
        return next((step for step in steps if step is not None), None)

    def inputs_of(self, step: PathNumbers) -> list[float]:
        """The input numbers in a step; 1 for numbers of other variants, which are not used then."""
        return [_input(number, step) for number in self.numbers]


def _input(number: NumberSource, step: PathNumbers) -> float:
    for variant, index in number:
        if index < 0:
            return float(variant == step.variant)
        if variant == step.variant:
            return float(step.numbers[index])
    return 1.0


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """What an optimizer does to each parameter. `kind_of` maps a parameter's name to its index in `kinds`, `leaders`
    maps each kind to the first kind with the same numbers in each step. `idle` are groups without trained parameters
    whose values a step changes."""

    name: str
    kinds: tuple[UpdateKind, ...]
    leaders: tuple[int, ...]
    idle: tuple[UpdateKind, ...]
    reader: SharedReader = field(hash=False)
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


def read_optimizer(optimizer: torch.optim.Optimizer, names: nn.Module | Mapping[int, str]) -> OptimizerSpec:
    """Read `optimizer`. `names` is the model, or a map from id(parameter) to its name.

    Raises PlanError for an optimizer whose step needs a closure, unsupported options, hooks, and parameters that the
    model lacks; CaptureError, with the line, for a step that cannot be traced.
    """
    check_callable(optimizer)
    check_hooks(optimizer)
    named = names_by_id(names)
    for index, group in enumerate(optimizer.param_groups):
        check_options(optimizer, index, group)
        for p in group["params"]:
            check_param(p, named, optimizer, index)
    return _Reading(optimizer, named).spec()


@dataclass(slots=True)
class _Reading:
    """Reads an optimizer, whose parameters have the names `named`."""

    optimizer: torch.optim.Optimizer
    named: Mapping[int, str]
    copy: OptimizerCopy = field(init=False)
    shared: Shared = field(init=False)

    def __post_init__(self) -> None:
        self.copy = OptimizerCopy(self.optimizer, self.named)
        self.shared = self.copy.reader.read()

    def spec(self) -> OptimizerSpec:
        copy, kinds, kind_of = self.copy, dict[Any, UpdateKind](), dict[str, int]()
        kept = {self.named[id(p)]: state for p, state in self.optimizer.state.items() if id(p) in self.named}
        together = copy.trace({name: Kept() for name in copy.trained()}, self.shared)
        runs = together.tracer.runs(together.owners)
        for name in copy.trained():
            param, at, state = copy.params[name], copy.group_of[name], kept.get(name, {})
            own = {slot: value for slot, value in state.items() if value is not None}
            key = at, param.shape, param.dtype, repr((sorted(own), sorted(scalars_of(own).items()))), runs[name]
            if key not in kinds:
                kinds[key] = self._kind(name, state, together, runs[name])
            kind_of[name] = [*kinds].index(key)
        trained = {copy.group_of[name] for name in kind_of}
        first_of = {at: name for name, at in reversed(copy.group_of.items()) if at not in trained}
        idle = [kind for name in first_of.values() if (kind := self._idle_kind(name)).paths[0].places]
        unique, starts = tuple(kinds.values()), [key[3] for key in kinds]
        leaders = tuple(
            next(i for i in range(k + 1) if i == k or (starts[i] == starts[k] and kind.has_numbers_of(unique[i])))
            for k, kind in enumerate(unique)
        )
        groups = MappingProxyType({name: copy.group_of[name] for name in kind_of})
        return OptimizerSpec(copy.name, unique, leaders, tuple(idle), copy.reader, MappingProxyType(kind_of), groups)

    def _kind(self, name: str, state: Mapping[str, Any], together: TracedStep, run: tuple[Any, ...]) -> UpdateKind:
        first = self.copy.trace({name: Kept()}, self.shared)
        fresh = first.after(name)
        alone, changed = first.tracer.runs(dict(first.owners)).get(name), together.changed_now
        its = {
            place: x for place, x in changed.items() if place[:2] in self.copy.reader.of_group(self.copy.group_of[name])
        }
        if alone != run or repr(sorted(first.changed_now.items())) != repr(sorted(its.items())):
            raise untraceable(
                f"the update of the parameter '{name}' depends on the optimizer's other parameters",
                "other operations or numbers in step() with it alone than with all",
                self.copy.name,
            )
        return self._ahead(
            name, kept_of(state, fresh) if state else Kept(), fresh.numbers, first if not state else None
        )

    def _idle_kind(self, name: str) -> UpdateKind:
        return self._ahead(name, Kept(), {}, self.copy.trace({name: Kept()}, self.shared, False), False)

    def _ahead(
        self, name: str, start: Kept, fresh: Mapping[str, Any], first: TracedStep | None, has_grads: bool = True
    ) -> UpdateKind:
        """The kind of a parameter, from the steps that it takes next."""
        paths: list[NumberPath] = []
        variants: dict[Any, OptimizerRecord] = {}
        shared, group = self.shared, self.copy.group_of[name]
        for _ in range(_AHEAD):
            step = first if first is not None else self.copy.trace({name: start}, shared, has_grads)
            first = None
            record, fills = prepared(step.record)
            variants.setdefault(record.signature, record)
            structure, leaves = structure_and_leaves(self.copy.reader, shared, group)
            path = _path(step, name, (start.structure, structure), record, fills, [*variants].index(record.signature))
            leaves |= {(slot,): value for slot, value in start.numbers.items()}
            _add(paths, path, step, leaves)
            after = step.after(name)
            if removed := sorted(start.tensors.keys() - after.tensors.keys()):
                raise untraceable("the optimizer removes a state tensor", f"'{removed[0]}' of {name}", self.copy.name)
            start, shared = after, shared | step.changed_now
        param = self.copy.params[name]
        shape = Spec(tuple(param.shape), param.dtype)
        specs: dict[Key, Spec] = {("param", 0, ""): shape, ("grad", 0, ""): shape}
        specs |= {("state", 0, slot): spec for slot, spec in start.tensors.items()}
        outputs = _merged(Values(), [*variants.values()], specs)
        sources = [
            v.args[0] for v in ordered(outputs.values()) if v.target is None and isinstance(v.args[0], frozenset)
        ]
        return UpdateKind(group, dict(start.tensors), tuple(paths), tuple(sources), outputs, fresh)


def structure_and_leaves(reader: SharedReader, shared: Shared, group: int) -> tuple[tuple[Any, ...], Leaves]:
    """The options of a group and the attributes of its optimizer: what of them must be as traced, and the values."""
    places = ((*key, name) for key in reader.of_group(group) for name in reader.names[key])
    leaves = [leaf for place in places if place in shared for leaf in leaves_of(place, shared[place])]
    return structure_of(leaves), dict(leaves)


def _path(
    step: TracedStep, name: str, start: Any, record: OptimizerRecord, fills: Mapping[str, Any], variant: int
) -> NumberPath:
    kept = step.left[name].numbers
    results = tuple(record.numbers), tuple(fills.values()), tuple(kept.values()), tuple(step.changed.values())
    tensors = [i for i in range(step.tape.num_inputs) if isinstance(step.tape.values[i], Tensor)]
    replay = step.tape.compiled(tensors, results)
    inputs, entries = tuple(step.inputs), tuple(step.tape.entries)
    return NumberPath(start, inputs, entries, results, tuple(fills), tuple(kept), tuple(step.changed), variant, replay)


def _add(paths: list[NumberPath], path: NumberPath, step: TracedStep, leaves: Leaves) -> None:
    """Add a path, unless a known path is taken by the step that was traced: then both must have the same numbers."""
    for known in paths:
        numbers = known.numbers(path.start, leaves)
        if numbers is not None:
            expected = [*map(step.now, path.results)]
            replayed = [
                numbers.numbers,
                [*numbers.fills.values()],
                [*numbers.kept.values()],
                [*numbers.shared.values()],
            ]
            if known.variant != path.variant or repr([*map(list, replayed)]) != repr([*map(list, expected)]):  # type: ignore[arg-type]
                raise untraceable("the optimizer computes other numbers in a step than in an equal step before")
            return
        pairs = zip_longest(known.entries, path.entries)
        a, b = next(((a, b) for a, b in pairs if a != b), (None, None))
        is_exact = isinstance(a, NumberGuard) and isinstance(b, NumberGuard) and a.is_exact and b.is_exact
        if known.start == path.start and is_exact and (a.function, a.args) == (b.function, b.args):  # type: ignore[union-attr]
            got = f"{a.function.__name__}() was {a.expected!r} and then {b.expected!r}"  # type: ignore[union-attr]
            raise untraceable("int(), float() or a function of math takes a number that changes from step to step", got)
    paths.append(path)


def _merged(values: Values, variants: Sequence[OptimizerRecord], specs: Mapping[Key, Spec]) -> Outputs:
    """The outputs of an update in all variants. A slot that a variant lacks has the value that the variant leaves
    there."""
    each = [values_of(values, record, specs, _numbers_of(values, v)) for v, record in enumerate(variants)]
    result = each[-1]
    for v, outputs in reversed(list(enumerate(each[:-1]))):
        number = values.input(frozenset({(v, -1)}), Spec((), torch.float64))
        is_taken = values.op(aten.ne.Scalar, (number, 0), (), Spec((), torch.bool))
        result = {k: values.merge(is_taken, outputs.get(k, result[k]), result[k]) for k in result}
    return result


def _numbers_of(values: Values, variant: int) -> Callable[[int], UpdateValue]:
    return lambda index: values.input(frozenset({(variant, index)}), Spec((), torch.float64))


def scalars_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The slots of a parameter's state that are single numbers. A DTensor of one element is not: it is the state of a
    parameter of one element, and only some ranks know it."""
    return {
        slot: v.item() if isinstance(v, Tensor) else v
        for slot, v in state.items()
        if not isinstance(v, Tensor) or (v.numel() == 1 and not hasattr(v, "placements"))
    }


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


@dataclass(frozen=True, slots=True)
class InitialOptimizerState:
    """State of an optimizer that has taken steps already: the number of the last step, and tensors by name and slot.

    An optimizer that does not count its steps counts as having taken 1. A parameter that has taken no step has no
    entry.
    """

    num_steps: int
    tensors: Mapping[str, State]


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
        self._reader = SharedReader(optimizer, spec.reader.names, spec.reader.known)
        self._named = {named[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        self._members = {k: spec.members(k) for k in spec.leaders}
        self._kept: dict[str, Kept] = {}
        self.stepped: set[str] = set()
        self.read()

    def read(self) -> None:
        """Continue from the optimizer's present state."""
        state = self._optimizer.state
        self._begin_with({n: kept_of(state.get(p, {}), self._leaves(n)) for n, p in self._named.items()})

    def _leaves(self, name: str) -> Kept:
        """The state that a first step of a parameter leaves."""
        kind = self.spec.kinds[self.spec.kind_of[name]] if name in self.spec.kind_of else None
        return Kept(kind.slots, kind.kept) if kind is not None else Kept()

    def _begin_with(self, kept: Mapping[str, Kept]) -> None:
        """Parameters of the same kind with the same numbers share them from now on."""
        known: dict[Any, Kept] = {}
        self._kept = {n: known.setdefault((k, kept[n].shown), kept[n]) for n, k in self._leaders()}
        self._after: dict[str, Kept] = {}
        self._shared: Shared = {}
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
        if new := self._reader.added():
            raise OutdatedUpdate("the optimizer has options or attributes that are new", where=self.spec.name, got=new)
        self._after, changes, shared = {}, list[Shared](), self._reader.read()
        groups = {kind.group for kind in (*self.spec.kinds, *self.spec.idle)}
        of_group = {group: structure_and_leaves(self._reader, shared, group) for group in groups}
        for k, members in self._members.items():
            kind = self.spec.kinds[k]
            names = members if updated is None else [name for name in members if name in updated]
            step = kind.step(self._kept_by_all(names or members[:1]), *of_group[kind.group])
            if step is None:
                raise self._changed(kind, (names or members)[0])
            after = Kept(kind.slots, step.kept)
            self._after |= dict.fromkeys(names, after)
            changes.append(step.shared)
            numbers |= {f"update{k}.{i}": x for i, x in enumerate(kind.inputs_of(step))}
            fills |= {(slot, name): x for slot, x in step.fills.items() for name in names}
        for kind in self.spec.idle:
            step = kind.step(Kept(), *of_group[kind.group])
            if step is None:
                raise self._changed(kind, "(frozen)")
            changes.append(step.shared)
        self._shared = {}
        for place, value in (entry for its in changes for entry in its.items()):
            if repr(self._shared.setdefault(place, value)) != repr(value):
                raise self._changed(self.spec.kinds[0], f"{place[2]} = {value!r}")
        return numbers, fills

    def _kept_by_all(self, names: Collection[str]) -> Kept:
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
        self._reader.write(self._shared)
        self._after, self._shared = {}, {}

    def kept(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """What the optimizer's code keeps for some parameters beside their tensors, in its own form."""
        wanted = {*names}
        return {name: dict(kept.numbers) for name, kept in self._kept.items() if name in wanted}

    def values(self) -> dict[str, dict[str, float]]:
        """What the optimizer's code keeps for each parameter: step counts and the like, by parameter and slot.
        Parameters that have taken no step have nothing, if others of the kind have something."""
        shown = {name: scalars_of(kept.numbers) for name, kept in self._kept.items()}
        return {name: values for name, values in shown.items() if values or self._is_fresh(name)}

    def _is_fresh(self, name: str) -> bool:
        leaves = self._leaves(name)
        return name not in self.stepped and bool(leaves.tensors or leaves.numbers)

    def load(self, values: Mapping[str, Mapping[str, float]], num_steps: int) -> None:
        """Continue from the result of `values()` after so many steps."""

        def loaded(name: str) -> Kept:
            leaves = self._leaves(name)
            if not num_steps or (name in values and not values[name]):
                return Kept()
            numbers = values.get(name, {slot: num_steps for slot in leaves.numbers if slot == "step"})
            return Kept(leaves.tensors, {slot: number_like(v, leaves.numbers.get(slot)) for slot, v in numbers.items()})

        self._begin_with({name: loaded(name) for name, _ in self._leaders()})

    def _changed(self, kind: UpdateKind, name: str) -> OutdatedUpdate:
        return OutdatedUpdate(
            "the optimizer's options require another update than the compiled one",
            where=f"{self.spec.name}, param_groups[{kind.group}], parameter {name}",
            got="other operations in step(): an option was switched on or off (0 and nonzero differ)",
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
