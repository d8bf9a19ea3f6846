"""Checks that what users write between steps is the same on every rank that has it; a difference is an error on every
rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshweave.errors import StepError
from meshweave.interop.storages import sharing
from meshweave.runtime.consensus import named
from meshweave.runtime.fingerprint import fingerprint, text_number

MOST_WORDS = 1 << 12  # 8-byte words of a tensor that are compared: few, because some users write in every step
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor that was written: the whole value, or this rank's piece. Ranks with equal `places` have the same
    values."""

    name: str
    value: Tensor
    places: Mapping[int, Any]


def shown_names(names: Sequence[str]) -> str:
    """Some of the names, and how many there are."""
    if not names:
        return "nothing"
    some = ", ".join(names[:_SHOWN])
    rest = f" and {len(names) - _SHOWN} more ({text_number(repr(list(names))):x})" if len(names) > _SHOWN else ""
    return some + rest


def check_separate(changing: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None) -> None:
    """Raises StepError if a tensor that steps change shares memory with another of them, or with one of the others: a
    step gives each its own value. Tensors without memory of their own (meta, sparse) are skipped."""
    for other, name in sharing({**(others or {}), **changing}):
        if name in changing or other in changing:
            raise StepError(
                f"{name} shares memory with {other}",
                got="two tensors on the same storage, written between steps, and a step changes one of them",
                expected="a storage of its own for each value",
                hint="write copies: clone() what is assigned",
            )


def check_written(world: Any, written: Sequence[Written]) -> None:
    """Compare what was written over ranks, by fingerprint. All ranks of a ClusterWorld call it; it is an error on every
    rank if not all have written the same tensors (`World.choose`), or if values differ.
    Raises StepError."""
    if not world.is_distributed:
        return
    world.choose(f"takes over {'what was written into ' * bool(written)}{shown_names([x.name for x in written])}")
    if not written:
        return
    fingerprints = world.gather(torch.stack([fingerprint(x.value, MOST_WORDS).cpu() for x in written]))
    for i, x in enumerate(written):
        first: dict[Any, int] = {}
        for rank, place in x.places.items():
            leader = first.setdefault(place, rank)
            if int(fingerprints[rank][i]) != int(fingerprints[leader][i]):
                raise StepError(
                    "ranks have written different values between two steps",
                    where=f"{x.name}, {named([rank])}",
                    got=f"other values than on rank {leader}",
                    expected="the same values on every rank that has them, or replicas would diverge",
                    hint="seed every rank equally (torch.manual_seed) before it writes, or write on the first rank "
                    "and copy to the others: torch.distributed.broadcast",
                )
