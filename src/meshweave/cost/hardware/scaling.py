"""What-if profiles: a machine that differs from a known machine by factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from meshweave.cost.hardware.schema import AttentionModel, Fit, Link, Links, MatmulModel, MemoryModel, Nccl, Point
from meshweave.errors import MeshweaveError

if TYPE_CHECKING:
    from meshweave.cost.hardware.profile import MachineProfile

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
