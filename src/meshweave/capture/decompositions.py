"""Decompositions applied while tracing: composites that shard better, or only, in parts.

A mean becomes a sum and a division by the global count, so that a mean over a sharded dim is a partial sum; log-softmax
and cross entropy decompose into reductions, which gives vocabulary-parallel cross entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshweave.errors import CaptureError
from meshweave.interop.tracing import get_decompositions
from meshweave.ir.graph import wide_dtype

aten = torch.ops.aten


def _dims(x: Tensor, dim: Sequence[int] | int | None) -> list[int]:
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return list(range(x.dim()))
    return [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)] if x.dim() else []


def _count(x: Tensor, dims: Sequence[int]) -> int:
    return prod(x.shape[d] for d in dims)


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    dims, result = _dims(x, dim), dtype or x.dtype
    if wide_dtype(result) == result:
        return aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype) / _count(x, dims)
    return (aten.sum.dim_IntList(x, dims, keepdim, dtype=wide_dtype(result)) / _count(x, dims)).to(result)


def _sum(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return aten.sum.dim_IntList(x, list(range(x.dim())), False, dtype=dtype)


def _var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims, dtype = _dims(x, dim), x.dtype
    count, x = _count(x, dims), x.to(wide_dtype(dtype))
    wide = aten.sum.dim_IntList(x, dims, True) / count
    centred = x - wide
    var = aten.sum.dim_IntList(centred * centred, dims, keepdim) / max(
        count - (1 if correction is None else correction), 0
    )
    return var.to(dtype), (wide if keepdim else wide.reshape(var.shape)).to(dtype)


def _added(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """beta * bias + alpha * product(a, b); a bias with beta 0 is not read."""

    def add(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        scaled = product(a, b) if alpha == 1 else product(a, b) * alpha
        return scaled if beta == 0 else scaled + (bias if beta == 1 else bias * beta)

    return add


def _split(x: Tensor, size: int, dim: int = 0) -> list[Tensor]:
    return [aten.slice.Tensor(x, dim, at, min(at + size, x.shape[dim])) for at in range(0, x.shape[dim], size)]


def _split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [aten.slice.Tensor(x, dim, at, at + size) for at, size in zip(starts, sizes, strict=True)]


def _weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Backward of v * (g / norms), where norms is that of v over all dims except `dim`."""
    norms = norms.to(g.dtype)
    along = aten.sum.dim_IntList(grad * v, [d for d in range(v.dim()) if d != dim % v.dim()], True)
    return g / norms * (grad - v * (along / (norms * norms))), along / norms


