"""A rank of a torch.distributed job: groups, collectives and failures that reach every rank."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor

from meshweave.disk_cache import machine_of
from meshweave.errors import LayoutError, MeshError
from meshweave.interop.process_groups import default_store
from meshweave.ir.collectives import ALL_GATHER
from meshweave.ir.graph import Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph
from meshweave.runtime.collectives import Group
from meshweave.runtime.coordinator import names_of_ranks
from meshweave.runtime.executor import Compiled, Meter
from meshweave.runtime.interfaces import World
from meshweave.runtime.process_groups import TIMEOUT, ClusterCommunicator
from meshweave.runtime.serial import SerialExecutor
from meshweave.runtime.watch import close_watch, watch_of_job
from meshweave.runtime.world import LocalWorld, check_virtual_devices, checked_device

LINGER = 5.0  # seconds in which rank 0 waits at its end for ranks that have compiled nothing
_NOTES = logging.getLogger("meshweave")


class ClusterWorld:
    """A rank of an initialised torch.distributed job; device ids of the mesh are global ranks.

    Every rank creates its worlds in the same order. Raises MeshError, on every rank, unless the mesh names each rank of
    the job once, and all or none have a GPU. GPUs of different kinds are a warning.
    """

    is_distributed = True

    def __init__(self, mesh: Mesh, device: torch.device | str | None = None) -> None:
        _check_ranks(mesh)
        self.mesh, self.rank = mesh, dist.get_rank()
        self.devices = (self.rank,)
        self.device = _device(device)
        self.communicator = ClusterCommunicator(mesh, self.rank, self.device.type == "cuda")
        self.watch = watch_of_job()
        self.watch.num_worlds += 1
        self._name = f" of model {self.watch.num_worlds}" if self.watch.num_worlds > 1 else ""
        self.communicator.check = self.watch.check
        self.communicator.stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        self.watch.add(self.communicator)
        self._end = finalize(self, self.watch.remove, self.communicator)
        self._end.atexit = False
        _compare_devices(self.watch.gather("the comparison of devices", machine_of(self.device)["device"]))

    def close(self) -> None:
        """Release what this world has. It must not be used afterwards."""
        self._end()

    def executor(
        self,
        roles: Sequence[RankGraph],
        ranks: Sequence[Compiled],
        meter: Meter | None,
        places: Sequence[int] | None = None,
    ) -> SerialExecutor:
        """The executor of this rank, with the process groups that the roles use. All ranks call it together."""
        with self.guard():
            self.communicator.prepare(roles, is_pipeline=places is not None)
        return SerialExecutor(ranks[0], self.rank, self.communicator, meter)

    def meet(self) -> None:
        """Wait until every rank is here."""
        dist.barrier()

    def gather(self, numbers: Tensor) -> dict[int, Tensor]:
        """A one-dimensional CPU tensor of each rank, by rank. All ranks call it with tensors of the same shape."""
        axes = tuple(a for a in self.mesh.axis_names if self.mesh.size(a) > 1)
        (members,) = self.mesh.groups(axes)
        with self.guard():
            started = self.communicator.collect(
                ALL_GATHER.op, self.communicator.group(axes), numbers.to(self.device), [len(members)]
            )
            gathered = self.communicator.wait(started).cpu()
        return dict(zip(members, gathered.view(len(members), -1), strict=True))

    def broadcast(self, value: Tensor) -> Tensor:
        """The first rank's tensor, on every rank, on the world's device. All ranks call it."""
        with self.guard():
            return self.communicator.broadcast(value.to(self.device, copy=True), min(self.mesh.devices))

    def assemble(self, spec: Spec, layout: Layout, pieces: Sequence[Tensor]) -> Tensor:
        """The full tensor, bit for bit, on every process: pieces are gathered over the axes that shard the value.

        Replicas are not sent. Raises LayoutError for a partial value, which has no full tensor before it is reduced.
        """
        if any(layout.mesh.size(axis) > 1 for axis in layout.partial_axes):
            raise LayoutError("a partial value cannot be assembled", got=str(layout), hint="reduce it first")
        mesh = layout.mesh
        axes = tuple(a for a in mesh.axis_names if a in layout.sharded_axes and mesh.size(a) > 1)
        with self.guard():
            group = self.communicator.group(axes, mesh)  # every rank takes part
            full = self._gathered(spec.shape, layout, group, axes, pieces[0]) if pieces else None
            if full is not None and mesh.covers(self.mesh.devices):
                return full
            whole = full if full is not None else torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
            return self.communicator.broadcast(whole, mesh.devices[0])

    def _gathered(
        self, shape: tuple[int, ...], layout: Layout, group: Group, axes: tuple[str, ...], piece: Tensor
    ) -> Tensor:
        """The full tensor on the ranks of the layout's mesh."""
        if not axes:
            return piece.detach().clone()
        members = next(g for g in layout.mesh.groups(axes) if self.rank in g)
        boxes = [layout.box_of(shape, rank) for rank in members]
        largest = max(box.num_elements for box in boxes)
        block = piece.new_zeros(largest)
        block[: piece.numel()] = piece.detach().reshape(-1)
        op = ALL_GATHER.op
        gathered = self.communicator.wait(self.communicator.collect(op, group, block, [len(members)]))
        full = piece.new_empty(shape)
        for box, part in zip(boxes, gathered.split(largest) if largest else [block] * len(boxes), strict=True):
            full[box.slices()] = part[: box.num_elements].view(box.size)
        return full

    def guard(self) -> AbstractContextManager[None]:
        """A context in which a failure of a rank is an error on every rank: `Watch.guard`."""
        return self.watch.guard(self.communicator)

    def call(self, name: str, detail: Any = (), *, meets: bool | None = None) -> AbstractContextManager[None]:
        """`guard`, for a user's call that every rank makes: `Watch.call`."""
        return self.watch.call(name + self._name, detail, meets=meets, communicator=self.communicator)

    def note(self, choice: str) -> None:
        """What this rank does in the current call, by its own decision: shown if ranks differ."""
        self.watch.note(choice)

    def exchange(self, name: str, value: Any) -> Mapping[int, Any]:
        """The values (JSON) of all ranks, without a collective: `Watch.gather`."""
        return self.watch.gather(name, value)

    def check(self) -> None:
        """Raise StepError once another rank has failed."""
        self.watch.check()

    def has_whole(self, layout: Layout) -> bool:
        """Whether every process has the whole value of this layout, so that assembling it communicates nothing."""
        return layout.mesh.covers(self.mesh.devices) and all(layout.mesh.size(a) == 1 for a in layout.sharded_axes)


