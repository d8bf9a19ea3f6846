"""Fake tensors, and the dispatch modes that see every operator.

Holds for torch 2.11 to 2.13 (torch/_subclasses/fake_tensor.py, torch/utils/_python_dispatch.py,
torch/utils/_mode_utils.py). torch documents both for authors of tracers, but not in a public module, which would
replace this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from meshweave.interop.ops import aten_ops, is_mutable, is_operator

# The results of common operators on fake tensors, without the way through `FakeTensorMode.dispatch`. Holds for torch
# 2.11 to 2.13 (torch/_subclasses/fake_tensor.py). That way takes about 1 ms for sizes that it has not seen and 0.2 ms
# for others, most of it for the keys of its cache and for meta kernels in Python; a step whose sizes are new has none
# but the former.

# Their meta kernels are in C++, and the mode adds nothing to them.
_BY_KERNEL = frozenset(
    aten_ops(
        "view _unsafe_view t transpose.int permute expand slice.Tensor select.int unsqueeze squeeze.dim detach alias "
        "mm bmm"
    )
)
_REDUCTIONS = frozenset(aten_ops("sum.dim_IntList mean.dim amax amin"))
_COPIES = frozenset(aten_ops("clone _to_copy"))
_SAMPLE = 3  # size of a dim
_NUMBERS = (bool, int, float)
_KEYWORDS = frozenset({"alpha", "rounding_mode", "approximate", "dtype"})


def result_of(mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operator on fake tensors of `mode`; NotImplemented for what this file does not know."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    if not all(_is_plain(x, tensors[0]) for x in tensors):
        return NotImplemented
    if func in _BY_KERNEL:
        return _run_kernel(mode, func, args, kwargs)
    if not _KEYWORDS.issuperset(kwargs):
        return NotImplemented
    if func in _REDUCTIONS:
        return _reduced(mode, func, args, kwargs)
    return _pointwise(mode, func, tensors, args, kwargs) if _is_pointwise(func) else NotImplemented


@cache
def _is_pointwise(func: Any) -> bool:
    return (torch.Tag.pointwise in func.tags and not is_mutable(func)) or func in _COPIES


def _is_plain(x: Any, first: Any) -> bool:
    """Whether a tensor is fake, and like the first, without what the mode treats in a way of its own."""
    return (
        type(x) is FakeTensor
        and x.fake_device == first.fake_device
        and x.constant is None
        and x.layout == torch.strided
        and not x.dtype.is_complex
    )


def _run_kernel(mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    with in_kernel_invocation_manager(mode):
        result = func(*args, **kwargs)
    return FakeTensor(mode, result, args[0].fake_device)


def _new(mode: FakeTensorMode, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, like: Any) -> Tensor:
    with in_kernel_invocation_manager(mode):
        meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, like.fake_device)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = list[int](), 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill their memory, in any order of the dims."""
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def _pointwise(
    mode: FakeTensorMode, func: Any, tensors: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Operands of the same sizes and strides give these, contiguous operands a contiguous result."""
    wide = [x for x in tensors if x.dim()]
    shape, strides = (tuple(wide[0].shape), wide[0].stride()) if wide else ((), ())
    if not all(x.shape == shape and x.stride() == strides for x in wide) or not _is_dense(shape, strides):
        if not all(x.is_contiguous() for x in wide):
            return NotImplemented
        shape = tuple(torch.broadcast_shapes(*(x.shape for x in wide)))
        strides = _contiguous(shape)
    dtype = _dtype_of(func, tuple(map(_kind, args)), tuple(kwargs.items()), torch.get_default_dtype())
    return NotImplemented if dtype is None else _new(mode, shape, strides, dtype, tensors[0])


def _reduced(mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    x, dims, keepdim, *rest = (*args, None, False)[: max(3, len(args))]
    if rest:
        return NotImplemented
    rank = x.dim()
    over = {d % rank for d in dims} if dims and rank else set(range(rank))
    if not x.numel() or (dims and not (len(over) == len(dims) and all(-rank <= d < rank for d in dims))):
        return NotImplemented
    sizes = [1 if d in over else size for d, size in enumerate(x.shape)]
    shape = tuple(size for d, size in enumerate(sizes) if keepdim or d not in over)
    dtype = _dtype_of(func, (_kind(x), ((),)), tuple(kwargs.items()), torch.get_default_dtype())
    return NotImplemented if dtype is None else _new(mode, shape, _contiguous(shape), dtype, x)


def _kind(operand: Any) -> Any:
    """All of an operand that the dtype of a result depends on."""
    if isinstance(operand, Tensor):
        return operand.dtype, operand.dim() > 0
    return type(operand) if type(operand) in _NUMBERS else (operand,) if operand is None else NotImplemented


@lru_cache(1 << 12)
def _dtype_of(
    func: Any, kinds: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], default: torch.dtype
) -> torch.dtype | None:
    """The dtype of a result, from a sample; None if the operator has other results than a tensor of the expected
    form, or operands that this file does not know."""
    if NotImplemented in kinds:
        return None
    args, mode = [_sample(kind) for kind in kinds], FakeTensorMode()
    with mode:
        args = [torch.empty(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x for x in args]
        try:
            result = mode.dispatch(func, (FakeTensor,), args, dict(kwargs))
        except RuntimeError:  # dtypes that the operator does not take: its own error tells the user
            return None
    is_scalar = func in _REDUCTIONS or not any(isinstance(x, Tensor) and x.dim() for x in args)
    expected = () if is_scalar else (_SAMPLE, _SAMPLE)
    return result.dtype if type(result) is FakeTensor and tuple(result.shape) == expected else None


def _sample(kind: Any) -> Any:
    if kind in _NUMBERS:
        return kind(1)
    if len(kind) == 1:
        return kind[0]
    dtype, has_dims = kind
    return torch.empty((_SAMPLE, _SAMPLE) if has_dims else (), dtype=dtype, device="meta")


without_modes = _disable_current_modes  # a context in which no dispatch mode is active
# A context without function modes, which would see each x.shape of code that autograd's backward pass calls: inside a
# function they are not active, but the backward pass is not inside a function.
without_functions = torch._C.DisableTorchFunction  # type: ignore[attr-defined]


class DispatchMode(TorchDispatchMode):
    """A mode that sees every operator. torch wraps the handlers of others, so that Dynamo does not trace them, which
    takes a tenth of an op's time; Dynamo compiles nothing while a mode is active."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def run_plain(func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`func(*args, **kwargs)` in the handler of a mode, for operands of these `types`. If all are fake and no mode is
    left, the mode of the operands runs the op at once: torch would first dispatch to the class of the tensors, which
    looks for their mode and dispatches again."""
    is_fake = len(types) > 0 and all(kind is FakeTensor for kind in types)
    if is_fake and is_operator(func) and not torch._C._len_torch_dispatch_stack():  # type: ignore[attr-defined]
        for operand in args:
            if type(operand) is FakeTensor:
                mode = operand.fake_mode
                with without_functions():
                    result = result_of(mode, func, args, kwargs)
                    return mode.dispatch(func, types, args, kwargs) if result is NotImplemented else result
    return func(*args, **kwargs)


def device_of(x: torch.Tensor) -> torch.device:
    """What `prim.device` returns in a handler, to which each question for the device of a fake tensor comes: autograd
    asks several times an op."""
    if isinstance(x, FakeTensor):
        return torch.device("meta") if x.fake_mode.in_kernel_invocation else x.fake_device
    return x.device


def fake_like(meta: torch.Tensor, like: Any) -> torch.Tensor:
    """A meta tensor as a fake tensor of the mode and device of `like`; unchanged if `like` is not fake."""
    return FakeTensor(like.fake_mode, meta, like.device) if isinstance(like, FakeTensor) else meta


def meta_like(x: torch.Tensor) -> torch.Tensor:
    """A meta tensor over the same storage, if the storage has no data."""
    with no_dispatch():
        if isinstance(x, FakeTensor):
            bare = torch.empty(0, dtype=x.dtype, device="meta")
            return bare.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
        return x if x.device.type == "meta" else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
