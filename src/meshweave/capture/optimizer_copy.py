"""A copy of a user's optimizer over tensors without data, whose `step()` is traced, and the numbers it starts from."""

from __future__ import annotations

import copy
import io
import pickle
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.optimizer_groups import name_of, parts_of
from meshweave.capture.optimizer_tape import Number, Tape, TapeRef, line_of, untraceable
from meshweave.capture.optimizer_tracer import Key, OptimizerRecord, UpdateTracer
from meshweave.errors import CaptureError, MeshweaveError
from meshweave.interop.optimizer import make_state
from meshweave.interop.storages import version_of
from meshweave.ir.graph import Spec

# Options that choose among implementations of the same update: the plain loop over parameters is traced.
_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")
# What torch's schedulers keep in groups for themselves (torch/optim/lr_scheduler.py, swa_utils.py).
_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
_SWITCHES = (bool, str, type(None))

# ("group", index of the group, option) or ("attribute", index of the optimizer, name)
Place = tuple[str, int, str]
Shared = dict[Place, Any]  # values of groups and attributes that are numbers, switches or tuples of them
Leaves = dict[tuple[Any, ...], Any]  # each number and 0-dim tensor, by place and index in a tuple, or by slot


def is_number(value: Any) -> bool:
    """Whether a value is an input of the tape: a Python number, or a tensor of a single number."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not isinstance(value, nn.Parameter)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a switch, or a list or tuple of these and of tuples of them. A list in a list is
    not: `step()` could write into the user's own."""
    if type(value) in (tuple, list):
        return all(type(x) is not list and _is_plain(x) for x in value)
    return is_number(value) or isinstance(value, _SWITCHES)


@cache  # importing what an optimizer needs is slow
def _unread() -> frozenset[str]:
    """Names that are no options: the list of parameters, and attributes that torch sets."""
    base = vars(torch.optim.Optimizer([torch.zeros(1)], {}))
    return frozenset({"params", "step", "_opt_called", *base, *_IMPLEMENTATIONS, *_OF_SCHEDULERS})


