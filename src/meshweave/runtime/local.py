"""Collectives between virtual devices of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import collectives

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


_TABLE: dict[Any, Callable[[Sequence[Tensor], Sequence[Any]], Values]] = {
    collectives.all_gather_into_tensor.default: _all_gather,
    collectives.all_reduce.default: _all_reduce,
    collectives.reduce_scatter_tensor.default: _reduce_scatter,
    collectives.all_to_all_single.default: _all_to_all,
}


class LocalCommunicator:
    """Collectives among all devices of a mesh held by one process; done when started."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._groups: dict[tuple[str, ...], list[list[int]]] = {}

    def groups(self, axes: tuple[str, ...]) -> list[list[int]]:
        """Groups of positions (not ids) over the flattened axes."""
        if axes not in self._groups:
            where = {device: position for position, device in enumerate(self._mesh.devices)}
            self._groups[axes] = [[where[d] for d in group] for group in self._mesh.groups(axes)]
        return self._groups[axes]

    def start(self, op: Any, axes: tuple[str, ...], operands: Sequence[Tensor], args: Sequence[Any]) -> Values:
        results: Values = [None] * len(operands)
        for group in self.groups(axes):
            made = _TABLE[op]([operands[i] for i in group], args)
            for i, value in zip(group, made, strict=True):
                results[i] = value
        return results

    def wait(self, values: Values) -> Values:
        return values
