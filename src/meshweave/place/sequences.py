"""Keeps the sequence dim separate: undoes merges of the sequence with outer dims, so that it can be cut.

A view that merges (batch, sequence) into a dim of tokens, as every linear layer and most losses do, hides the sequence
where no layout can cut it. The captured step is rewritten so that such values keep their dims: an op on tokens becomes
the same op on (batch, sequence), a product over tokens a `contract`. Values are the same except for the order of their
elements; an op that cannot be rewritten gets the merged value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import fx

from meshweave.capture.batch import batch_size
from meshweave.errors import PlanError, RuleError
from meshweave.ir.graph import Input, Spec, StepGraph, copy_meta, map_nodes, origin_of, spec_of, tensor_inputs
from meshweave.ir.traits import CASTS, is_pointwise
from meshweave.ops.factors import Rule
from meshweave.ops.registry import pointwise, result_specs, row_for

aten = torch.ops.aten
ours = torch.ops.meshweave

_ALONG = (aten.slice.Tensor, aten.constant_pad_nd.default)
Split = tuple[tuple[int, ...], ...]  # per dim of a value, the sizes of the dims that it is split into


def sequence_length(step: StepGraph) -> int:
    """Size of dim 1 of the first tensor of the batch that has such a dim. PlanError if there is none."""
    shapes = [i.spec.shape for i in step.inputs if i.kind == "batch"]
    length = next((shape[1] for shape in shapes if len(shape) > 1), 0)
    if not length:
        raise PlanError(
            "the batch has no sequence to cut",
            where="Plan.cp",
            got=", ".join(str(list(shape)) for shape in shapes),
            expected="a tensor [batch, sequence, ...]",
        )
    return length


def has_sequence(item: Input, size: int | None, length: int) -> bool:
    """Whether an input is a tensor of the batch with the batch's size in dim 0 and the sequence's in dim 1."""
    shape = item.spec.shape
    return item.kind == "batch" and len(shape) > 1 and shape[:2] == (size, length)


@dataclass(slots=True)
class _Value:
    """A value of the old graph, in the new graph, with its dims split."""

    node: fx.Node
    split: Split


def stored_values(step: StepGraph) -> frozenset[fx.Node]:
    """The nodes that compute what is stored, sums of gradients over microbatches among them. They keep shape and order
    of the parameter, also where its gradient has others."""
    sums = {value for (kind, _), value in step.results.items() if kind == "acc"}
    later = {n for n in step.graph.nodes if n.op == "call_function" and origin_of(n).phase in ("reduce", "update")}
    return frozenset(sums | later)


def keep_sequences_apart(step: StepGraph, axes: Sequence[str]) -> StepGraph:
    """The step with the sequence dim, which `axes` will cut, separate from the batch dim, from the batch to the loss
    and back. Values that were shifted along it (labels) are pinned to be cut again."""
    size = batch_size(i.spec.shape for i in step.inputs if i.kind == "batch")
    return _SequenceWriter(step, size, sequence_length(step), tuple(axes), stored_values(step)).run()


@dataclass(slots=True)
class _SequenceWriter:
    step: StepGraph
    size: int | None
    length: int
    axes: tuple[str, ...]
    stored: frozenset[fx.Node]
    graph: fx.Graph = field(default_factory=fx.Graph)
    env: dict[fx.Node, _Value] = field(default_factory=dict)
    merged: dict[fx.Node, fx.Node] = field(default_factory=dict)
    tuples: dict[fx.Node, tuple[fx.Node, list[frozenset[int]]]] = field(default_factory=dict)
    marks: dict[fx.Node, frozenset[int]] = field(default_factory=dict)  # new node -> dims that run along the sequence

    def run(self) -> StepGraph:
        for node, item in self.step.sources.items():
            new = copy_meta(node, self.graph.placeholder(node.name))
            self.env[node] = _Value(new, _unsplit(item.spec.shape))
            self.marks[new] = frozenset({1} if has_sequence(item, self.size, self.length) else ())
        outputs = set(self.step.output_values)
        for node in self.step.graph.nodes:
            if node.op == "call_function":
                self._node(node)
                if node in outputs:  # in its phase: a buffer is there before the update
                    self.whole(node)
        self.graph.output([self.whole(value) for value in self.step.output_values])
        return replace(self.step, graph=self.graph)

    def whole(self, node: fx.Node) -> fx.Node:
        """The value in its old shape."""
        value = self.env[node]
        if not _is_split(value.split):
            return value.node
        if node not in self.merged:
            shape = spec_of(node).shape
            self.merged[node] = self.emit(node, aten.view.default, (value.node, list(shape)), {}, shape)
        return self.merged[node]

    def in_split(self, node: fx.Node, split: Split) -> fx.Node:
        """The value with its dims split in this way."""
        value = self.env[node]
        shape = [size for sizes in split for size in sizes]
        if value.split == split:
            return value.node
        if value.node.target is aten.full.default:  # its view would not be contiguous
            return self.emit(node, aten.full.default, (shape, *value.node.args[1:]), value.node.kwargs, shape)
        return self.emit(node, aten.view.default, (value.node, shape), {}, shape)

    def emit(self, like: fx.Node, target: Any, args: Any, kwargs: Any, shape: Sequence[int]) -> fx.Node:
        new = self.graph.call_function(target, tuple(args), dict(kwargs))
        copy_meta(like, new)
        new.meta["spec"] = Spec(tuple(shape), spec_of(like).dtype)
        return new

    def _node(self, node: fx.Node) -> None:
        if node.target is operator.getitem and node.args[0] in self.tuples:
            source, marks = self.tuples[node.args[0]]  # type: ignore[index]
            new = copy_meta(node, self.graph.call_function(operator.getitem, (source, node.args[1])))
            places = [i for i, spec in enumerate(source.meta["spec"]) if spec is not None]
            self.env[node] = _Value(new, _unsplit(spec_of(node).shape))
            self.marks[new] = marks[places.index(node.args[1])]  # type: ignore[arg-type]
            return
        if node.target is aten.view.default:
            self._view(node)
            return
        write = _WRITERS.get(node.target, _pointwise if _is_elementwise(node) else None)
        if node in self.stored:
            write = None
        is_split = any(_is_split(self.env[n].split) for n in tensor_inputs(node))
        split = write(self, node) if write is not None and is_split else None
        if split is None:
            self._as_is(node)

    def _as_is(self, node: fx.Node) -> None:
        """The op on merged values."""
        args, kwargs = map_nodes(node, self.whole)
        new = copy_meta(node, self.graph.call_function(node.target, args, kwargs))  # type: ignore[arg-type]
        if isinstance(node.meta["spec"], Spec):
            self._keep(node, new, _unsplit(spec_of(node).shape))
        else:
            self.tuples[node] = (new, self._marks(new))

    def give(self, node: fx.Node, target: Any, args: Any, kwargs: Any, split: Split) -> Split:
        """Record the value of `node`, computed by an op on split dims."""
        new = self.emit(node, target, args, kwargs, [size for sizes in split for size in sizes])
        self._keep(node, new, split)
        return split

    def _keep(self, node: fx.Node, new: fx.Node, split: Split) -> None:
        """Record the new node of `node`. A value that has the sequence's length again, after a shift, is pinned."""
        (operand,) = tensor_inputs(new)[:1] or (None,)
        marks, along = self._marks(new)[0], frozenset[int]()
        if new.target in _ALONG and operand is not None:  # the dim is cropped or padded, but is the same dim
            along = self.marks.get(operand, frozenset())
        shape, before = spec_of(new).shape, () if operand is None else spec_of(operand).shape
        shifted = [d for d in along - marks if shape[d] == self.length != before[d]]
        if shifted:
            constraint = ";".join(f"{axis}={shifted[0]}" for axis in self.axes)
            new = self.emit(node, ours.pin.default, (new, constraint, False), {}, shape)
        self.env[node] = _Value(new, split)
        self.marks[new] = marks | along

    def _view(self, node: fx.Node) -> None:
        """A view splits its dims where the sequence begins inside a dim, and is dropped if that restores the shape."""
        (source,) = tensor_inputs(node)
        value = self.env[source]
        before, after = spec_of(value.node).shape, spec_of(node).shape
        edges = {prod(before[d:]) for d in self.marks.get(value.node, ())}
        split = tuple(_split_at(after, d, edges) for d in range(len(after)))
        shape = tuple(size for sizes in split for size in sizes)
        if shape == before:
            self.env[node] = _Value(value.node, split)
            return
        self.give(node, aten.view.default, (value.node, list(shape)), {}, split)

    def _marks(self, new: fx.Node) -> list[frozenset[int]]:
        """Dims of the results whose outermost factor, whole or not, is along the sequence in an operand."""
        rule = rule_or_none(new)
        if rule is None:
            return [frozenset() for _ in result_specs(new)]
        along: set[int] = set()
        for operand, dims in zip(tensor_inputs(new), rule.operands, strict=True):
            along |= {rule.outermost(dims[d]) for d in self.marks.get(operand, ())} - {-1}
        return [frozenset(d for d, dim in enumerate(dims) if rule.outermost(dim) in along) for dims in rule.results]


