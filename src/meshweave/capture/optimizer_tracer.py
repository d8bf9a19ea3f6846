"""Traces an optimizer's own `step()`: which ops on which tensors, with which numbers.

Parameters, gradients and state tensors are on the meta device. Numbers are on a tape (`optimizer_tape`); those that are
passed to ops are separate from the ops in a record, because they differ from step to step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshweave.capture.optimizer_arithmetic import ARITHMETIC, base_of
from meshweave.capture.optimizer_tape import Number, Tape, TapeRef, untraceable
from meshweave.interop import pytree
from meshweave.interop.fake import DispatchMode
from meshweave.interop.ops import arguments_of, operator_name
from meshweave.interop.storages import storage_key
from meshweave.ir.traits import is_random

aten = torch.ops.aten

_META = torch.device("meta")
_TENSOR: Any = Tensor
_SET_DATA: Any = _TENSOR.data.__set__
_FILLS = {aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros,
          aten.ones, aten.full}  # fmt: skip
_CREATORS = {torch.zeros, torch.ones, torch.full}
_FILL_VALUES: Mapping[str, float] = {"zeros_like": 0.0, "ones_like": 1.0, "new_zeros": 0.0, "new_ones": 1.0,
                                     "zeros": 0.0, "ones": 1.0}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of a record, by its number."""

    index: int


@dataclass(frozen=True, slots=True)
class Num:
    """A number that the code passes to an op, by its index among the numbers of a record."""

    index: int


