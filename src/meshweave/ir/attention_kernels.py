"""Kernels of a device that compute attention without its matrix of scores, and return the log-sum-exp of each query.

All of them take q [b, h, s, d], k [b, h, t, d] and v [b, h, t, e] whose sequences begin at the same position, and
return out [b, h, s, e] and lse [b, h, s], natural logarithms in at least float32, 0 for a query that sees no key.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch
from torch import Tensor

aten = torch.ops.aten

_ALIGNED_BYTES = 16  # the CUDA kernels load so many at a time
_BIAS_ALIGNED = 16  # elements of a row of the bias
_LSE_ALIGNED = 32  # the efficient kernel's lse has rows of a multiple of so many queries

Grads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a block scores: q k^T scale + bias; under a causal mask a query sees keys up to its position."""

    bias: Tensor | None  # float, or bool: True where a query sees the key
    is_causal: bool
    scale: float


def kernel_for(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> SdpaKernel | None:
    """The fastest kernel of the tensors' device for their sizes and dtype; None if there is none. It depends on shapes,
    dtype and device alone, so that backward has the kernel of forward."""
    if q.device.type == "cpu":
        return CpuFlash() if q.shape[-1] == v.shape[-1] and q.dtype != torch.float16 else None
    if q.device.type != "cuda":
        return None
    is_aligned = all(n * q.dtype.itemsize % _ALIGNED_BYTES == 0 for n in (q.shape[-1], v.shape[-1]))
    if not is_aligned or q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return None
    if scoring.bias is not None:
        return CudaEfficient() if torch.backends.cuda.mem_efficient_sdp_enabled() else None
    sizes = (q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    return _KERNELS.get(_choice(q.device, q.dtype, sizes, scoring.is_causal, _switches()))


def _switches() -> tuple[bool, ...]:
    """The settings by which a user allows kernels, also within torch.nn.attention.sdpa_kernel."""
    cuda = torch.backends.cuda
    return cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()


@cache
def _choice(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int], is_causal: bool, _: tuple[bool, ...]
) -> int:
    """torch's own choice of a kernel for (s, t, d, e), without a bias: a value of torch.nn.attention.SDPBackend."""

    def ask() -> int:
        s, t, d, e = sizes
        q, k, v = (torch.empty(1, 1, *size, dtype=dtype, device=device) for size in ((s, d), (t, d), (t, e)))
        return int(aten._fused_sdp_choice(q, k, v, None, 0.0, is_causal))

    with ThreadPoolExecutor(1) as fresh:  # a thread of its own: a compiler that traces has set modes in this thread
        return fresh.submit(ask).result()


def float_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A bias to add to scores: 0 where a bool bias is True, else -inf."""
    if bias is None or bias.dtype != torch.bool:
        return bias
    return torch.zeros_like(bias, dtype=dtype).masked_fill_(~bias, float("-inf"))


class CpuFlash:
    """The flash kernel of torch for processors. It takes the last dim of q, k, v and out for dense (torch 2.13; F.
    scaled_dot_product_attention checks that and takes another kernel), and copies grad."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        mask = float_bias(scoring.bias, q.dtype)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            *map(_last_dim_dense, (q, k, v)), 0.0, scoring.is_causal, attn_mask=mask, scale=scoring.scale
        )
        return out.contiguous(), lse.contiguous()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
    ) -> Grads:
        mask = float_bias(scoring.bias, q.dtype)
        operands = (*map(_last_dim_dense, (grad, q, k, v, out)), lse.contiguous())
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *operands, 0.0, scoring.is_causal, attn_mask=mask, scale=scoring.scale
        )
        return grads[0], grads[1], grads[2]


class CudaFlash:
    """FlashAttention, for float16 and bfloat16."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            *map(_rows_dense, (q, k, v)), 0.0, scoring.is_causal, False, scale=scoring.scale
        )
        return out.contiguous(), lse.contiguous()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
    ) -> Grads:
        operands = (*map(_rows_dense, (grad, q, k, v, out)), lse.contiguous())
        lengths, seed = (None, None, q.shape[2], k.shape[2]), _no_seed(q)
        grads = aten._scaled_dot_product_flash_attention_backward(
            *operands, *lengths, 0.0, scoring.is_causal, seed, seed, scale=scoring.scale
        )
        return grads[0], grads[1], grads[2]


class Cudnn:
    """cuDNN's kernel, for float16 and bfloat16."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            *map(_rows_dense, (q, k, v)), None, True, 0.0, scoring.is_causal, False, scale=scoring.scale
        )
        return out.contiguous(), lse.reshape(q.shape[:-1]).contiguous()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
    ) -> Grads:
        operands = (*map(_rows_dense, (grad, q, k, v, out)), lse.unsqueeze(-1).contiguous())
        lengths, seed = (None, None, q.shape[2], k.shape[2]), _no_seed(q)
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            *operands, seed, seed, None, *lengths, 0.0, scoring.is_causal, scale=scoring.scale
        )
        return grads[0], grads[1], grads[2]


class CudaEfficient:
    """The memory-efficient kernel, for float32 too, and with a bias."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            *map(_rows_dense, (q, k, v)), _expanded(q, k, scoring), True, 0.0, scoring.is_causal, scale=scoring.scale
        )
        out, lse = out.contiguous(), lse[..., : q.shape[2]].contiguous()
        if scoring.bias is None:
            return out, lse
        is_blind = lse == float("-inf")
        return out.masked_fill(is_blind.unsqueeze(-1), 0.0), lse.masked_fill(is_blind, 0.0)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scoring: Scoring
    ) -> Grads:
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % _LSE_ALIGNED), value=float("inf"))
        seed, wanted = _no_seed(q), [True, True, True, False]
        grads = aten._scaled_dot_product_efficient_attention_backward(
            *map(_rows_dense, (grad, q, k, v)),
            _expanded(q, k, scoring),
            _heads_inside(out),
            padded.contiguous(),
            seed,
            seed,
            0.0,
            wanted,
            scoring.is_causal,
            scale=scoring.scale,
        )
        return grads[0], grads[1], grads[2]


def _last_dim_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows_dense(x: Tensor) -> Tensor:
    """x with dense rows (its last dim) at aligned distances, on which the CUDA kernels insist."""
    distances = (step * x.dtype.itemsize % _ALIGNED_BYTES for step in x.stride()[:-1])
    return x if x.stride(-1) == 1 and not any(distances) else x.contiguous()


def _heads_inside(x: Tensor) -> Tensor:
    """[b, h, s, e] in memory as [b, s, h, e], which the backward kernel for half precision assumes of `out`."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _expanded(q: Tensor, k: Tensor, scoring: Scoring) -> Tensor | None:
    """The bias as [b, h, s, t] in q's dtype, expanded, with rows at aligned addresses."""
    bias = float_bias(scoring.bias, q.dtype)
    if bias is None:
        return None
    shape = (*q.shape[:3], k.shape[2])
    rows = bias.to(q.dtype).expand(*bias.shape[:-1], shape[-1])
    padded = torch.nn.functional.pad(rows, (0, -shape[-1] % _BIAS_ALIGNED)).contiguous()
    return padded[..., : shape[-1]].expand(shape)


def _no_seed(q: Tensor) -> Tensor:
    """The state of random numbers that nothing draws: there is no dropout."""
    return torch.empty((), dtype=torch.int64, device=q.device)


SdpaKernel: TypeAlias = CpuFlash | CudaFlash | CudaEfficient | Cudnn
_KERNELS: dict[int, SdpaKernel] = {1: CudaFlash(), 2: CudaEfficient(), 3: Cudnn()}  # by SDPBackend