def rule_or_none(node: fx.Node) -> Rule | None:
    """The rule of an op; None if there is none (placement raises that error). A pin changes nothing."""
    try:
        return pointwise(node) if node.target is ours.pin.default else row_for(node).rule(node)
    except RuleError:
        return None


def _unsplit(shape: Sequence[int]) -> Split:
    return tuple((size,) for size in shape)


def _is_split(split: Split) -> bool:
    return any(len(sizes) > 1 for sizes in split)


def _split_at(shape: Sequence[int], dim: int, edges: set[int]) -> tuple[int, ...]:
    """Sizes of the dims that `dim` is split into at those of `edges` that are inside it, counted in elements from the
    innermost."""
    low, high = prod(shape[dim + 1 :]), prod(shape[dim:])
    sizes = []
    for edge in sorted(edges, reverse=True):
        if low < edge < high and high % edge == 0 and edge % low == 0:
            sizes.append(high // edge)
            high = edge
    return (*sizes, high // low) if low else (shape[dim],)


def _places(split: Split) -> list[list[int]]:
    """The new dims of each old dim."""
    ends = [sum(map(len, split[: d + 1])) for d in range(len(split))]
    return [list(range(end - len(sizes), end)) for end, sizes in zip(ends, split, strict=True)]


def _common(splits: Sequence[tuple[tuple[int, ...], int]]) -> tuple[int, ...] | None:
    """The split of dims of several values that share a loop, each as (split, size): the finest; None if two conflict.
    Dims of size 1 beside larger dims are broadcast, and have no say."""
    size = max(size for _, size in splits)
    known = {split for split, n in splits if n == size and len(split) > 1}
    return None if len(known) > 1 else known.pop() if known else (size,)


# How each kind of op is rewritten on split dims: (writer, node) -> the split of the result, None if it cannot be
# rewritten.

_Write = Callable[[_SequenceWriter, fx.Node], Split | None]


def _is_elementwise(node: fx.Node) -> bool:
    known = is_pointwise(node.target) or node.target in CASTS or node.target is ours.round_parts.default
    return known and isinstance(node.meta["spec"], Spec)


def _pointwise(w: _SequenceWriter, node: fx.Node) -> Split | None:
    rank = len(spec_of(node).shape)
    columns: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in range(rank)]
    for operand in tensor_inputs(node):
        shape = spec_of(operand).shape
        for d, pair in enumerate(zip(w.env[operand].split, shape, strict=True), rank - len(shape)):
            columns[d].append(pair)
    split = [_common(column) for column in columns]
    if None in split:
        return None

    def split_operand(operand: fx.Node) -> fx.Node:
        shape = spec_of(operand).shape
        last = split[rank - len(shape) :]
        own = [sizes if n == prod(sizes) else (1,) * len(sizes) for n, sizes in zip(shape, last, strict=True)]  # type: ignore[arg-type]
        return w.in_split(operand, tuple(own))  # type: ignore[arg-type]

    args, kwargs = map_nodes(node, split_operand)
    return w.give(node, node.target, args, kwargs, tuple(split))  # type: ignore[arg-type]


def _reduction(w: _SequenceWriter, node: fx.Node) -> Split | None:
    (x,) = tensor_inputs(node)
    split, rest = w.env[x].split, node.args[2:]
    listed: Any = node.args[1] if len(node.args) > 1 else ()
    removed = {d % len(split) for d in ([listed] if isinstance(listed, int) else listed)} or set(range(len(split)))
    places = _places(split)
    dims = [at for d in sorted(removed) for at in places[d]]
    keepdim = bool(rest[0]) if rest else False
    result = [(1,) * len(s) if d in removed else s for d, s in enumerate(split) if d not in removed or keepdim]
    return w.give(node, node.target, (w.env[x].node, dims, *rest), node.kwargs, tuple(result))


def _expand(w: _SequenceWriter, node: fx.Node) -> Split | None:
    (x,), after = tensor_inputs(node), spec_of(node).shape
    before, own = spec_of(x).shape, w.env[x].split
    lead = len(after) - len(before)
    grows = [a != b for a, b in zip(after[lead:], before, strict=True)]
    source = tuple((1,) if grown else sizes for grown, sizes in zip(grows, own, strict=True))
    last = [(n,) if grown else sizes for n, grown, sizes in zip(after[lead:], grows, own, strict=True)]
    split = (*_unsplit(after[:lead]), *last)
    sizes = [size for sizes in split for size in sizes]
    return w.give(node, node.target, (w.in_split(x, source), sizes), node.kwargs, split)


def _permute(w: _SequenceWriter, node: fx.Node) -> Split | None:
    (x,), order = tensor_inputs(node), node.args[1]
    split = w.env[x].split
    places = _places(split)
    dims = [at for d in order for at in places[d]]  # type: ignore[union-attr,index]
    return w.give(node, node.target, (w.env[x].node, dims), {}, tuple(split[d] for d in order))  # type: ignore[union-attr,index]


def _mm(w: _SequenceWriter, node: fx.Node) -> Split | None:
    a, b = tensor_inputs(node)
    (m, k), (other, n) = w.env[a].split, w.env[b].split
    shared = _common([(k, prod(k)), (other, prod(other))])
    if shared is None:
        return None
    left, right = w.in_split(a, (m, shared)), w.in_split(b, (shared, n))
    over_a, over_b = list(range(len(m), len(m) + len(shared))), list(range(len(shared)))
    operands = (*_unpermuted(left, over_a), *_unpermuted(right, over_b))
    return w.give(node, ours.contract.default, operands[::2] + operands[1::2], {}, (m, n))


def _unpermuted(x: fx.Node, over: list[int]) -> tuple[fx.Node, list[int]]:
    """An operand of a product before a permutation that keeps the order of the other dims, so that a move of it serves
    its other uses, and the dims to sum over."""
    if x.target is not aten.permute.default:
        return x, over
    source, order = x.args[0], list(x.args[1])  # type: ignore[arg-type]
    rest = [at for d, at in enumerate(order) if d not in over]
    return (source, [order[d] for d in over]) if rest == sorted(rest) else (x, over)  # type: ignore[return-value]


def _dim(node: fx.Node, rank: int) -> int:
    """Argument 1 of an op, as a dim."""
    dim: Any = node.args[1]
    return int(dim % rank)


def _beside(w: _SequenceWriter, node: fx.Node) -> Split | None:
    """Ops that look up along a dim (argument 1), which is not split: gather and scatters."""
    tensors = tensor_inputs(node)
    rank = len(spec_of(node).shape)
    dim = _dim(node, rank)
    columns = [[(w.env[t].split[d], spec_of(t).shape[d]) for t in tensors] for d in range(rank)]
    if any(len(split) > 1 for split, _ in columns[dim]):
        return None
    common = {d: _common(column) for d, column in enumerate(columns) if d != dim}
    if None in common.values() or any(n != prod(common[d]) for d in common for _, n in columns[d]):  # type: ignore[arg-type]
        return None

    def split_of(t: fx.Node) -> Split:
        return tuple(common.get(d) or (n,) for d, n in enumerate(spec_of(t).shape))

    args, kwargs = map_nodes(node, lambda t: w.in_split(t, split_of(t)))
    at = sum(len(common[d] or ()) for d in range(dim))
    return w.give(node, node.target, (args[0], at, *args[2:]), kwargs, split_of(node))


def _slice(w: _SequenceWriter, node: fx.Node) -> Split | None:
    (x,) = tensor_inputs(node)
    split = w.env[x].split
    dim = _dim(node, len(split))
    if len(split[dim]) > 1:
        return None
    result = tuple(
        (n,) if d == dim else sizes for d, (n, sizes) in enumerate(zip(spec_of(node).shape, split, strict=True))
    )
    return w.give(node, node.target, (w.env[x].node, _places(split)[dim][0], *node.args[2:]), {}, result)


def _pad(w: _SequenceWriter, node: fx.Node) -> Split | None:
    (x,), pad = tensor_inputs(node), node.args[1]
    split = w.env[x].split
    first = len(split) - len(pad) // 2  # type: ignore[arg-type]
    if any(len(sizes) > 1 for sizes in split[first:]):
        return None
    result = (*split[:first], *_unsplit(spec_of(node).shape[first:]))
    return w.give(node, node.target, (w.env[x].node, *node.args[1:]), {}, result)


def _embedding(w: _SequenceWriter, node: fx.Node) -> Split | None:
    weight, index = tensor_inputs(node)
    split = w.env[index].split
    if _is_split(w.env[weight].split):
        return None
    args = (w.env[weight].node, w.env[index].node, *node.args[2:])
    return w.give(node, node.target, args, {}, (*split, *_unsplit(spec_of(node).shape[-1:])))


def _embedding_backward(w: _SequenceWriter, node: fx.Node) -> Split | None:
    grad, index = tensor_inputs(node)
    own = spec_of(index).shape
    pairs = list(zip(w.env[grad].split, w.env[index].split, own, strict=False))
    common = [_common([(a, n), (b, n)]) for a, b, n in pairs]
    if None in common or len(w.env[grad].split[-1]) > 1:
        return None
    split: Split = tuple(common)  # type: ignore[arg-type]
    values = (w.in_split(grad, (*split, w.env[grad].split[-1])), w.in_split(index, split))
    return w.give(node, node.target, (*values, *node.args[2:]), {}, _unsplit(spec_of(node).shape))


_WRITERS: Mapping[Any, _Write] = {
    aten.sum.dim_IntList: _reduction,
    aten.amax.default: _reduction,
    aten.amin.default: _reduction,
    aten.expand.default: _expand,
    aten.permute.default: _permute,
    aten.mm.default: _mm,
    aten.gather.default: _beside,
    aten.scatter.value: _beside,
    aten.scatter.src: _beside,
    aten.scatter_add.default: _beside,
    aten.slice.Tensor: _slice,
    aten.constant_pad_nd.default: _pad,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
}
