"""Steps within a mesh: the active axes, the search over them, and its path as steps from layout to layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch

from meshweave.cost.hardware import Costs
from meshweave.errors import LayoutError
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.pieces import unit_matters
from meshweave.place.movement.search import Link, MoveProblem, cheapest, least_peak, step_costs_of
from meshweave.place.movement.space import LOCAL, Axes, Edge, Extent, MoveState, bits, space_of
from meshweave.place.movement.steps import REDUCTIONS, Step, apply

# With more active axes than this, axes go to a dim only in the target's order: six axes make 13,699 layouts of a
# matrix, each with some thousand steps.
_MANY_AXES = 4


@dataclass(frozen=True, slots=True)
class Request:
    """A request to the planner: how a value of `shape` gets from a normal form to another.

    `cap` bounds the bytes of the input and output of any step on a device; None: the larger of `room` and twice the
    larger of source and target, or if no plan fits (uneven pieces), the least possible peak."""

    source: Layout
    target: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    profile: Costs
    cap: int | None = None
    room: int = 0

    @property
    def where(self) -> str:
        return f"{self.source} -> {self.target} of {tuple(self.shape)} {str(self.dtype).removeprefix('torch.')}"

    @property
    def roomy(self) -> int:
        """The default cap."""
        return max(self.room, 2 * max(self.bytes_of(self.source), self.bytes_of(self.target)))

    def bytes_of(self, layout: Layout) -> int:
        """Bytes of the largest piece."""
        return self.dtype.itemsize * prod(layout.local_shape(self.shape))

    def work(self, step: Step, before: Layout, after: Layout) -> int:
        """Bytes of a device's operand: a block per member of the group, all as large as the largest."""
        blocks = before.mesh.flat_size(step.axes)
        if step.kind == "reduce_scatter":
            return blocks * self.bytes_of(after)
        if step.kind == "all_to_all":
            assert step.to_dim is not None
            dealt, cut = before.local_shape(self.shape), after.local_shape(self.shape)[step.to_dim]
            return blocks * self.dtype.itemsize * prod((*dealt[: step.to_dim], cut, *dealt[step.to_dim + 1 :]))
        return max(self.bytes_of(before), self.bytes_of(after) if step.kind == "permute" else 0)

    def bytes_during(self, step: Step) -> int:
        """The most bytes of the input and output of a step on a device."""
        before, after = self.bytes_of(step.source), self.bytes_of(step.target)
        apart = step.kind == "transfer" and set(step.source.mesh.devices).isdisjoint(step.target.mesh.devices)
        return max(before, after) if apart else before + after

    def peak(self, steps: Sequence[Step]) -> int:
        """The peak over the steps; without steps the value itself."""
        return max(map(self.bytes_during, steps), default=self.bytes_of(self.source))


@lru_cache(maxsize=16384)
def steps_within(request: Request) -> tuple[Step, ...]:
    """The steps of the cheapest plan from a normal form to another on the same mesh; see `plan_move`.

    Raises LayoutError for reduce ops that do not commute (sum and max of the same value that must be reduced), for an
    average of integers, for a target that is partial(avg) if the source is not, and if no plan stays under the cap."""
    search = MoveSearch.of(request)
    path = cheapest(search.problem, request.roomy if request.cap is None else request.cap)
    if path is None and request.cap is None:
        path = cheapest(search.problem, least_peak(search.problem))
    steps = search.steps(path) if path is not None else ()
    if path is None or (request.cap is not None and request.peak(steps) > request.cap):
        raise no_plan(request, search.least())
    return steps


def no_plan(request: Request, least: int) -> LayoutError:
    return LayoutError(
        "no plan stays under the memory cap",
        where=request.where,
        got=f"a cap of {request.cap} bytes",
        expected=f"{least} bytes or more: the least that the input and output of a step take on a device",
        hint=f"allow {least} bytes, or cut the value over more axes",
    )


