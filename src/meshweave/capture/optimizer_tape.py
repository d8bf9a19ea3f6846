"""Numbers that an optimizer's `step()` computes in Python, and a tape of how, which is replayed in every step.

While `step()` is traced, numbers of its groups, attributes and state are `Number`s: they compute as numbers do, and the
tape records it. Where the code asks whether a number is larger than another, or takes its plain value, the tape records
a guard: a replay in which it is another value is another variant of the step.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from meshweave.errors import CaptureError
from meshweave.interop import pytree

_TORCH = str(Path(torch.__file__).parent)
_OPTIM = str(Path(torch.optim.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_WRAPPERS = (f"{_OPTIM}/optimizer.py", f"{_OPTIM}/lr_scheduler.py")


def user_code_line(frame: FrameType | None = None) -> str:
    """The innermost current line of an optimizer's code: not of meshweave, and of torch only torch.optim."""
    frame = frame or sys._getframe(1)
    while frame is not None and not _is_optimizer_code(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def line_of(error: BaseException) -> str:
    """The innermost line of an optimizer in an error's traceback."""
    trace, line = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if _is_optimizer_code(code.co_filename):
            line = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return line


def _is_optimizer_code(filename: str) -> bool:
    if filename.startswith(_OPTIM):
        return filename not in _WRAPPERS
    return not filename.startswith((_TORCH, _OURS, "<")) and "contextlib" not in filename


def untraceable(what: str, got: str = "", where: str = "") -> CaptureError:
    return CaptureError(what, where=where or user_code_line(), got=got)


@dataclass(frozen=True, slots=True)
class TapeRef:
    """A value of a tape, by its index: first the inputs, then the results of entries."""

    index: int


@dataclass(frozen=True, slots=True)
class Computed:
    """A value that is computed on the host: `result = function(*args, **kwargs)`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    result: int = -1


@dataclass(frozen=True, slots=True)
class NumberGuard:
    """`function(*args)` has to be `expected`. `is_exact`: the code took the value itself, not a comparison."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    expected: Any
    is_exact: bool


@dataclass(slots=True)
class Tape:
    """What Python computes with numbers and 0-dim tensors during a run. `values` has the results of this run."""

    entries: list[Computed | NumberGuard] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    num_inputs: int = 0
    _tensors: dict[int, TapeRef] = field(default_factory=dict)  # by id; `values` keeps them alive

    def input(self, value: Any) -> Any:
        """A stand-in for a number or a 0-dim tensor between steps. All inputs come before everything else."""
        self.num_inputs += 1
        return self._new(value.detach().cpu().clone() if isinstance(value, Tensor) else value)

    def _new(self, value: Any) -> Any:
        ref = TapeRef(len(self.values))
        self.values.append(value)
        if isinstance(value, Tensor):
            self._tensors[id(value)] = ref
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise untraceable("the optimizer computes a number of another kind", f"a {type(value).__name__}")
        return Number(self, value, ref)

    def ref_of(self, x: Any) -> TapeRef | None:
        """Where a value of the code is on the tape."""
        if type(x) is Number:
            return x.ref
        return self._tensors.get(id(x)) if isinstance(x, Tensor) else None

    def refs(self, x: Any) -> Any:
        """Arguments with references in place of values on the tape."""
        if isinstance(x, (list, tuple)):
            return type(x)(self.refs(y) for y in x)
        return self.ref_of(x) or x

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function of torch on numbers and 0-dim tensors. What it returns of these is on the tape."""
        leaves = pytree.tree_leaves((list(args), list(kwargs.values())))
        is_on_tape = any(self.ref_of(x) is not None for x in leaves)
        result = function(*plain(tuple(args)), **{k: plain(v) for k, v in kwargs.items()})
        if isinstance(result, Tensor) and (is_on_tape or not result.dim()):
            if other := next((x for x in leaves if isinstance(x, Tensor) and self.ref_of(x) is None), None):
                raise untraceable("the optimizer uses a tensor of its own", f"shape {tuple(other.shape)}")
            if result.numel() != 1:
                raise untraceable("the optimizer puts numbers into a tensor", f"shape {tuple(result.shape)}")
        elif not is_on_tape or type(result) not in (bool, int, float):
            return result
        if not isinstance(result, Tensor) and function is not Tensor.item:
            self.entries.append(NumberGuard(function, self.refs(tuple(args)), result, type(result) is not bool))
            return result
        return self.computed(result, function, args, kwargs)

    def computed(self, result: Any, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The result of a function, on the tape."""
        described = self.refs(tuple(args)), tuple((k, self.refs(v)) for k, v in kwargs.items())
        self.entries.append(Computed(function, *described, len(self.values)))
        return self._new(result)

    def guard(self, function: Callable[..., Any], *args: Any, is_exact: bool = False) -> Any:
        """The plain result of a function on numbers, which has to be the same in a replay."""
        result = function(*plain(args))
        if any(type(x) is Number and x.tensor is not None for x in args):
            raise untraceable("control flow, or a number of Python, depends on values of tensors", function.__name__)
        self.entries.append(NumberGuard(function, self.refs(args), result, is_exact))
        return result

    def compiled(self, tensors: Sequence[int], results: Sequence[Any]) -> Replay:
        """A function of the inputs that replays the tape: the values of `results` (references and constants), or None
        where a guard does not hold. `tensors` are the inputs that are tensors, which it does not write."""
        names: dict[str, Any] = {}

        def text(x: Any) -> str:
            if isinstance(x, TapeRef):
                return f"v{x.index}"
            if isinstance(x, tuple) or type(x) is list:
                inner = "".join(f"{text(y)}, " for y in x)
                return f"({inner})" if isinstance(x, tuple) else f"[{inner}]"
            names[f"c{len(names)}"] = x
            return f"c{len(names) - 1}"

        def called(entry: Computed | NumberGuard) -> str:
            args = [text(x) for x in entry.args]
            if symbol := _SYMBOLS.get(entry.function):
                return f"{args[0]} {symbol} {args[1]}"
            keywords = entry.kwargs if isinstance(entry, Computed) else ()
            return f"{text(entry.function)}({', '.join([*args, *(f'{k}={text(v)}' for k, v in keywords)])})"

        lines = [f"def replay({', '.join(f'v{i}' for i in range(self.num_inputs))}):"]
        lines += [f"v{i} = v{i}.clone()" for i in tensors]
        for entry in self.entries:
            if isinstance(entry, NumberGuard):
                lines.append(f"if ({called(entry)}) != {text(entry.expected)}: return None")
            else:
                lines.append(f"v{entry.result} = {called(entry)}")
        lines.append(f"return {text(list(results))}")
        exec(compile("\n    ".join(lines), "<meshweave: numbers of an update>", "exec"), names)  # own names only
        replay: Replay = names["replay"]
        return replay


Replay = Callable[..., list[Any] | None]


def plain(x: Any) -> Any:
    """Values in place of numbers that stand for them."""
    if type(x) is Number:
        return x.value
    return type(x)(map(plain, x)) if type(x) in (list, tuple) else x


class Number(torch.SymFloat):
    """A number during a trace: of a tape, or a 0-dim float64 `tensor` that `.item()` took from values of tensors.

    torch takes it wherever it takes a number (therefore the base class, whose methods are all replaced), and Python
    calls `__float__` where a function of C needs a plain number (so it is no float)."""

    def __init__(self, tape: Tape, value: Any, ref: TapeRef | None, tensor: Tensor | None = None) -> None:
        self.tape, self.value, self.ref, self.tensor = tape, value, ref, tensor

    # isinstance(x, float) and isinstance(x, int) answer as for the number
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.value)

    def _exact(self, kind: Callable[..., Any]) -> Any:
        return self.tape.guard(kind, self, is_exact=True)

    def __bool__(self) -> bool:
        return bool(self.tape.guard(operator.truth, self))

    def __float__(self) -> float:
        return float(self._exact(float))

    def __int__(self) -> int:
        return int(self._exact(int))

    def __index__(self) -> int:
        return int(self._exact(operator.index))

    def __hash__(self) -> int:
        return int(self._exact(hash))

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, text: str) -> str:
        return format(self.value, text)

    def __deepcopy__(self, memo: Any) -> Number:
        return self


