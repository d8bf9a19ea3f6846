"""Indexing in the form for capture: at positions that the step computes, and of diagonals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshweave.capture.trace import user_line
from meshweave.errors import CaptureError
from meshweave.interop.fake import FakeTensor

_BASIC = (int, slice, type(None), type(...))


def _is_position(index: Any) -> bool:
    """Whether torch would read the number of an index, to select what is there: a single integer, known in a step."""
    is_integer = isinstance(index, FakeTensor) and index.dtype not in (torch.bool, torch.uint8)
    return is_integer and index.dim() == 0 and not index.is_floating_point()


def _get_item(x: Tensor, index: Any) -> Tensor:
    """Like torch's, whose result is a view: at a position that the step computes no op gives such a view."""
    if any(map(_is_position, index if isinstance(index, tuple) else (index,))):
        raise CaptureError(
            "the model selects a part of a tensor at a position that the step computes",
            where=user_line(),
            got="x[i] with i a tensor of a single integer",
            hint="x.index_select(0, i.view(1))[0], which copies it; x[i] = values to write, and to add "
            "x.index_add_(0, i.view(1), more)",
        )
    return x[index]


def _set_item(x: Tensor, index: Any, value: Any) -> None:
    """x[index] = value, also at positions that the step computes (a ring buffer), between integers and slices."""
    parts = index if isinstance(index, tuple) else (index,)
    at = [d for d, part in enumerate(parts) if _is_position(part)]
    if not at or not all(d in at or type(part) in _BASIC for d, part in enumerate(parts)):
        x[index] = value
        return
    chosen = x[tuple(slice(None) if d in at else part for d, part in enumerate(parts))]
    places: list[Tensor | None] = [None] * chosen.dim()
    for d in at:
        # A copy, for the number counts at the time of the write.
        places[_dim_of(parts, d, chosen.dim())] = parts[d].to(torch.int64, copy=True)
    value = value.to(x.dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
    while value.dim() > chosen.dim() - len(at) and value.shape[0] == 1:  # as torch does before it broadcasts
        value = value.squeeze(0)
    torch.ops.aten.index_put_(chosen, places, value)


def _dim_of(parts: tuple[Any, ...], at: int, num_dims: int) -> int:
    """The dim of the selected value to which part `at` of an index, a slice there, belongs."""
    before, after = (sum(_keeps_dim(part) for part in some) for some in (parts[:at], parts[at + 1 :]))
    is_behind_rest = any(part is ... for part in parts[:at])
    return num_dims - 1 - after if is_behind_rest else before


def _keeps_dim(part: Any) -> bool:
    """Whether a part of an index stands for a dim of the result."""
    return part is not ... and not isinstance(part, int)


def _fill_diagonal(x: Tensor, fill_value: Any, wrap: bool = False) -> Tensor:
    """torch's writes through strides, which a value of the trace does not have. Wrapped around, it writes outside of
    views, which stays the error that it is."""
    is_wrapped = wrap and x.dim() == 2 and x.shape[0] > x.shape[1]
    if x.dim() < 2 or (x.dim() > 2 and len({*x.shape}) > 1) or (is_wrapped and not x.is_contiguous()):
        return x.fill_diagonal_(fill_value, wrap)
    first, *rest = (torch.arange(n, device=x.device).view(-1, *[1] * (x.dim() - 1 - d)) for d, n in enumerate(x.shape))
    if is_wrapped:
        first = first % (x.shape[1] + 1)
    on_diagonal = torch.stack([(first == other).expand(x.shape) for other in rest]).all(0)
    return x.masked_fill_(on_diagonal, fill_value)


INDEXING: Mapping[Callable[..., Any], Callable[..., Any]] = {
    Tensor.__getitem__: _get_item,
    Tensor.__setitem__: _set_item,
    Tensor.fill_diagonal_: _fill_diagonal,
}
