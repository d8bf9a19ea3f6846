"""Random valid schedules, and ways to break them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from meshweave.engine.actions import Action, Schedule
from meshweave.engine.schedules import with_communication, with_gathers
from meshweave.engine.sections import Kind

Rows = list[list[Action]]


def random_schedule(seed: int) -> Schedule:
    """Stages anywhere, backwards whole or in parts, in an order in which they ran at random; messages or none."""
    chance = random.Random(seed)
    ranks, microbatches = chance.randint(2, 5), chance.randint(1, 6)
    placement = [*range(ranks), *(chance.randrange(ranks) for _ in range(chance.randint(0, 2 * ranks)))]
    chance.shuffle(placement)
    last = len(placement) - 1
    is_split = {(s, m): chance.random() < 0.5 for s in range(last + 1) for m in range(microbatches)}
    rows: Rows = [[] for _ in range(ranks)]
    ready: list[tuple[Kind, int, int]] = [("forward", 0, m) for m in range(microbatches)]
    while ready:
        kind, stage, m = ready.pop(chance.randrange(len(ready)))
        rows[placement[stage]].append(Action((kind,), m, stage))
        if kind == "weight":
            continue
        if kind == "input":
            ready.append(("weight", stage, m))
        if kind == "forward" and stage < last:
            ready.append(("forward", stage + 1, m))
        elif kind == "forward" or stage > 0:
            onward = stage if kind == "forward" else stage - 1
            ready.append(("input" if is_split[onward, m] else "backward", onward, m))
    schedule = Schedule("random", tuple(map(tuple, rows)))
    if chance.random() < 0.5:
        times = [chance.choice([0.5, 1.0, 2.0]) for _ in range(4)]
        schedule = with_communication(schedule, F=times[0], B=times[1], W=times[2], comm=times[3])
    return with_gathers(schedule) if chance.random() < 0.3 else schedule


def _indices(rows: Rows, fits: Callable[[Action], bool]) -> list[tuple[int, int]]:
    return [(rank, at) for rank, row in enumerate(rows) for at, action in enumerate(row) if fits(action)]


def _has(*kinds: Kind) -> Callable[[Action], bool]:
    return lambda action: not {*kinds}.isdisjoint(action.kinds)


def _drop(*kinds: Kind) -> Callable[[Rows, random.Random], bool]:
    def run(rows: Rows, chance: random.Random) -> bool:
        places = _indices(rows, _has(*kinds))
        if places:
            rank, at = chance.choice(places)
            del rows[rank][at]
        return bool(places)

    return run


def _double(rows: Rows, chance: random.Random) -> bool:
    rank, at = chance.choice(_indices(rows, _has("forward", "backward", "weight", "input")))
    rows[rank].insert(chance.randint(at, len(rows[rank])), rows[rank][at])
    return True


def _reverse_need(rows: Rows, chance: random.Random) -> bool:
    """A forward behind the backward of its own microbatch."""
    rank, at = chance.choice(_indices(rows, _has("forward")))
    action = rows[rank].pop(at)
    same = [i for i, a in enumerate(rows[rank]) if (a.stage, a.microbatch) == (action.stage, action.microbatch)]
    rows[rank].insert(1 + next(i for i in reversed(same) if _has("backward", "input")(rows[rank][i])), action)
    return True


def _late_send(rows: Rows, chance: random.Random) -> bool:
    """A send of activations behind what needs the gradient that comes back for them."""
    places = _indices(rows, _has("send_forward"))
    if not places:
        return False
    rank, at = chance.choice(places)
    action = rows[rank].pop(at)
    same = [i for i, a in enumerate(rows[rank]) if (a.stage, a.microbatch) == (action.stage, action.microbatch)]
    rows[rank].insert(max(same) + 1, action)
    return True


def _wrong_stage(rows: Rows, chance: random.Random) -> bool:
    places = _indices(rows, _has("receive_forward", "receive_backward", "send_forward", "send_backward"))
    if not places:
        return False
    rank, at = chance.choice(places)
    action = rows[rank][at]
    rows[rank][at] = replace(action, stage=action.stage + chance.choice([-1, 1, 2]))
    return True


def _wrong_rank(rows: Rows, chance: random.Random) -> bool:
    rank, at = chance.choice(_indices(rows, _has("forward", "backward", "input", "weight", "send_forward")))
    action = rows[rank].pop(at)
    other = chance.choice([r for r in range(len(rows)) if r != rank])
    rows[other].insert(chance.randint(0, len(rows[other])), action)
    if not rows[rank]:
        rows[rank].append(action)
    return True


def _no_stage(rows: Rows, chance: random.Random) -> bool:
    """A stage that nobody holds: the others keep their numbers."""
    stages = {a.stage for row in rows for a in row}
    if len(stages) < 3:
        return False
    stage = chance.choice(sorted(stages)[:-1])
    rows[:] = [[a for a in row if a.stage != stage] for row in rows]
    return True


def _edges(rows: Rows, step: Mapping[Kind, int]) -> dict[tuple[int, int], list[Action]]:
    """By rank and peer the actions of these kinds, whose peer's stage is so many later, in order."""
    rank_of = {a.stage: r for r, row in enumerate(rows) for a in row if _has("forward")(a)}
    edges: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if action.kinds[0] in step:
                edges.setdefault((rank, rank_of[action.stage + step[action.kinds[0]]]), []).append(action)
    return edges


