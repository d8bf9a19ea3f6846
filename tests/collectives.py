"""What a collective gives on virtual devices: the reference of tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from meshweave.ir.mesh import Mesh
from meshweave.runtime.local import exchange


def groups(mesh: Mesh, axes: Sequence[str]) -> list[list[int]]:
    """Groups of positions (not ids) over the flattened axes."""
    return [[mesh.index(device) for device in group] for group in mesh.groups(axes)]


def collect(mesh: Mesh, op: Any, axes: Sequence[str], operands: Sequence[Tensor], args: Sequence[Any]) -> list[Tensor]:
    """The result of each device, by position; `operands` too."""
    results: dict[int, Tensor] = {}
    for group in groups(mesh, axes):
        results.update(zip(group, exchange(op, [operands[i] for i in group], args), strict=True))
    return [results[i] for i in range(mesh.num_devices)]
