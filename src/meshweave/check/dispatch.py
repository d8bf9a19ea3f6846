"""Sparse moves: proves which rows devices read, or have, from how the mask of these rows is computed.

A row of a moved value belongs to sorted rows, which devices own. `Readers` is the content of the mask in the placed
graph: the owners of the sorted rows, looked up and grouped. The users of a gathered value must undo these steps one by
one, until every device is left with the sorted rows that it owns; the ops that compute a part of a sum must have
applied them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import fx

from meshweave.errors import VerifyError
from meshweave.ir import ops
from meshweave.ir.blocks import num_blocks_of
from meshweave.ir.graph import StepGraph, op_name, origin_of, spec_of
from meshweave.ir.layout import WHOLE, DimSharding, Layout
from meshweave.replay.communication import group_ids
from meshweave.replay.holdings import boxes

aten = torch.ops.aten
ours = torch.ops.meshweave
_LOOKUPS = (aten.index.Tensor, ours.block_index.default)
_PUTS = (aten.index_put.default, ours.block_put.default)
Root = Callable[[Any], fx.Node]  # the value before moves


@dataclass(frozen=True, slots=True)
class Owners:
    """The owners of each sorted row, with the arguments of `grouped.row_owners`."""

    ends: fx.Node
    num_rows: int
    row_stops: tuple[int, ...]
    expert_stops: tuple[int, ...]
    members: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        """The number of blocks in which the rows are sorted (`ir.blocks`), 0 for rows that are sorted as a whole."""
        shape = spec_of(self.ends).shape
        return shape[0] if len(shape) == 2 else 0

    def check(self, ends: fx.Node, layout: Layout, num_rows: int, axes: tuple[str, ...]) -> None:
        """Raise VerifyError unless the result contains, for every device of the groups over `axes`, the sorted rows
        that it owns in `layout` by `ends`, and possibly more."""
        if self.ends is not ends or self.num_rows != num_rows:
            raise VerifyError("names the owners of other rows", got=f"{self.num_rows} by {self.ends.name}")
        mesh, devices = layout.mesh, layout.mesh.devices
        experts = Layout(mesh, (DimSharding(layout.owned_axes),))
        rows = Layout(mesh, (WHOLE if self.num_blocks else layout.dims[0],))
        pieces = _place(self.row_stops, *_spans(rows, num_rows, devices))
        owners = _place(self.expert_stops, *_spans(experts, spec_of(ends).shape[-1], devices))
        table = np.array(self.members).reshape(len(self.row_stops), len(self.expert_stops), -1)
        member = {d: i for ids in group_ids(mesh, axes).tolist() for i, d in enumerate(ids)}
        for device, piece, owner in zip(devices, pieces, owners, strict=True):
            if piece >= 0 and owner >= 0 and member[device] not in table[piece, owner]:
                raise VerifyError(
                    f"device {device} lacks rows that it owns",
                    got=f"members {table[piece, owner].tolist()} for its rows",
                    expected=f"member {member[device]} of the groups of {axes}",
                )


def _spans(layout: Layout, size: int, devices: tuple[int, ...]) -> tuple[list[int], list[int]]:
    offset, length = boxes(layout, (size,), devices)
    return offset[:, 0].tolist(), (offset + length)[:, 0].tolist()


def _place(stops: Sequence[int], begins: Sequence[int], ends: Sequence[int]) -> list[int]:
    """The index of the piece that contains each span, -1 for empty spans."""
    starts = [0, *stops]
    devices = []
    for begin, end in zip(begins, ends, strict=True):
        within = [i for i, stop in enumerate(stops) if starts[i] <= begin and end <= stop]
        if begin < end and not within:
            raise VerifyError("cuts rows or experts into other pieces", got=str(list(stops)), expected=f"{begin}:{end}")
        devices.append(within[0] if begin < end else -1)
    return devices


@dataclass(frozen=True, slots=True)
class Readers:
    """Which devices read the rows of `width` elements of a value: the owners of the sorted rows that `steps` lead from,
    in reverse order. With `places` row `places[i]` has the readers that row i would have without."""

    owners: Owners
    width: int
    steps: tuple[tuple[str, Any], ...] = ()
    places: fx.Node | None = None

    def undone(self, kind: str, by: Any) -> Readers:
        if self.places is not None or not self.steps or self.steps[-1] != (kind, by):
            raise VerifyError("is read through other steps than its readers", got=f"{kind} {by}")
        return replace(self, steps=self.steps[:-1])


def check_dispatch(placed: StepGraph, root: Root) -> frozenset[fx.Node]:
    """Raise VerifyError for a sparse move that omits a row that a device reads, or has. Returns the values that are
    computed from incomplete rows: they must not be sent to other devices."""
    partial: set[fx.Node] = set()
    for node in placed.graph.nodes:
        if not is_sparse(node):
            continue
        try:
            _DispatchProof(node, root, partial).check()
        except VerifyError as error:
            where = f"{node.name}, {origin_of(node)}"
            raise VerifyError(
                f"a sparse move omits rows that are read: {error.what}",
                where=where,
                got=error.got,
                expected=error.expected,
            ) from error
    return frozenset(partial)


def is_sparse(node: fx.Node) -> bool:
    return node.target is ops.move and len(node.args) > 2


def sparse_source(node: fx.Node) -> fx.Node | None:
    """The mask of the rows of a gathered value; None if all rows are present."""
    while node.target is ops.move:
        source, *_ = args = _args(node)
        if is_sparse(node):
            return None if source.meta["layout"].partial else args[2]
        node = source
    return None


class _DispatchProof:
    """The proof of a sparse move. `partial` collects the values that are computed from incomplete rows."""

    def __init__(self, node: fx.Node, root: Root, partial: set[fx.Node]) -> None:
        self.node, self.root, self.partial = node, root, partial
        source, layout = _args(node)[0].meta["layout"], node.meta["layout"]
        cut, whole = (layout, source) if source.partial else (source, layout)
        self.outer = whole.dims[0].axes  # that cut the rows before and after: each group moves its blocks of them
        moved = cut.dims[0].axes[len(self.outer) :]
        self.axes = tuple(sorted(moved, key=cut.mesh.axis_index))  # in group order

    def check(self) -> None:
        source, _, named, *_ = _args(self.node)
        readers = self.readers(self.root(named))
        if not source.meta["layout"].partial:
            self.follow(self.node, readers)
            return
        summed, layout = self.nonzero_rows(source)
        self.covers(readers.owners, summed.owners.ends, layout, summed.owners.num_rows)
        if replace(summed, owners=readers.owners) != readers:
            raise VerifyError("the sum is computed in other steps", got=str(summed.steps), expected=str(readers.steps))

    def covers(self, owners: Owners, ends: fx.Node, layout: Layout, num_rows: int) -> None:
        if self.outer != (layout.dims[0].axes if owners.num_blocks else ()):
            raise VerifyError(
                "each group moves other rows than its own", got=",".join(self.outer), expected=str(layout)
            )
        owners.check(ends, layout, num_rows, self.axes)

    def readers(self, node: fx.Node) -> Readers:
        """How the mask of a sparse move is computed."""
        shape, args = spec_of(self.node).shape, _args(node)
        if node.target is not ours.row_readers.default:
            raise VerifyError("its readers are not computed by row_readers", got=op_name(node.target))
        members, places, count, num_rows, num_blocks = args
        width = prod(shape) // num_rows
        if count != self.node.meta["layout"].mesh.flat_size(self.axes) or prod(shape) != width * num_rows:
            raise VerifyError("its readers have another shape", got=str(node.args[2:]), expected=str(shape))
        expected = Layout(node.meta["layout"].mesh, (WHOLE, DimSharding(self.outer))).normalized(spec_of(node).shape)
        if node.meta["layout"] != expected:
            raise VerifyError("its readers are of other rows", got=str(node.meta["layout"]), expected=str(expected))
        owners, steps = self.steps(self.root(members))
        if num_blocks != max(owners.num_blocks, 1):
            raise VerifyError("its readers are in other blocks", got=str(num_blocks), expected=str(owners.num_blocks))
        return Readers(owners, width, steps, None if places is None else self.root(places))

    def steps(self, node: fx.Node) -> tuple[Owners, tuple[tuple[str, Any], ...]]:
        if node.target is ours.row_owners.default:
            ends, num_rows, *tables = _args(node)
            return Owners(self.root(ends), num_rows, *map(tuple, tables)), ()
        if node.target not in (aten.view.default, *_LOOKUPS):
            raise VerifyError("its readers are computed in an unknown way", got=op_name(node.target))
        operand = _args(node)[0]
        owners, steps = self.steps(self.root(operand))
        if node.target is aten.view.default:
            (before, copies), (after, more) = spec_of(operand).shape, spec_of(node).shape
            if more != copies * (before // after):
                raise VerifyError("groups rows that do not divide", got=f"{before} as {after}")
            return owners, (*steps, ("group", before // after))
        if not _looks_up(node) or not _is_in_blocks(node, owners):
            raise VerifyError("its readers are looked up at several indices, or in other blocks", got=node.name)
        return owners, (*steps, ("lookup", self.root(_index(node))))

    def follow(self, node: fx.Node, readers: Readers) -> None:
        """Check all users of a value of which devices have the rows of `readers`."""
        for user in node.users:
            if user.target is ours.enter_rows.default and user.args[0] is node:
                self.entered(user, spec_of(node).shape, readers)
            elif _looks_up(user) and user.args[0] is node and _index(user).meta["layout"].owned:
                self.looked_up(user, self.through(node, user, readers))
            else:
                self.partial |= set() if user.target is ops.move else {user}
                self.follow(user, self.through(node, user, readers))

    def entered(self, enter: fx.Node, shape: tuple[int, ...], readers: Readers) -> None:
        if readers.steps or readers.places or enter.args[2] != 0 or prod(shape[1:]) != readers.width:
            raise VerifyError("rows enter that its readers do not have", got=enter.name)
        self.covers(readers.owners, self.root(enter.args[1]), enter.meta["layout"], shape[0])

    def looked_up(self, lookup: fx.Node, readers: Readers) -> None:
        """A lookup of rows at places that devices own."""
        at = _index(lookup)
        if readers.steps or not _is_in_blocks(lookup, readers.owners) or at.target is not ours.enter_rows.default:
            raise VerifyError("rows are looked up that its readers do not have", got=lookup.name)
        self.covers(readers.owners, self.root(at.args[1]), at.meta["layout"], spec_of(at).shape[0])

    def through(self, node: fx.Node, user: fx.Node, readers: Readers) -> Readers:
        """The readers of the rows of a result, if `readers` read those of its operand."""
        shape = spec_of(node).shape
        if user.target in (aten.view.default, aten._to_copy.default):
            return readers
        if user.target is ops.move and not is_sparse(user) and _cuts(node.meta["layout"], user.meta["layout"]):
            return readers
        if user.target is aten.expand.default:
            count = _repeats(spec_of(user).shape, shape, readers.width)
            return readers if count == 1 else readers.undone("group", count)
        is_of_rows = prod(shape[1:]) == readers.width and _is_in_blocks(user, readers.owners)
        if user.target in _PUTS and user.args[2] is node and _is_sum(user, self.root) and is_of_rows:
            return readers.undone("lookup", self.root(_index(user)))
        if _looks_up(user) and user.args[0] is node and is_of_rows and self.at(user) is readers.places:
            return replace(readers, places=None)
        raise VerifyError(f"{user.name} ({op_name(user.target)}) reads all rows", got=f"the rows of {readers.steps}")

    def nonzero_rows(self, node: fx.Node) -> tuple[Readers, Layout]:
        """The owners of the nonzero rows of a part of a sum, and the layout in which their sorted rows are owned."""
        operand, *rest = _args(node)
        if node.target is ours.leave_rows.default and rest[1] == 0:
            return self.sorted_rows(rest[0], operand.meta["layout"], spec_of(node).shape)
        if node.target in (aten.view.default, aten._to_copy.default):
            return self.nonzero_rows(operand)
        if node.target is aten.sum.dim_IntList:
            (readers, layout), many = self.nonzero_rows(operand), spec_of(operand).shape
            summed = {d % len(many) for d in rest[0]}
            count = _repeats(many, tuple(1 if d in summed else size for d, size in enumerate(many)), readers.width)
            return (readers if count == 1 else self.after(readers, ("group", count))), layout
        if _looks_up(node):
            readers, layout = self.nonzero_rows(operand)
            is_of_rows = prod(spec_of(operand).shape[1:]) == readers.width and _is_in_blocks(node, readers.owners)
            if not is_of_rows or _index(node).meta["layout"].owned:
                raise VerifyError("looks up other rows", got=node.name)
            return self.after(readers, ("lookup", self.root(_index(node)))), layout
        if node.target not in _PUTS or not _is_sum(node, self.root):
            raise VerifyError(f"{node.name} ({op_name(node.target)}) may have rows of other devices", got=node.name)
        readers, layout = self.added(node)
        if not _is_in_blocks(node, readers.owners):
            raise VerifyError("adds rows in other blocks", got=node.name)
        return replace(readers, width=prod(spec_of(node).shape[1:]), places=self.at(node)), layout

    def added(self, node: fx.Node) -> tuple[Readers, Layout]:
        """The owners of the nonzero rows among those that are added at an index."""
        at = _index(node)
        if at.target is ours.enter_rows.default:
            return self.sorted_rows(at.args[1], at.meta["layout"], spec_of(at).shape)
        readers, layout = self.nonzero_rows(_args(node)[2])
        if readers.places is not None or readers.width != prod(spec_of(node).shape[1:]) or at.meta["layout"].owned:
            raise VerifyError("adds up other rows", got=node.name)
        return readers, layout

    def at(self, node: fx.Node) -> fx.Node:
        """The places of all rows, of which an op may get only those that a device owns."""
        at = _index(node)
        return self.root(at.args[0] if at.target is ours.enter_rows.default else at)

    def sorted_rows(self, ends: Any, layout: Layout, shape: tuple[int, ...]) -> tuple[Readers, Layout]:
        return Readers(Owners(self.root(ends), shape[0], (), (), ()), prod(shape[1:])), layout

    def after(self, readers: Readers, step: tuple[str, Any]) -> Readers:
        if readers.places is not None:
            raise VerifyError("rows that were added at places are used further", got=str(step))
        return replace(readers, steps=(*readers.steps, step))


def _cuts(source: Layout, target: Layout) -> bool:
    """Whether every device has its piece of the target inside its piece of the source."""
    if source.partial or source.owned or target.partial or source.mesh != target.mesh:
        return False
    return all(b.axes[: len(a.axes)] == a.axes for a, b in zip(source.dims, target.dims, strict=True))


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _index(node: fx.Node) -> fx.Node:
    """The index along dim 0 of a lookup, or of a sum."""
    args = _args(node)
    if node.target is aten.index_select.default:
        index: fx.Node = args[2]
        return index
    return args[1] if isinstance(args[1], fx.Node) else args[1][0]


def _looks_up(node: fx.Node) -> bool:
    args = _args(node)
    is_select = node.target is aten.index_select.default and args[1] == 0
    is_index = node.target is ours.block_index.default or (node.target is aten.index.Tensor and len(args[1]) == 1)
    return (
        (is_select or is_index) and spec_of(_index(node)).dtype != torch.bool and len(spec_of(_index(node)).shape) == 1
    )


def _is_sum(node: fx.Node, root: Root) -> bool:
    """Whether values are added at a single index along dim 0 of zeros."""
    into, indices, _, *rest = _args(node)
    zeros, is_single = root(into), isinstance(indices, fx.Node) or len(indices) == 1
    return is_single and rest[:1] == [True] and zeros.target is aten.full.default and bool(zeros.args[1] == 0)


def _is_in_blocks(node: fx.Node, owners: Owners) -> bool:
    """Whether a lookup or a sum is in the same blocks as the sorted rows."""
    return num_blocks_of(node) == owners.num_blocks


def _repeats(many: tuple[int, ...], few: tuple[int, ...], width: int) -> int:
    """How many consecutive rows of shape `many` form a row of shape `few`; 0 if the shapes do not match."""
    if many == few:
        return 1
    if len(many) != len(few):
        return 0
    at = [d for d, (a, b) in enumerate(zip(many, few, strict=True)) if a != b]
    return many[at[0]] if len(at) == 1 and few[at[0]] == 1 and prod(many[at[0] + 1 :]) == width else 0
