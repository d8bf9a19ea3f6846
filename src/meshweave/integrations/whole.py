"""Whole tensors, for what a trainer writes to a single file."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from meshweave.interop import pytree


def whole(state: Any) -> Any:
    """A nest of containers with every DTensor in it gathered. All processes call it, with the same nest."""
    return pytree.tree_map(lambda value: value.full_tensor() if isinstance(value, DTensor) else value, state)
