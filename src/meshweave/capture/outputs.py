"""A model's return value as tensors by name: the results of a forward-only program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from meshweave.errors import CaptureError
from meshweave.interop import pytree


@dataclass(frozen=True, slots=True)
class ModelOutputs:
    """A nest of containers whose leaves are tensors, by their number, and plain values."""

    tree: Any
    leaves: tuple[Any, ...]  # None for a tensor
    names: tuple[str, ...]  # of the tensors, in order

    @staticmethod
    def of(out: Any) -> tuple[ModelOutputs, dict[str, Tensor]]:
        """The flattened return value. CaptureError for an object that is neither tensor, container nor number."""
        leaves, tree = pytree.tree_flatten(out)
        tensors = {str(i): leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        for leaf in leaves:
            if not isinstance(leaf, Tensor | int | float | str | bool | None):
                raise CaptureError(
                    "the model returns an object that is neither a tensor nor a container of tensors",
                    got=f"a {type(leaf).__qualname__}",
                    expected="tensors, numbers, texts, and containers of them that are pytree nodes of torch",
                    hint="return only what you need, by compile(forward=lambda model, batch: ...), or switch the "
                    "object off (use_cache=False in Hugging Face models)",
                )
        if not tensors:
            raise CaptureError("the model returns no tensor", got=type(out).__name__)
        plain = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return ModelOutputs(tree, plain, tuple(tensors)), tensors

    def join(self, tensors: Mapping[str, Tensor]) -> Any:
        """The nest with these tensors."""
        return pytree.tree_unflatten([tensors.get(str(i), leaf) for i, leaf in enumerate(self.leaves)], self.tree)
