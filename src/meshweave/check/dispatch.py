"""Sparse moves: which rows devices read, or have, proven by what the value that says so is made of.

A row of a moved value belongs to sorted rows, which devices own. `Readers` is what the placed graph says of that: the
owners of the sorted rows, looked up and taken together. What reads a gathered value must undo these steps one by one,
until every device is left with the sorted rows that it owns; what makes a part of a sum must have taken them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from torch import fx

from meshweave.check.communication import group_ids
from meshweave.check.holdings import boxes
from meshweave.errors import VerifyError
from meshweave.ir import ops
from meshweave.ir.graph import StepGraph, op_name, origin_of, spec_of
from meshweave.ir.layout import DimSharding, Layout

aten = torch.ops.aten
ours = torch.ops.meshweave
Root = Callable[[Any], fx.Node]  # what a value is moved from


@dataclass(frozen=True, slots=True)
class Owners:
    """Who has each sorted row, as `grouped.row_owners` is told."""

    ends: fx.Node
    num_rows: int
    row_stops: tuple[int, ...]
    expert_stops: tuple[int, ...]
    members: tuple[int, ...]

    def check(self, ends: fx.Node, layout: Layout, num_rows: int, axes: tuple[str, ...]) -> None:
        """Raise VerifyError unless they name, for every device of the groups over `axes`, the sorted rows that it owns
        in `layout` by `ends`, and perhaps others."""
        if self.ends is not ends or self.num_rows != num_rows:
            raise VerifyError("names the owners of other rows", got=f"{self.num_rows} by {self.ends.name}")
        mesh, devices = layout.mesh, layout.mesh.devices
        experts = Layout(mesh, (DimSharding(layout.owned_axes),))
        rows = Layout(mesh, (layout.dims[0],))
        pieces = _place(self.row_stops, *_spans(rows, num_rows, devices))
        owners = _place(self.expert_stops, *_spans(experts, spec_of(ends).shape[0], devices))
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
    """Of spans the number of the piece between two stops that holds each; -1 of what is empty."""
    starts = [0, *stops]
    found = []
    for begin, end in zip(begins, ends, strict=True):
        within = [i for i, stop in enumerate(stops) if starts[i] <= begin and end <= stop]
        if begin < end and not within:
            raise VerifyError("cuts rows or experts in other pieces", got=str(list(stops)), expected=f"{begin}:{end}")
        found.append(within[0] if begin < end else -1)
    return found


@dataclass(frozen=True, slots=True)
class Readers:
    """Who reads the rows of `width` elements of a value: the owners of the sorted rows that `steps` lead from, the last
    step first to be undone; or, with `places`, of those sorted rows whose places say this row."""

    owners: Owners
    width: int
    steps: tuple[tuple[str, Any], ...] = ()
    places: fx.Node | None = None

    def undone(self, kind: str, by: Any) -> Readers:
        if not self.steps or self.steps[-1] != (kind, by):
            raise VerifyError("is read through other steps than its readers say", got=f"{kind} {by}")
        return replace(self, steps=self.steps[:-1])


def check_dispatch(placed: StepGraph, root: Root) -> frozenset[fx.Node]:
    """Raise VerifyError for a sparse move that leaves out a row that a device reads, or has. Returns the values that
    are computed of rows of which some are missing: no other device may be sent them."""
    partial: set[fx.Node] = set()
    for node in placed.graph.nodes:
        if not is_sparse(node):
            continue
        try:
            _Proof(node, root, partial).check()
        except VerifyError as error:
            where = f"{node.name}, {origin_of(node)}"
            raise VerifyError(
                f"a sparse move is not what is read: {error.what}", where=where, got=error.got, expected=error.expected
            ) from error
    return frozenset(partial)


def is_sparse(node: fx.Node) -> bool:
    return node.target is ops.move and len(node.args) > 2


def sparse_source(node: fx.Node) -> fx.Node | None:
    """The value that says which rows are there of a gathered one; None where all are."""
    while node.target is ops.move:
        source: Any = node.args[0]
        if is_sparse(node):
            return None if source.meta["layout"].partial else node.args[2]  # type: ignore[return-value]
        node = source
    return None


class _Proof:
    def __init__(self, node: fx.Node, root: Root, partial: set[fx.Node]) -> None:
        self.node, self.root, self.partial = node, root, partial
        source, layout = node.args[0].meta["layout"], node.meta["layout"]  # type: ignore[union-attr]
        cut = layout if source.partial else source
        self.axes = tuple(sorted(cut.dims[0].axes, key=cut.mesh.axis_index))  # as groups stand

    def check(self) -> None:
        readers, source = self.readers(self.root(self.node.args[2])), self.node.args[0]
        assert isinstance(source, fx.Node)
        if not source.meta["layout"].partial:
            self.follow(self.node, readers)
            return
        made, layout = self.made(source)
        self.covers(readers.owners, made.owners.ends, layout, made.owners.num_rows)
        if replace(made, owners=readers.owners) != readers:
            raise VerifyError("the sum is made in other steps", got=str(made.steps), expected=str(readers.steps))

    def covers(self, owners: Owners, ends: fx.Node, layout: Layout, num_rows: int) -> None:
        owners.check(ends, layout, num_rows, self.axes)

    def readers(self, node: fx.Node) -> Readers:
        """What the value of a sparse move that says who reads is made of."""
        shape = spec_of(self.node).shape
        if node.target is not ours.row_readers.default:
            raise VerifyError("its readers are not made by row_readers", got=op_name(node.target))
        members, places, count, num_rows = node.args
        width = prod(shape) // num_rows  # type: ignore[operator]
        if count != self.node.meta["layout"].mesh.flat_size(self.axes) or prod(shape) != width * num_rows:
            raise VerifyError("its readers are of another shape", got=str(node.args[2:]), expected=str(shape))
        owners, steps = self.steps(self.root(members))
        return Readers(owners, width, steps, None if places is None else self.root(places))

    def steps(self, node: fx.Node) -> tuple[Owners, tuple[tuple[str, Any], ...]]:
        if node.target is ours.row_owners.default:
            ends, num_rows, *tables = node.args
            return Owners(self.root(ends), num_rows, *(tuple(t) for t in tables)), ()  # type: ignore[arg-type]
        operand: Any = node.args[0]
        owners, steps = self.steps(self.root(operand))
        if node.target is aten.view.default:
            (before, copies), (after, more) = spec_of(operand).shape, spec_of(node).shape
            if more != copies * (before // after):
                raise VerifyError("takes together rows that do not divide", got=f"{before} as {after}")
            return owners, (*steps, ("group", before // after))
        if node.target is aten.index.Tensor and len(node.args[1]) == 1:  # type: ignore[arg-type]
            return owners, (*steps, ("lookup", self.root(node.args[1][0])))  # type: ignore[index]
        raise VerifyError("its readers are made in an unknown way", got=op_name(node.target))

    def follow(self, node: fx.Node, readers: Readers) -> None:
        """All that reads a value of which devices have the rows of `readers`."""
        for user in node.users:
            if user.target is ours.enter_rows.default and user.args[0] is node:
                self.entered(user, spec_of(node).shape, readers)
            elif user.target is aten.index.Tensor and user.args[0] is node:
                self.placed(user, readers)
            else:
                self.partial |= set() if user.target is ops.move else {user}
                self.follow(user, self.through(node, user, readers))

    def entered(self, enter: fx.Node, shape: tuple[int, ...], readers: Readers) -> None:
        if readers.steps or readers.places or enter.args[2] != 0 or prod(shape[1:]) != readers.width:
            raise VerifyError("rows enter that are not those of its readers", got=enter.name)
        self.covers(readers.owners, self.root(enter.args[1]), enter.meta["layout"], shape[0])

    def placed(self, lookup: fx.Node, readers: Readers) -> None:
        indices, table = lookup.args[1], spec_of(lookup.args[0])  # type: ignore[arg-type]
        at: Any = indices[0] if len(indices) == 1 else None  # type: ignore[arg-type, index]
        if at is None or at.target is not ours.enter_rows.default or self.root(at.args[0]) is not readers.places:
            raise VerifyError("rows are looked up at other places", got=lookup.name)
        if readers.steps or prod(table.shape[1:]) != readers.width:
            raise VerifyError("rows of another kind are looked up", got=lookup.name)
        self.covers(readers.owners, self.root(at.args[1]), at.meta["layout"], spec_of(at).shape[0])

    def through(self, node: fx.Node, user: fx.Node, readers: Readers) -> Readers:
        """Who reads the rows of a result, where `readers` read those of its operand."""
        shape = spec_of(node).shape
        if user.target in (aten.view.default, aten._to_copy.default):
            return readers
        if user.target is ops.move and not is_sparse(user) and _is_whole(node.meta["layout"]):
            return readers
        if user.target is aten.expand.default:
            return readers.undone("group", _repeats(spec_of(user).shape, shape, readers.width))
        if user.target is aten.index_put.default and user.args[2] is node and _is_sum(user, self.root):
            if prod(shape[1:]) != readers.width:
                raise VerifyError("adds up rows of another kind", got=str(shape))
            return readers.undone("lookup", self.root(user.args[1][0]))  # type: ignore[index]
        raise VerifyError(f"{user.name} ({op_name(user.target)}) reads all rows", got=f"the rows of {readers.steps}")

    def made(self, node: fx.Node) -> tuple[Readers, Layout]:
        """Whose rows of a part of a sum are not zeros, and the layout in which their sorted rows are owned."""
        operand: Any = node.args[0]
        if node.target is ours.leave_rows.default and node.args[2] == 0:
            return self.sorted_rows(node.args[1], operand.meta["layout"], spec_of(node).shape)
        if node.target in (aten.view.default, aten._to_copy.default):
            return self.made(operand)
        if node.target is aten.sum.dim_IntList:
            made, layout = self.made(operand)
            many, dims = spec_of(operand).shape, {d % len(spec_of(operand).shape) for d in node.args[1]}  # type: ignore[union-attr]
            few = tuple(1 if d in dims else size for d, size in enumerate(many))
            return self.after(made, ("group", _repeats(many, few, made.width))), layout
        if node.target is aten.index.Tensor and len(node.args[1]) == 1:  # type: ignore[arg-type]
            made, layout = self.made(operand)
            if prod(spec_of(operand).shape[1:]) != made.width:
                raise VerifyError("looks up rows of another kind", got=node.name)
            return self.after(made, ("lookup", self.root(node.args[1][0]))), layout  # type: ignore[index]
        at: Any = node.args[1][0] if node.target is aten.index_put.default else None  # type: ignore[index]
        if at is None or at.target is not ours.enter_rows.default or not _is_sum(node, self.root):
            raise VerifyError(f"{node.name} ({op_name(node.target)}) may have rows of others", got=node.name)
        made, layout = self.sorted_rows(at.args[1], at.meta["layout"], spec_of(at).shape)
        return replace(made, width=prod(spec_of(node).shape[1:]), places=self.root(at.args[0])), layout

    def sorted_rows(self, ends: Any, layout: Layout, shape: tuple[int, ...]) -> tuple[Readers, Layout]:
        return Readers(Owners(self.root(ends), shape[0], (), (), ()), prod(shape[1:])), layout

    def after(self, made: Readers, step: tuple[str, Any]) -> Readers:
        if made.places is not None:
            raise VerifyError("rows that were added up at places are taken further", got=str(step))
        return replace(made, steps=(*made.steps, step))


def _is_whole(layout: Layout) -> bool:
    return not layout.partial and not layout.owned and all(not dim.axes for dim in layout.dims)


def _is_sum(node: fx.Node, root: Root) -> bool:
    """Whether values are added at one index along dim 0 of zeros."""
    zeros = root(node.args[0])
    is_added = len(node.args) == 4 and bool(node.args[3]) and len(node.args[1]) == 1  # type: ignore[arg-type]
    return is_added and zeros.target is aten.full.default and zeros.args[1] == 0


def _repeats(many: tuple[int, ...], few: tuple[int, ...], width: int) -> int:
    """How often each row of shape `few` stands in `many`, one after the other; 0 where it is no such form."""
    at = [d for d, (a, b) in enumerate(zip(many, few, strict=True)) if a != b]
    return many[at[0]] if len(at) == 1 and few[at[0]] == 1 and prod(many[at[0] + 1 :]) == width else 0
