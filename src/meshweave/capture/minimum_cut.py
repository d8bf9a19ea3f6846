"""Which values of a block are saved if elementwise ops are recomputed: the fewest bytes, by a minimum cut.

A compiler fuses recomputed elementwise ops into the kernels of the backward pass that read them, where they cost no
memory traffic: the partitioner of AOTAutograd decides by the same cut (torch/_functorch/partitioners.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import fx

from meshweave.capture.blocks import is_back
from meshweave.ir.graph import Spec, tensor_inputs
from meshweave.ir.traits import CASTS, FACTORIES, RANK_CHANGES, RESHAPES, VIEWS, is_pointwise

_SOURCE, _SINK = "source", "sink"
_CHEAP = CASTS | VIEWS | RANK_CHANGES | RESHAPES | FACTORIES
_SIDE = ("before", "after")  # a value is saved if the cut runs between its two sides


def fewest_bytes(nodes: Iterable[fx.Node], free: Collection[fx.Node], saved: Collection[fx.Node]) -> Iterator[fx.Node]:
    """The forward nodes of a block to save for the backward pass, besides `saved` (saved anyway), so that the other
    values that it reads can be recomputed by elementwise ops, casts and views. `free` are parameters and their forms,
    which are always there."""
    import networkx as nx

    own = dict.fromkeys(node for node in nodes if node not in free)
    graph = nx.DiGraph()
    graph.add_nodes_from((_SOURCE, _SINK))

    def add(node: fx.Node, is_computed_once: bool) -> None:
        spec = node.meta.get("spec")
        if isinstance(spec, Spec):
            graph.add_edge((node, _SIDE[0]), (node, _SIDE[1]), capacity=0 if node in saved else spec.num_bytes)
        if is_computed_once:
            graph.add_edge(_SOURCE, (node, _SIDE[0]))  # without a capacity: no limit

    for node in own:
        add(node, is_computed_once=not is_recomputable(node))
        if any(map(is_back, node.users)):
            graph.add_edge((node, _SIDE[1]), _SINK)
        for operand in tensor_inputs(node) if is_recomputable(node) else ():
            if operand in free or operand.op == "placeholder":
                continue
            if operand not in own:
                add(operand, is_computed_once=True)
            graph.add_edge((operand, _SIDE[1]), (node, _SIDE[0]))
    _, (reached, _) = nx.minimum_cut(graph, _SOURCE, _SINK)
    yield from (n for n in own if (n, _SIDE[0]) in reached and (n, _SIDE[1]) not in reached)


def is_recomputable(node: fx.Node) -> bool:
    """Whether a node is elementwise, a cast, a view or a constant."""
    target: Any = node.target
    return is_pointwise(target) or target in _CHEAP
