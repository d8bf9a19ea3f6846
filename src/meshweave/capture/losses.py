"""Losses of torch.nn.functional in the form for capture: they do not read data, and have static shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from meshweave.capture.trace import user_line
from meshweave.errors import CaptureError
from meshweave.interop.fake import FakeTensor
from meshweave.ir import ops
from meshweave.ir.graph import wide_dtype


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Like torch's, which also raises an error for a negative variance; here that counts as `eps`, as 0 does in
    both."""
    if not isinstance(var, Tensor):
        return F.gaussian_nll_loss(input, target, var, full=full, eps=eps, reduction=reduction)
    if var.shape == input.shape[:-1] and var.shape != input.shape:
        var = var.unsqueeze(-1)
    differ = [n for m, n in zip(input.shape, var.shape, strict=False) if m != n]
    if input.dim() != var.dim() or differ not in ([], [1]):
        raise ValueError("var is of incorrect size")
    var = var.clone()
    with torch.no_grad():
        var.clamp_(min=eps)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    return _reduced(loss + 0.5 * math.log(2 * math.pi) if full else loss, reduction)


def _lengths(lengths: Any, like: Tensor) -> Tensor:
    """Lengths of sequences as a tensor [n]."""
    tensor = lengths if isinstance(lengths, Tensor) else torch.tensor(lengths, dtype=torch.int64, device=like.device)
    return tensor.reshape(-1).to(torch.int64)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Like torch's, by an op whose result shapes do not depend on lengths.

    log_probs [t, n, c] or [t, c], targets [n, s], or those of all sequences concatenated, at offsets that depend on
    lengths: CaptureError if these are computed, because the shape of the targets would depend on data."""
    is_batched = log_probs.dim() == 3
    if not is_batched:
        log_probs, targets = log_probs.unsqueeze(1), targets.reshape(1, -1)
    if targets.dim() != 2 and not isinstance(target_lengths, FakeTensor):
        each = _lengths(target_lengths, targets).tolist()
        targets = pad_sequence(targets.split(each), batch_first=True)
    if targets.dim() != 2:
        raise CaptureError(
            "the targets of ctc_loss are concatenated, at offsets that depend on data",
            where=user_line(),
            got=f"targets {list(targets.shape)} for log_probs {list(log_probs.shape)}",
            expected=f"[{log_probs.shape[1]}, longest]",
            hint="pass a row of targets for each sequence, padded to the longest: padding is not read",
        )
    wide = log_probs.to(wide_dtype(log_probs.dtype))
    counts = _lengths(target_lengths, targets)
    loss = ops.ctc_loss(wide, targets, _lengths(input_lengths, targets), counts, blank, zero_infinity)[0]
    if zero_infinity:
        loss = torch.where(loss == math.inf, 0.0, loss)
    if reduction == "mean":
        return (loss / counts.clamp(min=1)).mean()
    return _reduced(loss if is_batched else loss.squeeze(0), reduction)


def _ctc_loss_by_number(*args: Any, **options: Any) -> Tensor:
    """torch.ctc_loss, whose reduction is a number."""
    arguments = dict(zip(_OF_CTC, args, strict=False)) | options
    number = arguments.pop("reduction", 1)
    return _ctc_loss(**arguments, reduction=("none", "mean", "sum")[number])


_OF_CTC = ("log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity")

LOSSES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    F.ctc_loss: _ctc_loss,
    torch.ctc_loss: _ctc_loss_by_number,
    F.gaussian_nll_loss: _gaussian_nll_loss,
}
