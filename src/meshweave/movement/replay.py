"""replay: applies the steps of a plan to every element, over tables and without the planner's layouts.

Every device has a table of the elements in its array and of the contributions (coordinates along the partial axes of
the source) that their values sum up. Steps cut, join and unite these by their own definition; layouts between the first
and the last are not used. Only messages name boxes of the global index space: for them the step's layouts say where a
device's array should be, and the table whether it is. Axes that no step touches only multiply the work: of these, a
coordinate is replayed for each size of piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import isclose, prod

from meshweave.errors import MeshweaveError, VerifyError
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.pieces import Box, nested_chunk
from meshweave.ir.routes import Routes, routes, routes_within
from meshweave.movement.plan import MovePlan
from meshweave.movement.search import Order
from meshweave.movement.steps import REDUCTIONS, Kind, Step, apply
from meshweave.movement.tables import DeviceTable, Parts, is_complete, join, unite

_Group = list[DeviceTable]  # the tables of the devices of a group, in group order
_Tables = dict[int, DeviceTable]  # by device; a device outside the mesh has an empty table
FindRoutes = Callable[[Step, tuple[int, ...]], Routes]


def proven(plan: MovePlan, shape: Sequence[int]) -> MovePlan:
    """The plan, after a replay at its first use. Raises VerifyError for a plan that does not do what it claims."""
    return _proven(plan, tuple(shape))


@lru_cache(maxsize=16384)
def _proven(plan: MovePlan, shape: tuple[int, ...]) -> MovePlan:
    replay(plan, shape)
    return plan


def routes_of_step(step: Step, shape: tuple[int, ...]) -> Routes:
    """The messages of a transfer or a permute."""
    if step.kind == "transfer":
        return routes(step.source, step.target, shape)
    return routes_within(step.source, step.target, shape, step.axes)


def replay(plan: MovePlan, shape: Sequence[int], find_routes: FindRoutes = routes_of_step) -> None:
    """Raise VerifyError unless the steps take every element from the source's pieces to the target's.

    At the end each device must have its piece of the target in order; over every group of the target's partial axes
    each contribution to each element must exist exactly once, and once on every device if nothing is partial. The steps
    must also respect the order of reductions that the plan claims, scale by 1 / the size of the averaged axes, and
    state the layouts that they lead through. Messages (from `find_routes`) must send each device of the target every
    element of its piece once, from a device that has it: in a transfer complete, in a permute from its own group.
    """
    shape = tuple(shape)
    source, target = plan.source.normalized(shape), plan.target.normalized(shape)
    for start, end, steps, extent in _cores(source, target, plan.steps, shape):
        _replay(start, end, steps, extent, find_routes)
    _check_scale(plan.steps, source, target)
    _check_order(plan.steps, source, plan.order)
    _check_layouts(plan.steps, source, target, shape)


def _replay(
    source: Layout, target: Layout, steps: Sequence[Step], shape: tuple[int, ...], find_routes: FindRoutes
) -> None:
    tables, mesh = _start(source, shape), source.mesh
    for number, step in enumerate(steps, 1):
        where = f"step {number}: {step}"
        try:
            if step.kind in ("transfer", "permute"):
                tables, mesh = _deliver(step, tables, find_routes(step, shape), shape, _every(source)), step.target.mesh
                continue
            sizes, done = [mesh.size(axis) for axis in step.axes], dict[tuple[int, ...], _Group]()
            for group in mesh.groups(step.axes):
                members = [tables[d] for d in group]
                key = tuple(map(id, members))  # replicas have the same tables
                if key not in done:
                    done[key] = _RUN[step.kind](step, members, sizes)
                tables.update(zip(group, done[key], strict=True))
        except (ValueError, IndexError, MeshweaveError) as error:
            raise VerifyError("the step cannot run on the devices' tables", where=where, got=str(error)) from error
    _check_end(tables, source, target, shape)


def _every(source: Layout) -> int:
    """The bit set of all contributions."""
    return (1 << source.mesh.flat_size(source.partial_axes)) - 1


_Core = tuple[Layout, Layout, tuple[Step, ...], tuple[int, ...]]


def _cores(source: Layout, target: Layout, steps: tuple[Step, ...], shape: tuple[int, ...]) -> Iterator[_Core]:
    """The move restricted to the axes that it touches, for each size of piece that the other axes leave of the value.

    An axis that no step names and that both layouts have in the same place (as the outermost of a dim, replicated, or
    partial) splits the devices into independent sets.
    """
    mesh = source.mesh
    if any(step.kind == "transfer" for step in steps) or target.mesh != mesh or len(target.dims) != len(source.dims):
        yield source, target, steps, shape
        return
    named = {axis for step in steps for axis in step.axes}
    kept = [_kept(a.axes, b.axes, named) for a, b in zip(source.dims, target.dims, strict=True)]
    outer = {axis for axes in kept for axis in axes}
    apart = [axis for axis in mesh.axis_names if axis not in named and _same_place(axis, source, target, outer)]
    if not apart:
        yield source, target, steps, shape
        return
    inner = mesh.at(**dict.fromkeys(apart, 0))
    layouts = [source, target, *(layout for step in steps for layout in (step.source, step.target))]
    strips = [_strip(layout, inner, kept, apart) for layout in layouts]
    inside = tuple(
        replace(step, source=a, target=b) for step, a, b in zip(steps, strips[2::2], strips[3::2], strict=True)
    )
    extents = [_extents(size, d, axes, layouts) for d, (size, axes) in enumerate(zip(shape, kept, strict=True))]
    for extent in product(*extents):
        yield strips[0], strips[1], inside, extent


def _kept(a: Sequence[str], b: Sequence[str], named: set[str]) -> tuple[str, ...]:
    """The outermost axes of a dim that both layouts share and no step names."""
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count] and a[count] not in named:
        count += 1
    return tuple(a[:count])


def _same_place(axis: str, source: Layout, target: Layout, outer: set[str]) -> bool:
    if axis in outer:
        return True
    before, after = dict(source.partial), dict(target.partial)
    return all(layout.dim_of(axis) is None for layout in (source, target)) and (axis in before) == (axis in after)


def _strip(layout: Layout, inner: Mesh, kept: Sequence[tuple[str, ...]], apart: Sequence[str]) -> Layout:
    """The layout without the axes in `apart`. Raises VerifyError if it has them elsewhere."""
    dims = []
    for d, dim in enumerate(layout.dims):
        if dim.axes[: len(kept[d])] != kept[d]:
            raise VerifyError("a step moves an axis that it does not name", where=f"dim {d}", got=str(layout))
        dims.append(DimSharding(dim.axes[len(kept[d]) :], dim.unit))
    return Layout(inner, tuple(dims), tuple(p for p in layout.partial if p[0] not in apart))


def _extents(size: int, d: int, axes: tuple[str, ...], layouts: Sequence[Layout]) -> list[int]:
    """The sizes that the outer axes leave of a dim. Raises VerifyError if two layouts cut it differently."""
    parts = [layouts[0].mesh.size(axis) for axis in axes]
    cuts = {
        unit: [nested_chunk(size, list(zip(parts, index, strict=True)), unit) for index in product(*map(range, parts))]
        for unit in dict.fromkeys(layout.dims[d].unit for layout in layouts if layout.dims[d].axes)
    }
    if any(spans != next(iter(cuts.values())) for spans in cuts.values()):
        raise VerifyError("the unit of a dim changes what its outer axes cut", where=f"dim {d}", got=f"units {[*cuts]}")
    return sorted({extent for spans in cuts.values() for _, extent in spans}, reverse=True) or [size]


def _deliver(step: Step, tables: _Tables, routing: Routes, shape: tuple[int, ...], every: int) -> _Tables:
    """The tables of the devices of the target's mesh after all messages of a transfer or a permute."""
    before, after = step.source.pieces(shape), step.target.pieces(shape)
    groups = _group_of(step)
    arrived: dict[int, list[tuple[Box, Parts]]] = {device: [] for device in after}
    for message in routing.messages:
        sender, receiver, name = message.sender, message.receiver, f"{message.sender} -> {message.receiver}"
        if sender not in tables or sender not in before:
            raise ValueError(f"message {name}: device {sender} has nothing")
        if not before[sender].contains(message.box) or not tables[sender].is_piece(before[sender]):
            raise ValueError(f"message {name}: device {sender} does not have {_text(message.box)}")
        if groups and groups[sender] != groups.get(receiver):
            raise ValueError(f"message {name}: device {receiver} is in another group")
        part = tables[sender].part(message.box)
        if step.kind == "transfer" and not is_complete(tables[sender], message.box, every):
            raise ValueError(f"message {name}: a contribution is missing on device {sender}")
        if receiver not in after or not after[receiver].contains(message.box):
            raise ValueError(f"message {name}: {_text(message.box)} are not in the piece of device {receiver}")
        if any(box.intersect(message.box).num_elements for box, _ in arrived[receiver]):
            raise ValueError(f"message {name}: {_text(message.box)} arrive twice")
        arrived[receiver].append((message.box, part))
    for device, received in arrived.items():
        missing = after[device].num_elements - sum(box.num_elements for box, _ in received)
        if missing:
            raise ValueError(f"device {device} does not receive {missing} of {_text(after[device])}")
    whole = {
        device: {box: bits for _, part in received for box, bits in part.items()}
        for device, received in arrived.items()
    }
    if step.kind == "transfer":
        return {device: DeviceTable.of(after[device], every) for device in arrived}
    return {device: DeviceTable(DeviceTable.of(after[device], every).runs, parts) for device, parts in whole.items()}


