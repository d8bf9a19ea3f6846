"""What torch's learning-rate schedulers expect of an optimizer, and how its classes differ between versions."""

from __future__ import annotations

import torch


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedulers that the optimizer has taken a step, because a compiled step takes it instead. Schedulers warn
    when they step before the optimizer has, and read this attribute (torch/optim/lr_scheduler.py, LRScheduler.step).
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a compiled step, or a scheduler's wrapper around `step()`, has marked the optimizer."""
    return getattr(optimizer, "_opt_called", False)


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that Adagrad creates in its constructor before torch 2.13 (torch/optim/adagrad.py), for
    parameters without state. Since 2.13 it does so in the first step, like the others."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        return
    first = optimizer.defaults["initial_accumulator_value"]
    for p in (p for group in optimizer.param_groups for p in group["params"] if not optimizer.state[p]):
        init = complex(first, first) if torch.is_complex(p) else first
        total = torch.full_like(p, init, memory_format=torch.preserve_format)
        optimizer.state[p].update(step=torch.tensor(0.0), sum=total)
