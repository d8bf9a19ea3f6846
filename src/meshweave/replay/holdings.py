"""The contents of devices for a value in the middle of a move, as tables of boxes: moves replayed without tensors, both
the steps of a plan (`movement.replay`) and the ops of programs (`check`).

A device's array is a list of fragments, each a box of the array that contains a box of the global value, in order; the
rest is padding. Devices with equal contents share a row, so that a gathered value costs a row per group.

Contributions are counted per axis. A value that is partial over some axes is the sum (or maximum) of the values along
them; a reduction over such an axis takes each contribution along it once. So it is enough to track over which axes a
reduction is pending: reducing over any other axis would count contributions twice, and gathering over a pending axis
would join parts of different sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import isclose, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshweave.errors import VerifyError
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.pieces import nested_chunk

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Row n is an array of shape `extent[n]`; its fragment f, of `size[n, f]`, lies at `start[n, f]` of the array.

    It is the part of the global value at `origin[n, f]`. A fragment of size 0 is absent.
    """

    extent: Ints
    start: Ints
    size: Ints
    origin: Ints

    @property
    def is_there(self) -> NDArray[np.bool_]:
        return np.all(self.size > 0, axis=-1)

    def take(self, index: Ints) -> Rows:
        return Rows(self.extent[index], self.start[index], self.size[index], self.origin[index])

    def compact(self) -> Rows:
        """The same without absent fragments, as far as no row needs the space."""
        there = self.is_there
        width = max(int(there.sum(-1).max(initial=0)), 1)
        if width == there.shape[1]:
            return self
        order = np.argsort(~there, axis=1, kind="stable")[:, :width, None]
        start, size, origin = (np.take_along_axis(a, order, 1) for a in (self.start, self.size, self.origin))
        return Rows(self.extent, start, size, origin)

    def merged(self) -> Rows:
        """The same, in which a row that is a single box has a single fragment."""
        num_fragments = self.start.shape[1]
        if num_fragments == 1:
            return self
        is_box, offset = (table[:, None, None] for table in self.as_boxes())
        is_first = (np.arange(num_fragments) == 0)[:, None]
        start = np.where(is_box, 0, self.start)
        size = np.where(is_box, np.where(is_first, self.extent[:, None], 0), self.size)
        return Rows(self.extent, start, size, np.where(is_box, offset[:, 0], self.origin))

    def as_boxes(self) -> tuple[NDArray[np.bool_], Ints]:
        """Whether each row is a single box of the global value, in order and without padding, and the box's offset."""
        there = self.is_there
        first = np.argmax(there, 1)
        shift = self.origin - self.start
        offset = np.take_along_axis(shift, first[:, None, None], 1)
        straight = (~there | (shift == offset).all(-1)).all(-1)
        full = np.where(there, self.size.prod(-1), 0).sum(-1) == self.extent.prod(-1)
        return straight & full, offset[:, 0]


@dataclass(frozen=True, slots=True)
class PendingReduction:
    """A pending reduction over `axis`. `is_first`: index 0 has the whole value, the others the identity element."""

    axis: str
    op: str
    is_first: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Holding:
    """Device `devices[i]` has row `where[i]`. `pending` axes are those of `mesh`. The pending reductions yield `owed`
    times the value: an average counts as a sum, until it is scaled.
    """

    mesh: Mesh
    devices: tuple[int, ...]
    rows: Rows
    where: Ints
    pending: tuple[PendingReduction, ...] = ()
    owed: float = 1.0

    def device_of_row(self, bad: NDArray[np.bool_]) -> int:
        """The first device with one of the `bad` rows."""
        return self.devices[int(np.argmax(bad[self.where]))]

    def refine(self, *args: Any) -> tuple[Rows, Ints, list[Ints]]:
        """(rows, where, args per row) such that devices that share a row have equal `args`. An argument is a number, or
        has an entry per device."""
        count = len(self.devices)
        wide = [np.broadcast_to(a, (count, *np.shape(a)[1:])).reshape(count, -1) for a in args]
        key = np.column_stack([self.where, *wide])
        first, where = distinct_rows(key)
        return self.rows.take(self.where[first]), where, [w[first] for w in wide]

    def with_rows(self, rows: Rows, where: Ints) -> Holding:
        return replace(self, rows=rows.merged().compact(), where=where)


