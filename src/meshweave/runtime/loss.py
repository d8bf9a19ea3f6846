"""The loss that a step returns: an ordinary number, except that the step has already run its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from meshweave.errors import StepError
from meshweave.interop import pytree


class LossValue(Tensor):
    """A loss whose `backward()` is an error that says what to write instead. Values computed from it, or loaded from a
    copy, are plain tensors."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        raise StepError(
            "backward() of a compiled step's loss: the step has run backward already",
            got="loss.backward()",
            expected="step(batch) alone, which runs forward, backward and update",
            hint="remove loss.backward(), optimizer.step() and optimizer.zero_grad(); to run code between the parts "
            "of a step: step.forward(batch), step.backward(), step.update(); evaluate() trains nothing",
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        plain, named = pytree.tree_map(_plain, (tuple(args), dict(kwargs or {})))
        return func(*plain, **named)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.detach().clone()


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if type(value) is LossValue else value


def loss_value(value: Tensor) -> Tensor:
    """A loss in the form that a step returns."""
    return value.as_subclass(LossValue)
