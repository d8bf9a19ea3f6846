"""A graph that a compiler holds, with the nodes of another in place of its own."""

from __future__ import annotations

import torch
from torch import fx

from meshweave.interop.graphs import copy_signature
from meshweave.ir.graph import copied_graph


def module_of(graph: fx.Graph) -> fx.GraphModule:
    """A module that runs a copy of the graph; constants are those of the module that owns it."""
    made = copied_graph(graph)
    copy_signature(graph, made)
    return fx.GraphModule(graph.owning_module or torch.nn.Module(), made)


def substitute(graph: fx.Graph, made: fx.GraphModule) -> None:
    """Make `graph` what `made` is, in place: placeholders and the output stay the nodes that they are."""
    output = next(iter(reversed(graph.nodes)))
    old = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    held = dict(zip(made.graph.find_nodes(op="placeholder"), graph.find_nodes(op="placeholder"), strict=True))
    with graph.inserting_before(output):
        for node in made.graph.nodes:
            if node.op == "output":
                output.args = fx.map_arg(node.args, held.__getitem__)
            elif node.op != "placeholder":
                held[node] = graph.node_copy(node, held.__getitem__)
                held[node].meta = dict(node.meta)
    for node in reversed(old):
        graph.erase_node(node)
    graph.lint()
