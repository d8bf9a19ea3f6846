"""Losses of microbatches: on their device, and copied to the host while the device continues."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from meshweave.errors import StepError


class Fetched:
    """A 0-dim tensor. On CUDA it is copied to the host right after it is computed, so that reading it does not wait for
    later work: checking the loss before the update adds no pause between forward and backward."""

    def __init__(self, value: Tensor, is_read: bool) -> None:
        self.value = value
        if value.is_cuda and is_read:
            self._host = torch.empty((), dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._host = value

    def number(self) -> float:
        if self._host is not self.value:
            self._done.synchronize()
        return float(self._host)


def mean_of(losses: Sequence[Fetched]) -> Tensor:
    """The mean of the losses of microbatches, in their dtype."""
    if len(losses) == 1:
        return losses[0].value
    return torch.stack([loss.value for loss in losses]).double().mean().to(losses[0].value.dtype)


def check_finite(losses: Sequence[float], step: int) -> None:
    """StepError if the mean loss of a step is NaN or infinite."""
    loss = sum(losses) / len(losses)
    if not math.isfinite(loss):
        raise StepError(
            f"the loss of step {step} is {loss}",
            got="a loss that is not finite; nothing was updated",
            hint="lower the learning rate, clip gradients or check the batch; or run=mw.RunOptions(check_finite=False)",
        )
