"""The memory of a tensor, and whether it has been written.

Holds for torch 2.11 to 2.13 (torch/storage.py, torch/_tensor.py, torch/_C/__init__.pyi). `data_ptr` would identify
storages publicly, but is 0 for all without data; the version counter and the number of users are not public at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch

K = TypeVar("K")


def storage_key(x: torch.Tensor) -> int:
    """A number that views of the same storage share, with data or without. Only for strided tensors: others do not have
    a single storage, and raise NotImplementedError."""
    return x.untyped_storage()._cdata


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two strided tensors share an element: slices of a storage may lie beside or between each other."""
    if not a.numel() or not b.numel() or storage_key(a) != storage_key(b):
        return False
    (first, last), (start, end) = _bytes_of(a), _bytes_of(b)
    if last <= start or end <= first or a.element_size() != b.element_size():
        return first < end and start < last
    taken = torch.zeros(max(last, end) // a.element_size(), dtype=torch.bool)
    taken.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(taken.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def sharing(
    tensors: Mapping[K, torch.Tensor], memory: Callable[[torch.Tensor], int] = storage_key
) -> Iterator[tuple[K, K]]:
    """The pairs of tensors that share an element, the earlier first. `memory` says where a tensor lives, 0 for nowhere;
    different storages at one place count as the same. Meta and sparse tensors share nothing."""
    owners: dict[int, list[K]] = {}
    for key, x in tensors.items():
        if x.layout != torch.strided or x.is_meta or not (place := memory(x)):
            continue
        neighbours = owners.setdefault(place, [])
        for other in neighbours:
            y = tensors[other]
            if storage_key(x) != storage_key(y) or overlap(x, y):
                yield other, key
        neighbours.append(key)


def _bytes_of(x: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the byte after its last."""
    first = int(x.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return first * x.element_size(), (last + 1) * x.element_size()


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
