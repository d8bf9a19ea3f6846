"""Replaces the nodes of a compiler's graph by those of another graph."""

from __future__ import annotations

import torch
from torch import fx

from meshweave.interop.graphs import lazy_module_like
from meshweave.ir.graph import copied_graph, output_node


def module_of(graph: fx.Graph) -> fx.GraphModule:
    """A module that runs a copy of the graph; its constants are those of the module that owns it."""
    owner = graph.owning_module or fx.GraphModule(torch.nn.Module(), graph)
    return lazy_module_like(owner, copied_graph(graph))


def substitute(graph: fx.Graph, module: fx.GraphModule) -> None:
    """Turn `graph` into the graph of `module`, in place and with its names: placeholders and the output stay the same
    nodes."""
    output = output_node(graph)
    old = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    placeholders = module.graph.find_nodes(op="placeholder"), graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, fx.Node] = dict(zip(*placeholders, strict=True))
    with graph.inserting_before(output):
        for node in module.graph.nodes:
            if node.op == "output":
                output.args = fx.map_arg(node.args, copies.__getitem__)
            elif node.op != "placeholder":
                copy = copies[node] = graph.node_copy(node, copies.__getitem__)
                copy.meta = dict(node.meta)
    for node in reversed(old):
        graph.erase_node(node)
    for node, copy in copies.items():  # the names of removed nodes
        copy.name = node.name
    graph.lint()
