"""Collectives over Gloo are messages among the members of a group."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.collectives import collect
from tests.processes import Job
from torch import Tensor

import meshweave as mw
from meshweave.ir.collectives import functional
from meshweave.runtime import collectives
from meshweave.runtime.cluster import ClusterWorld
from meshweave.runtime.transfer_threads import INLINE_BYTES

pytestmark = pytest.mark.multiprocess

MESH = mw.Mesh("d=3", devices=[2, 0, 1])
ROWS = 6


def cases() -> list[tuple[Any, list[Any]]]:
    return [
        (functional.all_gather_into_tensor.default, [3]),
        (functional.all_to_all_single.default, [[2] * 3, [2] * 3]),
        (functional.reduce_scatter_tensor.default, ["sum", 3]),
        (functional.all_reduce.default, ["sum"]),
    ]


def refused(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a collective of Gloo")


def job_all_at_once(pipe: Connection) -> dict[str, Any]:
    """Collectives of one group, all on their way before the first is waited for, give what virtual devices give. Beside
    them are permutes in which one member sends to itself alone: all members count messages alike."""
    world, count = ClusterWorld(MESH), 0
    dist.all_to_all_single = refused
    collectives.all_gather_single = refused
    comm, own = world.communicator, MESH.index(world.rank)
    with world.guard():
        group = comm.group(("d",))
        assert group.messages is not None
        started: list[tuple[Any, Tensor]] = []
        for width in (3, 0, INLINE_BYTES):
            operands = [torch.arange(ROWS * width).view(ROWS, width) % 13 + rank for rank in range(3)]
            for op, args in cases():
                expected = collect(MESH, op, ("d",), operands, args)[own]
                started.append((comm.collect(op, group, operands[own], args), expected))
                started.append((comm.permute(group, operands[own], [0, 2, 1]), operands[[0, 2, 1][own]]))
        for pending, expected in reversed(started):
            found = comm.wait(pending)
            assert torch.equal(found, expected)
            count += 1
    assert not comm.open
    return {"cases": count}


def test_collectives_are_messages_and_all_members_count_alike(start: Callable[..., Job]) -> None:
    job = start("tests.runtime.test_messages:job_all_at_once", 3)
    assert job.finish(60) == [{"cases": 24}] * 3
