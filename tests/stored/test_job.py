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
from meshweave.runtime.cluster import shutdown
from meshweave.runtime.session import RunOptions


def job_twice(pipe: Connection, passes: str | None) -> dict[str, Any]:
    with patch.object(build, "expand", wraps=build.expand) as expand:
        steps = [compiled("tp=2", profile="cpu-gloo", passes=passes, run=RunOptions(backend="eager")) for _ in range(2)]
        num_expanded = expand.call_count
    losses = [[float(step(batch())) for _ in range(3)] for step in steps]
    notes = [step.program.storage for step in steps]
    shutdown(steps[0].session.world)
    return {"losses": losses, "num_expanded": num_expanded, "notes": notes}


@pytest.mark.multiprocess
@pytest.mark.parametrize("passes", [None, "none"])
def test_the_second_start_of_a_job_loads_its_program(start: Callable[..., Job], passes: str | None) -> None:
    first, second = start("tests.stored.test_job:job_twice", 2, passes).finish(240)
    assert "error" not in first, first
    assert first == second
    assert first["num_expanded"] == 1
    assert first["losses"][0] == first["losses"][1]
    assert first["notes"] == ["", ""]
