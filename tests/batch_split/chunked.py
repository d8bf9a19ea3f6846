"""Graphs of a Builder in chunks of rows: the regions, and the graph that is written from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.overlap.graphs import ATEN, Builder
from torch import Tensor, fx

from meshweave.ir.graph import Spec
from meshweave.optimize.batch_split.regions import Regions, regions
from meshweave.optimize.batch_split.write import RowWriter
from meshweave.optimize.decompose.cut import Cut

Build = Callable[[Builder], Sequence[fx.Node]]
HALVES, QUARTERS, BLOCKS = Cut(0, 1, 2), Cut(0, 1, 4), Cut(0, 2, 2)


def _spec(val: Any) -> Any:
    if isinstance(val, (list, tuple)):
        return tuple(map(_spec, val))
    return Spec(tuple(val.shape), val.dtype) if isinstance(val, Tensor) else None


def described(build: Build) -> fx.GraphModule:
    """The graph, with meta["spec"] of every node."""
    b = Builder()
    gm = b.done(*build(b))
    for node in gm.graph.nodes:
        if node.op != "output":
            node.meta["spec"] = _spec(node.meta["val"])
    return gm


def named(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in gm.graph.nodes if n.name == name)


class Chunked:
    """A graph whose value `seed` (by default x) is cut."""

    def __init__(self, build: Build, cut: Cut = HALVES, *, fuse_sums: bool = False, seed: str = "x") -> None:
        self.before = described(build)
        self.regions: Regions = regions(self.before.graph, {named(self.before, seed): cut})
        self.writer = RowWriter(self.before.graph, self.regions, fuse_sums)
        self.fuse_sums = fuse_sums

    @property
    def split(self) -> list[str]:
        """The ops in chunks."""
        return [node.name for node in self.regions.rules]

    @property
    def refused(self) -> dict[str, str]:
        return {node.name: reason for node, reason in self.regions.refused.items()}

    def written(self) -> fx.GraphModule:
        return fx.GraphModule({}, self.writer.run())


def names(gm: fx.GraphModule) -> str:
    """What runs, in order."""
    return " ".join(n.name for n in gm.graph.nodes if n.op == "call_function")


def product(b: Builder, dtype: torch.dtype = torch.float32, rows: int = 8) -> tuple[fx.Node, fx.Node]:
    """x [rows, 4], and its product with a weight."""
    x, w = b.placeholder("x", (rows, 4), dtype), b.placeholder("w", (4, 6), dtype)
    return x, b.mm("product", x, w)


__all__ = ["ATEN", "BLOCKS", "HALVES", "QUARTERS", "Build", "Builder", "Chunked", "described", "named", "names"]
