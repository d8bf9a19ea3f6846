"""Which values of a graph are cut into chunks of rows: propagated from a value through all ops, to a fixed point."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx

from meshweave.interop.storages import storage_key
from meshweave.ir.aliases import is_view_op, written_of
from meshweave.ir.collectives import TABLE, WAIT
from meshweave.ir.graph import Spec, tensor_inputs
from meshweave.ir.grouped import BY_ROWS
from meshweave.ir.traits import MATMULS
from meshweave.optimize.batch_split.orders import End, HistogramChunks, RowRule, SortedChunks, needs_chunks
from meshweave.optimize.batch_split.row_rules import ATTENTION, fits, rule_of, specs_of
from meshweave.optimize.decompose.cut import FIXED, Cut, NoCut


@dataclass(slots=True)
class Regions:
    """The parts of a graph that run in chunks.
    `cuts`: the values that exist in chunks; `rules`: the ops that compute or join them; `refused`: the ops that stay
    whole although an operand or the result is cut, with the reason."""

    count: int
    cuts: dict[fx.Node, Cut] = field(default_factory=dict)
    rules: dict[fx.Node, RowRule] = field(default_factory=dict)
    refused: dict[fx.Node, str] = field(default_factory=dict)

    @property
    def work(self) -> int:
        """Multiplications in the matmuls and attentions that run in chunks."""
        return sum(work_of(node) for node in self.rules)

    @property
    def num_collectives(self) -> int:
        return sum(node.target in TABLE for node in self.rules)


def work_of(node: fx.Node) -> int:
    """Multiplications of a matmul, an expert op, or an attention (forward), 0 for others."""
    shapes = [n.meta["spec"].shape for n in tensor_inputs(node)] if node.op == "call_function" else []
    if node.target in MATMULS:
        return prod(shapes[-2]) * int(shapes[-1][-1])
    if node.target in ATTENTION:
        return 2 * prod(shapes[0]) * int(shapes[1][2])
    if node.target in BY_ROWS:
        return prod(shapes[0]) * int(shapes[1][-1])
    return 0


def regions(graph: fx.Graph, seeds: Mapping[fx.Node, Cut]) -> Regions:
    """The ops that run in chunks if the rows of all `seeds` do. Nodes have meta["spec"]. A sort of rows whose order is
    needed whole stays whole, with the ops on its result."""
    changed, count = _changed(graph), next(iter(seeds.values())).count
    while True:
        settled = _settle(graph, _follow(seeds, changed), count, changed)
        sorts = _needed_whole(graph, settled)
        if not sorts:
            return settled
        for sort, reason in sorts.items():
            sort.meta[FIXED] = reason


def _needed_whole(graph: fx.Graph, settled: Regions) -> dict[fx.Node, str]:
    """The sorts in chunks whose order an op needs whole, and the reason."""
    sorts: dict[fx.Node, str] = {}
    for node in graph.nodes:
        for operand in node.all_input_nodes if node not in settled.rules and node not in settled.cuts else ():
            if isinstance(cut := settled.cuts.get(operand), SortedChunks):
                reason = f"{node.name} needs all rows in order: {settled.refused.get(node, 'it is an output')}"
                sorts |= {sort: reason for sort in cut.sorts if sort not in sorts}
    return sorts


def _changed(graph: fx.Graph) -> set[int]:
    """Storages that some op writes."""
    storages = set()
    for node in graph.nodes:
        for position, name in written_of(node.target):
            operand = node.kwargs.get(name, node.args[position] if position < len(node.args) else None)
            storages |= {s for n in _nodes(operand) for s in _storages(n)}
    return storages


def _nodes(value: Any) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.map_arg(value, nodes.append)
    return nodes


def _storages(node: fx.Node) -> Iterator[int]:
    val = node.meta.get("val")
    for tensor in val if isinstance(val, (list, tuple)) else (val,):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            yield storage_key(tensor)


def _follow(seeds: Mapping[fx.Node, Cut], changed: set[int]) -> dict[fx.Node, Cut]:
    """The cut that each value would have, by the first path that reaches it, both up and down."""
    labels: dict[fx.Node, Cut] = {}
    queue: deque[fx.Node] = deque()

    def propose(node: fx.Node, cut: Any) -> None:
        spec = node.meta.get("spec")
        if not isinstance(cut, Cut) or not isinstance(spec, Spec):
            return
        if node in labels and (needs_chunks(labels[node]) or not needs_chunks(cut)):  # a sorted cut is more specific
            return
        if fits(cut, spec.shape) and changed.isdisjoint(_storages(node)):
            labels[node] = cut
            queue.append(node)

    def apply(node: fx.Node, end: End, cut: Cut) -> None:
        try:
            rule = rule_of(node, end, cut)
        except NoCut:
            return
        for operand, needed in zip(tensor_inputs(node), rule.operands, strict=True):
            propose(operand, needed)
        for result, index in _results(node):
            propose(result, rule.results[index])

    for seed, cut in seeds.items():
        propose(seed, cut)
    while queue:
        node = queue.popleft()
        maker, index = _maker(node)
        if maker.op == "call_function":
            apply(maker, End(True, index), labels[node])
        for user in node.users:
            if user.op == "call_function":
                for i, operand in enumerate(tensor_inputs(user)):
                    if operand is node:
                        apply(user, End(False, i), labels[node])
    return labels


def _maker(node: fx.Node) -> tuple[fx.Node, int]:
    """The op that computes a value, and the index of the result."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return node.args[0], _index(node)
    return node, 0


