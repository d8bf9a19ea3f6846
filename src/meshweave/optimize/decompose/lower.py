"""Any graph in the form of the pass (named groups with their ranks, nodes that must not change), and back: lowers rings
to ATen ops and functional collectives, on the rank that runs them.

Indices of devices become numbers, chunks slices, joined chunks a cat. A permute is an all-to-all in which every rank
sends to a single rank and receives from a single rank (as in torch's permute_tensor), which every backend supports. The
graphs of ranks differ only in numbers and in the order of operands of a cat.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from meshweave.errors import MeshweaveError, VerifyError
from meshweave.interop.ops import is_operator
from meshweave.ir import local_ops
from meshweave.ir.aliases import written_of
from meshweave.ir.collectives import ALL_TO_ALL, WAIT, destinations, permute
from meshweave.ir.described import is_symbolic, val_of_call
from meshweave.ir.device_program import DeviceProgram, R, Rewrite, graph_program
from meshweave.ir.graph import copied_graph, erase_unused, module_like, op_name, place_of
from meshweave.ir.rank import SYMBOLS, ring_index
from meshweave.ir.traits import RESHAPES
from meshweave.ir.values import Values
from meshweave.optimize.decompose.cut import FIXED, LOOSE, memory_order
from meshweave.optimize.decompose.find import KINDS
from meshweave.optimize.decompose.writer import Number, kept_meta
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
    return RingGraph(replace(program, refused=partial(_refused, members)), reading, rank, members)


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


aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default


def lower(rings: RingGraph) -> None:
    """Lower in place the rank-graph ops that the pass has left, with fake tensors in meta["val"]."""
    _RingLowering(rings.program.graph, rings).run()


def rewrite_graph(
    gm: fx.GraphModule, rewrite: Rewrite[R], groups: Mapping[str, Sequence[int]] | None = None
) -> tuple[fx.GraphModule, R]:
    """A module with the graph that `rewrite` returns for any graph, in which every node has meta["val"]; `gm` itself,
    unchanged, if it returns none."""
    own = copied_graph(gm.graph)
    raise_blocks(own)
    graph, report = rewrite(graph_program(own, groups))
    if graph is None:
        return gm, report
    _RingLowering(graph, None).run()
    return module_like(gm, graph), report


@dataclass(slots=True)
class _RingLowering:
    graph: fx.Graph
    rings: RingGraph | None
    like: Any = None  # a fake tensor of the graph
    place: fx.Node = field(init=False)

    def __post_init__(self) -> None:
        vals = (node.meta.get("val") for node in self.graph.nodes)
        self.like = next((val for val in vals if isinstance(val, torch.Tensor)), None)

    def run(self) -> None:
        graph = self.graph
        for node in list(graph.nodes):
            is_ours = "ring" in node.meta or node.target in _BLOCKS
            if is_ours and node.target not in SYMBOLS:
                self.place, write = node, _WRITERS.get(node.target, _RingLowering.same)
                lowered = self.laid(write(self, node, *node.args), node)
                node.replace_all_uses_with(lowered)
                graph.erase_node(node)
            elif "val" not in node.meta and is_operator(node.target):
                node.meta["val"] = val_of_call(node.target, node.args, node.kwargs, self.like)
            for key in ("ring", FIXED, LOOSE):
                node.meta.pop(key, None)
        for node in reversed(list(graph.nodes)):
            if node.target in SYMBOLS:
                graph.erase_node(node)
        graph.lint()

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = kept_meta(self.place) | {"val": val_of_call(target, args, kwargs, self.like)}
        return node

    def laid(self, lowered: fx.Node, node: fx.Node) -> fx.Node:
        """`lowered` with the memory layout of the node that it replaces, if that is known: later graphs depend on
        it."""
        wanted = node.meta.get("val")
        if wanted is None:
            return lowered
        if lowered.meta["val"].stride() != wanted.stride() and wanted.numel():
            order = memory_order(wanted)
            lowered = self.contiguous(self.permuted(lowered, order))
            lowered = self.permuted(lowered, [order.index(d) for d in range(len(order))])
        lowered.meta["val"] = wanted
        return lowered

    def permuted(self, x: fx.Node, order: Sequence[int]) -> fx.Node:
        return x if list(order) == sorted(order) else self.call(aten.permute.default, x, list(order))

    def contiguous(self, x: fx.Node) -> fx.Node:
        if x.meta["val"].is_contiguous():
            return x
        return self.call(aten.clone.default, x, memory_format=torch.contiguous_format)

    def viewed(self, x: fx.Node, shape: Sequence[int]) -> fx.Node:
        """x in another shape; a copy if its memory layout requires it."""
        try:
            val_of_call(aten.view.default, (x, list(shape)), {}, self.like)
        except RuntimeError:
            x = self.contiguous(x)
        return self.call(aten.view.default, x, list(shape))

    def number(self, value: Number) -> int:
        """The number of a chunk or device on this rank."""
        if isinstance(value, int):
            return value
        assert value.target is ring_index
        assert self.rings is not None
        axes, sizes, *rest = value.args
        index = self.rings.index(",".join(axes))
        return ring_index({axes[0]: index}, axes[:1], sizes, *rest)

    # nodes in the graph

    def same(self, node: fx.Node, *args: Any) -> fx.Node:
        """An op on chunks. They are copied if the op cannot take their memory layout."""
        if node.target in RESHAPES:
            return self.viewed(args[0], args[1])
        try:
            return self.call(node.target, *args, **node.kwargs)
        except RuntimeError as error:
            raise VerifyError(
                "an op cannot take chunks, although the table of cuts says so",
                where=place_of(node),
                got=str(error),
                hint=f"fix the row of {op_name(node.target)} in optimize/decompose/cut.py",
            ) from error

    def whole(self, node: fx.Node, x: fx.Node) -> fx.Node:
        return self.contiguous(x)

    def cast(self, node: fx.Node, x: fx.Node) -> fx.Node:
        if set(node.kwargs) != {"dtype"}:
            return self.same(node, x)
        return self.call(convert, x, node.kwargs["dtype"])

    def take(self, node: fx.Node, x: fx.Node, dim: int, outer: int, count: int, index: Number) -> fx.Node:
        shape, at = tuple(x.meta["val"].shape), self.number(index)
        size = shape[dim] // count
        if outer == 1:
            return self.call(aten.slice.Tensor, x, dim, at * size, (at + 1) * size)
        wide = self.viewed(x, (*shape[:dim], outer, count, size // outer, *shape[dim + 1 :]))
        part = self.call(aten.select.int, wide, dim + 1, at)
        return self.viewed(part, (*shape[:dim], size, *shape[dim + 1 :]))

    def join(
        self, node: fx.Node, chunks: Sequence[fx.Node], indices: Sequence[Number], dim: int, outer: int
    ) -> fx.Node:
        if outer == 1:
            return self.call(aten.cat.default, self.ordered(chunks, indices), dim)
        shape = tuple(chunks[0].meta["val"].shape)
        wide = [self.viewed(x, (*shape[:dim], outer, -1, *shape[dim + 1 :])) for x in chunks]
        joined = self.call(aten.cat.default, self.ordered(wide, indices), dim + 1)
        return self.viewed(joined, (*shape[:dim], -1, *shape[dim + 1 :]))

    def ordered(self, parts: Sequence[fx.Node], indices: Sequence[Number]) -> list[fx.Node]:
        numbers = list(map(self.number, indices))
        return [parts[numbers.index(i)] for i in sorted(numbers)]

    def sum(self, node: fx.Node, parts: Sequence[fx.Node], indices: Sequence[Number], wide: torch.dtype) -> fx.Node:
        """Sums over the ranks of a group are added up as parts are received: every chunk has its own order, which also
        applies to its replicas. Products of chunks are added in group order, on every rank equally: as a single sum,
        since a chain of additions would be another graph on each rank."""
        val = parts[0].meta["val"]
        if node.meta["ring"].kind == "sum":
            total, *others = (self.convert(x, wide) for x in parts)
            for part in others:
                total = self.call(aten.add.Tensor, total, part)
        else:
            stacked = self.call(aten.cat.default, self.ordered(parts, indices))
            total = self.call(aten.sum.dim_IntList, self.viewed(stacked, (len(parts), *val.shape)), [0], dtype=wide)
        return self.convert(total, val.dtype)

    def convert(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if x.meta["val"].dtype == dtype else self.call(convert, x, dtype)

    def join_blocks(self, node: fx.Node, x: fx.Node, sizes: Any, order: Any, dim: int, table: None) -> fx.Node:
        return self.call(aten.cat.default, self.parts(x, 0, sizes[0]), dim)

    def deal_blocks(
        self, node: fx.Node, x: fx.Node, sizes: Any, order: Any, dim: int, table: None, block: int
    ) -> fx.Node:
        return self.call(aten.cat.default, self.parts(x, dim, sizes[0]))

    def parts(self, x: fx.Node, dim: int, count: int) -> list[fx.Node]:
        size = x.meta["val"].shape[dim] // count
        return [self.call(aten.slice.Tensor, x, dim, i * size, (i + 1) * size) for i in range(count)]

    def permute(self, node: fx.Node, x: fx.Node, to: Any, group: str) -> fx.Node:
        assert self.rings is not None
        size, rank, rows = len(self.rings.members[group]), self.rings.index(group), x.meta["val"].shape[0]
        sends = destinations(to, size)
        received = [rows * (i == sends.index(rank)) for i in range(size)]
        sent = [rows * (i == sends[rank]) for i in range(size)]
        return self.call(ALL_TO_ALL.op, x, received, sent, group)


_BLOCKS = frozenset({local_ops.join_blocks, local_ops.deal_blocks})
_WRITERS: Mapping[Any, Callable[..., fx.Node]] = {
    aten.contiguous.default: _RingLowering.whole,
    aten._to_copy.default: _RingLowering.cast,
    local_ops.take_chunk: _RingLowering.take,
    local_ops.join_chunks: _RingLowering.join,
    local_ops.sum_parts: _RingLowering.sum,
    local_ops.join_blocks: _RingLowering.join_blocks,
    local_ops.deal_blocks: _RingLowering.deal_blocks,
    permute: _RingLowering.permute,
}
