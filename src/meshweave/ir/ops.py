"""The operators of meshweave in global graphs, beside ATen. `meshweave::pin` marks a value (or its gradient) whose
layout a plan fixes; `meshweave::attention` is scaled-dot-product attention as a single device-neutral op;
`meshweave::matmul` a batched matmul that keeps its batch dims separate; `meshweave::contract` a product of two tensors
over any dims; `meshweave::uniform` and `meshweave::chance` random numbers and bools that are functions of (seed, step,
call, global index) and therefore the same on every mesh; `meshweave::round_parts` a cast that may come before a sum
over devices; `meshweave::square_sum` the square of a norm; `meshweave::ctc_loss` connectionist temporal classification
of sequences whose lengths are tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from meshweave.ir import attention as kernels
from meshweave.ir import random
from meshweave.ir.causal import Causal

aten = torch.ops.aten
KERNELS: dict[Any, Callable[..., Any]] = {}  # op -> the function that runs it, for runtimes that need no dispatch


def _conjugate(x: Tensor | complex) -> Tensor | complex:
    """Conjugated now, and not when read: `resolve_conj()` leaves no op in a captured graph. A Python number comes from
    a constant of the graph."""
    return x.conj_physical() if isinstance(x, Tensor) else x.conjugate()


# Ops of ATen that depend on the strides of an operand, by its place: their kernels take it for contiguous, refuse it
# otherwise, or return an intermediate result of another form for it (torch 2.13, CPU). ATen's callers copy before they
# call them, and a captured graph has no copies.
DENSE_OPERANDS: dict[Any, tuple[int, ...]] = {
    aten.native_layer_norm_backward.default: (3, 4),
    aten.adaptive_max_pool3d_backward.default: (2,),
    aten._embedding_bag.default: (0, 1, 2, 6),
    aten._embedding_bag_dense_backward.default: (0, 1, 2, 3, 4, 8),
    aten._embedding_bag_per_sample_weights_backward.default: (2, 3, 4),
    aten._pdist_forward.default: (0,),
    aten._pdist_backward.default: (1, 3),
    aten._linalg_det.default: (0,),  # the factors of the transposed matrix if it is contiguous; backward relies on it
    aten._linalg_slogdet.default: (0,),
}


def _run_on_dense(op: Any, places: tuple[int, ...]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        dense = (x.contiguous() if i in places and isinstance(x, Tensor) else x for i, x in enumerate(args))
        return op(*dense, **kwargs)

    run.__qualname__ = f"{op}_on_dense"
    return run


KERNELS |= {op: _run_on_dense(op, places) for op, places in DENSE_OPERANDS.items()}
KERNELS[aten._conj.default] = _conjugate
KERNELS[aten._neg_view.default] = operator.neg


def define_op(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Define `meshweave::name`, and add its function to KERNELS."""

    def define(kernel: Callable[..., Any]) -> Any:
        custom = torch.library.custom_op(f"meshweave::{name}", kernel, mutates_args=())
        KERNELS[getattr(torch.ops.meshweave, name).default] = kernel
        return custom

    return define


def move(x: Tensor, target: str, readers: Tensor | None = None, share: float = 1.0) -> Tensor:
    """The node for every movement of data: the identity on the global value, to layout `target`. With `readers` it is
    sparse (`movement.dispatch`): a gather sends each device only the rows that it reads, a reduce-scatter adds up only
    the rows that each device has, by `sparse_gather` and its inverse. Only placed graphs contain it; `meta["layout"]`
    of the node and of its operand are the two layouts.
    """
    raise AssertionError("a move is expanded before it runs")


def unmoved(value: fx.Node) -> fx.Node:
    """The value that a chain of moves begins with."""
    while value.target is move:
        value = value.args[0]  # type: ignore[assignment]
    return value


def is_zeros(value: Any) -> bool:
    """Whether a value is a tensor of zeros, possibly moved or viewed."""
    while isinstance(value, fx.Node) and value.target in (move, aten.view.default, aten.expand.default):
        value = value.args[0]
    return isinstance(value, fx.Node) and value.target is aten.full.default and bool(value.args[1] == 0)


@define_op("pin")
def pin(x: Tensor, constraint: str, grad: bool) -> Tensor:
    """The identity. `constraint` is read by the placement; `grad` is True on the pin that autograd adds."""
    return x.clone()


@pin.register_fake
def _(x: Tensor, constraint: str, grad: bool) -> Tensor:
    return torch.empty_like(x)


