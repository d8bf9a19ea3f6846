"""A batch cut over time: what of a captured step is cut with its microbatches, and what must be known before the first.

A microbatch is a cut of the batch over an axis that is no axis of devices. The rules are those that cut a batch over
devices: what is partial over the axis is added up over the microbatches, and a value that is needed whole would have to
be communicated between them. It can be computed ahead if it follows from the batch, buffers and numbers alone; else an
op couples microbatches, and the step on microbatches is another step.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from meshweave.ir.graph import Input, StepGraph, map_nodes, origin_of, spec_of, tensor_inputs, with_ancestors
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.traits import CASTS, RANDOM
from meshweave.ops.factors import Rule, sums
from meshweave.ops.registry import result_specs, results_of, row_for
from meshweave.place.assign import Assignment, candidates

TIME = "time"  # the axis
_ADDITIONS = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor})
_PHASES = ("prepare", "forward", "loss", "backward")  # the rest of a step runs once, on sums of gradients


@dataclass(frozen=True, slots=True)
class Coupling:
    """An op that needs the rows of other microbatches: `value` whole, which the parameters or random numbers enter."""

    node: fx.Node
    value: fx.Node


@dataclass(frozen=True, slots=True)
class CutOverTime:
    """A step whose batch is cut over the only axis of `mesh`.

    `layouts` are those of all values of forward and backward, `calls` how its ops run. `ahead`: values of the batch
    that are needed whole, each computed for all microbatches before the first. `rows`: the entries of the batch that
    are cut. `averaged`: ops that only metrics need and that couple microbatches: each has a number of its own, and the
    metric is their mean.
    """

    mesh: Mesh
    layouts: Mapping[fx.Node, Layout]
    calls: Mapping[fx.Node, Assignment]
    rows: frozenset[str]
    ahead: tuple[fx.Node, ...]
    couplings: tuple[Coupling, ...]
    averaged: tuple[fx.Node, ...] = ()


def cut_over_time(step: StepGraph, microbatches: int) -> CutOverTime:
    """Cut the batch of a captured step, whose entries have the rows of all microbatches. Raises RuleError for an op
    without a rule."""
    return _TimeCut(step, Mesh(f"{TIME}={microbatches}"), tied_rows(step)).run()


def tied_rows(step: StepGraph) -> frozenset[str]:
    """The entries of the batch whose first dim has the rows of the batch: ops of forward and loss loop over the first
    dims of all of them together. Of several such sets that with the most entries, then elements."""
    loops = _TiedLoops()
    for node in step.graph.nodes:
        if is_op(node) and origin_of(node).phase in ("prepare", "forward", "loss"):
            loops.tie(row_for(node).rule(node), [*tensor_inputs(node), *results_of(node)])
    groups: dict[Place, list[Input]] = {}
    for node, item in step.sources.items():
        if item.kind == "batch" and item.spec.shape and node.users:
            groups.setdefault(loops.root((node, 0, 1)), []).append(item)
    most: list[Input] = max(groups.values(), key=_extent, default=[])
    return frozenset(item.name for item in most)


def _extent(items: Sequence[Input]) -> tuple[int, int]:
    return len(items), sum(item.spec.num_elements for item in items)


Place = tuple[fx.Node, int, int]  # a loop in a dim of a value, of which an iteration is 1/n of the dim, or of more


@dataclass(slots=True)
class _TiedLoops:
    """Loops that ops have together, as trees. `inner`: the loops in a dim that are known, each by its n."""

    parents: dict[Place, Place] = field(default_factory=dict)
    inner: dict[tuple[fx.Node, int], set[int]] = field(default_factory=dict)

    def root(self, place: Place) -> Place:
        while place in self.parents:
            place = self.parents[place]
        return place

    def tie(self, rule: Rule, values: Sequence[fx.Node | None]) -> None:
        loops: dict[int, dict[int, Place]] = {}  # of each factor, by their n within it
        for value, dims in zip(values, (*rule.operands, *rule.results), strict=True):
            for d, dim in enumerate(dims):
                if value is None:
                    continue
                known, outer = self.inner.setdefault((value, d), {1}), 1
                for factor in filter(lambda f: rule.sizes[f] > 1, dim):
                    own, size = loops.setdefault(factor, {}), rule.sizes[factor]
                    known |= {outer * n for n in own}
                    for n in {1, *(n // outer for n in known if n % outer == 0 and n // outer < size)}:
                        root = self.root((value, d, outer * n))
                        if (other := self.root(own.setdefault(n, root))) != root:
                            self.parents[root] = other
                    outer *= size


@dataclass(slots=True)
class _TimeCut:
    step: StepGraph
    mesh: Mesh
    rows: frozenset[str]
    layouts: dict[fx.Node, Layout] = field(default_factory=dict)
    calls: dict[fx.Node, Assignment] = field(default_factory=dict)
    coupled: set[fx.Node] = field(default_factory=set)  # values that parameters or random numbers enter
    ahead: dict[fx.Node, None] = field(default_factory=dict)
    couplings: list[Coupling] = field(default_factory=list)
    averaged: list[fx.Node] = field(default_factory=list)
    decided: dict[Any, Assignment] = field(default_factory=dict)
    trained: set[fx.Node] = field(init=False)  # what other results than metrics need

    def __post_init__(self) -> None:
        self.trained = with_ancestors(value for (kind, _), value in self.step.results.items() if kind != "metric")

    def run(self) -> CutOverTime:
        sources = {(item.kind, item.name): node for node, item in self.step.sources.items()}
        for node, item in self.step.sources.items():
            rank = len(item.spec.shape)
            is_cut = item.kind == "batch" and item.name in self.rows
            self.layouts[node] = Layout.of(self.mesh, rank, {0: (TIME,)} if is_cut else {})
            if item.kind == "acc":
                self.layouts[node] = as_sum(self.layouts[node])
            if item.kind in ("param", "state", "acc") or item.name == "draw":
                self.coupled.add(node)
        for node in self.step.graph.nodes:
            if is_op(node) and origin_of(node).phase in _PHASES:
                self.op(node)
        for (kind, name), value in self.step.results.items():
            source = sources.get((kind, name))
            if kind == "buffer" and value is not source and value not in self.coupled:
                self.ahead |= dict.fromkeys(n for n in (source, value) if n is not None)
        lists = tuple(self.ahead), tuple(self.couplings), tuple(self.averaged)
        return CutOverTime(self.mesh, self.layouts, self.calls, self.rows, *lists)

    def op(self, node: fx.Node) -> None:
        operands, results = tensor_inputs(node), results_of(node)
        if node.target in RANDOM or not self.coupled.isdisjoint(operands):
            self.coupled.update(n for n in (node, *results) if n is not None)
        chosen = self.choose(node, operands)
        moved = self.moved(operands, chosen)
        if node not in self.trained and not self.coupled.isdisjoint(moved) and self.is_number_of_rows(node, operands):
            self.averaged.append(node)
            chosen, moved = replace(chosen, operands=tuple(map(self.layout, operands))), []
        self.calls[node] = chosen
        for value in moved:
            if value in self.coupled:
                self.couplings.append(Coupling(node, value))
            else:
                self.ahead[value] = None
        for result, layout in zip(results, chosen.results, strict=True):
            if result is not None:
                self.layouts[result] = layout

    def is_number_of_rows(self, node: fx.Node, operands: Sequence[fx.Node]) -> bool:
        """Whether an op can have a result for the rows of each microbatch: one without a dim of rows, from operands of
        which each has these rows only."""
        rule, has = row_for(node).rule(node), map(self.layout, operands)
        pairs = [pair for dims, at in zip(rule.operands, has, strict=True) for pair in zip(dims, at.dims, strict=True)]
        loops = {factor for dim, sharding in pairs if sharding.axes for factor in dim}
        others = [dim for dim, sharding in pairs if not sharding.axes]
        return not any(loops.intersection(dim) for dim in (*others, *(dim for dims in rule.results for dim in dims)))

    def moved(self, operands: Sequence[fx.Node], option: Assignment) -> list[fx.Node]:
        """The operands that an op so cut needs of other microbatches, too."""
        pairs = zip(operands, option.operands, strict=True)
        return [value for value, wanted in pairs if not is_free(self.layout(value), wanted)]

    def layout(self, value: fx.Node) -> Layout:
        """The layout of a value; one that is known ahead is whole everywhere."""
        return Layout.replicated(self.mesh, len(spec_of(value).shape)) if value in self.ahead else self.layouts[value]

    def choose(self, node: fx.Node, operands: Sequence[fx.Node]) -> Assignment:
        """The way to cut an op that needs the fewest values whole, fewest of all those that cannot be known ahead;
        decided once for equal nodes (the twins in repeated layers)."""
        form = (node.target, str(map_nodes(node, lambda n: None)), node.meta["spec"])
        known = (self.layout(value) for value in operands), (value in self.coupled for value in operands)
        key = (*form, *map(spec_of, operands), *map(tuple, known), *map(operands.index, operands))
        if key not in self.decided:
            self.decided[key] = self.choose_anew(node, operands)
        return self.decided[key]

    def choose_anew(self, node: fx.Node, operands: Sequence[fx.Node]) -> Assignment:
        """What `choose` decides for the first of equal nodes."""
        rule, specs = rule_over_time(node), list(map(spec_of, operands))
        layouts = list(map(self.layout, operands))
        options = candidates(rule, self.mesh, [(layout,) for layout in layouts], specs, result_specs(node))

        def trouble(option: Assignment) -> tuple[int, int, int]:
            moved = self.moved(operands, option)
            once = sum(wanted.partial != has.partial for has, wanted in zip(layouts, option.operands, strict=True))
            return len(self.coupled.intersection(moved)), len(moved), once

        return min(filter(_adds_up, options), key=trouble)


def _adds_up(option: Assignment) -> bool:
    """Whether results that microbatches share are sums: what they add up, and not the largest of several."""
    return all(op == "sum" for result in option.results for _, op in result.partial)


def as_sum(layout: Layout) -> Layout:
    """The layout of a value that is the sum of what the microbatches have."""
    return Layout(layout.mesh, layout.dims, ((TIME, "sum"),))


def is_op(node: fx.Node) -> bool:
    """Whether a node computes: not one that takes a result of another."""
    return node.op == "call_function" and node.target is not operator.getitem


def rule_over_time(node: fx.Node) -> Rule:
    """The rule of an op. A count is the same sum in integers and in floating-point numbers; a sum is the same in fewer
    bits, up to their rounding; and to a sum a number is added in shares. Rows may be within a dim."""
    rule = row_for(node).rule(node)
    linear = (*rule.linear, *sums({0})) if is_cast_of_sum(node) or adds_number(node) else rule.linear
    return replace(rule, linear=linear, is_strided=True)


def is_cast_of_sum(node: fx.Node) -> bool:
    """Whether an op casts counts to numbers, or floating-point numbers to others."""
    if node.target not in CASTS:
        return False
    source, target = spec_of(tensor_inputs(node)[0]), spec_of(node).dtype
    return target != torch.bool if source.is_integer else source.dtype.is_floating_point and target.is_floating_point


def adds_number(node: fx.Node) -> bool:
    """Whether an op adds a Python number to a floating-point tensor."""
    has_number = node.target in _ADDITIONS and not all(isinstance(arg, fx.Node) for arg in node.args[:2])
    return has_number and spec_of(node).dtype.is_floating_point


def is_free(has: Layout, wanted: Layout) -> bool:
    """Whether a microbatch has a value as it is needed: in this layout, or whole, of which it takes its rows, or its
    share of a sum."""
    return has == wanted or not (has.sharded_axes or has.partial)
