"""What a device runs, in the form in which passes take it, from either source: a role of a step, or a graph such as
torch.compile's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.interop.descriptors import owned_inputs
from meshweave.interop.process_groups import is_in_job, ranks_of_group
from meshweave.ir.collectives import collective_of, group_of
from meshweave.ir.described import values_of
from meshweave.ir.graph import Spec, argument, place_of
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import SYMBOLS, RankGraph, copied
from meshweave.ir.values import Values, local_values, uneven_dims
from meshweave.ir.verify import verify_rank

_AXIS = "group"  # the only axis of the mesh that represents a named group

# in the form that profiles take: a mesh, and the axes along which devices communicate
Group = tuple[Mesh, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """A graph of ATen ops, functional collectives and transfers, and its properties.

    values: the values of every node. group_of: the group of a start; raises MeshweaveError if it is unknown.
    is_releasable: of an input, whether its memory is free after its last use. fences: nodes that come after all nodes
    of the part of a step before them, in order, each with whether communications that depend only on inputs may start
    before it; none for a graph without parts. uneven: nodes whose shapes differ between devices, with the dims that
    differ. is_whole: nothing else lives on the device while it runs. checks_groups: the caller has named groups, so all
    must be known. refused: for a start, why it must not be changed, whatever the costs; "" if it may be. symbols: the
    numbers of symbolic nodes on the device that `values` are of. batch: inputs whose first dim are rows of the batch;
    None if unknown. queues: starts that keep their order in a queue of this name. dropped: numbers of outputs that
    nobody reads. prepared: values that later microbatches read (`rank.prepared_values`).
    """

    graph: fx.Graph
    values: Mapping[fx.Node, Values]
    group_of: Callable[[fx.Node], Group]
    is_releasable: Callable[[fx.Node], bool]
    fences: Mapping[fx.Node, bool] = field(default_factory=dict)
    uneven: Mapping[fx.Node, frozenset[int]] = field(default_factory=dict)
    is_whole: bool = False
    checks_groups: bool = False
    refused: Callable[[fx.Node], str] = lambda start: ""
    symbols: Mapping[fx.Node, Any] = field(default_factory=dict)
    batch: tuple[fx.Node, ...] | None = None
    queues: Mapping[fx.Node, str] = field(default_factory=dict)
    dropped: frozenset[int] = frozenset()
    prepared: frozenset[fx.Node] = frozenset()

    def results(self) -> list[fx.Node]:
        """The outputs that are read, and values that later microbatches read."""
        outputs: list[fx.Node] = []
        fx.map_arg(self.graph.output_node().args, outputs.append)
        return [*(node for i, node in enumerate(outputs) if i not in self.dropped), *self.prepared]


R = TypeVar("R")
# A pass over what a device runs: the graph that replaces the program's (whose own graph it may change and return), None
# if unchanged; and its report.
Rewrite = Callable[[DeviceProgram], tuple[fx.Graph | None, R]]


# roles


def rewrite_role(role: RankGraph, rewrite: Rewrite[R]) -> tuple[RankGraph, R]:
    """The role with the graph that `rewrite` returns, verified; `role` itself, unchanged, if it returns none."""
    own = copied(role)
    graph, report = rewrite(role_program(own))
    if graph is None:
        return role, report
    rewritten = replace(own, graph=graph)
    for node, values in local_values(rewritten).values.items():
        if "spec" not in node.meta and values and node.target not in SYMBOLS:
            specs = tuple(Spec(x.shape, x.dtype) for x in values)
            node.meta["spec"] = specs[0] if len(specs) == 1 else specs
    return verify_rank(rewritten), report


def role_program(role: RankGraph) -> DeviceProgram:
    """A role with its symbols and transfers, for passes that add ops to its graph."""
    sources = role.sources
    local = local_values(role)

    def refused(start: fx.Node) -> str:
        """Devices of other roles would not know of its new messages."""
        return "" if role.has_all_of(str(start.args[-1])) else "its group has devices of other roles"

    return DeviceProgram(
        role.graph,
        local.values,
        lambda start: role.group_axes(str(start.args[-1])),
        lambda node: False,
        uneven=uneven_dims(role, local),
        is_whole=True,
        refused=refused,
        symbols=local.symbols,
        batch=tuple(node for node, item in sources.items() if item.kind == "batch"),
    )


# other graphs


@dataclass(slots=True)
class NamedGroups:
    """Groups by the names that collectives use: from the caller, else from torch.distributed."""

    named: Mapping[str, Sequence[int]]
    meshes: dict[str, Mesh] = field(default_factory=dict)

    def __call__(self, start: fx.Node) -> Group:
        """The group of a start. Raises MeshweaveError, with the node, for a group that is unknown, or whose size
        contradicts the op's own argument."""
        row = collective_of(start)
        assert row is not None, f"{start.name} does not start a communication"
        group = group_of(start, row)  # which may be the group itself
        name = str(getattr(group, "group_name", group))
        if name not in self.meshes:
            ranks = self.ranks(start, name, group)
            self.meshes[name] = Mesh({_AXIS: len(ranks)}, devices=ranks)
        mesh, size = self.meshes[name], argument(start, row.size) if row.size >= 0 else None
        if isinstance(size, int) and size != mesh.num_devices:
            raise MeshweaveError(
                "a collective's group size contradicts its group",
                where=place_of(start),
                got=f"group_size {size}",
                expected=f"{mesh.num_devices}, the size of group {name!r}: ranks {mesh.devices[:8]}",
            )
        return mesh, (_AXIS,)

    def ranks(self, start: fx.Node, name: str, group: Any) -> tuple[int, ...]:
        ranks = tuple(self.named[name]) if name in self.named else _registered(group)
        if not ranks:
            raise MeshweaveError(
                "the group of a collective is unknown",
                where=place_of(start),
                got=repr(name),
                expected=f"one of {', '.join(map(repr, self.named))}" if self.named else "a group of torch.distributed",
                hint="pass groups={name: ranks}, or a cost callable, which needs no ranks",
            )
        return ranks


