"""Lower bounds that no plan beats under a profile, from where elements are and where they must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from meshweave.ir.layout import Layout
from meshweave.ir.pieces import joined_runs, nested_chunk
from meshweave.place.movement.within import Request

_Spans = list[tuple[int, int]]  # offset and end of stretches of a dim, in order


def lower_bound_seconds(request: Request) -> float:
    """Seconds that every plan takes at least.

    Devices that differ only along axes faster than some bandwidth w form a node. Elements that a node needs and lacks
    arrive over slower axes, at rate w or less. So for ascending w the bytes per device that must enter nodes give a
    term each, and any necessary move gives a start-up. A value partial over C nodes whose sum D nodes need enters nodes
    (C - 1) + (D - 1) times (first to be whole somewhere, then everywhere: Patarasuk and Yuan, JPDC 2009). A value that
    stays partial over K nodes has K such sums, or these are added up in K - 1 entries, and there is one."""
    source, target, profile = request.source, request.target, request.profile
    if source.mesh != target.mesh:
        return _between_meshes(request)
    mesh = source.mesh
    axes = [axis for axis, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1]
    speeds = {axis: profile.bandwidth_of(mesh, axis) for axis in axes}
    seconds = before = 0.0
    for speed in sorted(set(speeds.values())):
        entering = request.dtype.itemsize * _entering(request, [axis for axis in axes if speeds[axis] <= speed])
        seconds += max(entering - before, 0.0) / speed
        before = max(entering, before)
    return seconds + profile.alpha_s if before else 0.0


def _entering(request: Request, slow: Sequence[str]) -> float:
    """Elements per device, on average or in the node that needs most, that must enter nodes over the `slow` axes."""
    source, target, shape = request.source, request.target, request.shape
    mesh = source.mesh
    kept, reduced, added = _partial_axes(source, target)
    num_kept = mesh.flat_size(axis for axis in slow if axis in kept)
    slow = [axis for axis in slow if axis not in added | kept]  # the place of the addition does not matter
    per_node = mesh.num_devices // mesh.flat_size(slow)
    num_parts = mesh.flat_size(axis for axis in slow if axis in reduced)
    total, most = 0, 0
    for index in product(*(range(mesh.size(axis)) for axis in slow)):
        at = dict(zip(slow, index, strict=True))
        wanted = [_stretches(target, d, size, at) for d, size in enumerate(shape)]
        stretches = [_stretches(source, d, size, at) for d, size in enumerate(shape)]
        need = prod(_length(spans) for spans in wanted)
        if num_parts == 1:
            need -= prod(_length(_common(a, b)) for a, b in zip(wanted, stretches, strict=True))
        total, most = total + need, max(most, need)
    whole = prod(shape)
    summing = (num_parts - 1) * whole
    copying = total - whole if num_parts > 1 else total
    total = num_kept * summing + min(num_kept * copying, (num_kept - 1) * whole + copying)
    return max(total / mesh.num_devices, most / per_node)


def _partial_axes(source: Layout, target: Layout) -> tuple[set[str], set[str], set[str]]:
    """The axes over which the value stays partial, is reduced, and becomes partial."""
    before, after = dict(source.partial), dict(target.partial)
    as_sum = {axis: "sum" if op == "avg" else op for axis, op in before.items()}
    kept = {axis for axis, op in after.items() if op in (before.get(axis), as_sum.get(axis))}
    return kept, set(before) - kept, set(after) - kept


def _stretches(layout: Layout, d: int, size: int, at: dict[str, int]) -> _Spans:
    """The part of dim d that the devices at some coordinates have together."""
    dim, mesh = layout.dims[d], layout.mesh
    parts = [mesh.size(axis) for axis in dim.axes]
    choices = [[at[axis]] if axis in at else range(mesh.size(axis)) for axis in dim.axes]
    spans = (nested_chunk(size, list(zip(parts, index, strict=True)), dim.unit) for index in product(*choices))
    return [(start, start + length) for start, length in joined_runs(span for span in spans if span[1])]


def _length(spans: _Spans) -> int:
    return sum(end - start for start, end in spans)


def _common(a: _Spans, b: _Spans) -> _Spans:
    i = j = 0
    spans: _Spans = []
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            spans.append((start, end))
        i, j = i + (a[i][1] <= b[j][1]), j + (b[j][1] <= a[i][1])
    return spans


@dataclass(frozen=True, slots=True)
class Crossing:
    """Elements that must cross between two meshes: `entering` are on no device of the target and enter it once;
    `receiving` are the most that a device of the target needs and lacks."""

    entering: int
    receiving: int


def must_cross(source: Layout, target: Layout, shape: Sequence[int]) -> Crossing:
    """What must cross in any plan. No device has a value that is partial on its own mesh."""
    shape, boxes, wanted = tuple(shape), source.pieces(shape), target.pieces(shape)
    whole = not source.partial
    present = [boxes[device] for device in wanted if device in boxes] if whole else []
    needs = [
        box.num_elements - (box.intersect(boxes[device]).num_elements if whole and device in boxes else 0)
        for device, box in wanted.items()
    ]
    inside = {box for box in present if box.num_elements}
    entering = prod(shape) - sum(box.num_elements for box in inside)  # the pieces of a layout are equal or disjoint
    return Crossing(entering, 0 if target.partial else max(needs, default=0))


def _between_meshes(request: Request) -> float:
    """A start-up, and the longer of two: what must enter the target's mesh goes over all links; what a device needs and
    lacks comes over its fastest link."""
    source, target, profile = request.source, request.target, request.profile
    crossing = must_cross(source, target, request.shape)
    if not crossing.entering and not crossing.receiving:
        return 0.0
    links = min(source.mesh.num_devices, target.mesh.num_devices)
    entering = profile.seconds("transfer", source.mesh, (), request.dtype.itemsize * crossing.entering / links)
    needed, axes = request.dtype.itemsize * crossing.receiving, target.mesh.axis_names
    inside = [profile.bandwidth_of(target.mesh, axis) for axis in axes if target.mesh.size(axis) > 1]
    links_in = [profile.alpha_s + needed / bandwidth for bandwidth in inside]
    return max(entering, min([profile.seconds("transfer", source.mesh, (), needed), *links_in]))
