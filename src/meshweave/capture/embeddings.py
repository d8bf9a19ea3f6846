"""Embeddings in parts: bags as lookups and a matmul with the matrix of which index is in which bag, and norms of rows.

The matrix is computed from the offsets in the batch, so bags may have any size in every step; sums and means shard as
lookups and matmuls do. The maximum of a bag stays a single op, which is never sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshweave.errors import CaptureError

aten = torch.ops.aten


def _bag_of(offsets: Tensor, count: int, include_last: bool) -> Tensor:
    """The bag of each of `count` indices, where bags begin at `offsets`."""
    begins = aten.slice.Tensor(offsets, 0, 0, offsets.shape[0] - 1) if include_last else offsets
    place = torch.arange(count, device=offsets.device, dtype=offsets.dtype)
    return aten.sum.dim_IntList((begins.unsqueeze(0) <= place.unsqueeze(1)).to(offsets.dtype), [1]) - 1


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample: Tensor | None = None,
    include_last: bool = False,
    padding: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums and means of the rows of each bag; the maximum of a bag (mode 2) stays an op without a rule."""
    if mode == 2 or sparse or scale_grad:
        return NotImplemented
    bag_of = _bag_of(offsets, indices.shape[0], include_last)
    num_bags = offsets.shape[0] - include_last
    counted = (indices != padding).to(weight.dtype)
    rows = aten.embedding.default(weight, indices)
    rows = rows * (counted if per_sample is None else counted * per_sample).unsqueeze(1)
    members = (bag_of.unsqueeze(0) == torch.arange(num_bags, device=bag_of.device).unsqueeze(1)).to(weight.dtype)
    sizes = aten.sum.dim_IntList(members * counted, [1])
    out = aten.mm.default(members, rows)
    out = out / sizes.clamp(min=1).unsqueeze(1) if mode == 1 else out
    return out, bag_of, sizes.to(offsets.dtype), torch.zeros_like(offsets)


def _embedding_bag_dense_backward(
    grad: Tensor,
    indices: Tensor,
    bag_of: Tensor,
    sizes: Tensor,
    largest: Tensor,
    num_rows: int,
    scale_grad: bool,
    mode: int,
    per_sample: Tensor | None,
    padding: int = -1,
) -> Tensor:
    if mode == 2 or scale_grad:
        return NotImplemented
    grad = grad / sizes.clamp(min=1).to(grad.dtype).unsqueeze(1) if mode == 1 else grad
    rows = aten.index_select.default(grad, 0, bag_of)
    rows = rows if per_sample is None else rows * per_sample.unsqueeze(1)
    return aten.embedding_dense_backward.default(rows, indices, num_rows, padding, False)


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


EMBEDDINGS: dict[Any, Callable[..., Any]] = {
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten._embedding_bag_dense_backward.default: _embedding_bag_dense_backward,
    aten.embedding_renorm.default: _embedding_renorm,
    aten._sparse_coo_tensor_with_dims_and_tensors.default: _sparse_gradient,
}