def _swap_receives(rows: Rows, chance: random.Random) -> bool:
    """Two receives of a directed edge in another order than they are sent."""
    edges = _edges(rows, {"receive_forward": -1, "receive_backward": 1})
    pairs = [(rank, *pair) for (rank, _), actions in edges.items() for pair in pairwise(actions)]
    if not pairs:
        return False
    rank, *pair = chance.choice(pairs)
    first, second = map(rows[rank].index, pair)
    rows[rank][first], rows[rank][second] = rows[rank][second], rows[rank][first]
    return True


def keeps_order_of_sends(rows: Rows) -> bool:
    """Whether messages of each directed edge are received in the order in which they are sent."""
    sends = _edges(rows, {"send_forward": 1, "send_backward": -1})
    receives = _edges(rows, {"receive_forward": -1, "receive_backward": 1})
    name = lambda a: (a.kinds[0].removeprefix("send_").removeprefix("receive_"), a.microbatch)  # noqa: E731
    step = {"send_forward": 1, "send_backward": -1}
    return all(
        [(*name(a), a.stage + step[a.kinds[0]]) for a in actions] == [(*name(a), a.stage) for a in receives[peer, rank]]
        for (rank, peer), actions in sends.items()
    )


BREAKS: dict[str, Callable[[Rows, random.Random], bool]] = {
    "a dropped send": _drop("send_forward", "send_backward"),
    "a dropped receive": _drop("receive_forward", "receive_backward"),
    "a missing action": _drop("forward", "backward", "input", "weight"),
    "a doubled action": _double,
    "a need reversed": _reverse_need,
    "a send that comes too late": _late_send,
    "a message of the wrong stage": _wrong_stage,
    "an action on the wrong rank": _wrong_rank,
    "a stage that nobody holds": _no_stage,
    "receives in another order": _swap_receives,
}


def broken(schedule: Schedule, how: str, seed: int) -> Schedule | None:
    """The schedule broken in this way; None if it cannot be."""
    rows = [list(actions) for actions in schedule.of_role]
    if not BREAKS[how](rows, random.Random(seed)):
        return None
    return Schedule(schedule.name, tuple(map(tuple, rows)))


def runs_under_blocking_receives(rows: Sequence[Sequence[Action]]) -> bool:
    """Whether ranks that run their actions in order, one by one, come to the end: a second implementation, which knows
    only what each action waits for."""
    ran: set[tuple[Kind, int, int]] = set()
    at = [0] * len(rows)
    last = max(a.stage for row in rows for a in row)
    rank_of = {a.stage: r for r, row in enumerate(rows) for a in row if _has("forward")(a)}
    has_messages = any(_has("send_forward", "send_backward")(a) for row in rows for a in row)

    def backward(stage: int, m: int) -> bool:
        return ("backward", stage, m) in ran or ("input", stage, m) in ran

    def may_run(kind: Kind, s: int, m: int) -> bool:
        is_remote = has_messages and rank_of.get(s - 1 if kind == "forward" else s + 1) != rank_of[s]
        if kind == "forward":
            return s == 0 or (("receive_forward", s, m) if is_remote else ("forward", s - 1, m)) in ran
        if kind in ("backward", "input"):
            onward = s == last or (("receive_backward", s, m) in ran if is_remote else backward(s + 1, m))
            return onward and ("forward", s, m) in ran
        return {
            "weight": lambda: ("input", s, m) in ran,
            "send_forward": lambda: ("forward", s, m) in ran,
            "send_backward": lambda: backward(s, m),
            "receive_forward": lambda: ("send_forward", s - 1, m) in ran,
            "receive_backward": lambda: ("send_backward", s + 1, m) in ran,
        }.get(kind, lambda: True)()

    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and all(
                may_run(kind, row[at[rank]].stage, row[at[rank]].microbatch) for kind in row[at[rank]].kinds
            ):
                ran |= {(kind, row[at[rank]].stage, row[at[rank]].microbatch) for kind in row[at[rank]].kinds}
                at[rank] += 1
                progress = True
    return all(position == len(row) for position, row in zip(at, rows, strict=True))
