"""A job of several processes: the second start loads the program of the first, and trains alike."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import pytest
from tests.processes import Job
from tests.test_default_passes import batch, compiled

from meshweave import build
from meshweave.runtime.session import RunOptions


def job_twice(pipe: Connection) -> list[dict[str, Any]]:
    """By passes, all of two steps compiled one after the other."""
    found = []
    for passes in (None, "none"):
        with patch.object(build, "expand", wraps=build.expand) as expand:
            run = RunOptions(backend="eager")
            steps = [compiled("tp=2", profile="cpu-gloo", passes=passes, run=run) for _ in range(2)]
        losses = [[float(step(batch())) for _ in range(3)] for step in steps]
        notes = [step.program.storage for step in steps]
        found.append({"losses": losses, "num_expanded": expand.call_count, "notes": notes})
    return found


@pytest.mark.multiprocess
def test_the_second_start_of_a_job_loads_its_program(start: Callable[..., Job]) -> None:
    first, second = start("tests.stored.test_job:job_twice", 2).finish(240)
    assert "error" not in first, first
    assert first == second
    for found in first:
        assert found["num_expanded"] == 1
        assert found["losses"][0] == found["losses"][1]
        assert found["notes"] == ["", ""]
