"""Rank graphs as task graphs: a stream per device or role, a stream per channel, and dependencies.

A communication is a task of its own, a `ChannelCopy`, between the nodes that start it and those that wait for it. It
runs in a channel: one per group of devices, and for transfers one per receiver and pair of meshes or, within a mesh,
axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import fx

from meshweave.engine.match import (
    Channel,
    Matches,
    Start,
    channel_name,
    devices_text,
    match_roles,
    match_transfer,
    plain_args,
)
from meshweave.engine.task_graph import ANY_ACTION, TaskGraph
from meshweave.errors import VerifyError
from meshweave.ir.collectives import STARTS, WAIT, transfer
from meshweave.ir.graph import op_name, origin_of
from meshweave.ir.rank import SYMBOLS, RankGraph, Transfer, members_of
from meshweave.ir.routes import Message


@dataclass(frozen=True, slots=True)
class ChannelCopy:
    """A task of a channel: a collective in a group, or the part of a transfer that a device receives.

    `sources` are the tasks that post the operands, in group order (for a transfer's senders in the order of its
    messages); `targets` the waits that get the results, in group order (a transfer has a single target). A copy between
    roles only says what is started.
    """

    op: Any
    key: str
    args: tuple[Any, ...] = ()
    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()

    def __str__(self) -> str:
        to = f" to device {self.messages[0].receiver}" if self.messages else ""
        return f"{op_name(self.op)} over {self.key}{to}"


@dataclass(frozen=True, slots=True)
class Lowered:
    """A task graph and the meaning of its tasks. Stream i runs `nodes[i]` for `owners[i]`, a device or the devices of a
    role; later streams are channels, which belong to no action, and run the `copies`, which are the last tasks, in
    order."""

    graph: TaskGraph
    owners: tuple[tuple[int, ...], ...]
    nodes: tuple[tuple[fx.Node, ...], ...]
    copies: tuple[ChannelCopy, ...]

    @property
    def first_copy(self) -> int:
        """The number of the first copy among the tasks."""
        return self.graph.num_tasks - len(self.copies)

    def node(self, task: int) -> fx.Node:
        """The node of a task; for a copy, the node that starts it."""
        start = task if task < self.first_copy else self.graph.needs[task][0]
        return self.nodes[self.graph.stream_of[start]][self.graph.index_of[start]]

    def describe(self, task: int) -> str:
        """A line for messages: what a task does, for which devices, and its source line."""
        node = self.node(task)
        if task >= self.first_copy:
            return f"{self.copies[task - self.first_copy]} ({node.name}) {origin_of(node)}"
        owner = devices_text(self.owners[self.graph.stream_of[task]])
        return f"{op_name(node.target)} ({node.name}) on {owner} {origin_of(node)}"


@dataclass(frozen=True, slots=True)
class _CopyNeeds:
    """A copy, the tasks that it needs and the tasks that need it."""

    copy: ChannelCopy
    needs: tuple[int, ...]
    users: tuple[int, ...]


def lower(
    roles: Sequence[RankGraph],
    devices: Sequence[int] | None = None,
    actions: Sequence[Sequence[Sequence[fx.Node]]] | None = None,
) -> Lowered:
    """The tasks of every device (default: all of the program's mesh). `actions[r]` are the nodes that role r runs in
    action 0, 1, ...; by default all but symbols, in action 0. Transfers from or to other devices than these (in a
    pipeline, those between stages) have no copies: whoever runs the tasks passes their values on.

    A wait needs the copies to its device, and those of a transfer that read from its device. Raises VerifyError if the
    starts of several devices do not match.
    """
    ids = tuple(roles[0].mesh.devices if devices is None else devices)
    role_of = {device: i for i, role in enumerate(roles) for device in role.devices}
    nodes = [[_run(role)] for role in roles] if actions is None else actions
    rows = [tuple(n for action in its for n in action) for its in nodes]
    is_own = cache(lambda key: _devices_of(match_transfer(roles, key)) <= set(ids))
    calls = [_calls(row, is_own) for row in rows]
    matches, numbers, streams = Matches(), list[int](), list[tuple[int, ...]]()
    for device in ids:
        role, base = role_of[device], len(numbers)
        numbers += [i for i, action in enumerate(nodes[role]) for _ in action]
        streams.append(tuple(range(base, len(numbers))))
        for at, wait, node, args in calls[role]:
            channel = (*channel_name(node), *_members(roles[role], node, device))
            matches.add(channel, device, Start(base + at, base + wait, node, (device,), args))
    planned: dict[Channel, list[_CopyNeeds]] = {}
    for channel, numbered in matches.table.items():
        if channel[0] == "group":
            matches.check(channel, {device: (device,) for device in channel[2:]})
            planned[channel] = [_collective(channel, starts) for starts in numbered]
            continue
        agreed_transfer = match_transfer(roles, channel[1])
        meshes = agreed_transfer.source.mesh, agreed_transfer.target.mesh
        takers = channel[2:] or tuple(dict.fromkeys(device for mesh in meshes for device in mesh.devices))
        matches.check(channel, {device: (device,) for device in takers})
        for starts in numbered:
            for receiver in (device for device in takers if device in agreed_transfer.target.mesh):
                line = planned.setdefault((*meshes, agreed_transfer.axes, receiver), [])
                line.append(_receive_task(channel[1], agreed_transfer, receiver, starts))
    owners = tuple((device,) for device in ids)
    return _assemble(owners, tuple(rows[role_of[d]] for d in ids), streams, numbers, list(planned.values()))


def lower_roles(roles: Sequence[RankGraph]) -> Lowered:
    """The starts of every role, under the strictest possible runtime: a role proceeds to its next start when the
    previous one has been completed by all roles in its groups, or in both meshes of a transfer.

    If this runs to its end, so does every runtime that waits for less. The cost grows with roles and nodes, not with
    devices. Raises VerifyError if the starts of several roles do not match.
    """
    rows = [tuple(n for n in role.graph.nodes if n.target in STARTS) for role in roles]
    streams, starts, total = list[tuple[int, ...]](), list[list[Start]](), 0
    for role, row in zip(roles, rows, strict=True):
        following = [*range(total + 1, total + len(row)), -1]
        starts.append([])
        for task, (node, after) in enumerate(zip(row, following, strict=False), total):
            starts[-1].append(Start(task, after, node, role.devices, plain_args(node)))
        streams.append(tuple(range(total, total + len(row))))
        total += len(row)
    matches = match_roles(roles, starts)
    planned = [[_rendezvous(channel, met) for met in numbered] for channel, numbered in matches.table.items()]
    return _assemble(tuple(role.devices for role in roles), tuple(rows), streams, [0] * total, planned)


def _members(role: RankGraph, node: fx.Node, device: int) -> tuple[int, ...]:
    """The devices within which a device's communication stays; () for a transfer between meshes, which involves all."""
    if node.target is not transfer:
        return role.group_members(str(node.args[-1]), device)
    entry = role.transfers.get(str(node.args[-1]))
    if entry is None or not entry.axes or device not in entry.target.mesh:
        return ()
    return members_of(entry.target.mesh, entry.axes, device)


def _devices_of(entry: Transfer) -> set[int]:
    """The devices at both ends of a transfer."""
    return {*entry.source.mesh.devices, *entry.target.mesh.devices}


def _calls(row: Sequence[fx.Node], is_own: Callable[[str], bool]) -> list[tuple[int, int, fx.Node, tuple[Any, ...]]]:
    """For each communication the index of its start, that of its wait, its node and its arguments; without transfers
    that are not among these devices alone."""
    index = {node: i for i, node in enumerate(row)}
    calls = []
    for at, node in enumerate(row):
        if node.target not in STARTS or (node.target is transfer and not is_own(str(node.args[-1]))):
            continue
        waits = [user for user in node.users if user.target is WAIT]
        if len(waits) != 1:
            raise VerifyError(
                f"{node.name} has {len(waits)} waits",
                where=str(origin_of(node)),
                expected="exactly one wait for every start",
            )
        calls.append((at, index[waits[0]], node, plain_args(node)))
    return calls


def _run(role: RankGraph) -> list[fx.Node]:
    """The nodes that a device of a role runs."""
    return [n for n in role.graph.nodes if n.op == "call_function" and n.target not in SYMBOLS]


def _collective(channel: Channel, starts: dict[int, Start]) -> _CopyNeeds:
    members = [starts[device] for device in channel[2:]]
    tasks, waits = tuple(s.task for s in members), tuple(s.wait for s in members)
    return _CopyNeeds(ChannelCopy(members[0].node.target, channel[1], members[0].args, tasks, waits), tasks, waits)


def _receive_task(key: str, entry: Transfer, receiver: int, starts: dict[int, Start]) -> _CopyNeeds:
    """The copy to a device of a transfer's target, which reads from its senders."""
    messages = entry.routes.received_by(receiver)
    own = starts[receiver]
    senders = [starts[device] for device in dict.fromkeys(m.sender for m in messages)]
    sources = tuple(starts[m.sender].task for m in messages)
    copy = ChannelCopy(transfer, key, (), sources, (own.wait,), messages)
    joined = tuple(dict.fromkeys([own, *senders]))
    return _CopyNeeds(copy, tuple(s.task for s in joined), tuple(s.wait for s in joined))


def _rendezvous(channel: Channel, starts: dict[int, Start]) -> _CopyNeeds:
    first, tasks = next(iter(starts.values())), tuple(s.task for s in starts.values())
    return _CopyNeeds(
        ChannelCopy(first.node.target, channel[1]), tasks, tuple(s.wait for s in starts.values() if s.wait >= 0)
    )


def _assemble(
    owners: tuple[tuple[int, ...], ...],
    nodes: tuple[tuple[fx.Node, ...], ...],
    streams: list[tuple[int, ...]],
    actions: list[int],
    channels: Sequence[Sequence[_CopyNeeds]],
) -> Lowered:
    """The task graph of the owners' streams followed by a stream per channel."""
    needs: list[list[int]] = [[] for _ in actions]
    all_actions, copies, lines = list(actions), list[ChannelCopy](), list(streams)
    for channel in channels:
        first = len(needs)
        for task, planned in enumerate(channel, first):
            copies.append(planned.copy)
            needs.append(list(planned.needs))
            all_actions.append(ANY_ACTION)
            for user in planned.users:
                needs[user].append(task)
        lines.append(tuple(range(first, len(needs))))
    graph = TaskGraph(tuple(lines), tuple(map(tuple, needs)), tuple(all_actions))
    return Lowered(graph, owners, nodes, tuple(copies))