def _results(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """The nodes for the results of an op, and their indices."""
    if not isinstance(node.meta.get("spec"), tuple):
        return [(node, 0)]
    return [(user, _index(user)) for user in node.users if user.target is operator.getitem]


def _index(item: fx.Node) -> int:
    index = item.args[1]
    assert isinstance(index, int), f"{item.name} takes {index}"
    return index


def _settle(graph: fx.Graph, labels: Mapping[fx.Node, Cut], count: int, changed: set[int]) -> Regions:
    settled = Regions(count)
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        operands = list(enumerate(tensor_inputs(node)))
        ends = [(End(False, i), settled.cuts[n]) for i, n in operands if needs_chunks(settled.cuts.get(n))]
        ends += [(End(True, i), labels[n]) for n, i in _results(node) if n in labels]
        ends += [(End(False, i), labels[n]) for i, n in operands if n in labels]
        if not ends:
            continue
        rule = _first(node, ends, settled, changed)
        if rule is not None:
            settled.rules[node] = rule
            settled.cuts |= {n: c for n, i in _results(node) if isinstance(c := rule.results[i], Cut)}
    _trim(graph, settled)
    return settled


def _first(node: fx.Node, ends: Iterable[tuple[End, Cut]], settled: Regions, changed: set[int]) -> RowRule | None:
    """The rule of the first possible end; if there is none the first reason is recorded."""
    for end, cut in ends:
        try:
            rule = _fitting(node, rule_of(node, end, cut), settled.cuts)
            _check_unwritten(node, rule, changed)
        except NoCut as reason:
            settled.refused.setdefault(node, str(reason))
        else:
            settled.refused.pop(node, None)
            return rule
    return None


def _fitting(node: fx.Node, rule: RowRule, cuts: Mapping[fx.Node, Cut]) -> RowRule:
    """The rule, if the operands in chunks have the cuts that it needs, and the results can be joined."""
    operands = list(zip(tensor_inputs(node), rule.operands, strict=True))
    if node.target is WAIT and operands[0][0] not in cuts:
        raise NoCut("its communication is not in chunks")
    for operand, needed in operands:
        cut = cuts.get(operand)
        if cut != needed and isinstance(needed, HistogramChunks):
            raise NoCut(f"{operand.name} does not have the ends of each expert's rows in this order")
        if cut is None and needs_chunks(needed):
            raise NoCut(f"{operand.name} is not sorted chunk by chunk")
        if cut is not None and needed is None:
            raise NoCut(f"every row of its result needs all rows of {operand.name}")
        if cut is not None and needed != cut:
            raise NoCut(f"it combines other rows than the chunks of {operand.name}")
    if not any(isinstance(c, Cut) for c in rule.results) and not any(operand in cuts for operand, _ in operands):
        raise NoCut("none of its operands is in chunks")
    if isinstance(node.meta.get("spec"), tuple) and any(u.target is not operator.getitem for u in node.users):
        raise NoCut("its results are used as a list")
    cut_results = [
        i for i, (c, s) in enumerate(zip(rule.results, specs_of(node), strict=True)) if isinstance(c, Cut) and s
    ]
    if not all(_is_dense(node, i) for i in cut_results):
        raise NoCut("its result has gaps in memory")
    return rule


def _check_unwritten(node: fx.Node, rule: RowRule, changed: set[int]) -> None:
    """Raise NoCut for chunks of memory that some op writes: it would write the whole value, and not the chunks."""
    values = [n for n, cut in zip(tensor_inputs(node), rule.operands, strict=True) if cut is not None]
    values += [n for n, index in _results(node) if isinstance(rule.results[index], Cut)]
    for value in values:
        if not changed.isdisjoint(_storages(value)):
            raise NoCut(f"the memory of {value.name} is written")


def _is_dense(node: fx.Node, index: int) -> bool:
    """Whether a result is dense in memory, in some order of dims, or is a view, which is repeated on the whole
    value."""
    val = node.meta["val"]
    x = val[index] if isinstance(val, (list, tuple)) else val
    if is_view(node) or x.numel() == 0:
        return True
    size = 1
    for step, length in sorted(zip(x.stride(), x.shape, strict=True)):
        if length > 1 and step != size:
            return False
        size *= length
    return True


def is_view(node: fx.Node) -> bool:
    """Whether the result aliases an operand, by the op's schema, and is not written."""
    return node.target is not WAIT and is_view_op(node.target)


def _trim(graph: fx.Graph, settled: Regions) -> None:
    """Removes ops whose operands are whole and whose results are only needed whole."""
    for node in reversed(list(graph.nodes)):
        rule = settled.rules.get(node)
        if rule is None or any(o in settled.cuts for o in tensor_inputs(node)):
            continue
        results = [n for n, _ in _results(node)]
        if not any(_takes(user, n, settled) for n in results for user in n.users):
            del settled.rules[node]
            for n in results:
                settled.cuts.pop(n, None)


def _takes(user: fx.Node, operand: fx.Node, settled: Regions) -> bool:
    """Whether an op takes an operand in chunks."""
    rule = settled.rules.get(user)
    return rule is not None and any(
        n is operand and c is not None for n, c in zip(tensor_inputs(user), rule.operands, strict=True)
    )
