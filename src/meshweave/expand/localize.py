"""How ops run on pieces. Most run unchanged; ops with arguments that are shapes or positions are rewritten here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from meshweave.expand.emit import Emitter
from meshweave.ir import blocks, grouped, local_ops
from meshweave.ir.graph import Spec, spec_of, tensor_inputs
from meshweave.ir.layout import DimSharding, Layout

aten = torch.ops.aten
ours = torch.ops.meshweave
Localizer = Callable[[Emitter, fx.Node, list[fx.Node], Any, Any], fx.Node]


def as_is(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    """The same op on local operands."""
    return emit.call(node.target, args, kwargs)


def _layout(node: fx.Node) -> Layout:
    layout = node.meta["layout"]
    assert isinstance(layout, Layout)
    return layout


def _operand(node: fx.Node, index: int) -> tuple[Spec, Layout]:
    operand = tensor_inputs(node)[index]
    return spec_of(operand), _layout(operand)


def _shape(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    """view and expand: the local shape of the result. A view of a piece may need a copy, hence reshape. The number of
    owned rows is not known here: the operand's number is used."""
    layout = _layout(node)
    shape = emit.local_shape(spec_of(node).shape, layout)
    if node.target is aten.expand.default:
        shape = [-1 if dim in layout.owned_dims else size for dim, size in enumerate(shape)]
        return emit.call(node.target, (args[0], shape), kwargs)
    if layout.owned:
        return emit.call(
            local_ops.view_rows, (args[0], shape, *layout.owned_dims, *_operand(node, 0)[1].owned_dims), {}
        )
    return emit.call(aten.reshape.default, (args[0], shape), kwargs)


