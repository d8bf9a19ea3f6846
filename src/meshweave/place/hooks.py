"""Pins of a plan: forward hooks that are active while the model is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshweave.interop import pytree
from meshweave.ir import ops
from meshweave.place.plans import Resolved


def pinning(resolved: Resolved) -> Callable[[nn.Module], Any]:
    """The context in which capture traces the model: hooks that pin the values that the plan names."""

    @contextmanager
    def hooks(model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for name, side, constraint in resolved.pins:
                module = model.get_submodule(name)
                hook = _Hook(constraint)
                handle = (
                    module.register_forward_pre_hook(hook.before)
                    if side == "in"
                    else module.register_forward_hook(hook.after)
                )
                stack.callback(handle.remove)
            yield

    return hooks


@dataclass(frozen=True, slots=True)
class _Hook:
    """Pins the first floating-point tensor that enters or leaves a module."""

    constraint: str

    def before(self, module: nn.Module, args: Any) -> Any:
        return self._pin(args)

    def after(self, module: nn.Module, args: Any, result: Any) -> Any:
        return self._pin(result)

    def _pin(self, value: Any) -> Any:
        leaves, tree = pytree.tree_flatten(value)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > self._highest():
                leaves[i] = ops.pin(leaf, self.constraint, False)
                break
        return pytree.tree_unflatten(leaves, tree)

    def _highest(self) -> int:
        dims = [part.partition("=")[2] for part in self.constraint.split(";")]
        return max((int(d) for d in dims if d != "r"), default=0)
