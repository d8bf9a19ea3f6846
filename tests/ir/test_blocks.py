"""Ops on rows in blocks, whole and on the pieces that devices have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshweave.ir.blocks import block_counts, block_index, block_put, block_sort, index_piece, put_piece, sort_piece
from meshweave.ir.grouped import all_rows, grouped_mm, grouped_outer, mm_piece, outer_piece, own_rows

BLOCKS, ROWS, EXPERTS = 3, 5, 4
ENDS = torch.tensor([[1, 1, 3, 4], [0, 5, 5, 5], [0, 0, 0, 0]])  # the last rows of blocks 0 and 2 have no expert
X, G = torch.arange(60.0).reshape(15, 4), torch.arange(45.0).reshape(15, 3)
W = torch.arange(48.0).reshape(EXPERTS, 4, 3)


def each(x: Tensor) -> list[Tensor]:
    return list(x.split(ROWS))


def test_experts_of_blocks_are_those_of_each_block() -> None:
    products = [grouped_mm(x, W, ends) for x, ends in zip(each(X), ENDS, strict=True)]
    torch.testing.assert_close(grouped_mm(X, W, ENDS), torch.cat(products))
    sums = [grouped_outer(x, g, ends) for x, g, ends in zip(each(X), each(G), ENDS, strict=True)]
    torch.testing.assert_close(grouped_outer(X, G, ENDS), sum(sums))


@pytest.mark.parametrize("blocks", [slice(0, 3), slice(0, 2), slice(1, 2), slice(0, 0)])
def test_devices_with_some_experts_have_their_rows_of_every_block(blocks: slice) -> None:
    x, g, ends = (torch.cat([*each(t)[blocks], t[:0]]) for t in (X, G, torch.repeat_interleave(ENDS, ROWS, 0)))
    ends = ENDS[blocks]
    out, grads, count = torch.zeros(len(x), 3), torch.zeros(EXPERTS, 4, 3), 0
    for first, num in ((0, 1), (1, 2), (3, 1), (4, 0)):
        mine, gradient = (own_rows(t, ends, 0, 0, first, num, 2) for t in (x, g))
        product = mm_piece(mine, W[first : first + num], ends, 0, first, ROWS)
        out += all_rows(product, ends, 0, 0, first, num, len(x))
        grads[first : first + num] += outer_piece(mine, gradient, ends, num, 0, first, ROWS)
        count += len(mine)
    assert count == len(x)  # every row is on a single device
    torch.testing.assert_close(out, grouped_mm(x, W, ends))
    torch.testing.assert_close(grads, grouped_outer(x, g, ends))


def test_every_block_is_sorted_and_counted_by_itself() -> None:
    ids = torch.tensor([3, 0, 3, 1, 0, 2, 2, -1, 9, 2, 1, 1, 1, 1, 1])
    values, order = block_sort(ids, BLOCKS, False)
    for block, (part, at) in enumerate(zip(each(ids), each(order), strict=True)):
        expected = part.sort(stable=True)
        assert torch.equal(at - block * ROWS, expected.indices)
        assert torch.equal(values[block * ROWS : (block + 1) * ROWS], expected.values)
    assert block_sort(ids, BLOCKS, True)[0].tolist()[:ROWS] == [3, 3, 1, 0, 0]
    assert torch.equal(sort_piece(ids[ROWS:], 2, False, ROWS)[1], order[ROWS:])
    assert block_counts(ids, EXPERTS, BLOCKS).tolist() == [[2, 1, 0, 2], [0, 0, 3, 0], [0, 5, 0, 0]]


def test_lookups_and_sums_are_those_of_torch_and_refuse_rows_of_other_blocks() -> None:
    at = torch.tensor([1, 0, 4, 4, 2, 5, 9, 6, 6, 6, 14, 10, 11, 12, 13])
    assert torch.equal(block_index(X, at, BLOCKS), X[at])
    assert torch.equal(block_put(torch.zeros(15, 3), at, G, True, BLOCKS), torch.zeros(15, 3).index_add(0, at, G))
    assert torch.equal(index_piece(X[5:10], at[5:10], 5), X[at[5:10]])
    for wrong in (at[:5], at[10:]):
        with pytest.raises((IndexError, RuntimeError), match=r"out of range|index"):
            index_piece(X[5:10], wrong, 5)
        with pytest.raises((IndexError, RuntimeError), match=r"out of range|index"):
            put_piece(torch.zeros(5, 3), wrong, G[:5], True, 5)
