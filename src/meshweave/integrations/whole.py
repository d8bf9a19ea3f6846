"""Whole tensors, for what a trainer writes to a single file, and for its own calls of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshweave.interop import pytree
from meshweave.interop.modules import own_parameters
from meshweave.runtime.state import full_values


def whole(state: Any) -> Any:
    """A nest of containers with every DTensor in it gathered. All processes call it, with the same nest."""
    return pytree.tree_map(lambda value: value.full_tensor() if isinstance(value, DTensor) else value, state)


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """The model with whole parameters in the places of DTensors: for its forward alone. All processes call it."""
    tensors: dict[Tensor, nn.Parameter] = {}
    for x in model.parameters():
        if isinstance(x, DTensor):
            tensors[x] = nn.Parameter(full_values(x), requires_grad=False)
    owners = [own_parameters(module) for module in model.modules()]
    shards = [(own, name, x) for own in owners for name, x in own.items() if x is not None and x in tensors]
    try:
        for own, name, parameter in shards:
            own[name] = tensors[parameter]
        yield
    finally:
        for own, name, parameter in shards:
            own[name] = parameter
