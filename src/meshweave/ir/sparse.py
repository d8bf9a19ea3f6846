"""Communications that move only some rows, which are known only at run time."""

from __future__ import annotations

import torch
from torch import Tensor


def sparse_gather(x: Tensor, readers: Tensor, count: int, share: float, group: str) -> Tensor:
    """Start an all-gather in which every member gets the rows that it reads, and zeros for the others.

    `readers` [count, rows] says which rows of the gathered array each of the `count` members reads; all members have
    it. Rows are such that all blocks together have `rows` of them. `share`: the part of all rows that a member reads
    under a balanced load, which prices the op.
    """
    raise AssertionError("a sparse gather is run by a communicator")


def sparse_scatter(x: Tensor, readers: Tensor, count: int, share: float, group: str) -> Tensor:
    """Start a reduce-scatter (a sum) to which member m contributes the rows `readers[m]` of its operand; its other rows
    count as zeros. The inverse of a sparse gather, with the same arguments."""
    raise AssertionError("a sparse scatter is run by a communicator")


def rows_of(x: Tensor, is_kept: Tensor) -> Tensor:
    """x as a matrix of as many rows as `is_kept` has elements."""
    return x.reshape(len(is_kept), x.numel() // max(len(is_kept), 1))


def kept(x: Tensor, is_kept: Tensor) -> Tensor:
    """x with zeros in all other rows."""
    return torch.where(is_kept.unsqueeze(1), rows_of(x, is_kept), 0).view(x.shape)
