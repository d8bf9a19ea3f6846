"""Fake tensors, and the dispatch modes that see every operator.

Holds for torch 2.11 to 2.13 (torch/_subclasses/fake_tensor.py, torch/utils/_python_dispatch.py,
torch/utils/_mode_utils.py). torch documents both for authors of tracers, but not in a public module, which would
replace this file.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

without_modes = _disable_current_modes  # a context in which no dispatch mode is active


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
