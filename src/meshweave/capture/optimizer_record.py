"""One run of an optimizer's own `step()` on stand-ins, written down: which ops on which tensors, with which numbers.

Parameters, gradients and state tensors stand on the meta device. What the code keeps as numbers (options of
param_groups, counts of steps, 0-dim tensors of its own) is real, and is computed by the code itself: a `Record` holds
the numbers that it handed to ops, apart from the ops. Numbers differ from step to step, the rest has to stay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshweave.capture.optimizer_arithmetic import ARITHMETIC, base_of, scaled
from meshweave.errors import CaptureError
from meshweave.interop import pytree
from meshweave.interop.fake import TorchDispatchMode
from meshweave.interop.ops import arguments_of, returns_of
from meshweave.ir.traits import is_random

aten = torch.ops.aten

_TORCH = str(Path(torch.__file__).parent)
_OPTIM = str(Path(torch.optim.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_WRAPPERS = (f"{_OPTIM}/optimizer.py", f"{_OPTIM}/lr_scheduler.py")
_META = torch.device("meta")
_MOST_PATHS = 64
_FILLS = {aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros,
          aten.ones, aten.full}  # fmt: skip
_FILL_VALUES: Mapping[str, float] = {"zeros_like": 0.0, "ones_like": 1.0, "new_zeros": 0.0, "new_ones": 1.0,
                                     "zeros": 0.0, "ones": 1.0}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of a record, by its number."""

    index: int


@dataclass(frozen=True, slots=True)
class Num:
    """A number that the code hands to an op, by its place among the numbers of a record."""

    index: int


