"""MachineProfile: what communication and compute cost on a machine, from its data file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from meshweave.errors import MeshweaveError
from meshweave.hardware import compute, pricing, scaling
from meshweave.hardware.collectives import LOCAL, bytes_received
from meshweave.hardware.schema import (
    COUNT,
    RATES,
    SECONDS,
    AttentionModel,
    Fit,
    FitError,
    Links,
    MatmulModel,
    MemoryModel,
    Nccl,
    Power,
    figure,
    one_of,
)
from meshweave.hardware.work import Work
from meshweave.ir.mesh import Mesh

_TEXT = {"expected": "text"}
UPDATES = ("fused", "foreach")


@dataclass(frozen=True, slots=True, repr=False)
class MachineProfile:
    """A cluster of nodes of `devices_per_node` devices; device d is the (d % devices_per_node)-th of its node.

    `peak` are matmul rates by dtype, of the data sheet and without sparsity. `launch_s` is the time that a kernel takes
    at least, `eager_s` the time that the processor needs to launch an op in PyTorch's eager mode. `fusion` says
    whether chains of pointwise ops run as one kernel, `update` whether those of an optimizer's update of a parameter do
    (PyTorch's "fused"), or each op by itself ("foreach", its default on GPUs). Communication is priced by `collectives`
    (measured) where they hold the op on the level of links at hand, else by the model of `nccl`. `errors` is what a
    calibration found of its own error. `num_devices` 0: as many as one likes. `device` is a pattern (fnmatch) of the
    names that torch.cuda has for the device: a job on such devices uses the profile unasked.

    Hashable at little cost: by name and version. Equal means equal in every figure.
    """

    name: str = field(metadata=_TEXT)
    version: str = field(metadata=_TEXT)
    source: str = field(metadata=one_of("modelled", "measured"))
    summary: str = field(metadata=_TEXT)
    devices_per_node: int = field(metadata=COUNT)
    fusion: str = field(metadata=one_of("pointwise", "none"))
    launch_s: float = field(metadata=SECONDS)
    memory: MemoryModel
    peak: tuple[tuple[str, float], ...] = field(metadata=RATES)
    matmul: MatmulModel
    attention: AttentionModel
    links: Links
    eager_s: float = field(default=0.0, metadata=SECONDS)
    num_devices: int = field(default=0, metadata=figure("a whole number, 0 or more", 0))
    device: str = field(default="", metadata=_TEXT)
    update: str = field(default="fused", metadata=one_of(*UPDATES))
    power: Power | None = None
    nccl: Nccl | None = None
    collectives: tuple[Fit, ...] = ()
    errors: tuple[FitError, ...] = ()

    def __hash__(self) -> int:
        return hash((self.name, self.version))

    def __repr__(self) -> str:
        return f"MachineProfile({self.name}, version {self.version})"

    @property
    def alpha_s(self) -> float:
        """A start-up that every collective takes: the shortest of the profile, 0 where communication was measured."""
        return pricing.shortest(self)

    @property
    def usable_bytes(self) -> float:
        """Bytes of device memory that tensors may take."""
        return max(self.memory.bytes - self.memory.reserved_bytes, 0.0) * (1 - self.memory.reserved_fraction)

    def bytes_received(self, op: str, group_size: int, local_bytes: float) -> float:
        """Bytes that one device receives when `op` runs in groups of `group_size` on local inputs of `local_bytes`.

        Raises MeshweaveError for an unknown op and for a size that is negative or NaN.
        """
        return bytes_received(op, group_size, local_bytes, f"profile {self.name}")

    def seconds(self, op: str, mesh: Mesh, axes: Sequence[str], local_bytes: float) -> float:
        """Duration of `op` over the flattened `axes` of `mesh` on a local input of `local_bytes`, alone on its links.

        All groups of the mesh run it at once, and the slowest counts. Local ops and groups of one device take 0. It
        never falls as bytes grow. A transfer without axes goes to another mesh, which is not known: between nodes,
        where the machine may have several. Raises MeshweaveError as `bytes_received` does, for a mesh that the machine
        cannot hold, and for links that it lacks.
        """
        if not local_bytes >= 0:
            self.bytes_received(op, 1, local_bytes)
        return _price(self, op, mesh, tuple(axes)).seconds(local_bytes)

    def usage(self, op: str, mesh: Mesh, axes: Sequence[str]) -> tuple[tuple[str, float], ...]:
        """The levels of links ("node", "net") that `op` occupies, and the share of their bandwidth per device that it
        takes when it is large and alone, above 0 and 1 at most. Ops whose shares add up to more slow each other."""
        return _price(self, op, mesh, tuple(axes)).usage

    def host_seconds(self, op: str, mesh: Mesh, axes: Sequence[str], seconds: float) -> float:
        """What of an op's `seconds` the caller spends in starting and finishing it; 0 where links work alone."""
        price = _price(self, op, mesh, tuple(axes))
        return min(seconds, price.host_s + price.host * seconds)

    def bandwidth_of(self, mesh: Mesh, axis: str) -> float:
        """Bytes per second and device that nothing beats along `axis`, in one direction: from the links' line rates.

        On a mesh that is on several nodes with several devices each, both levels may carry at once, and bounds that
        add up what goes over each would count that time twice: there it is twice as much.
        """
        return _bandwidth(self, mesh, axis)

    def transfer_seconds(self, sender: int, receiver: int, num_bytes: float) -> float:
        """Seconds to send `num_bytes` from device to device; 0 from a device to itself."""
        return _pair(self, sender, receiver).seconds(num_bytes)

    def transfer_usage(self, sender: int, receiver: int) -> tuple[tuple[str, float], ...]:
        """As `usage`, of a message from device to device."""
        return _pair(self, sender, receiver).usage

    def compute_slowdown(self, levels: frozenset[str]) -> float:
        """By how much longer compute takes while communication runs on these levels of links: 1 or more.

        What each level takes away adds up. Raises MeshweaveError for a level that the machine lacks.
        """
        return 1.0 + sum(pricing.link(self, level).compute_slowdown - 1.0 for level in sorted(levels))

    def compute_seconds(self, work: Work) -> float:
        """Seconds of `work` with nothing beside it, launches included. Raises MeshweaveError for a missing figure."""
        return _compute(self, work)

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Floating point operations per second of a matmul at best. Raises MeshweaveError for a dtype without one."""
        return compute.peak_flops(self, dtype)

    def check_mesh(self, mesh: Mesh) -> None:
        """Raises MeshweaveError when the mesh has a device that the machine does not have."""
        last = max(mesh.devices, default=0)
        if self.num_devices and last >= self.num_devices:
            raise MeshweaveError(
                "the machine cannot hold the mesh",
                where=f"mesh {mesh}, profile {self.name}",
                got=f"device {last}",
                expected=f"devices 0 to {self.num_devices - 1}",
                hint=f"take a smaller mesh, or profile.scaled(num_devices={last + 1})",
            )

    def scaled(
        self,
        *,
        compute: float = 1.0,
        memory_bandwidth: float = 1.0,
        bandwidth: float = 1.0,
        node_bandwidth: float = 1.0,
        net_bandwidth: float = 1.0,
        latency: float = 1.0,
        memory_bytes: float | None = None,
        devices_per_node: int | None = None,
        num_devices: int | None = None,
    ) -> MachineProfile:
        """What if: the profile with rates times factors, or with other sizes; its name says so ("h100 x2 net").

        `bandwidth` is that of all links. Raises MeshweaveError for what no machine can have.
        """
        factors = {
            "compute": compute,
            "memory bandwidth": memory_bandwidth,
            "links": bandwidth,
            "node": node_bandwidth,
            "net": net_bandwidth,
            "latency": latency,
        }
        sizes = {"memory": memory_bytes, "devices_per_node": devices_per_node, "num_devices": num_devices}
        return scaling.scaled(self, factors, sizes)

    def with_update(self, update: str) -> MachineProfile:
        """The profile whose updates are other kernels: "fused", one a parameter, or "foreach", one an op.

        Raises MeshweaveError for any other.
        """
        if update not in UPDATES:
            expected = f"one of {', '.join(UPDATES)}"
            raise MeshweaveError("no way to update", where=f"profile {self.name}", got=update, expected=expected)
        if update == self.update:
            return self
        return replace(self, name=f"{self.name} {update}", update=update)

    def with_attention(self, kernel: str) -> MachineProfile:
        """The profile with another attention kernel: one of its `attention.kernels`, such as "flash2"
        (FlashAttention-2), "flash3", "cudnn" or "triton" (FlashAttention-1 in Triton). Its name says so.

        Raises MeshweaveError for a kernel that the profile lacks.
        """
        known = tuple(k.name for k in self.attention.kernels)
        if kernel not in known:
            raise MeshweaveError(
                f"the profile has no attention kernel '{kernel}'",
                where=f"profile {self.name}",
                got=kernel,
                expected=f"one of {', '.join(known) or 'nothing'}",
                hint="add it to [[attention.kernels]]",
            )
        if kernel == self.attention.kernel:
            return self
        return replace(self, name=f"{self.name} {kernel}", attention=replace(self.attention, kernel=kernel))


# Prices hang on profile, mesh and axes alone; the planner asks for a few of them thousands of times.
@lru_cache(maxsize=65536)
def _price(profile: MachineProfile, op: str, mesh: Mesh, axes: tuple[str, ...]) -> pricing.Price:
    group_size = mesh.flat_size(axes)
    profile.bytes_received(op, group_size, 0)
    profile.check_mesh(mesh)
    if op in LOCAL or (group_size == 1 and op != "transfer"):
        return pricing.FREE
    return pricing.price(profile, op, mesh, axes)


@lru_cache(maxsize=65536)
def _pair(profile: MachineProfile, sender: int, receiver: int) -> pricing.Price:
    return pricing.FREE if sender == receiver else pricing.pair_price(profile, sender, receiver)


@lru_cache(maxsize=4096)
def _bandwidth(profile: MachineProfile, mesh: Mesh, axis: str) -> float:
    return pricing.bandwidth_of(profile, mesh, axis)


@lru_cache(maxsize=65536)
def _compute(profile: MachineProfile, work: Work) -> float:
    return compute.compute_seconds(profile, work)
