"""How an op of the placed graph must appear in a rank graph: the call that each device has to make.

Most ops run unchanged. Those whose arguments are shapes or positions are listed here with the numbers that every device
must pass, as they follow from the actual layouts of the operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from meshweave.check.calls import OPERAND, Context, LocalCall, Number
from meshweave.check.infer import Placed
from meshweave.check.row_calls import ROW_CALLS
from meshweave.errors import VerifyError
from meshweave.ir import local_ops
from meshweave.ir.graph import Spec, op_name

aten = torch.ops.aten
ours = torch.ops.meshweave


def _view(c: Context) -> LocalCall:
    """The number of owned rows is unknown here: the operand's number is used."""
    layout, sizes = c.results[0][1], c.sizes(c.results[0])
    if c.node.target is aten.expand.default:
        sizes = [-1 if dim in layout.owned_dims else size for dim, size in enumerate(sizes)]
        return LocalCall(c.node.target, (OPERAND, sizes), c.plain().kwargs)
    if layout.owned:
        return LocalCall(local_ops.view_rows, (OPERAND, sizes, *layout.owned_dims, *c.operands[0][1].owned_dims), {})
    return LocalCall(aten.reshape.default, (OPERAND, sizes), c.plain().kwargs)


def _full(c: Context) -> LocalCall:
    plain = c.plain()
    return LocalCall(plain.target, (c.sizes(c.results[0]), *plain.args[1:]), plain.kwargs)


def _arange(c: Context) -> LocalCall:
    plain = c.plain()
    start, _, step = plain.args
    if not c.results[0][1].dims[0].axes:
        return plain
    (offset,), (size,) = c.offsets(c.results[0]), c.sizes(c.results[0])
    first = start + offset * step
    return LocalCall(plain.target, (first, first + size * step, step), plain.kwargs)


def _random(c: Context) -> LocalCall:
    plain, (spec, _) = c.plain(), c.results[0]
    return LocalCall(
        plain.target,
        (*plain.args[:3], list(spec.shape), c.offsets(c.results[0]), c.sizes(c.results[0]), *plain.args[6:]),
        plain.kwargs,
    )


def _embedding(c: Context) -> LocalCall:
    if not c.operands[0][1].dims[0].axes:
        return c.plain()
    return LocalCall(local_ops.embedding, (OPERAND, OPERAND, c.offsets(c.operands[0])[0]), {})


def _embedding_backward(c: Context) -> LocalCall:
    plain, result = c.plain(), c.results[0]
    if not result[1].dims[0].axes:
        return plain
    padding = plain.args[3] if len(plain.args) > 3 else -1
    numbers = (c.sizes(result)[0], padding, c.offsets(result)[0])
    return LocalCall(local_ops.embedding_backward, (OPERAND, OPERAND, *numbers), {})


def _cut_along(c: Context, dim: int) -> Number | None:
    """Offsets of the pieces of operand 0 along the indexed dim, or None if it is whole."""
    spec, layout = c.operands[0]
    if not spec.shape or not layout.dims[dim % len(spec.shape)].axes:
        return None
    return c.offsets(c.operands[0])[dim % len(spec.shape)]


def _gather(c: Context) -> LocalCall:
    plain = c.plain()
    dim: Any = plain.args[1]
    offset = _cut_along(c, dim)
    if offset is None:
        return plain
    local = local_ops.gather if plain.target is aten.gather.default else local_ops.index_select
    return LocalCall(local, (OPERAND, dim % len(c.operands[0][0].shape), OPERAND, offset), {})


def _scatter(c: Context) -> LocalCall:
    plain = c.plain()
    dim: Any = plain.args[1]
    offset = _cut_along(c, dim)
    if offset is None:
        return plain
    added = plain.target is aten.scatter_add.default
    rest = (dim % len(c.operands[0][0].shape), OPERAND, plain.args[3], added, offset)
    return LocalCall(local_ops.scatter, (OPERAND, *rest), {})


def _indexed(c: Context) -> tuple[int, Number | None]:
    indices: Any = c.plain().args[1]
    dim = next(d for d, index in enumerate(indices) if index is not None)
    return dim, _cut_along(c, dim)


def _index(c: Context) -> LocalCall:
    dim, offset = _indexed(c)
    if offset is None:
        return c.plain()
    return LocalCall(local_ops.index_rows, (OPERAND, dim, OPERAND, c.operands[0][0].shape[dim], offset), {})


def _index_put(c: Context) -> LocalCall:
    dim, offset = _indexed(c)
    if offset is None:
        return c.plain()
    return LocalCall(local_ops.add_rows, (OPERAND, dim, OPERAND, OPERAND, c.operands[0][0].shape[dim], offset), {})


def _extreme(c: Context) -> LocalCall:
    plain, (spec, layout) = c.plain(), c.operands[0]
    dims: Any = plain.args[1] if len(plain.args) > 1 and plain.args[1] else range(len(spec.shape))
    if not any(layout.dims[d].axes for d in dims):
        return plain
    keepdim = bool(plain.args[2]) if len(plain.args) > 2 else False
    op = "max" if plain.target is aten.amax.default else "min"
    return LocalCall(local_ops.extreme, (OPERAND, list(dims), keepdim, op), {})


