"""Sums of communications that are under way together: each is reduced in memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from tests.processes import Job

from meshweave.ir.collectives import ALL_REDUCE, REDUCE_SCATTER
from meshweave.ir.mesh import Mesh
from meshweave.runtime.cluster import ClusterWorld, shutdown


def job_reduced(pipe: Connection) -> dict[str, Any]:
    """Sums of two rounds, several under way at once: values of the first must not be those of the second."""
    world = ClusterWorld(Mesh("dp=2"))
    group, start, wait = world.communicator.group(("dp",)), world.communicator.collect, world.communicator.wait
    values = []
    for round_ in range(3):
        ours = [torch.full((64,), float(10 * round_ + i + world.rank)) for i in range(3)]
        sums = [start(ALL_REDUCE.op, group, x, ["sum"]) for x in ours]
        parts = [start(REDUCE_SCATTER.op, group, x, ["sum", 2]) for x in ours]
        values.append([float(wait(x).mean()) for x in (*sums, *parts)])
        values[-1] += [float(x.mean()) for x in ours]  # operands stay as they are
    shutdown(world)
    return {"values": values, "rank": world.rank}


@pytest.mark.multiprocess
def test_sums_under_way_together_have_memory_of_their_own(start: Callable[..., Job]) -> None:
    job = start("tests.runtime.test_sums:job_reduced", 2)
    for outcome in job.finish(60):
        for round_, values in enumerate(outcome["values"]):
            own = [10.0 * round_ + i + outcome["rank"] for i in range(3)]
            assert values == [*[2 * (10 * round_ + i) + 1.0 for i in range(3)] * 2, *own]