@dataclass(frozen=True, slots=True)
class Call:
    """An op on stand-ins. `results`: the tensors that it gives, and their dtypes."""

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[Ref, ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """A branch of the code on a tensor: which way this record went."""

    condition: Ref
    outcome: bool


Key = tuple[str, int, str]  # ("param" | "grad" | "state", number of the parameter, slot or "")


@dataclass(slots=True)
class Record:
    """What one run did. `inputs` and `outputs` name tensors; numbers stand apart, in the order of their use."""

    inputs: dict[Key, int] = field(default_factory=dict)
    calls: list[Call | Decision] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    outputs: dict[Key, int] = field(default_factory=dict)

    @property
    def outcomes(self) -> tuple[bool, ...]:
        return tuple(call.outcome for call in self.calls if isinstance(call, Decision))


def user_code_line(frame: FrameType | None = None) -> str:
    """The innermost line at hand that is an optimizer's: not of meshweave, and of torch only what is in torch.optim."""
    frame = frame or sys._getframe(1)
    while frame is not None and not _is_optimizer_code(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def line_of(error: BaseException) -> str:
    """The innermost line of an optimizer that an error went through."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if _is_optimizer_code(code.co_filename):
            found = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return found


def _is_optimizer_code(filename: str) -> bool:
    if filename.startswith(_OPTIM):
        return filename not in _WRAPPERS
    return not filename.startswith((_TORCH, _OURS, "<")) and "contextlib" not in filename


def _untraceable(what: str, got: str, hint: str) -> CaptureError:
    return CaptureError(what, where=user_code_line(), got=got, expected="ops on tensors, and numbers", hint=hint)


class DataNumber:
    """What `.item()` of a stand-in gives: a number that depends on data. It computes like a float, as a 0-dim float64
    tensor; where code branches on it, both ways are taken, one record each."""

    __slots__ = ("recorder", "tensor")

    def __init__(self, tensor: Tensor, recorder: Recorder) -> None:
        self.tensor, self.recorder = tensor, recorder

    def _with(self, op: Callable[..., Tensor], *operands: Any) -> DataNumber:
        values = [x.tensor if isinstance(x, DataNumber) else x for x in operands]
        return DataNumber(op(*values), self.recorder)

    def __add__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensor) else self._with(torch.add, self, other)

    def __sub__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensor) else self._with(torch.sub, self, other)

    def __rsub__(self, other: Any) -> DataNumber:
        return (-self) + other

    def __mul__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensor) else self._with(torch.mul, self, other)

    def __truediv__(self, other: Any) -> Any:
        return NotImplemented if isinstance(other, Tensor) else self._with(torch.div, self, other)

    def __rtruediv__(self, other: Any) -> DataNumber:
        return self._with(torch.reciprocal, self) * other

    def __pow__(self, other: Any) -> DataNumber:
        return self._with(torch.pow, self, other)

    def __neg__(self) -> DataNumber:
        return self._with(torch.neg, self)

    def __abs__(self) -> DataNumber:
        return self._with(torch.abs, self)

    __radd__, __rmul__ = __add__, __mul__

    def __lt__(self, other: Any) -> DataNumber:
        return self._with(torch.lt, self, other)

    def __le__(self, other: Any) -> DataNumber:
        return self._with(torch.le, self, other)

    def __gt__(self, other: Any) -> DataNumber:
        return self._with(torch.gt, self, other)

    def __ge__(self, other: Any) -> DataNumber:
        return self._with(torch.ge, self, other)

    def __eq__(self, other: object) -> DataNumber:  # type: ignore[override]
        return self._with(torch.eq, self, other)

    def __ne__(self, other: object) -> DataNumber:  # type: ignore[override]
        return self._with(torch.ne, self, other)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return self.recorder.decide(self.tensor)

    def __float__(self) -> float:
        raise _of_data("float() or a function of math")

    def __int__(self) -> int:
        raise _of_data("int()")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """A torch function that is handed such a number: computed with it as a tensor."""
        name = func.__name__
        base = name.strip("_").removeprefix("r") if name.startswith("__") else name.rstrip("_")
        base = {"truediv": "div", "itruediv": "div", "imul": "mul", "iadd": "add", "isub": "sub"}.get(base, base)
        if base not in ARITHMETIC:
            raise _of_data(name)
        args, kwargs = pytree.tree_map(lambda x: x.tensor if isinstance(x, cls) else x, (args, dict(kwargs or {})))
        if name.startswith("__r") or not isinstance(args[0], Tensor):
            args = (args[1], args[0])
            base = {"sub": "rsub"}.get(base, base)
        writes = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        return scaled(base, args, kwargs, into=args[0] if writes else None, dtype=args[0].dtype)


def _of_data(what: str) -> CaptureError:
    return _untraceable(
        "the optimizer computes in Python with a number that depends on data",
        f"{what} of a tensor's .item()",
        "compute it with tensors: torch.sqrt, torch.where, torch.clamp instead of Python and math",
    )


class _Items(TorchFunctionMode):
    """`.item()` and `bool()` of stand-ins."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == _META and not any(self.recorder.is_known(x) for x in args):
            return func(*args, **{**kwargs, "device": None})  # a number beside a parameter is a number
        if func not in (Tensor.item, Tensor.__bool__, Tensor.__setitem__) or not self.recorder.is_known(args[0]):
            return func(*args, **kwargs)
        if func is Tensor.__setitem__:
            return self._set(*args)
        if func is Tensor.__bool__:
            return self.recorder.decide(args[0])
        return DataNumber(args[0].to(torch.float64).reshape(()), self.recorder)

    def _set(self, x: Tensor, index: Any, value: Any) -> None:
        """x[index] = value, as the op that it is for a mask and a number."""
        is_mask = self.recorder.is_known(index) and index.dtype == torch.bool
        if is_mask and not isinstance(value, Tensor):
            x.masked_fill_(index, value)
        else:
            x[index].copy_(value if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype))


class Recorder(TorchDispatchMode):
    """Writes down one run. `decisions` are taken in order where the code branches on data; further ones are False.

    `before` is an earlier run: as long as this one does the same, nothing is computed, and its tensors are taken.
    """

    def __init__(self, decisions: Sequence[bool] = (), before: Recorder | None = None) -> None:
        super().__init__()
        self.record, self.decisions, self.before = Record(), tuple(decisions), before
        self._refs: dict[int, int] = {}  # id of a tensor -> its number
        self._alive: list[Tensor] = []  # keeps ids unique
        self._results: list[Any] = []  # of each call
        self._held: list[Tensor] = []

    def know(self, tensor: Tensor) -> int:
        """The number of a tensor, a new one where it has none."""
        if id(tensor) not in self._refs:
            self._refs[id(tensor)] = len(self._alive)
            self._alive.append(tensor)
        return self._refs[id(tensor)]

    def is_known(self, x: Any) -> bool:
        return isinstance(x, Tensor) and id(x) in self._refs

    @property
    def is_repeated(self) -> bool:
        """Whether this run did what the one before did."""
        known = self.before
        return known is not None and len(self.record.calls) == len(known.record.calls)

    def decide(self, condition: Tensor) -> bool:
        taken = len(self.record.outcomes)
        outcome = self.decisions[taken] if taken < len(self.decisions) else False
        self._enter(Decision(Ref(self._refs[id(condition)]), outcome), None)
        return outcome

    def _repeats(self, func: Any, args: Any, kwargs: Any) -> Call | None:
        """The call of the run before that this one is."""
        at = len(self.record.calls)
        call = self.before.record.calls[at] if self.before and at < len(self.before.record.calls) else None
        same = isinstance(call, Call) and (call.func, call.args, call.kwargs) == (func, args, kwargs)
        return call if same else None  # type: ignore[return-value]

    def _enter(self, call: Call | Decision, result: Any) -> None:
        at = len(self.record.calls)
        if self.before is not None and (at >= len(self.before.record.calls) or self.before.record.calls[at] != call):
            self.before = None
        self.record.calls.append(call)
        self._results.append(result)

    @contextmanager
    def running(self) -> Iterator[None]:
        with torch.no_grad(), _Items(self), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(map(self._holds_known, (*args, *kwargs.values()))):
            return self._host(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            raise _of_data("float() or int()")
        if func is aten.detach.default:
            result = func(args[0])
            self._refs[id(result)] = self._refs[id(args[0])]
            self._held.append(result)
            return result
        if is_random(func):
            raise _untraceable(
                "the optimizer draws random numbers", str(func), "draw them in the model, which is captured with them"
            )
        return self._written(func, args, kwargs, {})

    def _holds_known(self, x: Any) -> bool:
        return id(x) in self._refs or (isinstance(x, (list, tuple)) and any(map(self._holds_known, x)))

    def _written(self, func: Any, args: Any, kwargs: dict[str, Any], forced: dict[str, Any]) -> Any:
        """The result of an op, which is written down. `forced` options are for the stand-ins alone."""
        names = _names_of(func)
        described = tuple(self._described(func, n, x) for n, x in zip(names, args, strict=False))
        options = tuple(
            (n, self._described(func, n, x)) for n, x in kwargs.items() if n not in ("device", "pin_memory")
        )
        known = self._repeats(func, described, options)
        if known is not None and self.before is not None:
            result = func(*args, **kwargs) if _is_view(func) else self.before._results[len(self.record.calls)]
            for ref, x in zip(known.results, _tensors(result), strict=True):
                self._take(ref.index, x)
            self._enter(known, result)
            return result
        args, kwargs = pytree.tree_map(self._stand_in, (args, kwargs))
        result = func(*args, **{**kwargs, **forced})
        outs = _tensors(result)
        refs = tuple(Ref(self.know(x)) for x in outs)
        self._enter(Call(func, described, options, refs, tuple(x.dtype for x in outs)), result)
        return result

    def _take(self, index: int, x: Tensor) -> None:
        """A tensor of the run before, under its number."""
        if index == len(self._alive):
            self._refs[id(x)] = index
            self._alive.append(x)

    def _host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An op without stand-ins: numbers of the code's own, which are computed; or a tensor that it makes."""
        kept = {k: v for k, v in kwargs.items() if not (k == "device" and v == _META)}
        if func.overloadpacket not in _FILLS or len(args[0]) == 0:
            return func(*args, **kept)
        return self._written(func, args, kwargs, {"device": _META})

    def check_owners(self, owner: dict[int, str]) -> None:
        """Raises CaptureError for an op that takes tensors of two parameters. `owner`: number of a tensor -> whose."""
        for call in (c for c in self.record.calls if isinstance(c, Call)):
            refs = [x for x in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(x, Ref)]
            owners = sorted({owner[ref.index] for ref in refs if ref.index in owner})
            if len(owners) > 1:
                raise CaptureError(
                    "the optimizer updates parameters together, by what several of them hold",
                    got=f"{call.func} of {owners[0]} and {owners[1]}",
                    expected="an update of each parameter by its own gradient and state",
                    hint="clip gradients by clip_grad_norm=, and loop over parameters in step()",
                )
            owner.update((ref.index, owner_of) for ref in call.results for owner_of in owners)

    def _stand_in(self, x: Any) -> Any:
        if isinstance(x, Tensor) and not self.is_known(x):
            return torch.empty(x.shape, dtype=x.dtype, device="meta")
        return x

    def _described(self, func: Any, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            if self.is_known(value):
                return Ref(self._refs[id(value)])
            if value.numel() != 1 or value.device.type == "meta":
                raise _untraceable(
                    "the optimizer uses a tensor that is no parameter, gradient or state of its own",
                    f"{value.dtype} of shape {tuple(value.shape)} in {func}",
                    "keep tensors in optimizer.state[param], made in step() from the parameter or its gradient",
                )
            return self._number(float(value))
        if isinstance(value, (list, tuple)):
            return tuple(self._described(func, name, x) for x in value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and _is_number(func, name, value):
            return self._number(float(value))
        return value

    def _number(self, value: float) -> Num:
        self.record.numbers.append(value)
        return Num(len(self.record.numbers) - 1)


def _is_number(func: Any, name: str, value: float) -> bool:
    """Whether an argument is a number that may differ in every step, and not one that says what is computed."""
    return name in _places_of_numbers(func) and not (base_of(func) == "pow" and isinstance(value, int))


@cache
def _places_of_numbers(func: Any) -> frozenset[str]:
    if base_of(func) not in ARITHMETIC:
        return frozenset()
    kinds = {a.name: str(a.type).removeprefix("Optional[").rstrip("]") for a in arguments_of(func)}
    return frozenset(name for name, kind in kinds.items() if kind in ("number", "Scalar", "Tensor", "float"))


@cache
def _names_of(func: Any) -> tuple[str, ...]:
    return tuple(a.name for a in arguments_of(func))


@cache
def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns_of(func))


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A record with the state that it fills with one number taken out: `fills` has these, by key, and `record` has the
    tensors as inputs. `signature` is all that must not change from step to step. `order` are the numbers of `record`,
    by their places in the run that it was."""

    record: Record
    fills: Mapping[Key, float]
    signature: tuple[Any, ...]
    order: tuple[int, ...]

    def again(self, run: Record) -> Prepared:
        """The same of a run that did the same with other numbers. Nothing is filled in it."""
        numbers = [run.numbers[i] for i in self.order]
        record = Record(self.record.inputs, self.record.calls, numbers, self.record.outputs)
        return Prepared(record, {}, self.signature, self.order)


def prepared(record: Record) -> Prepared:
    """A state tensor that begins as one number, before anything else is done with it, is an input that holds it."""
    labels: dict[int, Key] = {index: key for key, index in record.inputs.items()}
    fills: dict[Key, float] = {}
    created = {i: key for key, i in record.outputs.items() if key[0] == "state" and key not in record.inputs}
    calls: list[Call | Decision] = []
    for call in record.calls:
        (first,) = call.results[:1] if isinstance(call, Call) and call.results else (None,)
        if first is not None and first.index in created and call.func.overloadpacket in _FILLS:  # type: ignore[union-attr]
            labels[first.index] = created.pop(first.index)
            fills[labels[first.index]] = _fill_value(call, record)  # type: ignore[arg-type]
        else:
            calls.append(call)
    return _renumbered(Record(dict(record.inputs), calls, record.numbers, record.outputs), labels, fills)


def _fill_value(call: Call, record: Record) -> float:
    base = base_of(call.func)
    if base in _FILL_VALUES:
        return _FILL_VALUES[base]
    given = next(
        (a for a in call.args[1:] if isinstance(a, (Num, int, float, bool))), dict(call.kwargs).get("fill_value")
    )
    return record.numbers[given.index] if isinstance(given, Num) else float(given)  # type: ignore[arg-type]


def _renumbered(record: Record, labels: Mapping[int, Key], fills: dict[Key, float]) -> Prepared:
    """Tensors and numbers in the order in which they come, so that equal runs give equal records."""
    order: dict[int, int] = {}
    inputs = {key: order.setdefault(index, len(order)) for key, index in sorted((k, i) for i, k in labels.items())}
    numbers: list[float] = []
    places: list[int] = []

    def renamed(x: Any) -> Any:
        if isinstance(x, Ref):
            return Ref(order.setdefault(x.index, len(order)))
        if isinstance(x, Num):
            numbers.append(record.numbers[x.index])
            places.append(x.index)
            return Num(len(numbers) - 1)
        return tuple(renamed(y) for y in x) if isinstance(x, tuple) else x

    calls: list[Call | Decision] = []
    for call in record.calls:
        if isinstance(call, Decision):
            calls.append(Decision(renamed(call.condition), call.outcome))
            continue
        args, kwargs = renamed(call.args), tuple((k, renamed(v)) for k, v in call.kwargs)
        calls.append(Call(call.func, args, kwargs, renamed(call.results), call.dtypes))
    outputs = {key: order[index] for key, index in record.outputs.items() if index in order}
    result = Record(inputs, calls, numbers, outputs)
    signature = (tuple(sorted(inputs.items())), tuple(calls), tuple(sorted(outputs.items())))
    return Prepared(result, fills, signature, tuple(places))


def every_path(run: Callable[[Sequence[bool]], Prepared]) -> list[Prepared]:
    """The records of all ways in which branches on data can go. `run(decisions)` goes one of them."""
    records: list[Prepared] = []
    decisions: list[bool] | None = []
    while decisions is not None:
        records.append(run(decisions))
        taken = list(records[-1].record.outcomes)
        while taken and taken[-1]:
            taken.pop()
        decisions = [*taken[:-1], True] if taken else None
        if len(records) > _MOST_PATHS:
            raise CaptureError(
                "the optimizer branches on data in too many ways",
                got=f"more than {_MOST_PATHS} paths through step()",
                hint="use torch.where or torch.clamp instead of if, max and min on numbers from .item()",
            )
    return records
