"""How fast a device computes, to price work that an assignment repeats: a coarse rate per dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from meshweave.cost.hardware import Costs, MachineProfile, Matmul, MemoryWork
from meshweave.errors import MeshweaveError
from meshweave.ir.graph import Spec

_SIDE = 2048  # size of the square matmul that represents all
_BYTES = 16 << 20  # bytes read and written by the op that represents memory-bound work


@dataclass(frozen=True, slots=True)
class ComputeRate:
    """Compute rate of a device. The default is that of an H100 SXM (data sheet, nvidia.com/h100, 2023: 989 TFLOP/s bf16
    dense at about half efficiency; 3.35 TB/s HBM3)."""

    flops_per_second: float = 5e14
    bytes_per_second: float = 3e12

    def seconds(self, num_steps: int, results: Sequence[Spec]) -> float:
        """Seconds of an op with so many loop iterations that writes `results`."""
        return 2.0 * num_steps / self.flops_per_second + sum(s.num_bytes for s in results) / self.bytes_per_second


Rates = Callable[[torch.dtype], ComputeRate]


def default_rates(dtype: torch.dtype) -> ComputeRate:
    """The rates for an unknown machine."""
    return ComputeRate()


def rates_of(costs: Costs) -> Rates:
    """The rates of a machine profile: those of float32 for a dtype without figures."""
    if not isinstance(costs, MachineProfile):
        return default_rates

    @cache
    def rate(dtype: torch.dtype) -> ComputeRate:
        for known in dict.fromkeys((dtype, torch.float32)):
            try:
                return _measured(costs, known)
            except MeshweaveError:
                continue
        return ComputeRate()

    return rate


def _measured(profile: MachineProfile, dtype: torch.dtype) -> ComputeRate:
    matmul = Matmul(_SIDE, _SIDE, _SIDE, 1, dtype, 3 * _SIDE**2 * dtype.itemsize)
    memory = MemoryWork("pointwise", _BYTES, _BYTES // 2 // dtype.itemsize, dtype)
    return ComputeRate(matmul.flops / profile.compute_seconds(matmul), _BYTES / profile.compute_seconds(memory))
