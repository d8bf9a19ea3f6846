"""Real processes on Gloo, against virtual devices in one process. A function `job_*` is what each process runs."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests import steps, transfers
from tests.collectives import collect
from tests.processes import Job
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshweave as mw
from meshweave.errors import CheckpointError, LayoutError, MeshError, StepError
from meshweave.ir.collectives import functional
from meshweave.ir.graph import Spec
from meshweave.runtime import cluster
from meshweave.runtime.cluster import ClusterWorld, init_from_env, shutdown
from meshweave.runtime.dtensor import dtensor_from_piece
from meshweave.runtime.process_groups import ONE_ROUND_BYTES
from meshweave.runtime.world import LocalWorld

MESH = mw.Mesh("a=2,b=2")
AXES = [("a",), ("b",), ("a", "b"), ("b", "a")]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
OPS = ["sum", "max", "min"]
SECONDS_TO_END = 15.0

pytestmark = pytest.mark.multiprocess


# Values.


def integers(rank: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Small integers, exact in every dtype, with other values on every rank."""
    values = torch.arange(rows * width).reshape(rows, width) * 7 + rank * 5
    return (values % 11).to(dtype) if dtype is not torch.bool else (values % 3 == rank % 2)


def cases(size: int, dtype: torch.dtype) -> Iterator[tuple[str, Any, list[Any], int, int]]:
    """Name, op, arguments, rows and width of every collective over groups of `size`."""
    for width in (3, 0):
        yield "all_gather", functional.all_gather_into_tensor.default, [size], 2, width
        yield "all_to_all", functional.all_to_all_single.default, [[2] * size, [2] * size], 2 * size, width
        for op in OPS:
            yield f"all_reduce {op}", functional.all_reduce.default, [op], 5, width
            yield f"reduce_scatter {op}", functional.reduce_scatter_tensor.default, [op, size], 2 * size, width
    assert ONE_ROUND_BYTES < 200_001 * 2 * 4
    yield "large all_reduce", functional.all_reduce.default, ["sum"], 200_001, 1


def job_collectives(pipe: Connection) -> dict[str, Any]:
    """Number of cases, each of which gave what virtual devices give: values, shape and dtype."""
    world, count = ClusterWorld(MESH), 0
    position, comm = MESH.index(world.rank), world.communicator
    for axes in AXES:
        size = MESH.flat_size(axes)
        for dtype in DTYPES:
            for name, op, args, rows, width in cases(size, dtype):
                operands = [integers(r, rows, width, dtype) for r in range(4)]
                before = operands[position].clone()
                expected = collect(MESH, op, axes, operands, args)[position]
                with world.guard():
                    got = comm.wait(comm.collect(op, comm.group(axes), operands[position], args))
                label = f"{name} {dtype} over {axes}, {rows}x{width}"
                assert (got.dtype, got.shape) == (expected.dtype, expected.shape), label
                assert torch.equal(got, expected), f"{label}\n{got}\n{expected}"
                assert torch.equal(operands[position], before), f"{label} changed its operand"
                count += 1
    return {"cases": count, "open": len(world.communicator.open)}


