"""Finds the collectives of a rank graph that are beside matmuls, and whether they can run in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from torch import fx

from meshweave.ir.collectives import ALL_REDUCE, OURS, STARTS, WAIT
from meshweave.ir.rank import operands_of
from meshweave.optimize.decompose.chains import Downstream, Shapes, Upstream, downstream, late_text, upstream
from meshweave.optimize.decompose.cut import FIXED, LOOSE, Cut, Shape, Sum, kind_of
from meshweave.optimize.decompose.rewrite import RingScheme, wait_of
from meshweave.optimize.decompose.writer import Ring

KINDS: Mapping[Any, str] = {row.op: row.name for row in OURS if row.may_decompose}
_MOST_HOISTED = 16  # nodes before a matmul's operand: views and casts of a weight are two or three


def starts_of(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in KINDS]


def gathered(
    start: fx.Node, scheme: RingScheme, ring: Ring, shapes: Shapes, order: Mapping[fx.Node, int]
) -> Downstream:
    """What is computed from the chunks of a gather, as far as it can be computed at its wait."""
    wait = wait_of(start)
    last = Downstream({})
    for cut in _cuts(scheme, ring, shapes.of(wait)):
        if not shapes.fits(wait, cut):
            last.why.append(f"{cut.count} chunks do not divide {list(shapes.of(wait))}")
            continue
        chain = after(wait, cut, shapes, order)
        if chain.consumers:
            return chain
        last.why += chain.why
    return last


def _cuts(scheme: RingScheme, ring: Ring, shape: Shape) -> list[Cut]:
    """How blocks stacked along dim 0 may be cut: into the blocks, or into parts of all of them along some dim."""
    if not shape:
        return []
    if scheme.row is not None:
        return [Cut(0, 1, ring.size)]
    return [Cut(dim, 1 if dim else ring.size, scheme.num_chunks) for dim in range(len(shape))]


def after(wait: fx.Node, cut: Cut, shapes: Shapes, order: Mapping[fx.Node, int]) -> Downstream:
    """What is computed from the chunks of a wait's value, as far as it can be computed there: without matmuls whose
    operands are computed later, and cannot be moved forward."""

    @cache
    def is_early(node: fx.Node) -> bool:
        return earlier(node, wait, order) is not None

    @cache
    def is_late(node: fx.Node) -> bool:
        kind = kind_of(node)
        may_be_chunks = kind is not None and not kind.is_matmul
        return not may_be_chunks and not is_early(node)

    chain = downstream(wait, cut, shapes, is_late)
    for consumer in list(chain.consumers):
        if operand := _late(consumer, wait, chain, is_early):
            chain.why.append(late_text(operand, consumer))
            del chain.consumers[consumer]
    chain.cuts = cuts_to(chain, wait, chain.consumers)
    return chain


def variants(chain: Downstream, wait: fx.Node, with_sums: bool) -> list[Downstream]:
    """Variants with all consumers, or only the first few: the first hide the messages, and the others are faster whole.
    Sums of products come last, if at all."""
    rows = [node for node, cut in chain.consumers.items() if cut != "sum"]
    sums = [node for node, cut in chain.consumers.items() if cut == "sum"] if with_sums else []
    ordered = [*rows, *sums]
    chains = []
    for count in range(len(ordered), 0, -1):
        kept: dict[fx.Node, Cut | Sum] = {node: chain.consumers[node] for node in ordered[:count]}
        chains.append(Downstream(cuts_to(chain, wait, kept), kept, list(chain.why)))
    return chains


def cuts_to(chain: Downstream, wait: fx.Node, consumers: Iterable[fx.Node]) -> dict[fx.Node, Cut]:
    """The cuts on the path to these consumers, in order; the gathered value's first."""
    waiting, kept = list(consumers), {wait}
    while waiting:
        for operand in operands_of(waiting.pop()):
            if operand in chain.cuts and operand not in kept:
                kept.add(operand)
                waiting.append(operand)
    return {node: cut for node, cut in chain.cuts.items() if node in kept}


def _late(consumer: fx.Node, wait: fx.Node, chain: Downstream, is_early: Callable[[fx.Node], bool]) -> fx.Node | None:
    """An operand, of the consumer or of the path to it, that is not available at the gather's wait and cannot be
    computed by then."""
    on_way = [node for node in cuts_to(chain, wait, [consumer]) if node is not wait]
    for node in (*on_way, consumer):
        for operand in operands_of(node):
            if operand not in chain.cuts and not is_early(operand):
                return operand
    return None


def earlier(node: fx.Node, anchor: fx.Node, order: Mapping[fx.Node, int]) -> list[fx.Node] | None:
    """What has to be moved before `anchor` for `node` to come there, in order: views, casts and the like of available
    values, and waits for started communications. None if that is not all."""
    limit = order[anchor]
    moved: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if order.get(current, -1) < limit or current in moved:
            continue
        kind = kind_of(current)
        is_constant = current.op == "call_function" and not operands_of(current) and FIXED not in current.meta
        is_light = is_constant or current.target is WAIT or (kind is not None and not kind.is_matmul)
        if current.target in STARTS:
            is_light = LOOSE in current.meta
        if current is anchor or not is_light or len(moved) >= _MOST_HOISTED:
            return None
        moved.add(current)
        waiting += current.all_input_nodes
    return sorted(moved, key=order.__getitem__)


def nodes_to_hoist(chain: Downstream, wait: fx.Node, order: Mapping[fx.Node, int]) -> Iterator[fx.Node]:
    """Nodes after the wait that have to move before it."""
    seen: set[fx.Node] = set()
    for node in (*chain.consumers, *chain.cuts):
        for operand in operands_of(node) if node is not wait else ():
            if operand not in chain.cuts:
                for light in earlier(operand, wait, order) or ():
                    if light not in seen:
                        seen.add(light)
                        yield light


def reduced(start: fx.Node, scheme: RingScheme, ring: Ring, shapes: Shapes, order: Mapping[fx.Node, int]) -> Upstream:
    """What computes the chunks of a reduction's operand: for an all-reduce along the first dim with matmuls."""
    operand = start.args[0]
    assert isinstance(operand, fx.Node)
    count, shape = ring.size if scheme.row is not None else scheme.num_chunks, shapes.of(operand)
    along_dims = [Cut(dim, 1, count) for dim in range(len(shape))]
    cuts = along_dims if start.target is ALL_REDUCE.op else _cuts(scheme, ring, shape)
    last = Upstream()
    for cut in cuts:
        if not shape or not shapes.fits(operand, cut):
            last.why.append(f"{cut.count} chunks do not divide {list(shape)}")
            continue
        chain = upstream(start, operand, cut, shapes, order)
        if chain.matmuls:
            return chain
        last.why += chain.why
    return last