def leaves_of(key: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The numbers and switches of a value, each by its own key."""
    if type(value) in (tuple, list):
        yield from (((*key, i), x) for i, x in enumerate(value))
    else:
        yield key, value


def structure_of(leaves: Iterable[tuple[tuple[Any, ...], Any]]) -> tuple[Any, ...]:
    """What of numbers and switches must be as when a step was traced: all but the values of numbers."""
    return tuple((key, (x.dtype if isinstance(x, Tensor) else "number") if is_number(x) else x) for key, x in leaves)


@dataclass(slots=True)
class SharedReader:
    """Reads the numbers and switches of an optimizer's groups and attributes: those that it had when it was compiled,
    and those that its own step adds. Others are not seen."""

    optimizer: torch.optim.Optimizer
    names: dict[tuple[str, int], dict[str, None]] = field(default_factory=dict)
    known: dict[tuple[str, int], set[str]] = field(default_factory=dict)  # names of all options and attributes
    part_of: list[int] = field(default_factory=list)  # of each group, the index of its optimizer

    def __post_init__(self) -> None:
        for key, values in self._containers().items() if not self.names else ():
            self.known[key] = {*values}
            chosen = (name for name, value in values.items() if _is_plain(value) and name not in _unread())
            self.names[key] = dict.fromkeys(chosen)
        self.part_of = [j for j, part in enumerate(parts_of(self.optimizer)) for _ in part.param_groups]

    def _containers(self) -> dict[tuple[str, int], dict[str, Any]]:
        groups = {("group", i): group for i, group in enumerate(self.optimizer.param_groups)}
        return groups | {("attribute", j): vars(part) for j, part in enumerate(parts_of(self.optimizer))}

    def of_group(self, group: int) -> list[tuple[str, int]]:
        """The containers that the update of a group reads."""
        return [("group", group), ("attribute", self.part_of[group])]

    def read(self) -> Shared:
        """The present values."""
        containers = self._containers()
        return {
            (*key, name): containers[key][name]
            for key, names in self.names.items()
            for name in names
            if key in containers and name in containers[key]
        }

    def added(self) -> str:
        """An option or attribute that is new since the optimizer was compiled."""
        for key, container in self._containers().items():
            if new := container.keys() - self.known.get(key, ()) - self.names.get(key, {}).keys() - _unread():
                return f"{key[0]} {key[1]}: {', '.join(sorted(new))}"
        return ""

    def write(self, values: Shared) -> None:
        """Set values after a step in the user's optimizer."""
        containers = self._containers()
        for (kind, index, name), value in values.items():
            now = containers[kind, index].get(name)
            if isinstance(now, Tensor):
                now.copy_(value)
            else:
                containers[kind, index][name] = value


@dataclass(frozen=True, slots=True)
class Kept:
    """State of a parameter between steps: its tensors, by slot, and the values that the optimizer's code computes
    itself (step counts, 0-dim tensors)."""

    tensors: Mapping[str, Spec] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def structure(self) -> tuple[Any, ...]:
        return tuple(sorted(self.tensors)), structure_of(sorted(((slot,), x) for slot, x in self.numbers.items()))

    @property
    def shown(self) -> str:
        """What distinguishes the state of two parameters of the same kind, whose shapes may differ."""
        numbers = {k: v.item() if isinstance(v, Tensor) else v for k, v in self.numbers.items()}
        return f"{sorted(self.tensors)} {sorted(numbers.items())}"


@dataclass(slots=True)
class TracedStep:
    """A traced step of some parameters. `inputs` are the keys of the tape's inputs; `left` and `changed` have
    references to the tape in place of numbers, `after` and `changed_now` their values in this run."""

    tracer: UpdateTracer
    inputs: list[tuple[Any, ...]]
    left: dict[str, Kept]
    changed: Shared
    owners: dict[int, str]

    @property
    def record(self) -> OptimizerRecord:
        return self.tracer.record

    @property
    def tape(self) -> Tape:
        return self.tracer.tape

    def now(self, x: Any) -> Any:
        """The value in this run."""
        if type(x) in (tuple, list):
            return type(x)(map(self.now, x))
        value = self.tape.values[x.index] if isinstance(x, TapeRef) else x
        return value.clone() if isinstance(value, Tensor) else value

    def after(self, name: str) -> Kept:
        left = self.left[name]
        return Kept(left.tensors, {slot: self.now(x) for slot, x in left.numbers.items()})

    @property
    def changed_now(self) -> Shared:
        return {place: self.now(x) for place, x in self.changed.items()}


class OptimizerCopy:
    """A copy of `optimizer`. `names`: id of a parameter -> its name."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        self.name, self.params, self.group_of = name_of(optimizer), dict[str, nn.Parameter](), dict[str, int]()
        memo: dict[int, Any] = {}
        for index, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                stand_in = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
                stand_in.__dict__.update(vars(p))  # attributes of users: its own learning rate, no weight decay
                memo[id(p)] = self.params[names[id(p)]] = stand_in
                self.group_of[names[id(p)]] = index
        self.reader = SharedReader(optimizer)
        self._state: defaultdict[Any, Any] = defaultdict(dict)
        memo |= {id(part.state): self._state for part in parts_of(optimizer)}
        with _errors(self.name):
            self._parts = [self._copied(part, memo) for part in parts_of(optimizer)]
        self._groups = [list(part.param_groups) for part in self._parts]
        own = [*(group for groups in self._groups for group in groups), *map(vars, self._parts)]
        keys = [("group", i) for i in range(len(own) - len(self._parts))]
        keys += [("attribute", j) for j in range(len(self._parts))]
        self._containers: dict[tuple[str, int], dict[str, Any]] = dict(zip(keys, own, strict=True))
        for container in own:
            container.update({k: False for k in _IMPLEMENTATIONS if k in container})
        self._base = {key: dict(container) for key, container in self._containers.items()}

    def _copied(self, optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
        own = memo[id(optimizer)] = object.__new__(type(optimizer))
        attributes = {k: v for k, v in vars(optimizer).items() if k not in ("state", "step")}
        own.__dict__.update(copy.deepcopy(attributes, memo), state=self._state)
        return own  # type: ignore[no-any-return]

    def trained(self) -> list[str]:
        return [name for name, param in self.params.items() if param.requires_grad]

    def trace(self, starts: Mapping[str, Kept], shared: Shared, has_grads: bool = True) -> TracedStep:
        """A step of some parameters from their state, with these values of groups and attributes."""
        tracer = UpdateTracer()
        groups = {self.group_of[name] for name in starts}
        self._begin([*starts], has_grads)
        inputs: list[tuple[Any, ...]] = []

        def stand_in(key: tuple[Any, ...], value: Any) -> Any:
            if not is_number(value):
                return value
            inputs.append(key)
            return tracer.tape.input(value)

        begun: Shared = {}
        for kind, index, name in (place for place in shared if self._is_read(place, groups)):
            value = shared[kind, index, name]
            leaves = [stand_in(key, x) for key, x in leaves_of((kind, index, name), value)]
            begun[kind, index, name] = type(value)(leaves) if type(value) in (tuple, list) else leaves[0]
            self._containers[kind, index][name] = begun[kind, index, name]
        owners: dict[int, str] = {}
        for name, start in starts.items():
            param, state = self.params[name], self._state
            tensors = {s: torch.empty(x.shape, dtype=x.dtype, device="meta") for s, x in start.tensors.items()}
            if start.tensors or start.numbers:
                state[param] |= tensors | {slot: stand_in((slot,), x) for slot, x in start.numbers.items()}
            own: dict[Key, Tensor] = {("param", 0, ""): param}
            own |= {("grad", 0, ""): param.grad} if param.grad is not None else {}
            own |= {("state", 0, slot): x for slot, x in tensors.items()}
            owners |= {tracer.know(x): name for x in own.values()}
            if len(starts) == 1:
                tracer.record.inputs |= {key: tracer.know(x) for key, x in own.items()}
        before = self._forms()
        with _errors(self.name):
            with tracer.running():
                for part in self._parts:
                    if part.param_groups:
                        make_state(part)
                        part.step()
            if before != self._forms():
                raise untraceable("the optimizer changes an attribute that is no number", where=self.name)
            left = {name: self._left(name, tracer, len(starts) == 1) for name in starts}
            return TracedStep(tracer, inputs, left, self._changed(tracer.tape, begun, groups), owners)

    def _is_read(self, place: Place, groups: set[int]) -> bool:
        return any(place[:2] in self.reader.of_group(i) for i in groups)

    def _begin(self, names: Sequence[str], has_grads: bool) -> None:
        """Give the optimizer only some parameters, without state, and the options that it was copied with."""
        self._state.clear()
        for key, container in self._containers.items():
            container.clear()
            container.update(self._base[key])
        first = 0
        for part, groups in zip(self._parts, self._groups, strict=True):
            for i, group in enumerate(groups, first):
                group["params"] = [self.params[n] for n in names if self.group_of[n] == i]
            part.param_groups = [group for group in groups if group["params"]]
            first += len(groups)
        for name in names:
            param = self.params[name]
            param.grad = torch.empty_like(param, requires_grad=False) if has_grads else None

    def _left(self, name: str, tracer: UpdateTracer, is_alone: bool) -> Kept:
        """The state after a step, and the outputs of its record."""
        param, tape, tensors, numbers = self.params[name], tracer.tape, dict[str, Spec](), dict[str, Any]()
        outputs = {("param", 0, ""): tracer.know(param)}
        for slot, value in self._state.get(param, {}).items():
            if tracer.is_known(value):
                tensors[slot] = Spec(tuple(value.shape), value.dtype)
                outputs["state", 0, slot] = tracer.know(value)
            elif value is not None:
                numbers[slot] = _operand(tape, value, f"state['{slot}']")
        refs = [x for x in numbers.values() if isinstance(x, TapeRef) and isinstance(tape.values[x.index], Tensor)]
        if is_alone:
            tracer.record.outputs |= outputs
        if len(refs) != len(set(refs)) or (is_alone and tracer.shared_memory()):
            raise untraceable("the optimizer keeps two values in one memory", f"state of {name}", self.name)
        return Kept(tensors, numbers)

    def _changed(self, tape: Tape, begun: Shared, groups: set[int]) -> Shared:
        """The values of groups and attributes that a step has changed."""
        if others := [key for key in self._state if not isinstance(key, Tensor)]:
            raise untraceable("the optimizer keeps state of no parameter", f"state[{others[0]!r}]", self.name)
        changed: Shared = {}
        for key, container in self._containers.items():
            for name in (name for name in {**self._base[key], **container} if name not in _unread()):
                place, value = (*key, name), container.get(name)
                start = begun.get(place, self._base[key].get(name))
                is_written = isinstance(value, Tensor) and (ref := tape.ref_of(value)) and ref.index >= tape.num_inputs
                is_same = (value is start and not is_written) or (
                    type(value) in (tuple, list) and _are_same(value, start)
                )
                if is_same and name in container:
                    continue
                if isinstance(value, _SWITCHES) or name not in container:
                    raise untraceable("the optimizer changes a switch", f"{name} = {value!r}", self.name)
                changed[place] = _operand(tape, value, name)
                self.reader.names[key].setdefault(name)
        return changed

    def _forms(self) -> list[bytes]:
        """The contents of options and attributes that are no numbers or switches."""
        own = {id(x) for x in (self._state, *self._parts, *self._containers.values())}
        own |= {id(part.param_groups) for part in self._parts}
        values = (v for c in self._containers.values() for k, v in c.items() if k not in _unread() and not _is_plain(v))
        return [_form(value, own) for value in values if type(value) is not Number]


def _are_same(value: Any, start: Any) -> bool:
    return type(start) is type(value) and len(start) == len(value) and all(map(lambda a, b: a is b, value, start))


def _operand(tape: Tape, value: Any, where: str) -> Any:
    """A value after a step, with references to the tape."""
    if type(value) in (tuple, list):
        return type(value)(_operand(tape, x, where) for x in value)
    if (ref := tape.ref_of(value)) is not None:
        return ref
    if type(value) is Number or not (isinstance(value, (int, float)) or type(value) in _SWITCHES):
        what = "a number from values of tensors" if type(value) is Number else f"a {type(value).__name__}"
        raise untraceable("the optimizer keeps a value that is no number and no tensor of a parameter", what, where)
    return value


def _form(value: Any, own: set[int]) -> bytes:
    """The contents of a value, for comparison; nothing for one that pickle does not take."""
    stream = io.BytesIO()
    pickler = _FormPickler(stream)
    pickler.own = own
    try:
        pickler.dump(value)
    except Exception:  # whatever the code of users' classes raises
        return b""
    return stream.getvalue()


class _FormPickler(pickle.Pickler):
    own: set[int]

    def persistent_id(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return id(x), version_of(x) if not isinstance(x, nn.Parameter) else 0
        is_opaque = isinstance(x, (type, types.FunctionType, types.MethodType, types.ModuleType))
        return id(x) if is_opaque or id(x) in self.own else None


class _errors:
    """Turns an error of the traced optimizer into a CaptureError with its line."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, MeshweaveError):
            what = f"the step of the optimizer {self.name} cannot be captured"
            raise CaptureError(what, where=line_of(error), got=f"{type(error).__name__}: {error}") from error