def _slice_backward(grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Tensor:
    if step != 1:
        return aten.slice_scatter.default(aten.full.default(sizes, 0, dtype=grad.dtype), grad, dim, start, end, step)
    dim, size = dim % len(sizes), sizes[dim]
    start = min(max(start + size if start < 0 else start, 0), size)
    pad = [0] * (2 * (len(sizes) - dim))
    pad[-2:] = [start, size - start - grad.shape[dim]]
    return aten.constant_pad_nd.default(grad, pad, 0)


def _select_backward(grad: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    dim = dim % len(sizes)
    index = index % sizes[dim]
    return _slice_backward(grad.unsqueeze(dim), sizes, dim, index, index + 1, 1)


def _softmax_safe(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    empty = aten.eq.Scalar(aten.amax.default(x, [dim], True), float("-inf"))
    return aten.where.ScalarOther(aten.logical_not(empty), aten._softmax.default(x, dim, False), 0)


def _group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: int,
    channels: int,
    inner: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Like torch's decomposition, which depends on strides for CPU."""
    wide = x.to(wide_dtype(x.dtype))
    var, mean = _var_mean(wide.reshape(batch, groups, channels // groups, inner), [2, 3], correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    out = ((wide.reshape(batch, groups, channels // groups, inner) - mean) * rstd).reshape(x.shape)
    affine = [channels if d == 1 else 1 for d in range(x.dim())]
    out = out if weight is None else out * weight.reshape(affine)
    out = out if bias is None else out + bias.reshape(affine)
    return out.to(x.dtype), mean.reshape(batch, groups).to(x.dtype), rstd.reshape(batch, groups).to(x.dtype)


def _index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """A single number where a mask is True is pointwise. Other cases stay as they are."""
    mask = indices[0] if len(indices) == 1 else None
    if mask is None or mask.dtype != torch.bool or values.numel() != 1 or accumulate:
        return NotImplemented
    wide = mask.reshape((*mask.shape, *(1,) * (x.dim() - mask.dim())))
    return torch.where(wide, values.reshape(()).to(x.dtype), x)


def _scatter_value(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """A single number at a single position of each line along `dim` (one-hot vectors, the backward pass of a loss) is
    pointwise; Inductor does the same (scatter_upon_const_tensor in torch/_inductor/fx_passes/joint_graph.py, 2.13)."""
    if not x.dim() or list(index.shape) != [1 if d == dim % x.dim() else s for d, s in enumerate(x.shape)]:
        return NotImplemented
    line = [-1 if d == dim % x.dim() else 1 for d in range(x.dim())]
    at = torch.arange(x.shape[dim], device=x.device).reshape(line)
    return torch.where(at == index, torch.full((), value, dtype=x.dtype, device=x.device), x)


def _std_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    var, mean = _var_mean(x.to(wide_dtype(x.dtype)), dim, correction=correction, keepdim=keepdim)
    return var.sqrt().to(x.dtype), mean.to(x.dtype)


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    flat = aten.index_put.default(x.reshape(-1), [index.reshape(-1)], source.reshape(-1), accumulate)
    return flat.reshape(x.shape)


def _trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    without_a: Sequence[int],
    without_b: Sequence[int],
    without_c: Sequence[int],
    summed: Sequence[int],
    unroll: int = 1,
) -> Tensor:
    """The sum over some dims of a product of three tensors, each of which lacks some dims (nn.Bilinear)."""
    dims = range(a.dim() + len(without_a))
    each = [[d for d in dims if d not in lacks] for lacks in (without_a, without_b, without_c)]
    return torch.einsum(a, each[0], b, each[1], c, each[2], [d for d in dims if d not in summed])


# Bags of an embedding stay single ops, which are never sharded.


def _embedding_bag_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag_of: Tensor,
    sizes: Tensor,
    largest: Tensor,
    num_rows: int,
    scale_grad: bool,
    mode: int,
    sparse: bool,
    per_sample: Tensor | None,
    padding: int = -1,
) -> Tensor:
    if sparse:
        return NotImplemented
    # The kernel returns an empty bag_of where its strides allow a way that does not need it.
    bag_of = torch.bucketize(torch.arange(len(indices), device=offsets.device), offsets, right=True) - 1
    options = (num_rows, scale_grad, mode, per_sample, padding)
    return aten._embedding_bag_dense_backward.default(grad, indices, bag_of, sizes, largest, *options)


def _embedding_renorm(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """Scale rows that `indices` name and whose norm is above `max_norm` down to it, each of them once."""
    units = torch.ones_like(indices, dtype=weight.dtype).unsqueeze(-1)
    uses = aten.embedding_dense_backward.default(units, indices, weight.shape[0], -1, False)
    norms = torch.linalg.vector_norm(weight, norm_type, dim=1, keepdim=True)
    scaled = weight * (max_norm / (norms + 1e-7))  # aten/src/ATen/native/Embedding.cpp
    return torch.where((uses > 0) & (norms > max_norm), scaled, weight)


def _sparse_gradient(*_: Any, **__: Any) -> Tensor:
    raise CaptureError(
        "the gradient of an embedding is sparse",
        got="sparse=True in nn.Embedding or nn.EmbeddingBag, or a sparse tensor created in the model",
        expected="dense gradients, which meshes can reduce",
        hint="sparse=False; SGD without momentum then updates the same rows by the same values",
    )


# `as_strided`, which reads memory by strides, as views that are functions of values.


def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Tensor:
    """A view expressed by other ops: windows along a contiguous tensor that may overlap, each of whole rows (frames of
    stft, chunks that share their halves), or permutations of all elements in memory. Anything else is an error, except
    for index tensors that autograd reads so."""
    start = x.storage_offset() if offset is None else offset
    place = zip(size, x.shape, stride, x.stride(), strict=False)
    same = [a == b and (n == m or a <= 1) for a, b, n, m in place]
    if all(same) and len(size) == x.dim() and start == x.storage_offset():
        return aten.view.default(x, list(size))
    if x.dim() == 0 or start != 0 or x.storage_offset() != 0:
        return NotImplemented
    if x.is_contiguous() and (windows := _windows(x, size, stride, same)) is not None:
        return windows
    order, target = _by_stride(x.shape, x.stride()), _by_stride(size, stride)
    dense = x.permute(order)
    if not dense.is_contiguous():
        return NotImplemented
    flat, sizes = dense.reshape(-1), [size[d] for d in target]
    if [stride[d] for d in target] == [prod(sizes[d + 1 :]) for d in range(len(sizes))] and prod(sizes) == len(flat):
        return flat.view(sizes).permute([target.index(d) for d in range(len(target))])
    if x.dtype != torch.int64:
        return NotImplemented  # a lookup would not be a view: writes to it would be lost
    index = torch.zeros(1, dtype=torch.int64, device=x.device)
    for n, step in zip(size, stride, strict=True):
        index = (index[:, None] + torch.arange(n, device=x.device) * step).flatten()
    return flat[index].view(list(size))


def _by_stride(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dims from the outermost in memory to the innermost."""
    return sorted(range(len(size)), key=lambda d: (-stride[d], size[d] > 1, d))


def _windows(x: Tensor, size: Sequence[int], stride: Sequence[int], same: Sequence[bool]) -> Tensor | None:
    """Windows after the leading dims that are the `same`; None if strides mean something else."""
    batch = next((d for d, is_same in enumerate(same) if not is_same), x.dim() - 1)
    inner = list(size[batch + 1 :])
    if not inner or list(stride[batch + 1 :]) != [prod(inner[d + 1 :]) for d in range(len(inner))]:
        return None
    count, window, hop, length = size[batch], prod(inner), stride[batch], prod(x.shape[batch:])
    if hop < 1 or (length - window) // hop + 1 < count:
        return None
    rows = x if batch == x.dim() - 1 else aten.view.default(x, [*x.shape[:batch], length])
    windows = aten.slice.Tensor(aten.unfold.default(rows, batch, window, hop), batch, 0, count)
    return windows if len(inner) == 1 else aten.view.default(windows, list(size))


_FROM_TORCH = (  # names of ops whose decomposition is torch's
    "_log_softmax _log_softmax_backward_data nll_loss_forward nll_loss_backward nll_loss2d_forward "
    "nll_loss2d_backward mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss "
    "huber_loss_backward binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits "
    "soft_margin_loss soft_margin_loss_backward native_dropout native_dropout_backward rrelu_with_noise_backward "
    "native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward rsub addcmul addcdiv hardswish_backward "
    "hardsigmoid_backward softplus_backward elu_backward glu glu_backward norm linalg_vector_norm "
    "_adaptive_avg_pool2d new_full new_zeros new_ones diagonal_backward unfold_backward masked_fill triu tril "
    "logsumexp frobenius_norm index_add affine_grid_generator grid_sampler_2d select_scatter eye linspace logspace "
    "addmv addr aminmax block_diag diag_embed dist index_copy index_fill index_reduce linalg_cross nansum renorm "
    "rot90 take trace vdot _weight_norm_interface _unsafe_masked_index _unsafe_masked_index_put_accumulate "
    "expand_copy narrow_copy permute_copy split_with_sizes_copy squeeze_copy t_copy transpose_copy unbind_copy "
    "alias_copy max_unpool2d max_unpool3d pixel_shuffle pixel_unshuffle channel_shuffle"
)

_OWN: dict[Any, Callable[..., Any]] = {
    aten.mean.dim: _mean,
    aten.mean.default: _mean,
    aten.sum.default: _sum,
    aten.var.correction: lambda x, *dim, **options: _var_mean(x, *dim, **options)[0],
    aten.std.correction: lambda x, *dim, **options: _std_mean(x, *dim, **options)[0],
    aten.var.dim: lambda x, dim, unbiased=True, keepdim=False: _var_mean(
        x, dim, correction=int(unbiased), keepdim=keepdim
    )[0],
    aten.var_mean.correction: _var_mean,
    aten.addmm.default: _added(aten.mm),
    aten.baddbmm.default: _added(aten.bmm),
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: lambda x, dim=0: [aten.select.int(x, dim, i) for i in range(x.shape[dim])],
    aten.stack.default: lambda tensors, dim=0: aten.cat.default([t.unsqueeze(dim) for t in tensors], dim),
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten._safe_softmax.default: _softmax_safe,
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.index_put.default: _index_put,
    aten.scatter.value: _scatter_value,
    aten._embedding_bag_forward_only.default: lambda *args: aten._embedding_bag.default(*args),
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten.embedding_renorm.default: _embedding_renorm,
    aten._sparse_coo_tensor_with_dims_and_tensors.default: _sparse_gradient,
    aten.unsafe_split.Tensor: _split,
    aten.unsafe_split_with_sizes.default: _split_with_sizes,
    aten.std_mean.correction: _std_mean,
    aten.addbmm.default: _added(lambda a, b: aten.sum.dim_IntList(aten.bmm(a, b), [0])),
    aten.as_strided.default: as_strided,
    aten.put.default: _put,
    aten._trilinear.default: _trilinear,
    aten.view_copy.default: lambda x, size: x.reshape(size).clone(),
    aten.unfold_copy.default: lambda x, *args: aten.unfold.default(x, *args),
    aten.view_as_complex.default: lambda x: torch.complex(aten.select.int(x, -1, 0), aten.select.int(x, -1, 1)),
    aten._efficientzerotensor.default: lambda size, **options: aten.full.default(
        size, 0, dtype=options.get("dtype"), device=options.get("device")
    ),
    aten.zero.default: lambda x: torch.zeros_like(x),
    aten.fill.Tensor: lambda x, value: value.to(x.dtype).expand(x.shape).clone(),
}


@cache
def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """Op overload -> its decomposition, for the tracer."""
    return {**get_decompositions([getattr(aten, name) for name in _FROM_TORCH.split()]), **_OWN}
