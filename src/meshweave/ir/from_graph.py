"""Any graph as a device program: named groups with their ranks, and which inputs may be freed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.interop.process_groups import is_in_job, ranks_of_group
from meshweave.ir.collectives import collective_of, group_of
from meshweave.ir.described import values_of
from meshweave.ir.device_program import DeviceProgram, Group
from meshweave.ir.graph import argument, place_of
from meshweave.ir.mesh import Mesh
from meshweave.ir.values import Values

_AXIS = "group"  # the only axis of the mesh that represents a group


@dataclass(slots=True)
class NamedGroups:
    """Groups by the names that collectives use: from the caller, else from torch.distributed."""

    named: Mapping[str, Sequence[int]]
    meshes: dict[str, Mesh] = field(default_factory=dict)

    def __call__(self, start: fx.Node) -> Group:
        """The group of a start. Raises MeshweaveError, with the node, for a group that is unknown, or whose size
        contradicts the op's own argument."""
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
    """The name of the group argument of a collective, which may be the group itself."""
    group = _group(start)
    return str(getattr(group, "group_name", group))


def _group(start: fx.Node) -> Any:
    row = collective_of(start)
    assert row is not None, f"{start.name} does not start a communication"
    return group_of(start, row)


def _check_size(start: fx.Node, name: str, ranks: Sequence[int]) -> None:
    row = collective_of(start)
    size = argument(start, row.size) if row is not None and row.size >= 0 else None
    if isinstance(size, int) and size != len(ranks):
        raise MeshweaveError(
            "a collective's group size contradicts its group",
            where=place_of(start),
            got=f"group_size {size}",
            expected=f"{len(ranks)}, the size of group {name!r}: ranks {tuple(ranks)[:8]}",
        )


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


def releasable_of(graph: fx.Graph) -> Callable[[fx.Node], bool]:
    """Which placeholders may be freed after their last use: in a backward graph of torch.compile, which gets saved
    activations and tangents in a list that it empties, all except the parameters."""
    names = [n.name for n in graph.nodes if n.op == "placeholder"]
    is_backward = any(name.startswith("tangents") for name in names)
    return lambda node: is_backward and not node.name.startswith("primals")


def graph_program(
    graph: fx.Graph,
    groups: Mapping[str, Sequence[int]] | None = None,
    values: Mapping[fx.Node, Values] | None = None,
) -> DeviceProgram:
    """A graph whose values are described by meta["val"] or by `values`; `groups`: ranks by name.
    Raises VerifyError for a node whose tensors are not described."""
    inferred = values_of(graph) if values is None else values
    return DeviceProgram(graph, inferred, NamedGroups(groups or {}), releasable_of(graph), checks_groups=bool(groups))
