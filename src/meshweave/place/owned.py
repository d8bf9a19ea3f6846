"""Placement of owned rows (the rows of a device's own experts): what owning rows costs, where values begin and cease to
be owned, and cuts of lookups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from meshweave.ir.graph import Spec, StepGraph, copy_meta, row_index, spec_of, tensor_inputs
from meshweave.ir.grouped import BY_ROWS, key_of
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.ops import move
from meshweave.ops.registry import result_specs, row_for
from meshweave.place.assign import Assignment, Own, PassedPartial, Price, realize
from meshweave.place.forms import Forms

aten = torch.ops.aten
ours = torch.ops.meshweave


def owned_price(price: Price) -> Price:
    """The price of a move, also from and to layouts with owned rows. A device that has all rows gets its own for free;
    to pass its own on, it sets the others to zero, and the parts are summed."""

    def priced(source: Layout, target: Layout, spec: Spec) -> float:
        if source.owned == target.owned == ():
            return price(source, target, spec)
        start, end = source.owned_as_parts(), target.without_owned()
        return 0.0 if source == target or start == end else price(start, end, spec)

    return priced


def ends_by_key(step: StepGraph) -> dict[str, fx.Node]:
    """For every key of the step, the value with the row offsets at which each expert ends."""
    return {key_of(n): n.args[2] for n in step.graph.nodes if n.target in BY_ROWS}  # type: ignore[misc]


def ends_cut(rows: Layout, dim: int, ends: fx.Node) -> Layout:
    """The layout of the ends of rows that are dim `dim` of a value in layout `rows`: whole, except that those of blocks
    are cut like the blocks."""
    blocks = (DimSharding(rows.dims[dim].axes),) * (len(spec_of(ends).shape) - 1)
    return Layout(rows.mesh, (*blocks, DimSharding())).normalized(spec_of(ends).shape)


def by_rows(target: Any, value: fx.Node, ends: fx.Node, layout: Layout, like: fx.Node) -> fx.Node:
    """The node after `value` from which on its rows are owned (`enter_rows`) or not owned (`leave_rows`), in
    `layout`."""
    source: Layout = value.meta["layout"]
    (_, dim, key), *_ = (*layout.owned, *source.owned)
    new = copy_meta(like, value.graph.call_function(target, (value, ends, dim)), layout=layout, key=key)
    new.meta["assignment"] = Assignment((), (source, ends.meta["layout"]), (layout,))
    return new


def expert_axes(step: StepGraph, forms: Forms, used: Mapping[str, Layout]) -> frozenset[str]:
    """The axes that cut experts: those that shard the weights of grouped matmuls."""
    weights: list[Any] = [n.args[1] for n in step.graph.nodes if n.target is ours.grouped_mm.default]
    names = [forms.name(weight) for weight in weights if forms.is_of_parameter(weight)]
    return frozenset(axis for name in names for axis in used[name].dims[0].axes)


def lookup_cut(node: fx.Node, layouts: Sequence[Layout], used_axes: frozenset[str]) -> tuple[Layout, ...]:
    """A good layout for a lookup of rows: its positions are cut like the rows that it reads, except over the axes
    `used_axes`. Else every device would look up, and keep processing, all rows."""
    if node.target not in (aten.index.Tensor, aten.index_select.default) or not layouts or not layouts[0].dims:
        return ()
    axes = tuple(a for a in layouts[0].dims[0].axes if a not in used_axes)
    if row_index(node) is None or not axes:
        return ()
    rank = len(spec_of(node).shape)
    return (Layout(layouts[0].mesh, (DimSharding(axes), *(DimSharding(),) * (rank - 1))),)


def narrow_rows(graph: fx.Graph) -> None:
    """Keep rows owned for as long as possible: an op whose result only owners read runs on their rows alone, and an op
    that sums rows takes a device's own rows, instead of zeros for the others."""
    entered = [node for node in graph.nodes if node.target is ours.enter_rows.default]
    while entered:
        entered += _entered_before(graph, entered.pop())
    for node in list(graph.nodes):
        if node.target is ours.leave_rows.default:
            _summed(graph, node)


