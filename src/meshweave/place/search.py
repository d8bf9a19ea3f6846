"""Chooses column or row per weight so that the moves take the least time."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from math import inf

import torch
from torch import fx, nn

from meshweave.errors import LayoutError
from meshweave.ir import ops
from meshweave.ir.graph import StepGraph, copied_graph, copy_meta, erase_unused, origin_of, output_node, spec_of
from meshweave.ir.traits import CASTS, is_pointwise
from meshweave.place.assign import Price
from meshweave.place.plans import Resolved
from meshweave.place.styles import apply_style, style_dims
from meshweave.search import descend

aten = torch.ops.aten

# Modules of the same place in repeated layers, which are decided together. Neighbours in a list are not twins.
Twins = tuple[str, ...]


def twins(model: nn.Module, resolved: Resolved, axis: str) -> list[Twins]:
    """Groups of modules that can be column- or row-parallel and whose parameters the plan leaves open, in the model's
    order."""
    canonical = {id(p): n for n, p in model.named_parameters()}
    groups: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        params = list(module.named_parameters(recurse=False))
        decided = any(axis in resolved.shards.get(canonical[id(p)], {}) for _, p in params)
        if style_dims(module) is not None and not decided and all(canonical[id(p)].startswith(name) for _, p in params):
            key = re.sub(r"\b\d+\.", "*.", name) + f"/{tuple(p.shape for _, p in params)}"
            groups.setdefault(key, []).append(name)
    return list(map(tuple, groups.values()))


def choose_tp(
    model: nn.Module,
    resolved: Resolved,
    axis: str,
    place_with: Callable[[Resolved], StepGraph],
    price: Price,
) -> Resolved:
    """The plan with a style for every open weight over `axis`.

    Coordinate descent from all-colwise over groups of twins, the last of the model first (a row weight ends a pair, so
    it is decided before the column weight that begins it); two rounds at most. A candidate's cost is the price of all
    moves of the placed step, forward and backward. `place_with(plan)` places the step under a candidate."""
    groups = twins(model, resolved, axis)

    @cache  # the second round comes to candidates of the first
    def cost(styles: tuple[str, ...]) -> float:
        try:
            placed = place_with(_with_styles(model, resolved, groups, styles, axis))
        except LayoutError:  # operators in the model require what this candidate does not provide
            return inf
        moves = [n for n in placed.graph.nodes if n.target is ops.move]
        return sum(price(n.args[0].meta["layout"], n.meta["layout"], spec_of(n)) for n in moves)

    colwise = dict.fromkeys(range(len(groups)), "colwise")
    alternatives = dict.fromkeys(reversed(range(len(groups))), ("colwise", "rowwise"))
    styles = descend(colwise, alternatives, lambda styles: cost(tuple(styles.values())), rounds=2)
    return _with_styles(model, resolved, groups, tuple(styles.values()), axis)


def with_short_updates(step: StepGraph) -> StepGraph:
    """The step with one op for each update by pointwise ops: parameter + gradient. Its moves cost the same under every
    plan: in such an update only the gradient moves, to the layout of the parameter, which its state has, too. Updates
    are more than half of the ops of a step."""
    by_name: dict[str, dict[fx.Node, None]] = {}
    for node in step.graph.nodes:
        if node.op == "call_function" and origin_of(node).phase == "update":
            by_name.setdefault(origin_of(node).module, {})[node] = None
    copies: dict[fx.Node, fx.Node] = {}
    graph = copied_graph(step.graph, copies)
    results, sources = step.results, {(item.kind, item.name): node for node, item in step.sources.items()}
    values = dict(results)
    for name, update in by_name.items():
        param = sources.get(("param", name))
        gradient = None if param is None else _gradient(update, spec_of(param).shape)
        if param is None or gradient is None:
            continue
        with graph.inserting_before(output_node(graph)):
            new = graph.call_function(aten.add.Tensor, (copies[param], copies[gradient]))
        copies[new] = copy_meta(copies[results["param", name]], new)
        values["param", name] = new
        values |= {key: sources[key] for key, value in results.items() if key[0] == "state" and value in update}
    end = output_node(graph)
    end.args = ([copies[values[key]] for key in step.outputs],)
    erase_unused(graph, [copies[node] for update in by_name.values() for node in update])
    return replace(step, graph=graph)


def _gradient(update: Collection[fx.Node], shape: tuple[int, ...]) -> fx.Node | None:
    """The gradient that an update reads; None if it has ops that are not pointwise, or reads other values. Updates
    share what they compute from numbers alone."""
    if not all(is_pointwise(node.target) or node.target in CASTS for node in update):
        return None
    read = {n for node in update for n in node.all_input_nodes if n.op == "call_function" and n not in update}
    others = [n for n in read if origin_of(n).phase != "update" or spec_of(n).num_elements > 1]
    return others[0] if len(others) == 1 and spec_of(others[0]).shape == shape else None


def _with_styles(
    model: nn.Module, resolved: Resolved, groups: Sequence[Twins], styles: Sequence[str], axis: str
) -> Resolved:
    """The plan with a style for each group."""
    copy = replace(resolved, shards={n: dict(v) for n, v in resolved.shards.items()}, pins=list(resolved.pins))
    for group, style in zip(groups, styles, strict=True):
        apply_style(copy, model, group, style, axis, "the automatic choice")
    return copy
