"""What is checked of the optimizer before every step: its options, but for the learning rate, its parameters and
its hooks are those that were compiled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshweave.capture.optimizers import check_hooks, check_options, hyper_names, plain_option
from meshweave.errors import StepError

_AGAIN = "step.save(path), compile again with it, step.load(path)"


class OptimizerGuard:
    """The guard of the optimizer of one compiled step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.names = hyper_names(optimizer)
        self.options = [self._options(group) for group in optimizer.param_groups]
        self.params = [list(group["params"]) for group in optimizer.param_groups]

    def check(self) -> None:
        """Raises StepError for what has changed; PlanError for hooks and options that are not supported."""
        check_hooks(self.optimizer)
        groups = self.optimizer.param_groups
        if not _equal([group["params"] for group in groups], self.params):
            got = f"{len(groups)} groups, or other parameters in them"
            raise self._changed("param_groups", got, f"{len(self.params)} groups", _AGAIN)
        for i, (group, options) in enumerate(zip(groups, self.options, strict=True)):
            check_options(self.optimizer, i, group)
            now = self._options(group)
            if now != options:
                name, old, new = next(z for z in zip(self.names, options, now, strict=True) if z[1] != z[2])
                hint = f"between steps only the learning rate may change; for another {name}: {_AGAIN}"
                raise self._changed(f"param_groups[{i}]", f"{name}={new}", f"{name}={old}", hint)

    def _options(self, group: dict[str, Any]) -> list[Any]:
        return [plain_option(group[n]) if isinstance(group.get(n), Tensor) else group.get(n) for n in self.names]

    def _changed(self, what: str, got: str, expected: str, hint: str) -> StepError:
        where = f"{type(self.optimizer).__name__}, {what}"
        return StepError(
            "the optimizer has changed since the step was compiled", where=where, got=got, expected=expected, hint=hint
        )


def _equal(now: Any, before: Any) -> bool:
    """Equal containers of the same tensors."""
    try:
        return bool(now == before)
    except RuntimeError:  # other tensors, which have no truth value
        return False
