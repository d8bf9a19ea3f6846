"""The repeated blocks of a model (its layers), derived from the modules of the nodes of a captured step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from torch import fx

from meshweave.errors import PlanError
from meshweave.ir.graph import StepGraph, origin_of
from meshweave.ir.traits import PRODUCTS

# Layers of the same list may differ: some have a mixture of experts where others have a feed-forward, the first of a
# stage downsamples. They count as alike if they share this part of the modules of the smaller; an embedding and a layer
# share none.
_ALIKE = 0.5


@dataclass(frozen=True, slots=True)
class Blocks:
    """The paths of a model's blocks, in the order in which they run."""

    names: tuple[str, ...]
    _known: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def of(self, node: fx.Node) -> str:
        """The block that a node comes from (for a backward node: the block of its forward op), or ""."""
        module = origin_of(node).module
        if module not in self._known:
            self._known[module] = next((n for n in self.names if module == n or module.startswith(n + ".")), "")
        return self._known[module]


def is_ahead(node: fx.Node) -> bool:
    """Whether a node is an op of forward or loss."""
    return node.op == "call_function" and origin_of(node).phase in ("forward", "loss")


def is_back(node: fx.Node) -> bool:
    """Whether a node is an op after the loss."""
    return node.op == "call_function" and origin_of(node).phase not in ("forward", "loss")


def has_blocks(step: StepGraph) -> bool:
    """Whether a model has repeated blocks."""
    try:
        find_blocks(step)
    except PlanError:
        return False
    return True


def find_blocks(step: StepGraph) -> Blocks:
    """The outermost indexed modules (`layers.0`, `layers.1`) that have an equal sibling.

    A block consists of several modules or several matmuls; siblings are equal if they share half of the modules under
    the smaller. Raises PlanError if there is none.
    """
    ahead = [n for n in step.graph.nodes if n.op == "call_function" and origin_of(n).phase == "forward"]
    matmuls: dict[str, int] = {}
    for node in ahead:
        module = origin_of(node).module
        matmuls[module] = matmuls.get(module, 0) + (node.target in PRODUCTS)
    lists = _indexed(matmuls)
    blocks: dict[str, None] = {}
    for prefix in sorted(lists, key=lambda p: p.count(".") + bool(p)):
        siblings = {n: inner for n, inner in lists[prefix].items() if _is_composite(n, inner, matmuls)}
        if not any(_is_inside(prefix, block) for block in blocks):
            blocks |= dict.fromkeys(n for n in siblings if _has_twin(n, siblings))
    if not blocks:
        raise PlanError(
            "the model has no repeated block to recompute",
            got=f"modules {', '.join([m for m in matmuls if m][:8])}" if any(matmuls) else "a model without modules",
            expected="layers in a list: path.0, path.1, ... of several modules each, at least two of them equal",
            hint="put the layers into an nn.ModuleList or nn.Sequential, or leave out the pass recompute",
        )
    first = {module: i for i, module in reversed(list(enumerate(matmuls)))}
    order = {n: min(i for m, i in first.items() if _is_inside(m, n)) for n in blocks}
    return Blocks(tuple(sorted(blocks, key=order.__getitem__)))


def _indexed(modules: Iterable[str]) -> dict[str, dict[str, set[str]]]:
    """Path of a list -> its items -> the paths inside an item from which ops come."""
    lists: dict[str, dict[str, set[str]]] = {}
    for module in modules:
        parts = module.split(".")
        for i in (i for i, part in enumerate(parts) if part.isdigit()):
            items = lists.setdefault(".".join(parts[:i]), {})
            items.setdefault(".".join(parts[: i + 1]), set()).add(".".join(parts[i + 1 :]))
    return lists


def _is_inside(path: str, block: str) -> bool:
    return path == block or path.startswith(block + ".")


def _is_composite(name: str, inner: Set[str], matmuls: Mapping[str, int]) -> bool:
    return len(inner) > 1 or sum(matmuls[f"{name}.{path}" if path else name] for path in inner) > 1


def _has_twin(name: str, siblings: Mapping[str, Set[str]]) -> bool:
    own = siblings[name]
    others = (other for n, other in siblings.items() if n != name)
    return any(len(own & other) >= _ALIKE * min(len(own), len(other)) for other in others)
