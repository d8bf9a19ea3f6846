"""Memory for what communications receive comes back, and is never with two of them at once."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from tests.processes import Job

from meshweave.ir.collectives import ALL_REDUCE, REDUCE_SCATTER
from meshweave.ir.mesh import Mesh
from meshweave.runtime.buffers import Buffers
from meshweave.runtime.cluster import ClusterWorld, shutdown


def test_a_buffer_comes_back_for_its_size_and_dtype_alone() -> None:
    buffers, like = Buffers(), torch.zeros(3)
    first = buffers.take((2, 3), like)
    second = buffers.take((2, 3), like)
    assert first.data_ptr() != second.data_ptr()
    buffers.give_back(first)
    assert buffers.take((2, 4), like).data_ptr() != first.data_ptr()
    assert buffers.take((2, 3), like.double()).data_ptr() != first.data_ptr()
    again = buffers.take((3, 2), like)
    assert again.data_ptr() == first.data_ptr()
    assert again.shape == (3, 2)
    assert buffers.take((3, 2), like).data_ptr() not in (first.data_ptr(), second.data_ptr())


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
    kept = sorted(len(free) for free in group.buffers._free.values())
    shutdown(world)
    return {"values": values, "kept": kept}


@pytest.mark.multiprocess
def test_sums_under_way_together_have_buffers_of_their_own(start: Callable[..., Job]) -> None:
    job = start("tests.runtime.test_buffers:job_reduced", 2)
    for outcome in job.finish(60):
        expected = [[2 * (10 * r + i) + 1.0 for i in range(3)] * 2 for r in range(3)]
        assert outcome["values"] == expected
        assert outcome["kept"] == [3, 3]  # a sum receives both parts, its scattered form as many numbers: two sizes
