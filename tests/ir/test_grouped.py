"""The grouped matmul against a loop over experts, and lookups of rows on pieces."""

from __future__ import annotations

import torch

from meshweave.ir import local_ops
from meshweave.ir.grouped import from_torch, grouped_mm, grouped_outer, mm_piece, outer_piece, rows_piece

aten = torch.ops.aten
X, G = torch.arange(28.0).reshape(7, 4), torch.arange(35.0).reshape(7, 5)
W = torch.arange(60.0).reshape(3, 4, 5)
ENDS = torch.tensor([2, 2, 6], dtype=torch.int32)


def test_rows_of_no_expert_are_zeros_and_an_expert_without_rows_has_no_gradient() -> None:
    out, grad = grouped_mm(X, W, ENDS), grouped_outer(X, G, ENDS)
    torch.testing.assert_close(out, torch.cat([X[:2] @ W[0], X[2:6] @ W[2], torch.zeros(1, 5)]))
    torch.testing.assert_close(grad, torch.stack([X[:2].T @ G[:2], torch.zeros(4, 5), X[2:6].T @ G[2:6]]))


def test_pieces_of_rows_and_of_experts_add_up() -> None:
    rows, experts = [(0, 3), (3, 0), (3, 4)], [(0, 1), (1, 2)]
    for start, size in rows:
        parts = [mm_piece(X[start : start + size], W[e : e + n], ENDS, start, e) for e, n in experts]
        torch.testing.assert_close(sum(parts), grouped_mm(X, W, ENDS)[start : start + size])
    for e, n in experts:
        parts = [outer_piece(X[s : s + m], G[s : s + m], ENDS, n, s, e) for s, m in rows]
        torch.testing.assert_close(sum(parts), grouped_outer(X, G, ENDS)[e : e + n])


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


def test_undefined_rows_of_others_reach_nobody() -> None:
    undefined = X.clone()
    undefined[2:] = float("nan")  # the first expert has two rows
    torch.testing.assert_close(rows_piece(undefined, ENDS, 0, 0, 0, 1), torch.cat([X[:2], torch.zeros(5, 4)]))
    torch.testing.assert_close(rows_piece(undefined[1:], ENDS, 0, 1, 0, 2)[:1], X[1:2])
    assert not mm_piece(undefined, W[:1], ENDS, 0, 0).isnan().any()
    assert not outer_piece(undefined, G, ENDS, 2, 0, 0).isnan().any()
    assert not rows_piece(undefined, ENDS, 0, 0, 3, 0).any()  # a device without experts
