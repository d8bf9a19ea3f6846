"""Guards on a cluster: what one rank finds is an error on every rank, within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.processes import Job
from tests.training import batches, mse
from torch import nn

import meshweave as mw
from meshweave.errors import StepError
from meshweave.runtime.cluster import shutdown

pytestmark = pytest.mark.multiprocess


class Named(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def job_guarded(pipe: Connection, changing: str) -> dict[str, Any]:
    """Train; then rank `changing` (or every rank) has another model, and goes back to what it was."""
    torch.manual_seed(0)
    model, data = Named(4, 4), batches(3, (4, 4), (4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mw.compile(model, loss=mse, example=data[0], optimizer=optimizer, mesh="fsdp=2", profile="alpha-beta")
    step(data[0])
    model.epoch = dist.get_rank()  # traced on each rank, and harmless
    step(data[1])
    is_alone = changing != "all"
    if not is_alone or dist.get_rank() == int(changing):
        model.notes = ["other"]
    began = time.monotonic()
    with pytest.raises(StepError) as error:
        step(data[2])
    outcome = {"what": error.value.what, "text": str(error.value), "fast": time.monotonic() - began < 60}
    if is_alone:
        shutdown(step.session.world)
        return outcome
    del model.notes
    return outcome | {"went_on": bool(step(data[2]) > 0)}


@pytest.mark.parametrize("changing", ["1", "all"])
def test_a_guard_on_one_rank_stops_all(start: Callable[..., Job], changing: str) -> None:
    outcomes = start("tests.runtime.test_guards_cluster:job_guarded", 2, changing).finish(240)
    for rank, outcome in enumerate(outcomes):
        assert outcome.get("fast"), outcome
        assert "model.notes" in outcome["text"]
        own = changing in (str(rank), "all")
        assert outcome["what"].startswith(
            "the model has changed since the step was compiled" if own else f"rank {changing} failed"
        )
        assert outcome.get("went_on", changing != "all")
