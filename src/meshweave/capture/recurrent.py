"""Recurrent layers of torch.nn in the form for capture: an op for each layer and direction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from meshweave.ir.recurrent import KINDS, recurrent

Cast = Callable[..., tuple[Any, ...]]


def _network(kind: str, cast: Cast, *args: Any) -> tuple[Tensor, ...]:
    """`torch.lstm` and its like. A packed sequence, whose sizes are constants, runs as torch's."""
    if not isinstance(args[3], bool):  # (data, batch_sizes, state, params, has_biases, ...)
        return KINDS[kind](*args)  # type: ignore[no-any-return]
    x, state, params, has_biases, num_layers, dropout, is_training, is_bidirectional, is_batch_first = args
    hidden, cell = state if kind == "lstm" else (state, state.new_empty((*state.shape[:2], 0)))
    x, hidden, cell, *params = cast(x, hidden, cell, *params)
    is_projected = kind == "lstm" and hidden.shape[2] != cell.shape[2]
    size = 2 + 2 * has_biases + is_projected
    x = x.transpose(0, 1) if is_batch_first else x
    last: list[tuple[Tensor, Tensor]] = []
    for layer in range(num_layers):
        outs: list[Tensor] = []
        for is_reverse in (False, True)[: 1 + is_bidirectional]:
            at = len(last)
            weights = list(params[at * size : (at + 1) * size])
            out, *ends = recurrent(x, hidden[at], cell[at], weights, kind, is_reverse)
            outs.append(out)
            last.append((ends[0], ends[1]))
        x = torch.cat(outs, -1) if is_bidirectional else outs[0]
        if dropout and is_training and layer < num_layers - 1:
            x = F.dropout(x, dropout, True)
    return (x.transpose(0, 1) if is_batch_first else x, *_stacked(last)[: 1 + (kind == "lstm")])


def _stacked(last: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([hidden for hidden, _ in last]), torch.stack([cell for _, cell in last])


def recurrent_functions(cast: Cast) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """By function of torch, what runs in its place; `cast(*tensors)` casts as autocast does for a matmul."""
    return {function: partial(_network, kind, cast) for kind, function in KINDS.items()}