def _full(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    return emit.call(node.target, (emit.local_shape(spec_of(node).shape, _layout(node)), *args[1:]), kwargs)


def _arange(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    start, _, step = args
    layout, shape = _layout(node), spec_of(node).shape
    if not layout.dims[0].axes:
        return emit.call(node.target, args, kwargs)
    offset, size = emit.offset(shape, layout, 0), emit.extent(shape, layout, 0)
    first = emit.linear(start, (offset, step))
    return emit.call(node.target, (first, emit.linear(0, (first, 1), (size, step)), step), kwargs)


def _random(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    layout, shape = _layout(node), spec_of(node).shape
    offsets = [emit.offset(shape, layout, d) for d in range(len(shape))]
    own = (list(shape), offsets, emit.local_shape(shape, layout))
    return emit.call(node.target, (*args[:3], *own, *args[6:]), kwargs)


def _offset_of(emit: Emitter, node: fx.Node, operand: int, dim: int) -> Any:
    """Offset of the local piece of an operand along `dim`, or None if that dim is not cut."""
    spec, layout = _operand(node, operand)
    return emit.offset(spec.shape, layout, dim) if layout.dims[dim].axes else None


def _embedding(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    offset = _offset_of(emit, node, 0, 0)
    if offset is None:
        return emit.call(node.target, args, kwargs)
    return emit.call(local_ops.embedding, (*values, offset), {})


def _embedding_backward(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    layout, shape = _layout(node), spec_of(node).shape
    if not layout.dims[0].axes:
        return emit.call(node.target, args, kwargs)
    rows, offset = emit.extent(shape, layout, 0), emit.offset(shape, layout, 0)
    padding = args[3] if len(args) > 3 else -1
    return emit.call(local_ops.embedding_backward, (*values, rows, padding, offset), {})


def _along(function: Any) -> Localizer:
    """gather and index_select: (x, dim, index)."""

    def localize(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
        rank = len(_operand(node, 0)[0].shape)
        dim = args[1] % max(rank, 1)
        offset = _offset_of(emit, node, 0, dim) if rank else None
        if offset is None:
            return emit.call(node.target, args, kwargs)
        return emit.call(function, (values[0], dim, values[1], offset), {})

    return localize


def _scatter(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    dim = args[1] % max(len(spec_of(node).shape), 1)
    offset = _offset_of(emit, node, 0, dim) if spec_of(node).shape else None
    if offset is None:
        return emit.call(node.target, args, kwargs)
    added = node.target is aten.scatter_add.default
    return emit.call(local_ops.scatter, (args[0], dim, args[2], args[3], added, offset), {})


def _indexed(indices: Sequence[Any]) -> int:
    return next(d for d, index in enumerate(indices) if index is not None)


def _index(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    dim = _indexed(args[1])
    offset = _offset_of(emit, node, 0, dim)
    if offset is None:
        return emit.call(node.target, args, kwargs)
    return emit.call(local_ops.index_rows, (values[0], dim, args[1][dim], _operand(node, 0)[0].shape[dim], offset), {})


def _index_put(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    dim = _indexed(args[1])
    offset = _offset_of(emit, node, 0, dim)
    if offset is None:
        return emit.call(node.target, args, kwargs)
    num_rows = _operand(node, 0)[0].shape[dim]
    return emit.call(local_ops.add_rows, (values[0], dim, args[1][dim], args[2], num_rows, offset), {})


def _grouped_mm(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    row, expert = _offset_of(emit, node, 0, 0), _offset_of(emit, node, 1, 0)
    if row is None and expert is None:
        return emit.call(node.target, args, kwargs)
    return emit.call(grouped.mm_piece, (*values, row or 0, expert or 0, *_block_rows(node)), {})


def _grouped_outer(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    layout, shape = _layout(node), spec_of(node).shape
    row = _offset_of(emit, node, 0, 0)
    if row is None and not layout.dims[0].axes:
        return emit.call(node.target, args, kwargs)
    experts = emit.extent(shape, layout, 0), emit.offset(shape, layout, 0)
    return emit.call(grouped.outer_piece, (*values, experts[0], row or 0, experts[1], *_block_rows(node)), {})


def _block_rows(node: fx.Node) -> tuple[int, ...]:
    """The number of rows of a block, if the rows of an op by expert are in blocks."""
    (rows, _), (ends, _) = _operand(node, 0), _operand(node, 2)
    return (rows.shape[0] // ends.shape[0],) if len(ends.shape) == 2 else ()


def _own_experts(emit: Emitter, node: fx.Node, layout: Layout) -> tuple[Any, Any]:
    """First index and number of a device's experts, from the layout of its owned rows."""
    experts, cut = _operand(node, 1)[0].shape[-1:], Layout(layout.mesh, (DimSharding(layout.owned_axes),))
    return emit.offset(experts, cut, 0), emit.extent(experts, cut, 0)


def _leave_rows(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    (spec, layout), dim = _operand(node, 0), args[2]
    num_rows, row = emit.extent(spec.shape, layout, dim), emit.offset(spec.shape, layout, dim)
    return emit.call(grouped.all_rows, (*values, dim, row, *_own_experts(emit, node, layout), num_rows), {})


def _enter_rows(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    (spec, whole), layout, dim = _operand(node, 0), _layout(node), args[2]
    row, parts = emit.offset(spec.shape, whole, dim), prod(layout.mesh.size(axis) for axis in layout.owned_axes)
    return emit.call(grouped.own_rows, (*values, dim, row, *_own_experts(emit, node, layout), parts), {})


def _num_blocks(emit: Emitter, node: fx.Node, num_blocks: int) -> Any:
    """The number of blocks that a device has of the `num_blocks` of an op's first operand."""
    spec, layout = _operand(node, 0)
    block_rows = spec.shape[0] // num_blocks
    cut = DimSharding(layout.dims[0].axes, max(layout.dims[0].unit // max(block_rows, 1), 1))
    return emit.extent((num_blocks,), Layout(layout.mesh, (cut,)), 0)


def _block_sort(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    (spec, layout), (num_blocks, descending) = _operand(node, 0), args[1:]
    numbers = _num_blocks(emit, node, num_blocks), descending, emit.offset(spec.shape, layout, 0)
    return emit.call(blocks.sort_piece, (*values, *numbers), {})


def _block_counts(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    return emit.call(node.target, (*args[:2], _num_blocks(emit, node, args[2])), {})


def _block_index(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    spec, layout = _operand(node, 0)
    return emit.call(blocks.index_piece, (*values, emit.offset(spec.shape, layout, 0)), {})


def _block_put(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    spec, layout = _operand(node, 0)
    return emit.call(blocks.put_piece, (*values, args[3], emit.offset(spec.shape, layout, 0)), {})


def _row_owners(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    layout = _layout(node)
    if not layout.dims[0].axes:
        return emit.call(node.target, args, kwargs)
    num_rows = emit.extent(spec_of(node).shape, layout, 0)
    return emit.call(node.target, (args[0], num_rows, [num_rows], *args[3:]), {})


def _row_readers(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    shape, layout = spec_of(node).shape, _layout(node)
    numbers = emit.extent(shape, layout, 1), emit.offset(shape, layout, 1)
    return emit.call(grouped.readers_piece, (*args[:3], *numbers), {})


def _extreme(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    """amax and amin of a dim that is cut: a piece may be empty."""
    spec, layout = _operand(node, 0)
    dims: Sequence[int] = args[1] if len(args) > 1 and args[1] else range(len(spec.shape))
    if not any(layout.dims[d].axes for d in dims):
        return emit.call(node.target, args, kwargs)
    keepdim = bool(args[2]) if len(args) > 2 else False
    op = "max" if node.target is aten.amax.default else "min"
    return emit.call(local_ops.extreme, (values[0], list(dims), keepdim, op), {})


def _guarded(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    """Kernels that reject empty tensors: if a piece may be empty, the result is zeros without a call."""
    sizes = [size for n in tensor_inputs(node) for size in emit.local_shape(spec_of(n).shape, _layout(n))]
    if not any(isinstance(size, fx.Node) for size in sizes):
        return emit.call(node.target, args, kwargs)
    specs, layouts = node.meta["spec"], node.meta["layout"]
    if isinstance(specs, Spec):
        shape = emit.local_shape(specs.shape, layouts)
        return emit.call(local_ops.or_zeros, (node.target, shape, specs.dtype, *args), kwargs)
    shapes = [None if s is None else emit.local_shape(s.shape, a) for s, a in zip(specs, layouts, strict=True)]
    dtypes = [None if s is None else s.dtype for s in specs]
    return emit.call(local_ops.or_zeros_each, (node.target, shapes, dtypes, *args), kwargs)


def _resized_backward(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    """Backward of a resize: argument 2 is the shape of the result."""
    shape = emit.local_shape(spec_of(node).shape, _layout(node))
    return _guarded(emit, node, values, (*args[:2], shape, *args[3:]), kwargs)


def _grouped(operand: int, position: int) -> Localizer:
    """Convolutions: argument `position` is the number of groups, into which the channels of `operand` are divided."""

    def localize(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
        groups = args[position]
        spec, layout = _operand(node, operand)
        channels = layout.dims[1]
        if groups > 1 and channels.axes:
            cut = DimSharding(channels.axes, max(channels.unit // (spec.shape[1] // groups), 1))
            groups = emit.extent((groups,), Layout(layout.mesh, (cut,)), 0)
        return _guarded(emit, node, values, (*args[:position], groups, *args[position + 1 :]), kwargs)

    return localize


def _attention(emit: Emitter, node: fx.Node, values: list[fx.Node], args: Any, kwargs: Any) -> fx.Node:
    """If queries are cut, a causal mask depends on the position of the first query."""
    query, causal_at = (1, 7) if node.target is ours.attention_backward.default else (0, 4)
    offset = _offset_of(emit, node, query, 2) if args[causal_at] else None
    at = causal_at + 2  # of `first_query`
    return emit.call(node.target, args if offset is None else (*args[:at], offset, *args[at + 1 :]), kwargs)


LOCALIZERS: dict[str, Localizer] = {
    "": as_is,
    "shape": _shape,
    "full": _full,
    "arange": _arange,
    "random": _random,
    "embedding": _embedding,
    "embedding_backward": _embedding_backward,
    "gather": _along(local_ops.gather),
    "index_select": _along(local_ops.index_select),
    "scatter": _scatter,
    "index": _index,
    "index_put": _index_put,
    "grouped_mm": _grouped_mm,
    "grouped_outer": _grouped_outer,
    "enter_rows": _enter_rows,
    "leave_rows": _leave_rows,
    "row_owners": _row_owners,
    "row_readers": _row_readers,
    "block_sort": _block_sort,
    "block_counts": _block_counts,
    "block_index": _block_index,
    "block_put": _block_put,
    "extreme": _extreme,
    "guarded": _guarded,
    "resized_backward": _resized_backward,
    "attention": _attention,
    "convolution": _grouped(0, 8),
    "convolution_backward": _grouped(1, 9),
}
