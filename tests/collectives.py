"""What a collective gives on virtual devices: the reference of tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from meshweave.ir.collectives import TABLE
from meshweave.ir.mesh import Mesh


def groups(mesh: Mesh, axes: Sequence[str]) -> list[list[int]]:
    """Groups of positions (not ids) over the flattened axes."""
    return [[mesh.index(device) for device in group] for group in mesh.groups(axes)]


def collect(mesh: Mesh, op: Any, axes: Sequence[str], operands: Sequence[Tensor], args: Sequence[Any]) -> list[Tensor]:
    """The result of each device, by position; `operands` too."""
    results: dict[int, Tensor] = {}
    for group in groups(mesh, axes):
        results.update(zip(group, TABLE[op].exchange([operands[i] for i in group], args), strict=True))
    return [results[i] for i in range(mesh.num_devices)]
