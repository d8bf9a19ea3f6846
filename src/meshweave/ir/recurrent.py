"""A layer of a recurrent network in one direction, as one op each for forward and backward: the device's kernel runs
over time, and nothing in the graph depends on the length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from meshweave.interop.tracing import recording_gradients
from meshweave.ir.ops import define_op

KINDS: Mapping[str, Callable[..., Any]] = {
    "lstm": torch.lstm, "gru": torch.gru, "rnn_tanh": torch.rnn_tanh, "rnn_relu": torch.rnn_relu,
}  # fmt: skip
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _run(
    x: Tensor, hidden: Tensor, cell: Tensor, weights: list[Tensor], kind: str, is_reverse: bool, is_trained: bool
) -> list[Tensor]:
    """Only with `is_trained` does cuDNN keep what backward needs."""
    first = hidden[None].contiguous()  # cuDNN takes no other, nor other weights
    state: Any = [first, cell[None].contiguous()] if kind == "lstm" else first
    weights = [weight.contiguous() for weight in weights]
    sequence = x.flip(0) if is_reverse else x
    out, *last = KINDS[kind](sequence, state, weights, len(weights) > 3, 1, 0.0, is_trained, False, False)
    return [out.flip(0) if is_reverse else out.contiguous(), *(h.squeeze(0) for h in last)]


@define_op("recurrent")
def recurrent(
    x: Tensor, hidden: Tensor, cell: Tensor, weights: list[Tensor], kind: str, is_reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer over x [t, b, i] from the state hidden [b, o] and, of an LSTM, cell [b, h] (else [b, 0]).

    weights: of the input [g h, i] and of the state [g h, o], then, if there are any, two biases [g h] and the
    projection [o, h] of an LSTM; g gates by `kind`, o is h without a projection. `is_reverse`: from the last time to
    the first. Returns the states at all times [t, b, o], and the last hidden state and cell, shaped as the first.
    """
    if not x.shape[1]:  # no kernel takes an empty piece
        return _results(x, hidden, cell)
    out, last, *cells = _run(x, hidden, cell, weights, kind, is_reverse, False)
    return out, last.clone(), cells[0].clone() if cells else cell.new_empty(cell.shape)


def _results(x: Tensor, hidden: Tensor, cell: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty((*x.shape[:2], hidden.shape[1])), hidden.new_empty(hidden.shape), cell.new_empty(cell.shape)


recurrent.register_fake(_results)


@define_op("recurrent_backward")
def recurrent_backward(
    grads: list[Tensor],
    x: Tensor,
    hidden: Tensor,
    cell: Tensor,
    weights: list[Tensor],
    kind: str,
    is_reverse: bool,
) -> list[Tensor]:
    """Gradients of x, hidden, cell and the weights, from `grads`, those of the results of `recurrent`. It runs again:
    kernels keep what they need in a form of their own."""
    if not x.shape[1]:
        return [torch.zeros_like(t) for t in (x, hidden, cell, *weights)]
    leaves = [t.detach().requires_grad_() for t in (x, hidden, cell, *weights)]
    with recording_gradients():
        results = _run(leaves[0], leaves[1], leaves[2], leaves[3:], kind, is_reverse, True)
        sums = torch.autograd.grad(results, leaves, grads[: len(results)], allow_unused=True)
    shape = torch.contiguous_format  # cuDNN's are views of one buffer
    return [
        torch.zeros_like(t) if g is None else g.clone(memory_format=shape) for g, t in zip(sums, leaves, strict=True)
    ]


@recurrent_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (*args[1:4], *args[4])]


def _context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, hidden, cell, weights, *ctx.rest = inputs
    ctx.save_for_backward(x, hidden, cell, *weights)


def _autograd(ctx, *grads: Tensor):  # type: ignore[no-untyped-def]
    x, hidden, cell, *weights = ctx.saved_tensors
    first, second, third, *of_weights = recurrent_backward(list(grads), x, hidden, cell, weights, *ctx.rest)
    return first, second, third, of_weights, None, None


recurrent.register_autograd(_autograd, setup_context=_context)
