"""What fx graphs and modules keep besides their nodes.

Holds for torch 2.11 to 2.13 (torch/fx/graph.py, torch/fx/_lazy_graph_module.py). A public way to hand a signature from
one graph to another, or to generate code when it is needed, would replace it.
"""

from __future__ import annotations

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule


def copy_signature(source: fx.Graph, target: fx.Graph) -> None:
    """Let `target` take its arguments and return its results in the containers that `source` does."""
    target.set_codegen(source._codegen)


def lazy_module_like(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module that runs another graph as `gm` runs its own: the same signature, constants and meta. Code is generated
    and compiled at the first call, or where it is read: a compiler that takes the graph never needs it."""
    copy_signature(gm.graph, graph)
    lazy = _LazyGraphModule(gm, graph)
    lazy.meta.update(gm.meta)
    return lazy


def is_erased(node: fx.Node) -> bool:
    """Whether a node has been erased from its graph."""
    return node._erased
