"""Lookups in tables of experts at the sorted experts of rows (a bias per expert), as ops by expert.

The sorted expert of a row says no more than the ends of each expert's rows. So the lookup is the product of a column of
ones with the experts' rows of the table, and its gradient that product's gradient. Devices then look up, and sum, their
own rows in their own part of the table; at positions in a table devices would need all parts of it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx

from meshweave.ir.graph import Spec, StepGraph, argument, copied_graph, copy_meta, row_index, spec_of
from meshweave.ir.grouped import BY_ROWS
from meshweave.ir.ops import is_zeros
from meshweave.ir.verify import verify_step
from meshweave.optimize.batch_split.orders import counted_before, numbers_of, sorted_numbers, uncast

aten = torch.ops.aten
ours = torch.ops.meshweave
# Ops whose second result is an index along a dim, and the position of the dim among their arguments.
_CHOICES = {aten.topk.default: 2, aten.max.dim: 1, aten.min.dim: 1}


def by_expert(step: StepGraph, tables: Collection[str]) -> StepGraph:
    """The step with lookups in the parameters `tables` [experts, ...], and sums that are their gradients, as ops by
    expert; the step itself if there are none."""
    if not tables or not any(n.target in BY_ROWS for n in step.graph.nodes):
        return step
    graph = copied_graph(step.graph)
    names = {n: i.name for n, i in replace(step, graph=graph).sources.items() if i.kind == "param"}
    ends = {n.args[-1]: counted_before(n.args[-1]) for n in graph.nodes if n.target in BY_ROWS}
    known = {(numbers_of(ids), spec_of(e).shape[0]): e for e, ids in reversed(ends.items()) if ids is not None}
    looked_up: set[fx.Node] = set()
    for node in list(graph.nodes):
        at = row_index(node) if node.target in (aten.index.Tensor, aten.index_put.default) else None
        count = spec_of(node.args[0]).shape[0] if at is not None else 0
        numbers = sorted_numbers(at) if at is not None else None
        stops = known.get((numbers, count)) if numbers is not None and _is_below(numbers, count) else None
        if at is None or stops is None or not stops < node:
            continue
        if node.target is aten.index.Tensor and names.get(uncast(node.args[0])) in tables:
            looked_up.add(at)
            _replace(node, _lookup(node, stops))
        elif node.target is aten.index_put.default and at in looked_up and _is_sum(node):
            _replace(node, _sum(node, stops))
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    return verify_step(replace(step, graph=graph)) if looked_up else step


def _is_below(numbers: fx.Node, count: int) -> bool:
    """Whether numbers are certain to be at least 0 and less than `count`."""
    choice: Any = numbers.args[0] if numbers.target is operator.getitem else None
    if choice is None or choice.target not in _CHOICES or numbers.args[1] != 1:
        return False
    shape, dim = spec_of(choice.args[0]).shape, argument(choice, _CHOICES[choice.target])  # type: ignore[arg-type]
    return bool(shape) and shape[-1 if dim is None else dim] <= count


def _is_sum(node: fx.Node) -> bool:
    """Whether whole rows are added to zeros."""
    args: Any = node.args
    at, values = row_index(node), args[2]
    if at is None or args[3:] != (True,) or not is_zeros(args[0]):
        return False
    return spec_of(values).shape == (*spec_of(at).shape, *spec_of(node).shape[1:])


def _lookup(node: fx.Node, ends: fx.Node) -> fx.Node:
    """[experts, ...] -> [rows, ...]"""
    spec, table = spec_of(node), node.args[0]
    count, width = spec_of(table).shape[0], prod(spec.shape[1:])  # type: ignore[arg-type]
    weight = _call(node, aten.view.default, (table, [count, 1, width]), (count, 1, width))
    rows = _call(node, ours.grouped_mm.default, (_unit_rows(node, spec.shape[0]), weight, ends), (spec.shape[0], width))
    return _call(node, aten.view.default, (rows, list(spec.shape)), spec.shape)


def _sum(node: fx.Node, ends: fx.Node) -> fx.Node:
    """[rows, ...] -> [experts, ...]"""
    spec, values = spec_of(node), node.args[2]
    rows, count, width = spec_of(values).shape[0], spec.shape[0], prod(spec.shape[1:])  # type: ignore[arg-type]
    flat = _call(node, aten.view.default, (values, [rows, width]), (rows, width))
    sums = _call(node, ours.grouped_outer.default, (_unit_rows(node, rows), flat, ends), (count, 1, width))
    return _call(node, aten.view.default, (sums, list(spec.shape)), spec.shape)


def _unit_rows(like: fx.Node, rows: int) -> fx.Node:
    return _call(like, aten.full.default, ([rows, 1], 1), (rows, 1), dtype=spec_of(like).dtype)


def _call(like: fx.Node, target: Any, args: Any, shape: tuple[int, ...], **kwargs: Any) -> fx.Node:
    """A new node before `like`; a view that changes nothing is its operand."""
    if target is aten.view.default and spec_of(args[0]).shape == shape:
        return args[0]  # type: ignore[no-any-return]
    with like.graph.inserting_before(like):
        return copy_meta(like, like.graph.call_function(target, args, kwargs), spec=Spec(shape, spec_of(like).dtype))


def _replace(node: fx.Node, new: fx.Node) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
