"""Replays communications, and other ops that a group runs together, over tables of boxes: the contents of every device
of a group afterwards, from the contents before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from meshweave.errors import MeshweaveError, VerifyError
from meshweave.ir import local_ops
from meshweave.ir.collectives import destinations, functional, permute, sparse_gather, sparse_scatter
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.pieces import Box
from meshweave.ir.routes import Message
from meshweave.replay.holdings import (
    Holding,
    Ints,
    PendingReduction,
    Rows,
    check_dim,
    describe,
    split,
)


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """`members[g, j]`: which of the present devices is member j of group g of the flattened `axes` of `mesh`."""

    mesh: Mesh
    axes: tuple[str, ...]
    members: Ints

    @property
    def count(self) -> int:
        return self.members.shape[1]


@lru_cache(maxsize=256)
def group_ids(mesh: Mesh, axes: tuple[str, ...]) -> Ints:
    """Device ids of every group of the flattened axes, one group per row."""
    if len(set(axes)) < len(axes):
        raise VerifyError("an axis stands twice in a group", got=", ".join(axes))
    rest = [a for a in mesh.axis_names if a not in axes]
    order = [mesh.axis_index(a) for a in (*rest, *axes)]
    return np.array(mesh.devices).reshape(mesh.shape).transpose(order).reshape(-1, mesh.flat_size(axes))


@lru_cache(maxsize=1024)
def groups_among(mesh: Mesh, axes: tuple[str, ...], devices: tuple[int, ...]) -> Groups:
    """The groups of the devices. Raises VerifyError if a member is not among them."""
    ids = group_ids(mesh, axes)
    ids = ids[np.isin(ids, devices).any(1)]
    order = np.argsort(devices)
    at = np.searchsorted(np.array(devices)[order], ids.reshape(-1)).clip(max=len(devices) - 1)
    members = order[at].reshape(ids.shape)
    if (missing := np.array(devices)[members] != ids).any():
        raise VerifyError("a group has members that do not take part", got=f"device {ids[missing][0]} is missing")
    return Groups(mesh, axes, members)


def together(holdings: Sequence[Holding]) -> Holding:
    """The values of several roles, as a single table. Raises VerifyError if their pending reductions differ."""
    first = holdings[0]
    if len(holdings) == 1:
        return first
    for other in holdings[1:]:
        if (other.pending, other.owed) != (first.pending, first.owed) or (first.pending and other.mesh != first.mesh):
            raise VerifyError(
                "roles pass values that are partial in different ways", got=f"{other.pending} and {first.pending}"
            )
    width = max(h.rows.start.shape[1] for h in holdings)
    offsets = np.cumsum([0, *(len(h.rows.extent) for h in holdings)])

    def stacked(name: str) -> Ints:
        tables = [getattr(h.rows, name) for h in holdings]
        return np.concatenate([np.pad(t, ((0, 0), (0, width - t.shape[1]), (0, 0))) for t in tables])

    rows = Rows(np.concatenate([h.rows.extent for h in holdings]), stacked("start"), stacked("size"), stacked("origin"))
    where = np.concatenate([h.where + offset for h, offset in zip(holdings, offsets, strict=False)])
    return replace(first, devices=tuple(d for h in holdings for d in h.devices), rows=rows, where=where)


def apart(holding: Holding, parts: Sequence[tuple[int, ...]]) -> list[Holding]:
    """The inverse of `together`: the values on the devices of each part."""
    ends = np.cumsum([0, *(len(p) for p in parts)])
    return [
        replace(holding, devices=part, where=holding.where[ends[i] : ends[i + 1]]) if len(parts) > 1 else holding
        for i, part in enumerate(parts)
    ]


def join(holding: Holding, groups: Groups, dim: int) -> Holding:
    """The arrays of each group side by side along `dim`, in group order."""
    check_dim(holding, dim)
    _not_pending(holding, groups)
    rows, inputs = holding.rows, holding.where[groups.members]
    before, whole = _stretches(holding, groups, dim)
    start, extent = rows.start[inputs].copy(), rows.extent[inputs[:, 0]].copy()
    start[..., dim] += before[:, :, None]
    extent[:, dim] = whole
    others = np.delete(rows.extent[inputs], dim, -1)
    if (others != others[:, :1]).any():
        raise VerifyError("blocks of one group differ in shape", got=f"along other dims than {dim}")
    return _by_group(holding, groups, Rows(extent, *map(_merged, (start, rows.size[inputs], rows.origin[inputs]))))


def _stretches(holding: Holding, groups: Groups, dim: int) -> tuple[Ints, Ints]:
    """Where each member's array begins if those of its group are side by side along `dim`, and their length
    together."""
    length = holding.rows.extent[holding.where[groups.members], dim]
    return np.cumsum(length, 1) - length, length.sum(1)


def _all_gather(holding: Holding, groups: Groups, count: Any) -> Holding:
    _check_count(groups, count)
    _same_extent(holding, holding.where[groups.members])
    return join(holding, groups, 0)


def reduce(holding: Holding, groups: Groups, op: str) -> Holding:
    """Each group's reduced values, if the reduction takes every contribution along the axes once."""
    pending = {p.axis: p for p in holding.pending}
    for axis in (a for a in groups.axes if groups.mesh.size(a) > 1):
        due = pending.get(axis)
        if due is None or holding.mesh != groups.mesh:
            raise VerifyError(
                f"contributions are counted {groups.mesh.size(axis)} times",
                got=f"a reduction over {axis}, over which the value is not partial",
            )
        if op != due.op:
            raise VerifyError("reduces with another op", got=f"{op} over {axis}", expected=due.op)
    if len({p.op for p in holding.pending}) > 1:
        raise VerifyError("a value is partial with two ops at once", got=str(holding.pending))
    _same_content(holding, groups)
    return replace(holding, pending=tuple(p for p in holding.pending if p.axis not in groups.axes))


