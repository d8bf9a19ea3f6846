"""Memory into which communications receive what is read once, kept from one to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor


@dataclass(slots=True)
class Buffers:
    """Buffers of one group. The operating system gives fresh memory page by page as it is first written, which takes
    longer than the copy (0.5 us for 4 KiB in a virtual machine): one that comes back is written at once. There are as
    many of a size as were ever under way together. Devices with a caching allocator have no use for it."""

    _free: dict[tuple[int, torch.dtype], list[Tensor]] = field(default_factory=dict)

    def take(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A contiguous tensor of any values, with the dtype and device of another."""
        free = self._free.get((prod(shape), like.dtype))
        return free.pop().view(*shape) if free else like.new_empty(shape)

    def give_back(self, buffer: Tensor) -> None:
        """Keep a buffer whose values nobody reads any more."""
        if not buffer.is_cuda:
            self._free.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)
