"""The first cause of a failure, whatever order its consequences are told in."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from meshweave.runtime.hub import GRACE, Hub, MessageLink, message

BROKEN = {"what": "a connection of rank 2 has broken", "got": "reset by peer", "rank": -1}


@pytest.fixture
def links() -> Iterator[list[MessageLink]]:
    """Of three ranks to a hub."""
    hub = Hub(3)
    links = [MessageLink(socket.create_connection(("127.0.0.1", hub.port))) for _ in range(3)]
    for rank, link in enumerate(links):
        link.send(message("hello", hub.token, rank))
        assert link.receive() == [["hello", hub.token]]
    yield links
    for link in links:
        link.connection.close()
    hub.close()


def test_a_broken_collective_waits_for_the_end_of_a_process(links: list[MessageLink]) -> None:
    first, dying, told = links
    told.send(message("broken", BROKEN))
    time.sleep(GRACE / 4)
    dying.connection.close()
    kind, failure = first.receive()[0]  # type: ignore[index]
    assert (kind, failure["what"]) == ("failed", "rank 1 is gone")


def test_a_broken_collective_of_ranks_that_live_is_the_failure(links: list[MessageLink]) -> None:
    links[2].send(message("broken", BROKEN))
    assert [link.receive() for link in links] == [[["failed", BROKEN]]] * 3


def test_a_cause_that_is_told_later_goes_before_a_broken_collective(links: list[MessageLink]) -> None:
    cause = {"what": "rank 1 failed", "got": "ValueError: no", "rank": 1}
    links[2].send(message("broken", BROKEN))
    links[1].send(message("failed", cause))
    assert [link.receive() for link in links] == [[["failed", cause]]] * 3


def test_a_process_that_ended_before_it_was_known_is_named() -> None:
    hub = Hub(2)
    with socket.create_connection(("127.0.0.1", hub.port)) as connection:
        link = MessageLink(connection)
        link.send(message("hello", hub.token, 0))
        assert link.receive() == [["hello", hub.token]]
        link.send(message("broken", BROKEN))
        kind, failure = link.receive()[0]  # type: ignore[index]
    hub.close()
    assert (kind, failure["what"]) == ("failed", "rank 1 is gone")