@dataclass(frozen=True, slots=True)
class _Ops:
    """The treatment of partial axes. `pending` are reduced with `op`, `added` become partial with their op, over
    `averaged` the value is scaled once (they are reduced as sums, or stay partial as sums). `open` are partial with
    `op` at both ends: the value may be reduced over them and become partial again, as the same sum in other parts."""

    pending: tuple[str, ...]
    open: tuple[str, ...]
    op: str
    added: tuple[tuple[str, str], ...]
    averaged: tuple[str, ...]

    @staticmethod
    def of(request: Request) -> _Ops:
        source, target, dtype = request.source, request.target, request.dtype
        if not source.partial and not target.partial:
            return _NO_OPS
        before, after = dict(source.partial), dict(target.partial)
        as_sum = {axis: "sum" if op == "avg" else op for axis, op in before.items()}
        kept = {axis for axis, op in after.items() if op == before.get(axis) or op == as_sum.get(axis)}
        averaged = tuple(axis for axis, op in before.items() if op == "avg" and after.get(axis) != "avg")
        pending = tuple(axis for axis in before if axis not in kept)
        added = tuple((axis, op) for axis, op in target.partial if axis not in kept)
        if any(op == "avg" for _, op in added):
            raise LayoutError(
                "a move cannot make a value partial(avg)",
                where=request.where,
                got=str(target),
                expected="partial(avg) only over axes of the source's partial(avg)",
                hint="use partial(sum)",
            )
        if pending and len(set(as_sum.values())) > 1:
            raise LayoutError(
                "a value that is partial with several reduce ops cannot be reduced",
                where=request.where,
                got=str(source),
                expected="a single reduce op, because the result depends on their order",
                hint="reduce the inner op where the value is computed",
            )
        if averaged and not (dtype.is_floating_point or dtype.is_complex):
            raise LayoutError(
                "the average of integers would be truncated",
                where=request.where,
                got=f"{dtype} partial(avg: {','.join(averaged)})",
                expected="a floating dtype",
                hint="use a floating-point value, or partial(sum)",
            )
        op = next(iter(as_sum.values())) if len(set(as_sum.values())) == 1 else ""
        return _Ops(pending, tuple(axis for axis in before if op and after.get(axis) == op), op, added, averaged)


_NO_OPS = _Ops((), (), "", (), ())


@dataclass(frozen=True, slots=True)
class MoveSearch:
    """A request with its active axes: all except common outermost axes of a dim in source and target (steps over these
    could only move data away from its place), and axes over which an average, or a value with several reduce ops, stays
    partial."""

    request: Request
    ops: _Ops
    axes: tuple[str, ...]
    kept: tuple[int, ...]  # per dim how many common axes stay
    extents: tuple[Extent, ...]
    problem: MoveProblem

    @staticmethod
    def of(request: Request) -> MoveSearch:
        ops, source, target, shape = _Ops.of(request), request.source, request.target, request.shape
        mesh = source.mesh
        sizes = {axis: size for axis, size in zip(mesh.axis_names, mesh.shape, strict=True) if size > 1}
        kept = tuple(_common(size, sizes, a, b) for size, a, b in zip(shape, source.dims, target.dims, strict=True))
        still = {axis for dim, count in zip(source.dims, kept, strict=True) for axis in dim.axes[:count]}
        still.update(axis for axis, _ in source.partial if axis not in ops.pending and axis not in ops.open)
        axes = tuple(axis for axis in sizes if axis not in still)
        in_play = prod(sizes[axis] for axis in axes)
        extents, even = [], True
        for size, count, a, b in zip(shape, kept, source.dims, target.dims, strict=True):
            before = tuple(sizes[axis] for axis in a.axes[:count])
            extents.append(Extent(size, before, a.unit, b.unit))
            even = even and a.unit == b.unit == 1 and size % (prod(before) * in_play) == 0
        number = {axis: i for i, axis in enumerate(axes)}
        cuts = [
            tuple(tuple(number[axis] for axis in dim.axes[n:]) for dim, n in zip(layout.dims, kept, strict=True))
            for layout in (source, target)
        ]
        old = bits(d for d, (dim, b) in enumerate(zip(source.dims, target.dims, strict=True)) if dim.unit != b.unit)
        old &= bits(d for d, cut in enumerate(cuts[0]) if cut)
        unreduced = bits(number[axis] for axis in (*ops.pending, *ops.open))
        partial = bits(number[axis] for axis, op in target.partial if axis in number and op == ops.op)
        added = [
            bits(number[axis] for axis, its_op in ops.added if its_op == op and axis not in ops.pending)
            for op in dict.fromkeys(op for _, op in ops.added if op != ops.op)
        ]
        start = MoveState(cuts[0], unreduced, old)
        space = space_of(
            tuple(sizes[axis] for axis in axes),
            len(shape),
            None if even else tuple(extents),
            cuts[1] if len(axes) > _MANY_AXES else None,
        )
        replicated = space.replicated(start)
        summed = ((1 << len(axes)) - 1) & ~sum(added) if unreduced else 0
        total = request.dtype.itemsize
        if even:
            total = total * prod(shape) // prod(prod(extent.before) for extent in extents)
        finest = request.dtype.itemsize * prod(shape) / prod(prod(extent.before) for extent in extents) / in_play
        problem = MoveProblem(
            space,
            step_costs_of(request.profile, mesh, axes),
            start,
            cuts[1],
            summed,
            partial,
            tuple(filter(None, added)),
            replicated,
            total,
            finest,
        )
        return MoveSearch(request, ops, axes, kept, tuple(extents), problem)

    def least(self) -> int:
        """The least cap for which there is a plan."""
        path = cheapest(self.problem, least_peak(self.problem))
        assert path is not None, "there is a path under the least peak"
        return self.request.peak(self.steps(path))

    def steps(self, path: Sequence[Link]) -> tuple[Step, ...]:
        """A path as steps from layout to layout, with the scale after the last reduction and to_partial at the end."""
        source, ops, states = self.request.source, self.ops, self.problem.space.states
        after = [states[number] for number, _ in (*path[1:], (self.problem.end, None))]
        drafts = [self._draft(edge, state) for (_, edge), state in zip(path, after, strict=False)]
        if ops.averaged:
            opened = (i for i, step in enumerate(drafts) if step.kind == "to_partial" and step.axes[0] in ops.averaged)
            last = max((i for i, step in enumerate(drafts, 1) if step.kind in REDUCTIONS), default=0)
            at = next(opened, last)
            factor = 1 / source.mesh.flat_size(ops.averaged)
            drafts.insert(at, Step("scale", ops.averaged, source, source, factor=factor))
        late: dict[str, tuple[str, ...]] = {}
        for axis, op in ops.added:
            late[op] = (*late.get(op, ()), *(() if op == ops.op or self._adds(axis) else (axis,)))
        drafts += [Step("to_partial", axes, source, source, op=op) for op, axes in late.items() if axes]
        return chain(self.request, drafts)

    def _adds(self, axis: str) -> bool:
        """Whether the search has to make the value partial over the axis, with another op than the source's."""
        return bool(sum(self.problem.added) >> self.axes.index(axis) & 1)

    def _draft(self, edge: Edge, after: MoveState) -> Step:
        """The step without its layouts, except the dims of a permute's target."""
        kind, source, ops = edge.kind, self.request.source, self.ops
        axes, onto = self._names(edge.axes), edge.to_dim if edge.to_dim >= 0 else edge.dim
        unit = self._unit(onto, after) if kind in ("slice", "reduce_scatter", "all_to_all") else 1
        op = ops.op if kind in REDUCTIONS else ""
        if kind == "to_partial":
            op = dict(ops.added)[axes[0]] if self._adds(axes[0]) else ops.op
        to_dim = edge.to_dim if edge.to_dim >= 0 else None
        target = source
        if kind == "permute":
            target = Layout(source.mesh, tuple(self._dim(d, after) for d in range(len(after.cuts))))
        return Step(kind, axes, source, target, edge.dim, to_dim, self._names(edge.to_axes), unit, op)

    def _names(self, axes: Axes) -> tuple[str, ...]:
        return tuple(self.axes[axis] for axis in axes)

    def _unit(self, d: int, state: MoveState) -> int:
        return self.extents[d].old_unit if state.old >> d & 1 else self.extents[d].unit

    def _dim(self, d: int, state: MoveState) -> DimSharding:
        kept = self.request.source.dims[d].axes[: self.kept[d]]
        return DimSharding((*kept, *self._names(state.cuts[d])), self._unit(d, state))


