"""Ops with numbers, rewritten with 0-dim float64 tensors instead, so that numbers are inputs of a graph.

Each row rounds like the ATen kernel that takes the number: 16-bit operands are computed in float32 and rounded once at
the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor


def _add(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
    return x + (y if isinstance(alpha, int) and alpha == 1 else y * alpha)


def _sub(x: Tensor, y: Any, *, alpha: Any = 1) -> Tensor:
    return x - (y if isinstance(alpha, int) and alpha == 1 else y * alpha)


def _rsub(x: Tensor, y: Any, alpha: Any = 1) -> Tensor:
    return y - (x if isinstance(alpha, int) and alpha == 1 else x * alpha)


def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    return x + value * a * b


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Tensor:
    return x + value * a / b


def _lerp(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    """ATen's lerp with a number changes its formula at 0.5 (aten/src/ATen/native/Lerp.h), so that it is exact at both
    ends. So is this formula, which also works for numbers known only at run time."""
    return start * (1 - weight) + end * weight


def _addmm(x: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return beta * x + alpha * (a @ b)


def _clamp(x: Tensor, min: Any = None, max: Any = None) -> Tensor:
    x = x if min is None else torch.maximum(x, _like(min, x))
    return x if max is None else torch.minimum(x, _like(max, x))


def _like(number: Any, x: Tensor) -> Tensor:
    return number.to(x.dtype) if isinstance(number, Tensor) else torch.full((), number, dtype=x.dtype, device=x.device)


def _where(mask: Tensor, yes: Any, no: Any) -> Tensor:
    yes = yes if isinstance(yes, Tensor) else _like(yes, no)
    return torch.where(mask, yes, no if isinstance(no, Tensor) else _like(no, yes))


def _fill(x: Tensor, value: Tensor) -> Tensor:
    return value.to(x.dtype).expand(x.shape)


# Name of a function of torch -> the op on tensors only.
ARITHMETIC: Mapping[str, Callable[..., Tensor]] = MappingProxyType(
    {
        "add": _add,
        "sub": _sub,
        "rsub": _rsub,
        "mul": lambda x, y: x * y,
        "div": lambda x, y, rounding_mode=None: torch.div(x, y, rounding_mode=rounding_mode),
        "rdiv": lambda x, y: x.reciprocal() * y,
        "addcmul": _addcmul,
        "addcdiv": _addcdiv,
        "lerp": _lerp,
        "addmm": _addmm,
        "mm": lambda a, b: a @ b,
        "bmm": lambda a, b: a @ b,
        "pow": torch.pow,
        "rpow": lambda x, y: torch.pow(y, x),
        "clamp": _clamp,
        "clamp_min": _clamp,
        "clamp_max": lambda x, max: _clamp(x, None, max),
        "maximum": lambda x, y: torch.maximum(x, _like(y, x)),
        "minimum": lambda x, y: torch.minimum(x, _like(y, x)),
        "fill": _fill,
        "copy": _fill,
        "masked_fill": lambda x, mask, value: torch.where(mask, _like(value, x), x),
        "where": _where,
        **{name: getattr(torch, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    }
)
# Other names of functions; with "r" the operands are exchanged, with "i" the first is written.
_ALIASES = MappingProxyType({"truediv": "div", "rtruediv": "rdiv", "radd": "add", "rmul": "mul", "true_divide": "div"})


# Sums of 16-bit products are added in float32 and rounded once, on any mesh: Muon multiplies in bfloat16.
SUMS = frozenset({"mm", "bmm"})


def row_of(func: Any) -> tuple[str, bool]:
    """The name of the row for a function of torch (`add` of `add_`, `__add__` and `__iadd__`), and whether it writes to
    its first operand."""
    text: str = func.__name__
    name = text.strip("_")
    is_in_place = text.endswith("_") and not text.startswith("_")
    if text.startswith("__i") and (short := _ALIASES.get(name[1:], name[1:])) in ARITHMETIC:
        return short, True
    return _ALIASES.get(name, name), is_in_place


def _in_kernel_dtype(operands: list[Any]) -> list[Any]:
    """Floating-point operands in the dtype in which ATen's kernels compute: their common dtype, at least float32."""
    dtypes = [x.dtype for x in operands if isinstance(x, Tensor) and x.is_floating_point() and x.dim()]
    if not dtypes:
        return operands
    wide = reduce(torch.promote_types, [torch.float32 if d.itemsize < 4 else d for d in dtypes])
    return [x.to(wide) if isinstance(x, Tensor) and x.is_floating_point() and x.dim() else x for x in operands]


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def scaled(name: str, args: Any, kwargs: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """The op by its row, its result in `dtype`."""
    if dtype.is_floating_point:  # a float makes floats of integers
        args = [x.to(dtype) if isinstance(x, Tensor) and x.dim() and _is_integer(x) else x for x in args]
    result = ARITHMETIC[name](*_in_kernel_dtype(list(args)), **kwargs)
    return result if result.dtype in (dtype, torch.bool) else result.to(dtype)
