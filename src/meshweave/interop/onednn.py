"""Matmuls of oneDNN (torch's name for it is MKL-DNN), which `torch.mm` does not call for float32 on x86.

Holds for torch 2.11 to 2.13 (aten/src/ATen/native/mkldnn/Linear.cpp). The op is the one that Inductor writes for linear
layers of frozen models; its name is private.
"""

from __future__ import annotations

import torch
from torch import Tensor


def settings() -> str:
    """The settings of a script on which `is_exact` depends, as text."""
    return f"{torch.backends.mkldnn.enabled}, {torch.get_float32_matmul_precision()}"


def is_exact() -> bool:
    """Whether oneDNN is there and computes float32 in float32: it rounds operands to bfloat16 or TF32 if asked to, and
    then `torch.mm` calls it, too."""
    mkldnn = torch.backends.mkldnn
    is_here = mkldnn.is_available() and mkldnn.enabled and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return bool(is_here and torch.get_float32_matmul_precision() == "highest")


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] @ b [k, n] in float32, contiguous. Copies `a` if its rows are not contiguous."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(a, b.t(), None, "none", [], "")
    return product
