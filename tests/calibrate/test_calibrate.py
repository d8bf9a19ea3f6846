"""Calibration: what is timed, what becomes of the times, and the file that comes of a real one."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import meshweave as mw
from meshweave.calibrate import MeasurementPlan, calibrate, links
from meshweave.calibrate.automatic import with_links
from meshweave.calibrate.cases import (
    Pool,
    attention_cases,
    batched_cases,
    launch_case,
    matmul_cases,
    memory_cases,
)
from meshweave.calibrate.figures import MachineFacts, Measurements, links_text, profile_text
from meshweave.calibrate.links import MOST_SLOWDOWN, OPS, Contention, MeasuredLink, local_bytes_of, places
from meshweave.calibrate.measure import BRIEF, LINKS_GPU
from meshweave.calibrate.ops import ALONE, Effort, Measurement, OpCase, RepeatedOp, time_ops, typical
from meshweave.cli.command import add_command
from meshweave.cost.hardware import load_profile
from meshweave.cost.hardware.load import parse_profile, parse_table
from meshweave.cost.hardware.schema import MeasuredLinks
from meshweave.cost.hardware.volumes import bytes_received
from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import COLLECTIVES
from meshweave.ir.mesh import Mesh
from meshweave.ir.work import MEMORY_KINDS, Matmul, MemoryWork

command = importlib.import_module("meshweave.cli.calibrate")  # its command has the module's own name
CPU = torch.device("cpu")
MIB = 1 << 20
TINY = MeasurementPlan(
    ops=Effort(3, 0.01, 1e-4, 4),
    links=Effort(3, 0.05, 1e-4, 2),
    matmul_sizes=(16, 64),
    other_sizes=(32,),
    max_flops=1e6,
    attention=((1, 2, 16, 16), (1, 2, 64, 16)),
    memory=(1 << 10, 1 << 16, 1 << 18),
    received=(1 << 12, 1 << 16),
)
MACHINE = MachineFacts(
    name="toy",
    version="1",
    summary="a toy",
    command="meshweave calibrate",
    devices_per_node=2,
    memory_bytes=1e9,
    reserved_bytes=1e8,
)


# Single ops


def test_a_case_is_the_work_that_the_simulator_takes_it_for() -> None:
    pool = Pool(CPU, 32 * MIB)

    def works(cases: Iterable[OpCase]) -> list[Any]:
        return [RepeatedOp(case, 1, CPU).work for case in cases]

    products = works(matmul_cases(pool, torch.float32, (16, 32), 5e4))
    sizes = [(m, n, k) for m in (16, 32) for n in (16, 32) for k in (16, 32) if (m, n, k) != (32, 32, 32)]
    assert products == [Matmul(m, n, k, 1, torch.float32, 4 * (m * k + k * n + m * n)) for m, n, k in sizes]
    batched = [(w.m, w.n, w.k, w.batch) for w in works(batched_cases(pool, torch.float32))]
    assert batched == [(64, 64, 64, 8), (256, 256, 64, 8)]  # 8 of [256, 64] x [64, 256]
    attention = works(attention_cases(pool, torch.float32, [(2, 3, 16, 8)]))
    assert [(w.heads, w.queries, w.keys, w.head_dim, w.is_causal, w.is_backward) for w in attention] == [
        (6, 16, 16, 8, is_causal, is_backward) for is_causal in (True, False) for is_backward in (False, True)
    ]


def test_memory_cases_are_of_every_kind_and_of_the_size_asked_for() -> None:
    pool, size = Pool(CPU, 8 * MIB), MIB
    found: dict[str, list[int]] = {}
    for case in memory_cases(pool, [size]):
        work = RepeatedOp(case, 1, CPU).work
        assert isinstance(work, MemoryWork)
        found.setdefault(work.kind, []).append(work.bytes)
    assert set(found) == set(MEMORY_KINDS)
    for kind, sizes in found.items():
        assert all(0.6 * size < n < 1.1 * size for n in sizes), (kind, sizes)  # an index is smaller than what it finds


def test_a_transposed_factor_is_a_view() -> None:
    """x @ w^T is read as it lies: the copy that would make it contiguous is not timed."""
    pool = Pool(CPU, 32 * MIB)
    (case,) = matmul_cases(pool, torch.float32, (16,), 1e5)
    assert [tuple(x.is_contiguous() for x in pair) for pair in case.operands] == [
        (True, False),
        (True, True),
        (False, True),
    ]
    assert all(a.shape == b.shape == (16, 16) for a, b in case.operands)


def test_operands_of_repetitions_lie_apart() -> None:
    pool = Pool(CPU, 8 * MIB)
    made = pool.sets(MIB, lambda: (pool.take((MIB // 4,)),))
    assert len({args[0].data_ptr() for args in made}) == len(made) == 4
    assert len(pool.sets(64 * MIB, lambda: (0,))) == 1
    assert bool(((made[0][0] >= 0.5) & (made[0][0] < 1.5)).all())


def test_time_ops_finds_what_takes_longer() -> None:
    pool = Pool(CPU, 8 * MIB)
    mm, add = torch.ops.aten.mm.default, torch.ops.aten.add.Tensor
    cases = [
        OpCase(add, ((pool.take((8,)), pool.take((8,))),)),
        OpCase(mm, ((pool.take((512, 512)), pool.take((512, 512))),)),
    ]
    small, large = time_ops(cases, CPU, Effort(3, 0.2), ALONE)
    assert 1e-7 < small.seconds < 1e-3
    assert large.seconds > 10 * small.seconds
    assert large.work == Matmul(512, 512, 512, 1, torch.float32, 3 * 512 * 512 * 4)


def test_peers_meet_before_every_repetition_and_agree_on_how_many_there_are() -> None:
    pool, met, asked = Pool(CPU, MIB), [], []

    def mean(values: list[float]) -> list[float]:
        asked.append(len(values))
        return [2 * v for v in values]

    peers = replace(ALONE, meet=lambda: met.append(1), mean=mean)
    (found,) = time_ops([launch_case(pool)], CPU, Effort(5, 10.0), peers)
    assert len(met) == 5
    assert asked == [1, 1]  # the first times, and the medians
    assert found.seconds > 0


def test_what_is_far_out_is_cut_down_and_what_is_usual_is_not() -> None:
    assert typical([1.0, 1.0, 1.0, 1.0]) == 1.0
    assert typical([1.0, 1.0, 1.0, 2.0]) == 1.25
    assert typical([1.0, 1.0, 1.0, 100.0]) == 1.5  # as if it had taken three times the median


# The file


def memory(kind: str, size: int, seconds: float) -> Measurement:
    return Measurement(MemoryWork(kind, size, size // 4, torch.float32), seconds)


def product(n: int, seconds: float) -> Measurement:
    return Measurement(Matmul(n, n, n, 1, torch.float32, 12 * n * n), seconds)


OPS_MEASURED = Measurements(
    5e-6,
    (
        memory("pointwise", 100_000, 1e-4),
        memory("pointwise", 1000, 1e-5),
        memory("copy", 100_000, 5e-5),
        product(64, 1e-4),
    ),
)


def test_figures_become_a_profile_that_answers_with_them() -> None:
    text = profile_text(MACHINE, OPS_MEASURED)
    profile = parse_profile(text, "toy.toml")
    assert (profile.name, profile.version, profile.source, profile.fusion) == ("toy", "1", "measured", "none")
    assert profile.launch_s == 5e-6
    assert profile.devices_per_node == 2
    assert profile.memory.bandwidth == 2e9  # of the copy
    assert profile.peak_flops(torch.float32) == pytest.approx(2 * 64**3 / 1e-4, rel=1e-3)
    (curve,) = (c for c in profile.memory.measured if c.kind == "pointwise")
    assert curve.points == ((1000.0, 1e-5), (100_000.0, 1e-4))
    assert profile.compute_seconds(product(64, 0.0).work) == pytest.approx(1e-4, rel=1e-3)
    assert profile_text(MACHINE, OPS_MEASURED) == text


def test_a_curve_never_falls() -> None:
    falling = (memory("fill", 1000, 5e-5), memory("fill", 2000, 4e-5), memory("fill", 4000, 6e-5))
    profile = parse_profile(profile_text(MACHINE, replace(OPS_MEASURED, ops=OPS_MEASURED.ops + falling)), "toy.toml")
    (curve,) = (c for c in profile.memory.measured if c.kind == "fill")
    assert [seconds for _, seconds in curve.points] == [5e-5, 5e-5, 6e-5]


@pytest.mark.parametrize(("seconds", "priced"), [(2.0e-3, 8e-4), (7e-4, 7e-4), (2.2e-3, 2.2e-3)])
def test_noise_does_not_make_two_collectives_of_an_all_reduce(seconds: float, priced: float) -> None:
    """Up to 30% more than a reduce-scatter and an all-gather is noise, and it saves a start-up; more is a slow
    all-reduce."""
    sizes = {"all_gather": 500, "reduce_scatter": 1000}
    measured = [
        MeasuredLink(op=op, level="node", group_size=2, local_bytes=size, seconds=8e-4) for op, size in sizes.items()
    ]
    measured += [MeasuredLink(op="all_reduce", level="node", group_size=2, local_bytes=1000, seconds=seconds)]
    measured += [MeasuredLink(op="all_reduce", level="node", group_size=2, local_bytes=100_000, seconds=9e-2)]
    text = profile_text(MACHINE, replace(OPS_MEASURED, links=tuple(measured)))
    profile = parse_profile(text, "toy.toml")
    assert profile.seconds("all_reduce", Mesh("dp=2"), ("dp",), 1000) == pytest.approx(priced)


@pytest.mark.parametrize(
    ("small", "large", "slowdown", "seconds"),
    [
        ((5e-4, 1e-3, 1e-4), (3.4e-3, 6e-3, 5e-4), 2.0, 0.0),  # 2.5 of 5 ms, without the caller's 0.4
        ((9e-4, 1e-3, 1e-4), (3.8e-3, 6e-3, 5e-4), 2.0, 4e-4),
        ((0.0, 1e-3, 0.0), (9e-3, 6e-3, 0.0), MOST_SLOWDOWN, 0.0),
        ((1e-3, 1e-3, 0.0), (1e-3, 6e-3, 0.0), 1.0, 1e-3),
    ],
)
def test_what_communications_cost_the_compute_beside_them(
    monkeypatch: pytest.MonkeyPatch,
    small: tuple[float, float, float],
    large: tuple[float, float, float],
    slowdown: float,
    seconds: float,
) -> None:
    """(lost, own, caller's) seconds of a small and a large communication; on a GPU the caller only enqueues."""
    lost = {64: links._Lost(*small), 4096: links._Lost(*large)}
    monkeypatch.setattr(links, "_lost", lambda timer, place, compute, effort, received: lost[received])
    for device, own in (("cpu", seconds), ("cuda", 0.0)):
        timer: Any = SimpleNamespace(device=torch.device(device))
        found = links.contention(timer, places(2, 2)[0], lambda: None, BRIEF.links, (64, 4096))
        assert (found.level, found.slowdown) == ("node", pytest.approx(slowdown))
        assert found.seconds == pytest.approx(own, abs=1e-9)


def test_measured_links_are_priced() -> None:
    measured = [
        MeasuredLink(
            op="all_gather",
            level="node",
            group_size=2,
            local_bytes=size,
            seconds=seconds,
            host=0.25,
        )
        for size, seconds in ((1000, 1e-4), (100_000, 1e-3))
    ]
    beside = (Contention("node", 1.5, 4e-5),)
    text = profile_text(MACHINE, replace(OPS_MEASURED, links=tuple(measured), contentions=beside))
    profile = parse_profile(text, "toy.toml")
    mesh = Mesh("dp=2")
    assert profile.seconds("all_gather", mesh, ("dp",), 100_000) == pytest.approx(1e-3)
    # The caller spent 25 and 250 us: 25 us each time (compute lost 40), and 225 us of the 1100 us in all.
    host = profile.host_seconds("all_gather", mesh, ("dp",), 1e-3)
    assert host == pytest.approx(4e-5 + 1e-3 * 2.25e-4 / 1.1e-3, rel=1e-3)
    assert profile.host_seconds("all_gather", mesh, ("dp",), 1e-6) == 1e-6
    assert profile.links.node.bandwidth == 1e8
    assert profile.compute_slowdown(frozenset({"node"})) == 1.5
    with pytest.raises(MeshweaveError, match="has no cost of 'all_reduce'"):
        profile.seconds("all_reduce", mesh, ("dp",), 1000)


@pytest.mark.parametrize(
    ("num_ranks", "per_node", "expected"),
    [
        (2, 2, [("node", 2)]),
        (2, 1, [("net", 2)]),
        (4, 4, [("node", 4), ("node", 2)]),
        (8, 4, [("node", 4), ("node", 2), ("net", 2)]),
        (12, 3, [("node", 3), ("net", 4), ("net", 2)]),
    ],
)
def test_groups_inside_nodes_and_between_them(num_ranks: int, per_node: int, expected: list[tuple[str, int]]) -> None:
    found = places(num_ranks, per_node)
    assert [(place.level, place.size) for place in found] == expected
    for place in found:
        for group in place.mesh.groups(place.axes):
            nodes = {rank // per_node for rank in group}
            assert len(group) == place.size
            assert len(nodes) == (1 if place.level == "node" else place.size)


LATENCY, LARGE = 4.6e-3, 36e-3  # up to 4 MiB, and of 64 MiB: two processes on an H200, NCCL over sockets


def slow_link(received: float) -> float:
    return LATENCY + max(0.0, received - 4 * MIB) * (LARGE - LATENCY) / (60 * MIB)


def slow_links(is_late: bool = False, plan: MeasurementPlan = LINKS_GPU) -> MeasuredLinks:
    """What is measured between two processes whose collectives take `slow_link`, now and then much longer. `is_late`:
    the time is over from the start."""
    noise = itertools.cycle([1.0, 1.08, 0.95, 1.0, 5.0, 1.02, 0.97])

    def start(place: links.MeasuredGroup, op: str, size: int) -> float:
        return slow_link(bytes_received(op, place.size, size, "test"))

    if is_late:
        plan = replace(plan, links=replace(plan.links, most_seconds=-1.0))
    timer: Any = SimpleNamespace(
        device=torch.device("cuda"),
        peers=ALONE,
        ops=OPS,
        start=start,
        sample=lambda seconds, repeats, lead=0: seconds * next(noise),
    )
    timed = links.time_links(timer, places(2, 2), plan.received, plan.links)
    return parse_table(MeasuredLinks, links_text(MACHINE, Measurements(links=tuple(timed))), "links")


@pytest.mark.parametrize("is_late", [False, True], ids=["in time", "out of time: the largest size is not left out"])
def test_measured_links_are_taken_where_they_are_not_those_of_the_profile(is_late: bool) -> None:
    measured, built_in, mesh = slow_links(is_late), load_profile("h200"), Mesh("dp=2")
    profile = with_links(built_in, measured, 2)
    assert {fit.op for fit in profile.collectives} == set(OPS)
    for op in OPS:
        for received in (MIB // 32, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB):
            size = local_bytes_of(op, 2, received)
            close = pytest.approx(slow_link(received), rel=0.2 if is_late else 0.15)
            assert profile.seconds(op, mesh, ("dp",), size) == close, (
                op,
                received,
            )
    work = product(1024, 0.0).work
    assert profile.compute_seconds(work) == built_in.compute_seconds(work)
    assert profile.devices_per_node == 2
    # What the profile itself says, 20% slower, is not news.
    known = tuple(
        replace(fit, points=tuple((x, 1.2 * built_in.seconds(fit.op, mesh, ("dp",), x)) for x, _ in fit.points))
        for fit in measured.collectives
    )
    assert not with_links(built_in, replace(measured, collectives=known), 2).collectives


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "most"), [("dp=2", 5), ("fsdp=2", 21)])
def test_few_collectives_are_sent_over_links_of_high_latency(mesh: str, most: int) -> None:
    """FSDP2 sends 21 for this model, DDP 5 buckets; costs without large matmuls sent 62 and 35."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=768, num_hidden_layers=6, num_attention_heads=12, num_key_value_heads=12, vocab_size=32000,
        intermediate_size=2304, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    batch = torch.zeros(8, 512, dtype=torch.int64)
    step = mw.compile(
        model,
        loss=lambda out, _: out.loss,
        example={"input_ids": batch, "labels": batch},
        optimizer=torch.optim.AdamW(model.parameters()),
        mesh=mesh,
        forward=lambda m, b: m(**b, use_cache=False),
        profile=with_links(load_profile("h200"), slow_links(), 2),
        passes="default",
    )
    (role,) = step.program.roles
    assert 1 <= sum(node.target in COLLECTIVES for node in role.graph.nodes) <= most


@pytest.mark.parametrize("op", OPS)
def test_ops_are_measured_where_a_device_receives_alike(op: str) -> None:
    assert bytes_received(op, 4, local_bytes_of(op, 4, 1 << 20), "test") == pytest.approx(1 << 20, rel=1e-5)


# Real ones


def test_a_small_calibration_makes_a_profile_of_this_process() -> None:
    stages: list[str] = []
    profile = parse_profile(calibrate(TINY, "here", "meshweave calibrate", CPU, stages.append), "here.toml")
    assert stages == ["ops"]
    assert {c.kind for c in profile.memory.measured} == set(MEMORY_KINDS)
    assert {dtype for dtype, _ in profile.peak} == {"float32", "bfloat16", "float64"}
    assert {(p.dtype, p.direction) for p in profile.attention.measured} == {
        (dtype, direction) for dtype in ("float32", "bfloat16") for direction in ("forward", "backward")
    }
    assert 0 < profile.usable_bytes < profile.memory.bytes
    assert 1e-7 < profile.launch_s < 1e-3
    with pytest.raises(MeshweaveError, match="has no cost of 'all_gather'"):
        profile.seconds("all_gather", Mesh("dp=2"), ("dp",), 1000)


def app() -> typer.Typer:
    made = typer.Typer()
    add_command(made, "calibrate", command.CalibrateOptions, command.calibrate)
    return made


@pytest.mark.slow
def test_the_command_writes_a_file_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "thorough_plan", lambda device: TINY)
    output = tmp_path / "machine.toml"
    done = CliRunner().invoke(app(), ["-o", str(output), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout.strip().splitlines()[-1])
    profile = load_profile(output)
    assert (said["ok"], said["output"]) == (True, str(output))
    assert profile.name == "machine"
    assert output.read_text().startswith("# Measured by `meshweave calibrate -o machine.toml`.")


@pytest.mark.parametrize(
    ("output", "what"),
    [("machine.json", "not a TOML file"), ("none/machine.toml", "there is no such directory")],
)
def test_an_output_that_cannot_be(tmp_path: Path, output: str, what: str) -> None:
    done = CliRunner().invoke(app(), ["-o", str(tmp_path / output)])
    assert done.exit_code == 2
    assert what in done.output


_WORKER = """
import importlib
import typer
command = importlib.import_module("meshweave.cli.calibrate")
from meshweave.cli.command import add_command
from tests.calibrate.test_calibrate import TINY
command.thorough_plan = lambda device: TINY
app = typer.Typer()
add_command(app, "calibrate", command.CalibrateOptions, command.calibrate)
app()
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_measure_their_links_too(tmp_path: Path) -> None:
    output = tmp_path / "pair.toml"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = Path(__file__).parents[2]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    paths = os.pathsep.join([str(root), str(root / "src")])
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", _WORKER, "-o", str(output)],
            env={**os.environ, **shared, "RANK": r, "LOCAL_RANK": r, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in ("0", "1")
    ]
    try:
        said = [job.communicate(timeout=90)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0], said
    profile = load_profile(output)
    mesh = Mesh("dp=2")
    assert {fit.op for fit in profile.collectives} == set(OPS)
    assert all((fit.level, fit.group_size) == ("node", 2) for fit in profile.collectives)
    for op in OPS:
        assert 0 < profile.seconds(op, mesh, ("dp",), 1 << 12) <= profile.seconds(op, mesh, ("dp",), 1 << 20)
    assert 1.0 <= profile.compute_slowdown(frozenset({"node"})) <= 20.0
    assert profile.devices_per_node == 2
    assert "2 processes over gloo" in profile.summary
    assert "written to" not in said[1]  # rank 0 speaks for all
