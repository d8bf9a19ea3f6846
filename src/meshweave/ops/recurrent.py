"""Sharding rules and work of recurrent layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import fx

from meshweave.cost.hardware.work import Matmul
from meshweave.ir import recurrent  # noqa: F401  (defines meshweave::recurrent)
from meshweave.ir.graph import Spec, spec_of, tensor_inputs
from meshweave.ir.values import Value
from meshweave.ops.factors import Dim, Rule, RuleBuilder, sums
from meshweave.ops.registry import add


def _recurrent_dims(
    build: RuleBuilder, x: Spec, states: Sequence[Spec], weights: Sequence[Spec]
) -> tuple[list[Dim], list[list[Dim]], list[list[Dim]], list[Dim]]:
    """Dims of x [t, b, i], of hidden state and cell [b, .], of the weights, and of the result [t, b, o]. Sequences are
    independent; time and features are whole."""
    batch: Dim = (build.factor(x.shape[1]),)
    time, features = ((build.factor(x.shape[d], whole=True),) for d in (0, 2))
    own = [[batch, (build.factor(state.shape[1], whole=True),)] for state in states]
    of_weights = [build.dims(weight.shape, whole=range(len(weight.shape))) for weight in weights]
    return [time, batch, features], own, of_weights, [time, *own[0]]


def _recurrent(node: fx.Node) -> Rule:
    x, hidden, cell, *weights = [spec_of(n) for n in tensor_inputs(node)]
    build = RuleBuilder()
    sequence, own, of_weights, result = _recurrent_dims(build, x, (hidden, cell), weights)
    return build.rule([sequence, *own, *of_weights], [result, *own])


def _recurrent_backward(node: fx.Node) -> Rule:
    """Operands: the gradients of the results, then those of the op. Gradients of weights are sums over sequences."""
    _, _, _, x, hidden, cell, *weights = [spec_of(n) for n in tensor_inputs(node)]
    build = RuleBuilder()
    sequence, own, of_weights, result = _recurrent_dims(build, x, (hidden, cell), weights)
    operands = [sequence, *own, *of_weights]
    return build.rule([result, *own, *operands], operands, sums({0, 1, 2}))


def _recurrent_work(
    node: fx.Node, operands: Sequence[Value], results: Sequence[Value], passes: int
) -> tuple[Matmul, ...]:
    """The products with the input, all times at once, and with the state, one time after the other; a backward pass
    runs forward again."""
    count = len(node.args[-3])  # type: ignore[arg-type]
    x, (of_input, of_state) = operands[-count - 3], operands[-count:][:2]
    (time, batch, features), gates, size = x.shape, of_input.shape[0], of_state.shape[1]
    num_bytes = passes * sum(value.bytes for value in (*operands, *results))
    return (
        Matmul(time * batch, gates, features, passes, x.dtype, num_bytes),
        Matmul(batch, gates, size, passes * time, x.dtype, passes * time * of_state.bytes),
    )


add(torch.ops.meshweave.recurrent.default, _recurrent, cost=partial(_recurrent_work, passes=1))
add(torch.ops.meshweave.recurrent_backward.default, _recurrent_backward, cost=partial(_recurrent_work, passes=3))
