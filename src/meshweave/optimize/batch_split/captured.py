"""The batch split of a captured step: for models whose rows are sorted over all tokens, such as those of experts.

Placement would insert a move between a sort and the rows of all devices; so such a step is split before it is placed,
and every chunk has its own sort, dispatch and expert compute.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from meshweave.ir.graph import Specs, StepGraph, copied_graph, specs_of
from meshweave.ir.grouped import BY_ROWS
from meshweave.ir.traits import FACTORIES
from meshweave.optimize.batch_split.regions import Regions, regions
from meshweave.optimize.batch_split.row_rules import fits
from meshweave.optimize.batch_split.split import SplitReport, report_of
from meshweave.optimize.batch_split.write import RowWriter
from meshweave.optimize.decompose.cut import FIXED, Cut

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
        return self.call(torch.ops.aten._to_copy.default, (x,), {"dtype": dtype}, like)
