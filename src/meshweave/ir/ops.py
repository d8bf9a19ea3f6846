"""The operators of ours that stand in global graphs beside ATen.

`meshweave::pin` marks a value (or its gradient) whose layout a plan asks for; `meshweave::attention` is
scaled-dot-product attention as one device-neutral op; `meshweave::matmul` a batched matmul that keeps its batch dims
apart; `meshweave::uniform` a random number that is a function of (seed, step, call, global index) and therefore the
same on every mesh; `meshweave::round_parts` a cast that may come before a sum over devices; `meshweave::square_sum` the
square of a norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "attention",
    "attention_backward",
    "define_op",
    "matmul",
    "move",
    "pin",
    "round_parts",
    "square_sum",
    "uniform",
]

aten = torch.ops.aten
KERNELS: dict[Any, Callable[..., Any]] = {}  # op -> the function that runs it, for runtimes that need no dispatch


def _layer_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, *rest: Any
) -> tuple[Tensor | None, ...]:
    """torch's kernel (2.13, CPU) reads mean and rstd as if they were contiguous, whatever their strides."""
    return aten.native_layer_norm_backward.default(grad, x, shape, mean.contiguous(), rstd.contiguous(), *rest)


KERNELS[aten.native_layer_norm_backward.default] = _layer_norm_backward


def define_op(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Define `meshweave::name`, and enter its function into KERNELS."""

    def define(kernel: Callable[..., Any]) -> Any:
        custom = torch.library.custom_op(f"meshweave::{name}", kernel, mutates_args=())
        KERNELS[getattr(torch.ops.meshweave, name).default] = kernel
        return custom

    return define


def move(x: Tensor, target: str) -> Tensor:
    """The node that stands for every movement of data: the identity on the global value, to layout `target`.

    Only placed graphs hold it; `meta["layout"]` of the node and of its operand are the two layouts.
    """
    raise AssertionError("a move is expanded before it runs")


@define_op("pin")
def pin(x: Tensor, constraint: str, grad: bool) -> Tensor:
    """The identity. `constraint` is read by the placement; `grad` is True on the pin that autograd adds."""
    return x.clone()


@pin.register_fake
def _(x: Tensor, constraint: str, grad: bool) -> Tensor:
    return torch.empty_like(x)


@define_op("round_parts")
def round_parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast that is taken as linear: of a partial sum every part is rounded, where the cast would round the sum."""
    return x.to(dtype, copy=True)


@round_parts.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


# Elements that are in float64 at once: 512 KiB stay in a core's cache. Of 2**16, 2**18 and 2**20 the fastest for a
# gradient of 4000 x 4000 on one core (35, 38 and 73 ms; its squares in float32 and their sum took 137).
_SQUARED_AT_ONCE = 1 << 16


@define_op("square_sum")
def square_sum(x: Tensor) -> Tensor:
    """The sum of the squares of all elements, 0-dim, squared and added in float64 without a copy of x in float64."""
    if x.is_cuda and x.numel():
        return torch.ops.aten._foreach_norm.Scalar([x], 2, torch.float64)[0].square()
    total = x.new_zeros((), dtype=torch.float64)
    for part in x.reshape(-1).split(_SQUARED_AT_ONCE):
        wide = part.double()
        total += torch.dot(wide, wide)
    return total


@square_sum.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float64)


def _pin_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.constraint = inputs[1]


def _pin_backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    return pin(grad, ctx.constraint, True), None, None


pin.register_autograd(_pin_backward, setup_context=_pin_context)


