"""The grouped matmul: rows sorted by expert, each multiplied with its expert's matrix.

`ends[e]` is the row after the last row of expert e. Rows after the last end belong to no expert: they give zeros and
get no gradient. Rows may also be sorted in blocks (`ir.blocks`): `ends[b, e]` then counts from the first row of block
b.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from meshweave.ir.ops import define_op

aten = torch.ops.aten
Span = tuple[int, int, int]
_ALIGNED = 8  # bfloat16 numbers in 16 bytes: the distances of rows for the kernel of torch


def spans(
    ends: Tensor, num_experts: int, num_rows: int, first_row: int, first_expert: int, block_rows: int
) -> Iterator[Span]:
    """(index, start, stop) of each of `num_experts` experts from `first_expert` on that has rows among the `num_rows`
    of a device, relative to the device's first row: the global row `first_row`, or the first of its own rows
    (`own_rows`). Of rows in blocks, of which each has `block_rows`, a device has whole blocks or its own rows of
    them."""
    if ends.dim() == 1:
        yield from _spans(ends.tolist(), num_experts, num_rows, first_row, first_expert)
        return
    begin = 0
    for line in ends:
        _, size = _own(line, block_rows, 0, first_expert, num_experts)
        for index, start, stop in _spans(line.tolist(), num_experts, size, 0, first_expert):
            yield index, begin + start, begin + stop
        begin += size


def _spans(lasts: list[int], num_experts: int, num_rows: int, first_row: int, first_expert: int) -> Iterator[Span]:
    first = max(first_row, lasts[first_expert - 1] if first_expert else 0)
    stops = [min(max(end - first, 0), num_rows) for end in lasts]
    for index in range(num_experts):
        expert = first_expert + index
        start = stops[expert - 1] if expert else 0
        if start < stops[expert]:
            yield index, start, stops[expert]


def mm_piece(x: Tensor, weight: Tensor, ends: Tensor, first_row: int, first_expert: int, block_rows: int = 0) -> Tensor:
    """`grouped_mm` of the rows from `first_row` on and the experts from `first_expert` on: rows of other experts are
    zeros. `block_rows`: the number of rows of a block, if they are in blocks."""
    if groups := _groups_of_kernel(x, weight.shape[2], ends, weight.shape[0], first_row, first_expert, block_rows):
        products = [_mm_by_kernel(x[rows], weight, stops) for rows, stops in groups]
        return products[0] if len(products) == 1 else torch.cat(products)
    out = x.new_zeros((x.shape[0], weight.shape[2]))
    if out.is_meta:
        return out
    for index, start, stop in spans(ends, weight.shape[0], x.shape[0], first_row, first_expert, block_rows):
        torch.mm(x[start:stop], weight[index], out=out[start:stop])
    return out


def outer_piece(
    x: Tensor,
    grad: Tensor,
    ends: Tensor,
    num_experts: int,
    first_row: int,
    first_expert: int,
    block_rows: int = 0,
) -> Tensor:
    """`grouped_outer` over the rows from `first_row` on for `num_experts` experts from `first_expert` on.
    `block_rows`: the number of rows of a block, if they are in blocks."""
    if groups := _groups_of_kernel(x, grad.shape[1], ends, num_experts, first_row, first_expert, block_rows):
        parts = [aten._grouped_mm(x[rows].t(), grad[rows].contiguous(), stops) for rows, stops in groups]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
    out = x.new_zeros((num_experts, x.shape[1], grad.shape[1]))
    if out.is_meta:
        return out
    known: set[int] = set()
    for index, start, stop in spans(ends, num_experts, x.shape[0], first_row, first_expert, block_rows):
        if index in known:  # of an earlier block
            out[index].addmm_(x[start:stop].t(), grad[start:stop])
        else:
            torch.mm(x[start:stop].t(), grad[start:stop], out=out[index])
        known.add(index)
    return out


def _groups_of_kernel(
    x: Tensor, num_columns: int, ends: Tensor, num_experts: int, first_row: int, first_expert: int, block_rows: int
) -> list[tuple[slice, Tensor]]:
    """Parts of the rows, with the end of each expert in them on the device, for torch's kernel, which does not tell the
    host how many rows an expert has; empty if that kernel cannot do it."""
    if not _fits_kernel(x, num_columns, num_experts):
        return []
    if ends.dim() == 1 or ends.shape[0] == 1:
        line = ends.reshape(-1)
        own = line[first_expert : first_expert + num_experts]
        if first_expert or first_row:
            own = own - (line[first_expert - 1].clamp(min=first_row) if first_expert else first_row)
        return [(slice(None), _stops(own, x.shape[0]))]
    if num_experts < ends.shape[1] or x.shape[0] != ends.shape[0] * block_rows:
        return []  # own rows of several blocks: only the run knows where a block begins
    starts = range(0, x.shape[0], block_rows)
    return [(slice(i, i + block_rows), _stops(line, block_rows)) for i, line in zip(starts, ends, strict=True)]


def _fits_kernel(x: Tensor, num_columns: int, num_experts: int) -> bool:
    """Whether torch's kernel multiplies these rows on their device."""
    is_dense = x.is_contiguous() and not any(size % _ALIGNED for size in (x.shape[1], num_columns))
    return x.is_cuda and x.dtype == torch.bfloat16 and is_dense and bool(x.shape[0] and num_experts)