@dataclass(frozen=True, slots=True)
class OptimizerCall:
    """An op on stand-ins. `results`: the tensors that it returns, and their dtypes."""

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[Ref, ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class NumRef(Ref):
    """A 0-dim tensor of a record in the place of a number."""


Key = tuple[str, int, str]  # ("param" | "grad" | "state", number of the parameter, slot or "")
Operand = TapeRef | float  # a number of a tape, or a constant


@dataclass(slots=True)
class OptimizerRecord:
    """What a run did. `inputs` and `outputs` name tensors; `numbers` are in the order of their first use."""

    inputs: dict[Key, int] = field(default_factory=dict)
    calls: list[OptimizerCall] = field(default_factory=list)
    numbers: list[Operand] = field(default_factory=list)
    outputs: dict[Key, int] = field(default_factory=dict)

    def num(self, operand: Operand) -> Num:
        """A number on the tape is a number once, however often it is used."""
        if operand not in self.numbers or not isinstance(operand, TapeRef):
            self.numbers.append(operand)
        return Num(len(self.numbers) - 1 if not isinstance(operand, TapeRef) else self.numbers.index(operand))

    @property
    def signature(self) -> tuple[Any, ...]:
        """Everything that must not change from step to step."""
        return tuple(sorted(self.inputs.items())), tuple(self.calls), tuple(sorted(self.outputs.items()))


class _Functions(TorchFunctionMode):
    """Sees what the code calls: functions of numbers run on the tape, others on stand-ins with tags for numbers."""

    def __init__(self, tracer: UpdateTracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer, kwargs = self.tracer, kwargs or {}
        if not any(map(tracer.is_of_tensors, pytree.tree_leaves((list(args), list(kwargs.values()))))):
            own = {k: v for k, v in kwargs.items() if not (k == "device" and v == _META)}  # beside a parameter
            if func in _CREATORS and _has_dims(args, kwargs):
                return tracer.tagged(func, args, {**own, "device": _META})
            return tracer.tape.call(func, args, own)
        if func == _SET_DATA:
            return tracer.assign(*args)
        if func is Tensor.item:
            return Number(tracer.tape, 1.0, None, args[0].to(torch.float64).reshape(()))
        if func in (Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.tolist):
            raise untraceable("control flow, or a number of Python, depends on values of tensors", func.__name__)
        if func is Tensor.__setitem__:
            return self._set(*args)
        if func in (torch.where, Tensor.where) and len(args) == 3:
            args = self._as_tensors(args)
        return tracer.tagged(func, args, kwargs)

    def _as_tensors(self, args: Sequence[Any]) -> list[Any]:
        """Operands with a 0-dim tensor for a number: `torch.where` would put it on the meta device."""
        like = next((x for x in args if isinstance(x, Tensor) and x.is_floating_point()), None)
        if like is None:
            return list(args)
        return [
            x if isinstance(x, Tensor) else self.tracer.tape.call(torch.full, ((), x), {"dtype": like.dtype})
            for x in args
        ]

    def _set(self, x: Tensor, index: Any, value: Any) -> None:
        """x[index] = value, as the op that it is for a mask and a number."""
        with self:
            if self.tracer.is_of_tensors(index) and index.dtype == torch.bool and not isinstance(value, Tensor):
                x.masked_fill_(index, value)
            else:
                x[index].copy_(value if isinstance(value, Tensor) else torch.full_like(x[index], value))


def _has_dims(args: Any, kwargs: Any) -> bool:
    size = args[0] if args else kwargs.get("size", ())
    return isinstance(size, int) or len(size) > 0


class UpdateTracer(DispatchMode):
    """Records a run on tensors of the meta device that it knows, with the tape of its numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.record, self.tape = OptimizerRecord(), Tape()
        self._refs: dict[int, int] = {}  # id of a tensor -> its number
        self._alive: list[Tensor] = []  # keeps ids unique
        self._aliases: list[Tensor] = []
        # Numbers and 0-dim tensors of the function that runs: torch passes their tags on to ops. By tag, or by id.
        self._tags: dict[Any, Number | Tensor] = {}

    def know(self, tensor: Tensor) -> int:
        """The number of a tensor, a new number for a new tensor."""
        if id(tensor) not in self._refs:
            self._refs[id(tensor)] = len(self._alive)
            self._alive.append(tensor)
        return self._refs[id(tensor)]

    def is_known(self, x: Any) -> bool:
        return isinstance(x, Tensor) and id(x) in self._refs

    def is_of_tensors(self, x: Any) -> bool:
        """Whether a value depends on parameters, gradients or their state."""
        return x.tensor is not None if type(x) is Number else self.is_known(x)

    def assign(self, tensor: Tensor, value: Tensor) -> None:
        """`tensor.data = value`: from now on both are the same tensor."""
        if not self.is_known(value) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            raise untraceable("the optimizer assigns other data to a tensor than values of its form", str(value.dtype))
        self._refs[id(tensor)] = self._refs[id(value)]

    def shared_memory(self) -> list[tuple[str, str]]:
        """Pairs of outputs, by slot (of a parameter: ""), that share memory when the run ends."""
        memory = {key[2]: storage_key(self._alive[i]) for key, i in self.record.outputs.items() if key[0] != "grad"}
        return [(a, b) for a, b in combinations(memory, 2) if memory[a] == memory[b]]

    @contextmanager
    def running(self) -> Iterator[None]:
        with torch.no_grad(), _Functions(self), self:
            yield

    def tagged(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function of torch with tags instead of numbers, by which its ops are told which numbers they take."""
        self._tags = {}
        try:
            args, kwargs = pytree.tree_map(self._tag, (args, kwargs))
            return func(*args, **kwargs)
        finally:
            self._tags = {}

    def _tag(self, x: Any) -> Any:
        if type(x) is not Number and (not isinstance(x, Tensor) or self.tape.ref_of(x) is None):
            return x
        is_integer = not x.is_floating_point() if isinstance(x, Tensor) else isinstance(x.value, int)
        tag: float = (1 << 40) + len(self._tags) if is_integer else 2.0 ** -(60 + len(self._tags))
        self._tags[tag] = x
        if not isinstance(x, Tensor):
            return tag
        stand_in = torch.full_like(x, tag)
        if stand_in.item() != tag:
            raise untraceable("the optimizer computes with a number of a small dtype", str(x.dtype))
        self._tags[id(stand_in)] = x
        self._aliases.append(stand_in)
        return stand_in

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(map(self._holds_known, (*args, *kwargs.values()))):
            is_creation = func.overloadpacket in _FILLS and kwargs.get("device") == _META
            return self._written(func, args, kwargs) if is_creation else func(*args, **kwargs)
        if func is aten.detach.default:
            result = func(args[0])
            self._refs[id(result)] = self._refs[id(args[0])]
            self._aliases.append(result)
            return result
        if is_random(func):
            raise untraceable("the optimizer draws random numbers", str(func))
        if func is aten._local_scalar_dense.default:
            raise untraceable("control flow, or a number of Python, depends on values of tensors", "item()")
        if operator_name(func).startswith("_foreach_"):
            raise untraceable("the optimizer calls ops on lists of tensors", str(func))
        return self._written(func, args, kwargs)

    def _holds_known(self, x: Any) -> bool:
        return id(x) in self._refs or (isinstance(x, (list, tuple)) and any(map(self._holds_known, x)))

    def _written(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an op, which is recorded."""
        formal = arguments_of(func)
        written = [
            kwargs.get(a.name, x) for a, x in zip_longest(formal, args) if a.alias_info and a.alias_info.is_write
        ]
        if any(isinstance(x, Tensor) and not self.is_known(x) for x in written):
            raise untraceable("the optimizer writes values of tensors into a number", str(func))
        names = (a.name for a in formal)
        described = tuple(self._described(func, n, x) for n, x in zip(names, args, strict=False))
        options = tuple(
            (n, self._described(func, n, x)) for n, x in kwargs.items() if n not in ("device", "pin_memory")
        )
        args, kwargs = pytree.tree_map(self._without_data, (args, kwargs))
        result = func(*args, **kwargs)
        outs = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        refs = tuple(Ref(self.know(x)) for x in outs)
        self.record.calls.append(OptimizerCall(func, described, options, refs, tuple(x.dtype for x in outs)))
        return result

    def _without_data(self, x: Any) -> Any:
        if isinstance(x, Tensor) and not self.is_known(x):
            return torch.empty(x.shape, dtype=x.dtype, device="meta")
        return x

    def _described(self, func: Any, name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(self._described(func, name, x) for x in value)
        if self.is_known(value):
            return Ref(self._refs[id(value)])
        number: Any = self._tags.get(id(value) if isinstance(value, Tensor) else value if _is_plain(value) else None)
        if isinstance(value, Tensor) and number is None and value.numel() == 1 and value.device.type != "meta":
            return self.record.num(float(value))  # created by a function of torch itself, from constants
        if isinstance(value, Tensor) and number is None:
            shape = f"{value.dtype} of shape {tuple(value.shape)} in {func}"
            raise untraceable(
                "the optimizer uses a tensor that is not a parameter, gradient or state of its own", shape
            )
        if number is None:
            is_number = _is_plain(value) and _takes_numbers(func, name)
            return self.record.num(float(value)) if is_number and not _is_power(func, value) else value
        if isinstance(number, Tensor):  # it may be written later
            number = self.tape.call(Tensor.item, (number,), {})
        if number.tensor is not None:
            if not _takes_numbers(func, name):
                raise untraceable("a number of Python depends on values of tensors", str(func))
            return NumRef(self.know(number.tensor))
        if not _takes_numbers(func, name) or _is_power(func, number.value):
            return type(self.tape.values[number.ref.index])(number)  # the only value of this variant
        return self.record.num(number.ref)

    def runs(self, owner: dict[int, str]) -> dict[str, tuple[Any, ...]]:
        """What was done to each parameter: ops and numbers. `owner`: number of a tensor -> its parameter.
        Raises CaptureError for an op that takes tensors of two parameters."""
        done: dict[str, list[Any]] = {name: [] for name in owner.values()}
        for call in self.record.calls:
            leaves = pytree.tree_leaves((call.args, call.kwargs))
            owners = sorted({owner[x.index] for x in leaves if isinstance(x, Ref) and x.index in owner})
            if len(owners) > 1:
                got = f"{call.func} of {owners[0]} and {owners[1]}"
                raise untraceable("the optimizer combines the values of several parameters in an update", got)
            owner.update((ref.index, owner_of) for ref in call.results for owner_of in owners)
            used = (self.value_of(self.record.numbers[x.index]) for x in leaves if isinstance(x, Num))
            for name in owners:
                done[name] += [call.func, *used]
        return {name: tuple(calls) for name, calls in done.items()}

    def value_of(self, operand: Operand) -> float:
        """A number of this run."""
        return float(self.tape.values[operand.index]) if isinstance(operand, TapeRef) else operand


def _is_plain(value: Any) -> bool:
    return type(value) in (int, float)


def _is_power(func: Any, value: Any) -> bool:
    """Whether an integer is an exponent, which selects what is computed."""
    return base_of(func) == "pow" and isinstance(value, int)


@cache
def _number_places(func: Any) -> frozenset[str]:
    """The arguments of an op that may be other numbers in every step, and do not select what is computed."""
    if base_of(func) not in ARITHMETIC:
        return frozenset()
    kinds = {a.name: str(a.type).removeprefix("Optional[").rstrip("]") for a in arguments_of(func)}
    return frozenset(name for name, kind in kinds.items() if kind in ("number", "Scalar", "Tensor", "float"))


def _takes_numbers(func: Any, name: str) -> bool:
    return name in _number_places(func)


def prepared(record: OptimizerRecord) -> tuple[OptimizerRecord, dict[str, Operand]]:
    """The record without the ops that fill fresh state with a single number: these tensors become inputs, and the
    numbers are returned by slot. Its tensors and numbers are renumbered, so that equal runs have equal records."""
    labels: dict[int, Key] = {index: key for key, index in record.inputs.items()}
    fills: dict[str, Operand] = {}
    created = {i: key for key, i in record.outputs.items() if key[0] == "state" and key not in record.inputs}
    calls: list[OptimizerCall] = []
    for call in record.calls:
        first = call.results[0].index if call.results else -1
        if first in created and call.func.overloadpacket in _FILLS:
            labels[first] = created.pop(first)
            fills[labels[first][2]] = _fill_value(call, record)
        else:
            calls.append(call)
    return _renumbered(record, calls, labels), fills


def _fill_value(call: OptimizerCall, record: OptimizerRecord) -> Operand:
    if (known := _FILL_VALUES.get(base_of(call.func))) is not None:
        return known
    numbers = (a for a in call.args[1:] if isinstance(a, (Num, int, float, bool, complex)))
    value = next(numbers, dict(call.kwargs).get("fill_value"))
    return record.numbers[value.index] if isinstance(value, Num) else value  # type: ignore[return-value]


def _renumbered(record: OptimizerRecord, calls: Sequence[OptimizerCall], labels: Mapping[int, Key]) -> OptimizerRecord:
    order: dict[int, int] = {}
    result = OptimizerRecord({k: order.setdefault(i, len(order)) for k, i in sorted((k, i) for i, k in labels.items())})
    num_of: dict[int, Num] = {}

    def renamed(x: Any) -> Any:
        if isinstance(x, Ref):
            return type(x)(order.setdefault(x.index, len(order)))
        if isinstance(x, Num):
            if x.index not in num_of:
                num_of[x.index] = Num(len(num_of))
                result.numbers.append(record.numbers[x.index])
            return num_of[x.index]
        return tuple(renamed(y) for y in x) if isinstance(x, tuple) else x

    for call in calls:
        args, kwargs = renamed(call.args), tuple((k, renamed(v)) for k, v in call.kwargs)
        result.calls.append(OptimizerCall(call.func, args, kwargs, renamed(call.results), call.dtypes))
    result.outputs = {key: order[index] for key, index in record.outputs.items() if index in order}
    return result
