"""Local versions of ops whose meaning changes on a piece: indices are global, tables are pieces.

Elements outside the piece count as 0 (or are not written), so that the sum over the pieces is the whole result. All are
plain torch functions of tensors and also work on empty pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _inside(index: Tensor, offset: int, size: int) -> tuple[Tensor, Tensor]:
    """(index into the piece, 0 if outside; whether it is inside)."""
    local = index - offset
    inside = (local >= 0) & (local < size)
    return torch.where(inside, local, 0), inside


def _with_row(x: Tensor, dim: int) -> Tensor:
    """x with an additional line of zeros at the end of `dim`, for reads and writes outside the piece."""
    return torch.cat([x, x.new_zeros([1 if d == dim else s for d, s in enumerate(x.shape)])], dim)


def _or_last(index: Tensor, offset: int, size: int) -> Tensor:
    local, inside = _inside(index, offset, size)
    return torch.where(inside, local, size)


def embedding(weight: Tensor, index: Tensor, offset: int) -> Tensor:
    """Rows of a vocabulary piece [v, h] that begins at `offset`; zeros for indices outside."""
    local, inside = _inside(index, offset, weight.shape[0])
    if weight.shape[0] == 0:
        return weight.new_zeros((*index.shape, weight.shape[1]))
    return torch.where(inside.unsqueeze(-1), weight[local], 0)


def embedding_backward(grad: Tensor, index: Tensor, num_rows: int, padding: int, offset: int) -> Tensor:
    """Gradient [num_rows, h] of the vocabulary piece that begins at `offset`."""
    target = _or_last(index, offset, num_rows)
    target = torch.where(index == padding, num_rows, target)
    rows = grad.new_zeros((num_rows + 1, grad.shape[-1]))
    return rows.index_add(0, target.reshape(-1), grad.reshape(-1, grad.shape[-1]))[:num_rows]


def gather(x: Tensor, dim: int, index: Tensor, offset: int) -> Tensor:
    """`torch.gather` from the piece of x that begins at `offset` along `dim`."""
    return torch.gather(_with_row(x, dim), dim, _or_last(index, offset, x.shape[dim]))


def index_select(x: Tensor, dim: int, index: Tensor, offset: int) -> Tensor:
    """`torch.index_select` from the piece of x that begins at `offset` along `dim`."""
    return torch.index_select(_with_row(x, dim), dim, _or_last(index, offset, x.shape[dim]))


def _from_front(index: Tensor, num_rows: int) -> Tensor:
    """Indices of a dim of `num_rows`, with negative indices counted from the front."""
    return torch.where(index < 0, index + num_rows, index)


def index_rows(x: Tensor, dim: int, index: Tensor, num_rows: int, offset: int) -> Tensor:
    """`x[..., index, ...]` from the piece that begins at `offset` along `dim`, which has `num_rows` in total."""
    target = _or_last(_from_front(index, num_rows), offset, x.shape[dim])
    return aten.index.Tensor(_with_row(x, dim), [*[None] * dim, target])


def add_rows(x: Tensor, dim: int, index: Tensor, values: Tensor, num_rows: int, offset: int) -> Tensor:
    """`index_put` that adds, into the piece of x that begins at `offset` along `dim`, which has `num_rows` in total."""
    target = _or_last(_from_front(index, num_rows), offset, x.shape[dim])
    written = aten.index_put.default(_with_row(x, dim), [*[None] * dim, target], values, True)
    return written.narrow(dim, 0, x.shape[dim])


def scatter(x: Tensor, dim: int, index: Tensor, source: Tensor | float, added: bool, offset: int) -> Tensor:
    """`scatter` (or `scatter_add`) into the piece of x that begins at `offset` along `dim`."""
    target = _or_last(index, offset, x.shape[dim])
    wide = _with_row(x, dim)
    if added:
        assert isinstance(source, Tensor)
        written = wide.scatter_add(dim, target, source)
    else:
        written = wide.scatter(dim, target, source)
    return written.narrow(dim, 0, x.shape[dim])


_IDENTITY = {"max": float("-inf"), "min": float("inf"), "sum": 0.0, "avg": 0.0}


def identity_value(op: str, dtype: torch.dtype) -> float | int | bool:
    """The identity element of `op`: 0 for sums, the least number for max."""
    if dtype.is_floating_point or op in ("sum", "avg"):
        return _IDENTITY[op]
    if dtype == torch.bool:
        return op == "min"
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def extreme(x: Tensor, dims: list[int], keepdim: bool, op: str) -> Tensor:
    """amax or amin that returns the identity element for an empty piece."""
    dims = list(dims) or list(range(x.dim()))
    if all(x.shape[d] for d in dims):
        return (torch.amax if op == "max" else torch.amin)(x, dims, keepdim)
    reduced = {d % x.dim() for d in dims}
    shape = [1 if d in reduced else s for d, s in enumerate(x.shape) if d not in reduced or keepdim]
    return x.new_full(shape, identity_value(op, x.dtype))


# A group orders its members by the mesh's axes, a dim its pieces by the order in which axes cut it: `sizes` are those
# of the axes in the dim's order, and axis `order[i]` of them is the i-th in group order.


def view_rows(x: Tensor, shape: Sequence[int], dim: int, source: int) -> Tensor:
    """x in another shape, in which dim `dim` has as many rows as dim `source` of x, whatever `shape` has there."""
    return x.reshape([*shape[:dim], x.shape[source], *shape[dim + 1 :]])


def join_blocks(
    blocks: Tensor, sizes: Sequence[int], order: Sequence[int], dim: int, table: Sequence[tuple[int, int]] | None
) -> Tensor:
    """Equal blocks stacked along dim 0 in group order, concatenated along `dim` in its order.

    `table` has the (offset, size) of the pieces that the blocks were padded from, in the dim's order; None: there is no
    padding.
    """
    count, rows = len(sizes), blocks.shape[0] // prod(sizes)
    stacked = blocks.unflatten(0, (*(sizes[i] for i in order), rows))
    apart = stacked.movedim(tuple(range(count)), tuple(order))
    if table is None:
        return apart.movedim(tuple(range(count)), tuple(range(dim, dim + count))).flatten(dim, dim + count)
    indices = product(*map(range, sizes))
    return torch.cat([apart[at].narrow(dim, 0, size) for at, (_, size) in zip(indices, table, strict=True)], dim)


def deal_blocks(
    x: Tensor,
    sizes: Sequence[int],
    order: Sequence[int],
    dim: int,
    table: Sequence[tuple[int, int]] | None,
    block: int,
) -> Tensor:
    """x cut along `dim` into pieces, each padded with zeros to `block`, stacked along dim 0 in group order.

    `table` has the (offset, size) of the pieces in the global dim, in its order; x begins at the first offset; None:
    all pieces are equal.
    """
    count = len(sizes)
    if table is None:
        apart = x.unflatten(dim, (*sizes, block))
        return apart.movedim(tuple(dim + i for i in order), tuple(range(count))).flatten(0, count)
    start, strides = table[0][0], [prod(sizes[i + 1 :]) for i in range(count)]
    pieces = []
    for index in product(*(range(sizes[i]) for i in order)):
        at, size = table[sum(strides[i] * n for i, n in zip(order, index, strict=True))]
        pieces.append(_pad_to(x.narrow(dim, at - start, size), dim, block))
    return torch.cat(pieces, 0)


def _pad_to(x: Tensor, dim: int, size: int) -> Tensor:
    pad = [0] * (2 * (x.dim() - dim))
    pad[-1] = size - x.shape[dim]
    return x if not pad[-1] else torch.nn.functional.pad(x, pad)


# A chunk: dim `dim` is [outer, count, inner], and chunk c of `count` is [:, c].


def take_chunk(x: Tensor, dim: int, outer: int, count: int, index: int) -> Tensor:
    """Chunk `index` of x along `dim`. A view if `outer` is 1."""
    size = x.shape[dim] // count
    if outer == 1:
        return x.narrow(dim, index * size, size)
    return x.unflatten(dim, (outer, count, size // outer)).select(dim + 1, index).flatten(dim, dim + 1)


def join_chunks(chunks: Sequence[Tensor], indices: Sequence[int], dim: int, outer: int) -> Tensor:
    """The tensor whose chunk `indices[i]` is `chunks[i]`."""
    ordered = [chunks[indices.index(i)] for i in range(len(chunks))]
    if outer == 1:
        return torch.cat(ordered, dim)
    return torch.cat([x.unflatten(dim, (outer, -1)) for x in ordered], dim + 1).flatten(dim, dim + 1)


def sum_parts(parts: Sequence[Tensor], indices: Sequence[int], wide: torch.dtype) -> Tensor:
    """The sum of the parts in the order of their indices, accumulated in `wide` and rounded once."""
    ordered = [parts[indices.index(i)] for i in sorted(indices)]
    total = ordered[0].to(wide, copy=True)
    for part in ordered[1:]:
        total += part
    return total.to(parts[0].dtype)


def keep_first(x: Tensor, index: int, op: str) -> Tensor:
    """A replicated value as a part of a partial value: itself on the device of index 0, the identity element
    elsewhere."""
    return x if index == 0 else torch.full_like(x, identity_value(op, x.dtype))


def embed_part(x: Tensor, dim: int, before: int, size: int, op: str, group: str) -> Tensor:
    """A piece as a part of a partial value of `size` along `dim`: it begins at `before`, the rest is the identity
    element. `group`, an axis list, only records which devices reduce the parts later."""
    whole = x.new_full([size if d == dim else n for d, n in enumerate(x.shape)], identity_value(op, x.dtype))
    whole.narrow(dim, before, x.shape[dim]).copy_(x)
    return whole


def or_zeros(function: Any, shape: Sequence[int], dtype: torch.dtype, *args: Any) -> Tensor:
    """function(*args), or zeros if a tensor among `args` is empty: an empty result, or a sum over nothing."""
    empty = any(isinstance(a, Tensor) and a.numel() == 0 for a in args)
    return torch.zeros(shape, dtype=dtype) if empty else function(*args)


def or_zeros_each(
    function: Any, shapes: Sequence[Sequence[int] | None], dtypes: Sequence[torch.dtype | None], *args: Any
) -> tuple[Tensor | None, ...]:
    """`or_zeros` for an op with several results, some absent."""
    if any(isinstance(a, Tensor) and a.numel() == 0 for a in args):
        return tuple(None if s is None else torch.zeros(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True))
    return function(*args)


def add_gradient(total: Tensor, part: Tensor) -> Tensor:
    """Adds a part to a gradient that is accumulated in at least float32."""
    return torch.add(total.to(torch.promote_types(total.dtype, torch.float32)), part)
