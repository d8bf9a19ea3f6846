"""Traces an optimizer's own `step()` on all parameters at once: what it does to each, as a graph of values.

Parameters, gradients and state tensors are on the meta device; a tensor that is written has another value from then on.
Numbers are on a tape (`optimizer_tape`); those that are passed to ops are inputs of the graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshweave.capture.decompositions import decomposition_table
from meshweave.capture.optimizer_arithmetic import ARITHMETIC, SUMS, row_of, scaled
from meshweave.capture.optimizer_graph import Key, Outputs, UpdateValue, Values, ordered
from meshweave.capture.optimizer_tape import Number, Tape, TapeRef, flat, plain, untraceable
from meshweave.errors import CaptureError
from meshweave.interop.fake import DispatchMode, without_modes
from meshweave.interop.ops import arguments_of, is_mutable, operator_name, returns_of
from meshweave.interop.storages import storage_key
from meshweave.interop.tracing import decomposes_itself
from meshweave.ir.graph import Spec, specs_of
from meshweave.ir.traits import IDENTITIES, changes_shape, is_random, reads_data

aten = torch.ops.aten

_META = torch.device("meta")
_KNOWN = "_meshweave_value"  # an attribute: torch returns a copy of a new tensor that has another reference
_TENSOR: Any = Tensor
_SET_DATA: Any = _TENSOR.data.__set__
_READS = frozenset({Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.tolist})
_CREATORS = frozenset({torch.zeros, torch.ones, torch.full, torch.empty})
# Creations of state, and what they fill it with; None: with an argument.
_FILLS: Mapping[str, float | None] = {
    "zeros_like": 0.0, "ones_like": 1.0, "full_like": None, "empty_like": 0.0, "new_zeros": 0.0, "new_ones": 1.0,
    "new_full": None, "new_empty": 0.0, "zeros": 0.0, "ones": 1.0, "full": None, "empty": 0.0,
}  # fmt: skip
# Views with all elements of their operand -> the op that makes the operand of the view, from its shape and arguments.
_INVERSES: Mapping[Any, Callable[..., tuple[Any, tuple[Any, ...]]]] = {
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim),
                    lambda shape, *_: (aten.view.default, (list(shape),))),
    aten.t.default: lambda shape: (aten.t.default, ()),
    aten.transpose.int: lambda shape, *dims: (aten.transpose.int, dims),
    aten.view_as_real.default: lambda shape: (aten.view_as_complex.default, ()),
    aten.view_as_complex.default: lambda shape: (aten.view_as_real.default, ()),
}  # fmt: skip


@dataclass(slots=True)
class UpdateTensor:
    """A tensor of a trace: its present value (None: written through a part of it), the parameter that it belongs to
    ("": none yet), its first value if it is fresh, and how a write to it becomes one to the tensor that it is a view
    of."""

    tracer: UpdateTracer
    value: UpdateValue | None
    owner: str
    spec: Spec
    place: tuple[Any, ...]  # in its storage: tensors with equal places have the same elements
    first: UpdateValue | None = None
    base: UpdateTensor | None = None
    to_base: tuple[Any, tuple[Any, ...]] | None = None


class _Functions(TorchFunctionMode):
    """Sees what the code calls: functions of numbers run on the tape, functions of tensors and numbers by their row."""

    def __init__(self, tracer: UpdateTracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == "__get__":  # an attribute
            return func(*args, **kwargs or {})
        try:
            return self._called(func, args, kwargs or {})
        except CaptureError as error:  # which the code may catch
            self.tracer.refusal = error
            raise

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        tracer = self.tracer
        has_tensor = has_number = False
        for x in flat(args, *kwargs.values()):
            if tracer.find(x) is not None:
                has_tensor = True
            elif tracer.tape.ref_of(x) is not None:
                has_number = True
        if not has_tensor:
            own = {k: v for k, v in kwargs.items() if not (k == "device" and v == _META)}  # beside a parameter
            is_creation = func in _CREATORS and not has_number and _has_dims(args, kwargs)
            return func(*args, **{**own, "device": _META}) if is_creation else tracer.tape.call(func, args, own)
        if func in _READS:
            raise untraceable("control flow, or a number of Python, depends on values of tensors", func.__name__)
        if func == _SET_DATA:
            raise untraceable("the optimizer assigns the data of a tensor")
        if func is Tensor.__setitem__ and _is_mask(*args[:2]) and not isinstance(args[2], Tensor):
            func, has_number = Tensor.masked_fill_, True
        if func is Tensor.where and len(args) == 3:
            func, args = torch.where, (args[1], args[0], args[2])
        is_choice = func is torch.where and len(args) == 3
        return tracer.run_row(func, args, kwargs) if has_number or is_choice else func(*args, **kwargs)


def _has_dims(args: Any, kwargs: Any) -> bool:
    size = args[0] if args else kwargs.get("size", ())
    return isinstance(size, int) or len(size) > 0


def _is_mask(x: Tensor, index: Any) -> bool:
    """Whether an index is a mask of all elements."""
    return isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == x.shape


@dataclass(eq=False)
class UpdateTracer(DispatchMode):
    """Records a run on tensors of the meta device that it knows. `numbers`: for each parameter the numbers of its
    graph, in the order of their first use; `fills`: what a value of fresh state is filled with; `refusal`: the last
    error of a call that cannot be traced."""

    values: Values
    tape: Tape
    rows: dict[Any, UpdateValue]  # results of rows, each of which runs once
    numbers: dict[str, list[TapeRef]] = field(default_factory=dict)
    fills: dict[UpdateValue, Any] = field(default_factory=dict)
    _storages: dict[int, list[UpdateTensor]] = field(default_factory=dict)
    refusal: CaptureError | None = None
    _is_paused: bool = False
    _is_in_row: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    @contextmanager
    def running(self) -> Iterator[None]:
        with torch.no_grad(), _Functions(self), self:
            yield

    def know(self, tensor: Tensor, value: UpdateValue, owner: str) -> UpdateTensor:
        """From now on a tensor has this value."""
        place = tensor.shape, tensor.dtype, tensor.stride(), tensor.storage_offset()
        spec = Spec(tuple(tensor.shape), tensor.dtype)
        traced = tensor.__dict__[_KNOWN] = UpdateTensor(self, value, owner, spec, place)
        self._storages.setdefault(storage_key(tensor), []).append(traced)
        return traced

    def find(self, x: Any) -> UpdateTensor | None:
        """What is known of a tensor."""
        if type(x) is not Tensor and type(x) is not nn.Parameter:
            return None
        traced: UpdateTensor | None = x.__dict__.get(_KNOWN)
        return traced if traced is not None and traced.tracer is self else None

    def traced(self, tensor: Tensor) -> UpdateTensor:
        traced = self.find(tensor)
        if traced is None:
            raise untraceable(_FOREIGN, f"{tensor.dtype} of shape {tuple(tensor.shape)}")
        return traced

    def value_of(self, tensor: Tensor) -> UpdateValue:
        value = self.traced(tensor).value
        if value is None:
            raise untraceable(
                "the optimizer reads a tensor that it has written through a part of it", str(tensor.shape)
            )
        return value

    def _operands(self, *values: Any) -> list[UpdateTensor]:
        return [traced for x in flat(*values) if (traced := self.find(x)) is not None]

    def _conformed(self, result: Tensor, spec: Spec) -> UpdateValue:
        """The value of a result in the form of the tensor into which it is written."""
        self.traced(result)
        with self:
            result = result if result.dtype == spec.dtype else result.to(spec.dtype)
            return self.value_of(result if result.shape == spec.shape else result.expand(spec.shape))

    def _write(self, target: Tensor, new: UpdateValue) -> Tensor:
        """A value is written into a tensor: all that share its memory have another value, too."""
        written = self.traced(target)
        value: UpdateValue | None = new
        siblings = [x for x in self._storages[storage_key(target)] if x is not written]
        for other in siblings:
            other.value = None
        at: UpdateTensor | None = written
        while at is not None:
            at.value = value
            for other in siblings:
                if other.place == at.place:
                    other.value = value
            if at.base is not None and at.to_base is not None and value is not None:
                op, args = at.to_base
                value = self.values.op(op, (value, *args), (), at.base.spec)
            else:
                value = None
            at = at.base
        return target

    def owner_of(self, *values: Any) -> str:
        """The parameter that operands belong to, from now on all of them. CaptureError if there are several."""
        operands = self._operands(*values)
        owners = {x.owner for x in operands if x.owner}
        if len(owners) > 1:
            got = " and ".join(sorted(owners))
            raise untraceable("the optimizer combines the values of several parameters in an update", got)
        owner = next(iter(owners), "")
        for x in operands:
            x.owner = owner
        return owner

    def run_row(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A function of tensors and numbers, as ops on tensors alone."""
        name, is_in_place = row_of(func)
        if name not in ARITHMETIC and name not in _FILLS:
            raise untraceable("a number that changes from step to step is an argument of an op without a row", name)
        if name == "pow" and not isinstance(args[1], Tensor) and isinstance(args[1], int):
            args = (args[0], int(args[1]))  # an integer is an exponent, which selects what is computed
        owner = self.owner_of(args, *kwargs.values())
        into = kwargs.get("out", args[0] if is_in_place else None)
        spec = self.traced(into).spec if into is not None else self._result(func, args, kwargs)
        if name in _FILLS:
            fill = next(x for x in flat(args[::-1], *kwargs.values()) if self.tape.ref_of(x) is not None)
            return self._fresh(self._blank(spec), self._ref_for(fill, owner), owner)
        names = (*range(len(args)), *(k for k in kwargs if k != "out"))
        operands = [self._row_operand(x, owner) for x in (*args, *(v for k, v in kwargs.items() if k != "out"))]
        key = func, names, tuple(x if isinstance(x, UpdateValue) else (type(x), repr(x)) for x in operands), spec
        if key not in self.rows:
            values = {k: self._shown(x, owner) for k, x in zip(names, operands, strict=True)}
            self._is_in_row = True
            with self:
                result = scaled(name, [values.pop(i) for i in range(len(args))], values, spec.dtype)
            self._is_in_row = False
            self.rows[key] = self._conformed(result, spec)
        if into is not None:
            return self._write(into, self.rows[key])
        result = self._blank(spec)
        self.know(result, self.rows[key], owner)
        return result

    def _row_operand(self, x: Any, owner: str) -> Any:
        """The value of a tensor; a number as an input of the graph; or a constant."""
        if self.find(x) is not None:
            return self.value_of(x)
        if self.tape.ref_of(x) is None:
            return x
        numbers, ref = self.numbers.setdefault(owner, []), self._ref_for(x, owner)
        if ref not in numbers:
            numbers.append(ref)
        return self.values.input(numbers.index(ref), Spec((), torch.float64))

    def _shown(self, x: Any, owner: str) -> Any:
        """A tensor that has a value."""
        if not isinstance(x, UpdateValue):
            return x
        tensor = self._blank(x.spec)
        self.know(tensor, x, owner)
        return tensor

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The Specs of what a function returns for tensors and numbers."""

        def form(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return tuple(map(form, x))
            if (traced := self.find(x)) is not None:
                return traced.spec
            if type(x) is Number or isinstance(x, Tensor):
                x = plain(x)
                x = x.item() if isinstance(x, Tensor) and x.numel() == 1 and not x.is_meta else x
                return type(x), type(x)(1)
            return type(x), x

        settings = torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
        return _result_specs(func, form(args), tuple((k, form(v)) for k, v in kwargs.items()), settings)

    def _blank(self, spec: Any) -> Tensor:
        self._is_paused = True
        try:
            return torch.empty(spec.shape, dtype=spec.dtype, device=_META)
        finally:
            self._is_paused = False

    def _ref_for(self, x: Any, owner: str) -> TapeRef:
        """A number that an op takes, as it is now: a tensor may be written later."""
        x = self.tape.call(Tensor.item, (x,), {}) if isinstance(x, Tensor) else x
        its = self.tape.owner_of((x.ref,))
        if its is not None and its not in (owner, self.tape.group_of[owner]):
            raise untraceable("the optimizer uses numbers of another parameter or group", f"{owner}, {its}")
        return x.ref

    def _fresh(self, tensor: Tensor, fill: Any, owner: str) -> Tensor:
        spec = Spec(tuple(tensor.shape), tensor.dtype)
        value = self.values.input(("fresh", len(self.fills)), spec)
        self.fills[value] = fill
        self.know(tensor, value, owner).first = value
        return tensor

    def full(self, spec: Any, fill: Any) -> UpdateValue:
        return self.values.op(aten.full.default, (list(spec.shape), fill), (("dtype", spec.dtype),), spec)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        name = operator_name(func)
        is_creation = name in _FILLS and kwargs.get("device") == _META
        if not is_creation and not self._operands(args, *kwargs.values()):
            return func(*args, **kwargs)
        owner = self.owner_of(args, *kwargs.values())
        if name in _FILLS:
            numbers = (x for x in (*args[1:], kwargs.get("fill_value")) if isinstance(x, (int, float, complex)))
            fill = next(numbers) if _FILLS[name] is None else _FILLS[name]
            fresh = self._fresh(func(*args, **kwargs), fill, owner)
            if self._is_in_row:
                self.know(fresh, self.full(self.traced(fresh).spec, fill), owner)
            return fresh
        if is_random(func):
            raise untraceable("the optimizer draws random numbers", str(func))
        if reads_data(func):
            raise untraceable("control flow, or a number of Python, depends on values of tensors", str(func))
        if name.startswith("_foreach_"):
            raise untraceable("the optimizer calls ops on lists of tensors", str(func))
        if changes_shape(func):
            raise untraceable("the optimizer changes the shape of a tensor in place", str(func))
        if is_mutable(func):
            name, index = _written(func)
            target = kwargs[name] if name in kwargs else args[index]
            kwargs = {k: v for k, v in kwargs.items() if k != name}
            with self:
                result = _without_writes(func)(*args, **kwargs)
            return self._write(target, self._conformed(result, self.traced(target).spec))
        versions = [decomposition_table().get(func)]
        if decomposes_itself(func, args, kwargs):
            versions.append(func.decompose)
        for decomposition in filter(None, versions):
            with self:
                result = decomposition(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if name in SUMS and args[0].dtype.itemsize < 4:
            with self:
                return scaled(name, args, kwargs, args[0].dtype)
        return self._recorded(func, args, kwargs, owner)

    def _recorded(self, func: Any, args: Any, kwargs: Any, owner: str) -> Any:
        if func in IDENTITIES:
            result = func(*args, **kwargs)
            self.know(result, self.value_of(args[0]), owner)
            return result
        options = tuple((k, self._operand(func, v)) for k, v in kwargs.items() if k not in _OF_MEMORY)
        operands = tuple(self._operand(func, x) for x in args)
        if _is_view(func):
            result = func(*args, **kwargs)
            specs = specs_of(result)
        else:
            specs = self._result(func, args, {k: v for k, v in kwargs.items() if k not in _OF_MEMORY})
            result = tuple(map(self._blank, specs)) if isinstance(specs, tuple) else self._blank(specs)
        value = self.values.op(func, operands, options, specs)
        if isinstance(result, Tensor):
            traced = self.know(result, value, owner)
            if func in _INVERSES and storage_key(result) == storage_key(args[0]):
                traced.base, traced.to_base = self.traced(args[0]), _INVERSES[func](args[0].shape, *args[1:])
            return result
        for i, part in enumerate(result):
            self.know(part, self.values.op(operator.getitem, (value, i), (), specs_of(part)), owner)
        return result

    def _operand(self, func: Any, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [self._operand(func, y) for y in x]
        if self.find(x) is not None:
            return self.value_of(x)
        if isinstance(x, Tensor) and x.numel() == 1 and not x.is_meta:
            return x.item()  # created by a function of torch itself, from constants
        if isinstance(x, Tensor):
            got = f"{x.dtype} of shape {tuple(x.shape)} in {func}"
            raise untraceable(_FOREIGN, got)
        return x


_FOREIGN = "the optimizer uses a tensor that is not a parameter, gradient or state of its own"
_OF_MEMORY = frozenset({"device", "pin_memory", "memory_format", "layout", "non_blocking"})


@lru_cache(maxsize=1 << 12)
def _result_specs(func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], settings: Any) -> Any:
    """The Specs of what a function returns under the present settings for operands of the meta device: Specs, and
    constants with their types."""

    def example(x: Any) -> Any:
        if isinstance(x, Spec):
            return torch.empty(x.shape, dtype=x.dtype, device=_META)
        return x[1] if x and isinstance(x[0], type) else [example(y) for y in x]

    with without_modes():
        return specs_of(func(*map(example, args), **{k: example(v) for k, v in kwargs}))


@cache
def _is_view(func: Any) -> bool:
    return any(x.alias_info is not None for x in returns_of(func))


@cache
def _written(func: Any) -> tuple[str, int]:
    """The argument that an op writes, and its index."""
    written = [
        (a.name, i) for i, a in enumerate(arguments_of(func)) if a.alias_info is not None and a.alias_info.is_write
    ]
    if len(written) != 1:
        raise untraceable("the optimizer calls an op that writes several tensors", str(func))
    return written[0]


@cache
def _without_writes(func: Any) -> Any:
    """The op that computes what an op writes."""
    if func is aten.copy_.default:
        return lambda x, y, *_: y
    if func is aten.zero_.default:
        return lambda x: torch.full_like(x, 0)
    if func is aten.fill_.Scalar:
        return aten.full_like.default
    written, index = _written(func)
    wanted = [(a.name, str(a.type)) for a in arguments_of(func) if index == 0 or a.name != written]
    packet = getattr(aten, operator_name(func).removesuffix("_"), None)
    for overload in packet.overloads() if packet is not None and str(func).startswith("aten.") else ():
        op = getattr(packet, overload)
        if not is_mutable(op) and [(a.name, str(a.type)) for a in arguments_of(op)] == wanted:
            return op
    raise untraceable("the optimizer calls an op that writes, and has no form that does not", str(func))


def outputs_of(
    tracer: UpdateTracer, tensors: Mapping[Key, Tensor], begun: Container[Key]
) -> tuple[Outputs, dict[str, Any]]:
    """The values of a parameter and its state after a step; and by slot what fresh state is filled with, which is an
    input of the graph. `begun` are the keys of those that the step began with."""
    tracer.owner_of(*tensors.values())
    outputs = {key: tracer.value_of(x) for key, x in tensors.items()}
    inputs: dict[UpdateValue, UpdateValue] = {}
    fills: dict[str, Any] = {}
    for key, x in tensors.items():
        first = tracer.traced(x).first
        if first is not None and key not in begun:
            inputs[first], fills[key[1]] = tracer.values.input(key, first.spec), tracer.fills[first]
    for value in ordered(outputs.values()):
        if value in tracer.fills and value not in inputs:
            fill = tracer.fills[value]
            if isinstance(fill, TapeRef):
                raise untraceable(
                    "the optimizer fills a tensor that is no state with a number that changes", str(value.spec)
                )
            inputs[value] = tracer.full(value.spec, fill)
    return tracer.values.replaced(outputs, inputs), fills
