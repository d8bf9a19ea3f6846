"""What a calibration measures, and how the processes of a job measure together."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist

from meshweave.calibrate.cases import (
    Pool,
    Sizes,
    attention_cases,
    batched_cases,
    launch_case,
    matmul_cases,
    memory_cases,
)
from meshweave.calibrate.figures import MachineFacts, Measurements, links_text, profile_text
from meshweave.calibrate.links import Contention, LinkTimer, contention, places, time_links
from meshweave.calibrate.ops import ALONE, Effort, OpCase, Peers, RepeatedOp, time_ops
from meshweave.errors import MeshError
from meshweave.ir.mesh import Mesh
from meshweave.runtime.cluster import ClusterWorld

_KIB, _MIB = 1 << 10, 1 << 20
# glibc returns a freed block to the system until a block of that size was freed once (M_MMAP_THRESHOLD, mallopt(3): its
# dynamic limit is 32 MiB); a running step has freed larger blocks.
_ALLOCATED_BEFORE = 32 * _MIB - 4096
_LEAST_POOL = 64 * _MIB  # has room for the operands of any matmul and attention many times
# Received beside compute: a small tensor, and a layer's gradients.
_BESIDE_BYTES = (64 * _KIB, 4 * _MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementPlan:
    """What is measured and how often; without `ops` links only. Sizes are bytes read and written (memory) or received
    (links)."""

    ops: Effort | None
    links: Effort
    matmul_sizes: tuple[int, ...]
    other_sizes: tuple[int, ...]  # of dtypes beside float32
    max_flops: float
    attention: tuple[Sizes, ...]
    memory: tuple[int, ...]
    received: tuple[int, ...]


# What a job measures by default before its first step, for a few seconds at most. For links, the sizes between those
# dominated by start-up and those dominated by bytes.
BRIEF = MeasurementPlan(
    ops=Effort(5, 0.06, most_seconds=4.0),
    links=Effort(5, 0.12, host_rounds=1, most_seconds=4.0),
    matmul_sizes=(16, 96, 384, 1536),
    other_sizes=(64, 512),
    max_flops=1e9,
    attention=((4, 4, 64, 64), (1, 8, 256, 64)),
    memory=tuple(_KIB << i for i in (0, 6, 9, 11, 14)),
    received=tuple(_KIB << i for i in (0, 5, 9, 12)),
)
# The same on GPUs, which reach their rates at larger sizes: from matmuls of 64 x 64 alone an H200 would have 0.05
# TFLOP/s in bfloat16, and such compute hides any number of collectives. Between processes that share it, a collective
# takes 4.6 ms up to 4 MiB and 36 ms for 64 MiB (NCCL 2.28 over sockets, 2026-11).
BRIEF_GPU = replace(
    BRIEF,
    links=Effort(5, 0.12, block_seconds=1e-2, host_rounds=0, most_seconds=3.0),
    matmul_sizes=(256, 2048),
    other_sizes=(256, 1024, 4096),
    max_flops=3e11,
    attention=((4, 16, 512, 64), (4, 16, 2048, 64), (2, 16, 2048, 128)),
    memory=tuple(_KIB << i for i in (0, 6, 10, 14, 18)),
    received=tuple(_KIB << i for i in (5, 12, 14, 16)),
)
LINKS_GPU = replace(BRIEF_GPU, ops=None)  # where the compute of the GPU is known


def thorough_plan(device: torch.device) -> MeasurementPlan:
    """The same ops, without a limit of time, and links at more sizes: what `meshweave calibrate` measures."""
    plan = BRIEF_GPU if device.type == "cuda" else BRIEF
    return replace(plan, ops=Effort(7, 0.3), links=Effort(9, 0.5), received=tuple(_KIB << i for i in range(0, 17, 2)))


def calibrate(
    plan: MeasurementPlan,
    name: str,
    command: str,
    device: torch.device,
    say: Callable[[str], None] = lambda stage: None,
) -> str:
    """Measure this process's device into the text of a profile's file; in a job of torch.distributed all ranks call it
    together, links are measured too, and every rank gets the same. `command` is recorded in the file as its origin. The
    text of a plan without ops is `schema.MeasuredLinks`.
    Raises MeshError if nodes have different numbers of processes.
    """
    reserved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0  # KiB on Linux
    world = ClusterWorld(Mesh(d=dist.get_world_size()), device) if dist.is_initialized() else None
    if world is None:
        return _Measurement(plan, device, None, say).run(name, command, reserved)
    try:
        with world.guard():
            return _Measurement(plan, device, world, say).run(name, command, reserved)
    finally:
        world.close()


@dataclass(frozen=True, slots=True)
class _Measurement:
    plan: MeasurementPlan
    device: torch.device
    world: ClusterWorld | None
    say: Callable[[str], None]

    def run(self, name: str, command: str, reserved: float) -> str:
        plan, device, world = self.plan, self.device, self.world
        peers = ALONE if world is None else peers_of(world)
        num_ranks = 1 if world is None else world.mesh.num_devices
        per_node = _per_node(num_ranks, peers) if world is not None else _devices_here(device)
        figures = Measurements()
        if plan.ops is not None:
            torch.empty(_ALLOCATED_BEFORE, dtype=torch.uint8, device=device)
            self.say("ops")
            cases = _cases(plan, Pool(device, max(*plan.memory, _LEAST_POOL)))
            launch, *ops = time_ops(list(cases), device, plan.ops, peers)
            figures = replace(figures, launch=launch.seconds, ops=tuple(ops))
        if world is not None and num_ranks > 1:
            figures = self._add_links(figures, LinkTimer(world.mesh, world.rank, device, peers), num_ranks, per_node)
        facts = _machine(name, command, device, num_ranks, per_node, reserved)
        return links_text(facts, figures) if plan.ops is None else profile_text(facts, figures)

    def _add_links(self, figures: Measurements, links: LinkTimer, num_ranks: int, per_node: int) -> Measurements:
        plan, link_places = self.plan, places(num_ranks, per_node)
        self.say("links")
        timed = tuple(time_links(links, link_places, plan.received, plan.links))
        slow: tuple[Contention, ...] = ()
        if plan.ops is not None:
            self.say("compute beside communication")
            beside = _mixed_work(Pool(self.device, _BESIDE_BYTES[1]), self.device)
            levels = {place.level: place for place in reversed(link_places)}  # the largest group of each level
            slow = tuple(contention(links, at, beside, plan.links, _BESIDE_BYTES) for at in levels.values())
        links.close()
        return replace(figures, links=timed, contentions=slow)


def _cases(plan: MeasurementPlan, pool: Pool) -> Iterator[OpCase]:
    """The launch first."""
    dtypes = [torch.float32, torch.bfloat16] + ([torch.float64] if pool.device.type == "cpu" else [torch.float16])
    yield launch_case(pool)
    yield from matmul_cases(pool, dtypes[0], plan.matmul_sizes, plan.max_flops)
    for dtype in dtypes[1:]:
        yield from matmul_cases(pool, dtype, plan.other_sizes, plan.max_flops / 2)
    for dtype in dtypes[:2]:
        yield from batched_cases(pool, dtype)
        yield from attention_cases(pool, dtype, plan.attention)
    yield from memory_cases(pool, plan.memory)


def _mixed_work(pool: Pool, device: torch.device) -> Callable[[], Any]:
    """A small part of a step: a matmul and memory work."""
    aten = torch.ops.aten
    factors = (pool.take((256, 256)), pool.take((256, 512)))
    product = OpCase(aten.mm.default, (factors,))
    sums = OpCase(aten.add.Tensor, ((pool.take((256, 512)), pool.take((256, 512))),))
    blocks = (RepeatedOp(product, 4, device), RepeatedOp(sums, 8, device))

    def run() -> None:
        for block in blocks:
            block.run()

    return run


def peers_of(world: ClusterWorld) -> Peers:
    def reduced(op: Any) -> Callable[[Sequence[float]], list[float]]:
        def over_all(values: Sequence[float]) -> list[float]:
            tensor = torch.tensor(list(values), dtype=torch.float64, device=world.device)
            dist.all_reduce(tensor, op)
            return [float(v) for v in tensor]

        return over_all

    total = reduced(dist.ReduceOp.SUM)
    return Peers(
        world.meet, lambda values: [v / world.mesh.num_devices for v in total(values)], reduced(dist.ReduceOp.MAX)
    )


def _per_node(num_ranks: int, peers: Peers) -> int:
    """Processes of a node, from torchrun."""
    own = float(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    (most,), (negated,) = peers.most([own]), peers.most([-own])
    if most != -negated or num_ranks % int(own):
        raise MeshError(
            "nodes have different numbers of processes",
            where="calibrate",
            got=f"{-negated:g} to {most:g}",
            expected="equally many on each",
            hint="start all nodes with the same --nproc-per-node",
        )
    return int(own)


def _devices_here(device: torch.device) -> int:
    """The most processes that can have a device of their own on this machine."""
    if device.type == "cuda":
        return torch.cuda.device_count()
    return max(1, (os.cpu_count() or 1) // torch.get_num_threads())


def _machine(
    name: str, command: str, device: torch.device, num_ranks: int, per_node: int, reserved: float
) -> MachineFacts:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        kind, memory = properties.name, float(properties.total_memory)
        reserved = memory - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device)
    else:
        threads = torch.get_num_threads()
        kind = f"{platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''} of {os.cpu_count()} cores each"
        memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / per_node
    backend = f" over {dist.get_backend()}" if dist.is_initialized() else ""
    count = f"{num_ranks} processes{backend}, {per_node} a node" if num_ranks > 1 else "1 process, no links"
    summary = f"{count}; {kind}; torch {torch.__version__}; {now} UTC"
    return MachineFacts(
        name=name,
        version=now,
        summary=summary.replace('"', "'"),
        command=command,
        devices_per_node=per_node,
        memory_bytes=memory,
        reserved_bytes=min(reserved, memory / 2),
        fusion="pointwise" if device.type == "cuda" else "none",  # regions are compiled there
    )
