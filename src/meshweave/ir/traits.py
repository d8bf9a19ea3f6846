"""Traits of ops: a single table, by op and by name, and what an op's schema and tags say.

How an op may be sharded is in `ops/`, how it is cut into chunks in `optimize/decompose/`. The proofs of `check/` do
not read this table: they have their own semantics.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import fx

from meshweave.interop.ops import is_operator, operator_name
from meshweave.ir import blocks, grouped, local_ops, ops  # noqa: F401  (defines our ops)

aten = torch.ops.aten
RANDOM = frozenset({torch.ops.meshweave.uniform.default, torch.ops.meshweave.chance.default})
CASTS = frozenset({aten._to_copy.default})
IDENTITIES = frozenset(  # the value of their operand; a functional graph needs none
    {
        *(aten.detach.default, aten.detach_copy.default, aten.alias.default, aten.alias_copy.default),
        *(aten.lift_fresh_copy.default, aten.lift_fresh.default, aten.lift.default),
        *(aten.clone.default, aten.contiguous.default, torch.ops.prims.copy_strided.default),
    }
)
# View ops of captured graphs, whose normal form has no others: they commute with moves, and are repeated where they are
# needed.
VIEWS = frozenset({aten.view.default, aten.permute.default, aten.expand.default, aten.slice.Tensor})
RESHAPES = frozenset(
    {aten.reshape.default, aten.view.default, aten._unsafe_view.default}
)  # the elements keep their order
RANK_CHANGES = frozenset({aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims})
FACTORIES = frozenset({aten.full.default, aten.arange.start_step})  # tensors from numbers only, on a device
MATMULS = frozenset(  # the last two operands are the factors
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, torch.ops.meshweave.matmul.default}
)
PRODUCTS = MATMULS | {torch.ops.meshweave.contract.default}  # matmuls for any operands
# Kinds of work, by name without overload. Ops with torch's `pointwise` tag are pointwise and not listed.
_WORK = {
    "matmul": (
        "mm addmm bmm baddbmm matmul mv contract convolution convolution_backward _scaled_mm _grouped_mm grouped_mm "
        "grouped_outer mm_piece outer_piece"
    ),
    "attention": (
        "attention _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention flex_attention "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu _flash_attention_forward "
        "attention_backward _scaled_dot_product_flash_attention_backward flex_attention_backward "
        "_scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward "
        "_scaled_dot_product_flash_attention_for_cpu_backward _flash_attention_backward"
    ),
    "pointwise": (
        "_to_copy _conj _neg_view _prelu_kernel _prelu_kernel_backward avg_pool2d avg_pool2d_backward avg_pool3d "
        "avg_pool3d_backward bucketize complex fill hardshrink_backward hardswish hardtanh_backward "
        "leaky_relu leaky_relu_backward log_sigmoid_backward log_sigmoid_forward masked_fill mish_backward polar "
        "own_rows all_rows round_parts searchsorted softshrink_backward sum_parts tril triu where floor_divide isin "
        "pin clone add mul sub div enter_rows leave_rows row_owners row_readers readers_piece"
    ),
    "reduction": (
        "_softmax _softmax_backward_data all amax amin any argmax argmin count_nonzero max mean min "
        "native_layer_norm native_layer_norm_backward prod square_sum sum var extreme _adaptive_avg_pool2d "
        "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward adaptive_max_pool2d "
        "adaptive_max_pool3d max_pool2d_with_indices max_pool3d_with_indices "
        "multi_margin_loss multi_margin_loss_backward histc dot "
        "_embedding_bag _embedding_bag_per_sample_weights_backward block_counts"
    ),
    "scan": (
        "cummax cummin cumprod cumsum logcumsumexp sort topk kthvalue median nanmedian mode _fft_c2c _fft_c2r _fft_r2c "
        "merge_attention finish_attention add_gradient block_sort sort_piece "
        "_cdist_forward _cdist_backward _pdist_forward _pdist_backward _ctc_loss _ctc_loss_backward ctc_loss"
    ),
    "strided": (
        "as_strided cat col2im constant_pad_nd contiguous diagonal diagonal_copy diagonal_scatter expand flip "
        "im2col permute reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward "
        "reflection_pad3d reflection_pad3d_backward repeat replication_pad1d replication_pad1d_backward "
        "replication_pad2d replication_pad2d_backward replication_pad3d replication_pad3d_backward reshape "
        "roll slice slice_scatter unfold view view_as_complex view_as_real narrow transpose squeeze unsqueeze "
        "select split join_blocks deal_blocks join_chunks take_chunk keep_first embed_part stack "
        "view_rows"
    ),
    "gather": (
        "_unsafe_index embedding gather grid_sampler_2d grid_sampler_3d index index_rows index_select "
        "upsample_nearest1d upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward "
        "upsample_nearest3d upsample_nearest3d_backward upsample_linear1d upsample_linear1d_backward "
        "upsample_bilinear2d upsample_bilinear2d_backward upsample_trilinear3d upsample_trilinear3d_backward "
        "upsample_bicubic2d upsample_bicubic2d_backward _upsample_nearest_exact1d _upsample_nearest_exact1d_backward "
        "_upsample_nearest_exact2d _upsample_nearest_exact2d_backward _upsample_nearest_exact3d "
        "_upsample_nearest_exact3d_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward "
        "_upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward block_index index_piece"
    ),
    "scatter": (
        "_unsafe_index_put adaptive_max_pool2d_backward adaptive_max_pool3d_backward embedding_backward "
        "embedding_dense_backward grid_sampler_2d_backward grid_sampler_3d_backward index_put masked_scatter "
        "max_pool2d_with_indices_backward max_pool3d_with_indices_backward scatter scatter_add scatter_reduce "
        "masked_scatter_backward index_reduce "
        "_embedding_bag_dense_backward add_rows segment_reduce _segment_reduce_backward block_put put_piece"
    ),
    "fill": "arange full zeros ones empty",
    "random": "uniform chance",
}
_KIND_OF_WORK = {name: kind for kind, names in _WORK.items() for name in names.split()}


def base_name(target: Any) -> str:
    """The name of an op without namespace and overload: `sum` of `aten.sum.dim_IntList`."""
    if is_operator(target):
        return operator_name(target)
    return getattr(target, "__name__", str(target))


def inner_target(node: fx.Node) -> Any:
    """What a node runs: the op inside a wrapper for empty pieces."""
    wrapped = node.target in (local_ops.or_zeros, local_ops.or_zeros_each)
    return node.args[0] if wrapped else node.target


def is_pointwise(target: Any) -> bool:
    """Whether torch tags an op as pointwise."""
    return torch.Tag.pointwise in getattr(target, "tags", ())


@cache
def has_dynamic_shape(target: Any) -> bool:
    """Whether the shape of an op's result depends on data."""
    return torch.Tag.dynamic_output_shape in getattr(target, "tags", ())


@cache
def is_random(target: Any) -> bool:
    """Whether an op draws from a generator."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


@cache
def reads_data(target: Any) -> bool:
    """Whether the Python result of an op depends on the elements of a tensor."""
    return torch.Tag.data_dependent_output in getattr(target, "tags", ())


def work_kind(target: Any) -> str:
    """`matmul`, `attention`, or a kind of memory work; "" if unknown."""
    return _KIND_OF_WORK.get(base_name(target)) or ("pointwise" if is_pointwise(target) else "")


def names_of(kind: str) -> list[str]:
    """The ops of a kind of work, without those that are pointwise only by their tag."""
    return _WORK[kind].split()
