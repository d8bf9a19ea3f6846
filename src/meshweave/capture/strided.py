"""`as_strided`, which reads memory by strides, as views that are functions of values."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

aten = torch.ops.aten


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    """A view expressed by other ops: windows along a contiguous tensor that may overlap, each of whole rows (frames of
    stft, chunks that share their halves), or permutations of all elements in memory. Anything else is an error, except
    for index tensors that autograd reads so."""
    start = x.storage_offset() if offset is None else offset
    place = zip(size, x.shape, stride, x.stride(), strict=False)
    same = [a == b and (n == m or a <= 1) for a, b, n, m in place]
    if all(same) and len(size) == x.dim() and start == x.storage_offset():
        return aten.view.default(x, list(size))
    if x.dim() == 0 or start != 0 or x.storage_offset() != 0:
        return NotImplemented
    if x.is_contiguous() and (windows := _windows(x, size, stride, same)) is not None:
        return windows
    order, target = _by_stride(x.shape, x.stride()), _by_stride(size, stride)
    dense = x.permute(order)
    if not dense.is_contiguous():
        return NotImplemented
    flat, sizes = dense.reshape(-1), [size[d] for d in target]
    if [stride[d] for d in target] == [prod(sizes[d + 1 :]) for d in range(len(sizes))] and prod(sizes) == len(flat):
        return flat.view(sizes).permute([target.index(d) for d in range(len(target))])
    if x.dtype != torch.int64:
        return NotImplemented  # a lookup would not be a view: writes to it would be lost
    index = torch.zeros(1, dtype=torch.int64, device=x.device)
    for n, step in zip(size, stride, strict=True):
        index = (index[:, None] + torch.arange(n, device=x.device) * step).flatten()
    return flat[index].view(list(size))


def _by_stride(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dims from the outermost in memory to the innermost."""
    return sorted(range(len(size)), key=lambda d: (-stride[d], size[d] > 1, d))


def _windows(x: Tensor, size: Sequence[int], stride: Sequence[int], same: Sequence[bool]) -> Tensor | None:
    """Windows after the leading dims that are the `same`; None if strides mean something else."""
    batch = next((d for d, is_same in enumerate(same) if not is_same), x.dim() - 1)
    inner = list(size[batch + 1 :])
    if not inner or list(stride[batch + 1 :]) != [prod(inner[d + 1 :]) for d in range(len(inner))]:
        return None
    count, window, hop, length = size[batch], prod(inner), stride[batch], prod(x.shape[batch:])
    if hop < 1 or (length - window) // hop + 1 < count:
        return None
    rows = x if batch == x.dim() - 1 else aten.view.default(x, [*x.shape[:batch], length])
    windows = aten.slice.Tensor(aten.unfold.default(rows, batch, window, hop), batch, 0, count)
    return windows if len(inner) == 1 else aten.view.default(windows, list(size))
