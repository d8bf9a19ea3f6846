"""Where pieces lie in a tensor and in each other; assembles a piece from the parts of a transfer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshweave.ir.layout import Layout
from meshweave.ir.pieces import Box
from meshweave.ir.rank import Transfer
from meshweave.ir.routes import Message


def boxes_of(layout: Layout, shape: Sequence[int], devices: Sequence[int]) -> list[Box]:
    """The pieces of devices, as boxes of the global tensor."""
    return [layout.box_of(shape, device) for device in devices]


def piece_of(box: Box, inside: Box) -> tuple[slice, ...]:
    """Position of a global box in a piece that contains it."""
    pairs = zip(box.offset, box.size, inside.offset, strict=True)
    return tuple(slice(at - start, at - start + size) for at, size, start in pairs)


def receive(
    entry: Transfer,
    device: int,
    messages: Sequence[Message],
    own: Tensor | None,
    part: Callable[[Message], Tensor],
    on: torch.device,
    is_fresh: bool = False,
) -> Tensor:
    """A device's piece of a transfer's target, assembled from its own part (`own`) and the parts that others sent.
    `is_fresh`: parts that others sent have memory of their own, so that a single one may be the piece."""
    shape = entry.spec.shape
    mine = entry.target.box_of(shape, device)
    if own is not None and len(messages) == 1 and messages[0].sender == device and own.shape == torch.Size(mine.size):
        return own
    if is_fresh and len(messages) == 1 and messages[0].sender != device and messages[0].box == mine:
        return part(messages[0])
    piece = torch.empty(mine.size, dtype=entry.spec.dtype, device=on)
    for message in messages:
        if message.sender == device:
            assert own is not None
            piece[piece_of(message.box, mine)] = own[piece_of(message.box, entry.source.box_of(shape, device))]
        else:
            piece[piece_of(message.box, mine)] = part(message)
    return piece
