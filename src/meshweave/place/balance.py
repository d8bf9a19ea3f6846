"""Sequences in head-tail order: the order of positions in which devices have equal work under a causal mask.

Of 2n equal chunks device r has chunks r and 2n - 1 - r (`ir.causal.head_tail`), so all devices see equally many keys.
The captured step is rewritten so that values along the sequence are in that order. Ops that treat positions
independently, or sum over them, need no change; attention gets the table of chunks; values computed from positions
(rotary angles, masks) are computed from the reordered positions; any other op (a shift of labels, a scan) gets the
sequence in its original order. Values are the same except for the order of their elements.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx

from meshweave.capture.batch import batch_size
from meshweave.errors import PlanError
from meshweave.ir.causal import head_tail
from meshweave.ir.graph import Spec, StepGraph, copy_meta, origin_of, replace_inputs, spec_of, tensor_inputs
from meshweave.ir.mesh import Mesh
from meshweave.ir.traits import PRODUCTS
from meshweave.ops.factors import Dims, Rule
from meshweave.ops.registry import row_for
from meshweave.place.plans import Resolved
from meshweave.place.sequences import has_sequence, rule_or_none, sequence_length, stored_values

aten = torch.ops.aten
ours = torch.ops.meshweave

# the position of the argument `is_causal`
_CAUSAL_AT: dict[Any, int] = {ours.attention.default: 4, ours.attention_backward.default: 7}
_BY_HEADS = "devices that exchange heads have equal work already"
_NATURAL = frozenset[int]()
_In = frozenset[int]  # the dims of a value that are in the new order


def balance_sequence(
    step: StepGraph, resolved: Resolved, mesh: Mesh, exchanges_heads: Callable[[], bool]
) -> tuple[StepGraph, str]:
    """The step with its sequence in head-tail order where the plan and the model allow it, and the outcome with its
    reason.

    `exchanges_heads` says whether attention exchanges heads where the plan leaves it open; `resolved` records the
    outcome.
    Raises PlanError if the plan asks for it and the sequence does not divide over the devices.
    """
    num_devices, length = mesh.flat_size(resolved.context_axes), sequence_length(step)
    reason = _reason_against(step, resolved, length, num_devices)
    if not reason and resolved.balance == "auto" and resolved.attention == "auto" and exchanges_heads():
        reason = _BY_HEADS
    axes = ",".join(resolved.context_axes)
    if reason:
        return step, f"the sequence is cut over {axes} in its order: {reason}"
    resolved.is_balanced = True
    size = batch_size(i.spec.shape for i in step.inputs if i.kind == "batch")
    writer = _BalanceWriter(step, size, length, num_devices, tuple(resolved.context_axes), stored_values(step))
    shown = f"of {2 * num_devices} chunks a device has one from each end"
    return writer.run(), f"the sequence is cut over {axes} from head and tail: {shown}"


def takes_heads(placed: StepGraph, axes: Collection[str]) -> bool:
    """Whether every attention under a causal mask sees whole sequences, of some heads."""
    causal = [n for n in placed.graph.nodes if n.target in _CAUSAL_AT and n.args[_CAUSAL_AT[n.target]]]
    queries = [tensor_inputs(n)[0].meta["layout"].dims[2] for n in causal]
    return not any(axis in dim.axes for dim in queries for axis in axes)


def _reason_against(step: StepGraph, resolved: Resolved, length: int, num_devices: int) -> str:
    """Why the sequence keeps its order; "" if it is reordered."""
    if num_devices == 1:
        return "there is a single device"
    if resolved.balance == "none":
        return "the plan asks for it"
    if length % (2 * num_devices):
        reason = f"{length} positions do not divide by 2 x {num_devices}"
        if resolved.balance == "head_tail":
            raise PlanError(
                "the sequence cannot be balanced",
                where=f"cp over {', '.join(resolved.context_axes)}",
                got=reason,
                expected=f"a multiple of {2 * num_devices}",
                hint='pad it, or leave it open: balance="auto"',
            )
        return reason
    if resolved.balance == "head_tail":
        return ""
    if resolved.attention == "heads":
        return _BY_HEADS
    causal = [n for n in step.graph.nodes if n.target is ours.attention.default and n.args[_CAUSAL_AT[n.target]]]
    if not any(spec_of(tensor_inputs(n)[0]).shape[2] == length for n in causal):
        return "no attention has a causal mask that is not given as a bias"
    return ""


@dataclass(slots=True)
class _BalanceWriter:
    """Writes the step in the new order. `versions`: for each value of the old graph, its nodes in the new graph by the
    dims that are in the new order."""

    step: StepGraph
    size: int | None
    length: int
    num_devices: int
    axes: tuple[str, ...]
    stored: frozenset[fx.Node]
    graph: fx.Graph = field(default_factory=fx.Graph)
    versions: dict[fx.Node, dict[_In, fx.Node]] = field(default_factory=dict)
    usual: dict[fx.Node, _In] = field(default_factory=dict)  # in which a value is computed
    tuples: dict[fx.Node, tuple[fx.Node, list[_In]]] = field(default_factory=dict)
    indices: dict[bool, fx.Node] = field(default_factory=dict)  # (is it the inverse?) -> places of positions
    current: fx.Node | None = None

    def run(self) -> StepGraph:
        for node, item in self.step.sources.items():
            new = copy_meta(node, self.graph.placeholder(node.name))
            self.versions[node] = {_NATURAL: new}
            self.usual[node] = frozenset({1}) if has_sequence(item, self.size, self.length) else _NATURAL
        outputs = set(self.step.output_values)
        for node in self.step.graph.nodes:
            if node.op == "call_function":
                self.current = node
                self._node(node)
                if node in outputs:  # in its phase: a buffer is there before the update
                    self.version(node, _NATURAL)
        self.graph.output([self.version(value, _NATURAL) for value in self.step.output_values])
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users:
                self.graph.erase_node(node)
        return replace(self.step, graph=self.graph)

    def _node(self, node: fx.Node) -> None:
        if node.target is operator.getitem and node.args[0] in self.tuples:
            source, dims = self.tuples[node.args[0]]  # type: ignore[index]
            new = copy_meta(node, self.graph.call_function(operator.getitem, (source, node.args[1])))
            places = [i for i, spec in enumerate(source.meta["spec"]) if spec is not None]
            self._keep(node, dims[places.index(node.args[1])], new)  # type: ignore[arg-type]
            return
        rule = rule_or_none(node)
        ordered = _NATURAL if rule is None else self._factors(node, rule)
        new = self._written(node, rule, ordered)
        results = [_dims_of(rule, dims, ordered) for dims in rule.results] if rule is not None else []
        if isinstance(node.meta["spec"], Spec):
            self._keep(node, results[0] if results else _NATURAL, new)
        else:
            self.tuples[node] = (new, results or [_NATURAL] * len(node.meta["spec"]))

    def _keep(self, node: fx.Node, dims: _In, new: fx.Node) -> None:
        self.usual[node] = dims
        self.versions[node] = {dims: new}

    def _factors(self, node: fx.Node, rule: Rule) -> _In:
        """The loops along the sequence that are in the new order in an operand and may run in any order."""
        if node in self.stored:
            return _NATURAL
        wanted = {
            factor
            for operand, dims in zip(tensor_inputs(node), rule.operands, strict=True)
            for factor in (rule.outermost(dims[d]) for d in self.usual[operand])
        }
        if node.target in _CAUSAL_AT:
            loops = _attention_loops(rule, node)
            causal = node.args[_CAUSAL_AT[node.target]]
            wanted = (set(loops) if wanted & set(loops) else set()) if causal else wanted
        return frozenset(f for f in wanted if self._is_free(node, rule, f))

    def _is_free(self, node: fx.Node, rule: Rule, factor: int) -> bool:
        """Whether an op treats positions independently, or sums over them in any order."""
        if factor < 0 or rule.sizes[factor] != self.length:
            return False
        places = [(dims, d) for dims in (*rule.operands, *rule.results) for d in range(len(dims)) if factor in dims[d]]
        if any(rule.outermost(dims[d]) != factor for dims, d in places):
            return False
        if node.target in _CAUSAL_AT:
            loops = _attention_loops(rule, node)
            is_square = all(rule.sizes[f] == self.length for f in loops)
            return factor in loops and (is_square or not node.args[_CAUSAL_AT[node.target]])
        if factor in rule.whole:
            return False
        if node.target is ours.pin.default:
            return True
        on_piece = row_for(node).on_piece
        return not on_piece.is_ordered and all(factor not in dim for dim in on_piece.looked_up(node, rule))

    def _written(self, node: fx.Node, rule: Rule | None, ordered: _In) -> fx.Node:
        """The op on operands that are in the new order along some loops."""
        operands = tensor_inputs(node)
        each = [_dims_of(rule, dims, ordered) for dims in rule.operands] if rule is not None else []
        values = [self.version(x, dims) for x, dims in zip(operands, each or [_NATURAL] * len(operands), strict=True)]
        args, kwargs = replace_inputs(node, values)
        at = _CAUSAL_AT.get(node.target)
        if at is not None and ordered and args[at]:
            args = (*args[: at + 2], 0, 0, False, list(head_tail(self.length, self.num_devices)))
        new = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        return self._described(node, new)

    def _described(self, like: fx.Node, new: fx.Node, **changes: Any) -> fx.Node:
        """`new` with the meta of `like`, in the current phase."""
        copy_meta(like, new, **changes)
        if self.current is not None:
            new.meta["origin"] = replace(origin_of(like), phase=origin_of(self.current).phase)
        return new

    # Values in another order than that in which they are computed.

    def version(self, node: fx.Node, dims: _In) -> fx.Node:
        """The value with exactly these of its dims in the new order."""
        known = self.versions[node]
        if dims not in known:
            recomputed = self._recompute(node, dims) if dims > self.usual[node] else None
            known[dims] = recomputed if recomputed is not None else self._convert(node, dims)
        return known[dims]

    def _recompute(self, node: fx.Node, dims: _In) -> fx.Node | None:
        """A value that depends only on positions, computed in the new order; None if that is expensive or
        impossible."""
        if node.target is aten.full.default:
            return self.versions[node][_NATURAL]
        if node.target is aten.arange.start_step:
            return self._arange(node)
        rule = rule_or_none(node) if node.op == "call_function" and isinstance(node.meta["spec"], Spec) else None
        if rule is None or node.target in _CAUSAL_AT or node in self.stored:
            return None
        factors = frozenset(rule.outermost(rule.results[0][d]) for d in dims)
        inside = {f for dim in rule.results[0] for f in dim}
        terms = prod(rule.sizes[f] for operand in rule.operands for dim in operand for f in dim if f not in inside)
        if node.target in PRODUCTS and terms > 1:
            return None
        if not all(self._is_free(node, rule, f) for f in factors) or _dims_of(rule, rule.results[0], factors) != dims:
            return None
        return self._written(node, rule, factors)

    def _convert(self, node: fx.Node, dims: _In) -> fx.Node:
        """The value, converted from the version that needs the fewest changes, its other dims in original order, the
        pinned version last."""
        known = self.versions[node]
        start = min(known, key=lambda own: (len(own ^ dims), len(own)))
        value = known[start]
        for d in sorted(start - dims):
            value = self._select(node, value, d, self._index(True))
        for d in sorted(dims - start, reverse=True):
            value = self._select(node, value, d, self._index(False))
            if d == min(dims):
                value = self._pinned(node, value, d)
        return value

    def _select(self, like: fx.Node, x: fx.Node, dim: int, index: fx.Node) -> fx.Node:
        """x at `index` along a dim whose outermost part is the sequence."""
        shape = spec_of(x).shape
        inner = shape[dim] // self.length
        if inner == 1:
            return self._emit(like, aten.index_select.default, (x, dim, index), shape)
        apart = (*shape[:dim], self.length, inner, *shape[dim + 1 :])
        split = self._emit(like, aten.view.default, (x, list(apart)), apart)
        selected = self._emit(like, aten.index_select.default, (split, dim, index), apart)
        return self._emit(like, aten.view.default, (selected, list(shape)), shape)

    def _emit(self, like: fx.Node, target: Any, args: Sequence[Any], shape: Sequence[int], **kwargs: Any) -> fx.Node:
        dtype = kwargs.get("dtype") or spec_of(like).dtype
        new = self.graph.call_function(target, tuple(args), kwargs)
        return self._described(like, new, spec=Spec(tuple(shape), dtype))

    def _index(self, is_inverse: bool) -> fx.Node:
        """The position at each place [sequence], or the place of each position. A line of places is a device's, its
        chunk of the head and its chunk of the tail, whose lines are in reverse order."""
        if is_inverse not in self.indices:
            assert self.current is not None
            count, size = self.num_devices, self.length // (2 * self.num_devices)
            chunks, lines = (2 * count, size), (count, 2 * size)
            before, after, along = (lines, chunks, 1) if is_inverse else (chunks, lines, 0)
            args, shape = (0, self.length, 1), (self.length,)
            like = self._emit(self.current, aten.arange.start_step, args, shape, dtype=torch.int64)
            apart = self._emit(like, aten.view.default, (like, list(before)), before)
            begin = before[along] // 2
            head, tail = (
                self._emit(like, aten.slice.Tensor, (apart, along, at, at + begin), (count, size)) for at in (0, begin)
            )
            tail = self._emit(like, aten.flip.default, (tail, [0]), (count, size))
            joined = self._emit(like, aten.cat.default, ([head, tail], 1 - along), after)
            index = self._emit(like, aten.view.default, (joined, list(shape)), shape)
            self.indices[is_inverse] = index if is_inverse else self._pinned(like, index, 0)
        return self.indices[is_inverse]

    def _pinned(self, like: fx.Node, x: fx.Node, dim: int) -> fx.Node:
        """x, cut along a dim in the new order."""
        constraint = ";".join(f"{axis}={dim}" for axis in self.axes)
        return self._emit(like, ours.pin.default, (x, constraint, False), spec_of(x).shape)

    def _arange(self, node: fx.Node) -> fx.Node:
        """start + step * position, for each place."""
        start, _, step = node.args
        shape = spec_of(node).shape
        value = self._index(False)
        if spec_of(value).dtype != spec_of(node).dtype:
            value = self._emit(node, aten._to_copy.default, (value,), shape, dtype=spec_of(node).dtype)
        if step != 1:
            value = self._emit(node, aten.mul.Tensor, (value, step), shape)
        return value if not start else self._emit(node, aten.add.Tensor, (value, start), shape)


def _dims_of(rule: Rule | None, dims: Dims, factors: Collection[int]) -> _In:
    """The dims that run along one of these factors."""
    return frozenset(d for d in range(len(dims)) if rule is not None and rule.outermost(dims[d]) in factors)


def _attention_loops(rule: Rule, node: fx.Node) -> tuple[int, int]:
    """The factors of queries and of keys."""
    first = 0 if node.target is ours.attention.default else 1
    return rule.operands[first][2][0], rule.operands[first + 1][2][0]
