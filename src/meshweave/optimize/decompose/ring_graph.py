"""Any graph in the form of the pass: named groups with their ranks, and nodes that must not change."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.ir import local_ops
from meshweave.ir.aliases import written_of
from meshweave.ir.collectives import WAIT
from meshweave.ir.described import is_symbolic
from meshweave.ir.device_program import DeviceProgram, graph_program
from meshweave.ir.graph import copied_graph, erase_unused, place_of
from meshweave.ir.values import Values
from meshweave.optimize.decompose.cut import FIXED, LOOSE
from meshweave.optimize.decompose.find import KINDS
from meshweave.optimize.decompose.writer import kept_meta
from meshweave.optimize.overlap.read import Reading, read_problem


@dataclass(frozen=True, slots=True)
class RingGraph:
    """A graph in which `rank` may have its collectives decomposed. `members` are the ranks by name of group."""

    program: DeviceProgram
    reading: Reading
    rank: int
    members: Mapping[str, tuple[int, ...]]

    def index(self, group: str) -> int:
        """The index of this rank in a group."""
        return self.members[group].index(self.rank)


def ring_graph(old: fx.Graph, groups: Mapping[str, Sequence[int]] | None, rank: int) -> RingGraph:
    """A copy of a graph, in the form of the pass. Raises VerifyError like `mw.overlap`, and MeshweaveError for a group
    of a collective that is unknown or that `rank` is not in."""
    graph = copied_graph(old)
    raise_blocks(graph)
    program = graph_program(graph, groups)
    reading = read_problem(program)
    members: dict[str, tuple[int, ...]] = {}
    for i in reading.rows:
        node, name = reading.nodes[i], reading.problem.channels[reading.problem.channel[i]]
        if node.target in KINDS and name not in members:
            members[name] = program.group_of(node)[0].devices
            _expect_member(node, name, members[name], rank)
    _fix(graph, reading.values)
    lasting = frozenset(graph.find_nodes(op="placeholder"))  # a graph does not tell which of them are parameters
    program = replace(program, sources=lasting, refused=partial(_refused, members))
    return RingGraph(program, reading, rank, members)


def _refused(members: Mapping[str, Sequence[int]], start: fx.Node) -> str:
    """Why a start must stay as it is, whatever the costs; "" if it need not."""
    users = list(start.users)
    if start.kwargs or not isinstance(start.args[-1], str) or start.args[-1] not in members:
        return "its group is not passed by name"
    if len(users) != 1 or users[0].target is not WAIT:
        return "it is waited for more than once, or not in this graph"
    for node in (start, users[0]):
        if FIXED in node.meta:
            return f"it {node.meta[FIXED]}"
    return ""


def _expect_member(node: fx.Node, name: str, ranks: tuple[int, ...], rank: int) -> None:
    if rank not in ranks:
        raise MeshweaveError(
            "this rank is not in the group of a collective that it runs",
            where=place_of(node),
            got=f"rank {rank}, group {name!r} of ranks {ranks[:8]}",
            expected="the rank of this graph: rank=, or that of torch.distributed",
        )


def _fix(graph: fx.Graph, values: Mapping[fx.Node, Values]) -> None:
    """Mark nodes that must not change or move."""
    written: set[int] = set()
    for node in graph.nodes:
        for position, name in written_of(node.target):
            operand = node.kwargs.get(name, node.args[position] if position < len(node.args) else None)
            fx.map_arg(operand, lambda n: written.update(x.storage for x in values[n]))
    for node in graph.nodes:
        near = [node, *node.all_input_nodes]
        if node.op != "call_function":
            continue
        if node.target in KINDS:
            node.meta[LOOSE] = True
        if any(x.storage in written for n in near for x in values[n]):
            node.meta.pop(LOOSE, None)
            node.meta[FIXED] = "accesses memory that is written"
        elif any(map(_is_symbolic, near)):
            node.meta[FIXED] = "has sizes that are unknown at compile time"
        elif node.target not in (*KINDS, WAIT) and node.is_impure(impure_random=True):
            node.meta[FIXED] = "has effects besides its result"


def _is_symbolic(node: fx.Node) -> bool:
    val = node.meta.get("val")
    several = val if isinstance(val, (list, tuple)) else (val,)
    return any(is_symbolic(x) for x in several if isinstance(x, torch.Tensor))


aten = torch.ops.aten


def raise_blocks(graph: fx.Graph) -> None:
    """Rewrite them in place."""
    for node in list(graph.nodes):
        if node.target is not aten.cat.default or node.kwargs:
            continue
        parts: Any = node.args[0]
        to = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
        cut = _cut_of(parts)
        if cut is None:
            continue
        source, dim = cut
        rank, n = source.meta["val"].dim(), len(parts)
        to, dim = to % rank, dim % rank
        if to and not dim and source.target is WAIT:
            _replace(node, local_ops.join_blocks, (source, [n], [0], to, None))
        elif dim and not to and any(user.target in KINDS for user in node.users):
            block = source.meta["val"].shape[dim] // n
            _replace(node, local_ops.deal_blocks, (source, [n], [0], dim, None, block))


def _cut_of(parts: Sequence[Any]) -> tuple[fx.Node, int] | None:
    """The value that these are all the parts of, in order, and the dim. A cat along another dim takes equal sizes."""
    items = [p for p in parts if isinstance(p, fx.Node) and p.target is operator.getitem]
    if len(items) != len(parts) or len(items) < 2 or [p.args[1] for p in items] != list(range(len(items))):
        return None
    split = items[0].args[0]
    if not isinstance(split, fx.Node) or any(p.args[0] is not split for p in items) or split.kwargs:
        return None
    if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        return None
    vals, source = split.meta.get("val"), split.args[0]
    if vals is None or len(vals) != len(items) or not isinstance(source, fx.Node):
        return None
    if any(map(is_symbolic, vals)):
        return None
    return source, int(split.args[2]) if len(split.args) > 2 else 0  # type: ignore[arg-type]


def _replace(node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
    with node.graph.inserting_before(node):
        block = node.graph.call_function(target, args)
    block.meta = kept_meta(node) | {"val": node.meta["val"]}
    node.replace_all_uses_with(block)
    erase_unused(node.graph, [node])
