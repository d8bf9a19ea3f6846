"""Sharding rules of factorisations, solvers and functions of matrices: batch dims may be cut, matrices are whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

import torch
from torch import fx

from meshweave.cost.hardware.work import Matmul
from meshweave.ir.graph import spec_of, tensor_inputs
from meshweave.ir.values import Value
from meshweave.ops.factors import Dim, Rule, RuleBuilder
from meshweave.ops.registry import add, result_specs

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
    batches = [shape[: len(shape) - core] for shape, core in zip((*operands, *results), sum(cores, ()), strict=False)]
    widest = torch.broadcast_shapes(*batches)
    free = [(build.factor(size),) for size in widest]

    def dims(shape: Sequence[int], core: int) -> list[Dim]:
        own = shape[: len(shape) - core]
        batch: list[Dim] = [
            () if size == 1 else dim for size, dim in zip(own, free[len(free) - len(own) :], strict=True)
        ]
        return [*batch, *((build.factor(size, whole=True),) for size in shape[len(shape) - core :])]

    operand_cores, result_cores = cores
    return build.rule(
        [dims(shape, core) for shape, core in zip(operands, operand_cores, strict=False)],
        [dims(shape, core) for shape, core in zip(results, result_cores, strict=False)],
    )


def _work(node: fx.Node, operands: Sequence[Value], results: Sequence[Value]) -> Matmul:
    """A matmul of the matrices' size for each op: the order of the work, n^3, not its constant."""
    *batch, rows, columns = operands[0].shape
    num_bytes = sum(x.bytes for x in (*operands, *results))
    return Matmul(rows, columns, min(rows, columns), prod(batch), operands[0].dtype, num_bytes)


for _target, _cores in _CORES.items():
    add(_target, partial(_of_matrices, cores=_cores), cost=_work)
