"""A copy of a user's optimizer over tensors without data, whose `step()` is traced, and the numbers it starts from."""

from __future__ import annotations

import copy
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.optimizer_graph import Key, Outputs, UpdateValue, Values
from meshweave.capture.optimizer_groups import evaluates_loss, name_of, parts_of
from meshweave.capture.optimizer_tape import Number, Replay, Tape, line_of, untraceable
from meshweave.capture.optimizer_tracer import UpdateTracer, outputs_of
from meshweave.errors import CaptureError
from meshweave.interop.hooks import make_state
from meshweave.interop.storages import storage_key
from meshweave.ir.graph import Spec

# OptimizerOptions that choose among implementations of the same update: the plain loop over parameters is traced.
_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")
# What torch's schedulers keep in groups for themselves (torch/optim/lr_scheduler.py, swa_utils.py).
_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
_PLAIN = (bool, int, float, str, type(None))

# ("group", index of the group, option) or ("attribute", index of the optimizer, name); and an index in a tuple
Place = tuple[Any, ...]


def is_number(value: Any) -> bool:
    """Whether a value is an input of the tape: a Python number, or a tensor of a single number."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not isinstance(value, nn.Parameter)
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def form_of(value: Any) -> Any:
    """What of a number or switch must be as when a step was traced: all but the value of a number."""
    return (value.dtype if isinstance(value, Tensor) else "number") if is_number(value) else value


@cache  # importing what an optimizer needs is slow
def _unread() -> frozenset[str]:
    """Names that are no options: the list of parameters, and attributes that torch sets."""
    base = vars(torch.optim.Optimizer([torch.zeros(1)], {}))
    return frozenset({"params", "step", "_opt_called", *base, *_IMPLEMENTATIONS, *_OF_SCHEDULERS})


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    """The numbers and switches of an optimizer's groups and attributes: by place their forms, and the numbers."""

    forms: dict[Place, Any]
    numbers: dict[Place, Any]

    @staticmethod
    def of(optimizer: torch.optim.Optimizer) -> OptimizerOptions:
        """The present options."""
        options = OptimizerOptions({}, {})
        for i, group in enumerate(optimizer.param_groups):
            options._read(("group", i), group)
        for j, part in enumerate(parts_of(optimizer)):
            options._read(("attribute", j), vars(part))
        return options

    def _read(self, key: tuple[str, int], container: Mapping[str, Any]) -> None:
        unread, forms, numbers = _unread(), self.forms, self.numbers
        for name, value in container.items():
            if name in unread:
                continue
            for place, x in _leaves((*key, name), value):
                if is_number(x):
                    numbers[place] = x
                if place in numbers or isinstance(x, _PLAIN):
                    forms[place] = form_of(x)


def _leaves(place: Place, value: Any) -> Iterator[tuple[Place, Any]]:
    if type(value) in (tuple, list):
        yield from (((*place, i), x) for i, x in enumerate(value))
    else:
        yield place, value


@dataclass(frozen=True, slots=True)
class ParameterState:
    """State of a parameter between steps: its tensors, by slot, and the values that the optimizer's code computes
    itself (step counts, 0-dim tensors)."""

    tensors: Mapping[str, Spec] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def form(self) -> tuple[Any, ...]:
        """All but the values of numbers, and the sizes of tensors."""
        return tuple(sorted(self.tensors)), tuple((slot, form_of(self.numbers[slot])) for slot in sorted(self.numbers))

    @property
    def shown(self) -> str:
        """What distinguishes the state of two parameters of the same kind, whose shapes may differ."""
        numbers = {k: v.item() if isinstance(v, Tensor) else v for k, v in self.numbers.items()}
        return f"{sorted(self.tensors)} {sorted(numbers.items())}"


