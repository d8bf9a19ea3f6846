"""Private state of fx graphs and modules besides their nodes.

Holds for torch 2.11 to 2.13 (torch/fx/graph.py, torch/fx/_lazy_graph_module.py). A public way to copy a signature
between graphs, or to generate code lazily, would replace it.
"""

from __future__ import annotations

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule


def copy_signature(source: fx.Graph, target: fx.Graph) -> None:
    """Make `target` take its arguments and return its results in the same containers as `source`."""
    target.set_codegen(source._codegen)


def lazy_module_like(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module that runs another graph like `gm` runs its own: the same signature, constants and meta. Code is
    generated and compiled at the first call or access: a compiler that uses the graph never needs it."""
    copy_signature(gm.graph, graph)
    lazy = _LazyGraphModule(gm, graph)
    lazy.meta.update(gm.meta)
    return lazy


def is_erased(node: fx.Node) -> bool:
    """Whether a node has been erased from its graph."""
    return node._erased