def _reduce_scatter(holding: Holding, groups: Groups, op: str, count: Any) -> Holding:
    _check_count(groups, count)
    done = reduce(holding, groups, op)
    blocks, source = split(done, groups.count), done.where[groups.members[:, 0]]
    return _by_member(done, groups, blocks.take(source))


def _all_to_all(holding: Holding, groups: Groups, received: Sequence[Any], sent: Sequence[Any]) -> Holding:
    _not_pending(holding, groups)
    inputs = holding.where[groups.members]
    _same_extent(holding, inputs)
    blocks = split(holding, groups.count)
    height = blocks.extent[holding.where, 0, 0]
    for sizes in (received, sent):
        if len(sizes) != groups.count or any((np.asarray(s) != height).any() for s in sizes):
            raise VerifyError(
                "exchanges other blocks than it has",
                got=f"{len(sizes)} blocks",
                expected=f"{groups.count} blocks of {height[0]} on device {holding.devices[0]}",
            )
    # From sender i to receiver j: [group, sender, receiver, ...] -> [group, receiver, sender, ...].
    start, size, origin = (t[inputs].swapaxes(1, 2) for t in (blocks.start, blocks.size, blocks.origin))
    start = start.copy()
    start[..., 0] += (np.arange(groups.count) * blocks.extent[inputs[:, :1], 0, 0])[:, None, :, None]
    extent = blocks.extent[inputs[:, 0]].copy()
    extent[..., 0] *= groups.count
    flat = [t.reshape(*t.shape[:2], -1, t.shape[-1]) for t in (start, size, origin)]
    return _by_member(holding, groups, Rows(extent, *flat))


def _permute(holding: Holding, groups: Groups, to: Any) -> Holding:
    try:
        receivers = np.array(destinations(to, groups.count))
    except (MeshweaveError, TypeError) as error:
        raise VerifyError("is not a permutation of its group", got=str(to), expected=f"of {groups.count}") from error
    if (receivers != np.arange(groups.count)).any():
        _not_pending(holding, groups)
    inputs = holding.where[groups.members]
    _same_extent(holding, inputs)
    where = holding.where.copy()
    where[groups.members[:, receivers]] = inputs
    return holding.with_rows(holding.rows, where)


def embed_pieces(holding: Holding, groups: Groups, dim: int, op: str) -> Holding:
    """The arrays of each group as parts of a partial value: each at its place along `dim`, in group order."""
    check_dim(holding, dim)
    before, size = (np.zeros(len(holding.devices), np.int64) for _ in range(2))
    before[groups.members], whole = _stretches(holding, groups, dim)
    size[groups.members] = whole[:, None]
    return _embed_part(holding, groups, dim, before, size, op)