def _stops(ends: Tensor, num_rows: int) -> Tensor:
    return ends.clamp(0, num_rows).to(torch.int32)


def _mm_by_kernel(x: Tensor, weight: Tensor, stops: Tensor) -> Tensor:
    """Rows after the last end, which the kernel does not write, are zeros."""
    is_dense = 1 in weight.stride()[1:] and not any(step % _ALIGNED for step in weight.stride() if step != 1)
    out = aten._grouped_mm(x, weight if is_dense else weight.contiguous(), stops)
    rest = torch.arange(x.shape[0], device=x.device) >= stops[-1]
    return out.masked_fill_(rest.unsqueeze(1), 0.0)


def _block_rows(num_rows: int, ends: Tensor) -> int:
    """The number of rows of each block among `num_rows`; 0 if they are not in blocks."""
    return num_rows // max(ends.shape[0], 1) if ends.dim() == 2 else 0


@define_op("grouped_mm")
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows x [s, k], sorted by expert, times their expert's weight [e, k, n]: [s, n]. `ends` [e], or [blocks, e]."""
    return mm_piece(x, weight, ends, 0, 0, _block_rows(x.shape[0], ends))


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[2]))


@define_op("grouped_outer")
def grouped_outer(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """The gradient of `grouped_mm` for its weight: x [s, k], grad [s, n] -> [e, k, n]: a sum over each expert's
    rows."""
    return outer_piece(x, grad, ends, ends.shape[-1], 0, 0, _block_rows(x.shape[0], ends))


@grouped_outer.register_fake
def _(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty((ends.shape[-1], x.shape[1], grad.shape[1]))


def seen_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`grouped_mm` for a compiler that traces it: where torch's kernel computes it, the zeros of rows of no expert are
    an op of its own, which is fused with what reads the result."""
    is_by_kernel = ends.dim() == 1 and _fits_kernel(x, weight.shape[2], len(ends))
    return mm_piece(x, weight, ends, 0, 0) if is_by_kernel else grouped_mm(x, weight, ends)


def seen_outer(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """`grouped_outer`, likewise."""
    is_by_kernel = ends.dim() == 1 and _fits_kernel(x, grad.shape[1], len(ends))
    return outer_piece(x, grad, ends, len(ends), 0, 0) if is_by_kernel else grouped_outer(x, grad, ends)


@define_op("enter_rows")
def enter_rows(x: Tensor, ends: Tensor, dim: int) -> Tensor:
    """The identity: from here on the rows along `dim` are on the devices that own them (`Layout.owned`)."""
    return x.clone()


@define_op("leave_rows")
def leave_rows(x: Tensor, ends: Tensor, dim: int) -> Tensor:
    """The identity: from here on rows of other devices are zeros, so that the values of all devices are partial
    sums."""
    return x.clone()


for _identity in (enter_rows, leave_rows):
    _identity.register_fake(lambda x, ends, dim: torch.empty_like(x))


def _own(ends: Tensor, num_rows: int, first_row: int, first_expert: int, num_experts: int) -> tuple[int, int]:
    """Start and number of the own rows among `num_rows` from `first_row` on, relative to `first_row`. Rows of no
    expert, after the last end, are on the device of the last expert."""
    if not num_experts:
        return 0, 0
    stop = first_expert + num_experts
    first, last = int(ends[first_expert - 1]) if first_expert else 0, int(ends[stop - 1])
    start = min(max(first - first_row, 0), num_rows)
    size = num_rows if stop == ends.shape[0] else min(last - first_row, num_rows)
    return start, max(size - start, 0)


def own_rows(
    x: Tensor, ends: Tensor, dim: int, first_row: int, first_expert: int, num_experts: int, parts: int
) -> Tensor:
    """The own rows of x, whose rows along `dim` begin at `first_row`: those of the local experts.

    Their number is known only at run time; on meta tensors it is one of `parts` equal shares, as under a balanced load,
    and for 0 parts more than possible (`values.ragged`)."""
    if x.is_meta:
        num_rows = -(-x.shape[dim] // parts) if parts else x.shape[dim] + 1
        return x.new_empty((*x.shape[:dim], num_rows, *x.shape[dim + 1 :]))
    if ends.dim() == 1:
        start, size = _own(ends, x.shape[dim], first_row, first_expert, num_experts)
        return x.narrow(dim, start, size).clone(memory_format=torch.contiguous_format)
    spans = _own_spans(ends, x.shape[dim], first_expert, num_experts)
    return torch.cat([x.narrow(dim, start, size) for start, size in spans], dim)


def all_rows(
    x: Tensor, ends: Tensor, dim: int, first_row: int, first_expert: int, num_experts: int, num_rows: int
) -> Tensor:
    """All `num_rows` rows along `dim`, from `first_row` on: rows of the local experts from x, others zeros."""
    out = x.new_zeros((*x.shape[:dim], num_rows, *x.shape[dim + 1 :]))
    if x.is_meta:
        return out
    if ends.dim() == 1:
        spans = [_own(ends, num_rows, first_row, first_expert, num_experts)]
    else:
        spans = _own_spans(ends, num_rows, first_expert, num_experts)
    begin = 0
    for start, size in spans:
        out.narrow(dim, start, size).copy_(x.narrow(dim, begin, size))
        begin += size
    return out


def _own_spans(ends: Tensor, num_rows: int, first_expert: int, num_experts: int) -> list[tuple[int, int]]:
    """Start and number of the own rows of each block among `num_rows`, relative to the first row."""
    block_rows = _block_rows(num_rows, ends)
    own = [_own(line, block_rows, 0, first_expert, num_experts) for line in ends] or [(0, 0)]
    return [(block * block_rows + start, size) for block, (start, size) in enumerate(own)]


@define_op("row_owners")
def row_owners(
    ends: Tensor, num_rows: int, row_stops: list[int], expert_stops: list[int], members: list[int]
) -> Tensor:
    """The devices, by index in a group, that have each of `num_rows` rows by expert: [num_rows, copies].

    `row_stops[p]` is the end of piece p of the rows, `expert_stops[d]` that of the experts of the d-th device;
    `members` [pieces, devices, copies], flat, are those that have the rows of piece p whose experts are on device d.
    Rows in blocks are in a single piece.
    """
    table = torch.tensor(members, device=ends.device).view(len(row_stops), len(expert_stops), -1)
    rows = torch.arange(num_rows, device=ends.device)
    piece = torch.searchsorted(torch.tensor(row_stops, device=ends.device), rows, right=True)
    lines = ends.reshape(-1, ends.shape[-1]).long()
    before = torch.cat([lines.new_zeros(lines.shape[0], 1), lines], 1)[:, expert_stops].contiguous()
    inside = torch.arange(num_rows // max(lines.shape[0], 1), device=ends.device).expand(lines.shape[0], -1)
    owner = torch.searchsorted(before, inside.contiguous(), right=True).view(-1)
    return table[piece, owner.clamp(max=expert_stops.index(expert_stops[-1]))]


@row_owners.register_fake
def _(ends: Tensor, num_rows: int, row_stops: list[int], expert_stops: list[int], members: list[int]) -> Tensor:
    copies = len(members) // (len(row_stops) * len(expert_stops))
    return ends.new_empty((num_rows, copies), dtype=torch.int64)


@define_op("row_readers")
def row_readers(members: Tensor, places: Tensor | None, num_members: int, num_rows: int, blocks: int) -> Tensor:
    """Which members read which rows: [num_members, num_rows]. The members `members[i]` read row `places[i]`, for each
    i. Both kinds of rows are in `blocks`, if there are several, and those of a block refer only to this block."""
    return readers_piece(members, places, num_members, num_rows, 0)


@row_readers.register_fake
def _(members: Tensor, places: Tensor | None, num_members: int, num_rows: int, blocks: int) -> Tensor:
    return members.new_empty((num_members, num_rows), dtype=torch.bool)


def readers_piece(members: Tensor, places: Tensor | None, num_members: int, num_rows: int, first_row: int) -> Tensor:
    """`row_readers` of the `num_rows` rows from `first_row` on."""
    at = torch.arange(len(members), device=members.device) if places is None else places - first_row
    readers = torch.zeros((num_members, num_rows), dtype=torch.bool, device=members.device)
    readers[members, at.unsqueeze(1)] = True
    return readers


def key_of(node: fx.Node) -> str:
    """The name of the `ends` argument of an op on rows by expert, as in the captured graph."""
    ends = node.args[1] if node.target in _IDENTITIES else node.args[2]
    return str(node.meta.get("key") or ends)


_IDENTITIES = (torch.ops.meshweave.enter_rows.default, torch.ops.meshweave.leave_rows.default)
BY_ROWS = (torch.ops.meshweave.grouped_mm.default, torch.ops.meshweave.grouped_outer.default, *_IDENTITIES)


def from_torch(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`aten._grouped_mm` in terms of the ops above: rows are those of a if it has two dims, else columns of b."""
    if offs is None:
        out = torch.ops.meshweave.matmul(a, b)
    elif a.dim() == 2 and b.dim() == 3:
        out = grouped_mm(a, b, offs)
    elif a.dim() == 2:
        out = grouped_outer(a.t(), b, offs)
    else:
        out = grouped_mm(b.t(), a.transpose(1, 2), offs).t()
    out = out if bias is None else out + bias
    return out if out_dtype is None else out.to(out_dtype)


def fallback_backward(x: Tensor, weight: Tensor, offs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight that `transformers::grouped_mm_fallback_backward` returns."""
    return grouped_mm(grad, weight.transpose(1, 2), offs), grouped_outer(x, grad, offs)


# Ops of other libraries, by name, that capture rewrites in terms of the ops above: their own kernels support only some
# dtypes, and leave rows of no expert uninitialised.
OF_OTHERS = {
    "aten._grouped_mm.default": from_torch,
    "transformers.grouped_mm_fallback.default": grouped_mm,
    "transformers.grouped_mm_fallback_backward.default": fallback_backward,
}
