"""What the pass asks of the graph that it works in, whoever wrote that: groups, places, and what kernels take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import fx

from meshweave.decompose.writer import Ring
from meshweave.hardware.profile import MachineProfile
from meshweave.ir.graph import origin_of
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import SYMBOLS, RankGraph
from meshweave.ir.values import Local
from meshweave.simulate.kernels import kernels_of


class Frame(Protocol):
    """A graph with collectives whose last argument names a group, in the vocabulary of rank graphs."""

    @property
    def graph(self) -> fx.Graph: ...
    @property
    def order_of_sums(self) -> str:
        """In what order a sum over a group is taken, where that is not as the algorithm says; else ""."""

    def ring(self, start: fx.Node) -> Ring:
        """The group of a start."""

    def where(self, start: fx.Node) -> tuple[Mesh, tuple[str, ...]]:
        """The same as profiles take it."""

    def refused(self, start: fx.Node) -> str:
        """Why a start stays as it is whatever the costs; "" if it need not."""

    def place(self, node: fx.Node) -> str:
        """Where a node comes from, as messages say it."""

    def lasting(self) -> set[fx.Node]:
        """What is made of nothing but values that outlive the graph, as parameters do."""

    def kernels(self, profile: MachineProfile, local: Local) -> list[tuple[float, float]]:
        """Position (among those of the nodes) and seconds of every kernel."""


@dataclass(frozen=True, slots=True)
class RoleFrame:
    """A rank graph."""

    role: RankGraph

    @property
    def graph(self) -> fx.Graph:
        return self.role.graph

    @property
    def order_of_sums(self) -> str:
        return ""

    def ring(self, start: fx.Node) -> Ring:
        mesh, axes = self.where(start)
        return Ring(str(start.args[-1]), tuple(map(mesh.size, axes)))

    def where(self, start: fx.Node) -> tuple[Mesh, tuple[str, ...]]:
        return self.role.group_axes(str(start.args[-1]))

    def refused(self, start: fx.Node) -> str:
        """Devices of other roles would not know of its new messages."""
        return "" if self.role.has_all_of(str(start.args[-1])) else "its group has devices of other roles"

    def place(self, node: fx.Node) -> str:
        return str(origin_of(node))

    def lasting(self) -> set[fx.Node]:
        """Made of nothing but parameters and state."""
        sources = (node for node in self.graph.nodes if node.op == "placeholder")
        pairs = zip(sources, self.role.inputs, strict=True)
        return made_of(self.graph, {node for node, item in pairs if item.kind != "batch"})

    def kernels(self, profile: MachineProfile, local: Local) -> list[tuple[float, float]]:
        fusion = "compiled" if profile.fusion == "pointwise" else "ops"
        found, _ = kernels_of(self.role, local, fusion)  # type: ignore[arg-type]
        return [(one.position, sum(map(profile.compute_seconds, one.works))) for one in found]


def made_of(graph: fx.Graph, sources: set[fx.Node]) -> set[fx.Node]:
    """The sources, and the nodes that are made of nothing else."""
    found = set(sources)
    for node in graph.nodes:
        if node.op == "call_function" and all(n in found or n.target in SYMBOLS for n in node.all_input_nodes):
            found.add(node)
    return found