def _resized_backward(c: Context) -> LocalCall:
    plain = c.plain()
    return LocalCall(plain.target, (*plain.args[:2], c.sizes(c.results[0]), *plain.args[3:]), plain.kwargs)


def _grouped(operand: int, position: int) -> Callable[[Context], LocalCall]:
    """Convolutions: a device runs as many groups as it has input channels of."""

    def call(c: Context) -> LocalCall:
        plain, (spec, layout) = c.plain(), c.operands[operand]
        groups: Any = plain.args[position]
        if groups > 1 and layout.dims[1].axes:
            groups = c.sizes((spec, layout))[1] // (spec.shape[1] // groups)
        return LocalCall(plain.target, (*plain.args[:position], groups, *plain.args[position + 1 :]), plain.kwargs)

    return call


def _attention(operand: int, causal_at: int) -> Callable[[Context], LocalCall]:
    """Attention whose queries (those of `operand`) are cut: a causal mask gets the position of the first query."""

    def call(c: Context) -> LocalCall:
        plain, query = c.plain(), c.operands[operand]
        if not plain.args[causal_at] or not query[1].dims[2].axes:
            return plain
        at = causal_at + 2
        return LocalCall(plain.target, (*plain.args[:at], c.offsets(query)[2], *plain.args[at + 1 :]), plain.kwargs)

    return call


_RESIZED = [
    getattr(aten, f"{name}_backward").default
    for name in (
        "upsample_nearest1d",
        "_upsample_nearest_exact1d",
        "upsample_linear1d",
        "upsample_nearest2d",
        "_upsample_nearest_exact2d",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
        "_upsample_bilinear2d_aa",
        "_upsample_bicubic2d_aa",
        "upsample_nearest3d",
        "_upsample_nearest_exact3d",
        "upsample_trilinear3d",
    )
]

CALLS: dict[Any, Callable[[Context], LocalCall]] = {
    aten.view.default: _view,
    aten.expand.default: _view,
    aten.full.default: _full,
    aten.arange.start_step: _arange,
    ours.uniform.default: _random,
    ours.chance.default: _random,
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.gather.default: _gather,
    aten.index_select.default: _gather,
    aten.scatter.value: _scatter,
    aten.scatter.src: _scatter,
    aten.scatter_add.default: _scatter,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    **ROW_CALLS,
    aten.amax.default: _extreme,
    aten.amin.default: _extreme,
    ours.attention.default: _attention(0, 4),
    ours.attention_backward.default: _attention(1, 7),
    aten.convolution.default: _grouped(0, 8),
    aten.convolution_backward.default: _grouped(1, 9),
    **dict.fromkeys(_RESIZED, _resized_backward),
}

# Ops that get the piece to compute: their results may be cut along loops that no operand has.
MAKERS = frozenset(
    {
        aten.full.default,
        aten.arange.start_step,
        ours.uniform.default,
        ours.chance.default,
        aten.expand.default,
        aten.embedding_dense_backward.default,
        ours.enter_rows.default,
    }
)


def check_call(context: Context, actual: LocalCall) -> None:
    """Raise VerifyError unless `actual` is the call that every device has to make."""
    expected = CALLS.get(context.node.target, Context.plain)(context)
    actual = _unguarded(context, actual)
    if actual.target is not expected.target:
        raise VerifyError(
            "another op runs", got=op_name(actual.target), expected=f"{op_name(expected.target)} for these layouts"
        )
    if not _same([actual.args, actual.kwargs], [expected.args, expected.kwargs]):
        raise VerifyError("the op runs with other arguments", got=_text(actual), expected=_text(expected))


def _unguarded(c: Context, call: LocalCall) -> LocalCall:
    """The call that runs if no operand is empty; the zeros for the other case must have the result's shape."""
    guards = {local_ops.or_zeros: False, local_ops.or_zeros_each: True}
    if call.target not in guards:
        return call
    target, shapes, dtypes, *args = call.args
    several = guards[call.target]
    calls = list(zip(shapes, dtypes, strict=True)) if several else [(shapes, dtypes)]
    specs = c.node.meta["spec"] if several else (c.node.meta["spec"],)
    layouts = iter(c.results)
    for (shape, dtype), spec in zip(calls, specs, strict=True):
        placed = next(layouts) if isinstance(spec, Spec) else None
        if not (shape is None and dtype is None if placed is None else _is_like(c, shape, dtype, placed)):
            raise VerifyError("an empty piece has another shape", got=f"{shape} {dtype}", expected=str(placed))
    return LocalCall(target, tuple(args), call.kwargs)


def _is_like(c: Context, shape: Any, dtype: Any, placed: Placed) -> bool:
    return dtype == placed[0].dtype and _same(list(shape), c.sizes(placed))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, (int, np.ndarray)) and isinstance(b, (int, np.ndarray)) and bool(np.all(a == b))
    return a is b or (type(a) is type(b) and (a == b or (a != a and b != b)))


def _text(call: LocalCall) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, np.ndarray):
            return str(value[0]) if (value == value[0]).all() else f"{value[0]}..."
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(shown, value)) + "]"
        return str(value)

    args: Sequence[str] = [*map(shown, call.args), *(f"{k}={shown(v)}" for k, v in call.kwargs.items())]
    return f"{op_name(call.target)}({', '.join(args)})"
