"""The batch split of a captured step: for models whose rows are sorted over all tokens, such as those of experts.

Placement would insert a move between a sort and the rows of all devices; so such a step is split before it is placed,
and every chunk has its own sort, dispatch and expert compute.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from meshweave.ir.graph import (
    Spec,
    Specs,
    StepGraph,
    argument,
    copied_graph,
    copy_meta,
    row_index,
    spec_of,
    specs_of,
    tensor_inputs,
    value_numbers,
)
from meshweave.ir.grouped import BY_ROWS
from meshweave.ir.ops import is_zeros
from meshweave.ir.traits import FACTORIES, RANDOM
from meshweave.ir.verify import verify_step
from meshweave.optimize.batch_split.orders import counted_before, numbers_of, sorted_numbers, uncast
from meshweave.optimize.batch_split.regions import Regions, regions
from meshweave.optimize.batch_split.row_rules import fits
from meshweave.optimize.batch_split.split import SplitReport, report_of
from meshweave.optimize.batch_split.write import RowWriter
from meshweave.optimize.decompose.cut import FIXED, Cut
from meshweave.place.mapping import Homes

aten = torch.ops.aten
ours = torch.ops.meshweave
_META = torch.device("meta")


def has_experts(step: StepGraph) -> bool:
    return any(node.target in BY_ROWS for node in step.graph.nodes)


def split_captured(step: StepGraph, num_chunks: int, num_devices: int) -> tuple[StepGraph | None, SplitReport]:
    """The step with its row-wise ops in chunks of each device's rows, `num_devices` of which share the batch; None if
    no expert op can be split, with the reason in the report.

    Values are unchanged: a token's result depends only on its own rows, and sums over rows are computed per chunk and
    then added (`rows.orders`). Ops that need the rows of all tokens (an auxiliary loss, a capacity) run on all of them;
    if such an op is between a sort and its inverse the sort stays whole.
    """
    cut = Cut(0, num_devices, num_chunks)
    graph = described(step)
    rows = [
        node
        for item, node in zip(step.inputs, graph.find_nodes(op="placeholder"), strict=True)
        if item.kind == "batch" and item.spec.shape and fits(cut, item.spec.shape)
    ]
    if not rows:
        reason = f"no input of the batch has rows for {num_chunks} equal chunks on each of {num_devices} devices"
        return None, SplitReport(False, num_chunks, reason)
    chunked = regions(graph, dict.fromkeys(rows, cut))
    if not any(node.target in BY_ROWS for node in chunked.rules):
        return None, SplitReport(False, num_chunks, _why_whole(graph, chunked))
    writer = _StepWriter(graph, chunked, fuse_sums=False)
    split = writer.run()
    for node in split.nodes:
        node.meta.pop("val", None)
        node.meta.pop(FIXED, None)
    named = ", ".join(node.name for node in rows)
    return replace(step, graph=split), report_of(graph, chunked, writer, f"dim 0 of {named} on {num_devices} devices")


def _why_whole(graph: fx.Graph, chunked: Regions) -> str:
    """Why the first expert op is not in chunks."""
    for node in graph.nodes:
        if node.target in BY_ROWS:
            sorts = [str(n.meta[FIXED]) for n in graph.nodes if FIXED in n.meta]
            return sorts[0] if sorts else chunked.refused.get(node, f"{node.name} has no rows of the batch")
    return "it has no experts"


def described(step: StepGraph) -> fx.Graph:
    """A copy of the graph with meta["val"] on all nodes; tensors computed from numbers alone are recomputed for every
    user, whose rows may be in another order."""
    graph = copied_graph(step.graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in FACTORIES:
            for user in list(node.users)[1:]:
                with graph.inserting_before(node):
                    user.replace_input_with(node, graph.node_copy(node))
    for node in graph.nodes:
        if node.meta.get("spec") is not None:
            node.meta["val"] = _empty(node.meta["spec"])
    return graph


def _empty(specs: Specs) -> Any:
    """Tensors without data. Values of a captured step have no memory layout: all are contiguous."""
    if isinstance(specs, tuple):
        return tuple(map(_empty, specs))
    return None if specs is None else torch.empty(specs.shape, dtype=specs.dtype, device=_META)


class _StepWriter(RowWriter):
    """Writes captured graphs, in the ops that these have."""

    def call(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node, c: int | None = None
    ) -> fx.Node:
        new = super().call(target, args, kwargs, like, c)
        new.meta["spec"] = specs_of(new.meta["val"])
        new.meta["val"] = _empty(new.meta["spec"])
        return new

    def cast(self, x: fx.Node, dtype: torch.dtype, like: fx.Node) -> fx.Node:
        return self.call(aten._to_copy.default, (x,), {"dtype": dtype}, like)


# Ends of rows by expert that are computed from numbers alone: equal ends become a single value. Layouts name the ends
# by which devices own rows, so rows by different ends never meet. Where a model chooses tokens for experts
# (`arange(capacity, ...)`), each grouped matmul may write down its ends for itself.

_MOST_ENDS = 1 << 16  # constants with more elements are no ends: they are compared by name


def share_ends(step: StepGraph, homes: Homes) -> tuple[StepGraph, Homes]:
    """The step in which ops by rows with equal ends on the same devices (`homes` of its nodes) take the same ends, and
    the devices of its nodes; the step itself if no ends are equal."""
    others = _equal(step, homes)
    if not others:
        return step, homes
    copies: dict[fx.Node, fx.Node] = {}
    step = replace(step, graph=copied_graph(step.graph, copies))
    for op, ends in others.items():
        copies[op].replace_input_with(tensor_inputs(copies[op])[-1], copies[ends])
    step.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    at = {copies[node]: mesh for node, mesh in homes.items()}
    return verify_step(step), {node: at[node] for node in step.graph.nodes}


def _equal(step: StepGraph, home: Homes) -> dict[fx.Node, fx.Node]:
    """The ops by rows with other ends than an earlier op at the same `home` whose ends are equal; and these ends."""
    constants = {n: step.constants[item.name] for n, item in step.sources.items() if item.kind == "constant"}

    def own_form(node: fx.Node) -> Any | None:
        if node in constants and constants[node].numel() <= _MOST_ENDS:
            return _content(constants[node])
        return node if node.op != "call_function" or node.target in RANDOM else None

    numbers, first = value_numbers(step.graph, {}, own_form), dict[Hashable, fx.Node]()
    others: dict[fx.Node, fx.Node] = {}
    for op in step.graph.nodes:
        if op.target in BY_ROWS:
            ends = tensor_inputs(op)[-1]
            known = first.setdefault((numbers[ends], home[op]), ends)
            if known is not ends:
                others[op] = known
    return others


def _content(constant: Tensor) -> Hashable:
    return str(constant.dtype), tuple(constant.shape), tuple(constant.flatten().tolist())


# Lookups in tables of experts at the sorted experts of rows (a bias per expert), as ops by expert. The sorted expert of
# a row says no more than the ends of each expert's rows. So the lookup is the product of a column of ones with the
# experts' rows of the table, and its gradient that product's gradient. Devices then look up, and sum, their own rows in
# their own part of the table; at positions in a table devices would need all parts of it.

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
