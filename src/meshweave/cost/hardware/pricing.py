"""From a profile and the groups of a mesh to seconds as a function of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from meshweave.cost.hardware import nccl
from meshweave.cost.hardware.fitted import along, curve_of, fastest, nearest
from meshweave.cost.hardware.nccl import Shape, shapes
from meshweave.cost.hardware.schema import Link, Point
from meshweave.cost.hardware.volumes import LOCAL
from meshweave.errors import MeshweaveError
from meshweave.ir.mesh import Mesh

if TYPE_CHECKING:
    from meshweave.cost.hardware.profile import MachineProfile

Usage = tuple[tuple[str, float], ...]
# Levels of links: they carry data in parallel, but a bound that adds up their times would count that time once a level.
_CONCURRENT = 2


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of an op of a profile over a mesh and axes. For each shape of group the minimum of its lines counts (or,
    if measured, its curve), and among all shapes the maximum. The caller's part of the time is `host_s` and the share
    `host`."""

    lines: tuple[tuple[nccl.Line, ...], ...]
    curves: tuple[tuple[Point, ...], ...]
    usage: Usage
    host: float = 0.0
    host_s: float = 0.0

    def seconds(self, local_bytes: float) -> float:
        slowest = 0.0
        for group in self.lines:
            slowest = max(slowest, min([line.start + line.slope * local_bytes for line in group]))
        for curve in self.curves:
            slowest = max(slowest, along(curve, local_bytes))
        return slowest


FREE = Price((), (), ())


# Prices depend only on profile, mesh and axes; the planner requests the same few thousands of times.
@lru_cache(maxsize=65536)
def price(profile: MachineProfile, op: str, mesh: Mesh, axes: tuple[str, ...]) -> Price:
    """The price of an op over the flattened `axes`. Raises MeshweaveError for an unknown op, and for a mesh or links
    that the machine lacks."""
    group_size = mesh.flat_size(axes)
    profile.bytes_received(op, group_size, 0)
    profile.check_mesh(mesh)
    if op in LOCAL or (group_size == 1 and op != "transfer"):
        return FREE
    if group_size == 1:
        return _of_shapes(profile, op, (_far(profile),))
    return _of_shapes(profile, op, shapes(mesh.groups(axes), profile.devices_per_node, _ports(profile)))


@lru_cache(maxsize=65536)
def pair_price(profile: MachineProfile, sender: int, receiver: int) -> Price:
    """The price of a message between two devices; from a device to itself it is free."""
    if sender == receiver:
        return FREE
    profile.check_mesh(Mesh("pair=2", devices=(sender, receiver)))
    return _of_shapes(profile, "transfer", shapes([(sender, receiver)], profile.devices_per_node, _ports(profile)))


def shortest(profile: MachineProfile) -> float:
    """The shortest start-up of a collective: between two neighbours, with the fastest protocol."""
    if profile.collectives or profile.nccl is None:
        return 0.0
    constants = profile.nccl
    rings = [base + hop for base, hop in zip(constants.base_ring, constants.node_ring, strict=True)]
    trees = [base + 2 * hop for base, hop in zip(constants.base_tree, constants.node_tree, strict=True)]
    pat = [constants.pat_base + 2 * constants.pat_per_device]
    sharp = [constants.node_nvls] if constants.nvls_efficiency else []
    across = [constants.base_ring[p] + constants.net_ring[p] for p in range(3)]
    return min([*rings, *trees, *pat, *sharp, *across])


def link(profile: MachineProfile, level: str) -> Link:
    """The links of a level. Raises MeshweaveError for a level that the machine lacks."""
    level_link = {"node": profile.links.node, "net": profile.links.net}.get(level)
    if level_link is None:
        raise MeshweaveError(
            f"the machine has no links of the level '{level}'",
            where=f"profile {profile.name}",
            got=level,
            expected="node" if profile.links.net is None else "node or net",
            hint=f"a node has {profile.devices_per_node} devices: add [links.net], or scaled(devices_per_node=...)",
        )
    return level_link


@lru_cache(maxsize=4096)
def bandwidth_of(profile: MachineProfile, mesh: Mesh, axis: str) -> float:
    """See MachineProfile.bandwidth_of."""
    group_shapes = shapes(mesh.groups((axis,)), profile.devices_per_node, _ports(profile))
    (whole,) = shapes([mesh.devices], profile.devices_per_node, _ports(profile))
    levels = set()
    for shape in group_shapes:
        levels |= {"node"} if shape.num_nodes == 1 else {"net"} if shape.most == 1 else {"node", "net"}
    total = sum(_level_bandwidth(profile, level, whole.most) for level in sorted(levels))
    return total * (_CONCURRENT if whole.num_nodes > 1 and whole.most > 1 else 1)


def _level_bandwidth(profile: MachineProfile, level: str, num_inside: int) -> float:
    """The highest rate, in bytes per second and device, on a level: the line rate, that of NVLink SHARP, and the best
    that was measured in groups of two, which start fastest."""
    level_link = link(profile, level)
    best = level_link.bandwidth
    if level == "node":
        best = max(best, nccl.sharp_limit(profile.nccl, level_link, num_inside))
    for fit in profile.collectives:
        curve = curve_of(fit.op, level, 2, [fit])
        best = max(best, fastest(fit.op, curve, 2) if curve else 0.0)
    return best


def _ports(profile: MachineProfile) -> int:
    net = profile.links.net
    return min((net.ports if net else 0) or profile.devices_per_node, profile.devices_per_node)


def _far(profile: MachineProfile) -> Shape:
    """Two devices at the machine's largest distance."""
    has_several = not 0 < profile.num_devices <= profile.devices_per_node
    if profile.links.net is not None and has_several:
        return Shape(2, 2, 1, 1, 1.0, 1.0)
    return Shape(2, 1, 2, 2, 1.0, 1.0)


def _of_shapes(profile: MachineProfile, op: str, group_shapes: tuple[Shape, ...]) -> Price:
    lines, curves = [], []
    usage: dict[str, float] = {}
    host = host_s = 0.0
    for shape in group_shapes:
        if shape.size == 1:
            continue
        level = "node" if shape.num_nodes == 1 else "net"
        link(profile, level)
        curve = curve_of(op, level, shape.size, profile.collectives)
        if curve is not None:
            curves.append(curve)
            fit = nearest(op, level, shape.size, profile.collectives)
            if fit is not None:
                host, host_s = max(host, fit.host), max(host_s, fit.host_s)
            used = {level: 1.0}
        elif profile.nccl is not None:
            group = nccl.lines(op, shape, profile.nccl, profile.links)
            lines.append(group)
            used = {"node": group[-1].node, "net": group[-1].net}
        else:
            raise _unmeasured_error(profile, op, level)
        for name, share in used.items():
            usage[name] = max(usage.get(name, 0.0), share)
    used_levels = tuple(sorted((name, share) for name, share in usage.items() if share > 0))
    return Price(tuple(lines), tuple(curves), used_levels, host, host_s)


def _unmeasured_error(profile: MachineProfile, op: str, level: str) -> MeshweaveError:
    known = sorted({fit.op for fit in profile.collectives if fit.level == level})
    return MeshweaveError(
        f"the profile has no cost of '{op}' on the links of a {level}",
        where=f"profile {profile.name}",
        got=f"measured: {', '.join(known) or 'nothing'}",
        expected=f'[[collectives]] with op = "{op}" and level = "{level}", or [nccl]',
        hint="measure it: torchrun --nproc-per-node=2 -m meshweave calibrate -o machine.toml",
    )
