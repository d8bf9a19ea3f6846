"""Permutes and every algorithm on real processes with Gloo."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.collectives import collect
from tests.decompose import conformance
from tests.decompose.programs import run
from tests.decompose.test_decompose import GATHERS, SCATTERS, always, products, rows_times
from tests.decompose.test_permute import inverse
from tests.processes import Job

import meshweave as mw
from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import permute
from meshweave.optimize.decompose import ALGORITHMS, decompose
from meshweave.runtime.cluster import ClusterWorld
from meshweave.runtime.world import LocalWorld

pytestmark = pytest.mark.multiprocess

MESHES = {1: ["d=1"], 2: ["d=2"], 3: ["d=3"], 4: ["d=4", "a=2,d=2", "d=2,a=2", "a=1,d=2,b=2"]}
SHUFFLED = {1: [0], 2: [1, 0], 3: [2, 0, 1], 4: [3, 0, 2, 1]}


def job_conform(pipe: Connection) -> dict[str, Any]:
    """Number of cases in which this rank had what the algorithm promises, to the bit."""
    size, count = dist.get_world_size(), 0
    for spec in MESHES[size]:
        world = ClusterWorld(mw.Mesh(spec, devices=SHUFFLED[size]))
        for row in ALGORITHMS:
            for case in conformance.cases(row, world.mesh):
                with world.guard():
                    conformance.check(case, world)
                count += 1
        assert not world.communicator.open
        world.close()
    return {"cases": count}


def job_matmuls(pipe: Connection) -> dict[str, Any]:
    """Number of products of what is gathered, and reductions of products, that were the same to the bit when they were
    taken apart: on this rank as on virtual devices."""
    size, count = dist.get_world_size(), 0
    mesh = mw.Mesh({2: "d=2", 3: "d=3", 4: "a=2,d=2"}[size], devices=SHUFFLED[size])
    world = ClusterWorld(mesh)
    ways = {"all_gather": [*GATHERS, "pipelined"], "reduce_scatter": [*SCATTERS, "pipelined"]}
    for build, kind in ((rows_times, "all_gather"), (products, "reduce_scatter")):
        role, values = build(mesh.size("d"), mesh)
        expected = run(role, values, LocalWorld(mesh))[world.rank]
        for name in ways[kind]:
            made, report = decompose(role, None, always(**{kind: name}, num_chunks=(2,)))
            with world.guard():
                (found,) = run(made, values, world).values()
            assert report.num_taken == 1
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name
            count += 1
    assert not world.communicator.open
    return {"cases": count}


def job_permutes(pipe: Connection) -> dict[str, Any]:
    """Permutes of every kind give what virtual devices give; several are on their way at once."""
    size, count = dist.get_world_size(), 0
    world = ClusterWorld(mw.Mesh({2: "a=2", 4: "a=2,b=2"}[size], devices=SHUFFLED[size]))
    position, comm = world.mesh.index(world.rank), world.communicator
    ways: dict[tuple[str, ...], list[Any]] = {("a",): [0, 1, -1, (1, 0), (0, 1)]}
    if size == 4:
        ways["b", "a"] = [0, 1, 2, 3, -1, 5, (1, 0, 3, 2), (0, 2, 3, 1), (3, 2, 1, 0), (0, 1, 2, 3)]
    for axes, those in ways.items():
        group = comm.group(axes)
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            for shape in ((2, 3), (5,), (), (0, 4)):
                values = [(torch.ones(shape) * (3 * r + 1)).to(dtype) for r in range(size)]
                begun = [comm.permute(group, values[position], to) for to in those]
                back = [comm.permute(group, comm.wait(x), inverse(to)) for x, to in zip(begun, those, strict=True)]
                for to, got, returned in reversed(list(zip(those, map(comm.wait, begun), back, strict=True))):
                    expected = collect(world.mesh, permute, axes, values, [to])[position]
                    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
                    assert torch.equal(got, expected), f"{to} over {axes}"
                    assert torch.equal(comm.wait(returned), values[position])
                    count += 1
    with pytest.raises(MeshweaveError, match="must send every member of its group exactly one block"):
        comm.permute(comm.group(("a",)), torch.ones(1), (0, 0))
    return {"cases": count, "open": len(comm.open)}


def job_sample(pipe: Connection) -> dict[str, Any]:
    """All of the above in one job."""
    return {job.__name__: job(pipe)["cases"] for job in (job_conform, job_matmuls, job_permutes)}


def test_all_of_it_on_two_processes(start: Callable[..., Job]) -> None:
    outcomes = start("tests.decompose.test_cluster:job_sample", 2).finish(240)
    assert outcomes == [{"job_conform": 3 * len(ALGORITHMS), "job_matmuls": 7, "job_permutes": 5 * 4 * 4}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", MESHES)
def test_every_algorithm_runs_on_processes(start: Callable[..., Job], num_ranks: int) -> None:
    count = len(MESHES[num_ranks]) * len(ALGORITHMS) * 3
    job = start("tests.decompose.test_cluster:job_conform", num_ranks)
    assert job.finish(240) == [{"cases": count}] * num_ranks


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_matmuls_in_chunks_on_processes(start: Callable[..., Job], num_ranks: int) -> None:
    job = start("tests.decompose.test_cluster:job_matmuls", num_ranks)
    assert job.finish(240) == [{"cases": 7}] * num_ranks


@pytest.mark.slow
def test_permutes_give_what_virtual_devices_give(start: Callable[..., Job]) -> None:
    outcomes = start("tests.decompose.test_cluster:job_permutes", 4).finish(240)
    assert outcomes == [{"cases": 15 * 4 * 4, "open": 0}] * 4