def _common(size: int, sizes: dict[str, int], a: DimSharding, b: DimSharding) -> int:
    """How many outermost axes of a dim both layouts share, with equal cuts."""
    count = 0
    while count < min(len(a.axes), len(b.axes)) and a.axes[count] == b.axes[count]:
        count += 1
    while count and a.unit != b.unit and not _alike(size, [sizes[axis] for axis in a.axes[:count]], a.unit, b.unit):
        count -= 1
    return count


def _alike(size: int, parts: list[int], *units: int) -> bool:
    """Whether the units change none of the pieces of a dim that is cut by `parts`."""
    return not any(unit_matters(size, parts, unit) for unit in units)


def chain(request: Request, drafts: Sequence[Step]) -> tuple[Step, ...]:
    """The drafts with their layouts and prices, in sequence from the source."""
    layout, steps = request.source, []
    for draft in drafts:
        if draft.kind == "permute":
            draft = replace(draft, target=replace(draft.target, partial=layout.partial))
        after = apply(layout, draft).normalized(request.shape)
        seconds = received = 0.0
        if draft.kind not in LOCAL:
            local_bytes, group_size = request.work(draft, layout, after), layout.mesh.flat_size(draft.axes)
            seconds = request.profile.seconds(draft.kind, layout.mesh, draft.axes, local_bytes)
            received = request.profile.bytes_received(draft.kind, group_size, local_bytes)
        steps.append(replace(draft, source=layout, target=after, seconds=seconds, bytes_received=received))
        layout = after
    return tuple(steps)
