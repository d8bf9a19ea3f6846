"""What torch's learning-rate schedulers expect of an optimizer."""

from __future__ import annotations

import torch


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedulers that the optimizer has taken a step, which a compiled step takes in its stead.

    Schedulers warn when they step before the optimizer ever did, and read this attribute to know
    (torch/optim/lr_scheduler.py, LRScheduler.step).
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]
