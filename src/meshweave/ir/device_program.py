"""What one device runs, in the one form in which passes take it, whoever wrote it: expansion (ir/from_role.py), or
torch.compile and others (ir/from_graph.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import fx

from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import SYMBOLS
from meshweave.ir.values import Values

Group = tuple[Mesh, tuple[str, ...]]  # as profiles take it: a mesh, and the axes along which devices communicate


@dataclass(frozen=True, slots=True)
class Fence:
    """Where a part of the step begins: its node stands behind all of the part before it. `gathers_pass`: communications
    that need nothing but inputs may start before it."""

    node: fx.Node
    gathers_pass: bool


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """A graph of ATen ops, functional collectives and transfers, and what holds for it.

    values: what every node makes. group_of: the group of a start; raises MeshweaveError where it is not known.
    is_releasable: of an input, whether its memory is free after its last use. fences: where parts of a step begin, in
    order; none for a graph that is one part. uneven: nodes that make other shapes on other devices, with the dims that
    differ. is_whole: nothing else lives on the device while it runs. checks_groups: the caller has named groups, so
    that all must be known. sources: inputs that outlive the graph, as parameters do, or may. refused: of a start, why
    it stays as it is whatever the costs; "" if it need not. symbols: the numbers of symbolic nodes on the device that
    `values` are of. batch: inputs whose first dim are rows of the batch; None where that is not known.
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
        """What is made of nothing but inputs that outlive the graph."""
        nodes = set(self.sources)
        for node in self.graph.nodes:
            if node.op == "call_function" and all(n in nodes or n.target in SYMBOLS for n in node.all_input_nodes):
                nodes.add(node)
        return nodes


R = TypeVar("R")
# A pass over what one device runs: the graph that takes the place of the program's (whose own graph it may change and
# return), None where it stays as it was; and what it says of that.
Rewrite = Callable[[DeviceProgram], tuple[fx.Graph | None, R]]
