"""Receive buffers of communications, reused from message to message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor


@dataclass(slots=True)
class Buffers:
    """Buffers of a group.

    The operating system maps fresh memory page by page at the first write, which takes longer than the copy (0.5 us for
    4 KiB in a virtual machine); a reused buffer is mapped already. There are as many buffers of a size as were ever in
    use at once. Devices with a caching allocator do not need them."""

    _free: dict[tuple[int, torch.dtype], list[Tensor]] = field(default_factory=dict)

    def take(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A contiguous uninitialised tensor with the dtype and device of another."""
        free = self._free.get((prod(shape), like.dtype))
        return free.pop().view(*shape) if free else like.new_empty(shape)

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer that is no longer read."""
        if not buffer.is_cuda:
            self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)
