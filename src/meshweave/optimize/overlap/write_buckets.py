"""Writes an order and its buckets into an fx graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from meshweave.ir.collectives import WAIT
from meshweave.ir.described import describe, without_data
from meshweave.ir.graph import output_node
from meshweave.ir.values import Value
from meshweave.optimize.overlap.merge import Merged
from meshweave.optimize.overlap.model import Order
from meshweave.optimize.overlap.read import Reading

aten = torch.ops.aten
_CONTIGUOUS = {"memory_format": torch.contiguous_format}
_COPIED = ("origin", "stack_trace", "nn_module_stack", "move", "original_aten", "source_fn_stack", "from_node")


@dataclass(slots=True)
class _Bucket:
    """The nodes of a bucket. `parts[c]` are those after its wait that compute the result of start c."""

    pack: list[fx.Node] = field(default_factory=list)
    start: list[fx.Node] = field(default_factory=list)
    wait: list[fx.Node] = field(default_factory=list)
    parts: dict[int, list[fx.Node]] = field(default_factory=dict)


@dataclass(slots=True)
class _BucketWriter:
    reading: Reading
    merged: Merged
    buckets: list[_Bucket] = field(default_factory=list)
    operands: dict[int, Value] = field(default_factory=dict)  # starts that are merged
    copied: frozenset[int] = field(default=frozenset())  # starts whose results are copied out of their bucket
    bare: dict[fx.Node, Any] = field(default_factory=dict)  # operands as meta tensors

    def run(self, order: Order) -> None:
        graph = self.reading.graph
        self.copied = frozenset(item.of for item in self.merged.items if item.kind == "unpack")
        output = output_node(graph)
        for c in (c for bucket in self.merged.buckets for c in bucket):
            operand: Any = self.reading.nodes[c].args[0]
            self.operands[c] = self.reading.values[operand][0]
        with graph.inserting_before(output), without_data():
            self.buckets = [self.bucket(bucket) for bucket in self.merged.buckets]
        placed: set[fx.Node] = set()
        cursor = next((n for n in reversed(graph.nodes) if n.op == "placeholder"), next(iter(graph.nodes)).prev)
        idle = _idle(graph, {n for x in order for n in self.nodes(x)})
        rest = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
        for node in (
            *(n for n in graph.nodes if n.op == "placeholder"),
            *(n for x in order for n in self.nodes(x)),
            *rest,
        ):
            for next_node in _unplaced_ancestors(node, placed):
                for moved in (next_node, *_followers(next_node, idle, placed)) if idle else (next_node,):
                    if moved.op == "placeholder":
                        continue
                    if cursor.next is not moved:
                        cursor.append(moved)
                    cursor = moved

    def nodes(self, x: int) -> Sequence[fx.Node]:
        """The nodes of an entry of an order."""
        item = self.merged.items[x if x >= 0 else ~x]
        if item.kind == "node":
            return (self.reading.nodes[item.of],) if x >= 0 else self.reading.waits[item.of]
        bucket = self.buckets[item.bucket]
        if x < 0:
            return bucket.wait
        return bucket.pack if item.kind == "pack" else bucket.start if item.kind == "start" else bucket.parts[item.of]

    def bucket(self, members: Sequence[int]) -> _Bucket:
        reading, nodes = self.reading, _Bucket()
        first = reading.nodes[members[0]]
        row = reading.rows[members[0]]
        kind, size = row.bucket, int(first.args[row.size]) if row.size >= 0 else 1  # type: ignore[arg-type]
        operands: list[Any] = [reading.nodes[c].args[0] for c in members]
        values = [self.operands[c] for c in members]
        dtypes = {x.dtype for x in values}
        as_bytes = len(dtypes) > 1
        rows = size if kind == "scatter" else 1
        flat = []
        for operand, x in zip(operands, values, strict=True):
            # A single element counts as contiguous whatever its stride, and is seen as bytes only if that is 1.
            if not x.is_contiguous or (as_bytes and x.num_elements < 2):
                operand = self.call(nodes.pack, first, aten.clone.default, (operand,), _CONTIGUOUS)
            shape = [rows, x.num_elements // rows] if rows > 1 else [x.num_elements]
            shown = self.call(nodes.pack, first, aten.view.default, (operand, shape))
            if as_bytes:
                shown = self.call(nodes.pack, first, aten.view.dtype, (shown, torch.uint8))
            flat.append(shown)
        sizes = [x.num_elements * (x.dtype.itemsize if as_bytes else 1) for x in values]
        total = sum(sizes)
        whole = self.call(nodes.pack, first, aten.cat.default, (flat, 1 if rows > 1 else 0))
        if rows > 1:
            whole = self.call(nodes.pack, first, aten.view.default, (whole, [-1]))
        start = self.call(nodes.start, first, first.target, (whole, *first.args[1:]))
        wait = self.call(nodes.wait, first, WAIT, (start,))
        shown = wait
        if kind == "gather":
            shown = self.call(nodes.wait, first, aten.view.default, (wait, [size, total]))
        offset = 0
        for c, x, length in zip(members, values, [s // rows for s in sizes], strict=True):
            result = torch.uint8 if as_bytes else x.dtype
            self.part(nodes.parts.setdefault(c, []), c, shown, result, offset, length, size if kind == "gather" else 1)
            offset += length
        return nodes

    def part(
        self, into: list[fx.Node], c: int, whole: fx.Node, dtype: torch.dtype, offset: int, length: int, size: int
    ) -> None:
        """Result c out of a whole of `dtype` after its wait: a view, or a copy, which a gather's columns always are."""
        reading = self.reading
        old = reading.nodes[c]
        result = reading.values[old][0]
        dim = 1 if size > 1 or len(whole.args) > 1 else 0  # columns of a gather, even in a group of one
        part = self.call(into, old, aten.slice.Tensor, (whole, dim, offset, offset + length))
        if c in self.copied:
            part = self.call(into, old, aten.clone.default, (part,), _CONTIGUOUS)
        if dtype != result.dtype:
            part = self.call(into, old, aten.view.default, (part, [size * length]))
            part = self.call(into, old, aten.view.dtype, (part, result.dtype))
        part = self.call(into, old, aten.view.default, (part, list(result.shape)))
        for wait in reading.waits[c]:
            for key, value in wait.meta.items():
                if key not in ("val", "tensor_meta"):
                    part.meta.setdefault(key, value)
            wait.replace_all_uses_with(part)
            reading.graph.erase_node(wait)
        for second_wait in [user for user in part.users if user.target is WAIT]:  # its wait is done
            second_wait.replace_all_uses_with(part)
            reading.graph.erase_node(second_wait)
        reading.graph.erase_node(old)

    def call(
        self,
        into: list[fx.Node],
        like: fx.Node,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        node = self.reading.graph.call_function(target)
        node.args = args  # a graph inspects the arguments of a new node, one by one
        if kwargs:
            node.kwargs = kwargs
        node.meta |= {key: like.meta[key] for key in _COPIED if key in like.meta}
        if "val" in like.meta:
            describe(node, like.meta["val"], self.bare)
        into.append(node)
        return node


def _idle(graph: fx.Graph, needed: set[fx.Node]) -> set[fx.Node]:
    """Free nodes that come right after their operands, so that they occupy no memory: those that no placed node needs,
    and parts of tuples, of which only some may be used."""
    idle: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node in needed:
            continue
        if node.target is operator.getitem or all(u in idle or u.op == "output" for u in node.users):
            idle.add(node)
    return idle


def _followers(node: fx.Node, idle: set[fx.Node], placed: set[fx.Node]) -> Iterator[fx.Node]:
    """The idle nodes that can follow a node."""
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user in idle and user not in placed and all(n in placed for n in user.all_input_nodes):
                placed.add(user)
                stack.append(user)
                yield user


def _unplaced_ancestors(node: fx.Node, placed: set[fx.Node]) -> Iterator[fx.Node]:
    """The unplaced ancestors of a node and itself, in order; each is placed when it is yielded."""
    if node in placed:
        return
    if all([n in placed for n in node.all_input_nodes]):
        placed.add(node)
        yield node
        return
    stack = [(node, iter(node.all_input_nodes))]
    while stack:
        waiting, inputs = stack[-1]
        following = next((n for n in inputs if n not in placed), None)
        if following is not None:
            stack.append((following, iter(following.all_input_nodes)))
            continue
        stack.pop()
        if waiting not in placed:
            placed.add(waiting)
            yield waiting


def rewrite(reading: Reading, merged: Merged, order: Order) -> None:
    """Put the nodes of a reading's graph into `order`, an order of the merged problem, with its buckets instead of
    their parts. Free nodes come before their first user."""
    _BucketWriter(reading, merged).run(order)
