"""Parameters that a compile has replaced by DTensors, as optimizers that were created before still refer to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_SUCCESSOR = "replaced_by"  # an attribute of a replaced parameter: the parameter in its place


def replace_in_optimizer(optimizer: torch.optim.Optimizer, replaced: Mapping[Tensor, Tensor]) -> None:
    """Replace parameters in an optimizer's groups and in its state."""
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(p, p) for p in group["params"]]
    for p in [p for p in optimizer.state if p in replaced]:
        optimizer.state[replaced[p]] = optimizer.state.pop(p)


def note_replaced(replaced: Mapping[Tensor, Tensor]) -> None:
    """Let replaced parameters refer to those in their places."""
    for old, new in replaced.items():
        setattr(old, _SUCCESSOR, new)


def follow_replaced(optimizer: torch.optim.Optimizer, params: Iterable[Tensor]) -> None:
    """Let an optimizer have the present parameters of a model, `params`, where an earlier compile for another optimizer
    has replaced them. The values are those of the present parameters."""
    present = {id(p) for p in params}
    replaced: dict[Tensor, Tensor] = {}
    for old in [p for group in optimizer.param_groups for p in group["params"]]:
        new = old
        while id(new) not in present and (successor := getattr(new, _SUCCESSOR, None)) is not None:
            new = successor
        if new is not old and id(new) in present:
            replaced[old] = new
    if replaced:
        replace_in_optimizer(optimizer, replaced)
