"""Parameters, buffers and optimizer state are made equal on every rank before the first step."""

from __future__ import annotations

import warnings
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.errors import MeshweaveError
from meshweave.runtime.coordinator import names_of_ranks
from meshweave.runtime.fingerprint import fingerprint, is_comparable

WAYS = ("broadcast", "error")


def align_weights(model: nn.Module, optimizer: torch.optim.Optimizer | None, world: Any, on_different: str) -> None:
    """Compare tensors of model and optimizer over ranks by fingerprint, and copy those of the first rank, in place, if
    any differs (DistributedDataParallel always does).

    Meta tensors are skipped (all ranks initialise them from the seed), and so are DTensors, whose pieces differ. With
    on_different="error" it raises MeshweaveError instead, on every rank, with tensors and ranks.
    """
    if not world.is_distributed:
        return
    tensors = _tensors(model, optimizer)
    numbers = {name: int(fingerprint(value)) for name, value in tensors.items()}
    digests = world.exchange("the comparison of weights", sha256(repr(numbers).encode()).hexdigest())
    others = [rank for rank, digest in sorted(digests.items()) if digest != digests[0]]
    if not others:
        return
    first = world.exchange("the comparison of weights", numbers if world.rank == 0 else None)[0]
    differing = [name for name, number in numbers.items() if number != first[name]]
    shown = ", ".join(f"'{name}'" for name in differing[:3])
    own = f"{len(differing)} of {len(numbers)} tensors differ from the first rank's: {shown}"
    got = world.exchange("the comparison of weights", own)[others[0]]
    if on_different == "error":
        raise MeshweaveError(
            "ranks have different weights",
            where=names_of_ranks(others),
            got=f"{got}, on rank {others[0]}",
            expected="the same model on every rank",
            hint="seed every rank equally, load the same checkpoint, or leave on_different_weights at 'broadcast'",
        )
    with torch.no_grad():
        for value in tensors.values():
            value.copy_(world.broadcast(value))
    if world.rank == 0:
        warnings.warn(
            f"meshweave: {names_of_ranks(others)} had other weights than the first rank, whose weights are now used on "
            f"all ({got}); on_different_weights='error' raises instead",
            stacklevel=3,
        )


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Every real, whole tensor by name: that of a parameter or buffer, or its slot in the optimizer's state."""
    tensors: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = {id(p): name for name, p in model.named_parameters()}
    for param, slots in () if optimizer is None else optimizer.state.items():
        tensors |= {f"{key} of {names.get(id(param), '?')}": value for key, value in slots.items()}
    return {name: value.detach() for name, value in tensors.items() if is_comparable(value)}
