"""Context parallelism in two processes."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from tests.processes import Job
from tests.sequences import Shape, difference, plain

from meshweave.runtime.cluster import shutdown

pytestmark = pytest.mark.multiprocess


# The algorithm of attention, the tokens, and whether each device has a chunk of the head and one of the tail.
CASES = {
    "quick": [("gather", 9, False), ("heads", 8, False), ("ring", 8, True)],
    "others": [("gather", 8, True), ("ring:none", 8, False)],
}


def job_attention(pipe: Connection, which: str) -> dict[str, Any]:
    errors, orders = [], []
    for attention, tokens, _ in CASES[which]:
        made = plain(Shape(tokens=tokens))
        error, step = difference(made, "cp=2", torch.float64, plan=f"cp:cp:{attention}", profile="alpha-beta")
        errors.append(error)
        orders.append("from head and tail" in step.program.sequence)
    shutdown(step.session.world)
    return {"errors": errors, "orders": orders}


@pytest.mark.parametrize("which", ["quick", pytest.param("others", marks=pytest.mark.slow)])
def test_two_processes_hold_half_of_each_sequence(start: Callable[..., Job], which: str) -> None:
    for outcome in start(f"{__name__}:job_attention", 2, which).finish(240):
        assert "error" not in outcome, outcome["text"]
        assert max(outcome["errors"]) < 1e-10
        assert outcome["orders"] == [is_balanced for *_, is_balanced in CASES[which]]
