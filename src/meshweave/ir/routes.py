"""Routes: which device sends which box to which, when a value moves from a mesh to another or within a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heapify, heapreplace

import numpy as np

from meshweave.errors import LayoutError
from meshweave.ir.layout import Layout
from meshweave.ir.pieces import Box


@dataclass(frozen=True, slots=True)
class Message:
    """`box` of the global index space goes from a device to another; if both are the same it stays and is free."""

    sender: int
    receiver: int
    box: Box


_Table = dict[int, tuple[Message, ...]]
_Span = tuple[int, int]  # offset and size along a dim
_Tile = tuple[int, int, tuple[int, ...], tuple[int, ...]]  # indices of the pieces of source and target, offset, size


@dataclass(frozen=True, slots=True)
class Routes:
    """The messages of a transfer or permute.

    Invariants: the boxes of the messages to a device are not empty, do not overlap and fill its piece of the target;
    each is inside the sender's piece of the source; a device never receives elements that it has in the source.
    """

    messages: tuple[Message, ...]
    _sent: _Table = field(init=False, repr=False, compare=False)
    _received: _Table = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        sent: dict[int, list[Message]] = {}
        received: dict[int, list[Message]] = {}
        for message in self.messages:
            sent.setdefault(message.sender, []).append(message)
            received.setdefault(message.receiver, []).append(message)
        object.__setattr__(self, "_sent", {device: tuple(routes) for device, routes in sent.items()})
        object.__setattr__(self, "_received", {device: tuple(routes) for device, routes in received.items()})

    def sent_by(self, device: int) -> tuple[Message, ...]:
        """What the device sends, including to itself."""
        return self._sent.get(device, ())

    def received_by(self, device: int) -> tuple[Message, ...]:
        """What the device receives, including from itself: together its piece of the target."""
        return self._received.get(device, ())

    @property
    def is_local(self) -> bool:
        """Whether nothing is sent between devices."""
        return all(message.sender == message.receiver for message in self.messages)

    def bytes_received(self, device: int, itemsize: int) -> int:
        """Bytes that the device receives from others."""
        return itemsize * sum(m.box.num_elements for m in self.received_by(device) if m.sender != device)


@lru_cache(maxsize=512)
def routes(source: Layout, target: Layout, shape: tuple[int, ...]) -> Routes:
    """How a value of `shape` gets from `source` to `target`, on any two meshes. Deterministic.

    The pieces are cut into tiles, each inside a piece of the source and a piece of the target. A device of the target
    that has a tile in the source keeps it. Any other gets it from the holder that has sent the least so far; ties go to
    the holder with the receiver's index among the receivers (modulo their number). So n replicas that send to n
    replicas pair up. Time and size grow with the number of messages.

    Raises LayoutError for a partial layout and for a wrong number of dims."""
    start, goal = source.normalized(shape), target.normalized(shape)
    for layout in (start, goal):
        if layout.partial:
            raise LayoutError(
                "a partial value cannot go to another mesh",
                where=f"{source} -> {target}",
                got=str(layout),
                expected="no partial axes",
                hint="reduce it on its own mesh first",
            )
    holders, receivers, sent = _devices_by_piece(start), _devices_by_piece(goal), dict.fromkeys(start.mesh.devices, 0)
    messages: list[Message] = []
    for piece, wanted, box in _tiles(start, goal, shape):
        messages += _deal(holders[piece], receivers[wanted], box, sent)
    return Routes(tuple(messages))


@lru_cache(maxsize=512)
def routes_within(source: Layout, target: Layout, shape: tuple[int, ...], axes: tuple[str, ...]) -> Routes:
    """How a value of `shape` gets from `source` to `target` on a mesh if devices send only inside their group of the
    flattened `axes`. Deterministic.

    A value may be partial over other axes, because all members of a group have the same contributions. Tiles are
    assigned to holders as in `routes`, inside the group. Time grows with the number of devices and messages.

    Raises LayoutError if the target needs another mesh, another partial axis or a piece from outside the group."""
    start, goal = source.normalized(shape), target.normalized(shape)
    if start.mesh != goal.mesh or start.partial != goal.partial or set(axes) & set(start.partial_axes):
        raise _not_within(source, target, axes)
    groups = start.mesh.groups(sorted(axes, key=start.mesh.axis_index))
    group_of = {device: number for number, group in enumerate(groups) for device in group}
    holders, receivers = (
        [_by_group(devices, group_of) for devices in _devices_by_piece(layout)] for layout in (start, goal)
    )
    messages, sent = list[Message](), dict.fromkeys(start.mesh.devices, 0)
    for piece, wanted, box in _tiles(start, goal, shape):
        for group, devices in receivers[wanted].items():
            if group not in holders[piece]:
                raise _not_within(source, target, axes)
            messages += _deal(holders[piece][group], devices, box, sent)
    return Routes(tuple(messages))


def _by_group(devices: Iterable[int], group_of: dict[int, int]) -> dict[int, list[int]]:
    groups: dict[int, list[int]] = {}
    for device in devices:
        groups.setdefault(group_of[device], []).append(device)
    return groups


def _not_within(source: Layout, target: Layout, axes: tuple[str, ...]) -> LayoutError:
    return LayoutError(
        "the pieces cannot be exchanged inside groups of these axes",
        where=f"{source} -> {target}",
        got=f"groups of {', '.join(axes)}",
        expected="the same mesh and partial axes, and every piece inside the group that needs it",
    )


def _devices_by_piece(layout: Layout) -> list[list[int]]:
    """The devices that have each piece, in mesh order. Pieces are numbered in row-major order of the dims."""
    mesh, axes = layout.mesh, layout.sharded_axes
    rest = [axis for axis in mesh.axis_names if axis not in axes]
    order = [mesh.axis_index(axis) for axis in (*axes, *rest)]
    ids = np.array(mesh.devices).reshape(mesh.shape).transpose(order)
    return ids.reshape(mesh.flat_size(axes), -1).tolist()


def _tiles(source: Layout, target: Layout, shape: tuple[int, ...]) -> Iterator[tuple[int, int, Box]]:
    """Every common box of a piece of the source and a piece of the target, with the indices of these pieces."""
    tiles: Iterable[_Tile] = [(0, 0, (), ())]
    for d, size in enumerate(shape):
        tiles = _cut(tiles, source.spans(d, size), target.spans(d, size))
    return ((piece, wanted, Box(offset, size)) for piece, wanted, offset, size in tiles)


def _cut(tiles: Iterable[_Tile], before: list[_Span], after: list[_Span]) -> Iterator[_Tile]:
    """The tiles cut along another dim, which the source has in pieces `before` and the target in pieces `after`."""
    overlaps, m, n = _overlaps(before, after), len(before), len(after)
    return ((p * m + i, w * n + j, (*lo, o), (*to, s)) for p, w, lo, to in tiles for i, j, o, s in overlaps)


def _overlaps(before: list[_Span], after: list[_Span]) -> list[tuple[int, int, int, int]]:
    """(index before, index after, offset, size) of all intersections of two ways to cut the same dim, in order."""
    overlaps, i, j = [], 0, 0
    while i < len(before) and j < len(after):
        start = max(before[i][0], after[j][0])
        end_before, end_after = sum(before[i]), sum(after[j])
        if start < min(end_before, end_after):
            overlaps.append((i, j, start, min(end_before, end_after) - start))
        i, j = i + (end_before <= end_after), j + (end_after <= end_before)
    return overlaps


def _deal(holders: list[int], receivers: list[int], box: Box, sent: dict[int, int]) -> list[Message]:
    """The messages that send a tile to all its receivers; adds to `sent` the elements that each device sends."""
    if len(holders) == 1:  # it is the only holder of its whole piece: its load does not matter
        return [Message(holders[0], receiver, box) for receiver in receivers]
    here, size = frozenset(holders), box.num_elements
    messages, queue = [], [(sent[device], index) for index, device in enumerate(holders)]
    heapify(queue)
    for index, receiver in enumerate(receivers):
        if receiver in here:
            messages.append(Message(receiver, receiver, box))
            continue
        while sent[holders[queue[0][1]]] != queue[0][0]:
            heapreplace(queue, (sent[holders[queue[0][1]]], queue[0][1]))
        least, first = queue[0]
        opposite = holders[index % len(holders)]
        sender = opposite if sent[opposite] == least else holders[first]
        sent[sender] += size
        messages.append(Message(sender, receiver, box))
    return messages
