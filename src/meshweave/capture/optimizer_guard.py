"""Checks before every step that the optimizer's parameters and hooks are those compiled.

Its options are read by `optimizer_steps.StepNumbers`."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from meshweave.capture.optimizer_several import name_of
from meshweave.capture.optimizers import check_hooks, check_options
from meshweave.errors import OutdatedUpdate

_LOG = logging.getLogger("meshweave")
_AGAIN = "step.save(path), compile again with it, step.load(path)"


class OptimizerGuard:
    """The guard of a compiled step's optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.params = [list(group["params"]) for group in optimizer.param_groups]

    def check(self) -> None:
        """Raises OutdatedUpdate for changes; PlanError for hooks and options that are not supported."""
        check_hooks(self.optimizer)
        groups = self.optimizer.param_groups
        if not _equal([group["params"] for group in groups], self.params):
            got = f"{len(groups)} groups, or other parameters in them"
            raise self._changed("param_groups", got, f"{len(self.params)} groups", _AGAIN)
        for i, group in enumerate(groups):
            check_options(self.optimizer, i, group)

    def _changed(self, what: str, got: str, expected: str, hint: str) -> OutdatedUpdate:
        where = f"{name_of(self.optimizer)}, {what}"
        return OutdatedUpdate(
            "the optimizer has changed since the step was compiled", where=where, got=got, expected=expected, hint=hint
        )


def _equal(now: Any, before: Any) -> bool:
    """Equal containers of the same tensors."""
    try:
        return bool(now == before)
    except RuntimeError:  # other tensors, whose comparison has no truth value
        return False


def note_untrained(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Warn about parameters that require gradients but are in no group of the optimizer: another optimizer would get
    none."""
    if optimizer is None:
        return
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in trained]
    if names:
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        _LOG.warning(
            "%d parameters require gradients, but are in no group of the optimizer (%s): they keep their values, and "
            "p.grad is not written for another optimizer",
            len(names),
            shown,
        )
