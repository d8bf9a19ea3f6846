"""Error texts for models that cannot be captured: what is wrong, and what to do about it."""

from __future__ import annotations

import sys
import traceback
from types import FrameType

import torch
import torch.distributions.distribution
import torch.nn.init
import torch.nn.modules.adaptive
import torch.nn.modules.batchnorm

_DYNAMIC = (
    "the shape of a result depends on data",
    "use fixed shapes and masks. What follows x[mask], nonzero or masked_select may treat rows one by one, and end in "
    "a sum, a mean or a loss over them; write the rest out: x[mask].mean() is "
    "torch.where(mask[:, None], x, 0).sum() / mask.sum() / x[0].numel(), x[mask].amax(0) is "
    "torch.where(mask[:, None], x, -torch.inf).amax(0), the number of rows is mask.sum(). A mask "
    "that forward makes of numbers, or that is a plain attribute, no buffer, selects any way. "
    "Experts that loop over the tokens they get: "
    'for a Hugging Face model, model.set_experts_implementation("grouped_mm"); in your own model, '
    "torch.nn.functional.grouped_mm, or every expert on all tokens, weighted by (chosen == expert)",
)
# What to do where an input and parameters differ in dtype.
CAST_HINT = "cast the input, x.to(module.weight.dtype): in forward, or all of the batch before the step"
# Part of an error's name and message -> what is wrong, and what to do; the first matching row; the last matches all.
_FAILURES = (
    (
        "aten.bincount",
        "the length of what torch.bincount returns depends on data, with minlength, too",
        "for integers x below n: torch.zeros(n, device=x.device).index_add(0, x, w) with weights w, "
        "torch.ones(x.shape, device=x.device) for a count",
    ),
    ("aten._ctc_loss", "torch.ctc_loss has shapes that depend on lengths", "call torch.nn.functional.ctc_loss"),
    (
        "aten._pack_padded_sequence",
        "the shape of a packed sequence depends on data",
        "run the recurrent layer on the padded batch, without pack_padded_sequence: forward in time no padding reaches "
        "what comes before it. Take the last state by out.gather(1, ...) at lengths - 1 and mask the rest in the loss; "
        "for the other direction turn sequences round: x.gather(1, (lengths[:, None] - 1 - positions) % x.shape[1])",
    ),
    ("DynamicOutputShapeException", *_DYNAMIC),
    ("RowsError", *_DYNAMIC),
    (
        "DataDependentOutputException",
        "the model's control flow depends on data",
        "use torch.where or a mask instead of torch.equal, torch.allclose and the like",
    ),
    (
        "use_reentrant=True",
        "a checkpoint of the reentrant kind cannot be captured",
        "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False); for a Hugging Face model: "
        'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})',
    ),
    (
        "not supported on ScriptModules",
        "a part of the model is compiled by torch.jit.script",
        "remove torch.jit.script(module): compile the plain module",
    ),
    (
        "TorchScript interpreter",
        "the model calls a function compiled by torch.jit.script",
        "remove torch.jit.script: call the plain function",
    ),
    (
        "Input type (",  # of a convolution; of other modules the trace says it, with their names
        "a tensor and the parameters of a module have different dtypes",
        CAST_HINT,
    ),
    (
        "",
        "the training step cannot be captured",
        "check that the model runs in eager mode on this batch",
    ),
)
# A file of torch in which capture failed -> what is wrong, and what to do.
_OF_FILES = {
    torch.nn.modules.adaptive.__file__: (
        "AdaptiveLogSoftmaxWithLoss takes the rows of each cluster by themselves, whose numbers depend on data",
        "take its loss of all classes, which is the same: -module.log_prob(input).gather(1, target[:, None]).mean()",
    ),
}
# A file of torch, or a function, that reads values -> how to avoid that.
_LOOKS = {
    torch.distributions.distribution.__file__: "switch off the validation of distributions: validate_args=False in "
    "the constructor, or "
    "torch.distributions.Distribution.set_default_validate_args(False) "
    "before compile",
    torch.nn.init.__file__: "fill parameters in __init__; nn.init.trunc_normal_ draws again until its numbers are "
    "within bounds: noise cut at 2 std is torch.erfinv(torch.empty(n).uniform_(-0.9545, 0.9545)) * 2**0.5 * std",
    torch.nn.modules.batchnorm.__file__: "BatchNorm(momentum=None) computes a number from its buffer "
    "num_batches_tracked: set momentum to a number, such as 0.1",
    "gaussian_nll_loss": "write it out: with var = var.clamp(min=eps) it is (var.log() + (input - target) ** 2 / var)"
    ".mean() / 2",
    "torch_compilable_check": "set the environment variable TRANSFORMERS_DISABLE_TORCH_CHECK=1: transformers then "
    "trusts the batch, as under torch.compile",
}
_BRANCH = (
    "use torch.where or a mask instead of a branch or an assertion, or move the decision into the data loader; to log "
    "a value write it into a buffer, and read that between steps; instead of layers that are skipped at random (set "
    "layerdrop, encoder_layerdrop, ... of the configuration to 0.0) drop their output: x + keep.to(x.dtype) * layer(x) "
    "with keep = torch.rand(()) > p"
)


def failure(error: Exception) -> tuple[str, str]:
    """What is wrong and what to do, for an error during capture: by the file of torch that raised it, or else by its
    name and message."""
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    known = (row for file, row in _OF_FILES.items() if file in files)
    text = f"{type(error).__name__}: {error}"
    return next(known, None) or next((what, hint) for sign, what, hint in _FAILURES if sign in text)


def branch_hint() -> str:
    """What to do about the code that is reading a value."""
    if torch.is_anomaly_enabled():
        return "switch off torch.autograd.detect_anomaly (Lightning: detect_anomaly=True), which reads all gradients"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        hint = _LOOKS.get(frame.f_code.co_filename) or _LOOKS.get(frame.f_code.co_name)
        if hint is not None:
            return hint
        frame = frame.f_back
    return _BRANCH
