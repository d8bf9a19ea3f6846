"""An order in which the roles of a pipeline can run their actions, each as a whole.

A stage goes on once it has started to send; what it receives must have been sent. So an action needs the actions of
other roles that send what it receives, and the earlier ones of its own role. Communications within a role are among
devices that run the same actions. The end of a step, in which roles meet, is not part of this order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshweave.engine.actions import Action, Schedule
from meshweave.engine.match import devices_text, match_transfer
from meshweave.engine.sections import Sections
from meshweave.errors import VerifyError
from meshweave.ir.collectives import STARTS, transfer
from meshweave.ir.graph import origin_of
from meshweave.ir.rank import RankGraph

Place = tuple[int, int]  # a role and the index of one of its actions
_JOINT = ("total", "update")  # actions in which roles meet
Message = tuple[str, int]  # the key of a transfer and a microbatch


def action_order(schedule: Schedule, sections: Sequence[Sections]) -> list[Place]:
    """The actions before the update of all roles, in an order in which they can run. Raises VerifyError if roles wait
    for each other, or if what a role sends and another receives does not match."""
    roles = [its.role for its in sections]
    sends, receives = dict[Message, list[Place]](), dict[Place, list[Message]]()
    for number, its in enumerate(sections):
        for at, action in enumerate(schedule.of_role[number]):
            if action.name not in _JOINT:
                for key, is_sender in _transfers(roles, its, action):
                    message = key, action.microbatch
                    if is_sender:
                        sends.setdefault(message, []).append((number, at))
                    else:
                        receives.setdefault((number, at), []).append(message)
    _check_matches(roles, schedule, sends, receives)
    counts, order = [0] * len(roles), list[Place]()
    ends = [sum(action.name not in _JOINT for action in actions) for actions in schedule.of_role]
    is_new = True
    while is_new:
        is_new = False
        for number in range(len(roles)):
            while counts[number] < ends[number] and not _missing(
                receives.get((number, counts[number]), ()), sends, counts
            ):
                order.append((number, counts[number]))
                counts[number] += 1
                is_new = True
    waiting = [number for number, end in enumerate(ends) if counts[number] < end]
    if waiting:
        raise _deadlock(roles, schedule, waiting, sends, receives, counts)
    return order


def _transfers(roles: Sequence[RankGraph], its: Sections, action: Action) -> list[tuple[str, bool]]:
    """The transfers of an action with other roles, with whether it sends. VerifyError for a communication in which
    stages meet."""
    transfers = []
    for node in its.nodes(action.kinds, action.stage):
        if node.target not in STARTS:
            continue
        key = str(node.args[-1])
        if node.target is not transfer:
            if not its.role.has_all_of(key):
                raise _meeting(its, action, f"group {key}", str(origin_of(node)))
            continue
        entry = match_transfer(roles, key)
        ends = [set(layout.mesh.devices) for layout in (entry.source, entry.target)]
        own = set(its.role.devices)
        if own.issuperset(ends[0] | ends[1]):
            continue
        senders = {m.sender for device in own & ends[1] for m in entry.routes.received_by(device)}
        if own & ends[0] and not own >= senders:
            raise _meeting(its, action, f"transfer {key}", str(origin_of(node)))
        transfers.append((key, bool(own & ends[0])))
    return transfers


def _meeting(its: Sections, action: Action, what: str, where: str) -> VerifyError:
    return VerifyError(
        f"stages meet in {what}",
        where=where,
        got=f"action {action} of {devices_text(its.role.devices)}",
        expected="stages on separate devices, which send values to each other",
        hint="leave out pipeline=, or place every layer on the devices of a single index of the axis (Plan.stages)",
    )


def _check_matches(
    roles: Sequence[RankGraph],
    schedule: Schedule,
    sends: Mapping[Message, Sequence[Place]],
    receives: Mapping[Place, Sequence[Message]],
) -> None:
    takers = {message: place for place, messages in receives.items() for message in messages}
    for message, place in takers.items():
        if message not in sends:
            raise _unmatched(roles, schedule, message, place, "receives what no stage sends")
    for message, (place, *_) in sends.items():
        if message not in takers:
            raise _unmatched(roles, schedule, message, place, "sends what no stage receives")


def _unmatched(
    roles: Sequence[RankGraph], schedule: Schedule, message: Message, place: Place, what: str
) -> VerifyError:
    action, (key, number) = schedule.of_role[place[0]][place[1]], message
    return VerifyError(
        f"action {action} {what}",
        where=devices_text(roles[place[0]].devices),
        got=f"transfer {key} of microbatch {number}",
        expected="both ends of every transfer, for the same microbatches",
    )


def _missing(
    messages: Sequence[Message], sends: Mapping[Message, Sequence[Place]], counts: Sequence[int]
) -> list[Place]:
    return [(role, at) for message in messages for role, at in sends[message] if counts[role] <= at]


def _deadlock(
    roles: Sequence[RankGraph],
    schedule: Schedule,
    waiting: Sequence[int],
    sends: Mapping[Message, Sequence[Place]],
    receives: Mapping[Place, Sequence[Message]],
    counts: Sequence[int],
) -> VerifyError:
    """Each role that has not come to its end, with its action and the action that it waits for."""
    lines = []
    for number in waiting:
        action = schedule.of_role[number][counts[number]]
        role, at = _missing(receives[number, counts[number]], sends, counts)[0]
        lines.append(
            f"{devices_text(roles[number].devices)} in {action} of stage {action.stage} waits for "
            f"{schedule.of_role[role][at]} of stage {schedule.of_role[role][at].stage} on "
            f"{devices_text(roles[role].devices)}"
        )
    return VerifyError(
        "stages wait for each other: a deadlock",
        where=f"schedule {schedule.name}",
        got="\n    ".join(["", *lines]),
        expected="a single order of all actions",
        hint="in the list of a rank, what sends comes before what waits for its effect",
    )
