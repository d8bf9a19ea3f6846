"""Sums of communications that are under way together: each is reduced in memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from tests.processes import Job
from torch import fx, nn

import meshweave as mw
from meshweave.ir.collectives import ALL_REDUCE, REDUCE_SCATTER, reduce_in_order
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph
from meshweave.runtime.cluster import ClusterWorld, shutdown
from meshweave.runtime.executor import compile_tasks
from meshweave.runtime.process_groups import ONE_ROUND_BYTES, ClusterCommunicator


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


NUM_ELEMENTS = ONE_ROUND_BYTES // 4 + 5  # long, and not divisible by the number of ranks


def job_owned(pipe: Connection, mesh: str, *dtypes: torch.dtype) -> list[dict[str, Any]]:
    world = ClusterWorld(Mesh(mesh))
    outcomes = [_owned(world, world.communicator, dtype) for dtype in dtypes]
    if world.mesh.num_devices == 2:  # a sum of two is the same in any order
        outcomes += [_owned(world, ClusterCommunicator(world.mesh, world.rank, True), dtype) for dtype in dtypes]
    shutdown(world)
    return outcomes


def _owned(world: ClusterWorld, comm: ClusterCommunicator, dtype: torch.dtype) -> dict[str, Any]:
    """Long sums, of operands that are and are not owned, that share memory, and of several groups at once."""
    axes = world.mesh.axis_names
    group, size, place = comm.group(axes), world.mesh.num_devices, world.rank
    torch.manual_seed(0)
    operands = [(torch.randn(NUM_ELEMENTS) * 10.0**i).to(dtype) for i in range(size)]
    outcome: dict[str, Any] = {}
    for op in ("sum", "max"):
        expected = reduce_in_order(operands, op)
        own = [operands[place].clone() for _ in range(3)]
        view = own[2][:]  # shares its memory with another tensor: it is not written
        started = [
            comm.collect(ALL_REDUCE.op, group, own[0], [op], is_owned=True),
            comm.collect(ALL_REDUCE.op, group, own[1], [op]),
            comm.collect(ALL_REDUCE.op, group, view, [op], is_owned=True),
        ]
        values = [comm.wait(x) for x in started]
        outcome[op] = {
            "equal": [torch.equal(x, expected) for x in values],
            "written": values[0].data_ptr() == own[0].data_ptr(),
            "kept": [torch.equal(x, operands[place]) for x in own[1:]],
        }
    return outcome


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("mesh", "dtypes"),
    [
        ("dp=2", (torch.float32, torch.bfloat16)),
        pytest.param("dp=3", (torch.float32,), marks=pytest.mark.slow),
        pytest.param("dp=2,tp=2", (torch.float16,), marks=pytest.mark.slow),
    ],
)
def test_long_sums_are_written_into_operands_that_nobody_else_reads(
    start: Callable[..., Job], mesh: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    expected = {op: {"equal": [True] * 3, "written": True, "kept": [True] * 2} for op in ("sum", "max")}
    outcomes = start("tests.runtime.test_sums:job_owned", Mesh(mesh).num_devices, mesh, *dtypes).finish(120)
    count = len(dtypes) * (2 if len(outcomes) == 2 else 1)
    assert outcomes == [[expected] * count] * len(outcomes)


def owned_starts(role: RankGraph) -> list[fx.Node]:
    tasks = compile_tasks(role, torch.device("cpu")).tasks.values()
    return [task.node for part in tasks for task in part if task.owns_operand]


def test_only_concatenations_of_several_values_that_nothing_else_reads_are_owned() -> None:
    """A bucket's operand is; not one with all elements in a part, nor one that is read again."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    batch = {"input": torch.ones(4, 64), "target": torch.ones(4, 64)}
    step = mw.compile(
        model,
        loss=lambda out, batch: ((out - batch["target"]) ** 2).mean(),
        example=batch,
        forward=lambda model, batch: model(batch["input"]),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        mesh="dp=2",
        profile="h100",
        passes="overlap",
    )
    (role,) = step.program.roles
    owned = owned_starts(role)
    assert owned
    for start in owned:
        (operand,) = start.all_input_nodes[:1]
        assert operand.target is torch.ops.aten.cat.default
        assert list(operand.users) == [start]
    first, operand = owned[0], owned[0].all_input_nodes[0]
    with role.graph.inserting_before(first):
        empty = role.graph.call_function(torch.ops.aten.slice.Tensor, (operand, 0, 0, 0))
        both = role.graph.call_function(torch.ops.aten.cat.default, ([operand, empty],))
    for node in (empty, both):
        node.meta |= operand.meta
    first.replace_input_with(operand, both)
    assert owned_starts(role) == owned[1:]
    first.replace_input_with(both, operand)  # which `both` reads, too
    assert owned_starts(role) == owned[1:]


@pytest.mark.multiprocess
def test_sums_under_way_together_have_memory_of_their_own(start: Callable[..., Job]) -> None:
    job = start("tests.runtime.test_sums:job_reduced", 2)
    for outcome in job.finish(60):
        for round_, values in enumerate(outcome["values"]):
            own = [10.0 * round_ + i + outcome["rank"] for i in range(3)]
            assert values == [*[2 * (10 * round_ + i) + 1.0 for i in range(3)] * 2, *own]
