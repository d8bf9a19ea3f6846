"""Dispatch: makes moves of token rows sparse, if every device reads, or has, only some of the rows.

With experts over devices a device looks up only the tokens of its own experts, and contributes only those to a sum. So
it need not receive the others: `move(x, layout, readers, share)`, where `readers` [devices, rows] is a value of the
graph with the rows that each device reads. The values between a gathered row and the sorted rows that devices own
(`Layout.owned`) are followed op by op; at any other op the move stays dense.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import fx

from meshweave.ir import ops
from meshweave.ir.blocks import num_blocks_of
from meshweave.ir.collectives import SPARSE_GATHER, SPARSE_SCATTER
from meshweave.ir.graph import Spec, StepGraph, copy_meta, row_index, spec_of
from meshweave.ir.layout import WHOLE, DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.pieces import is_even, nested_chunk
from meshweave.ir.rank import in_mesh_order
from meshweave.place.movement.arrange import PlanMove
from meshweave.place.movement.own_sums import LOOKUPS, PUTS
from meshweave.place.movement.plan import MovePlan
from meshweave.place.movement.steps import Kind
from meshweave.place.rates import Rates, default_rates

aten = torch.ops.aten
ours = torch.ops.meshweave
_SPARSE: dict[str, tuple[Kind, Any]] = {
    "all_gather": ("sparse_gather", SPARSE_GATHER),
    "reduce_scatter": ("sparse_scatter", SPARSE_SCATTER),
}
_INTEGER_BYTES = 32  # bytes of index computation per sorted row: two integers, written and read
_SAME_ROWS = frozenset({aten.view.default, aten._to_copy.default})  # rows of `width` elements keep their order

_LOOKUPS = frozenset({*LOOKUPS, aten.index_select.default})


@dataclass(frozen=True, slots=True)
class Path:
    """From sorted rows, which devices own in `layout` by `ends`, to rows of `width` elements of a moved value.

    `steps`, in this order: ("lookup", index) for the sorted rows at `index`, ("group", k) if k successive rows form a
    row. With `places` the i-th of these belongs to row `places[i]` of the value. `num_blocks`: if not 0, all these rows
    are in so many blocks, and refer to rows of the same block.
    """

    ends: fx.Node
    layout: Layout
    num_rows: int
    width: int
    steps: tuple[tuple[str, Any], ...] = ()
    places: fx.Node | None = None

    @property
    def num_blocks(self) -> int:
        return spec_of(self.ends).shape[0] if len(spec_of(self.ends).shape) > 1 else 0

    @property
    def blocks(self) -> DimSharding:
        """How the blocks are cut."""
        return DimSharding(self.layout.dims[0].axes) if self.num_blocks else WHOLE

    @property
    def owning_axes(self) -> tuple[str, ...]:
        """The axes whose devices own different sorted rows of the same block, or of all rows."""
        cut = () if self.num_blocks else self.layout.dims[0].axes
        return (*cut, *self.layout.owned_axes)


def sparse_plan(plan: MovePlan, share: float) -> MovePlan | None:
    """The plan of the same move if a device reads or has only a `share` of its rows; None if it has no sparse form.
    There is a sparse form of a gather or sum over a single group along dim 0, of equal pieces in group order. Outer
    axes may cut dim 0 as well."""
    if len(plan.steps) != 1 or plan.steps[0].kind not in _SPARSE:
        return None
    (step,), request = plan.steps, plan.request
    cut = step.source if step.kind == "all_gather" else step.target
    whole = step.target if step.kind == "all_gather" else step.source
    axes, mesh, shape = step.axes, cut.mesh, request.shape
    is_outer = bool(cut.dims) and cut.dims[0].axes == (*whole.dims[0].axes, *axes)
    is_stacked = step.dim == 0 and is_outer and axes == in_mesh_order(mesh, axes)
    is_whole = all(not dim.axes for dim in cut.dims[1:-1]) and is_even(shape[0], cut.parts(0), cut.dims[0].unit)
    if not is_stacked or not is_whole or step.op not in ("", "sum"):
        return None
    kind, row = _SPARSE[step.kind]
    num_bytes = share * prod(whole.local_shape(shape)) * request.dtype.itemsize
    seconds = request.profile.seconds(row.curve, mesh, axes, num_bytes)
    received = request.profile.bytes_received(row.curve, mesh.flat_size(axes), num_bytes)
    sparse = replace(step, kind=kind, seconds=seconds, bytes_received=received)
    return replace(plan, steps=(sparse,), seconds=seconds, bytes_received=received)


def make_sparse(step: StepGraph, plan_move: PlanMove, rates: Rates = default_rates) -> StepGraph:
    """The placed graph with every move made sparse that can be, and is cheaper so under a balanced load. `rates` are
    those at which a device selects rows."""
    writer = _SparseMoves(step.graph, plan_move, rates)
    has_owned_rows = any(node.target is ours.enter_rows.default for node in step.graph.nodes)
    for node in step.graph.find_nodes(op="call_function", target=ops.move) if has_owned_rows else ():
        writer.move(node)
    return step


class _SparseMoves:
    """Writes sparse moves, and their row masks, once for all moves of equal paths."""

    def __init__(self, graph: fx.Graph, plan_move: PlanMove, rates: Rates) -> None:
        self.graph, self.plan_move, self.rates = graph, plan_move, rates
        self.readers: dict[Any, fx.Node] = {}

    def plan(self, node: fx.Node) -> MovePlan:
        source, spec = node.args[0].meta["layout"], spec_of(node)  # type: ignore[union-attr]
        return self.plan_move(source, node.meta["layout"], spec.shape, spec.dtype)

    def move(self, node: fx.Node) -> None:
        plan, source = self.plan(node), node.args[0]
        if sparse_plan(plan, 1.0) is None:
            return
        assert isinstance(source, fx.Node)
        path = self.read(node) if plan.steps[0].kind == "all_gather" else _path_of_sum(source)
        step, shape = plan.steps[0], spec_of(node).shape
        whole, axes = step.target if step.kind == "all_gather" else step.source, step.axes
        if path is None or not _fits(path, shape, axes) or whole.dims[0].axes != path.blocks.axes:
            return
        num_rows = prod(shape) // path.width
        share = _expected_share(path, num_rows)
        sparse = sparse_plan(plan, share)
        if (
            sparse is None
            or sparse.seconds + _handling_seconds(path, num_rows, plan, share, self.rates) >= plan.seconds
        ):
            return
        readers = self.mask(path, axes, num_rows)
        if any(user < readers for user in node.users):
            return
        with self.graph.inserting_before(node if readers < node else readers.next):
            new = self.graph.call_function(ops.move, (source, node.args[1], readers, share))
        copy_meta(node, new, layout=node.meta["layout"])
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    # how a gathered value is read

    def read(self, node: fx.Node) -> Path | None:
        """The common path of all users of a value; None if there is another use."""
        paths = {self.read_by(node, user) for user in node.users}
        return paths.pop() if len(paths) == 1 else None

    def read_by(self, node: fx.Node, user: fx.Node) -> Path | None:
        if user.target is ours.enter_rows.default and user.args[2] == 0:
            return _sorted_rows(user.args[1], user.meta["layout"], spec_of(node))
        if user.target in _LOOKUPS and user.args[0] is node and row_index(user):
            return _at_places(self.read(user), user, spec_of(node))
        if user.target in _SAME_ROWS or (user.target is ops.move and self.is_slice(user)):
            return self.read(user)
        if user.target is aten.expand.default:
            return _path_to_groups(self.read(user), spec_of(user).shape, spec_of(node).shape)
        if _adds_on_zeros(user) and user.args[2] is node:
            return _looked_up(self.read(user), user, spec_of(node))
        return None

    def is_slice(self, node: fx.Node) -> bool:
        return len(node.args) == 2 and all(step.kind == "slice" for step in self.plan(node).steps)

    # row masks

    def mask(self, path: Path, axes: tuple[str, ...], num_rows: int) -> fx.Node:
        """The value with the rows that each device of a group reads, computed as early as possible."""
        key = (path, axes, num_rows)
        if key not in self.readers:
            self.readers[key] = self.written(path, axes, num_rows)
        return self.readers[key]

    def written(self, path: Path, axes: tuple[str, ...], num_rows: int) -> fx.Node:
        needed = [
            path.ends,
            *(by for kind, by in path.steps if kind == "lookup"),
            *([path.places] if path.places else []),
        ]
        last = max(needed)
        with self.graph.inserting_before(last.next):
            emit = _Emit(self.graph, last, path.layout.mesh, path.blocks)
            tables = _tables(path, axes)
            copies = len(tables[2]) // (len(tables[0]) * len(tables[1]))
            owners = (emit.rows(path.ends), path.num_rows, *tables)
            members = emit.call(ours.row_owners.default, owners, (path.num_rows, copies))
            for kind, by in path.steps:
                rows, copies = spec_of(members).shape
                if kind == "group":
                    shape = (rows // by, copies * by)
                    members = emit.call(aten.view.default, (members, list(shape)), shape)
                else:
                    index = emit.rows(by)
                    shape = (spec_of(index).shape[0], copies)
                    members = emit.lookup(members, index, path.num_blocks, shape)
            count = path.layout.mesh.flat_size(axes)
            places = path.places and emit.rows(path.places)
            args = (members, places, count, num_rows, max(path.num_blocks, 1))
            return emit.call(ours.row_readers.default, args, (count, num_rows), torch.bool, dim=1)


@dataclass(frozen=True, slots=True)
class _Emit:
    """Writes ops that every device computes for the blocks of rows that it has, or for all rows, with metadata as of
    `like`."""

    graph: fx.Graph
    like: fx.Node
    mesh: Mesh
    blocks: DimSharding

    def layout(self, shape: tuple[int, ...], dim: int = 0) -> Layout:
        dims = (self.blocks if d == dim else WHOLE for d in range(len(shape)))
        return Layout(self.mesh, tuple(dims)).normalized(shape)

    def call(
        self, target: Any, args: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.int64, dim: int = 0
    ) -> fx.Node:
        new = self.graph.call_function(target, args)
        return copy_meta(self.like, new, spec=Spec(shape, dtype), layout=self.layout(shape, dim))

    def lookup(self, table: fx.Node, index: fx.Node, num_blocks: int, shape: tuple[int, ...]) -> fx.Node:
        if num_blocks:
            return self.call(ours.block_index.default, (table, index, num_blocks), shape)
        return self.call(aten.index.Tensor, (table, [index]), shape)

    def rows(self, value: fx.Node) -> fx.Node:
        """A value of rows, or of their blocks, along dim 0: those that every device has."""
        layout = self.layout(spec_of(value).shape)
        copy = next((v for v in _origins(value) if v.meta["layout"] == layout), None)
        if copy is None:
            copy = copy_meta(value, self.graph.call_function(ops.move, (value, str(layout))), layout=layout)
        return copy


def _origins(value: fx.Node) -> Iterator[fx.Node]:
    """A value and the values that it was moved from."""
    yield value
    while value.target is ops.move:
        value = value.args[0]  # type: ignore[assignment]
        yield value


# Paths. Reads of a value and contributions to a sum are followed in the same way.


def _sorted_rows(ends: Any, layout: Layout, spec: Spec) -> Path:
    """The sorted rows themselves, along dim 0 of a value."""
    return Path(ends, layout, spec.shape[0], prod(spec.shape[1:]))


def _at_places(path: Path | None, node: fx.Node, table: Spec) -> Path | None:
    """The path to rows of a table at an index that `path` leads to, possibly with owned places only."""
    at, width = row_index(node), prod(table.shape[1:])
    assert at is not None, "the caller has checked it"
    if at.target is ours.enter_rows.default:
        sorted_rows = _sorted_rows(at.args[1], at.meta["layout"], spec_of(at))
        owned = replace(sorted_rows, width=width, places=at.args[0])  # type: ignore[arg-type]
        return owned if owned.num_blocks == num_blocks_of(node) else None
    is_free = path is not None and path.places is None and path.width == width and not at.meta["layout"].owned
    if path is None or not is_free or path.num_blocks != num_blocks_of(node):
        return None
    return replace(path, places=at)


def _path_to_groups(path: Path | None, many: tuple[int, ...], few: tuple[int, ...]) -> Path | None:
    """A path to rows of shape `few`, each of several successive rows of shape `many`."""
    if many == few or path is None or path.places is not None or len(many) != len(few):
        return path if many == few else None
    dims = [d for d, (a, b) in enumerate(zip(many, few, strict=True)) if a != b]
    if len(dims) != 1 or few[dims[0]] != 1 or prod(many[dims[0] + 1 :]) != path.width:
        return None
    return replace(path, steps=(*path.steps, ("group", many[dims[0]])))


def _looked_up(path: Path | None, node: fx.Node, rows: Spec) -> Path | None:
    """A path to rows at an index along dim 0, looked up or added there."""
    at = row_index(node)
    if path is None or path.places is not None or at is None or prod(rows.shape[1:]) != path.width:
        return None
    if path.num_blocks != num_blocks_of(node):
        return None
    return None if at.meta["layout"].owned else replace(path, steps=(*path.steps, ("lookup", at)))


def _path_of_sum(node: fx.Node) -> Path | None:
    """The path of a part of a sum whose rows are zeros except those that a device owns."""
    args: Any = node.args
    if node.target is ours.leave_rows.default and args[2] == 0:
        return _sorted_rows(args[1], args[0].meta["layout"], spec_of(node))
    if node.target in _SAME_ROWS:
        return _path_of_sum(args[0])
    if node.target is aten.sum.dim_IntList:
        many = spec_of(args[0]).shape
        summed = {d % len(many) for d in args[1]}
        return _path_to_groups(
            _path_of_sum(args[0]), many, tuple(1 if d in summed else size for d, size in enumerate(many))
        )
    if _adds_on_zeros(node) and row_index(node):
        return _at_places(_path_of_sum(args[2]), node, spec_of(node))
    return _looked_up(_path_of_sum(args[0]), node, spec_of(args[0])) if node.target in _LOOKUPS else None


def _adds_on_zeros(node: fx.Node) -> bool:
    args: Any = node.args
    return node.target in PUTS and len(args) > 3 and args[3] is True and ops.is_zeros(args[0])


def _fits(path: Path, shape: tuple[int, ...], axes: tuple[str, ...]) -> bool:
    """Whether the rows of a path are whole rows of a value of this shape, distributed over only these axes."""
    widths = [prod(shape[d:]) for d in range(1, len(shape) + 1)]
    return path.width in widths and bool(path.layout.owned_axes) and set(path.owning_axes) <= set(axes)


def _tables(path: Path, axes: tuple[str, ...]) -> tuple[list[int], list[int], list[int]]:
    """The distribution of the sorted rows, in the form of `grouped.row_owners`: ends of their pieces and of the pieces
    of the experts, and the members of the group over `axes` that have each of both."""
    layout, mesh = path.layout, path.layout.mesh
    cut = WHOLE if path.num_blocks else layout.dims[0]
    owned = DimSharding(layout.owned_axes)
    rest = tuple(axis for axis in axes if axis not in (*cut.axes, *owned.axes))
    group = in_mesh_order(mesh, axes)
    every = (*cut.axes, *owned.axes, *rest)
    members = []
    for index in product(*(range(mesh.size(axis)) for axis in every)):
        at, member = dict(zip(every, index, strict=True)), 0
        for axis in group:
            member = member * mesh.size(axis) + at[axis]
        members.append(member)
    num_experts = spec_of(path.ends).shape[-1]
    return _stops(mesh, cut, path.num_rows), _stops(mesh, owned, num_experts), members


def _stops(mesh: Mesh, cut: DimSharding, size: int) -> list[int]:
    parts = [mesh.size(axis) for axis in cut.axes]
    pieces = (
        nested_chunk(size, list(zip(parts, index, strict=True)), cut.unit) for index in product(*map(range, parts))
    )
    return [start + length for start, length in pieces]


# costs


def _expected_share(path: Path, num_rows: int) -> float:
    """The fraction of rows that a device reads if every row chooses equally many distinct experts, all equally
    often."""
    num_experts, mesh = spec_of(path.ends).shape[-1], path.layout.mesh
    num_devices = mesh.flat_size(path.owning_axes)
    choices = min(max(round(path.num_rows / num_rows), 1), num_experts)
    others = num_experts * (1 - 1 / num_devices)
    return 1 - prod(max(others - i, 0) / (num_experts - i) for i in range(choices))


def _handling_seconds(path: Path, num_rows: int, plan: MovePlan, share: float, rates: Rates) -> float:
    """Seconds of a sparse move besides its communication: to select rows, to put them among zeros, and to compute the
    masks."""
    step, dtype = plan.steps[0], plan.request.dtype
    whole = step.target if step.kind == "all_gather" else step.source
    num_bytes = prod(whole.local_shape(plan.request.shape)) * dtype.itemsize
    routing = _INTEGER_BYTES * path.num_rows + whole.mesh.flat_size(step.axes) * num_rows
    routing //= whole.mesh.flat_size(path.blocks.axes)
    return ((1 + 3 * share) * num_bytes + routing) / rates(dtype).bytes_per_second
