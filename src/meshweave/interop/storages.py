"""The memory of a tensor, and whether it has been written.

Holds for torch 2.11 to 2.13 (torch/storage.py, torch/_tensor.py, torch/_C/__init__.pyi). `data_ptr` would identify
storages publicly, but is 0 for all without data; the version counter and the number of users are not public at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def storage_key(x: torch.Tensor) -> int:
    """A number that views of the same storage share, with data or without. Only for strided tensors: others do not have
    a single storage, and raise NotImplementedError."""
    return x.untyped_storage()._cdata


def is_stored_in(x: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether a tensor still has a storage: a DTensor has a storage without data, and another after an assignment to
    its `.data`, which does not change its local tensor."""
    return x.untyped_storage()._cdata == storage._cdata


def is_unshared(x: torch.Tensor) -> bool:
    """Whether no other tensor has the storage of `x`. A view shares that of its base, which it keeps alive."""
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) == 2  # `x` and this variable


def version_of(x: torch.Tensor) -> int:
    """The version counter, which every write in place increments; -1 for tensors of inference mode, which have none."""
    try:
        return x._version
    except RuntimeError:
        return -1


def increase_versions(tensors: Sequence[torch.Tensor]) -> None:
    """Count a write in place for each tensor, once; tensors of inference mode have no version."""
    torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])
