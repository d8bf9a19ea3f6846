"""Runs of neighbouring collectives that become a bucket: their sizes, and those at the ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from meshweave.optimize.overlap.merge import Merger


class Runs:
    """What `Merger.buckets` reads, of collectives of a single kind in a row, each of `size` bytes."""

    buckets = Merger.buckets
    why_apart = Merger.why_apart

    def __init__(self, kind: str, count: int, size: float) -> None:
        starts = range(count)
        self.kinds = {kind: list(starts)}
        problem = SimpleNamespace(channel=[0] * count)
        self.reading = SimpleNamespace(problem=problem, rows={c: SimpleNamespace(bucket=kind) for c in starts})
        self.when = [0.0] * count
        self.bytes = size

    def size(self, start: int) -> float:
        return self.bytes

    def span(self, start: int, most: float) -> float:
        return 1.0

    def can_join(self, run: Any, start: int) -> str:
        return ""

    def sizes(self, ramp: int = 0, tail: int = 0) -> list[int]:
        return list(map(len, self.buckets(32.0, 32.0, ramp, tail)))  # type: ignore[misc]


@pytest.mark.parametrize("kind", ["reduce", "scatter", "gather"])
def test_without_ramps_runs_are_as_large_as_they_may_be(kind: str) -> None:
    assert Runs(kind, 68, 1.0).sizes() == [32, 32, 4]


@pytest.mark.parametrize("kind", ["reduce", "scatter"])
def test_the_last_reductions_are_smaller(kind: str) -> None:
    """Each takes half of what is left, down to an eighth of a bucket: nothing hides the last."""
    assert Runs(kind, 100, 1.0).sizes(tail=3) == [32, 32, 18, 9, 4, 4]
    assert Runs(kind, 8, 1.0).sizes(tail=3) == [4, 4]
    assert Runs(kind, 100, 1.0).sizes(ramp=3) == [32, 32, 32, 4]


def test_gathers_have_a_ramp_and_no_tail_of_reductions() -> None:
    assert Runs("gather", 68, 1.0).sizes(tail=3) == [32, 32, 4]
    assert Runs("gather", 80, 1.0).sizes(ramp=3) == [4, 8, 16, 26, 13, 6, 4, 3]
