"""Undoes merged collectives of rank graphs: a merge is so proven element by element.

`check.completeness` follows a single value through each communication. A merged collective carries several, so it is
undone before the check: every part becomes its own collective, if offsets, sizes and shapes are exactly those of a
merge; anything else stays, and the check reports what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from meshweave.ir.collectives import ALL_GATHER, OURS, REDUCE_SCATTER, WAIT
from meshweave.ir.rank import RankGraph, copied
from meshweave.ir.values import Value, Values, local_values, varying

aten = torch.ops.aten
_GATHER, _SCATTER = ALL_GATHER.op, REDUCE_SCATTER.op
_MERGED = frozenset(row.op for row in OURS if row.bucket)


@dataclass(frozen=True, slots=True)
class _Part:
    """An operand of a merged collective: its node, its value, and its units (elements, or bytes) per row of the
    whole."""

    node: fx.Node
    value: Value
    units: int


@dataclass(slots=True)
class _Unmerger:
    role: RankGraph
    values: Mapping[fx.Node, Values]
    varying: frozenset[fx.Node]  # nodes whose shape differs between devices of the role

    def results(self, start: fx.Node) -> tuple[list[_Part], list[fx.Node]]:
        """The parts of a merged collective, and for each part its result node; empty if it is not merged."""
        size = self.size(start)
        parts = self.parts(start.args[0], size if start.target is _SCATTER else 1)
        if parts is None or len(start.users) != 1:
            return [], []
        (wait,) = start.users
        results = self.part_results(wait, parts, size if start.target is _GATHER else 1)
        return (parts, results) if wait.target is WAIT and results is not None else ([], [])

    def take_apart(self, start: fx.Node) -> None:
        """Replace a merged collective by its parts."""
        graph, (parts, results) = self.role.graph, self.results(start)
        (wait,) = start.users
        for part, end in zip(parts, results, strict=True):
            with graph.inserting_before(start):
                single = graph.create_node("call_function", start.target, (part.node, *start.args[1:]))
                single.meta = {k: v for k, v in end.meta.items() if k != "global"}
            with graph.inserting_before(wait):
                new_wait = graph.call_function(WAIT, (single,))
                new_wait.meta = dict(end.meta)
            end.replace_all_uses_with(new_wait)
        self.erase(results)

    def erase(self, ends: Collection[fx.Node]) -> None:
        """Erase these nodes and what only they used."""
        waiting = list(ends)
        while waiting:
            node = waiting.pop()
            if node.users or ("global" in node.meta and node not in ends):
                continue
            inputs = node.all_input_nodes
            self.role.graph.erase_node(node)
            waiting += [n for n in inputs if n not in waiting and n.target in _STEPS]

    def size(self, start: fx.Node) -> int:
        mesh, axes = self.role.group_axes(str(start.args[-1]))
        return mesh.flat_size(axes)

    def parts(self, whole: Any, rows: int) -> list[_Part] | None:
        """The operands of a merged collective in order, laid out by rows; None if it is not merged."""
        if rows > 1:
            whole = _through(whole, aten.view.default, [-1])
        if not isinstance(whole, fx.Node) or whole.target is not aten.cat.default:
            return None
        dim = whole.args[1] if len(whole.args) > 1 else 0
        if dim != (1 if rows > 1 else 0):
            return None
        operands: Any = whole.args[0]
        parts = [self.part(flat, rows) for flat in operands]
        return [p for p in parts if p is not None] if all(parts) and len(parts) > 1 else None

    def part(self, flat: fx.Node, rows: int) -> _Part | None:
        """The value that was flattened into a row, or into `rows` rows."""
        shape = self.values[flat][0].shape
        as_bytes = None if rows > 1 else _through(flat, aten.view.dtype, torch.uint8)
        shown = flat if as_bytes is None else as_bytes
        node = _through(shown, aten.view.default, list(self.values[shown][0].shape))
        if node is None:
            return None
        if node.target is aten.clone.default and "global" not in node.meta:
            node = node.args[0]  # type: ignore[assignment]
        x = self.values[node][0]
        units = x.num_elements * (x.dtype.itemsize if as_bytes is not None else 1)
        if node in self.varying or units % rows or shape[-1] != units // rows:
            return None
        return _Part(node, x, units // rows)

    def part_results(self, wait: fx.Node, parts: list[_Part], size: int) -> list[fx.Node] | None:
        """For each part its result node, if the whole is cut exactly at the ends of the parts; `size`: the number of
        devices whose rows it contains."""
        total = sum(p.units for p in parts)
        shown = wait
        if size > 1:
            shown = next((u for u in wait.users if u.args == (wait, [size, total])), wait)
            if shown.target is not aten.view.default or len(wait.users) != 1:
                return None
        cuts = {(n.args[2], n.args[3]): n for n in shown.users if _is_cut(n, 1 if size > 1 else 0)}
        if len(cuts) != len(shown.users):
            return None
        results, offset = [], 0
        for part in parts:
            cut = cuts.pop((offset, offset + part.units), None)
            end = None if cut is None else self.end(cut, part, size)
            if end is None:
                return None
            results.append(end)
            offset += part.units
        return results if not cuts else None

    def end(self, cut: fx.Node, part: _Part, size: int) -> fx.Node | None:
        """The final value from the columns of a part: with the shape and dtype of its own collective's result."""
        node = _onward(cut, aten.clone.default)
        if node is None and size == 1:
            node = cut
        if self.values[cut][0].dtype != part.value.dtype:
            node = _onward(node, aten.view.default, [size * part.units])
            node = _onward(node, aten.view.dtype, part.value.dtype)
        node = _onward(node, aten.view.default)
        if node is None:
            return None
        result, x = self.values[node][0], part.value
        rows = x.shape[0] * size if size > 1 else None
        shape = x.shape if rows is None else (rows, *x.shape[1:])
        if self.is_scatter(cut):
            shape = (x.shape[0] // self.size(self.start_of(cut)), *x.shape[1:])
        return node if (result.shape, result.dtype) == (shape, x.dtype) else None

    def start_of(self, node: fx.Node) -> fx.Node:
        while node.target not in _MERGED:
            node = node.args[0]  # type: ignore[assignment]
        return node

    def is_scatter(self, node: fx.Node) -> bool:
        return self.start_of(node).target is _SCATTER


_STEPS = frozenset(
    {aten.view.default, aten.view.dtype, aten.clone.default, aten.cat.default, aten.slice.Tensor, WAIT, *_MERGED}
)


def _through(node: Any, target: Any, argument: Any) -> fx.Node | None:
    """The operand of a node that calls `target` with this argument."""
    is_it = isinstance(node, fx.Node) and node.target is target and node.args[1:] == (argument,)
    return node.args[0] if is_it else None


def _onward(node: fx.Node | None, target: Any, argument: Any = None) -> fx.Node | None:
    """The only user of a node, if it calls `target`, with this argument if not None."""
    if node is None or len(node.users) != 1:
        return None
    (user,) = node.users
    fits = user.target is target and (argument is None or user.args[1:] == (argument,))
    return user if fits else None


def _is_cut(node: fx.Node, dim: int) -> bool:
    return node.target is aten.slice.Tensor and node.args[1:2] == (dim,) and len(node.args) == 4


def unmerge_buckets(role: RankGraph) -> RankGraph:
    """The role with every merged collective replaced by its parts, in a new graph; the role itself if it has none."""
    if not _packing_collectives(role):
        return role
    copy = copied(role)
    unmerger = _Unmerger(copy, local_values(copy).values, varying(copy))
    for start in _packing_collectives(copy):
        unmerger.take_apart(start)
    return copy


def merged_results(role: RankGraph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """By start of a merged collective, the nodes with the results of its parts."""
    if not _packing_collectives(role):
        return {}
    unmerger = _Unmerger(role, local_values(role).values, varying(role))
    results_of = {start: tuple(unmerger.results(start)[1]) for start in _packing_collectives(role)}
    return {start: results for start, results in results_of.items() if results}


def _packing_collectives(role: RankGraph) -> list[fx.Node]:
    """The collectives that operands may be packed for."""
    packed = []
    for node in (n for n in role.graph.nodes if n.target in _MERGED):
        inner = _through(node.args[0], aten.view.default, [-1])
        if any(isinstance(n, fx.Node) and n.target is aten.cat.default for n in (node.args[0], inner)):
            packed.append(node)
    return packed
