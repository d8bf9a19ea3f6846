"""Rank graphs: what a role runs, with symbolic groups and rank.

A rank graph contains local ATen ops, `_c10d_functional` collectives whose group name is an axis list in the order of
the mesh ("dp,tp"), transfers, and the symbolic integers of this module, which are functions of the device's coordinates
and are bound when the graph is run. So a single graph serves every device of its role, however many there are. A
`permute` is named by its group like a collective, and its peers are indices along the flattened axes of that group.

The axes of the program's own mesh have their plain names. A device may be in several meshes (the stages of a pipeline
are sub-meshes): the axes of `meshes[i]` are then written `m{i}.dp`, in groups, symbols and coordinates.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import prod
from types import FunctionType
from typing import Any

import torch
from torch import fx

from meshweave.ir.aliases import is_view_op
from meshweave.ir.graph import Input, NamedGraph, Spec, copied_graph, graph_text, is_prepared
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.pieces import nested_chunk
from meshweave.ir.routes import Routes, routes, routes_within

Coordinates = Mapping[str, int]


def piece_size(coords: Coordinates, size: int, axes: Sequence[str], parts: Sequence[int], unit: int) -> int:
    """Size of this device's piece of a dim of `size` cut by `axes`."""
    return nested_chunk(size, [(n, coords[axis]) for axis, n in zip(axes, parts, strict=True)], unit)[1]


def piece_offset(coords: Coordinates, size: int, axes: Sequence[str], parts: Sequence[int], unit: int) -> int:
    """Offset of this device's piece in a dim of `size` cut by `axes`."""
    return nested_chunk(size, [(n, coords[axis]) for axis, n in zip(axes, parts, strict=True)], unit)[0]


def member_pieces(
    coords: Coordinates, size: int, axes: Sequence[str], parts: Sequence[int], unit: int, count: int
) -> tuple[tuple[int, int], ...]:
    """(offset, size) of the pieces of a dim of `size` cut by `axes`, for each device of its group of the last `count`
    axes, in the order of the dim."""
    outer = [(n, coords[axis]) for axis, n in zip(axes[:-count], parts[:-count], strict=True)]
    inner = parts[-count:]
    indices = product(*map(range, inner))
    return tuple(nested_chunk(size, [*outer, *zip(inner, index, strict=True)], unit) for index in indices)


def axis_index(coords: Coordinates, axes: Sequence[str], parts: Sequence[int]) -> int:
    """Index of this device in its group of the flattened `axes`, the first axis slowest."""
    index = 0
    for axis, size in zip(axes, parts, strict=True):
        index = index * size + coords[axis]
    return index


def ring_index(coords: Coordinates, axes: Sequence[str], parts: Sequence[int], sign: int, shift: int) -> int:
    """(sign * r + shift) mod n, where r is this device's index in its group of the flattened `axes` and n their size.

    With sign 1 (-1) and shifts 0, 1, ... a device visits all members of its group, beginning with itself, and no two
    devices visit the same member in the same step. With sign 0 all visit the same.
    """
    return (sign * axis_index(coords, axes, parts) + shift) % prod(parts)


def linear(coords: Coordinates, base: int, *terms: tuple[int, int]) -> int:
    """base plus the sum of a * b over the terms."""
    return base + sum(a * b for a, b in terms)


SYMBOLS: frozenset[Callable[..., Any]] = frozenset(
    {piece_size, piece_offset, member_pieces, axis_index, ring_index, linear}
)


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The tensors among the arguments, in order, with repetitions."""
    operands: list[fx.Node] = []
    _collect(node.args, operands)
    _collect(node.kwargs.values(), operands)
    return operands


def _collect(values: Iterable[Any], operands: list[fx.Node]) -> None:
    """Add the tensors among the values, however deep. Hashing an operator takes longer than asking what it is."""
    for value in values:
        if isinstance(value, fx.Node):
            if not isinstance(value.target, FunctionType) or value.target not in SYMBOLS:
                operands.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, operands)
        elif isinstance(value, dict):
            _collect(value.values(), operands)
        elif isinstance(value, slice):
            _collect((value.start, value.stop, value.step), operands)


def distinct_operands(node: fx.Node) -> list[fx.Node]:
    """The tensors among the arguments, each once."""
    return list(dict.fromkeys(operands_of(node)))


def prepared_values(graph: fx.Graph) -> set[fx.Node]:
    """The results of phase prepare that other phases read, and what these are views of: they live from the first to
    the last microbatch."""
    values: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node.target not in SYMBOLS and is_prepared(node):
            is_read = any(not is_prepared(user) for user in node.users)
            if is_read or any(user in values and _is_view(user) for user in node.users):
                values.add(node)
    return values


def _is_view(node: fx.Node) -> bool:
    """Whether a node may return a view of its operand."""
    return is_view_op(node.all_input_nodes[0].target if node.target is operator.getitem else node.target)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Messages between devices: every device of the target gets its piece from devices of the source.

    Without `axes` it goes from a mesh to another (or to the same devices in another order), and the value is not
    partial. With `axes` it stays on a mesh and in the groups of these axes, which are in mesh order; a value may be
    partial over other axes."""

    source: Layout
    target: Layout
    spec: Spec
    axes: tuple[str, ...] = ()

    @property
    def routes(self) -> Routes:
        """Which device sends which box to which."""
        if self.axes:
            return routes_within(self.source, self.target, self.spec.shape, self.axes)
        return routes(self.source, self.target, self.spec.shape)


