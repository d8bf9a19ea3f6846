"""Deadlock freedom: no device waits for ever, in whatever order devices proceed.

Every communication, collective or transfer, is assumed to block its role until all its roles have reached it. No
runtime is stricter, so a program that ends here ends on every runtime. Tasks that may run never exclude each other, so
a single order of the lowered rank graphs represents all. Devices of the same role reach all communications in the same
order, so a cycle of waiting devices gives a cycle of roles. It is therefore enough to consider roles, and the cost does
not depend on the number of devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshweave.engine.lower import Lowered, lower_roles
from meshweave.engine.match import devices_text
from meshweave.engine.task_graph import cycle, run_order
from meshweave.errors import VerifyError
from meshweave.ir.graph import origin_of
from meshweave.ir.rank import RankGraph


@dataclass(frozen=True, slots=True)
class DeadlockFreedom:
    """What was proven: `num_communications` end, which the roles reach `num_starts` times in total."""

    num_roles: int
    num_devices: int
    num_communications: int
    num_starts: int


def check_deadlock(roles: Sequence[RankGraph]) -> DeadlockFreedom:
    """Raise VerifyError if devices would wait for ever, with the cycle, a line per hop; else return what was proven.
    Starts that do not match, or that a role never reaches, are an error too."""
    lowered = lower_roles(roles)
    if circle := cycle(lowered.graph, run_order(lowered.graph)):
        hops = list(_hops(lowered, circle))
        raise VerifyError(
            "devices wait for each other in a circle",
            got="\n    ".join(["", *hops]),
            expected="a single order of all communications on every role",
        )
    num_devices = sum(len(role.devices) for role in roles)
    return DeadlockFreedom(len(roles), num_devices, len(lowered.copies), sum(map(len, lowered.nodes)))


def _hops(lowered: Lowered, circle: Sequence[int]) -> Iterator[str]:
    """Which roles are in which communication of the cycle, and which have not reached it."""
    graph, first_copy = lowered.graph, lowered.first_copy
    # A cycle has no beginning: list it from the start of a role, which cannot begin before the next copy.
    begin = next(i for i, task in enumerate(circle) if task < first_copy)
    tasks = [*circle[begin:], *circle[:begin], circle[begin]]
    waiting = tasks[0]
    for task, following in pairwise(tasks):
        if task < first_copy:
            waiting = task
        elif following < first_copy:
            stream = graph.stream_of[waiting]
            own = next(t for t in graph.needs[task] if graph.stream_of[t] == stream)
            node, owners = lowered.node(own), lowered.owners[graph.stream_of[following]]
            copy = lowered.copies[task - first_copy]
            yield (
                f"{devices_text(lowered.owners[stream])} in {copy} ({node.name}), {origin_of(node)}, "
                f"waits for {devices_text(owners)}"
            )
