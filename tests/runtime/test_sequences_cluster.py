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


def job_attention(pipe: Connection) -> dict[str, Any]:
    errors, orders = [], []
    for attention, tokens in (("gather", 9), ("heads", 8), ("gather", 8), ("ring", 8), ("ring:none", 8)):
        made = plain(Shape(tokens=tokens))
        error, step = difference(made, "cp=2", torch.float64, plan=f"cp:cp:{attention}", profile="alpha-beta")
        errors.append(error)
        orders.append("from head and tail" in step.program.sequence)
    shutdown(step.session.world)
    return {"errors": errors, "orders": orders}


def test_two_processes_hold_half_of_each_sequence(start: Callable[..., Job]) -> None:
    for outcome in start(f"{__name__}:job_attention", 2).finish(240):
        assert "error" not in outcome, outcome["text"]
        assert max(outcome["errors"]) < 1e-10
        assert outcome["orders"] == [False, False, True, True, False]
