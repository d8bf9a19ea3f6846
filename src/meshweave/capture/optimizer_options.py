"""The options of an optimizer's groups (lr, betas, entries of a scheduler) as checkpoints store them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshweave.capture.optimizer_several import name_of

_LOG = logging.getLogger("meshweave")
_PLAIN = (bool, int, float, str, type(None))


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """By group, the options that are plain values, sequences of them or tensors of a single number."""
    return [
        {key: _number(value) for key, value in group.items() if key != "params" and _is_plain(_number(value))}
        for group in optimizer.param_groups
    ]


def put_options(optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Set the saved options in groups, as `optimizer.load_state_dict` does. If the groups differ now, all stay
    unchanged, with a warning."""
    if not saved:  # from a checkpoint without options
        return
    if len(saved) != len(optimizer.param_groups):
        _LOG.warning(
            "%s has %d groups of parameters, and had %d when the checkpoint was written: options (lr, ...) stay as "
            "they are",
            name_of(optimizer), len(optimizer.param_groups), len(saved),
        )  # fmt: skip
        return
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        for key, value in options.items():
            now = group.get(key)
            if isinstance(now, Tensor):
                now.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, _PLAIN)
