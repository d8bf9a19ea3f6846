"""Deadlock freedom: no device waits for ever, whatever the order in which devices get on.

Every communication, collective or transfer, is taken to block its role until all roles that take part have come to it.
No runtime is stricter, so what ends here ends on every runtime. The engine's own machine runs what its own lowering
makes of the rank graphs, with a driver that answers at once. Nothing that it may run excludes anything else, so one
order of answers stands for all.

Devices of one role come to everything in one order, so devices that wait for each other in a circle do so along a
circle of roles. To look at roles is therefore enough, and the cost does not depend on the number of devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshweave.engine.lower import Lowered, lower_roles
from meshweave.engine.machine import Done, Event, EventMachine, Release, Run
from meshweave.engine.match import devices_text
from meshweave.errors import VerifyError
from meshweave.ir.graph import origin_of
from meshweave.ir.rank import RankGraph


@dataclass(frozen=True, slots=True)
class DeadlockFreedom:
    """What was proven: `num_communications` end, to which the roles come `num_starts` times in all."""

    num_roles: int
    num_devices: int
    num_communications: int
    num_starts: int


def check_deadlock(roles: Sequence[RankGraph]) -> DeadlockFreedom:
    """Raise VerifyError where devices would wait for ever: with the circle, one line per hop; else say what was proven.

    Starts that do not belong together, or to which a role never comes, are an error too.
    """
    lowered = lower_roles(roles)
    machine = EventMachine(lowered.schedule)
    events: list[Event] = [Release(0)]
    while events:
        events += [Done(a.stream, a.stop) for a in machine.handle(events.pop()) if isinstance(a, Run)]
    if machine.unfinished():
        hops = list(_hops(lowered, machine.cycle()))
        raise VerifyError(
            "devices wait for each other in a circle",
            got="\n    ".join(["", *hops]),
            expected="one order of all communications, which every role keeps to",
        )
    num_devices = sum(len(role.devices) for role in roles)
    return DeadlockFreedom(len(roles), num_devices, len(lowered.copies), sum(map(len, lowered.nodes)))


def _hops(lowered: Lowered, circle: Sequence[int]) -> Iterator[str]:
    """Who is in which communication of the circle, and who has not come to it."""
    schedule, first_copy = lowered.schedule, lowered.first_copy
    # A circle begins anywhere: here with the start of a role, which cannot begin before the copy that comes next.
    begin = next(i for i, task in enumerate(circle) if task < first_copy)
    tasks = [*circle[begin:], *circle[:begin], circle[begin]]
    waiting = tasks[0]
    for task, following in pairwise(tasks):
        if task < first_copy:
            waiting = task
        elif following < first_copy:
            stream = schedule.stream_of[waiting]
            own = next(t for t in schedule.needs[task] if schedule.stream_of[t] == stream)
            node, owners = lowered.node(own), lowered.owners[schedule.stream_of[following]]
            copy = lowered.copies[task - first_copy]
            yield (
                f"{devices_text(lowered.owners[stream])} in {copy} ({node.name}), {origin_of(node)}, "
                f"waits for {devices_text(owners)}"
            )