def in_mesh_order(mesh: Mesh, axes: Sequence[str]) -> tuple[str, ...]:
    """The axes in the order in which groups name them: so a set of axes has a single group, and sums over it a single
    order."""
    return tuple(sorted(axes, key=mesh.axis_index))


def qualified(index: int, axis: str) -> str:
    """The name of an axis of `meshes[index]` in rank graphs."""
    return axis if index == 0 else f"m{index}.{axis}"


@dataclass(slots=True)
class RankGraph(NamedGraph):
    """The graph that every device of a role runs.

    Placeholder i takes the piece of `inputs[i]` in `layouts[i]`; output i is (kind, name) `outputs[i]` in
    `output_layouts[i]`: those of the program. Nodes are in the order of phases. `mesh` is the program's, `devices` are
    the role's (by default all), `meshes` all meshes of the program, `mesh` first; all roles of a program number meshes
    and transfers equally.
    """

    graph: fx.Graph
    mesh: Mesh
    inputs: tuple[Input, ...]
    layouts: tuple[Layout, ...]
    outputs: tuple[tuple[str, str], ...]
    output_layouts: tuple[Layout, ...]
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    devices: tuple[int, ...] = ()
    meshes: tuple[Mesh, ...] = ()
    transfers: dict[str, Transfer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.devices = self.devices or self.mesh.devices
        self.meshes = self.meshes or (self.mesh,)

    def text(self) -> str:
        return graph_text(self.graph)

    def coordinates(self, device: int) -> dict[str, int]:
        """Coordinates of a device along the axes of all its meshes, by qualified axis name."""
        return {
            qualified(i, axis): at
            for i, mesh in enumerate(self.meshes)
            if device in mesh
            for axis, at in mesh.coordinates(mesh.index(device)).items()
        }

    def group_axes(self, group: str) -> tuple[Mesh, tuple[str, ...]]:
        """The mesh and the axes of a group name (the last argument of a collective)."""
        names = [axis.rpartition(".") for axis in group.split(",")]
        prefix = names[0][0]
        return self.meshes[int(prefix[1:]) if prefix else 0], tuple(axis for _, _, axis in names)

    def has_all_of(self, group: str) -> bool:
        """Whether the groups of this name contain only devices of this role."""
        mesh, _ = self.group_axes(group)
        devices = frozenset(self.devices)
        if mesh.covers(devices) and len(mesh.devices) == len(devices):
            return True
        return all(devices.issuperset(self.group_members(group, device)) for device in self.devices)

    def group_members(self, group: str, device: int) -> tuple[int, ...]:
        """Ids of the devices in a device's group, in the order of the flattened axes."""
        mesh, axes = self.group_axes(group)
        return members_of(mesh, axes, device)


def members_of(mesh: Mesh, axes: tuple[str, ...], device: int) -> tuple[int, ...]:
    """Ids of the devices in a device's group of the flattened `axes`, in their order."""
    return _member_table(mesh, axes)[device]


@lru_cache(maxsize=256)
def _member_table(mesh: Mesh, axes: tuple[str, ...]) -> dict[int, tuple[int, ...]]:
    return {device: group for group in mesh.groups(axes) for device in group}


def copied(role: RankGraph) -> RankGraph:
    """The role with a copy of the graph."""
    return replace(role, graph=copied_graph(role.graph))


def bind_symbols(graph: fx.Graph, coords: Coordinates) -> dict[fx.Node, Any]:
    """The value of every symbol (an integer, or a table of pieces) on the device at `coords`."""
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target in SYMBOLS:
            args: Any = fx.map_arg(node.args, lambda n: values[n])
            values[node] = node.target(coords, *args)
    return values
