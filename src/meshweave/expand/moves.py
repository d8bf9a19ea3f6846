"""How the steps of a move become collectives and local ops, for even and uneven pieces alike.

Collectives work along dim 0 of equal blocks. Uneven pieces are padded to the largest before, and compacted by the
table of pieces after; the pad never reaches a consumer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from meshweave.expand.emit import Emitter
from meshweave.ir import local_ops
from meshweave.ir.layout import Layout
from meshweave.ir.pieces import is_even, largest_chunk
from meshweave.ir.rank import WAIT, collectives, transfer
from meshweave.movement.steps import Step

aten = torch.ops.aten
Finish = Callable[[], fx.Node]


def _group(emit: Emitter, layout: Layout, axes: tuple[str, ...]) -> tuple[int, str]:
    return layout.mesh.flat_size(axes), ",".join(emit.names(layout.mesh, axes))


def _block(shape: tuple[int, ...], layout: Layout, dim: int) -> int:
    """Size of the largest piece along `dim`: what blocks are padded to."""
    return largest_chunk(shape[dim], layout.parts(dim), layout.dims[dim].unit)


def _even(shape: tuple[int, ...], layout: Layout, dim: int) -> bool:
    return is_even(shape[dim], layout.parts(dim), layout.dims[dim].unit)


def _padded(emit: Emitter, x: fx.Node, rank: int, dim: int, held: Any, block: int) -> fx.Node:
    if isinstance(held, int) and held == block:
        return x
    pad: list[Any] = [0] * (2 * (rank - dim))
    pad[-1] = emit.linear(block, (held, -1))
    return emit.call(aten.constant_pad_nd.default, (x, pad, 0), {})


def _slice(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...]) -> Finish:
    dim = step.dim
    inside = emit.offset(shape, step.source, dim) if step.source.dims[dim].axes else 0
    start = emit.linear(0, (emit.offset(shape, step.target, dim), 1), (inside, -1))
    size = emit.extent(shape, step.target, dim)
    return lambda: emit.call(aten.narrow.default, (x, dim, start, size), {})


def _table(emit: Emitter, layout: Layout, shape: tuple[int, ...], dim: int) -> Any:
    """Offsets and sizes along `dim` in the group of the innermost axis of that dim; None where all are equal."""
    return None if _even(shape, layout, dim) else emit.members(shape, layout, dim)


def _all_gather(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...]) -> Finish:
    dim = step.dim
    count, group = _group(emit, step.source, step.axes)
    block = _block(shape, step.source, dim)
    sent = _padded(emit, x, len(shape), dim, emit.extent(shape, step.source, dim), block)
    started = emit.call(collectives.all_gather_into_tensor.default, (emit.contiguous(sent), count, group), {})
    table = _table(emit, step.source, shape, dim)

    def finish() -> fx.Node:
        done = emit.call(WAIT, (started,), {})
        if table is None and dim == 0:
            return done
        return emit.call(local_ops.join_blocks, (done, count, dim, table), {})

    return finish


def _dealt(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...], dim: int) -> fx.Node:
    """x cut along `dim` into the pieces of the group, padded to one size and stacked along dim 0."""
    table = _table(emit, step.target, shape, dim)
    if table is None and dim == 0:
        return x
    count = step.target.mesh.flat_size(step.axes)
    return emit.call(local_ops.deal_blocks, (x, count, dim, table, _block(shape, step.target, dim)), {})


def _own(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...], dim: int) -> fx.Node:
    """The received block without its padding."""
    if _even(shape, step.target, dim):
        return x
    return emit.call(aten.narrow.default, (x, dim, 0, emit.extent(shape, step.target, dim)), {})


def _reduce_scatter(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...]) -> Finish:
    count, group = _group(emit, step.source, step.axes)
    dealt = _dealt(emit, x, step, shape, step.dim)
    started = emit.call(collectives.reduce_scatter_tensor.default, (emit.contiguous(dealt), step.op, count, group), {})
    return lambda: _own(emit, emit.call(WAIT, (started,), {}), step, shape, step.dim)


def _all_reduce(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...]) -> Finish:
    _, group = _group(emit, step.source, step.axes)
    started = emit.call(collectives.all_reduce.default, (emit.contiguous(x), step.op, group), {})
    return lambda: emit.call(WAIT, (started,), {})


def _all_to_all(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...]) -> Finish:
    """From sharded on `dim` to sharded on `to_dim`: deal out along to_dim, exchange, join along dim."""
    dim, to_dim = step.dim, step.to_dim
    assert to_dim is not None
    count, group = _group(emit, step.source, step.axes)
    block = _block(shape, step.source, dim)
    sent = _padded(emit, x, len(shape), dim, emit.extent(shape, step.source, dim), block)
    dealt = _dealt(emit, sent, step, shape, to_dim)
    rows = {dim: block, to_dim: _block(shape, step.target, to_dim)}.get(0, emit.extent(shape, step.source, 0))
    started = emit.call(
        collectives.all_to_all_single.default, (emit.contiguous(dealt), [rows] * count, [rows] * count, group), {}
    )
    table = _table(emit, step.source, shape, dim)

    def finish() -> fx.Node:
        done = emit.call(WAIT, (started,), {})
        whole = emit.call(local_ops.join_blocks, (done, count, dim, table), {})
        return _own(emit, whole, step, shape, to_dim)

    return finish


def _to_partial(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...]) -> Finish:
    index = emit.axis_index(step.source.mesh, step.axes)
    return lambda: emit.call(local_ops.keep_first, (x, index, step.op), {})


def _scale(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...]) -> Finish:
    return lambda: emit.call(aten.mul.Tensor, (x, step.factor), {})


def take(emit: Emitter, x: fx.Node, step: Step, shape: tuple[int, ...]) -> Finish:
    """A transfer in which nothing crosses: the piece of the target out of the piece of the source."""
    for dim in range(len(shape)):
        before, after = step.source.dims[dim], step.target.dims[dim]
        if before.axes or after.axes:
            start = emit.linear(emit.offset(shape, step.target, dim), (emit.offset(shape, step.source, dim), -1))
            x = emit.call(aten.narrow.default, (x, dim, start, emit.extent(shape, step.target, dim)), {})
    return lambda: x


def send(emit: Emitter, x: fx.Node | None, key: str) -> Finish:
    """A transfer as a role sees it that holds the source (x is its piece), the target, or both."""
    started = emit.call(transfer, (x, key), {})
    return lambda: emit.call(WAIT, (started,), {})


STEPS: dict[str, Callable[[Emitter, fx.Node, Step, tuple[int, ...]], Finish]] = {
    "slice": _slice,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "to_partial": _to_partial,
    "scale": _scale,
}
