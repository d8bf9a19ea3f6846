"""Collectives of `torch.distributed` under their names in torch 2.13, which deprecates those of 2.11 and 2.12."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

# (output, input, group, async_op) and (output, input, op, group, async_op), as under the older names.
all_gather_single: Callable[..., dist.Work] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Callable[..., dist.Work] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