def distinct_rows(table: Ints) -> tuple[Ints, Ints]:
    """The first of each set of equal rows, and for each row the number of its set."""
    numbers: dict[tuple[int, ...], int] = {}
    where = np.array([numbers.setdefault(tuple(row), len(numbers)) for row in table.tolist()], np.int64)
    return np.unique(where, return_index=True)[1], where


# the contents by a layout


@lru_cache(maxsize=64)
def coordinates(mesh: Mesh, devices: tuple[int, ...]) -> dict[str, Ints]:
    """Coordinate of each of the devices along every axis of a mesh that contains them all."""
    at = np.unravel_index([mesh.index(d) for d in devices], mesh.shape) if mesh.shape else ()
    return {axis: np.asarray(index, np.int64) for axis, index in zip(mesh.axis_names, at, strict=True)}


def index_along(mesh: Mesh, axes: Sequence[str], devices: tuple[int, ...]) -> Ints:
    """The index of each device among those along the flattened axes."""
    at, index = coordinates(mesh, devices), np.zeros(len(devices), np.int64)
    for axis in axes:
        index = index * mesh.size(axis) + at[axis]
    return index


@lru_cache(maxsize=512)
def _pieces(size: int, parts: tuple[int, ...], unit: int) -> Ints:
    """(offset, size) of every piece of a dim, the outermost cut slowest."""
    every = product(*(range(n) for n in parts))
    return np.array([nested_chunk(size, list(zip(parts, index, strict=True)), unit) for index in every], np.int64)


@lru_cache(maxsize=512)
def boxes(layout: Layout, shape: tuple[int, ...], devices: tuple[int, ...]) -> tuple[Ints, Ints]:
    """Offset and size of each device's piece, a row per device."""
    table = np.zeros((len(devices), len(shape), 2), np.int64)
    for d, (size, dim) in enumerate(zip(shape, layout.dims, strict=True)):
        index = index_along(layout.mesh, dim.axes, devices)
        table[:, d] = _pieces(size, layout.parts(d), dim.unit)[index]
    return table[..., 0], table[..., 1]


def pending_of(layout: Layout) -> tuple[tuple[PendingReduction, ...], float]:
    """The pending reductions of a layout, averages as sums, and the factor that these yield."""
    pending = tuple(PendingReduction(axis, "sum" if op == "avg" else op) for axis, op in layout.partial)
    return pending, float(layout.mesh.flat_size(axis for axis, op in layout.partial if op == "avg"))


def holding_of(layout: Layout, shape: tuple[int, ...], devices: tuple[int, ...]) -> Holding:
    """The contents of the devices for a value in a layout."""
    offset, size = boxes(layout, shape, devices)
    key = np.concatenate([offset, size], 1)
    first, where = distinct_rows(key)
    key = key[first]
    origin, extent = key[:, None, : len(shape)], key[:, len(shape) :]
    rows = Rows(extent, np.zeros_like(origin), extent[:, None], origin)
    return Holding(layout.mesh, devices, rows, where, *pending_of(layout))


def check_is(holding: Holding, layout: Layout, shape: tuple[int, ...]) -> None:
    """Raise VerifyError unless every device has exactly its piece in `layout`, whole, in order and without padding,
    with exactly the layout's reductions pending, and scaled."""
    _check_pending(holding, layout)
    is_box, start = holding.rows.as_boxes()
    offset, size = boxes(layout, shape, holding.devices)
    placed = (size == 0).any(-1) | (start[holding.where] == offset).all(-1)
    good = is_box[holding.where] & (holding.rows.extent[holding.where] == size).all(-1) & placed
    if not good.all():
        i = int(np.argmin(good))
        raise VerifyError(
            f"device {holding.devices[i]} does not have its piece",
            got=describe(holding, i),
            expected=f"{_box(offset[i], size[i])}, its piece in {layout}",
        )


