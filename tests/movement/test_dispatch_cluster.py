"""Sparse moves between real processes: the bits of virtual devices, no bytes but those of the rows that are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.movement.test_dispatch import PLANS, SLOW_LINKS, SPARSE, Model, batches
from tests.processes import Job
from tests.training import train
from torch import Tensor

import meshweave as mw
from meshweave.ir.collectives import SPARSE_GATHER, SPARSE_SCATTER, TABLE
from meshweave.runtime import collectives
from meshweave.runtime.messages import Messages

pytestmark = pytest.mark.multiprocess


def job(pipe: Connection, mesh: str, favoured: tuple[int, ...]) -> dict[str, Any]:
    """Losses and parameters of a training, the bytes that sparse moves sent, and those that had to be."""
    sent, needed, dense = [0], [0], [0]
    begin = Messages.begin

    def counted(self: Messages, received: Any, posted: Any, *rest: Any) -> Any:
        sent[0] += is_inside[0] * sum(x.nbytes for _, x in posted)
        return begin(self, received, posted, *rest)

    is_inside = [0]
    Messages.begin = counted  # type: ignore[method-assign]
    for op in SPARSE:
        collectives.MOVED[op] = _measured(collectives.MOVED[op], op, is_inside, (needed, dense))
    step, losses = train(Model(favoured=favoured).double(), batches(2, 64), mesh, plan=PLANS[mesh], profile=SLOW_LINKS)
    parameters = {name: value.tolist() for name, value in step.parameters().items()}
    ranks = tuple(range(dist.get_world_size()))
    others = [str(op) for order in (ranks, ranks[::-1]) for op in _native_differs(order)]
    return {"losses": losses, "parameters": parameters, "bytes": (sent[0], needed[0], dense[0]), "others": others}


def _native_differs(order: tuple[int, ...]) -> Iterator[Any]:
    """The sparse ops that give something else over collectives of torch's own, in place of messages."""
    generator = torch.Generator().manual_seed(0)
    group = collectives.Group(dist.group.WORLD, order, order == tuple(range(len(order))))
    count = group.size
    parts = [torch.randn(4, count, 3, generator=generator) for _ in range(count)]
    for op, num_rows in ((SPARSE_GATHER.op, 4 * count * count), (SPARSE_SCATTER.op, 4 * count)):
        readers = torch.rand(count, num_rows, generator=generator) < 0.4
        readers[0] = False
        args = [readers, count, 1.0]
        pending = collectives.NATIVE[op](group, parts[group.own], args)
        for work in pending.works:
            work.wait()
        if not torch.equal(pending.finish(), TABLE[op].exchange(parts, args)[group.own]):
            yield op


def _measured(begin: Any, op: Any, is_inside: list[int], totals: Any) -> Any:
    def measured(group: Any, x: Tensor, args: Any) -> Any:
        readers, count = args[:2]
        blocks = readers.view(count, count, -1)
        row = x.nbytes // (readers.shape[1] if op is SPARSE_SCATTER.op else blocks.shape[2])
        asked = blocks[group.own] if op is SPARSE_SCATTER.op else blocks[:, group.own]
        others = torch.arange(count) != group.own
        totals[0][0] += row * int(asked[others].sum())
        totals[1][0] += row * int(others.sum()) * blocks.shape[2]
        is_inside[0] = 1
        try:
            return begin(group, x, args)
        finally:
            is_inside[0] = 0

    return measured


CLUSTERS = [
    ("ep=2", ()),
    pytest.param("ep=4", (), marks=pytest.mark.slow),
    pytest.param("ep=4", (3, 4), marks=pytest.mark.slow),
    pytest.param("dp=2,ep=2", (), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mesh", "favoured"), CLUSTERS)
def test_processes_send_the_rows_that_are_read_and_no_others(
    start: Callable[..., Job], mesh: str, favoured: tuple[int, ...]
) -> None:
    options: dict[str, Any] = {"plan": PLANS[mesh], "profile": SLOW_LINKS}
    step, losses = train(Model(favoured=favoured).double(), batches(2, 64), mesh, **options)
    sent, needed, dense = 0, 0, 0
    for outcome in start(f"{__name__}:job", mw.Mesh(mesh).num_devices, mesh, favoured).finish(240):
        assert "error" not in outcome, outcome
        assert outcome["losses"] == losses  # the bits of virtual devices
        assert not outcome["others"]
        for name, value in step.parameters().items():
            assert outcome["parameters"][name] == value.tolist(), name
        sent, needed, dense = (a + b for a, b in zip((sent, needed, dense), outcome["bytes"], strict=True))
    assert 0 < needed <= sent <= 1.05 * needed
    assert sent < 0.9 * dense
