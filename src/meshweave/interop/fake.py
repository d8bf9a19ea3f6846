"""Fake tensors, and the dispatch modes that see every operator.

Holds for torch 2.11 to 2.13 (torch/_subclasses/fake_tensor.py, torch/utils/_python_dispatch.py,
torch/utils/_mode_utils.py). torch documents both for authors of tracers, but not in a public module, which would
replace this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from meshweave.interop.fake_ops import result_of
from meshweave.interop.ops import is_operator

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