def _entered_before(graph: fx.Graph, enter: fx.Node) -> list[fx.Node]:
    """Make the operands of an op owned instead of its result; returns the nodes that now enter, or nothing. Integers,
    such as positions, stay whole: they are small, and a dispatch reads from them which rows a device needs."""
    value, ends, dim = _operands(enter)
    if not enter.users or spec_of(value).is_integer:  # no users: combined with another value
        return []
    layout: Layout = enter.meta["layout"]
    is_read_by_others = any(
        user.target is not enter.target or user.meta["layout"] != layout or user.args[1] is not ends
        for user in value.users
    )
    is_op = value.op == "call_function" and value.target is not move and isinstance(value.meta["spec"], Spec)
    if is_read_by_others or not is_op:
        return []
    if "assignment" not in value.meta:  # an element of a tuple
        return []
    rule, assignment = row_for(value).rule(value), value.meta["assignment"]
    rows = rule.rows_in(rule.results[0][dim])
    if rows < 0 or not rule.can_own(rows):
        return []
    own = Own(rows, layout.owned[0][2])
    option = _owning(value, (*assignment.roles, *((axis, own) for axis in layout.owned_axes)))
    if option.results != (layout,) or not any(wanted.owned for wanted in option.operands):
        return []
    new = _with_operands(graph, value, option, ends, min(value.users))
    if new is None:
        return []
    for user in list(value.users):
        user.replace_all_uses_with(new)
    return [n for n in new.all_input_nodes if n.target is ours.enter_rows.default]


def _summed(graph: fx.Graph, leave: fx.Node) -> None:
    """Let an op that sums rows which are zero except for a device's own sum only its own."""
    value, ends, dim = _operands(leave)
    owned: Layout = value.meta["layout"]
    for user in list(leave.users):
        assignment = user.meta.get("assignment")
        if user.target is move or user.op != "call_function" or assignment is None:
            continue
        rule, at = row_for(user).rule(user), tensor_inputs(user).index(leave)
        rows = rule.rows_in(rule.operands[at][dim])
        if rows < 0 or not rule.can_own(rows):
            continue
        own, axes = Own(rows, owned.owned[0][2]), owned.owned_axes
        passed = [isinstance(assignment.role(axis), PassedPartial) for axis in axes]
        if not all(passed) or any(rows in dim for result in rule.results for dim in result):
            continue
        option = _owning(user, [(axis, own if axis in axes else role) for axis, role in assignment.roles])
        if option.results == assignment.results:
            new = _with_operands(graph, user, option, ends, user)
            if new is not None:
                user.replace_all_uses_with(new)


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, int]:
    """What becomes owned or not owned, the ends, and the dim of the rows."""
    value, ends, dim = node.args
    return value, ends, dim  # type: ignore[return-value]


def _owning(node: fx.Node, roles: Sequence[Any]) -> Assignment:
    rule, mesh = row_for(node).rule(node), node.meta["layout"].mesh
    return realize(rule, mesh, roles, [spec_of(n) for n in tensor_inputs(node)], result_specs(node))


def _with_operands(
    graph: fx.Graph, node: fx.Node, option: Assignment, ends: fx.Node, before: fx.Node
) -> fx.Node | None:
    """The op on operands in the layouts of `option`, inserted before `before`; None if an operand would have to
    move."""
    with graph.inserting_before(before):
        operands: dict[fx.Node, fx.Node] = {}
        for operand, wanted in zip(tensor_inputs(node), option.operands, strict=True):
            new = _without_moving(operand, wanted, ends)
            if new is None:
                return None
            operands[operand] = new
        new = graph.node_copy(node, lambda n: operands.get(n, n))
    new.meta["layout"], new.meta["assignment"] = option.results[0], option
    return new


def _without_moving(operand: fx.Node, wanted: Layout, ends: fx.Node) -> fx.Node | None:
    """The value in the layout `wanted`, if that needs no communication."""
    source, *_ = operand.args if operand.target in (move, ours.leave_rows.default) else (operand,)
    for known in (operand, source):
        if isinstance(known, fx.Node) and known.meta["layout"] == wanted:
            return known
    if wanted.owned and wanted.without_owned() == operand.meta["layout"]:
        return by_rows(ours.enter_rows.default, operand, ends, wanted, operand)
    return None
