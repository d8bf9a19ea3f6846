"""What AOTAutograd says of the inputs of the graphs that it makes.

Holds for torch 2.11 to 2.13 (torch/_functorch/_aot_autograd/descriptors.py): placeholders of its graphs have a
descriptor in meta["desc"], except for the values that a forward graph saves for its backward graph.
"""

from __future__ import annotations

from torch import fx
from torch._functorch._aot_autograd.descriptors import TangentAOTInput


def owned_inputs(graph: fx.Graph) -> frozenset[fx.Node]:
    """The inputs that a backward graph owns, because it gets them in a list that it empties: gradients of the forward
    graph's outputs, and saved values; none in any other graph. Inputs of the forward graph, such as parameters, are
    their caller's."""
    placeholders = graph.find_nodes(op="placeholder")
    tangents = [node for node in placeholders if _is_tangent(node.meta.get("desc"))]
    saved = [node for node in placeholders if node.meta.get("desc") is None]
    return frozenset([*tangents, *saved]) if tangents else frozenset()


def _is_tangent(descriptor: object) -> bool:
    """Whether a descriptor is of a gradient, or of a part of one that is a tensor subclass."""
    while hasattr(descriptor, "base"):
        descriptor = descriptor.base
    return isinstance(descriptor, TangentAOTInput)