@define_op("uniform")
def uniform(step: Tensor, seed: int, call: int, shape: list[int], offset: list[int], size: list[int]) -> Tensor:
    """float32 in [0, 1) for the box at `offset` of extent `size` in a tensor of global `shape`.

    Element i of the global tensor gets the top 24 bits of two rounds of the splitmix64 finaliser (Steele, Lea
    and Flood, OOPSLA 2014) over i and a key made of seed, call and step. `step` is a 0-dim int64 tensor.
    """
    index = torch.zeros((), dtype=torch.int64, device=step.device)
    stride = 1
    for dim in reversed(range(len(shape))):
        along = torch.arange(offset[dim], offset[dim] + size[dim], device=step.device) * stride
        index = index + along.view(-1, *(1,) * (len(shape) - 1 - dim))
        stride *= shape[dim]
    key = _mix(_mix(_mix(step.to(torch.int64) + _GOLDEN) ^ seed) ^ call)
    bits = _mix(_mix(index * _GOLDEN + key))
    return ((bits >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


@uniform.register_fake
def _(step: Tensor, seed: int, call: int, shape: list[int], offset: list[int], size: list[int]) -> Tensor:
    return step.new_empty(size, dtype=torch.float32)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


@define_op("attention")
def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of q [b, h, s, d] over k [b, g, t, d] and v [b, g, t, e], h a multiple of g.

    Returns out [b, h, s, e] and lse [b, h, s].
    `bias` (float, added to the scores; or bool, True where a query may look) broadcasts to [b, h, s, t]. Bound to the
    device's kernel when run: the flash kernel on CPU where head sizes allow, else `scaled_dot_product_attention`.
    """
    k, v = _repeat_groups(q, k), _repeat_groups(q, v)
    if q.numel() == 0 or not _has_cpu_flash(q, v):
        out = _plain_attention(q, k, v, bias, is_causal, scale)
        return out, q.new_zeros(q.shape[:-1], dtype=torch.float32)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=_float_bias(bias, q), scale=scale
    )
    return out.contiguous(), lse.contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=torch.float32)


@define_op("attention_backward")
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; shapes as in `attention`."""
    if q.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if not _has_cpu_flash(q, v):
        return _recomputed_backward(grad, q, k, v, bias, is_causal, scale)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad,
        q,
        _repeat_groups(q, k),
        _repeat_groups(q, v),
        out,
        lse,
        0.0,
        is_causal,
        attn_mask=_float_bias(bias, q),
        scale=scale,
    )
    return grads[0].contiguous(), _sum_groups(grads[1], k), _sum_groups(grads[2], v)


@attention_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
    )


def _attention_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)  # lse has no gradient, and zeros of its size would be made for nothing
    q, k, v, bias, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, bias, *output)


def _attention_autograd(ctx, grad: Tensor | None, _: Tensor | None):  # type: ignore[no-untyped-def]
    if grad is None:
        return (None,) * 6
    grads = attention_backward(grad, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
    return (*grads, None, None, None)


attention.register_autograd(_attention_autograd, setup_context=_attention_context)


@define_op("matmul")
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [..., m, k] @ b [..., k, n] over equal leading dims, which stay apart so that each can be sharded."""
    return torch.matmul(a, b)


@matmul.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def _matmul_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _matmul_backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    a, b = ctx.saved_tensors
    return matmul(grad, b.transpose(-2, -1)), matmul(a.transpose(-2, -1), grad)


matmul.register_autograd(_matmul_backward, setup_context=_matmul_context)


def _has_cpu_flash(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and q.dtype != torch.float16


def _repeat_groups(q: Tensor, x: Tensor) -> Tensor:
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _sum_groups(grad: Tensor, like: Tensor) -> Tensor:
    if grad.shape == like.shape:
        return grad.contiguous()
    return grad.unflatten(1, (like.shape[1], -1)).sum(2)


def _float_bias(bias: Tensor | None, q: Tensor) -> Tensor | None:
    if bias is None or bias.dtype != torch.bool:
        return bias
    return torch.zeros_like(bias, dtype=q.dtype).masked_fill_(~bias, float("-inf"))


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    if q.numel() == 0:
        return q.new_zeros((*q.shape[:-1], v.shape[-1]))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, 0.0, is_causal, scale=scale).contiguous()


def _recomputed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward by running the device's forward kernel again; by formula inside a dispatched op (no autograd there)."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        wide = [leaves[0], _repeat_groups(q, leaves[1]), _repeat_groups(q, leaves[2])]
        out = _plain_attention(wide[0], wide[1], wide[2], bias, is_causal, scale)
    if not out.requires_grad:
        return _spelled_backward(grad, q, k, v, bias, is_causal, scale)
    gq, gk, gv = torch.autograd.grad(out, leaves, grad)
    return gq, gk, gv


def _spelled_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of softmax(q k^T scale + bias) v, in float32 at least; holds all scores at once."""
    wide = torch.promote_types(q.dtype, torch.float32)
    g, a, b, c = (x.to(wide) for x in (grad, q, _repeat_groups(q, k), _repeat_groups(q, v)))
    scores = a @ b.transpose(-2, -1) * scale
    mask = _float_bias(bias, a)
    scores = scores if mask is None else scores + mask
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, float("-inf"))
    weights = torch.softmax(scores, -1)
    inner = g @ c.transpose(-2, -1)
    d_scores = weights * (inner - (inner * weights).sum(-1, keepdim=True)) * scale
    d_k = _sum_groups(d_scores.transpose(-2, -1) @ a, k)
    d_v = _sum_groups(weights.transpose(-2, -1) @ g, v)
    return (d_scores @ b).to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype)
