"""Rows of experts in placement: what owning rows costs, how values begin and cease to be owned, and cuts of lookups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from meshweave.ir.graph import Spec, StepGraph, copy_meta, spec_of
from meshweave.ir.grouped import BY_ROWS, key_of
from meshweave.ir.layout import DimSharding, Layout
from meshweave.sharding.assign import Assignment, Price
from meshweave.sharding.forms import Forms

aten = torch.ops.aten
ours = torch.ops.meshweave


def owned_price(price: Price) -> Price:
    """The price of a move, also from and to layouts with owned rows: a device that has all rows has its own for
    nothing; to give its own to others, it makes the others zeros, and the parts are summed."""

    def priced(source: Layout, target: Layout, spec: Spec) -> float:
        if source.owned == target.owned == ():
            return price(source, target, spec)
        start, end = source.owned_as_parts(), target.without_owned()
        return 0.0 if source == target or start == end else price(start, end, spec)

    return priced


def ends_by_key(step: StepGraph) -> dict[str, fx.Node]:
    """Of every key of the step the value that says where the rows of an expert end."""
    return {key_of(n): n.args[2] for n in step.graph.nodes if n.target in BY_ROWS}  # type: ignore[misc]


def by_rows(target: Any, value: fx.Node, ends: fx.Node, layout: Layout, like: fx.Node) -> fx.Node:
    """The node behind `value` from which on its rows are owned (`enter_rows`), or not (`leave_rows`), in `layout`."""
    source: Layout = value.meta["layout"]
    (_, dim, key), *_ = (*layout.owned, *source.owned)
    new = copy_meta(like, value.graph.call_function(target, (value, ends, dim)), layout=layout, key=key)
    new.meta["assignment"] = Assignment((), (source, ends.meta["layout"]), (layout,))
    return new


def expert_axes(step: StepGraph, forms: Forms, used: Mapping[str, Layout]) -> frozenset[str]:
    """The axes that cut experts: those over which the weights of grouped matmuls are used in parts."""
    weights: list[Any] = [n.args[1] for n in step.graph.nodes if n.target is ours.grouped_mm.default]
    names = [forms.name(weight) for weight in weights if forms.is_of_parameter(weight)]
    return frozenset(axis for name in names for axis in used[name].dims[0].axes)


def lookup_cut(node: fx.Node, layouts: Sequence[Layout], taken: frozenset[str]) -> tuple[Layout, ...]:
    """The layout that a lookup of rows may well have: its positions cut as the rows are that it reads, but for the axes
    `taken`. Else every device would look up, and go on working with, the rows of all."""
    if node.target is not aten.index.Tensor or not layouts or not layouts[0].dims:
        return ()
    indices: Any = node.args[1]
    is_rows = len(indices) == 1 and spec_of(indices[0]).dtype != torch.bool and len(spec_of(indices[0]).shape) == 1
    axes = tuple(a for a in layouts[0].dims[0].axes if a not in taken)
    if not is_rows or not axes:
        return ()
    rank = len(spec_of(node).shape)
    return (Layout(layouts[0].mesh, (DimSharding(axes), *(DimSharding(),) * (rank - 1))),)
