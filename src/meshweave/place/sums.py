"""Gradients of several microbatches: in which layout they are added up, and when.

Sums over devices are linear, so parts of a gradient can be added up over microbatches before devices reduce them: once
a step instead of once a microbatch. That needs memory for a whole gradient on every device. The alternative
reduce-scatters every microbatch's gradient over the axes that shard the parameter's storage, and adds up shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import fx

from meshweave.ir.graph import Spec, StepGraph, spec_of, tensor_inputs
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.traits import CASTS, VIEWS
from meshweave.place.assign import Price
from meshweave.place.rates import Rates

# What may be between backward and a sum.
_PATHS = VIEWS | CASTS | {torch.ops.meshweave.round_parts.default}


@dataclass(slots=True)
class Sums:
    """The ops of a captured step that add a microbatch's gradient to the earlier sum, each with its operands: the sum
    so far and the gradient. `where`: "whole" or "shards". `microbatches`: how many share what is moved once a step."""

    step: StepGraph
    where: str
    microbatches: int = 1
    operands: dict[fx.Node, tuple[fx.Node, fx.Node]] = field(default_factory=dict)
    of_gradient: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # gradient -> ops that add it
    paths: set[fx.Node] = field(default_factory=set)  # casts and views between backward and sums
    parts: set[fx.Node] = field(default_factory=set)  # what backward computes for a sum, the casts and views of it
    names: dict[fx.Node, str] = field(default_factory=dict)  # of the parameter of a part

    def __post_init__(self) -> None:
        items = self.step.sources
        for (kind, name), value in self.step.results.items():
            if kind == "acc":
                first, second = tensor_inputs(value)
                is_first = first in items and items[first].kind == "acc"
                so_far, gradient = (first, second) if is_first else (second, first)
                self.operands[value] = so_far, gradient
                self.of_gradient.setdefault(gradient, []).append(value)
                self.names[gradient] = name
                while len(tensor_inputs(gradient)) == 1 and gradient.target in _PATHS:
                    self.paths.add(gradient)
                    (gradient,) = tensor_inputs(gradient)
                    self.names[gradient] = name
                self.parts.add(gradient)
        self.parts |= self.paths

    def order(self) -> list[fx.Node]:
        """The nodes of the step in the order in which they are placed.

        A gradient is added to a whole sum as soon as it is computed, so that it does not live beside the sum; it is
        added to a shard at the end of backward, so that the microbatch's moves have had time to finish.
        """
        nodes = list(self.step.graph.nodes)
        if self.where == "shards":
            return nodes
        early: dict[fx.Node, list[fx.Node]] = {}
        for node, (_, gradient) in self.operands.items():
            early.setdefault(gradient, []).append(node)
        return [each for node in nodes if node not in self.operands for each in (node, *early.get(node, ()))]

    def layout(self, produced: Layout, stored: Layout, shape: Sequence[int]) -> Layout:
        """The layout of a sum: backward returns the gradient in `produced`, the parameter is stored in `stored`.

        "whole": that of the gradient, so that nothing moves before the last microbatch. "shards": the stored layout,
        but partial over axes that do not shard it: every microbatch moves what a device would otherwise store whole,
        and no more. A dim of one element stays whole, because no op adds up pieces of it.
        """
        sums = tuple((axis, op) for axis, op in produced.partial if op == "sum")
        if self.where == "shards" and produced.mesh == stored.mesh:
            dims = [DimSharding() if size == 1 else dim for size, dim in zip(shape, stored.dims, strict=True)]
            shards = {axis for dim in dims for axis in dim.axes}
            return Layout(produced.mesh, tuple(dims), tuple((a, op) for a, op in sums if a not in shards))
        return Layout(produced.mesh, produced.dims, sums)

    def price(self, price: Price, rates: Rates, used: frozenset[str]) -> Price:
        """The price in each microbatch of bringing a gradient to the layout of the parameter: the move to the sum, the
        addition, which reads and writes the sum, and the microbatch's share of the move of the sum.

        `used`: the axes that shard the parameter as it is used; they alone make an addition cheaper. That the sum is
        not cut over others before the end of the step is what whole sums are for."""
        width = max((spec_of(so_far).dtype.itemsize for so_far, _ in self.operands.values()), default=0)

        def priced(produced: Layout, stored: Layout, spec: Spec) -> float:
            sums = self.layout(produced, stored, spec.shape).normalized(spec.shape)
            moved = price(produced, sums, spec) + price(sums, stored, spec) / self.microbatches
            others = (axis for dim in sums.dims for axis in dim.axes if axis not in used)
            num_elements = prod(sums.local_shape(spec.shape)) * prod(map(sums.mesh.size, others))
            num_bytes = num_elements * (spec.dtype.itemsize + 2 * width)
            return moved + num_bytes / rates(spec.dtype).bytes_per_second

        return priced


def sum_bytes(placed: StepGraph) -> tuple[int, int]:
    """Bytes of all sums of gradients on the device that has the most: in the layouts in which they are added up, and as
    stored."""
    num_bytes: dict[str, Counter[Mesh]] = {"acc": Counter(), "grad": Counter()}
    for (kind, _), value in placed.results.items():
        if kind in num_bytes:
            spec, layout = spec_of(value), value.meta["layout"]
            num_bytes[kind][layout.mesh] += prod(layout.local_shape(spec.shape)) * spec.dtype.itemsize
    return _most(num_bytes["acc"]), _most(num_bytes["grad"])


def _most(bytes_on: Mapping[Mesh, int]) -> int:
    """The largest total on a device, from the bytes per device on each mesh."""
    total = Counter[int]()
    for mesh, num_bytes in bytes_on.items():
        total.update(dict.fromkeys(mesh.devices, num_bytes))
    return max(total.values(), default=0)
