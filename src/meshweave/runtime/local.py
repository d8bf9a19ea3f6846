"""What communications do between devices of one process, and how the parts of a transfer become a piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshweave.ir.pieces import Box
from meshweave.ir.rank import Transfer, collectives, destinations, permute
from meshweave.ir.routes import Message

Values = list[Any]


def reduce_in_order(parts: Sequence[Tensor], op: str) -> Tensor:
    """Reduce in the order of the group: sums of half-precision values are taken in float32."""
    if op == "sum":
        wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
        total = parts[0].to(wide, copy=True)
        for part in parts[1:]:
            total += part
        return total.to(parts[0].dtype)
    combine = {"max": torch.maximum, "min": torch.minimum}[op]
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return total


def _all_gather(parts: Sequence[Tensor], args: Sequence[Any]) -> Values:
    return [torch.cat(list(parts), 0)] * len(parts)


def _all_reduce(parts: Sequence[Tensor], args: Sequence[Any]) -> Values:
    return [reduce_in_order(parts, args[0])] * len(parts)


def _reduce_scatter(parts: Sequence[Tensor], args: Sequence[Any]) -> Values:
    dealt = [part.chunk(len(parts), 0) for part in parts]
    return [reduce_in_order([row[i] for row in dealt], args[0]) for i in range(len(parts))]


def _all_to_all(parts: Sequence[Tensor], args: Sequence[Any]) -> Values:
    dealt = [part.chunk(len(parts), 0) for part in parts]  # blocks are equal, though not the same in every group
    return [torch.cat([row[i] for row in dealt], 0) for i in range(len(parts))]


def _permute(parts: Sequence[Tensor], args: Sequence[Any]) -> Values:
    """What comes from another device is a copy; what stays is what it was."""
    received: Values = [None] * len(parts)
    for sender, receiver in enumerate(destinations(args[0], len(parts))):
        received[receiver] = parts[sender] if sender == receiver else _own(parts[sender])
    return received


def _broadcast(parts: Sequence[Tensor], args: Sequence[Any]) -> Values:
    source = parts[args[0]]
    return [part if part is source else _own(source) for part in parts]


def _own(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


_TABLE: dict[Any, Callable[[Sequence[Tensor], Sequence[Any]], Values]] = {
    collectives.all_gather_into_tensor.default: _all_gather,
    collectives.all_reduce.default: _all_reduce,
    collectives.reduce_scatter_tensor.default: _reduce_scatter,
    collectives.all_to_all_single.default: _all_to_all,
    collectives.broadcast.default: _broadcast,
    permute: _permute,
}


def exchange(op: Any, operands: Sequence[Tensor], args: Sequence[Any]) -> Values:
    """What every member of a group gets of a collective, in the order of the group; `args` without the group."""
    return _TABLE[op](operands, args)


def piece_of(box: Box, inside: Box) -> tuple[slice, ...]:
    """Where a global box lies in a piece that holds it."""
    pairs = zip(box.offset, box.size, inside.offset, strict=True)
    return tuple(slice(at - start, at - start + size) for at, size, start in pairs)


def receive(
    made: Transfer,
    device: int,
    messages: Sequence[Message],
    own: Tensor | None,
    part: Callable[[Message], Tensor],
    on: torch.device,
) -> Tensor:
    """A device's piece of a transfer's target, put together from what it has (`own`) and the parts that others sent."""
    shape = made.spec.shape
    mine = made.target.box_of(shape, device)
    if own is not None and len(messages) == 1 and messages[0].sender == device and own.shape == torch.Size(mine.size):
        return own
    piece = torch.empty(mine.size, dtype=made.spec.dtype, device=on)
    for message in messages:
        if message.sender == device:
            assert own is not None
            piece[piece_of(message.box, mine)] = own[piece_of(message.box, made.source.box_of(shape, device))]
        else:
            piece[piece_of(message.box, mine)] = part(message)
    return piece