def _check_pending(holding: Holding, layout: Layout) -> None:
    wanted, owed = pending_of(layout)
    pending, due = ({(p.axis, p.op) for p in those} for those in (holding.pending, wanted))
    if pending != due or (pending and holding.mesh != layout.mesh):
        raise VerifyError(
            "contributions are missing" if pending - due else "a whole value is used as a part of a sum",
            got=_pending_text(holding.pending),
            expected=f"{_pending_text(wanted)}, as in {layout}",
        )
    if not isclose(holding.owed, owed):
        expected = "the value" if owed == 1.0 else f"{owed:g} times the value"
        raise VerifyError("the average is scaled wrongly", got=f"{holding.owed:g} times the value", expected=expected)


def _pending_text(pending: Sequence[PendingReduction]) -> str:
    return "still to reduce: " + (", ".join(f"{p.op} over {p.axis}" for p in pending) or "nothing")


def describe(holding: Holding, i: int) -> str:
    """The contents of the i-th device, in words."""
    row = holding.rows.take(holding.where[i : i + 1]).compact()
    there = row.is_there[0]
    padding = int(row.extent[0].prod() - np.where(there, row.size[0].prod(-1), 0).sum())
    shown = [_box(o, s) for o, s in zip(row.origin[0][there], row.size[0][there], strict=True)]
    more = f" and {len(shown) - 3} more boxes" if len(shown) > 3 else ""
    present = ", ".join(shown[:3]) + more if shown else "nothing"
    return f"{present} in an array of {row.extent[0].tolist()}" + (f", {padding} of it padding" if padding else "")


def _box(offset: Ints, size: Ints) -> str:
    return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(offset.tolist(), size.tolist(), strict=True)) + "]"


# steps without communication


def narrow(holding: Holding, dim: int, start: Any, size: Any) -> Holding:
    check_dim(holding, dim)
    rows, where, (lo, length) = holding.refine(start, size)
    if (bad := (lo < 0) | (length < 0) | (lo + length > rows.extent[:, dim : dim + 1]))[:, 0].any():
        _refuse(replace(holding, rows=rows, where=where), bad[:, 0], "cuts beyond the array")
    rows = _clip(rows, dim, lo, lo + length)
    extent = rows.extent.copy()
    extent[:, dim] = length[:, 0]
    return holding.with_rows(replace(rows, extent=extent), where)


def keep_part(holding: Holding, dim: int, mesh: Mesh, axes: Sequence[str], unit: int) -> Holding:
    """Each device keeps its part of its array along `dim`, which is cut over the axes in blocks of `unit`."""
    check_dim(holding, dim)
    parts, index = tuple(mesh.size(axis) for axis in axes), index_along(mesh, axes, holding.devices)
    extent, spans = holding.rows.extent[holding.where, dim], np.zeros((len(holding.devices), 2), np.int64)
    for size in np.unique(extent).tolist():
        here = extent == size
        spans[here] = _pieces(size, parts, unit)[index[here]]
    return narrow(holding, dim, spans[:, 0], spans[:, 1])