def _registered(group: Any) -> tuple[int, ...]:
    """The ranks of a group that torch.distributed knows; empty otherwise."""
    if not is_in_job():
        return ()
    if not isinstance(group, str):
        return ranks_of_group(group)
    try:
        return ranks_of_group(group)
    except (RuntimeError, ValueError, KeyError):
        return ()


Donated = Collection[str] | Callable[[fx.Node], bool]


def donated_inputs(graph: fx.Graph, donated: Donated | None = None) -> frozenset[fx.Node]:
    """The placeholders whose memory is free after their last use: those that the caller names, or of which its callable
    says so; by default those that a backward graph of AOTAutograd owns. Raises MeshweaveError for an unknown name."""
    if donated is None:
        return owned_inputs(graph)
    placeholders = graph.find_nodes(op="placeholder")
    if callable(donated):
        return frozenset(node for node in placeholders if donated(node))
    names = {donated} if isinstance(donated, str) else set(donated)
    known = {node.name: node for node in placeholders}
    if unknown := sorted(names - known.keys()):
        raise MeshweaveError(
            "donated= names what is not an input of the graph",
            got=unknown[0],
            expected=f"names of its placeholders: {', '.join([*known][:8])}{', ...' if len(known) > 8 else ''}",
            hint="names are those of nodes: [node.name for node in gm.graph.find_nodes(op='placeholder')]",
        )
    return frozenset(known[name] for name in names)


def graph_program(
    graph: fx.Graph,
    groups: Mapping[str, Sequence[int]] | None = None,
    values: Mapping[fx.Node, Values] | None = None,
    donated: Donated | None = None,
) -> DeviceProgram:
    """A graph whose values are described by meta["val"] or by `values`; `groups`: ranks by name; `donated`: see
    `donated_inputs`. Raises VerifyError for a node whose tensors are not described, MeshweaveError for an unknown name
    in `donated`."""
    inferred = values_of(graph) if values is None else values
    owned = donated_inputs(graph, donated)
    return DeviceProgram(graph, inferred, NamedGroups(groups or {}), owned.__contains__, checks_groups=bool(groups))
