"""The first cause of a failure, whatever order its consequences are told in."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from meshweave.runtime.coordinator import GRACE, Coordinator, MessageLink, late_ranks, message

BROKEN = {"what": "a connection of rank 2 has broken", "got": "reset by peer", "rank": -1}


@pytest.fixture
def links() -> Iterator[list[MessageLink]]:
    """Of three ranks to a coordinator."""
    coordinator = Coordinator(3)
    links = [MessageLink(socket.create_connection(("127.0.0.1", coordinator.port))) for _ in range(3)]
    for rank, link in enumerate(links):
        link.send(message("hello", coordinator.token, rank))
        assert link.receive() == [["hello", coordinator.token]]
    yield links
    for link in links:
        link.connection.close()
    coordinator.close()


def heard(link: MessageLink) -> dict[str, Any]:
    """The failure that a link is told, after the question where its rank is."""
    messages: list[Any] = []
    while not any(kind == "failed" for kind, *_ in messages):
        messages += link.receive() or [["failed", {}]]
    failure: dict[str, Any] = messages[-1][1]
    return failure


def test_a_broken_collective_waits_for_the_end_of_a_process(links: list[MessageLink]) -> None:
    first, dying, told = links
    told.send(message("broken", BROKEN))
    time.sleep(GRACE / 4)
    dying.connection.close()
    assert heard(first)["what"] == "rank 1 is gone"


def test_a_broken_collective_of_ranks_that_live_is_the_failure(links: list[MessageLink]) -> None:
    links[2].send(message("broken", BROKEN))
    for link in links:
        assert link.receive() == [["where"]]
        link.send(message("place", 3, {"dp of ranks 0,1,2": 5}, "is in call 2 (step)"))
    assert [heard(link) for link in links] == [BROKEN] * 3


def test_a_cause_that_is_told_later_goes_before_a_broken_collective(links: list[MessageLink]) -> None:
    cause = {"what": "rank 1 failed", "got": "ValueError: no", "rank": 1}
    links[2].send(message("broken", BROKEN))
    links[1].send(message("failed", cause))
    assert [heard(link) for link in links] == [cause] * 3


def test_a_process_that_ended_before_it_was_known_is_named() -> None:
    coordinator = Coordinator(2)
    with socket.create_connection(("127.0.0.1", coordinator.port)) as connection:
        link = MessageLink(connection)
        link.send(message("hello", coordinator.token, 0))
        assert link.receive() == [["hello", coordinator.token]]
        link.send(message("broken", BROKEN))
        failure = heard(link)
    coordinator.close()
    assert failure["what"] == "rank 1 is gone"


def test_ranks_that_have_not_come_are_found_by_what_they_have_begun() -> None:
    """Rank 4 of two stages of three ranks is in an earlier call, rank 5 is stopped; rank 3 waits for them, stage 0 for
    that stage's rows."""
    first, last, between = "m0.dp of ranks 0,1,2", "m1.dp of ranks 3,4,5", "t0 of ranks 0,1,2,3,4,5"
    places = {rank: (7, {first: 2, between: 1}, "") for rank in range(3)}
    places |= {3: (7, {between: 1, last: 1}, ""), 4: (6, {between: 1, last: 4}, "is past call 6 (step) at train.py:9")}
    failure = late_ranks(BROKEN, places, 6)
    assert failure["what"] == "ranks 4, 5 did not come to a communication"
    assert failure["got"] == "rank 4 is past call 6 (step) at train.py:9; rank 5 does not answer; reset by peer"
    assert failure["late"] == {last: (0, [4, 5]), between: (0, [4, 5])}
    assert late_ranks(BROKEN, {rank: (7, {}, "") for rank in range(6)}, 6) == BROKEN