def pad(holding: Holding, amounts: Sequence[Any]) -> Holding:
    """`constant_pad_nd`: amounts before and after, for the last dim first."""
    if len(amounts) % 2:
        raise VerifyError("pads a dim on one side only", got=f"{len(amounts)} amounts")
    check_dim(holding, holding.rows.extent.shape[1] - len(amounts) // 2)
    rows, where, wide = holding.refine(*amounts)
    bad = np.any(np.concatenate([np.zeros((len(rows.extent), 1), np.int64), *wide], 1) < 0, axis=1)
    if bad.any():
        _refuse(replace(holding, rows=rows, where=where), bad, "pads by a negative amount")
    extent, start = rows.extent.copy(), rows.start.copy()
    for i in range(0, len(wide), 2):
        dim = extent.shape[1] - 1 - i // 2
        extent[:, dim] += wide[i][:, 0] + wide[i + 1][:, 0]
        start[:, :, dim] += wide[i]
    return holding.with_rows(replace(rows, extent=extent, start=start), where)


def join_blocks(holding: Holding, sizes: Sequence[int], order: Sequence[int], dim: int, table: Any) -> Holding:
    """`local_ops.join_blocks`: blocks stacked along dim 0 in group order, concatenated along `dim` in its own order,
    cut to the sizes of the table."""
    check_dim(holding, dim)
    place = _places(sizes, order)
    count = len(place)
    rows, where, lengths = holding.refine(*([] if table is None else [np.asarray(table)[:, :, 1]]))
    chunks = split(replace(holding, rows=rows, where=where), count)
    chunks = Rows(*(t[:, np.argsort(place)] for t in (chunks.extent, chunks.start, chunks.size, chunks.origin)))
    block = chunks.extent[:, 0]
    length = lengths[0] if lengths else np.repeat(block[:, dim : dim + 1], count, 1)
    if length.shape[1] != count or (length > block[:, dim : dim + 1]).any():
        raise VerifyError("joins blocks by a table that does not fit", got=f"{count} blocks of {block[0].tolist()}")
    chunks = _clip(chunks, dim, np.zeros_like(length)[:, :, None], length[:, :, None])
    start = chunks.start.copy()
    start[..., dim] += (np.cumsum(length, 1) - length)[:, :, None]
    extent = block.copy()
    extent[:, dim] = length.sum(1)
    return holding.with_rows(Rows(extent, *(_flat(a) for a in (start, chunks.size, chunks.origin))), where)


def deal_blocks(
    holding: Holding, sizes: Sequence[int], order: Sequence[int], dim: int, table: Any, block: Any
) -> Holding:
    """`local_ops.deal_blocks`: cut along `dim` into the pieces of a group, each padded to `block`, stacked along dim 0
    in group order."""
    check_dim(holding, dim)
    place = _places(sizes, order)
    count = len(place)
    rows, where, args = holding.refine(block, *([] if table is None else [np.asarray(table)]))
    room, reach = args[0], rows.extent[:, dim : dim + 1]
    if table is None:
        at, length = np.arange(count) * room, np.repeat(room, count, 1)
        fits = (reach == count * room).all()
    else:
        spans = args[1].reshape(len(room), -1, 2)
        at, length = spans[..., 0] - spans[:, :1, 0], spans[..., 1]
        fits = at.shape[1] == count and ((at >= 0) & (at + length <= reach) & (length <= room)).all()
    if not fits:
        raise VerifyError(
            "cuts pieces that the value does not have",
            got=f"{count} of an array like {rows.extent[0].tolist()} along dim {dim}",
        )
    at, length = at[:, place], length[:, place]
    apart = Rows(rows.extent, *(np.repeat(a[:, None], count, 1) for a in (rows.start, rows.size, rows.origin)))
    apart = _clip(apart, dim, at[:, :, None], (at + length)[:, :, None])
    extent, start = rows.extent.copy(), apart.start.copy()
    extent[:, dim] = room[:, 0]
    start[..., 0] += (np.arange(count) * extent[:, :1])[:, :, None]
    extent[:, 0] *= count
    return holding.with_rows(Rows(extent, *(_flat(a) for a in (start, apart.size, apart.origin))), where)


def keep_first(holding: Holding, mesh: Mesh, axes: Sequence[str], op: str) -> Holding:
    """The value as a part of a partial value: from now on a reduction over `axes` is pending."""
    if (holding.pending and holding.mesh != mesh) or {p.axis for p in holding.pending} & set(axes):
        raise VerifyError(
            "makes a value partial over an axis over which it is partial already", got=_pending_text(holding.pending)
        )
    return replace(holding, mesh=mesh, pending=(*holding.pending, *(PendingReduction(axis, op, True) for axis in axes)))


def _places(sizes: Sequence[int], order: Sequence[int]) -> Ints:
    """For each member of a group the index of its piece on the dim that is cut by axes of `sizes`."""
    if not sizes or sorted(order) != list(range(len(sizes))) or any(n < 1 for n in sizes):
        raise VerifyError(
            "has an impossible order of the pieces of a group", got=f"sizes {list(sizes)}, order {list(order)}"
        )
    return np.arange(prod(sizes)).reshape(sizes).transpose(order).reshape(-1)


def scaled(holding: Holding, factor: float) -> Holding:
    return replace(holding, owed=holding.owed * factor)


def split(holding: Holding, count: int) -> Rows:
    """The arrays cut along dim 0 into `count` equal blocks: rows [n, count], all of the blocks' extent.
    Raises VerifyError if dim 0 cannot be cut so."""
    rows = holding.rows
    if not rows.extent.shape[1] or (rows.extent[:, 0] % count).any():
        raise VerifyError(f"cuts an array of {rows.extent[0].tolist()} into {count} equal blocks")
    height = rows.extent[:, :1] // count
    low, high = rows.start[..., 0], rows.start[..., 0] + rows.size[..., 0]
    tall = np.maximum(height, 1)
    if (rows.is_there & (low // tall != (high - 1) // tall)).any():
        edges = (np.arange(count) * height)[:, :, None]
        cut = Rows(rows.extent, *(np.repeat(a[:, None], count, 1) for a in (rows.start, rows.size, rows.origin)))
        cut = _clip(cut, 0, edges, edges + height[:, :, None], shifted=False)
        rows = Rows(rows.extent, *(_flat(a) for a in (cut.start, cut.size, cut.origin))).compact()
    extent = np.repeat(np.concatenate([height, rows.extent[:, 1:]], 1)[:, None], count, 1)
    return _by_block(rows, tall, count, extent)


def _by_block(rows: Rows, height: Ints, count: int, extent: Ints) -> Rows:
    """Fragments sorted by their block."""
    there = rows.is_there
    block = np.where(there, rows.start[..., 0] // height, count)
    order = np.argsort(block, axis=1, kind="stable")
    block = np.take_along_axis(block, order, 1)
    counts = np.zeros((len(block), count + 1), np.int64)
    np.add.at(counts, (np.arange(len(block))[:, None], block), 1)
    place = np.arange(block.shape[1]) - np.take_along_axis(np.cumsum(counts, 1) - counts, block, 1)
    n, f = np.nonzero(block < count)
    width = max(int(counts[:, :count].max(initial=0)), 1)
    rows_by_block = []
    for table in (rows.start, rows.size, rows.origin):
        out = np.zeros((len(block), count, width, table.shape[2]), np.int64)
        out[n, block[n, f], place[n, f]] = table[n, order[n, f]]
        rows_by_block.append(out)
    rows_by_block[0][..., 0] -= (np.arange(count) * height)[:, :, None] * (rows_by_block[1] > 0).all(-1)
    return Rows(extent, *rows_by_block)


def _clip(rows: Rows, dim: int, low: Ints, high: Ints, shifted: bool = True) -> Rows:
    """The fragments clipped to `low` .. `high` along `dim`; relative to `low` if `shifted`."""
    begin = np.maximum(rows.start[..., dim], low)
    end = np.minimum(rows.start[..., dim] + rows.size[..., dim], high)
    start, size, origin = rows.start.copy(), rows.size.copy(), rows.origin.copy()
    origin[..., dim] += begin - start[..., dim]
    size[..., dim] = np.maximum(end - begin, 0)
    start[..., dim] = begin - low if shifted else begin
    return Rows(rows.extent, start, size, origin)


def _flat(table: Ints) -> Ints:
    """[n, blocks, fragments, dims] as [n, all fragments, dims]."""
    return table.reshape(table.shape[0], prod(table.shape[1:-1]), table.shape[-1])


def check_dim(holding: Holding, dim: int) -> None:
    if not 0 <= dim < holding.rows.extent.shape[1]:
        raise VerifyError(f"works along dim {dim}", got=f"an array of {holding.rows.extent[0].tolist()}")


def _refuse(holding: Holding, bad: NDArray[np.bool_], problem: str) -> None:
    device = holding.device_of_row(bad)
    raise VerifyError(problem, where=f"device {device}", got=describe(holding, holding.devices.index(device)))
