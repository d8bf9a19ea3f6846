"""Layout to and from DTensor placements.

DTensor has one placement per mesh axis and applies them in mesh order. If the layout has another order of the axes on a
dim, the placement becomes `_StridedShard(dim, split_factor=f)`: the dim is already cut into f chunks by axes that come
later in the mesh but further out in the layout, and each of the chunks is cut again. So f is the product of the sizes
of those axes, and the order can be recovered from the factors. Source: torch/distributed/tensor/_dtensor_spec.py,
`_convert_shard_order_to_StridedShard` (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from meshweave.errors import LayoutError
from meshweave.interop.dtensor import StridedShard
from meshweave.ir.layout import REDUCE_OPS, DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.pieces import is_even


def placements_from_layout(layout: Layout, shape: Sequence[int]) -> tuple[Placement, ...]:
    """The DTensor placements, one per mesh axis, under which a tensor of `shape` has the pieces of `layout`.

    Raises LayoutError if DTensor may have other pieces: for a unit that changes them for this shape, or axes out of
    mesh order on a dim that they do not divide.
    """
    layout.check_rank(shape)
    normal = layout.normalized(shape)
    for d, (size, dim) in enumerate(zip(shape, normal.dims, strict=True)):
        if dim.unit != 1:
            raise LayoutError(
                f"DTensor cannot cut dim {d} in blocks of {dim.unit}",
                where=f"layout {layout} on mesh {layout.mesh}, shape {tuple(shape)}",
                got=f"dim {d} of {size} elements cut as {dim}: the unit changes the pieces",
                expected="a unit of 1, or a size that the blocks of all devices divide",
                hint="choose another shape, or move the value to a layout without a unit first",
            )
        in_order = sorted(dim.axes, key=layout.mesh.axis_index)
        if list(dim.axes) != in_order and not is_even(size, normal.parts(d)):
            raise LayoutError(
                f"DTensor may have other pieces of dim {d}, because a strided shard has other remainders",
                where=f"layout {layout} on mesh {layout.mesh}, shape {tuple(shape)}",
                got=f"{size} elements over {{{','.join(dim.axes)}}}",
                expected="a size that the pieces divide, or the axes in mesh order",
                hint=f"write the dim as {{{','.join(in_order)}}}, or choose another size",
            )
    placements: list[Placement] = []
    partial = dict(layout.partial)
    for axis in layout.mesh.axis_names:
        sharded = layout.dim_of(axis)
        if sharded is None:
            placements.append(Partial(partial[axis]) if axis in partial else Replicate())
            continue
        factor = _split_factor(layout.mesh, layout.dims[sharded].axes, axis)
        placements.append(Shard(sharded) if factor == 1 else StridedShard(sharded, split_factor=factor))
    return tuple(placements)


def layout_from_placements(placements: Sequence[Placement], mesh: Mesh, num_dims: int) -> Layout:
    """The layout of DTensor `placements` (one per axis of `mesh`) on a tensor of `num_dims` dims. Exact for every size
    if the axes of a dim are in mesh order, and otherwise if they divide the dim. Raises LayoutError for a wrong number
    of placements, a dim that the tensor lacks, a split factor that matches no order of the axes, and for a placement
    that is neither Shard, Replicate nor a plain Partial.
    """
    if len(placements) != len(mesh.axis_names):
        raise LayoutError(
            "there must be one placement per mesh axis",
            where=f"mesh {mesh}",
            got=f"{len(placements)} placements",
            expected=f"{len(mesh.axis_names)}",
        )
    order: list[list[str]] = [[] for _ in range(num_dims)]
    partial = []
    # Last axis first: a split factor refers to the axes after its own.
    for axis, placement in reversed(list(zip(mesh.axis_names, placements, strict=True))):
        where = f"axis '{axis}' of mesh {mesh}"
        if isinstance(placement, (StridedShard, Shard)):
            _insert(order, axis, placement, mesh, where)
        elif type(placement) is Partial and placement.reduce_op in REDUCE_OPS:
            partial.append((axis, placement.reduce_op))
        elif not isinstance(placement, Replicate):
            raise LayoutError(
                "no layout corresponds to this placement",
                where=where,
                got=repr(placement),
                expected=f"Shard, Replicate or Partial with one of {', '.join(REDUCE_OPS)}",
                hint="redistribute the DTensor to another placement first",
            )
    return Layout(mesh, tuple(DimSharding(tuple(axes)) for axes in order), tuple(partial))


def _split_factor(mesh: Mesh, axes: Sequence[str], axis: str) -> int:
    """Number of chunks cut before `axis` by axes later in the mesh but further out in `axes`."""
    outer = axes[: axes.index(axis)]
    return prod(mesh.size(a) for a in outer if mesh.axis_index(a) > mesh.axis_index(axis))


def _insert(order: list[list[str]], axis: str, placement: Shard | StridedShard, mesh: Mesh, where: str) -> None:
    """Insert `axis` among the later axes of its dim, where the sizes of the axes further out match the split factor."""
    dim = placement.dim + len(order) if placement.dim < 0 else placement.dim
    if not 0 <= dim < len(order):
        raise LayoutError(
            f"there is no dim {placement.dim} to shard",
            where=where,
            got=repr(placement),
            expected=f"a dim of a tensor with {len(order)} dims",
        )
    factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
    later = order[dim]
    factors = [mesh.flat_size(later[:at]) for at in range(len(later) + 1)]
    if factor not in factors:
        raise LayoutError(
            "no order of the mesh axes matches this strided shard",
            where=where,
            got=repr(placement),
            expected=f"a split factor of {', '.join(map(str, sorted(set(factors))))}",
            hint="it comes from a view that merged dims; redistribute the DTensor to Shard first",
        )
    later.insert(factors.index(factor), axis)