@dataclass(frozen=True, slots=True, eq=False)
class NumberPath:
    """The numbers of a traced step. A step that begins with state of the form `start`, and in which all guards hold,
    takes this path. `replay` returns the numbers of its graph, what fresh state is filled with (by `fills`), and the
    numbers of state after the step (by `kept`)."""

    start: tuple[Any, ...]
    replay: Replay
    fills: tuple[str, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """What a traced step does to a parameter, and its state after it."""

    path: NumberPath
    outputs: Outputs
    after: ParameterState

    def equals(self, other: TracedStep) -> bool:
        """Whether every step does the same."""
        return self.path is other.path and self.outputs == other.outputs


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
        self.values, self.options = Values(), OptimizerOptions.of(optimizer)
        self._rows: dict[Any, UpdateValue] = {}
        self._replays: dict[Any, Replay] = {}
        self._paths: dict[Any, NumberPath] = {}
        self._state: defaultdict[Any, Any] = defaultdict(dict)
        memo |= {id(part.state): self._state for part in parts_of(optimizer)}
        with _errors(self.name):
            self._parts = [self._copied(part, memo) for part in parts_of(optimizer)]
        groups = [group for part in self._parts for group in part.param_groups]
        self._containers: dict[tuple[str, int], dict[str, Any]] = {("group", i): g for i, g in enumerate(groups)}
        self._containers |= {("attribute", j): vars(part) for j, part in enumerate(self._parts)}
        for container in self._containers.values():
            container.update({k: False for k in _IMPLEMENTATIONS if k in container})

    def _copied(self, optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
        own = memo[id(optimizer)] = object.__new__(type(optimizer))
        attributes = {k: v for k, v in vars(optimizer).items() if k not in ("state", "step")}
        own.__dict__.update(copy.deepcopy(attributes, memo), state=self._state)
        return own  # type: ignore[no-any-return]

    def trained(self) -> list[str]:
        return [name for name, param in self.params.items() if param.requires_grad]

    def trace(self, starts: Mapping[str, ParameterState]) -> dict[str, TracedStep]:
        """A step of all trained parameters from their state, by parameter. CaptureError if it cannot be traced."""
        tape = Tape(self.group_of)
        tracer = UpdateTracer(self.values, tape, self._rows)
        self._put_options(tape)
        self._state.clear()
        begun = {name: self._begin(name, start, tracer) for name, start in starts.items()}
        before = self._shown()
        with _errors(self.name):
            with tracer.running():
                for part in self._parts:
                    make_state(part)
                    part.step()
            if tracer.refusal is not None:
                raise tracer.refusal
            after = self._shown()
            if changed := [place for place in {**before, **after} if before.get(place) != after.get(place)]:
                raise untraceable("the optimizer changes an option or attribute of its own", changed[0], self.name)
            if others := [key for key in self._state if not isinstance(key, Tensor)]:
                raise untraceable("the optimizer keeps state of no parameter", f"state[{others[0]!r}]", self.name)
            return {name: self._step(name, start, begun[name], tracer) for name, start in starts.items()}

    def _put_options(self, tape: Tape) -> None:
        for key, container in self._containers.items():
            owner = key[1] if key[0] == "group" else None
            for name, value in [(name, value) for name, value in container.items() if name not in _unread()]:
                leaves = [
                    tape.input(place, self.options.numbers[place], owner) if place in self.options.numbers else x
                    for place, x in _leaves((*key, name), value)
                ]
                container[name] = type(value)(leaves) if type(value) in (tuple, list) else leaves[0]

    def _begin(self, name: str, start: ParameterState, tracer: UpdateTracer) -> set[Key]:
        """Give the optimizer a parameter, its gradient and its state; returns their keys."""
        param = self.params[name]
        param.grad = torch.empty_like(param, requires_grad=False)
        tensors: dict[Key, Tensor] = {("param", ""): param, ("grad", ""): param.grad}
        tensors |= {("state", s): torch.empty(x.shape, dtype=x.dtype, device="meta") for s, x in start.tensors.items()}
        for key, x in tensors.items():
            tracer.know(x, self.values.input(key, Spec(tuple(x.shape), x.dtype)), name)
        if start.tensors or start.numbers:
            state = self._state[param]
            state |= {slot: x for (kind, slot), x in tensors.items() if kind == "state"}
            for slot, x in start.numbers.items():
                state[slot] = tracer.tape.input(slot, x, name) if is_number(x) else x
        return {*tensors}

    def _step(self, name: str, start: ParameterState, begun: set[Key], tracer: UpdateTracer) -> TracedStep:
        """What a step did to a parameter."""
        param, tape = self.params[name], tracer.tape
        tensors, numbers = {("param", ""): param}, dict[str, Any]()
        for slot, value in self._state.get(param, {}).items():
            if tracer.find(value) is not None:
                tensors["state", slot] = value
            elif value is not None:
                numbers[slot] = _number(tape, value, f"state['{slot}'] of {name}")
        slots = {slot for kind, slot in tensors if kind == "state"}
        if (start.tensors or start.numbers) and (other := slots ^ start.tensors.keys()):
            what = "the optimizer creates or removes a state tensor after its first step"
            raise untraceable(what, f"'{min(other)}' of {name}", self.name)
        memory = [*map(storage_key, tensors.values()), *(id(x) for x in numbers.values() if isinstance(x, Tensor))]
        refs = [ref.index for x in numbers.values() if isinstance(x, Tensor) and (ref := tape.ref_of(x))]
        if len(memory) != len({*memory}) or len(refs) != len({*refs}):
            raise untraceable("the optimizer keeps two values in one memory", f"state of {name}", self.name)
        outputs, fills = outputs_of(tracer, tensors, begun)
        results = (
            tuple(tracer.numbers.get(name, ())),
            tuple(fills.values()),
            tuple(tape.refs(x) for x in numbers.values()),
        )
        replay = tape.replay(name, results, self._replays)
        key = start.form, id(replay), tuple(fills), tuple(numbers)
        path = self._paths.setdefault(key, NumberPath(start.form, replay, tuple(fills), tuple(numbers)))
        specs = {slot: Spec(tuple(x.shape), x.dtype) for (kind, slot), x in tensors.items() if kind == "state"}
        return TracedStep(path, outputs, ParameterState(specs, {slot: _now(tape, x) for slot, x in numbers.items()}))

    def _shown(self) -> dict[str, str]:
        """The contents of options and attributes, as text."""
        unread = _unread()
        return {
            f"{kind} {index}: {name}": _text(value)
            for (kind, index), container in self._containers.items()
            for name, value in container.items()
            if name not in unread
        }


def _text(value: Any) -> str:
    if isinstance(value, nn.Module):  # of which a step may only change parameters
        return str(id(value))
    is_object = hasattr(value, "__dict__") and not isinstance(value, (Tensor, type)) and type(value) is not Number
    return f"{value!r} {vars(value) if is_object else ''}"


def _number(tape: Tape, value: Any, where: str) -> Any:
    """A value of state after a step that is no tensor of the graph."""
    is_tensor = isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta
    if not is_tensor and type(value) is not Number and type(value) not in (bool, int, float):
        got = f"a {type(value).__name__}"
        raise untraceable("the optimizer keeps a value that is no number and no tensor of a parameter", got, where)
    return value


def _now(tape: Tape, value: Any) -> Any:
    """The value in this run."""
    if type(value) is Number:
        return value.value
    return value.clone() if isinstance(value, Tensor) else value


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Turns an error of the traced optimizer into a CaptureError with its line, or into a PlanError if its step() calls
    a closure."""
    try:
        yield
    except CaptureError as error:
        raise untraceable(error.what, error.got, error.where or line_of(error)) from error
    except Exception as error:
        if "closure" in (traceback.extract_tb(error.__traceback__)[-1].line or ""):
            raise evaluates_loss(name, line_of(error), f"{type(error).__name__}: {error}") from error
        what = f"the step of the optimizer {name} cannot be captured"
        raise CaptureError(what, where=line_of(error), got=f"{type(error).__name__}: {error}") from error
