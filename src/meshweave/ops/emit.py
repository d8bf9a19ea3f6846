"""Writes rank graphs: nodes, and sizes that depend on the rank."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from meshweave.ir.collectives import STARTS
from meshweave.ir.graph import NOWHERE, Origin
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.pieces import is_even
from meshweave.ir.rank import axis_index, in_mesh_order, linear, member_pieces, piece_offset, piece_size, qualified

aten = torch.ops.aten
Number = Any  # an int, or the fx.Node of a symbolic one


@dataclass(slots=True)
class Emitter:
    """Writes a rank graph.

    Sizes and offsets that depend on the rank are symbolic nodes, each created once. `meshes` are those of the program,
    its own first: they determine the names of axes.
    """

    meshes: Sequence[Mesh] = ()
    graph: fx.Graph = field(default_factory=fx.Graph)
    origin: Origin = NOWHERE
    move: str = ""  # the node whose communications are being started
    symbols: dict[Any, fx.Node] = field(default_factory=dict)

    def call(self, target: Any, args: Any, kwargs: Mapping[str, Any]) -> fx.Node:
        node = self.graph.call_function(target, tuple(args), dict(kwargs))
        node.meta["origin"] = self.origin
        if target in STARTS:
            node.meta["move"] = self.move
        return node

    def item(self, value: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, (value, index), {})

    def contiguous(self, x: fx.Node) -> fx.Node:
        return self.call(aten.contiguous.default, (x,), {})

    def extent(self, shape: tuple[int, ...], layout: Layout, dim: int) -> Number:
        """Local size of `dim`: a number if all pieces are equal, else symbolic."""
        sharding, parts = layout.dims[dim], layout.parts(dim)
        if not sharding.axes:
            return shape[dim]
        if is_even(shape[dim], parts, sharding.unit):
            return shape[dim] // torch.Size(parts).numel()
        return self._symbol(piece_size, (shape[dim], self.names(layout.mesh, sharding.axes), parts, sharding.unit))

    def members(self, shape: tuple[int, ...], layout: Layout, dim: int, count: int) -> fx.Node:
        """Table of the pieces of `dim` in the group of its innermost `count` axes, in the dim's order."""
        sharding = layout.dims[dim]
        axes = self.names(layout.mesh, sharding.axes)
        return self._symbol(member_pieces, (shape[dim], axes, layout.parts(dim), sharding.unit, count))

    def offset(self, shape: tuple[int, ...], layout: Layout, dim: int) -> Number:
        """Global offset of the local piece along `dim`."""
        sharding = layout.dims[dim]
        if not sharding.axes:
            return 0
        axes = self.names(layout.mesh, sharding.axes)
        return self._symbol(piece_offset, (shape[dim], axes, layout.parts(dim), sharding.unit))

    def axis_index(self, mesh: Mesh, axes: tuple[str, ...]) -> Number:
        return self._symbol(axis_index, (self.names(mesh, axes), tuple(mesh.size(a) for a in axes)))

    def group(self, mesh: Mesh, axes: Sequence[str]) -> str:
        """The group name of a set of axes."""
        return ",".join(self.names(mesh, in_mesh_order(mesh, axes)))

    def names(self, mesh: Mesh, axes: Sequence[str]) -> tuple[str, ...]:
        """The names in this graph for axes of a mesh of the program."""
        index = self.meshes.index(mesh)
        return tuple(qualified(index, axis) for axis in axes)

    def linear(self, base: Number, *terms: tuple[Number, Number]) -> Number:
        """base + sum of products, folded if everything is a number."""
        terms = tuple(term for term in terms if all(isinstance(n, fx.Node) or n != 0 for n in term))
        if not any(isinstance(n, fx.Node) for n in (base, *(n for term in terms for n in term))):
            return base + sum(a * b for a, b in terms)
        return self._symbol(linear, (base, *terms)) if terms else base

    def _symbol(self, function: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
        key = (function, args)
        if key not in self.symbols:
            self.symbols[key] = self.call(function, args, {})
        return self.symbols[key]

    def local_shape(self, shape: tuple[int, ...], layout: Layout) -> list[Number]:
        return [self.extent(shape, layout, d) for d in range(len(shape))]
