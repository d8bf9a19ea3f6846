"""Numbers that depend on data, and the errors for unsupported uses of them in an optimizer's code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from meshweave.capture.optimizer_arithmetic import ARITHMETIC, scaled
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


def untraceable(what: str, got: str, hint: str) -> CaptureError:
    return CaptureError(what, where=user_code_line(), got=got, expected="ops on tensors, and numbers", hint=hint)


class DataNumber:
    """The result of `.item()` of a stand-in: a number that depends on data.

    It computes like a float, as a 0-dim float64 tensor; where code branches on it, both branches are recorded."""

    __slots__ = ("decide", "tensor")

    def __init__(self, tensor: Tensor, decide: Callable[[Tensor], bool]) -> None:
        self.tensor, self.decide = tensor, decide

    def _with(self, op: Callable[..., Tensor], *operands: Any) -> DataNumber:
        values = [x.tensor if isinstance(x, DataNumber) else x for x in operands]
        return DataNumber(op(*values), self.decide)

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
        return self.decide(self.tensor)

    def __float__(self) -> float:
        raise of_data("float() or a function of math")

    def __int__(self) -> int:
        raise of_data("int()")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """A torch function of such a number computes with it as a tensor."""
        name = func.__name__
        base = name.strip("_").removeprefix("r") if name.startswith("__") else name.rstrip("_")
        base = {"truediv": "div", "itruediv": "div", "imul": "mul", "iadd": "add", "isub": "sub"}.get(base, base)
        if base not in ARITHMETIC:
            raise of_data(name)
        args, kwargs = pytree.tree_map(lambda x: x.tensor if isinstance(x, cls) else x, (args, dict(kwargs or {})))
        if name.startswith("__r") or not isinstance(args[0], Tensor):
            args = (args[1], args[0])
            base = {"sub": "rsub"}.get(base, base)
        writes = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
        return scaled(base, args, kwargs, into=args[0] if writes else None, dtype=args[0].dtype)


def of_data(what: str) -> CaptureError:
    return untraceable(
        "the optimizer computes in Python with a number that depends on data",
        f"{what} of a tensor's .item()",
        "use tensor ops: torch.sqrt, torch.where, torch.clamp instead of Python and math",
    )
