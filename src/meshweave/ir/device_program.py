"""What a device runs, in the form in which passes take it, from either source: expansion (ir/from_role.py), or graphs
such as torch.compile's (ir/from_graph.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import fx

from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import SYMBOLS
from meshweave.ir.values import Values

# in the form that profiles take: a mesh, and the axes along which devices communicate
Group = tuple[Mesh, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Fence:
    """Where a part of the step begins: its node comes after all nodes of the part before it. `gathers_pass`:
    communications that depend only on inputs may start before it."""

    node: fx.Node
    gathers_pass: bool


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """A graph of ATen ops, functional collectives and transfers, and its properties.

    values: the values of every node. group_of: the group of a start; raises MeshweaveError if it is unknown.
    is_releasable: of an input, whether its memory is free after its last use. fences: where parts of a step begin, in
    order; none for a graph without parts. uneven: nodes whose shapes differ between devices, with the dims that differ.
    is_whole: nothing else lives on the device while it runs. checks_groups: the caller has named groups, so all must be
    known. sources: inputs that outlive the graph, or may, such as parameters. refused: for a start, why it must not be
    changed, whatever the costs; "" if it may be. symbols: the numbers of symbolic nodes on the device that `values` are
    of. batch: inputs whose first dim are rows of the batch; None if unknown.
    """

    graph: fx.Graph
    values: Mapping[fx.Node, Values]
    group_of: Callable[[fx.Node], Group]
    is_releasable: Callable[[fx.Node], bool]
    fences: tuple[Fence, ...] = ()
    uneven: Mapping[fx.Node, frozenset[int]] = field(default_factory=dict)
    is_whole: bool = False
    checks_groups: bool = False
    sources: frozenset[fx.Node] = frozenset()
    refused: Callable[[fx.Node], str] = lambda start: ""
    symbols: Mapping[fx.Node, Any] = field(default_factory=dict)
    batch: tuple[fx.Node, ...] | None = None

    def lasting(self) -> set[fx.Node]:
        """Values that depend only on inputs that outlive the graph."""
        nodes = set(self.sources)
        for node in self.graph.nodes:
            if node.op == "call_function" and all(n in nodes or n.target in SYMBOLS for n in node.all_input_nodes):
                nodes.add(node)
        return nodes


R = TypeVar("R")
# A pass over what a device runs: the graph that replaces the program's (whose own graph it may change and return), None
# if unchanged; and its report.
Rewrite = Callable[[DeviceProgram], tuple[fx.Graph | None, R]]