def _check_ranks(mesh: Mesh) -> None:
    size = dist.get_world_size()
    if sorted(mesh.devices) != list(range(size)):
        ids = ", ".join(map(str, mesh.devices[:8])) + (", ..." if mesh.num_devices > 8 else "")
        raise MeshError(
            "the mesh does not consist of the ranks of the job",
            where=f"mesh {mesh} in a job of {size} processes",
            got=f"{mesh.num_devices} devices: {ids}",
            expected=f"each of the ranks 0 to {size - 1} once",
            hint=f"start {mesh.num_devices} processes (torchrun --nproc-per-node), or use a mesh of {size} devices",
        )


def _compare_devices(devices: Mapping[int, str]) -> None:
    """Compare the devices of all ranks, by rank."""
    kinds = {kind: [rank for rank in devices if devices[rank] == kind] for kind in sorted({*devices.values()})}
    text = ", ".join(f"{kind} on {names_of_ranks(ranks)}" for kind, ranks in kinds.items())
    if len(kinds) > 1 and "cpu" in kinds:
        raise MeshError(
            "some ranks have no GPU",
            got=text,
            expected="a GPU for every rank, or for none",
            hint="see why PyTorch finds no GPU there (torch.cuda.is_available()), or pass device='cpu' on every rank",
        )
    if len(kinds) > 1 and dist.get_rank() == 0:
        _NOTES.warning("devices of different kinds in a job: %s; all of them wait for the slowest", text)


