"""Chooses column or row per weight so that the moves take the least time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import inf

from torch import nn

from meshweave.errors import LayoutError
from meshweave.ir import ops
from meshweave.ir.graph import StepGraph, spec_of
from meshweave.place.assign import Price
from meshweave.place.plans import Resolved
from meshweave.place.styles import apply_style, style_dims
from meshweave.search import descend

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


def _with_styles(
    model: nn.Module, resolved: Resolved, groups: Sequence[Twins], styles: Sequence[str], axis: str
) -> Resolved:
    """The plan with a style for each group."""
    copy = replace(resolved, shards={n: dict(v) for n, v in resolved.shards.items()}, pins=list(resolved.pins))
    for group, style in zip(groups, styles, strict=True):
        for name in group:
            apply_style(copy, model, name, style, axis, "the automatic choice")
    return copy
