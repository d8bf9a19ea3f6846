"""Sums over each token's experts, and their gradients, over only the rows that a device owns.

Models put the experts' results in token order, by the inverse of the permutation that sorted them, and add up those of
a token. On devices that own rows this would compute all rows, zeros except the own rows. A lookup at the inverse of a
permutation equals an addition at the permutation itself, and a sum over the k rows of each token adds at the
permutation divided by k: that needs only own rows. The gradient is a lookup at the same indices.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from meshweave.ir import ops
from meshweave.ir.blocks import num_blocks_of
from meshweave.ir.graph import Spec, StepGraph, copy_meta, is_descending, row_index, spec_of, tensor_inputs
from meshweave.ir.layout import WHOLE, Layout
from meshweave.ops.registry import result_specs, row_for
from meshweave.place.assign import Assignment, Own, Role, Shard, realize
from meshweave.place.owned import by_rows

aten = torch.ops.aten
ours = torch.ops.meshweave
LOOKUPS = (aten.index.Tensor, ours.block_index.default)
PUTS = (aten.index_put.default, ours.block_put.default)


def own_sums(step: StepGraph) -> StepGraph:
    """The placed graph with such sums, and their gradients, over own rows. The rows of a token are added in another
    order: that of their experts."""
    graph = step.graph
    before = len(graph.nodes)
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        _sum(graph, node)
    for node in graph.find_nodes(op="call_function", target=ours.enter_rows.default):
        _gradient(graph, node)
    if len(graph.nodes) != before:
        graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    return step


def _sum(graph: fx.Graph, node: fx.Node) -> None:
    """Rewrite leave_rows -> index at an inverse -> view [tokens, k, width] -> sum over k as a single sum at indices."""
    view, dims, *rest = _args(node)
    is_plain = dims == [1] and not any(rest) and not node.kwargs
    lookup = _args(view)[0] if view.target is aten.view.default and is_plain else None
    if lookup is None or lookup.target not in LOOKUPS or len(spec_of(view).shape) != 3:
        return
    leave, order = _args(lookup)[0], _inverse_of(row_index(lookup))
    if order is None or leave.target is not ours.leave_rows.default or len(spec_of(leave).shape) != 2:
        return
    rows, ends, _ = _args(leave)
    layout, (_, count, _) = rows.meta["layout"], spec_of(view).shape
    with graph.inserting_before(node):
        at = _own_indices(graph, _token_of_rows(graph, order, count, node), ends, layout)
        zeros = graph.call_function(aten.full.default, (list(spec_of(node).shape), 0), {"dtype": spec_of(node).dtype})
        copy_meta(node, zeros)
        new = copy_meta(node, _put(graph, zeros, at, rows, num_blocks_of(lookup)))
        option = _owning(new, layout, operand=2)
    if option.results != (node.meta["layout"],) or option.operands[1:] != (at.meta["layout"], layout):
        graph.erase_node(new)
        return
    zeros.meta["layout"] = option.operands[0]
    new.meta.update(layout=option.results[0], assignment=option)
    node.replace_all_uses_with(new)


def _gradient(graph: fx.Graph, enter: fx.Node) -> None:
    """Rewrite expand [tokens, k, width] -> view -> sum at an inverse on zeros -> enter_rows as a lookup at indices."""
    value, ends, dim = _args(enter)
    put = _args(value)[0] if value.target is ops.move else value
    if put.target not in PUTS or dim != 0 or len(_args(put)) < 4:
        return
    zeros, _, view, is_added, *_ = _args(put)
    order = _inverse_of(row_index(put))
    expand = _args(view)[0] if view.target is aten.view.default else view
    if order is None or not is_added or not ops.is_zeros(zeros) or expand.target is not aten.expand.default:
        return
    wide, (few, middle, width) = _args(expand)[0], _three(spec_of(_args(expand)[0]).shape)
    shape, layout = spec_of(expand).shape, enter.meta["layout"]
    if middle != 1 or shape != (few, shape[1], width) or spec_of(enter).shape != (few * shape[1], width):
        return
    blocks = layout.dims[:1] if num_blocks_of(put) else (WHOLE,)
    if wide.meta["layout"].partial or wide.meta["layout"].dims[:2] != (*blocks, WHOLE):
        return
    with graph.inserting_before(enter):
        at = _own_indices(graph, _token_of_rows(graph, order, shape[1], enter), ends, layout)
        table = copy_meta(wide, graph.call_function(aten.view.default, (wide, [few, width])))
        table.meta["spec"] = Spec((few, width), spec_of(wide).dtype)
        cut = wide.meta["layout"]
        table.meta["layout"] = Layout(cut.mesh, (cut.dims[0], cut.dims[2])).normalized((few, width))
        new = copy_meta(enter, _lookup(graph, table, at, num_blocks_of(put)))
        option = _owning(new, layout, operand=-1)
    if option.results != (layout,) or option.operands != (table.meta["layout"], at.meta["layout"]):
        graph.erase_node(new)
        return
    new.meta.update(layout=layout, assignment=option)
    enter.replace_all_uses_with(new)


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _three(shape: Sequence[int]) -> tuple[int, int, int]:
    """A shape of three dims; a shape that matches nothing for other ranks."""
    return (shape[0], shape[1], shape[2]) if len(shape) == 3 else (-1, -1, -1)


def _inverse_of(index: fx.Node | None) -> fx.Node | None:
    """The permutation whose inverse an index is: the order of a sort of all rows. The inverse is written
    (`inverse[order] = arange`), or sorted once more."""
    root = ops.unmoved(index) if index is not None else None
    if root is not None and _is_order(root):
        if is_descending(_args(root)[0]):
            return None
        order = ops.unmoved(_args(_args(root)[0])[0])
        return order if _is_order(order) and num_blocks_of(order) == num_blocks_of(root) else None
    if root is None or root.target not in PUTS or _args(root)[3:4] == (True,):
        return None
    at, numbers = row_index(root), ops.unmoved(_args(root)[2])
    is_count = numbers.target is aten.arange.start_step and _args(numbers) == (0, *spec_of(root).shape, 1)
    written = ops.unmoved(at) if at is not None else None
    if written is None or not is_count or not _is_order(written) or num_blocks_of(written) != num_blocks_of(root):
        return None
    return written if spec_of(written).shape == spec_of(root).shape else None


def _is_order(value: fx.Node) -> bool:
    """Whether a value is the permutation of a sort of all elements of a dim, or of each block."""
    is_item = value.target is operator.getitem and _args(value)[1] == 1
    sorts = (aten.sort.default, aten.sort.stable, ours.block_sort.default)
    return is_item and _args(value)[0].target in sorts and len(spec_of(value).shape) == 1


def _lookup(graph: fx.Graph, table: fx.Node, at: fx.Node, num_blocks: int) -> fx.Node:
    if num_blocks:
        return graph.call_function(ours.block_index.default, (table, at, num_blocks))
    return graph.call_function(aten.index.Tensor, (table, [at]))


def _put(graph: fx.Graph, zeros: fx.Node, at: fx.Node, rows: fx.Node, num_blocks: int) -> fx.Node:
    if num_blocks:
        return graph.call_function(ours.block_put.default, (zeros, at, rows, True, num_blocks))
    return graph.call_function(aten.index_put.default, (zeros, [at], rows, True))


def _token_of_rows(graph: fx.Graph, order: fx.Node, count: int, before: fx.Node) -> fx.Node:
    """The token of each sorted row; each token has `count` rows."""
    if count == 1:
        return order
    for user in order.users:
        if user.target is aten.floor_divide.default and user.args[1] == count and user < before:
            return user
    with graph.inserting_after(order):
        new = graph.call_function(aten.floor_divide.default, (order, count))
    return copy_meta(order, new, layout=order.meta["layout"])


def _own_indices(graph: fx.Graph, places: fx.Node, ends: fx.Node, rows: Layout) -> fx.Node:
    """The indices of the rows that devices own, in the layout of `rows`."""
    whole = Layout(rows.mesh, (rows.dims[0],)).normalized(spec_of(places).shape)
    if places.meta["layout"] != whole:
        moved = graph.call_function(ops.move, (places, str(whole)))
        places = copy_meta(places, moved, layout=whole)
    owned = Layout(rows.mesh, (rows.dims[0],), (), rows.owned).normalized(spec_of(places).shape)
    return by_rows(ours.enter_rows.default, places, ends, owned, places)


def _owning(node: fx.Node, layout: Layout, operand: int) -> Assignment:
    """The assignment of a lookup or a sum of rows in `layout`: the layout of an operand, or of the result."""
    rule = row_for(node).rule(node)
    dims = rule.operands[operand] if operand >= 0 else rule.results[0]
    roles: list[tuple[str, Role]] = []
    for factors, cut in zip(dims, layout.dims, strict=True):
        roles += [(axis, Shard(factors[0], cut.unit)) for axis in cut.axes]
    roles += [(axis, Own(rule.rows_in(dims[dim]), key)) for axis, dim, key in layout.owned]
    return realize(rule, layout.mesh, roles, [spec_of(n) for n in tensor_inputs(node)], result_specs(node))
