"""Matches the starts of communications: the k-th of every process on a channel belong together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from meshweave.errors import VerifyError
from meshweave.ir.collectives import transfer
from meshweave.ir.graph import op_name, origin_of
from meshweave.ir.rank import SYMBOLS, RankGraph, Transfer, members_of

Channel = tuple[Any, ...]  # identity of a channel: "group" or "transfer", its key, the members of a group


@dataclass(frozen=True, slots=True)
class Start:
    """A communication as a process starts it, by task `task`. Task `wait` waits for it, unless negative."""

    task: int
    wait: int
    node: fx.Node
    devices: tuple[int, ...]  # of the process
    args: tuple[Any, ...]  # of the node, in the form of `plain_args`

    def __str__(self) -> str:
        shown = ", ".join(map(_argument_text, (*self.args, self.node.args[-1])))
        return f"{self.node.name} = {op_name(self.node.target)}({shown}) on {devices_text(self.devices)}"


@dataclass(slots=True)
class Matches:
    """For each channel and number, the starts by process."""

    table: dict[Channel, list[dict[int, Start]]] = field(default_factory=dict)
    _counts: dict[tuple[Channel, int], int] = field(default_factory=dict)

    def add(self, channel: Channel, process: int, start: Start) -> None:
        """Match a start with those of the other processes that have the same number on its channel."""
        count = self._counts.get((channel, process), 0)
        self._counts[channel, process] = count + 1
        numbered = self.table.setdefault(channel, [])
        if count == len(numbered):
            numbered.append({})
        numbered[count][process] = start

    def check(self, channel: Channel, processes: Mapping[int, tuple[int, ...]]) -> None:
        """Raise VerifyError unless all of the processes (with their devices) have every start of a channel, and equal
        ones."""
        for number, starts in enumerate(self.table[channel]):
            first = next(iter(starts.values()))
            missing = [process for process in processes if process not in starts]
            if missing:
                raise self._missing(channel, number, first, processes[missing[0]], missing[0])
            for process, start in starts.items():
                if process not in processes:
                    raise VerifyError(
                        f"{devices_text(start.devices)} takes part in {_name(channel)} but is not a member",
                        where=_where(start),
                        got=str(start),
                        expected=f"only {devices_text(sorted({d for ids in processes.values() for d in ids}))}",
                    )
                if start.node is not first.node and (start.node.target, start.args) != (first.node.target, first.args):
                    raise VerifyError(
                        f"start {number + 1} of {_name(channel)} differs between its devices",
                        where=_where(start),
                        got=str(start),
                        expected=f"{first}, {_where(first)}",
                    )

    def _missing(
        self, channel: Channel, number: int, there: Start, devices: tuple[int, ...], process: int
    ) -> VerifyError:
        """The error for a process that has fewer starts than another, with the last start that it has."""
        numbered = self.table[channel]
        last = numbered[number - 1].get(process) if number else None
        return VerifyError(
            f"{devices_text(devices)} does not take part in start {number + 1} of {_name(channel)}",
            where=_where(there),
            got=f"last {last}, {_where(last)}" if last is not None else "no start of it there",
            expected=f"as many as {devices_text(there.devices)} has: {there}",
        )


def match_roles(roles: Sequence[RankGraph], starts: Sequence[Iterable[Start]]) -> Matches:
    """The starts of all roles, in the order of each: a role takes part in a communication as a whole, and meets the
    roles that have devices in the same groups, or in the meshes of a transfer. Raises VerifyError if they do not match.
    """
    matches = Matches()
    channels: dict[tuple[int, Channel], Channel] = {}
    for number, its in enumerate(starts):
        for start in its:
            name = channel_name(start.node)
            if (number, name) not in channels:
                channels[number, name] = _role_channel(number, name, roles)
            matches.add(channels[number, name], number, start)
    for channel in matches.table:
        matches.check(channel, _roles_of(channel, roles))
    return matches


def channel_name(start: fx.Node) -> Channel:
    """The channels of a start, without the devices that tell them apart."""
    return ("transfer" if start.target is transfer else "group", str(start.args[-1]))


def _role_channel(number: int, channel: Channel, roles: Sequence[RankGraph]) -> Channel:
    """The channel with the devices of its roles, if those are not all devices of its mesh: groups of a name that stay
    within some roles do not concern the others."""
    kind, key = channel
    if kind == "group":
        mesh, axes = roles[number].group_axes(key)
    else:
        entry = match_transfer(roles, key)
        mesh, axes = entry.target.mesh, entry.axes
        if not axes or roles[number].devices[0] not in mesh:
            return channel
    everyone = [d for role in roles for d in role.devices if d in mesh]
    reached: set[int] = set()
    waiting = set(roles[number].devices)
    while waiting:
        reached |= waiting
        met = {d for device in waiting for d in members_of(mesh, axes, device)}
        waiting = {d for role in roles if not met.isdisjoint(role.devices) for d in role.devices} - reached
    return channel if reached.issuperset(everyone) else (*channel, *sorted(reached))


def _roles_of(channel: Channel, roles: Sequence[RankGraph]) -> dict[int, tuple[int, ...]]:
    """Number and devices of the roles that take part in a channel. A single device of a role represents all: they are
    in the same meshes."""
    kind, key, *devices = channel
    places: list[Any] = [devices]
    if not devices and kind == "group":
        places = [roles[0].group_axes(key)[0]]
    elif not devices:
        entry = match_transfer(roles, key)
        places = [entry.source.mesh, entry.target.mesh]
    return {i: role.devices for i, role in enumerate(roles) if any(role.devices[0] in place for place in places)}


def match_transfer(roles: Sequence[RankGraph], key: str) -> Transfer:
    """A transfer as all roles describe it. Raises VerifyError if two of them differ."""
    entries = [(role, role.transfers[key]) for role in roles if key in role.transfers]
    if not entries:
        raise VerifyError(f"no role has transfer {key}")
    first, entry = entries[0]
    for role, other in entries:
        if other != entry:
            raise VerifyError(
                f"two roles have different transfers {key}",
                got=f"{_boxes_text(other)} (so {devices_text(role.devices)})",
                expected=f"{_boxes_text(entry)} (so {devices_text(first.devices)})",
            )
    return entry


def plain_args(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of a start without operand and group, with symbols written out, so that those of two graphs can be
    compared; a tensor is replaced by its node."""
    return tuple(_plain(arg) for arg in node.args[1:-1])


def _plain(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return (value.target, *(map(_plain, value.args) if value.target in SYMBOLS else ()))
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value


def _argument_text(value: Any) -> str:
    if isinstance(value, tuple) and value and callable(value[0]):
        return f"{op_name(value[0])}({', '.join(map(_argument_text, value[1:]))})"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_argument_text, value)) + "]"
    return str(value)


def devices_text(devices: Sequence[int]) -> str:
    """`device 3`, `devices 0, 1`, or the first few of many."""
    shown = ", ".join(map(str, devices[:4])) + (f", ... ({len(devices)})" if len(devices) > 4 else "")
    return f"device{'s' * (len(devices) > 1)} {shown}"


def _where(start: Start) -> str:
    return str(origin_of(start.node))


def _name(channel: Channel) -> str:
    kind, key, *members = channel
    return f"{kind} {key}" + (f" {members}" if members else "")


def _boxes_text(entry: Transfer) -> str:
    ends = (f"{layout} on {devices_text(layout.mesh.devices)}" for layout in (entry.source, entry.target))
    within = f" within groups of {', '.join(entry.axes)}" if entry.axes else ""
    return f"{entry.spec} from {' to '.join(ends)}{within}"
