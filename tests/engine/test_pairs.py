"""Two actions as one: both keep their order, and what one waits for hides under the other."""

from __future__ import annotations

from random import Random

import pytest

from meshweave.engine.pairs import PairedItem, PairTurns, in_turns, turns_of_pair

Part = list[PairedItem]


def action(random: Random, size: int, share: float) -> Part:
    """Compute, and communications that take `share` of it; some are waited for at once, others later."""
    part, waiting = list[PairedItem](), list[str]()
    for number in range(size):
        part.append(PairedItem(f"c{number}", random.random()))
        part.append(PairedItem(f"s{number}", 0.0, share * random.random()))
        waiting.append(f"s{number}")
        while waiting and random.random() < 0.7:
            start = waiting.pop(0)
            part.append(PairedItem(f"w{start}", start=start))
    part += [PairedItem(f"w{start}", start=start) for start in waiting]
    return [*part, PairedItem("end", random.random())]


def seconds(parts: list[Part], turns: PairTurns) -> float:
    """By another clock than the search: items one after the other, communications in a channel."""
    now = channel = 0.0
    arrivals: dict[tuple[int, str], float] = {}
    for which, item in in_turns(parts, turns, lambda item: item.name):
        now = max(now, arrivals.get((which, item.start), 0.0)) + item.seconds
        if item.communication is not None:
            channel = max(channel, now) + item.communication
            arrivals[which, item.name] = channel
    return now


@pytest.mark.parametrize("seed", range(20))
def test_each_keeps_its_order_and_both_together_take_less(seed: int) -> None:
    random = Random(seed)
    parts = [action(random, random.randrange(1, 12), 0.8) for _ in range(2)]
    turns = turns_of_pair(parts)
    items = [*in_turns(parts, turns, lambda item: item.name)]
    assert [[item for which, item in items if which == number] for number in range(2)] == parts
    one_by_one = seconds(parts, ((0, ""), (1, "")))
    least = sum(item.seconds for part in parts for item in part)
    assert least <= seconds(parts, turns) <= one_by_one + 1e-9
    assert turns_of_pair(parts) == turns


def test_what_can_hide_does() -> None:
    """Equal actions with communications shorter than the compute between them, as layers with experts have."""
    part = [
        item
        for number in range(8)
        for item in (
            PairedItem(f"c{number}", 1.0),
            PairedItem(f"s{number}", 0.0, 0.9),
            PairedItem(f"w{number}", start=f"s{number}"),
        )
    ]
    parts = [part, part]
    assert seconds(parts, ((0, ""), (1, ""))) == pytest.approx(2 * 8 * 1.9)
    assert seconds(parts, turns_of_pair(parts)) == pytest.approx(16.9)  # only the last has nothing to hide under


def test_actions_without_communication_run_one_behind_the_other() -> None:
    parts = [[PairedItem("a", 1.0)], [PairedItem("b", 2.0)]]
    assert seconds(parts, turns_of_pair(parts)) == 3.0
    assert {which for which, _ in turns_of_pair(parts)} == {0, 1}
    assert turns_of_pair([[], [PairedItem("b", 2.0)]])[-1] == (1, "")