def _embed_part(holding: Holding, groups: Groups, dim: Any, before: Any, size: Any, op: Any) -> Holding:
    """`local_ops.embed_part` on all devices of a group: their combined contents, which a reduction over the group
    yields if no two devices have values in the same place. Other places stay padding."""
    if not isinstance(dim, int) or not 0 <= dim < holding.rows.extent.shape[1] or op not in ("sum", "max", "min"):
        raise VerifyError("does not return a part of a partial value", got=f"dim {dim}, op {op}")
    if (holding.pending and holding.mesh != groups.mesh) or {p.axis for p in holding.pending} & set(groups.axes):
        raise VerifyError(
            "makes a value partial over an axis over which it is partial already", got=str(holding.pending)
        )
    rows, where, (begin, whole) = holding.refine(before, size)
    length = rows.extent[:, dim : dim + 1]
    if (bad := (begin < 0) | (begin + length > whole))[:, 0].any():
        raise VerifyError(
            "has a part outside of the whole", where=f"device {replace(holding, where=where).device_of_row(bad[:, 0])}"
        )
    extent, start = rows.extent.copy(), rows.start.copy()
    extent[:, dim] = whole[:, 0]
    start[..., dim] += begin
    embedded = replace(holding, rows=replace(rows, extent=extent, start=start), where=where)
    inputs = where[groups.members]
    _same_extent(embedded, inputs)
    low, high = (np.where(length > 0, edge, whole)[inputs, 0] for edge in (begin, begin + length))
    order = np.argsort(low, axis=1)
    low, high = (np.take_along_axis(edge, order, 1) for edge in (low, high))
    if (over := (low[:, 1:] < high[:, :-1]).any(-1)).any():
        member = int(groups.members[int(np.argmax(over)), 0])
        raise VerifyError(
            "parts of a sum overlap", got=f"in the group of device {holding.devices[member]}, along dim {dim}"
        )
    embedded = replace(embedded, pending=(*holding.pending, *(PendingReduction(axis, op) for axis in groups.axes)))
    together = Rows(extent[inputs[:, 0]], *(_merged(t[inputs]) for t in (start, rows.size, rows.origin)))
    return _by_group(embedded, groups, together)


# For rows named by a value: the received rows are identified by that value (`check.dispatch`).
SPARSE = frozenset({sparse_gather, sparse_scatter})
EXCHANGES: dict[Any, Callable[..., Holding]] = {
    functional.all_gather_into_tensor.default: _all_gather,
    functional.all_reduce.default: reduce,
    functional.reduce_scatter_tensor.default: _reduce_scatter,
    functional.all_to_all_single.default: _all_to_all,
    permute: _permute,
    sparse_gather: _all_gather,
    sparse_scatter: lambda holding, groups, count: _reduce_scatter(holding, groups, "sum", count),
    local_ops.embed_part: _embed_part,
}


def _same_content(holding: Holding, groups: Groups) -> None:
    """The members of each group have the same boxes of the value, in the same places."""
    rows, inputs = holding.rows, holding.where[groups.members]
    pairs = np.unique(np.stack([inputs, np.broadcast_to(inputs[:, :1], inputs.shape)], -1).reshape(-1, 2), axis=0)
    a, b = rows.take(pairs[:, 0]), rows.take(pairs[:, 1])
    there = a.is_there
    same = (a.extent == b.extent).all(-1) & (there == b.is_there).all(-1)
    for array, other in ((a.start, b.start), (a.size, b.size), (a.origin, b.origin)):
        same &= (~there | (array == other).all(-1)).all(-1)
    if not same.all():
        i, j = (int(np.flatnonzero(holding.where == row)[0]) for row in pairs[int(np.argmin(same))])
        raise VerifyError(
            "adds up different elements",
            got="; ".join(f"device {holding.devices[k]} has {describe(holding, k)}" for k in (i, j)),
        )


