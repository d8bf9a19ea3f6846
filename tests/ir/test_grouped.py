"""The grouped matmul against a loop over experts, and lookups of rows on pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshweave.ir import local_ops
from meshweave.ir.grouped import (
    all_rows,
    from_torch,
    grouped_mm,
    grouped_outer,
    mm_piece,
    outer_piece,
    own_rows,
    seen_mm,
    seen_outer,
)
from meshweave.runtime.regions.compiler import load_inductor

aten = torch.ops.aten
X, G = torch.arange(28.0).reshape(7, 4), torch.arange(35.0).reshape(7, 5)
W = torch.arange(60.0).reshape(3, 4, 5)
ENDS = torch.tensor([2, 2, 6], dtype=torch.int32)


def test_rows_of_no_expert_are_zeros_and_an_expert_without_rows_has_no_gradient() -> None:
    out, grad = grouped_mm(X, W, ENDS), grouped_outer(X, G, ENDS)
    torch.testing.assert_close(out, torch.cat([X[:2] @ W[0], X[2:6] @ W[2], torch.zeros(1, 5)]))
    torch.testing.assert_close(grad, torch.stack([X[:2].T @ G[:2], torch.zeros(4, 5), X[2:6].T @ G[2:6]]))


PIECES = [(start, size, e, n) for start, size in ((0, 7), (0, 3), (3, 0), (3, 4)) for e, n in ((0, 1), (1, 2), (3, 0))]


def test_devices_work_on_the_rows_of_their_experts_in_their_piece() -> None:
    total, out, grad = [], torch.zeros(7, 5), torch.zeros(3, 4, 5)
    for start, size, e, n in PIECES:
        x, g = (own_rows(t[start : start + size], ENDS, 0, start, e, n, 2) for t in (X, G))
        mine = mm_piece(x, W[e : e + n], ENDS, start, e)
        assert len(mine) == len(x)
        if size != 7:  # a cut in pieces: (0, 3) and the others
            out[start : start + size] += all_rows(mine, ENDS, 0, start, e, n, size)
            grad[e : e + n] += outer_piece(x, g, ENDS, n, start, e)
            total.append(len(x))
        else:
            torch.testing.assert_close(mine, grouped_mm(X, W, ENDS)[ENDS[e - 1] if e else 0 :][: len(mine)])
    assert sum(total) == 7  # every row is on one device, and what has no expert on that of the last expert
    torch.testing.assert_close(out, grouped_mm(X, W, ENDS))
    torch.testing.assert_close(grad, grouped_outer(X, G, ENDS))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("num_blocks", "first_row"), [(0, 0), (0, 40), (1, 0), (3, 0)])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("experts", [(0, 4), (1, 2)])
def test_a_gpu_multiplies_as_the_processor(
    num_blocks: int, first_row: int, experts: tuple[int, int], is_transposed: bool
) -> None:
    """Experts without rows, rows of no expert, and pieces, by the kernel of torch."""
    torch.manual_seed(0)
    first, num = experts
    rows, count = 96, max(num_blocks, 1)
    ends = torch.tensor([[30, 30, 64, 90]] * count if num_blocks else [30, 30, 64, 90], dtype=torch.int32)
    x, grad = (torch.randn(rows * count, n, dtype=torch.bfloat16)[first_row:] for n in (32, 24))
    weight = torch.randn(4, 24, 32).transpose(1, 2) if is_transposed else torch.randn(4, 32, 24)
    own = weight.bfloat16()[first : first + num]
    at = (first_row, first, num, 1)

    def products(device: str) -> list[Tensor]:
        where = ends.to(device)
        a, g = (own_rows(t.to(device), where, 0, *at).contiguous() for t in (x, grad))
        block_rows = rows if num_blocks else 0
        return [
            mm_piece(a, own.to(device), where, first_row, first, block_rows),
            outer_piece(a, g, where, num, first_row, first, block_rows),
        ]

    for got, want in zip(products("cuda"), products("cpu"), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=0.02, atol=0.2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_compiler_traces_the_kernel_of_a_gpu() -> None:
    """With rows of no expert, an expert without rows, and a transposed weight."""
    torch.manual_seed(0)
    inductor = load_inductor()
    ends = torch.tensor([30, 30, 64, 90], dtype=torch.int32)
    x, grad = torch.randn(96, 32).bfloat16(), torch.randn(96, 24).bfloat16()
    weight = torch.randn(4, 24, 32).bfloat16().transpose(1, 2)

    def products(x: Tensor, weight: Tensor, ends: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return seen_mm(x, weight, ends) * 2, seen_outer(x, grad, ends) + 1

    operands = [t.cuda() for t in (x, weight, ends, grad)]
    forms = [(tuple(t.shape), t.stride(), t.dtype) for t in operands]
    compiled = inductor.compile_graph(products, forms, torch.device("cuda"))
    for got, want in zip(compiled(operands), products(x, weight, ends, grad), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=0.02, atol=0.2)


def test_rows_along_any_dim_and_without_data() -> None:
    own = own_rows(X.T, ENDS, 1, 0, 1, 2, 3)
    torch.testing.assert_close(own, X.T[:, 2:])
    only = torch.zeros(4, 7).index_copy(1, torch.arange(2, 7), own)
    torch.testing.assert_close(all_rows(own, ENDS, 1, 0, 1, 2, 7), only)
    share = own_rows(X.to("meta"), ENDS.to("meta"), 0, 0, 1, 2, 3)  # an equal share of three
    assert share.shape == (3, 4)
    assert all_rows(share, ENDS.to("meta"), 0, 0, 1, 2, 7).shape == (7, 4)


def test_every_form_of_the_grouped_matmul_of_torch() -> None:
    ends = torch.tensor([2, 3, 8], dtype=torch.int32)  # torch's own leaves rows behind the last end as they were
    x, grad, w = torch.randn(8, 4), torch.randn(8, 8), torch.randn(3, 4, 8)  # and wants strides of whole 16 bytes
    cases = [(x, w, ends), (x.T, grad, ends), (w.transpose(1, 2), x.T, ends), (w, w.transpose(1, 2), None)]
    for a, b, offs in cases:
        torch.testing.assert_close(from_torch(a, b, offs), aten._grouped_mm(a, b, offs))


def test_rows_that_are_looked_up_and_added_on_pieces() -> None:
    index = torch.tensor([4, -5, 0, 6])
    pieces = [(0, 4), (4, 0), (4, 3)]
    looked_up = [local_ops.index_rows(X[s : s + n], 0, index, 7, s) for s, n in pieces]
    torch.testing.assert_close(sum(looked_up), X[index])
    zeros, values = torch.zeros(7, 4), X[:4]
    added = [local_ops.add_rows(zeros[s : s + n], 0, index, values, 7, s) for s, n in pieces]
    torch.testing.assert_close(torch.cat(added), zeros.index_put([index], values, accumulate=True))