def job_order(pipe: Connection) -> dict[str, Any]:
    """Sums whose bits depend on their order; scalars; splits that differ; several collectives in flight."""
    world = ClusterWorld(MESH)
    position, comm = MESH.index(world.rank), world.communicator
    torch.manual_seed(0)
    for rows in (8, 100001):
        operands = [torch.randn(rows) * 10.0**r for r in range(4)]
        for axes in AXES:
            op = functional.all_reduce.default
            expected = collect(MESH, op, axes, operands, ["sum"])[position]
            assert torch.equal(comm.wait(comm.collect(op, comm.group(axes), operands[position], ["sum"])), expected)
    scalars = [torch.tensor(float(r)) for r in range(4)]
    for axes in AXES:
        op = functional.all_reduce.default
        started = comm.collect(op, comm.group(axes), scalars[position], ["max"])
        assert torch.equal(comm.wait(started), collect(MESH, op, axes, scalars, ["max"])[position])
    op = functional.all_gather_into_tensor.default
    gathers = [comm.collect(op, comm.group(axes), operands[position], []) for axes in AXES]
    for axes, started in reversed(list(zip(AXES, gathers, strict=True))):
        assert torch.equal(comm.wait(started), collect(MESH, op, axes, operands, [])[position])
        assert comm.wait(started) is comm.wait(started)
    op = functional.all_reduce.default  # several in flight: of four ranks in two rounds, beside a permute
    operands = [torch.arange(ONE_ROUND_BYTES // 4) % 97 * (r + 1.0) for r in range(4)]
    reductions = [comm.collect(op, comm.group(axes), operands[position], ["sum"]) for axes in AXES]
    shift = comm.permute(comm.group(("b", "a")), operands[position], 1)
    for axes, started in reversed(list(zip(AXES, reductions, strict=True))):
        assert torch.equal(comm.wait(started), collect(MESH, op, axes, operands, ["sum"])[position])
    assert torch.equal(comm.wait(shift), operands[{0: 3, 2: 0, 1: 2, 3: 1}[position]])
    order = world.communicator.group(("b", "a")).order
    members = next(g for g in MESH.groups(("b", "a")) if position in g)
    assert order == members == (0, 2, 1, 3)
    index = members.index(position)
    rows_from = [i + 1 for i in range(4)]  # member i sends i + 1 rows to everybody
    sent = torch.full((4 * (index + 1), 2), float(index)) + torch.arange(4).repeat_interleave(index + 1)[:, None] * 10
    args = [rows_from, [index + 1] * 4]
    started = comm.collect(functional.all_to_all_single.default, comm.group(("b", "a")), sent, args)
    expected = torch.cat([torch.full((i + 1, 2), i + 10.0 * index) for i in range(4)])
    assert torch.equal(comm.wait(started), expected)
    return {"order": list(order)}


def job_transfers(pipe: Connection) -> dict[str, Any]:
    """Number of moves between meshes, after each of which this rank had its piece: every case of as many devices."""
    world, count = ClusterWorld(mw.Mesh(d=dist.get_world_size())), 0
    for case in transfers.CASES:
        if world.mesh.covers(case[1].devices) and world.mesh.covers(case[3].devices):
            every = [(shape, torch.float32) for shape in transfers.SHAPES]
            for shape, dtype in [*every, *(((5, 7), dtype) for dtype in transfers.DTYPES[1:])]:
                if not (transfers.sums(case) and dtype is torch.bool):
                    with world.guard():
                        transfers.check(world, case, shape, dtype)
                    count += 1
    return {"cases": count, "open": len(world.communicator.open)}


def job_steps(pipe: Connection) -> dict[str, Any]:
    """Number of single steps and chains after each of which this rank had what virtual devices have, to the bit."""
    mesh = {2: mw.Mesh("a=2", devices=[1, 0]), 4: mw.Mesh("a=2,b=2", devices=[3, 0, 2, 1])}[dist.get_world_size()]
    world, count = ClusterWorld(mesh), 0
    for chain, dtype in steps.sample(mesh):
        with world.guard():
            found, expected = (steps.run(chain, dtype, on) for on in (world, LocalWorld(mesh)))
            (piece,) = found.values()
            assert torch.equal(piece, expected[dist.get_rank()]), f"{chain} {dtype}"
        count += 1
    return {"cases": count, "open": len(world.communicator.open)}


def job_assemble(pipe: Connection) -> dict[str, Any]:
    """Full tensors of pieces, bit for bit, and DTensors of the same pieces."""
    world, count = ClusterWorld(MESH), 0
    torch.manual_seed(0)
    nan = torch.tensor([0x7FC01234, -0x80000000], dtype=torch.int32).view(torch.float32)  # a NaN with payload; -0.0
    samples = [
        torch.randn(7, 5),
        torch.randn(7, 5).bfloat16(),
        torch.arange(35).reshape(7, 5) << 40,
        torch.randn(7, 5) > 0,
        nan.repeat(18)[:35].reshape(7, 5),
        torch.zeros(1, 5),
        torch.zeros(0, 5),
    ]
    for full in samples:
        for text in ("[{a}, {b}]", "[{b,a}, {}]", "[{a,b}, {}]", "[{}, {b}]", "[{}, {}]", "[{}, {a}x2]"):
            layout = mw.Layout.parse(text, MESH)
            box = layout.box_of(full.shape, world.rank)
            piece = full[box.slices()].clone()
            got = world.assemble(Spec(tuple(full.shape), full.dtype), layout, [piece])
            assert got.shape == full.shape
            assert got.dtype == full.dtype
            assert torch.equal(got.contiguous().view(torch.uint8), full.contiguous().view(torch.uint8)), text
            count += 1
            if text in ("[{b,a}, {}]", "[{}, {a}x2]"):
                continue
            held = dtensor_from_piece(piece, layout, full.shape)
            assert held.shape == full.shape
            assert held.to_local().data_ptr() == piece.data_ptr()
            if full.dtype is torch.float32 and full.numel() and not full.isnan().any():
                assert torch.equal(held.full_tensor(), full), text
    with pytest.raises(LayoutError, match="partial"):
        world.assemble(Spec((4,), torch.float32), mw.Layout.parse("[{}] partial(sum: a)", MESH), [torch.zeros(4)])
    with pytest.raises(LayoutError, match="blocks of 2"):
        dtensor_from_piece(torch.zeros(7, 4), mw.Layout.parse("[{}, {a}x2]", MESH), (7, 5))
    shutdown(world)
    return {"cases": count}


def job_of_two(pipe: Connection) -> dict[str, Any]:
    return {"transfers": job_transfers(pipe), "steps": job_steps(pipe)}


def job_of_four(pipe: Connection) -> dict[str, Any]:
    jobs = (job_collectives, job_transfers, job_order, job_assemble)  # the last one leaves the job
    return {job.__name__.removeprefix("job_"): job(pipe) for job in jobs}


def assert_steps(found: dict[str, Any], least: int) -> None:
    assert found == {"cases": found.get("cases"), "open": 0}
    assert found["cases"] >= least


def test_two_ranks_move_pieces_as_virtual_devices_do(start: Callable[..., Job]) -> None:
    first, second = start(f"{__name__}:job_of_two", 2).finish(240)
    assert "error" not in first, first
    assert first == second
    assert first["transfers"] == {"cases": 32, "open": 0}
    assert_steps(first["steps"], 100)


def test_four_ranks_move_pieces_as_virtual_devices_do(start: Callable[..., Job]) -> None:
    """All collectives, transfers between meshes, sums in order, pieces put together."""
    expected = {
        "collectives": {"cases": len(AXES) * len(DTYPES) * 17, "open": 0},
        "transfers": {"cases": 165, "open": 0},
        "order": {"order": [0, 2, 1, 3]},
        "assemble": {"cases": 42},
    }
    assert start(f"{__name__}:job_of_four", 4).finish(240) == [expected] * 4


@pytest.mark.slow
def test_steps_over_several_axes_give_what_virtual_devices_give(start: Callable[..., Job]) -> None:
    first, *others = start(f"{__name__}:job_steps", 4).finish(240)
    assert_steps(first, 250)
    assert others == [first] * 3


# A step.


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def job_train(pipe: Connection, path: str) -> dict[str, Any]:
    return train(path)


def train(path: str) -> dict[str, Any]:
    made = model()
    batch = {"input": torch.randn(8, 8, generator=torch.Generator().manual_seed(1))}
    step = mw.compile(
        made,
        loss=lambda out, batch: (out**2).mean(),
        example=batch,
        optimizer=torch.optim.AdamW(made.parameters(), lr=1e-2),
        mesh="dp=2,tp=2",
        plan=mw.Plan.fsdp("dp") + mw.Plan.tp("tp", {"0": "colwise", "2": "rowwise"}),
        profile="alpha-beta",
    )
    losses = [float(step(batch)) for _ in range(3)]
    step.save(path)
    losses.append(float(step(batch)))
    step.load(path)
    assert step(batch) == losses[-1]
    with pytest.raises(CheckpointError, match="no checkpoint"):
        step.load(path + "/nowhere")
    parameters = {name: value.flatten().tolist() for name, value in step.parameters().items()}
    sharded = sorted(name for name, p in step.model.named_parameters() if isinstance(p, DTensor))
    if dist.is_initialized():
        shutdown(step.session.world)
    return {"losses": losses, "parameters": parameters, "sharded": sharded}


def test_four_processes_train_as_one_process_does(start: Callable[..., Job], tmp_path: Path) -> None:
    outcomes = start(f"{__name__}:job_train", 4, str(tmp_path / "cluster")).finish(240)
    expected = train(str(tmp_path / "local"))
    for outcome in outcomes:
        assert "error" not in outcome, outcome["text"]
        assert outcome["losses"] == expected["losses"]
        assert outcome["parameters"] == expected["parameters"]
        assert outcome["sharded"] == sorted(expected["parameters"])


# Failures.


def step_of(world: ClusterWorld, axes: tuple[str, ...] = ("a",)) -> None:
    comm = world.communicator
    total = comm.wait(comm.collect(functional.all_reduce.default, comm.group(axes), torch.ones(4), ["sum"]))
    assert total.tolist() == [float(world.mesh.flat_size(axes))] * 4


def job_raise(pipe: Connection, at: str) -> dict[str, Any]:
    """Rank `at` raises between two collectives of the third step."""
    world = ClusterWorld(mw.Mesh(a=dist.get_world_size()))
    for index in range(1, 6):
        try:
            with world.guard():
                step_of(world)
                if index == 3 and dist.get_rank() == int(at):
                    raise ValueError("the disk is on fire")
                step_of(world)
        except (ValueError, StepError) as error:
            with pytest.raises(StepError, match="cannot be used again") as again, world.guard():
                pytest.fail("a failed world was entered")
            return {"error": type(error).__name__, "text": str(error), "step": index, "again": str(again.value)}
    return {}


def fail_in_step(world: ClusterWorld) -> None:
    with world.guard():
        step_of(world)
        time.sleep(0.3 * dist.get_rank())
        raise ValueError(f"loss on {dist.get_rank()}")


def job_all_raise(pipe: Connection) -> dict[str, Any]:
    """Every rank raises at one point; then the world goes on."""
    world = ClusterWorld(mw.Mesh(a=2))
    with world.guard():
        step_of(world)
    with pytest.raises(ValueError, match=f"loss on {dist.get_rank()}"):
        fail_in_step(world)
    with world.guard(), world.guard():
        step_of(world)
    shutdown(world)
    return {"fine": True}


def job_forever(pipe: Connection) -> dict[str, Any]:
    world = ClusterWorld(mw.Mesh(a=dist.get_world_size()))
    with world.guard():
        step_of(world)
    pipe.send("ready")
    while True:
        with world.guard():
            step_of(world)
            time.sleep(0.01)


def job_in_a_step(pipe: Connection) -> dict[str, Any]:
    """One guarded step without end, so that what interrupts it finds it inside."""
    world = ClusterWorld(mw.Mesh(a=dist.get_world_size()))
    with world.guard():
        step_of(world)
        pipe.send("ready")
        while True:
            step_of(world)
            time.sleep(0.01)


def job_early(pipe: Connection, late: str) -> dict[str, Any]:
    """Rank 0, which hosts the store, is done while the other still works alone."""
    world = ClusterWorld(mw.Mesh(a=2))
    with world.guard():
        step_of(world)
        time.sleep(float(late) * dist.get_rank())
    shutdown(world)
    return {"fine": True}


def job_store(pipe: Connection) -> dict[str, Any]:
    """Rank 0, which hosts the store, is done, and leaves without a world, while the other still needs the store."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank():
        time.sleep(1.5)
        store.set("late", "yes")
    return {"late": store.get("late").decode()} if dist.get_rank() else {}


def job_leave(pipe: Connection) -> dict[str, Any]:
    """Rank 1 leaves between two steps."""
    world = ClusterWorld(mw.Mesh(a=2))
    with world.guard():
        step_of(world)
    if dist.get_rank() == 1:
        shutdown(world)
        return {}
    with world.guard():
        step_of(world)
    return {}


def job_mesh(pipe: Connection, spec: str, devices: str) -> dict[str, Any]:
    ClusterWorld(mw.Mesh(spec, devices=[int(d) for d in devices.split(",")]))
    return {}


def job_devices(pipe: Connection) -> dict[str, Any]:
    """Ranks with GPUs of two kinds, then one without a GPU, by their names."""
    rank, notes = dist.get_rank(), list[str]()
    cluster._NOTES = SimpleNamespace(warning=lambda text, *parts: notes.append(text % parts))  # type: ignore[assignment]
    cluster.machine_of = lambda device: {"device": f"GPU {rank}"}
    ClusterWorld(mw.Mesh(a=2))
    cluster.machine_of = lambda device: {"device": "GPU" if rank else "cpu"}
    with pytest.raises(MeshError, match="some ranks have no GPU") as caught:
        ClusterWorld(mw.Mesh(a=2))
    return {"notes": notes, "got": caught.value.got}


@pytest.mark.slow_rows("0")
@pytest.mark.parametrize("at", [0, 1])
def test_a_rank_that_raises_is_named_on_every_rank(start: Callable[..., Job], at: int) -> None:
    outcomes = start(f"{__name__}:job_raise", 2, str(at)).finish(SECONDS_TO_END + 10)
    failed, other = outcomes[at], outcomes[1 - at]
    assert (failed["error"], failed["text"], failed["step"]) == ("ValueError", "the disk is on fire", 3)
    assert (other["error"], other["step"]) == ("StepError", 3)
    assert f"rank {at} failed" in other["text"]
    assert re.search(r"ValueError: the disk is on fire at .*test_cluster\.py:\d+ in ", other["text"])
    assert "the disk is on fire" in failed["again"]
    assert "the disk is on fire" in other["again"]


def test_four_ranks_end_when_one_raises(start: Callable[..., Job]) -> None:
    outcomes = start(f"{__name__}:job_raise", 4, "2").finish(SECONDS_TO_END + 10)
    assert [o["error"] for o in outcomes] == ["StepError", "StepError", "ValueError", "StepError"]
    assert all("the disk is on fire" in o["text"] for o in outcomes)


def test_a_failure_of_all_ranks_at_one_point_leaves_the_world_usable(start: Callable[..., Job]) -> None:
    assert start(f"{__name__}:job_all_raise", 2).finish(30) == [{"fine": True}] * 2


def test_a_rank_that_is_done_early_is_no_failure(start: Callable[..., Job]) -> None:
    assert start(f"{__name__}:job_early", 2, "2.5").finish(30) == [{"fine": True}] * 2


def test_the_host_of_the_store_leaves_last(start: Callable[..., Job]) -> None:
    assert start(f"{__name__}:job_store", 2).finish(30) == [{}, {"late": "yes"}]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_process_is_named_on_every_rank(start: Callable[..., Job], victim: int) -> None:
    job = start(f"{__name__}:job_forever", 4)
    job.await_ready()
    os.kill(job.processes[victim].pid, signal.SIGKILL)
    outcomes = job.finish(SECONDS_TO_END)
    assert outcomes[victim] == {"signal": signal.SIGKILL}
    for rank in {0, 1, 2, 3} - {victim}:
        assert outcomes[rank]["error"] == "StepError"
        assert f"rank {victim} is gone" in outcomes[rank]["text"]


def test_ctrl_c_on_one_rank_ends_all(start: Callable[..., Job]) -> None:
    job = start(f"{__name__}:job_in_a_step", 2)
    job.await_ready()
    os.kill(job.processes[1].pid, signal.SIGINT)
    outcomes = job.finish(SECONDS_TO_END)
    assert outcomes[1]["error"] == "KeyboardInterrupt"
    assert outcomes[0]["error"] == "StepError"
    assert "rank 1 failed" in outcomes[0]["text"]
    assert "KeyboardInterrupt" in outcomes[0]["text"]


def test_a_rank_that_leaves_between_steps_is_named(start: Callable[..., Job]) -> None:
    stayed, left = start(f"{__name__}:job_leave", 2).finish(SECONDS_TO_END)
    assert left == {}
    assert stayed["error"] == "StepError"
    assert "rank 1 is gone" in stayed["text"]


def test_a_mesh_that_does_not_fit_the_world(start: Callable[..., Job]) -> None:
    for outcome in start(f"{__name__}:job_mesh", 2, "a=2", "0,5").finish(30):
        assert outcome["error"] == "MeshError"
        assert "got: 2 devices: 0, 5\n  expected: each of the ranks 0 to 1 once" in outcome["text"]


def test_devices_of_all_ranks_are_compared(start: Callable[..., Job]) -> None:
    first, second = start(f"{__name__}:job_devices", 2).finish(30)
    note = "devices of different kinds in a job: GPU 0 on rank 0, GPU 1 on rank 1; all of them wait for the slowest"
    assert (first["notes"], second["notes"]) == ([note], [])
    assert first["got"] == second["got"] == "GPU on rank 1, cpu on rank 0"


def test_init_from_env_outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(mw.MeshError, match="not part of a job"):
        init_from_env()
    shutdown()


def test_a_rank_that_never_joins_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(mw.MeshError, match=r"did not meet(.|\n)*2 ranks within 1 s"):
        init_from_env("gloo", timedelta(seconds=1))
