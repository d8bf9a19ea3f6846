"""What kind of work each op is: one table, and the numbers of its work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.hardware.work import Attention, Matmul, Memory, Work
from meshweave.interop.ops import is_operator, operator_name
from meshweave.ir import local_ops
from meshweave.ir.graph import op_name, origin_of
from meshweave.ir.values import Value

aten = torch.ops.aten
Operands = Sequence[Value]
Priced = Callable[[fx.Node, Operands, Operands], tuple[Work, ...]]

# Kinds of ops that move memory, by name without overload. What has torch's `pointwise` tag is pointwise and not listed.
_NAMES = {
    "pointwise": (
        "_to_copy _conj _prelu_kernel _prelu_kernel_backward avg_pool2d avg_pool2d_backward avg_pool3d "
        "avg_pool3d_backward bucketize complex fill hardshrink_backward hardswish hardtanh_backward "
        "leaky_relu_backward log_sigmoid_backward log_sigmoid_forward masked_fill mish_backward polar "
        "round_parts searchsorted softshrink_backward sum_parts tril triu where floor_divide isin pin clone add mul "
        "sub div"
    ),
    "reduction": (
        "_softmax _softmax_backward_data all amax amin any argmax argmin count_nonzero max mean min "
        "native_layer_norm native_layer_norm_backward prod square_sum sum var extreme _adaptive_avg_pool2d "
        "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward adaptive_max_pool2d "
        "adaptive_max_pool3d max_pool2d_with_indices max_pool3d_with_indices histc dot"
    ),
    "scan": (
        "cummax cumprod cumsum logcumsumexp sort topk kthvalue median mode _fft_c2c _fft_c2r _fft_r2c "
        "_cdist_forward _cdist_backward"
    ),
    "strided": (
        "as_strided cat col2im constant_pad_nd contiguous diagonal diagonal_copy diagonal_scatter expand flip "
        "im2col permute reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward "
        "reflection_pad3d reflection_pad3d_backward repeat replication_pad1d replication_pad1d_backward "
        "replication_pad2d replication_pad2d_backward replication_pad3d replication_pad3d_backward reshape "
        "roll slice slice_scatter unfold view view_as_complex view_as_real narrow transpose squeeze unsqueeze "
        "select split join_blocks deal_blocks join_chunks take_chunk keep_first embed_part stack"
    ),
    "gather": (
        "_unsafe_index embedding gather grid_sampler_2d grid_sampler_3d index index_select upsample_nearest1d "
        "upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward upsample_nearest3d "
        "upsample_nearest3d_backward upsample_linear1d upsample_linear1d_backward upsample_bilinear2d "
        "upsample_bilinear2d_backward upsample_trilinear3d upsample_trilinear3d_backward upsample_bicubic2d "
        "upsample_bicubic2d_backward _upsample_nearest_exact1d _upsample_nearest_exact1d_backward "
        "_upsample_nearest_exact2d _upsample_nearest_exact2d_backward _upsample_nearest_exact3d "
        "_upsample_nearest_exact3d_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward "
        "_upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward"
    ),
    "scatter": (
        "_unsafe_index_put adaptive_max_pool2d_backward adaptive_max_pool3d_backward embedding_backward "
        "embedding_dense_backward grid_sampler_2d_backward grid_sampler_3d_backward index_put masked_scatter "
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward scatter scatter_add scatter_reduce"
    ),
    "fill": "arange full zeros ones empty",
    "random": "uniform",
}
_KINDS: Mapping[str, str] = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_FUSIBLE = frozenset({"pointwise", "reduction", "strided", "gather", "fill", "random"})
_GATHERED = frozenset({"gather", "scatter"})


def base_name(target: Any) -> str:
    """The name of an op without namespace and overload: `sum` of `aten.sum.dim_IntList`."""
    if is_operator(target):
        return operator_name(target)
    return getattr(target, "__name__", str(target))


def inner_target(node: fx.Node) -> Any:
    """What a node runs: the op inside a wrapper that cares for empty pieces."""
    wrapped = node.target in (local_ops.or_zeros, local_ops.or_zeros_each)
    return node.args[0] if wrapped else node.target


def kind_of(node: fx.Node) -> str:
    """`matmul`, `attention`, or a kind of memory work. Raises MeshweaveError for an op that has none."""
    target = inner_target(node)
    name = base_name(target)
    if target is aten.scatter.value or (target is local_ops.scatter and not isinstance(node.args[3], fx.Node)):
        return "pointwise"  # one-hot: compilers make it where the index is met, eager kernels write a few elements
    if name in _MATMULS:
        return "matmul"
    if name in _ATTENTIONS:
        return "attention"
    if name in _KINDS:
        return _KINDS[name]
    if is_operator(target) and torch.Tag.pointwise in target.tags:
        return "pointwise"
    raise MeshweaveError(
        f"the simulator has no cost for {op_name(target)}",
        where=str(origin_of(node)),
        got=op_name(target),
        expected="an op of simulate/classify.py, or one that torch tags as pointwise",
        hint="add its name to the table of kinds there",
    )


def is_fusible(kind: str) -> bool:
    """Whether a compiler such as Inductor puts ops of this kind into one kernel with their neighbours."""
    return kind in _FUSIBLE


def is_closing(node: fx.Node, operands: Operands, results: Operands) -> bool:
    """Whether a reduction ends its kernel: it reduces more than the innermost dims, so what follows needs all of it."""
    if kind_of(node) != "reduction" or not operands or not results:
        return False
    before, after = operands[0].shape, results[0].shape
    if len(before) == len(after):
        reduced = [d for d, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        return bool(reduced) and reduced[0] < len(before) - len(reduced)
    return before[: len(after)] != after or not after


def work_of(node: fx.Node, operands: Operands, results: Operands) -> tuple[Work, ...]:
    """The work of one op by itself: operands are read and results written in device memory."""
    kind = kind_of(node)
    if kind == "matmul":
        return _MATMULS[base_name(inner_target(node))](node, operands, results)
    if kind == "attention":
        return (_attention(node, operands, results),)
    return (memory_work(kind, operands, results, 1),)


def memory_work(kind: str, operands: Operands, results: Operands, num_ops: int) -> Memory:
    """One kernel that reads `operands` and writes `results`, each storage once."""
    written = sum(x.bytes for x in results)
    read = sum(_unique(operands).values())
    if kind in _GATHERED and operands:  # reads as many rows as it writes, or adds as many as it is given
        read = min(read, 2 * max(written, *(x.bytes for x in operands[1:] or operands)))
    elements = max((x.num_elements for x in (*operands, *results)), default=0)
    dtype = (results or operands)[0].dtype if (results or operands) else torch.float32
    shown = "reduction" if kind == "scan" else kind
    return Memory(shown, read + written, elements, dtype, num_ops, 1)


def _unique(values: Operands) -> dict[int, int]:
    """Bytes read per storage."""
    read: dict[int, int] = {}
    for x in values:
        read[x.storage] = min(max(read.get(x.storage, 0), x.bytes), x.storage_bytes)
    return read


def _total(operands: Operands, results: Operands) -> int:
    return sum(_unique(operands).values()) + sum(x.bytes for x in results)


def _product(m: int, n: int, k: int, batch: int, operands: Operands, results: Operands) -> tuple[Work, ...]:
    return (Matmul(m, n, k, batch, operands[-1].dtype, _total(operands, results)),)


def _mm(node: fx.Node, operands: Operands, results: Operands) -> tuple[Work, ...]:
    """mm, mv, dot, bmm, meshweave::matmul: the last two operands are the factors (addmm adds the first)."""
    a, b = operands[-2:]
    n = b.shape[-1] if len(b.shape) > 1 else 1
    return _product(a.shape[-2], n, a.shape[-1], prod(a.shape[:-2]), operands, results)


def _convolution(node: fx.Node, operands: Operands, results: Operands) -> tuple[Work, ...]:
    """As the implicit matmul: rows are output positions, k the window of a group's input channels."""
    weight = operands[1]
    groups = _groups(operands[0] if not _argument(node, 6) else results[0], weight)
    return _product(
        results[0].shape[0] * prod(results[0].shape[2:]),
        weight.shape[0] // groups,
        prod(weight.shape[1:]),
        groups,
        operands,
        results,
    )


