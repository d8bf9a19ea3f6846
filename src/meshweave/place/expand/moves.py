"""How the steps of a move become collectives and local ops, for even and uneven pieces.

Collectives work along dim 0 of equal blocks, in group order, which is that of the mesh's axes whatever the order in
which they cut a dim. Uneven pieces are padded to the largest before a collective, and compacted by the table of pieces
after it; padding never reaches a consumer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from meshweave.ir import local_ops
from meshweave.ir.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SPARSE_GATHER,
    SPARSE_SCATTER,
    WAIT,
    transfer,
)
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.pieces import is_even, largest_chunk
from meshweave.ir.rank import in_mesh_order
from meshweave.ops.emit import Emitter
from meshweave.place.movement.steps import Step

aten = torch.ops.aten
Finish = Callable[[], fx.Node]


def _group(emit: Emitter, layout: Layout, axes: tuple[str, ...]) -> tuple[int, str]:
    return layout.mesh.flat_size(axes), emit.group(layout.mesh, axes)


def _turn(mesh: Mesh, axes: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of axes in the order of a dim, and their positions there in group order."""
    return tuple(map(mesh.size, axes)), tuple(map(axes.index, in_mesh_order(mesh, axes)))


def _block(shape: tuple[int, ...], layout: Layout, dim: int) -> int:
    """Size of the largest piece along `dim`: blocks are padded to it."""
    return largest_chunk(shape[dim], layout.parts(dim), layout.dims[dim].unit)


def _even(shape: tuple[int, ...], layout: Layout, dim: int) -> bool:
    return is_even(shape[dim], layout.parts(dim), layout.dims[dim].unit)


def _filled(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...]) -> fx.Node:
    """x padded with zeros to the largest piece along the dim that its step gathers."""
    extent, block = emit.extent(shape, step.source, step.dim), _block(shape, step.source, step.dim)
    if isinstance(extent, int) and extent == block:
        return x
    pad: list[Any] = [0] * (2 * (len(shape) - step.dim))
    pad[-1] = emit.linear(block, (extent, -1))
    return emit.call(aten.constant_pad_nd.default, (x, pad, 0), {})


def _slice(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...]) -> Finish:
    start, size = _inside(emit, shape, step.target, step.source, step.dim), emit.extent(shape, step.target, step.dim)
    return lambda: emit.call(aten.narrow.default, (x, step.dim, start, size), {})


def _inside(emit: Emitter, shape: tuple[int, ...], inner: Layout, outer: Layout, dim: int) -> Any:
    """Offset along `dim` of the device's piece in a layout inside its piece in another, which contains it."""
    return emit.linear(emit.offset(shape, inner, dim), (emit.offset(shape, outer, dim), -1))


def _table(emit: Emitter, layout: Layout, shape: tuple[int, ...], dim: int, count: int) -> Any:
    """Offsets and sizes along `dim` in the group of its innermost `count` axes; None if all are equal."""
    return None if _even(shape, layout, dim) else emit.members(shape, layout, dim, count)


def _is_stacked(dim: int, order: tuple[int, ...], table: Any) -> bool:
    """Whether pieces along `dim` are laid out in memory like the blocks of the group."""
    return table is None and dim == 0 and order == tuple(range(len(order)))


def _joined(emit: Emitter, blocks: fx.Node, step: Step, shape: tuple[int, ...]) -> fx.Node:
    """Blocks of the group, concatenated along the dim that they cut until now, without padding."""
    sizes, order = _turn(step.source.mesh, step.axes)
    table = _table(emit, step.source, shape, step.dim, len(sizes))
    if _is_stacked(step.dim, order, table):
        return blocks
    return emit.call(local_ops.join_blocks, (blocks, sizes, order, step.dim, table), {})


def _stack_pieces(
    emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...], dim: int, axes: tuple[str, ...]
) -> fx.Node:
    """x cut along `dim` into the pieces of the group, padded to one size and stacked along dim 0."""
    sizes, order = _turn(step.target.mesh, axes)
    table = _table(emit, step.target, shape, dim, len(sizes))
    if _is_stacked(dim, order, table):
        return x
    return emit.call(local_ops.deal_blocks, (x, sizes, order, dim, table, _block(shape, step.target, dim)), {})