def _not_pending(holding: Holding, groups: Groups) -> None:
    for p in holding.pending:
        if p.axis in groups.axes and holding.mesh == groups.mesh:
            raise VerifyError(f"joins parts of different sums over {p.axis}", expected=f"a {p.op} over {p.axis} before")
        if holding.mesh != groups.mesh:
            raise VerifyError("joins over a mesh a value that is partial on another", got=str(groups.mesh))


def _same_extent(holding: Holding, inputs: Ints) -> None:
    same = (holding.rows.extent[inputs] == holding.rows.extent[inputs[:, :1]]).all((-1, -2))
    if not same.all():
        shapes = np.unique(holding.rows.extent[inputs[int(np.argmin(same))]], axis=0).tolist()
        raise VerifyError("blocks of one group differ in shape", got=f"{shapes[0]} and {shapes[1]}")


def _check_count(groups: Groups, count: Any) -> None:
    if count != groups.count:
        raise VerifyError("has a wrong size of its group", got=str(count), expected=str(groups.count))


def _by_group(holding: Holding, groups: Groups, rows: Rows) -> Holding:
    """A row for each group, shared by all its members."""
    where = np.zeros_like(holding.where)
    where[groups.members] = np.arange(len(groups.members))[:, None]
    return holding.with_rows(rows, where)


def _by_member(holding: Holding, groups: Groups, blocks: Rows) -> Holding:
    """A row for each member of each group: blocks [group, member]."""
    where = np.zeros_like(holding.where)
    where[groups.members] = np.arange(groups.members.size).reshape(groups.members.shape)
    return holding.with_rows(Rows(*map(_joined, (blocks.extent, blocks.start, blocks.size, blocks.origin))), where)


def _merged(table: Ints) -> Ints:
    return table.reshape(len(table), -1, table.shape[-1])


def _joined(table: Ints) -> Ints:
    return table.reshape(-1, *table.shape[2:])


def check_messages(
    source: Layout, target: Layout, shape: tuple[int, ...], axes: tuple[str, ...], messages: Sequence[Message]
) -> None:
    """Raise VerifyError unless the messages give every device of the target exactly its piece: for one that its sender
    cannot send, or that leaves its group of the flattened `axes`, and if pieces are not tiled."""
    where = f"{source} -> {target}"
    _check_within(source, target, axes, messages)
    sent, wanted = source.pieces(shape), target.pieces(shape)
    received: dict[int, list[Box]] = {device: [] for device in wanted}
    for m in messages:
        for device, pieces, end in ((m.sender, sent, "sender"), (m.receiver, wanted, "receiver")):
            if device not in pieces or not pieces[device].contains(m.box):
                raise VerifyError(f"a message contains elements that its {end} does not have", where=where, got=str(m))
        received[m.receiver].append(m.box)
    for device, arrived in received.items():
        num_missing = wanted[device].num_elements - sum(box.num_elements for box in arrived)
        if num_missing or _overlap(arrived):
            got = f"device {device}: {num_missing} elements are missing" if num_missing else f"device {device}"
            raise VerifyError("a device receives elements twice, or not at all", where=where, got=got)


def _check_within(source: Layout, target: Layout, axes: tuple[str, ...], messages: Sequence[Message]) -> None:
    """Senders and receivers have the same contributions: a partial value stays in groups over other axes."""
    if not source.partial and not target.partial and not axes:
        return
    is_kept = source.mesh == target.mesh and set(source.partial) == set(target.partial)
    if not axes or not is_kept or set(axes) & set(source.partial_axes):
        raise VerifyError("parts of different sums are exchanged", got=f"{source} -> {target} over {axes}")
    group_of = {d: g for g, ids in enumerate(group_ids(source.mesh, axes).tolist()) for d in ids}
    if crossing := next((m for m in messages if group_of.get(m.sender, -1) != group_of.get(m.receiver)), None):
        raise VerifyError("a message leaves its group", got=str(crossing), expected=f"groups of {axes}")


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether two of the boxes overlap."""
    if len(boxes) < 2:
        return False
    origin, size = np.array([box.offset for box in boxes]), np.array([box.size for box in boxes])
    end = origin + size
    meet = (np.maximum(origin[:, None], origin) < np.minimum(end[:, None], end)).all(-1)
    return bool((meet.sum(1) > 1).any())