def _convolution_backward(node: fx.Node, operands: Operands, results: Operands) -> tuple[Work, ...]:
    """Gradients of input and weight, each a matmul of the forward's size."""
    grad, x, weight = operands[:3]
    groups, mask = _groups(grad if _argument(node, 7) else x, weight), _argument(node, 10)
    rows, columns, window = grad.shape[0] * prod(grad.shape[2:]), weight.shape[0] // groups, prod(weight.shape[1:])
    num_bytes = _total(operands, results)
    shapes = ((rows, window, columns), (columns, window, rows))
    wanted = [shape for shape, is_wanted in zip(shapes, mask, strict=False) if is_wanted]
    return tuple(Matmul(m, n, k, groups, grad.dtype, num_bytes // len(wanted)) for m, n, k in wanted)


def _groups(channels: Value, weight: Value) -> int:
    """Groups of a convolution on a piece: of the channels that it takes (a transposed one: makes), a filter sees those
    of its group."""
    return max(1, channels.shape[1] // max(1, weight.shape[1]))


def _argument(node: fx.Node, index: int) -> Any:
    """Argument `index` of the op, past the three that a wrapper has before it."""
    return node.args[index + (3 if inner_target(node) is not node.target else 0)]


def _attention(node: fx.Node, operands: Operands, results: Operands) -> Attention:
    is_backward = base_name(inner_target(node)) == "attention_backward"
    q, k = operands[1:3] if is_backward else operands[:2]
    is_causal = bool(_argument(node, 7 if is_backward else 4))
    heads, (queries, dim), keys = prod(q.shape[:-2]), q.shape[-2:], k.shape[-2]
    return Attention(heads, queries, keys, dim, is_causal, is_backward, q.dtype, _total(operands, results))


_MATMULS: Mapping[str, Priced] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "matmul"), _mm),
    "mv": lambda node, operands, results: _product(operands[0].shape[0], 1, operands[0].shape[1], 1, operands, results),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}
_ATTENTIONS = frozenset({"attention", "attention_backward"})
