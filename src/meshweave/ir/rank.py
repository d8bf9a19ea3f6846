"""Rank graphs: what one role runs, with groups and rank symbolic.

A rank graph holds local ATen ops, `_c10d_functional` collectives whose group name is an axis list ("dp,tp"), and the
symbolic integers of this module, which are functions of the device's coordinates and are bound when the graph is run.
So one graph serves every device of its role, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from meshweave.ir.graph import Input, graph_text
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.pieces import nested_chunk

Coordinates = Mapping[str, int]
collectives = torch.ops._c10d_functional

STARTS = frozenset(
    {
        collectives.all_gather_into_tensor.default,
        collectives.reduce_scatter_tensor.default,
        collectives.all_reduce.default,
        collectives.all_to_all_single.default,
    }
)
WAIT = collectives.wait_tensor.default


def piece_size(coords: Coordinates, size: int, axes: Sequence[str], parts: Sequence[int], unit: int) -> int:
    """Size of this device's piece of a dim of `size` cut by `axes`."""
    return nested_chunk(size, [(n, coords[axis]) for axis, n in zip(axes, parts, strict=True)], unit)[1]


def piece_offset(coords: Coordinates, size: int, axes: Sequence[str], parts: Sequence[int], unit: int) -> int:
    """Offset of this device's piece in a dim of `size` cut by `axes`."""
    return nested_chunk(size, [(n, coords[axis]) for axis, n in zip(axes, parts, strict=True)], unit)[0]


def member_pieces(
    coords: Coordinates, size: int, axes: Sequence[str], parts: Sequence[int], unit: int
) -> tuple[tuple[int, int], ...]:
    """(offset, size) of the pieces of a dim of `size` cut by `axes`, for each device of its group of the last axis."""
    outer = [(n, coords[axis]) for axis, n in zip(axes[:-1], parts[:-1], strict=True)]
    return tuple(nested_chunk(size, [*outer, (parts[-1], j)], unit) for j in range(parts[-1]))


def axis_index(coords: Coordinates, axes: Sequence[str], parts: Sequence[int]) -> int:
    """Index of this device in its group of the flattened `axes`, the first axis slowest."""
    index = 0
    for axis, size in zip(axes, parts, strict=True):
        index = index * size + coords[axis]
    return index


def linear(coords: Coordinates, base: int, *terms: tuple[int, int]) -> int:
    """base plus the sum of a * b over the terms."""
    return base + sum(a * b for a, b in terms)


SYMBOLS: frozenset[Callable[..., Any]] = frozenset({piece_size, piece_offset, member_pieces, axis_index, linear})


@dataclass(slots=True)
class RankGraph:
    """The graph that every device of `mesh` runs.

    Placeholder i takes the piece of `inputs[i]` in `layouts[i]`; output i is (kind, name) `outputs[i]` in
    `output_layouts[i]`. Phases follow each other in the order of the nodes.
    """

    graph: fx.Graph
    mesh: Mesh
    inputs: tuple[Input, ...]
    layouts: tuple[Layout, ...]
    outputs: tuple[tuple[str, str], ...]
    output_layouts: tuple[Layout, ...]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    def text(self) -> str:
        return graph_text(self.graph)

    def layout_of(self, kind: str, name: str) -> Layout:
        index = next(i for i, item in enumerate(self.inputs) if (item.kind, item.name) == (kind, name))
        return self.layouts[index]


def bind_symbols(graph: fx.Graph, coords: Coordinates) -> dict[fx.Node, Any]:
    """The value of every symbol (an integer, or a table of pieces) on the device at `coords`."""
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in SYMBOLS:
            args: Any = fx.map_arg(node.args, lambda n: values[n])
            values[node] = node.target(coords, *args)
    return values
