"""Which values of a rank graph are parameters, gradients or optimizer state."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from meshweave.ir.graph import origin_of
from meshweave.ir.rank import RankGraph, distinct_operands

KINDS = ("param", "grad", "state")


def classify(graph: RankGraph) -> dict[fx.Node, str]:
    """Node -> param (a parameter, or values computed from parameters only: casts, gathers, views), grad (a gradient
    from the op that computes it until its use) or state. Other nodes are activations and are omitted."""
    kinds: dict[fx.Node, str] = {}
    for node, item in graph.sources.items():
        kind = {"acc": "grad", "carry": "param"}.get(item.kind, item.kind)
        if kind in KINDS:
            kinds[node] = kind
    for node in graph.graph.nodes:
        tensors = distinct_operands(node)
        computed = node.op == "call_function" and tensors and origin_of(node).phase != "update"
        if computed and all(kinds.get(n) == "param" for n in tensors):
            kinds[node] = "param"
    for (kind, _), node in graph.results.items():
        if kind == "grad":
            kinds.update((n, "grad") for n in _upstream(node) if n not in kinds)
        elif kind in ("param", "state", "carry"):
            kinds[node] = "param" if kind == "carry" else kind
    return kinds


def _upstream(node: fx.Node) -> Iterator[fx.Node]:
    """The node and its ancestors through ops of a single operand, down to the op that computed it."""
    yield node
    while len(distinct_operands(node)) == 1 and node.op == "call_function":
        (node,) = distinct_operands(node)
        yield node
