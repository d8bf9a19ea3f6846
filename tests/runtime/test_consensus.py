"""Turns of an exchange through a store that ends while ranks wait."""

from __future__ import annotations

import pytest

from meshweave.errors import MeshweaveError, StepError
from meshweave.runtime.consensus import Exchange


class EndedStore:
    """A store that answers until it is asked for the verdict: its server has ended."""

    def add(self, key: str, number: int) -> int:
        return 1

    def set(self, key: str, value: str) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


def test_a_store_that_has_ended_is_an_error_that_says_so() -> None:
    with pytest.raises(MeshweaveError, match="cannot be reached"):
        Exchange(EndedStore(), 1, (0, 1)).exchange(None, lambda answers: None)


def test_a_failure_that_is_known_is_raised_instead_of_what_it_does_to_the_store() -> None:
    """Rank 0 serves the store, and leaves as soon as the others know of the failure."""

    def check() -> None:
        raise StepError("ranks make different calls")

    with pytest.raises(StepError, match="different calls"):
        Exchange(EndedStore(), 1, (0, 1), check=check).exchange(None, lambda answers: None)