@define_op("round_parts")
def round_parts(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast that is treated as linear: every part of a partial sum is rounded, instead of the sum."""
    return x.to(dtype, copy=True)


@round_parts.register_fake
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


# Elements that are in float64 at a time: 512 KiB stay in a core's cache. The fastest of 2**16, 2**18 and 2**20 for a
# gradient of 4000 x 4000 on one core (35, 38 and 73 ms; its squares in float32 and their sum took 137).
_SQUARED_AT_ONCE = 1 << 16


@define_op("square_sum")
def square_sum(x: Tensor) -> Tensor:
    """The sum of the squares of all elements (of their magnitudes if they are complex), 0-dim, squared and added in
    float64 without a float64 copy of x."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
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


uniform = define_op("uniform")(random.uniform)
chance = define_op("chance")(random.chance)


@uniform.register_fake
def _(step: Tensor, seed: int, call: int, shape: list[int], offset: list[int], size: list[int], *_: Any) -> Tensor:
    return step.new_empty(size, dtype=torch.float32)


@chance.register_fake
def _(step: Tensor, seed: int, call: int, shape: list[int], offset: list[int], size: list[int], *_: Any) -> Tensor:
    return step.new_empty(size, dtype=torch.bool)


@define_op("attention")
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float,
    first_query: int = 0,
    first_key: int = 0,
    is_part: bool = False,
    starts: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q [b, h, s, d] over k [b, g, t, d] and v [b, g, t, e], h a multiple of g.

    Returns out [b, h, s, e] and lse [b, h, s]. `bias` (float, added to the scores; or bool, True where a query sees the
    key) broadcasts to [b, h, s, t]. `first_query` and `first_key` are the positions of the first query and key, for a
    causal mask; `is_part`: there are more keys, with whose result this result is merged. `starts`: the sequence is
    stored as equal chunks that begin at these positions (`ir.causal`). Bound to the device's kernel when run
    (`ir.attention`).
    """
    where = Causal.of(q.shape[2], k.shape[2], first_query, first_key, starts) if is_causal else None
    return kernels.forward(q, k, v, bias, where, scale, is_part)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(q.shape[:-1], dtype=wide)


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
    first_query: int = 0,
    first_key: int = 0,
    is_part: bool = False,
    starts: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; shapes as in `attention`. `out` and `lse` cover all keys that a query sees; k and v may
    be a part of them."""
    where = Causal.of(q.shape[2], k.shape[2], first_query, first_key, starts) if is_causal else None
    d_q, d_k, d_v = kernels.backward(grad, q, k, v, bias, out, lse, where, scale, is_part)
    return d_q.contiguous(), d_k.contiguous(), d_v.contiguous()


@attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _attention_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)  # lse has no gradient, and zeros of its size would be wasted
    q, k, v, bias, ctx.is_causal, ctx.scale, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, bias, *output)


def _attention_autograd(ctx, grad: Tensor | None, _: Tensor | None):  # type: ignore[no-untyped-def]
    if grad is None:
        return (None,) * 10
    return (*attention_backward(grad, *ctx.saved_tensors, ctx.is_causal, ctx.scale, *ctx.rest), *(None,) * 7)


attention.register_autograd(_attention_autograd, setup_context=_attention_context)


@define_op("matmul")
def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a [..., m, k] @ b [..., k, n] over equal leading dims, which stay separate so that each can be sharded."""
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


@define_op("contract")
def contract(a: Tensor, b: Tensor, dims_a: list[int], dims_b: list[int]) -> Tensor:
    """The sum of products over `dims_a` of a and `dims_b` of b; the result has the other dims of a, then those of b.
    On CUDA tensordot leaves it in another order in memory (torch 2.11)."""
    return torch.tensordot(a, b, (dims_a, dims_b)).contiguous()


@contract.register_fake
def _(a: Tensor, b: Tensor, dims_a: list[int], dims_b: list[int]) -> Tensor:
    left = [size for d, size in enumerate(a.shape) if d not in dims_a]
    return a.new_empty(left + [size for d, size in enumerate(b.shape) if d not in dims_b])


@define_op("ctc_loss")
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """Connectionist temporal classification of log_probs [t, n, c] and targets [n, s], each of the first
    `input_lengths` [n] frames and `target_lengths` [n] targets. Returns the losses [n] and, [t, n, c], the gradient of
    each by its log_probs: both passes, so that no value has a shape that depends on lengths. With `zero_infinity` the
    gradient is 0 where the loss is infinite."""
    if not log_probs.shape[1]:
        return log_probs.new_empty(0), log_probs.new_empty(log_probs.shape)
    lengths = input_lengths.tolist(), target_lengths.tolist()
    loss, alpha = aten._ctc_loss.default(log_probs, targets, *lengths, blank, zero_infinity)
    rest = torch.ones_like(loss), log_probs, targets, *lengths, loss, alpha, blank, zero_infinity
    return loss, aten._ctc_loss_backward.default(*rest).contiguous()


@ctc_loss.register_fake
def _(log_probs: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape[1]), log_probs.new_empty(log_probs.shape)


def _ctc_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1])


def _ctc_backward(ctx, grad: Tensor | None, _: Tensor | None):  # type: ignore[no-untyped-def]
    return (None if grad is None else grad.unsqueeze(-1) * ctx.saved_tensors[0],) + (None,) * 5


ctc_loss.register_autograd(_ctc_backward, setup_context=_ctc_context)
