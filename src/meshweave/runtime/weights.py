"""Parameters, buffers and optimizer state are made equal on every rank before the first step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.errors import MeshweaveError
from meshweave.runtime.consensus import named
from meshweave.runtime.fingerprint import fingerprint, text_number
from meshweave.runtime.identity import is_comparable
from meshweave.runtime.together import Ranks

WAYS = ("broadcast", "error")


def align_weights(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: Ranks, world: Any, on_different: str
) -> None:
    """Compare tensors of model and optimizer over ranks by fingerprint, and copy those of the first rank, in place,
    where they differ (DistributedDataParallel always does).

    Meta tensors are skipped (all ranks initialise them from the seed), and so are DTensors, whose pieces differ. With
    on_different="error" it raises MeshweaveError instead, on every rank, with tensors and ranks.
    """
    if ranks.is_alone:
        return
    tensors = _tensors(model, optimizer)
    numbers = {name: int(fingerprint(value)) for name, value in tensors.items()}
    differing = _differing(numbers, ranks)
    if not differing:
        return
    shown = ", ".join(f"'{name}'" for name in [*differing][:3])
    others = sorted({rank for its in differing.values() for rank in its})
    if on_different == "error":
        ranks.fail(
            MeshweaveError(
                "ranks have different weights",
                where=named(others),
                got=f"{len(differing)} of {len(tensors)} tensors differ from the first rank's: {shown}",
                expected="the same model on every rank",
                hint="seed every rank equally, load the same checkpoint, or leave on_different_weights at 'broadcast'",
            )
        )
    with world.guard(), torch.no_grad():  # world is a ClusterWorld if ranks are not alone
        for name in differing:
            tensors[name].copy_(world.broadcast(tensors[name].detach()))
    if ranks.is_first:
        warnings.warn(
            f"meshweave: {named(others)} had other weights than the first rank, whose weights are now used on all "
            f"({len(differing)} of {len(tensors)} tensors: {shown}); on_different_weights='error' raises instead",
            stacklevel=3,
        )


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Every real, whole tensor by name: that of a parameter or buffer, or its slot in the optimizer's state."""
    tensors: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = {id(p): name for name, p in model.named_parameters()}
    for param, slots in () if optimizer is None else optimizer.state.items():
        tensors |= {f"{key} of {names.get(id(param), '?')}": value for key, value in slots.items()}
    return {name: value.detach() for name, value in tensors.items() if is_comparable(value)}


def _differing(numbers: Mapping[str, int], ranks: Ranks) -> dict[str, list[int]]:
    """Names of tensors to the ranks whose values differ from the first rank's; compared in full if a digest differs."""
    whole = text_number(repr(numbers))
    if not ranks.say(whole, lambda answers: len(set(answers.values())) > 1):
        return {}

    def judge(answers: Mapping[int, dict[str, int]]) -> dict[str, list[int]]:
        lead = answers[min(answers)]
        differing = {n: [rank for rank, its in answers.items() if its.get(n) != value] for n, value in lead.items()}
        return {name: others for name, others in differing.items() if others}

    return dict(ranks.say(dict(numbers), judge))
