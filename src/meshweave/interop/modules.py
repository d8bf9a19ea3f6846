"""Graph modules whose Python code is written when it is first needed."""

from __future__ import annotations

from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule


def lazy_module_like(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module that runs another graph as `gm` runs its own: the same signature, constants and meta. Code is generated
    and compiled at the first call, or where it is read: a compiler that takes the graph never needs it."""
    graph.set_codegen(gm.graph._codegen)
    made = _LazyGraphModule(gm, graph)
    made.meta.update(gm.meta)
    return made