def _all_gather(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...]) -> Finish:
    count, group = _group(emit, step.source, step.axes)
    sent = _filled(emit, x, step, shape)
    started = emit.call(ALL_GATHER.op, (emit.contiguous(sent), count, group), {})
    return lambda: _joined(emit, emit.call(WAIT, (started,), {}), step, shape)


def _without_padding(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...], dim: int) -> fx.Node:
    """The received block without padding."""
    if _even(shape, step.target, dim):
        return x
    return emit.call(aten.narrow.default, (x, dim, 0, emit.extent(shape, step.target, dim)), {})


def _reduce_scatter(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...]) -> Finish:
    count, group = _group(emit, step.source, step.axes)
    dealt = _stack_pieces(emit, x, step, shape, step.dim, step.axes)
    started = emit.call(REDUCE_SCATTER.op, (emit.contiguous(dealt), step.op, count, group), {})
    return lambda: _without_padding(emit, emit.call(WAIT, (started,), {}), step, shape, step.dim)


def _all_reduce(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...]) -> Finish:
    _, group = _group(emit, step.source, step.axes)
    started = emit.call(ALL_REDUCE.op, (emit.contiguous(x), step.op, group), {})
    return lambda: emit.call(WAIT, (started,), {})


def _all_to_all(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...]) -> Finish:
    """From sharded on `dim` to sharded on `to_dim`: cut along to_dim, exchange, join along dim."""
    dim, to_dim = step.dim, step.to_dim
    assert to_dim is not None
    count, group = _group(emit, step.source, step.axes)
    dealt = _stack_pieces(emit, _filled(emit, x, step, shape), step, shape, to_dim, step.to_axes)
    blocks = {dim: _block(shape, step.source, dim), to_dim: _block(shape, step.target, to_dim)}
    rows = blocks.get(0, emit.extent(shape, step.source, 0))
    started = emit.call(ALL_TO_ALL.op, (emit.contiguous(dealt), [rows] * count, [rows] * count, group), {})
    return lambda: _without_padding(
        emit, _joined(emit, emit.call(WAIT, (started,), {}), step, shape), step, shape, to_dim
    )


def _to_partial(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...]) -> Finish:
    mesh, dim = step.source.mesh, step.dim
    if dim < 0:
        index = emit.axis_index(mesh, in_mesh_order(mesh, step.axes))
        return lambda: emit.call(local_ops.keep_first, (x, index, step.op), {})
    before, size = _inside(emit, shape, step.source, step.target, dim), emit.extent(shape, step.target, dim)
    part = emit.call(local_ops.embed_part, (x, dim, before, size, step.op, emit.group(mesh, step.axes)), {})
    return lambda: part


def _scale(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...]) -> Finish:
    return lambda: emit.call(aten.mul.Tensor, (x, step.factor), {})


def dispatch(emit: Emitter, x: fx.Node, step: Step, readers: fx.Node, share: float) -> Finish:
    """A gather of the rows that `readers` name, or a sum of those. Pieces are equal, in group order."""
    count, group = _group(emit, step.source, step.axes)
    started = emit.call(SPARSE[step.kind], (emit.contiguous(x), readers, count, share, group), {})
    return lambda: emit.call(WAIT, (started,), {})


SPARSE = {"sparse_gather": SPARSE_GATHER.op, "sparse_scatter": SPARSE_SCATTER.op}


def take(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...]) -> Finish:
    """A transfer or permute without communication: the piece of the target is cut out of the piece of the source."""
    for dim in range(len(shape)):
        if step.source.dims[dim].axes or step.target.dims[dim].axes:
            start = _inside(emit, shape, step.target, step.source, dim)
            x = emit.call(aten.narrow.default, (x, dim, start, emit.extent(shape, step.target, dim)), {})
    return lambda: x


def send(emit: Emitter, x: fx.Node | None, key: str) -> Finish:
    """A transfer or permute in a role that has the source (x is its piece), the target, or both."""
    started = emit.call(transfer, (x, key), {})
    return lambda: emit.call(WAIT, (started,), {})


# How each step is written. Transfers and permutes, which are not in this table, are messages: `send` or `take`.
STEPS: dict[str, Callable[[Emitter, fx.Node, Step, tuple[int, ...]], Finish]] = {
    "slice": _slice,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "to_partial": _to_partial,
    "scale": _scale,
}