def _device(device: torch.device | str | None) -> torch.device:
    has_nccl = "nccl" in str(dist.get_backend_config()) and torch.cuda.is_available()
    chosen = checked_device(device if device is not None else "cuda" if has_nccl else "cpu")
    if chosen.type == "cuda":
        if chosen.index is None:
            chosen = torch.device("cuda", _own_gpu(dist.get_rank()))
        torch.cuda.set_device(chosen)
    return chosen


def _is_job() -> bool:
    return dist.is_available() and dist.is_initialized()


def check_devices(mesh: Mesh) -> None:
    """Raise MeshError, as `make_world` would, if a step cannot run on as many devices as the mesh has."""
    (_check_ranks if _is_job() else check_virtual_devices)(mesh)


def make_world(mesh: Mesh, device: torch.device | str | None = None, home: torch.device | str | None = None) -> World:
    """This process's part of the mesh: this rank of torch.distributed if it is initialised, else the whole mesh, which
    without a `device` is at `home`."""
    return ClusterWorld(mesh, device) if _is_job() else LocalWorld(mesh, device or home)


def numbers_of_all(world: World, number: int) -> tuple[int, ...]:
    """The numbers (64 bits) that the processes of the world pass. All of them call it together."""
    if not isinstance(world, ClusterWorld):
        return (number,)
    return tuple(map(int, world.gather(torch.tensor([number])).values()))


def on_any(world: World, flag: bool) -> bool:
    """Whether any process of the world passes True. All of them call it together."""
    return any(numbers_of_all(world, int(flag)))


def init_from_env(backend: str | None = None, timeout: timedelta = TIMEOUT) -> tuple[int, int]:
    """Join the job of torchrun's environment: NCCL if there is CUDA, else Gloo. Returns rank and world size.

    Raises MeshError without such an environment, and if not all ranks have joined within `timeout`.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise MeshError(
            "this process is not part of a job",
            got=f"no {', '.join(missing)} in the environment",
            hint="start it with torchrun --nproc-per-node=N",
        )
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if "nccl" in chosen:
        torch.cuda.set_device(_own_gpu(int(os.environ["RANK"])))
    try:
        dist.init_process_group(chosen, timeout=timeout)
    except RuntimeError as error:
        raise MeshError(
            "the ranks of the job did not meet",
            where=f"rank {os.environ['RANK']} at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, {chosen}",
            got=str(error).splitlines()[0],
            expected=f"{os.environ['WORLD_SIZE']} ranks within {timeout.total_seconds():g} s",
            hint="see why a rank is missing, or has another backend for want of a GPU; to wait for another time call "
            "torch.distributed.init_process_group(timeout=...) before compile",
        ) from error
    return dist.get_rank(), dist.get_world_size()


def _own_gpu(rank: int) -> int:
    """The index of the GPU of a rank. MeshError if its host has none for it."""
    count = torch.cuda.device_count()
    own = int(os.environ.get("LOCAL_RANK", rank % max(1, count)))
    if own >= count:
        raise MeshError(
            "this rank has no GPU",
            where=f"rank {rank}",
            got=f"LOCAL_RANK={own} on a host with {count} CUDA devices",
            expected="a process per GPU",
            hint=f"torchrun --nproc-per-node={count or 1}, or init_from_env('gloo') and device='cpu'; to share a GPU, "
            "slowly, for a test: LOCAL_RANK=0 and another NCCL_HOSTID for each rank",
        )
    return own


def shutdown(world: ClusterWorld | None = None) -> None:
    """Leave the job. Safe to call at any time, also after a failure and without a job. Rank 0, which often hosts the
    store, leaves last."""
    if not dist.is_initialized():
        return
    has_failed = close_watch()
    if not has_failed:
        _await_others()
    if not (has_failed and world is not None and world.device.type == "cuda"):
        dist.destroy_process_group()


def _await_others() -> None:
    """Rank 0 waits for ranks that have no watch."""
    store, end = default_store(), time.monotonic() + LINGER
    with suppress(RuntimeError):  # the store ended first
        num_here = store.add("meshweave/leaving", 1)
        while dist.get_rank() == 0 and num_here < dist.get_world_size() and time.monotonic() < end:
            time.sleep(0.02)
            num_here = store.add("meshweave/leaving", 0)
