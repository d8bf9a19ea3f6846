"""Sharding rules of recurrent layers, and of factorisations, solvers and functions of matrices, whose batch dims may be
cut, and whose matrices are whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import fx

from meshweave.ir import recurrent  # noqa: F401  (defines meshweave::recurrent)
from meshweave.ir.graph import Spec, spec_of, tensor_inputs
from meshweave.ir.values import Value
from meshweave.ir.work import Matmul
from meshweave.ops.factors import Dim, Rule, RuleBuilder, sums
from meshweave.ops.registry import add, result_specs


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


aten = torch.ops.aten

# Op -> how many of the last dims of each tensor operand, and of each result, form a matrix.
_CORES = {
    aten.cholesky.default: ((2,), (2,)),
    aten.cholesky_inverse.default: ((2,), (2,)),
    aten.cholesky_solve.default: ((2, 2), (2,)),
    aten.linalg_cholesky_ex.default: ((2,), (2, 0)),
    aten.linalg_inv_ex.default: ((2,), (2, 0)),
    aten.linalg_lu_factor_ex.default: ((2,), (2, 1, 0)),
    aten.linalg_lu_solve.default: ((2, 1, 2), (2,)),
    aten.lu_unpack.default: ((2, 1), (2, 2, 2)),
    aten.linalg_matrix_exp.default: ((2,), (2,)),
    aten.linalg_qr.default: ((2,), (2, 2)),
    aten.linalg_householder_product.default: ((2, 1), (2,)),
    aten.ormqr.default: ((2, 1, 2), (2,)),
    aten.triangular_solve.default: ((2, 2), (2, 2)),
    aten.linalg_solve_triangular.default: ((2, 2), (2,)),
    aten._linalg_solve_ex.default: ((2, 2), (2, 2, 1, 0)),
    aten._linalg_det.default: ((2,), (0, 2, 1)),
    aten._linalg_slogdet.default: ((2,), (0, 0, 2, 1)),
    aten._linalg_eigh.default: ((2,), (1, 2)),
    aten.linalg_eig.default: ((2,), (1, 2)),
    aten.linalg_lu.default: ((2,), (2, 2, 2)),
    aten._linalg_svd.default: ((2,), (2, 1, 2)),
    aten.linalg_pinv.atol_rtol_tensor: ((2, 0, 0), (2,)),
}


def _of_matrices(node: fx.Node, cores: tuple[tuple[int, ...], tuple[int, ...]]) -> Rule:
    """Batch dims are aligned from the right; a tensor that is broadcast along a batch dim has size 1 there, or lacks
    the dim."""
    build = RuleBuilder()
    operands, results = [spec_of(n).shape for n in tensor_inputs(node)], [s.shape for s in result_specs(node)]
    operand_cores, result_cores = cores[0][: len(operands)], cores[1]  # the last operands are optional
    sizes = zip((*operands, *results), (*operand_cores, *result_cores), strict=True)
    batches = [shape[: len(shape) - core] for shape, core in sizes]
    widest = torch.broadcast_shapes(*batches)
    free = [(build.factor(size),) for size in widest]

    def dims(shape: Sequence[int], core: int) -> list[Dim]:
        own = shape[: len(shape) - core]
        batch: list[Dim] = [
            () if size == 1 else dim for size, dim in zip(own, free[len(free) - len(own) :], strict=True)
        ]
        return [*batch, *((build.factor(size, whole=True),) for size in shape[len(shape) - core :])]

    return build.rule(
        [dims(shape, core) for shape, core in zip(operands, operand_cores, strict=True)],
        [dims(shape, core) for shape, core in zip(results, result_cores, strict=True)],
    )


def _work(node: fx.Node, operands: Sequence[Value], results: Sequence[Value]) -> Matmul:
    """A matmul of the matrices' size for each op: the order of the work, n^3, not its constant."""
    *batch, rows, columns = operands[0].shape
    num_bytes = sum(x.bytes for x in (*operands, *results))
    return Matmul(rows, columns, min(rows, columns), prod(batch), operands[0].dtype, num_bytes)


for _target, _cores in _CORES.items():
    add(_target, partial(_of_matrices, cores=_cores), cost=_work)
