"""Attention by the kernels of a device equals attention in float64, forward and backward."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from meshweave.ir import attention
from meshweave.ir.attention_kernels import CpuFlash, Scoring, kernel_for
from meshweave.ir.causal import Causal

ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]
MOST = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float64: 1e-12}


@dataclass(frozen=True)
class Case:
    """`bias`: "" for none, or what a bias is; "blind" has a query that sees no key. `is_part`: more keys elsewhere."""

    dtype: torch.dtype = torch.float32
    dims: tuple[int, int] = (64, 64)
    groups: int = 2
    lengths: tuple[int, int] = (100, 100)
    is_causal: bool = False
    bias: str = ""
    is_part: bool = False


CASES = [
    Case(torch.bfloat16, is_causal=True),
    Case(torch.bfloat16, groups=8),
    Case(torch.bfloat16, lengths=(100, 60), is_causal=True),
    Case(torch.bfloat16, (128, 128), is_causal=True, is_part=True),
    Case(torch.bfloat16, (256, 256), is_causal=True),
    Case(torch.bfloat16, (192, 128), 8, is_causal=True),
    Case(torch.bfloat16, (36, 36), is_causal=True),
    Case(torch.bfloat16, lengths=(100, 77), bias="blind"),
    Case(torch.bfloat16, lengths=(100, 77), bias="float", is_part=True),
    Case(torch.bfloat16, (128, 128), lengths=(100, 100), is_causal=True, bias="bool"),
    Case(torch.float16, is_causal=True),
    Case(is_causal=True),
    Case(dims=(64, 32), lengths=(100, 77), bias="bool"),
    Case(lengths=(64, 64), is_causal=True, bias="blind"),
    Case(lengths=(1, 7)),
    Case(torch.float64, is_causal=True, bias="blind"),
]


def bias_of(case: Case, device: str) -> Tensor | None:
    s, t = case.lengths
    if case.bias == "float":
        return torch.randn(1, 8, s, t, dtype=case.dtype).to(device)
    if not case.bias:
        return None
    bias = torch.rand(2, 1, s, t) > 0.3
    bias[..., 0] = True
    if case.bias == "blind":
        bias[:, :, 5] = False
    return bias.to(device)


def results(operands: list[Tensor], bias: Tensor | None, case: Case) -> list[Tensor]:
    """out, lse and the gradients of q, k and v."""
    q, k, v, grad = operands
    scale = case.dims[0] ** -0.5
    causal = Causal.of(*case.lengths, 0, 0, None) if case.is_causal else None
    out, lse = attention.forward(q, k, v, bias, causal, scale, True)
    blind = lse == float("-inf")
    whole, its_lse = out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, 0.0)
    if not case.is_part:
        whole, its_lse = attention.forward(q, k, v, bias, causal, scale)
    return [out, lse.exp(), *attention.backward(grad, q, k, v, bias, whole, its_lse, causal, scale, case.is_part)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_to_float64(case: Case, device: str) -> None:
    torch.manual_seed(0)
    (s, t), (d, e) = case.lengths, case.dims
    shapes = ((2, s, 8, d), (2, t, case.groups, d), (2, t, case.groups, e), (2, s, 8, e))
    operands = [torch.randn(shape, dtype=case.dtype).transpose(1, 2).to(device) for shape in shapes]
    bias = bias_of(case, device)
    wide = bias if bias is None or bias.dtype == torch.bool else bias.double()
    computed = results(operands, bias, case)
    for name, got, want in zip(
        ("out", "lse", "q", "k", "v"), computed, results([x.double() for x in operands], wide, case), strict=True
    ):
        error = (got.double() - want).norm() / want.norm()
        assert error < MOST[case.dtype], f"{name}: {error:.1e}"
        assert got.is_contiguous() or name in "qkv"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_what_is_not_a_number_stays_so() -> None:
    q = torch.randn(1, 2, 16, 64, device="cuda")
    q[0, 0, 3] = float("nan")
    seen = torch.ones(1, 1, 16, 16, dtype=torch.bool, device="cuda")
    out, _ = attention.forward(q, q, q, seen, None, 0.125)
    assert out[0, 0, 3].isnan().all()


def test_a_processor_has_a_kernel_unless_dims_or_dtype_forbid() -> None:
    q, v = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 6)
    plain = Scoring(None, False, 1.0)
    assert isinstance(kernel_for(q, q, q, plain), CpuFlash)
    assert kernel_for(q, q, v, plain) is None
    assert kernel_for(q.half(), q.half(), q.half(), plain) is None