def _computed(function: Callable[..., Any], *args: Any) -> Any:
    if any(isinstance(x, Tensor) for x in args):
        return NotImplemented
    tape = next(x.tape for x in args if type(x) is Number)
    if any(type(x) is Number and x.tensor is not None for x in args):
        result = function(*(x.tensor if type(x) is Number and x.tensor is not None else x for x in args))
        return Number(tape, 1.0, None, result)
    return tape.computed(function(*plain(args)), function, args, {})


def _define() -> None:
    def binary(function: Callable[..., Any]) -> tuple[Any, Any]:
        return (lambda a, b: _computed(function, a, b)), (lambda a, b: _computed(function, b, a))

    def comparison(function: Callable[..., Any]) -> Any:
        return lambda a, b: NotImplemented if isinstance(b, Tensor) else a.tape.guard(function, a, b)

    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        forward, reflected = binary(getattr(operator, name))
        setattr(Number, f"__{name}__", forward)
        setattr(Number, f"__r{name}__", reflected)
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Number, f"__{name}__", comparison(getattr(operator, name)))
    unary = {"neg": operator.neg, "pos": operator.pos, "abs": abs, "round": round}
    for name, function in {**unary, "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc}.items():
        setattr(Number, f"__{name}__", lambda a, *n, function=function: _computed(function, a, *n))


_define()
_SYMBOLS: Mapping[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.pow: "**",
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==", operator.ne: "!=",
}  # fmt: skip
