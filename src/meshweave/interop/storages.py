"""Which memory a tensor lives in, and whether it has been written.

Holds for torch 2.11 to 2.13 (torch/storage.py, torch/_tensor.py). `data_ptr` would tell storages apart in public, but
is 0 for all that hold no data; a count of writes is not public at all.
"""

from __future__ import annotations

import torch


def storage_key(x: torch.Tensor) -> int:
    """A number that views of one storage share, with data or without. For strided tensors: others have no one storage,
    and raise NotImplementedError."""
    return x.untyped_storage()._cdata


def is_stored_in(x: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether a tensor still has a storage: a DTensor has one without data, and another one after an assignment to its
    `.data`, which leaves its local tensor as it is."""
    return x.untyped_storage()._cdata == storage._cdata


def version_of(x: torch.Tensor) -> int:
    """What every write in place counts up; -1 for tensors of inference mode, which count nothing."""
    return -1 if x.is_inference() else x._version
