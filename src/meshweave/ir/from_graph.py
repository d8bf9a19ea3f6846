"""Anyone's graph as a device program: groups by name with their ranks, and which inputs it may free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.interop.process_groups import ranks_of_group
from meshweave.ir.collectives import collective_of, group_of
from meshweave.ir.described import values_of
from meshweave.ir.device_program import DeviceProgram, Group
from meshweave.ir.graph import argument, place_of
from meshweave.ir.mesh import Mesh
from meshweave.ir.values import Values

_AXIS = "group"  # the one axis of the mesh that a group is


@dataclass(slots=True)
class NamedGroups:
    """Groups by the names that collectives hand over: as the caller says, else as torch.distributed knows them."""

    named: Mapping[str, Sequence[int]]
    meshes: dict[str, Mesh] = field(default_factory=dict)

    def __call__(self, start: fx.Node) -> Group:
        """The group of a start. Raises MeshweaveError, naming the node, for one that neither knows, and where the op's
        own group size says otherwise."""
        name = group_name(start)
        ranks = self.ranks(start, name) if name not in self.meshes else self.meshes[name].devices
        if name not in self.meshes:
            self.meshes[name] = Mesh({_AXIS: len(ranks)}, devices=ranks)
        _check_size(start, name, ranks)
        return self.meshes[name], (_AXIS,)

    def ranks(self, start: fx.Node, name: str) -> tuple[int, ...]:
        ranks = tuple(self.named[name]) if name in self.named else _registered(_group(start))
        if not ranks:
            raise MeshweaveError(
                "the group of a collective is unknown",
                where=place_of(start),
                got=repr(name),
                expected=f"one of {', '.join(map(repr, self.named))}" if self.named else "a group of torch.distributed",
                hint="pass groups={name: ranks}, or a cost callable, which needs no ranks",
            )
        return ranks


def group_name(start: fx.Node) -> str:
    """The name of the group that a collective hands over, or of the group itself."""
    group = _group(start)
    return str(getattr(group, "group_name", group))


def _group(start: fx.Node) -> Any:
    row = collective_of(start)
    assert row is not None, f"{start.name} starts no communication"
    return group_of(start, row)


def _check_size(start: fx.Node, name: str, ranks: Sequence[int]) -> None:
    row = collective_of(start)
    size = argument(start, row.size) if row is not None and row.size >= 0 else None
    if isinstance(size, int) and size != len(ranks):
        raise MeshweaveError(
            "a collective's group size is not that of its group",
            where=place_of(start),
            got=f"group_size {size}",
            expected=f"{len(ranks)}, the size of group {name!r}: ranks {tuple(ranks)[:8]}",
        )


def _registered(group: Any) -> tuple[int, ...]:
    """The ranks of a group that torch.distributed knows; none where it does not."""
    if not (dist.is_available() and dist.is_initialized()):
        return ()
    if not isinstance(group, str):
        return ranks_of_group(group)
    try:
        return ranks_of_group(group)
    except (RuntimeError, ValueError, KeyError):
        return ()


def releasable_of(graph: fx.Graph) -> Callable[[fx.Node], bool]:
    """Which placeholders may be freed after their last use: in a backward graph of torch.compile, which is handed saved
    activations and tangents in a list that it empties, all but the parameters."""
    names = [n.name for n in graph.nodes if n.op == "placeholder"]
    is_backward = any(name.startswith("tangents") for name in names)
    return lambda node: is_backward and not node.name.startswith("primals")


def graph_program(
    graph: fx.Graph,
    groups: Mapping[str, Sequence[int]] | None = None,
    values: Mapping[fx.Node, Values] | None = None,
) -> DeviceProgram:
    """A graph whose nodes say in meta["val"] what they make, or of which `values` does; `groups`: ranks by name.
    Raises VerifyError for a node that makes tensors nobody described."""
    inferred = values_of(graph) if values is None else values
    return DeviceProgram(graph, inferred, NamedGroups(groups or {}), releasable_of(graph), checks_groups=bool(groups))
