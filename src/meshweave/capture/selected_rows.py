"""Rows that a mask of data selects, `x[mask]`: their number is not known at capture.

All rows stay, those outside of the mask filled with ones. Functions that treat rows one by one run on all of them; a
sum, a mean or a loss over the rows counts those in the mask. So values and gradients are those of the selected rows,
and no shape depends on data. What else is done with such rows is an error.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function

from meshweave.capture.trace import user_line
from meshweave.interop import pytree
from meshweave.interop.fake import FakeTensor
from meshweave.interop.storages import version_of
from meshweave.ir.graph import wide_dtype
from meshweave.ir.traits import is_pointwise, is_random

# Functions along dims: where their arguments say which (None: from that dim on), and the dim without it (None: all).
_ALONG_DIMS: Mapping[str, tuple[int, int | None]] = {
    **dict.fromkeys(("sum", "mean", "amax", "amin", "argmax", "argmin", "prod", "std", "var", "any", "all"), (1, None)),
    **dict.fromkeys(("max", "min", "logsumexp", "softmax", "log_softmax", "cumsum", "flip", "squeeze"), (1, None)),
    **dict.fromkeys(("unsqueeze", "gather", "flatten"), (1, 0)),
    **dict.fromkeys(("norm", "topk"), (2, None)),
    **dict.fromkeys(("normalize", "cosine_similarity"), (2, 1)),
}
_ALONG_LAST = {"linear": 2, "matmul": 2, "layer_norm": 2, "rms_norm": 2, "embedding": 1, "one_hot": 1}  # least dims
_POINTWISE = (
    "truediv rtruediv rpow radd rmul iadd isub imul itruediv and or xor invert abs neg mod float double half bfloat16 "
    "long int bool to type_as detach clone contiguous dropout logsigmoid masked_fill where"
)
_VIEWS = {"getitem", "view", "reshape", "transpose", "permute", "t", "expand", "select", "narrow", "roll"}
_BY_INDEX = {F.cross_entropy, F.nll_loss}
_LOSSES = {
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.soft_margin_loss, F.kl_div,
    F.binary_cross_entropy_with_logits, F.poisson_nll_loss, *_BY_INDEX,
}  # fmt: skip


@cache
def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    overloads = [getattr(packet, each) for each in packet.overloads()] if packet else []
    is_tagged = any(map(is_pointwise, overloads)) and not any(map(is_random, overloads))
    return name not in _ALONG_DIMS and (name in _POINTWISE.split() or is_tagged)


def _repeats_itself(function: str) -> bool:
    """Whether a function gives the same for the same arguments, as far as masks are made by it."""
    name = function.strip("_") if function.startswith("__") else function
    return name != "dropout" and (_is_pointwise(name) or name in _ALONG_DIMS or name in _VIEWS)


class RowsError(Exception):
    """Selected rows are used in a way for which their number would have to be known."""


def _refuse(what: str) -> NoReturn:
    file, _, line = user_line().partition(" in ")[0].rpartition(":")
    text = linecache.getline(file, int(line or 0)).strip()
    raise RowsError(f"{what}{f' in: {text}' if text else ''}")


@dataclass(frozen=True, slots=True, eq=False)
class SelectedRows:
    """`x[mask]`: all rows [m, ...] in `data`, of which those in `mask` [m] count. Masks of the same `key` are the same.

    It is no tensor: each function that gets one is seen by the function mode of the capture, which calls `on_rows`."""

    data: Tensor
    mask: Tensor
    key: Any
    is_positions: bool = False  # whether the row at i is i

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse(f"a call of {func.__name__}")

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device", "requires_grad", "is_cuda", "layout", "ndim", "dim", "is_floating_point"):
            return getattr(self.data, name)
        function = getattr(Tensor, name, None)
        if name.startswith("__") or not callable(function):
            raise AttributeError(name)
        return partial(handle_torch_function, function, (self,), self)

    @property
    def shape(self) -> _Sizes:
        return _Sizes(self.data.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        _refuse("its length")

    def __iter__(self) -> Any:
        _refuse("a loop over it")

    def __bool__(self) -> bool:
        _refuse("its truth")


class _Sizes(tuple[int, ...]):
    """A shape whose first size cannot be read."""

    def __getitem__(self, at: Any) -> Any:
        read = range(len(self))[at]
        if 0 in (read if isinstance(read, range) else (read,)):
            _refuse("the number of its rows")
        return super().__getitem__(at)

    def __iter__(self) -> Any:
        _refuse("the number of its rows")


def _operator(name: str) -> Callable[..., Any]:
    return lambda rows, *args: handle_torch_function(getattr(Tensor, name), (rows,), rows, *args)


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv pow rpow neg abs matmul eq ne lt le gt ge and or xor invert mod "
    "iadd isub imul itruediv getitem setitem"
)
for _name in _OPERATORS.split():
    setattr(SelectedRows, f"__{_name}__", _operator(f"__{_name}__"))


class Masks:
    """Selects rows by masks of data. Masks that the same functions made of the same tensors are the same:
    `logits[y != 0]` and `y[y != 0]` have the same rows."""

    def __init__(self) -> None:
        self._results: dict[int, tuple[Tensor, int, Any, Any, Any]] = {}
        self._keys: dict[Any, int] = {}

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Called after each function."""
        if type(result) is FakeTensor and id(result) not in self._results:
            self._results[id(result)] = result, version_of(result), func, args, kwargs

    def key(self, x: Tensor) -> int:
        """A number that tensors share if they have the same values. Those that were written to have their own."""
        known = self._keys.get((id(x), version_of(x)))
        if known is not None:
            return known
        form: Any = ("itself", id(x), version_of(x))
        _, _, func, args, kwargs = self._results.setdefault(id(x), (x, 0, None, (), {}))
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func is not None and _repeats_itself(func.__name__) and not any(map(self._is_written, [x, *tensors])):
            form = func, tuple(self.key(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        return self._keys.setdefault((id(x), version_of(x)), self._keys.setdefault(form, len(self._keys)))

    def _is_written(self, x: Tensor) -> bool:
        return version_of(x) != (self._results[id(x)][1] if id(x) in self._results else 0)

    def call(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """A call of a function that selects by a mask of data; NotImplemented if it does not."""
        if func in (torch.masked_select, Tensor.masked_select) and not kwargs and _is_mask(args[1]):
            x, mask = torch.broadcast_tensors(*args)
            return self._select(x, mask, self.key(args[1]))
        if func in _NONZERO and isinstance(args[0], FakeTensor) and len(args) == 1:
            return self._nonzero(args[0], func is torch.where or kwargs.get("as_tuple", False))
        if func in (Tensor.index_put_, Tensor.index_put, torch.index_put) and any(map(_is_mask, args[1])):
            _refuse(f"{func.__name__} by a mask")
        index = args[1] if func in (Tensor.__getitem__, Tensor.__setitem__) else ()
        parts = index if isinstance(index, tuple) else (index,)
        masks = [at for at, part in enumerate(parts) if _is_mask(part)]
        if not masks:
            return NotImplemented
        if masks != [0] or any(isinstance(part, Tensor | SelectedRows) for part in parts[1:]):
            _refuse("a mask beside or behind another index")
        mask, x = parts[0], args[0][(*[slice(None)] * parts[0].dim(), *parts[1:])]
        return self._select(x, mask) if func is Tensor.__getitem__ else self._write(x, mask, args[2])

    def _select(self, x: Tensor, mask: Tensor, key: Any = None) -> SelectedRows:
        """`x[mask]`. Ones are in the domain of what follows more often than zeros, and zeros are indices."""
        if mask.dim() == 0 or mask.shape != x.shape[: mask.dim()]:
            _refuse(f"a mask {list(mask.shape)} of a tensor {list(x.shape)}")
        rows, flat = x.flatten(0, mask.dim() - 1), mask.flatten()
        filled = torch.where(_beside(flat, rows), rows, x.is_floating_point())
        return SelectedRows(filled, flat, key or self.key(mask))

    def _nonzero(self, x: Tensor, as_tuple: bool) -> Any:
        """`torch.nonzero` and `torch.where` of a mask."""
        mask, key = (x, self.key(x)) if x.dtype is torch.bool else (x != 0, (torch.nonzero, self.key(x)))
        if not mask.dim():
            _refuse("torch.nonzero of a number")
        at = torch.arange(mask.numel(), device=x.device).view(mask.shape)
        each = [at // math.prod(mask.shape[d + 1 :]) % size for d, size in enumerate(mask.shape)]
        if not as_tuple:
            return self._select(torch.stack(each, -1), mask, key)
        rows = (self._select(positions, mask, key) for positions in each)
        return tuple(SelectedRows(row.data, row.mask, row.key, is_positions=mask.dim() == 1) for row in rows)

    def _write(self, x: Tensor, mask: Tensor, value: Any) -> None:
        """`x[mask] = value`, for a number, a tensor that is the same for all rows, or rows of the same mask."""
        if isinstance(value, SelectedRows):
            if value.key != self.key(mask):
                _refuse("rows of another mask, which are written")
            value = value.data.view(x.shape)
        elif isinstance(value, Tensor) and value.numel() == 1:
            value = value.reshape(())
        elif isinstance(value, Tensor) and value.dim() > x.dim() - mask.dim():
            _refuse(f"a tensor {list(value.shape)}, which is written into such rows")
        x.copy_(torch.where(_beside(mask, x), value, x))


_NONZERO = {torch.nonzero, Tensor.nonzero, torch.where}


def _is_mask(x: Any) -> bool:
    return isinstance(x, FakeTensor) and x.dtype is torch.bool


def _beside(mask: Tensor, x: Tensor) -> Tensor:
    return mask.view(*mask.shape, *[1] * (x.dim() - mask.dim()))


def has_rows(values: Any) -> bool:
    return any(isinstance(leaf, SelectedRows) for leaf in pytree.tree_leaves(values))


def on_rows(func: Any, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """`func` of arguments among which are selected rows. `function` computes it."""
    leaves = pytree.tree_leaves((args, kwargs))
    rows = [leaf for leaf in leaves if isinstance(leaf, SelectedRows)]
    first, name = rows[0], func.__name__.strip("_") if func.__name__.startswith("__") else func.__name__
    if name in ("min", "max") and len(args) == 2 and isinstance(args[1], Tensor | SelectedRows):
        name += "imum"
    if any(each.key != first.key for each in rows):
        _refuse(f"{name} of rows of two masks")
    plain = pytree.tree_map_only(SelectedRows, lambda each: each.data, (args, kwargs))
    if func in _LOSSES:
        return _loss(func, first, plain)
    if name == "getitem" and args[1] is first and isinstance(args[0], Tensor):
        return _look_up(args[0], first)
    if name in ("sum", "mean") and args[0] is first:
        dims = _dims(name, args, kwargs, first.data.dim())
        if dims in ((), (0,)) and not kwargs.get("keepdim"):
            return _reduced(first, name, dims == (0,), kwargs.get("dtype"))
    if not _is_by_row(name, first, args, kwargs, rows, [x for x in leaves if isinstance(x, Tensor)]):
        _refuse(f"{name} of such rows")
    result = function(*plain[0], **plain[1])
    return pytree.tree_map_only(Tensor, lambda x: SelectedRows(x, first.mask, first.key), result)


def _is_by_row(
    name: str, first: SelectedRows, args: Any, kwargs: Any, rows: list[SelectedRows], others: list[Tensor]
) -> bool:
    """Whether a function computes each row of its result from that row."""
    num_dims = first.data.dim()
    if _is_pointwise(name.removesuffix("_")):
        is_written = name.endswith("_") or name in ("iadd", "isub", "imul", "itruediv")
        is_same_for_rows = (x.dim() < num_dims or (x.dim() == num_dims and x.shape[0] == 1) for x in others)
        is_alike = all(each.data.dim() == num_dims for each in rows) and all(is_same_for_rows)
        return is_alike and not (is_written and args[0] is not first) and (name != "where" or len(args) == 3)
    if args[0] is not first or len(rows) > 1 + (name in ("gather", "cosine_similarity")):
        return False
    if name == "getitem":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        is_all = isinstance(index[0], slice) and index[0] == slice(None)
        is_short = index[0] is ... and sum(part is not None and part is not ... for part in index) < num_dims
        return (is_all or is_short) and sum(isinstance(part, Tensor) for part in index) < 2
    if name in _ALONG_LAST:
        return num_dims >= _ALONG_LAST[name] and (name != "matmul" or num_dims == 2 >= args[1].dim())
    dims = _dims(name, args, kwargs, num_dims + (name == "unsqueeze")) if name in _ALONG_DIMS else ()
    return dims != () and 0 not in dims


def _dims(name: str, args: Any, kwargs: Mapping[str, Any], num_dims: int) -> tuple[int, ...]:
    """The dims of a function along dims, counted from 0; none if it is over all."""
    at, usual = _ALONG_DIMS[name]
    given = kwargs.get("dim", kwargs.get("start_dim", args[at] if len(args) > at else usual))
    dims = given if isinstance(given, tuple | list) else (given,)
    return tuple(d % num_dims for d in dims if isinstance(d, int))


def _look_up(x: Tensor, rows: SelectedRows) -> SelectedRows:
    """`x[rows]`."""
    if rows.is_positions and x.shape[0] == len(rows.mask):
        picked = x
    elif rows.dtype in (torch.int64, torch.int32):
        picked = x[rows.data]
    else:
        _refuse(f"an index of {rows.dtype} among such rows")
    return SelectedRows(torch.where(_beside(rows.mask, picked), picked, x.is_floating_point()), rows.mask, rows.key)


def _reduced(rows: SelectedRows, name: str, over_rows_only: bool, dtype: torch.dtype | None = None) -> Tensor:
    """The sum or mean over the rows, or over all their elements; of no row, 0 and NaN."""
    x = rows.data if dtype is None else rows.data.to(dtype)
    wide = torch.where(_beside(rows.mask, x), x.to(wide_dtype(x.dtype)) if x.is_floating_point() else x, False)
    total = wide.sum(0) if over_rows_only else wide.sum()
    if name == "mean":
        total = total / (rows.mask.sum() * (1 if over_rows_only else math.prod(x.shape[1:])))
    return total.to(x.dtype) if x.is_floating_point() else total


def _loss(func: Any, first: SelectedRows, plain: tuple[Any, Any]) -> Any:
    """A loss of torch.nn.functional over the rows: of each, then reduced; targets outside of the mask are ignored."""
    given = dict(zip(("input", "target"), plain[0], strict=False)) | plain[1]
    x, target, reduction = given.pop("input"), given.pop("target"), given.pop("reduction", "mean")
    is_alike = x.shape[0] == target.shape[0] == len(first.mask)
    if len(plain[0]) > 2 or given.get("size_average") is not None or given.get("reduce") is not None or not is_alike:
        _refuse(f"{func.__name__} with another tensor, old options or options by position")
    if func in _BY_INDEX and not target.is_floating_point():
        target = torch.where(_beside(first.mask, target), target, given.get("ignore_index", -100))
        result = func(x, target, **given, reduction=reduction)
        return result if reduction != "none" else SelectedRows(result, first.mask, first.key)
    each = SelectedRows(func(x, target, **given, reduction="none"), first.mask, first.key)
    if reduction == "none":
        return each
    total = _reduced(each, "mean" if reduction == "mean" else "sum", False)
    return total / first.mask.sum() if reduction == "batchmean" else total
