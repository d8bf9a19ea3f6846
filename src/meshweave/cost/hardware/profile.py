"""MachineProfile: the costs of communication and compute on a machine, from its data file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from meshweave.cost.hardware import compute, pricing
from meshweave.cost.hardware.schema import (
    COUNT,
    RATES,
    SECONDS,
    AttentionModel,
    Fit,
    Link,
    Links,
    MatmulModel,
    MemoryModel,
    Nccl,
    Point,
    Power,
    choice_of,
    figure,
)
from meshweave.cost.hardware.volumes import bytes_received
from meshweave.errors import MeshweaveError
from meshweave.ir.mesh import Mesh
from meshweave.ir.work import Work

_TEXT = {"expected": "text"}
UPDATES = ("fused", "foreach")


@dataclass(frozen=True, slots=True, repr=False)
class MachineProfile:
    """A cluster of nodes of `devices_per_node` devices; device d is the (d % devices_per_node)-th of its node.

    `peak` are matmul rates by dtype, of the data sheet and without sparsity. `launch_s` is the minimum time of a
    kernel, `eager_s` the time that the processor needs to launch an op in PyTorch's eager mode. `fusion` says whether
    chains of pointwise ops run as a single kernel, `update` whether the ops of an optimizer's update of a parameter do
    (PyTorch's "fused"), or each op by itself ("foreach", its default on GPUs). Communication is priced by `collectives`
    (measured) if they cover the op on the level of links, else by the model of `nccl`. `errors` are a calibration's own
    estimates of its error. `num_devices` 0: unlimited. `device` is a pattern (fnmatch) of the names that torch.cuda has
    for the device: a job on such devices uses the profile by default.

    It is hashed by name and version, and compared in every figure.
    """

    name: str = field(metadata=_TEXT)
    version: str = field(metadata=_TEXT)
    source: str = field(metadata=choice_of("modelled", "measured"))
    summary: str = field(metadata=_TEXT)
    devices_per_node: int = field(metadata=COUNT)
    fusion: str = field(metadata=choice_of("pointwise", "none"))
    launch_s: float = field(metadata=SECONDS)
    memory: MemoryModel
    peak: tuple[tuple[str, float], ...] = field(metadata=RATES)
    matmul: MatmulModel
    attention: AttentionModel
    links: Links
    eager_s: float = field(default=0.0, metadata=SECONDS)
    num_devices: int = field(default=0, metadata=figure("a whole number, 0 or more", 0))
    device: str = field(default="", metadata=_TEXT)
    update: str = field(default="fused", metadata=choice_of(*UPDATES))
    power: Power | None = None
    nccl: Nccl | None = None
    collectives: tuple[Fit, ...] = ()

    def __hash__(self) -> int:
        return hash((self.name, self.version))

    def __repr__(self) -> str:
        return f"MachineProfile({self.name}, version {self.version})"

    @property
    def alpha_s(self) -> float:
        """The start-up of every collective: the shortest in the profile, 0 if communication was measured."""
        return pricing.shortest(self)

    @property
    def empty_op_s(self) -> float:
        """Seconds of an op that computes nothing (a view, a start or a wait): positive if a processor runs the ops
        itself, else 0."""
        return self.launch_s if self.fusion == "none" else 0.0

    @property
    def usable_bytes(self) -> float:
        """Bytes of device memory that tensors may take."""
        return max(self.memory.bytes - self.memory.reserved_bytes, 0.0) * (1 - self.memory.reserved_fraction)

    def bytes_received(self, op: str, group_size: int, local_bytes: float) -> float:
        """Bytes that a device receives when `op` runs in groups of `group_size` on local inputs of `local_bytes`.

        Raises MeshweaveError for an unknown op and for a size that is negative or NaN.
        """
        return bytes_received(op, group_size, local_bytes, f"profile {self.name}")

    def seconds(self, op: str, mesh: Mesh, axes: Sequence[str], local_bytes: float) -> float:
        """Duration of `op` over the flattened `axes` of `mesh` on a local input of `local_bytes`, alone on its links.

        All groups of the mesh run it at once, and the slowest counts. Local ops and groups of one device take 0. It
        never falls as bytes grow. A transfer without axes goes to another, unknown mesh: it is priced between nodes, if
        the machine may have several. Raises MeshweaveError as `bytes_received` does, for a mesh that the machine cannot
        hold, and for links that it lacks.
        """
        if not local_bytes >= 0:
            self.bytes_received(op, 1, local_bytes)
        return pricing.price(self, op, mesh, tuple(axes)).seconds(local_bytes)

    def usage(self, op: str, mesh: Mesh, axes: Sequence[str]) -> tuple[tuple[str, float], ...]:
        """The levels of links ("node", "net") that `op` occupies, and the share of their bandwidth per device that it
        uses when it is large and alone, above 0 and at most 1. Ops whose shares add up to more slow each other."""
        return pricing.price(self, op, mesh, tuple(axes)).usage

    def host_seconds(self, op: str, mesh: Mesh, axes: Sequence[str], seconds: float) -> float:
        """The part of an op's `seconds` that the caller spends on starting and finishing it; 0 if the links work on
        their own."""
        price = pricing.price(self, op, mesh, tuple(axes))
        return min(seconds, price.host_s + price.host * seconds)

    def bandwidth_of(self, mesh: Mesh, axis: str) -> float:
        """The highest possible rate, in bytes per second and device, along `axis` in one direction: from the links'
        line rates.

        On a mesh over several nodes with several devices each, both levels may carry data in parallel, and bounds that
        add up the times of both would count that time twice: there the rate is doubled.
        """
        return pricing.bandwidth_of(self, mesh, axis)

    def transfer_seconds(self, sender: int, receiver: int, num_bytes: float) -> float:
        """Seconds to send `num_bytes` from device to device; 0 from a device to itself."""
        return pricing.pair_price(self, sender, receiver).seconds(num_bytes)

    def transfer_usage(self, sender: int, receiver: int) -> tuple[tuple[str, float], ...]:
        """As `usage`, of a message from device to device."""
        return pricing.pair_price(self, sender, receiver).usage

    def compute_slowdown(self, levels: frozenset[str]) -> float:
        """The factor by which compute slows down while communication runs on these levels of links: 1 or more. The
        slowdowns of the levels add up. Raises MeshweaveError for a level that the machine lacks."""
        return 1.0 + sum(pricing.link(self, level).compute_slowdown - 1.0 for level in sorted(levels))

    def compute_seconds(self, work: Work) -> float:
        """Seconds of `work` alone, launches included. Raises MeshweaveError for a missing figure."""
        return compute.compute_seconds(self, work)

    def peak_flops(self, dtype: torch.dtype) -> float:
        """Peak floating point operations per second of a matmul. Raises MeshweaveError for a dtype without a peak."""
        return compute.peak_flops(self, dtype)

    def check_mesh(self, mesh: Mesh) -> None:
        """Raises MeshweaveError when the mesh has a device that the machine lacks."""
        last = max(mesh.devices, default=0)
        if self.num_devices and last >= self.num_devices:
            raise MeshweaveError(
                "the machine cannot hold the mesh",
                where=f"mesh {mesh}, profile {self.name}",
                got=f"device {last}",
                expected=f"devices 0 to {self.num_devices - 1}",
                hint=f"use a smaller mesh, or profile.scaled(num_devices={last + 1})",
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
        """A what-if profile: with rates multiplied by factors, or with other sizes; its name shows it ("h100 x2 net").
        `bandwidth` scales all links. Raises MeshweaveError for impossible values."""
        factors = {
            "compute": compute,
            "memory bandwidth": memory_bandwidth,
            "links": bandwidth,
            "node": node_bandwidth,
            "net": net_bandwidth,
            "latency": latency,
        }
        sizes = {"memory": memory_bytes, "devices_per_node": devices_per_node, "num_devices": num_devices}
        return scaled(self, factors, sizes)

    def with_update(self, update: str) -> MachineProfile:
        """The profile with other update kernels: "fused", one kernel per parameter, or "foreach", one per op.
        Raises MeshweaveError for any other."""
        if update not in UPDATES:
            expected = f"one of {', '.join(UPDATES)}"
            raise MeshweaveError("unknown kind of update", where=f"profile {self.name}", got=update, expected=expected)
        if update == self.update:
            return self
        return replace(self, name=f"{self.name} {update}", update=update)

    def with_attention(self, kernel: str) -> MachineProfile:
        """The profile with another attention kernel: one of its `attention.kernels`, such as "flash2"
        (FlashAttention-2), "flash3", "cudnn" or "triton" (FlashAttention-1 in Triton). Its name shows it. Raises
        MeshweaveError for a kernel that the profile lacks.
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


# What-if profiles: a machine that differs from a known machine by factors.

_LATENCIES = (
    "base_ring", "base_tree", "node_ring", "node_tree", "net_ring", "net_tree", "net_overhead", "pat_base",
    "pat_per_device", "node_nvls", "net_nvls_tree",
)  # fmt: skip


def scaled(
    profile: MachineProfile, factors: Mapping[str, float], sizes: Mapping[str, float | int | None]
) -> MachineProfile:
    """The profile with rates times `factors` and with the `sizes` that are not None; see MachineProfile.scaled."""
    for name, factor in factors.items():
        if not 0 < factor < math.inf:
            raise _impossible(profile, name, factor, "a factor above 0")
    for name, size in sizes.items():
        whole = name == "memory" or size is None or size == int(size)
        if size is not None and not (0 < size < math.inf and whole):
            raise _impossible(profile, name, size, "bytes above 0" if name == "memory" else "a whole number, 1 or more")
    changes = [f"x{factor:g} {name}" for name, factor in factors.items() if factor != 1]
    changes += [f"{name}={size:g}" for name, size in sizes.items() if size is not None]
    if not changes:
        return profile
    compute, node, net = factors["compute"], factors["node"] * factors["links"], factors["net"] * factors["links"]
    memory = _memory(profile.memory, factors["memory bandwidth"])
    return replace(
        profile,
        name=" ".join([profile.name, *changes]),
        memory=memory if sizes["memory"] is None else replace(memory, bytes=sizes["memory"]),
        peak=tuple((dtype, rate * compute) for dtype, rate in profile.peak),
        matmul=_matmul(profile.matmul, compute),
        attention=_attention(profile.attention, compute),
        links=Links(_link(profile.links.node, node), profile.links.net and _link(profile.links.net, net)),
        nccl=profile.nccl and _nccl(profile.nccl, factors["latency"], node, net),
        collectives=tuple(
            _fit(fit, factors["latency"], node if fit.level == "node" else net) for fit in profile.collectives
        ),
        devices_per_node=int(sizes["devices_per_node"] or profile.devices_per_node),
        num_devices=int(sizes["num_devices"] or profile.num_devices),
    )


def _faster(points: tuple[Point, ...], factor: float) -> tuple[Point, ...]:
    return tuple((*rest, seconds / factor) for *rest, seconds in points)


def _memory(model: MemoryModel, factor: float) -> MemoryModel:
    curves = tuple(replace(curve, points=_faster(curve.points, factor)) for curve in model.measured)
    return replace(model, bandwidth=model.bandwidth * factor, measured=curves)


def _matmul(model: MatmulModel, factor: float) -> MatmulModel:
    return replace(model, measured=tuple(replace(t, points=_faster(t.points, factor)) for t in model.measured))


def _attention(model: AttentionModel, factor: float) -> AttentionModel:
    def faster(rows: tuple[Point, ...]) -> tuple[Point, ...]:
        return tuple((*rest, rate * factor) for *rest, rate in rows)

    kernels = tuple(replace(k, forward=faster(k.forward), backward=faster(k.backward)) for k in model.kernels)
    measured = tuple(replace(t, points=_faster(t.points, factor)) for t in model.measured)
    return replace(model, kernels=kernels, measured=measured)


def _link(link: Link, factor: float) -> Link:
    return replace(link, bandwidth=link.bandwidth * factor)


def _nccl(constants: Nccl, latency: float, node: float, net: float) -> Nccl:
    """LL is capped by the links it runs on."""
    changed: dict[str, float | Point] = {}
    for name in _LATENCIES:
        value = getattr(constants, name)
        changed[name] = tuple(v * latency for v in value) if isinstance(value, tuple) else value * latency
    inside, *across = constants.ll_cap
    return replace(constants, ll_cap=(inside * node, *(cap * net for cap in across)), **changed)  # type: ignore[arg-type]


def _fit(fit: Fit, latency: float, bandwidth: float) -> Fit:
    """The first point's time is start-up, the rest is bandwidth."""
    first = fit.points[0][1]
    return replace(fit, points=tuple((x, first * latency + (s - first) / bandwidth) for x, s in fit.points))


def _impossible(profile: MachineProfile, name: str, got: float, expected: str) -> MeshweaveError:
    return MeshweaveError(
        f"invalid factor of '{name}'", where=f"profile {profile.name}", got=str(got), expected=expected
    )
