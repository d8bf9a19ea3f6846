"""Several optimizers over disjoint parameters (Muon for matrices, AdamW for the rest) as a single optimizer."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from meshweave.errors import PlanError
from meshweave.interop.hooks import is_initialized


class SeveralOptimizers(torch.optim.Optimizer):
    """An optimizer that steps each of `optimizers`.

    Groups and state are theirs, not copies: writes to either are visible in both. The list of groups is new on each
    access; add a group to the individual optimizer."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)  # does not call the base class, which would create its own groups
        self.defaults: dict[str, Any] = {}
        self._states = _States(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> MutableMapping[Tensor, Any]:  # type: ignore[override]
        return self._states


class _States(MutableMapping[Tensor, Any]):
    """The state of all optimizers by parameter, each in the optimizer that has the parameter."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self._owners: dict[Tensor, torch.optim.Optimizer] = {}

    def _of(self, param: Tensor) -> MutableMapping[Tensor, Any]:
        if param not in self._owners:
            self._owners = {p: o for o in self.optimizers for group in o.param_groups for p in group["params"]}
        owner = self._owners.get(param)
        if owner is not None:
            return owner.state
        return next((o.state for o in self.optimizers if param in o.state), {})  # of a parameter that left its group

    def __getitem__(self, param: Tensor) -> Any:
        return self._of(param)[param]

    def __setitem__(self, param: Tensor, value: Any) -> None:
        self._of(param)[param] = value

    def __delitem__(self, param: Tensor) -> None:
        del self._of(param)[param]

    def __contains__(self, param: object) -> bool:
        return isinstance(param, Tensor) and param in self._of(param)

    def __iter__(self) -> Iterator[Tensor]:
        return (param for optimizer in self.optimizers for param in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self.optimizers)


def optimizer_of(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimizer itself; several, in a list or tuple, as a single optimizer. Raises PlanError if they share a
    parameter, and for other objects."""
    parts = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
    if optimizer is None:
        return None
    for index, part in enumerate(parts):
        if not isinstance(part, torch.optim.Optimizer):
            raise PlanError(
                "not an optimizer",
                where="optimizer=" if part is optimizer else f"optimizer=, item {index}",
                got=type(part).__name__,
                expected="a torch.optim.Optimizer, or a list of several over disjoint parameters",
            )
        if not all(map(is_initialized, parts_of(part))):
            raise PlanError(
                "a wrapper around an optimizer, or an optimizer that has not called its base class",
                where="optimizer=" if part is optimizer else f"optimizer=, item {index}",
                got=type(part).__name__,
                expected="the torch.optim.Optimizer itself",
                hint="of Accelerate's and Lightning's wrapper: optimizer=optimizer.optimizer; in an optimizer of your "
                "own call super().__init__(params, defaults)",
            )
    if not parts:
        raise PlanError(
            "no optimizer in the list", where="optimizer=", got=repr(optimizer), hint="optimizer=None trains nothing"
        )
    owners: dict[Tensor, int] = {}
    for index, part in enumerate(parts):
        for param in (p for group in part.param_groups for p in group["params"]):
            if param in owners:
                raise PlanError(
                    "two optimizers have the same parameter",
                    where=f"optimizer=, items {owners[param]} and {index}",
                    got=f"a parameter of shape {list(param.shape)} in both",
                    expected="every parameter in one optimizer",
                    hint="matrices = [p for p in model.parameters() if p.dim() == 2], the rest for the other",
                )
        owners |= {p: index for group in part.param_groups for p in group["params"]}
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else SeveralOptimizers(parts)


def parts_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that step: itself, or its parts."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def name_of(optimizer: torch.optim.Optimizer) -> str:
    return " and ".join(type(part).__name__ for part in parts_of(optimizer))
