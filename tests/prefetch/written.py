"""Rank graphs of two devices, written by hand node by node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from meshweave.ir.collectives import WAIT, functional
from meshweave.ir.graph import Input, Origin, Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph

ATEN = torch.ops.aten


class Written:
    """A role of a mesh, by default of both devices of `d`. `at` is the origin of the next nodes."""

    def __init__(self, mesh: str = "d=2", devices: tuple[int, ...] = ()) -> None:
        self.graph, self.mesh, self.devices = fx.Graph(), Mesh(mesh), devices
        self.items: list[Input] = []
        self.at = Origin("forward")

    def input(self, name: str, kind: str = "param", rows: int = 4) -> fx.Node:
        self.items.append(Input(kind, name, Spec((rows, 4), torch.float32)))
        node = self.graph.placeholder(name)
        node.meta["origin"] = self.at
        return node

    def op(self, name: str, target: Any, *args: Any) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        node.meta["origin"] = self.at
        return node

    def mm(self, name: str, x: fx.Node, y: fx.Node) -> fx.Node:
        return self.op(name, ATEN.mm.default, x, y)

    def relu(self, name: str, x: fx.Node) -> fx.Node:
        return self.op(name, ATEN.relu.default, x)

    def add(self, name: str, x: fx.Node, y: fx.Node) -> fx.Node:
        return self.op(name, ATEN.add.Tensor, x, y)

    def gather(self, name: str, x: fx.Node, group: str = "d") -> fx.Node:
        return self.op(name, functional.all_gather_into_tensor.default, x, 2, group)

    def scatter(self, name: str, x: fx.Node, group: str = "d") -> fx.Node:
        return self.op(name, functional.reduce_scatter_tensor.default, x, "sum", 2, group)

    def reduce(self, name: str, x: fx.Node, group: str = "d") -> fx.Node:
        return self.op(name, functional.all_reduce.default, x, "sum", group)

    def wait(self, name: str, start: fx.Node) -> fx.Node:
        return self.op(name, WAIT, start)

    def role(self, *outputs: tuple[str, fx.Node]) -> RankGraph:
        """The role that returns these, by kind."""
        self.graph.output([node for _, node in outputs])
        self.graph.lint()
        whole = Layout.replicated(self.mesh, 2)
        keys = tuple((kind, node.name) for kind, node in outputs)
        layouts = (whole,) * len(self.items), (whole,) * len(outputs)
        return RankGraph(self.graph, self.mesh, tuple(self.items), layouts[0], keys, layouts[1], devices=self.devices)


def order(role: RankGraph, leave_out: Sequence[str] = ()) -> str:
    """The names of what runs, in order."""
    role.graph.lint()
    return " ".join(n.name for n in role.graph.nodes if n.op == "call_function" and n.name not in leave_out)