def _group_of(step: Step) -> Mapping[int, int]:
    """The index of each device's group in a permute."""
    if step.kind == "transfer":
        return {}
    return {device: i for i, group in enumerate(step.source.mesh.groups(step.axes)) for device in group}


def _text(box: Box) -> str:
    return f"elements [{', '.join(f'{o}:{o + s}' for o, s in zip(box.offset, box.size, strict=True))}]"


def _start(source: Layout, shape: Sequence[int]) -> _Tables:
    boxes, tables, by_device = source.pieces(shape), dict[tuple[Box, int], DeviceTable](), {}
    for group in source.mesh.groups(source.partial_axes):
        for bit, device in enumerate(group):
            key = (boxes[device], 1 << bit)
            if key not in tables:
                tables[key] = DeviceTable.of(*key)
            by_device[device] = tables[key]
    return by_device


def _spans(table: DeviceTable, dim: int, unit: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each member of a group cuts a device's array."""
    extent = table.shape[dim]
    return [nested_chunk(extent, list(zip(sizes, index, strict=True)), unit) for index in product(*map(range, sizes))]


def _slice(step: Step, group: _Group, sizes: Sequence[int]) -> _Group:
    return [
        table.cut(step.dim, *span)
        for table, span in zip(group, _spans(group[0], step.dim, step.unit, sizes), strict=True)
    ]


def _all_gather(step: Step, group: _Group, sizes: Sequence[int]) -> _Group:
    return [join(group, step.dim)] * len(group)


def _all_to_all(step: Step, group: _Group, sizes: Sequence[int]) -> _Group:
    if step.to_dim is None or sorted(step.to_axes) != sorted(step.axes):
        raise ValueError("no dim to scatter, or other axes")
    there = [sizes[step.axes.index(axis)] for axis in step.to_axes]
    whole = join(group, step.dim)  # cutting and joining along different dims commute
    spans = _spans(whole, step.to_dim, step.unit, there)
    received = []
    for index in product(*map(range, sizes)):
        place = 0
        for axis, size in zip(step.to_axes, there, strict=True):
            place = place * size + index[step.axes.index(axis)]
        received.append(whole.cut(step.to_dim, *spans[place]))
    return received


def _all_reduce(step: Step, group: _Group, sizes: Sequence[int]) -> _Group:
    return [unite(group)] * len(group)


def _reduce_scatter(step: Step, group: _Group, sizes: Sequence[int]) -> _Group:
    total = unite(group)
    return [total.cut(step.dim, *span) for span in _spans(total, step.dim, step.unit, sizes)]


def _to_partial(step: Step, group: _Group, sizes: Sequence[int]) -> _Group:
    if step.dim < 0:
        return [group[0], *(DeviceTable(table.runs, {}) for table in group[1:])]
    whole = join(group, step.dim)
    return [DeviceTable(whole.runs, table.parts) for table in group]


def _scale(step: Step, group: _Group, sizes: Sequence[int]) -> _Group:
    return group


_RUN: dict[Kind, Callable[[Step, _Group, Sequence[int]], _Group]] = {
    "slice": _slice,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "scale": _scale,
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "to_partial": _to_partial,
}


def _check_end(tables: _Tables, source: Layout, target: Layout, shape: Sequence[int]) -> None:
    boxes, every = target.pieces(shape), _every(source)
    if set(tables) != set(boxes):
        raise VerifyError(
            "the steps do not lead to the devices of the target",
            where=f"{source} -> {target}",
            got=f"devices {sorted(tables)}",
            expected=f"devices {sorted(boxes)}",
        )
    seen: set[tuple[int, ...]] = set()  # replicas hold the same tables
    for device, box in boxes.items():
        if (id(tables[device]), id(box)) in seen:
            continue
        seen.add((id(tables[device]), id(box)))
        if not tables[device].is_piece(box):
            raise VerifyError(
                "the steps do not lead to the pieces of the target",
                where=f"device {device}, {source} -> {target}",
                got=f"elements {list(tables[device].runs)}",
                expected=_text(box),
            )
    for group in target.mesh.groups(target.partial_axes):
        key = (*(id(tables[device]) for device in group), id(boxes[group[0]]), 0)
        if key in seen:
            continue
        seen.add(key)
        try:
            union = unite([tables[device] for device in group])
        except ValueError as error:
            raise _wrong_value(group, source, target, str(error)) from error
        if not is_complete(union, boxes[group[0]], every):
            raise _wrong_value(group, source, target, "a contribution is missing")


def _wrong_value(group: Sequence[int], source: Layout, target: Layout, got: str) -> VerifyError:
    return VerifyError(
        "the steps change the value",
        where=f"devices {list(group)}, {source} -> {target}",
        got=got,
        expected="every contribution to every element once",
    )


def _check_scale(steps: Sequence[Step], source: Layout, target: Layout) -> None:
    kept = [axis for axis, op in target.partial if op == "avg" and target.mesh == source.mesh]
    averaged = [axis for axis, op in source.partial if op == "avg" and axis not in kept]
    scales = [step for step in steps if step.kind == "scale"]
    factor, expected = prod(step.factor for step in scales), 1 / source.mesh.flat_size(averaged)
    axes = [axis for step in scales for axis in step.axes]
    if sorted(axes) != sorted(averaged) or not isclose(factor, expected):
        raise VerifyError(
            "the average is scaled wrongly",
            where=f"{source} -> {target}",
            got=f"{factor:g} over {', '.join(axes) or 'no axis'}",
            expected=f"{expected:g} over {', '.join(averaged) or 'no axis'}",
        )


def _check_order(steps: Sequence[Step], source: Layout, order: Order) -> None:
    """Sound: a reduction runs only while every replicated axis was replicated in the source. Strict: only while no axis
    is replicated. Any: all of them on the source's mesh. A value that is not partial has no reductions."""
    reductions = [step for step in steps if step.kind in REDUCTIONS]
    twins = set() if order == "strict" else set(source.replicated_axes)
    for step in reductions:
        if step.source.mesh != source.mesh:
            raise VerifyError(
                "a value is reduced on another mesh than its own",
                where=str(step),
                got=f"mesh {step.source.mesh}",
                expected=f"mesh {source.mesh}",
            )
        if not source.partial:
            raise VerifyError(
                "a value that is not partial is summed",
                where=str(step),
                got=str(source),
                expected="steps that only move data, which keep the sign of -0.0",
            )
        lost = [axis for axis in step.source.replicated_axes if axis not in twins and source.mesh.size(axis) > 1]
        if lost and order != "any":
            raise VerifyError(
                "a reduction runs where replicas would add in different orders",
                where=str(step),
                got=f"{', '.join(lost)} replicated before it",
                expected="no axis replicated" if order == "strict" else f"only axes replicated in {source}",
            )


def _check_layouts(steps: Sequence[Step], source: Layout, target: Layout, shape: Sequence[int]) -> None:
    layout = source
    for step in steps:
        after = apply(layout, step).normalized(shape)
        if (step.source, step.target) != (layout, after):
            raise VerifyError(
                "the step states other layouts than it has",
                where=str(step),
                got=f"{step.source} -> {step.target}",
                expected=f"{layout} -> {after}",
            )
        layout = after
    if layout != target:
        raise VerifyError("the steps end elsewhere", where=str(source), got=str(layout), expected=str(target))
