"""Sharding rules of convolutions, pooling, resizing, padding and sampling of images."""

from __future__ import annotations

from functools import partial

import torch
from torch import fx

from meshweave.interop.ops import aten_ops
from meshweave.ir.graph import Spec, argument, spec_of, tensor_inputs
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ops.factors import Dim, Linear, Rule, RuleBuilder, sums
from meshweave.ops.pieces import GUARDED, OnPiece, PieceCall, guarded
from meshweave.ops.registry import add, result_specs

aten = torch.ops.aten


def _channels(
    build: RuleBuilder, x: Spec, w: Spec, transposed: bool, groups: int, whole_input: bool
) -> tuple[Dim, Dim, dict[int, Dim]]:
    """Factors of the input channels, of the output channels and of the weight's dims: channels are (group, index in
    group)."""
    wide = w.shape[1] * groups if transposed else w.shape[0]
    group = build.factor(groups)
    before = (group, build.factor(x.shape[1] // groups, whole=whole_input))
    after = (group, build.factor(wide // groups))
    return before, after, {0: before, 1: after[1:]} if transposed else {0: after, 1: before[1:]}


def _convolution(node: fx.Node) -> Rule:
    """Free over batch, groups and channels; a sharded input channel gives partial sums, unless a bias is added."""
    x, w, *bias = [spec_of(n) for n in tensor_inputs(node)]
    transposed, groups = argument(node, 6), argument(node, 8)
    build = RuleBuilder()
    batch = (build.factor(x.shape[0]),)
    before, after, weight = _channels(build, x, w, transposed, groups, bool(bias))
    operands = [build.dims_from(x.shape, {0: batch, 1: before}), build.dims_from(w.shape, weight)]
    operands += [[after] for _ in bias]
    (out,) = result_specs(node)
    result = build.dims_from(out.shape, {0: batch, 1: after})
    return build.rule(operands, [result], () if bias else sums({0}, {1}))


def _convolution_backward(node: fx.Node) -> Rule:
    """One gradient per op (see capture/normalize): of the input, or of the weight."""
    grad, x, w = (spec_of(n) for n in tensor_inputs(node))
    transposed, groups, mask = argument(node, 7), argument(node, 9), argument(node, 10)
    build = RuleBuilder()
    batch = (build.factor(x.shape[0]),)
    before, after, weight = _channels(build, x, w, transposed, groups, False)
    operands = [
        build.dims_from(grad.shape, {0: batch, 1: after}),
        build.dims_from(x.shape, {0: batch, 1: before}),
        build.dims_from(w.shape, weight),
    ]
    (result,) = result_specs(node)
    to_input = bool(mask[0])
    dims = build.dims_from(result.shape, {0: batch, 1: before} if to_input else weight)
    return build.rule(operands, [dims], sums({0}, {2}) if to_input else sums({0}, {1}))


def _own_groups(call: PieceCall, operand: int, position: int) -> fx.Node | None:
    """Argument `position` is the number of groups, into which the channels of `operand` are divided."""
    groups, (spec, layout) = call.args[position], call.operand(operand)
    if groups > 1 and call.is_cut(operand, 1):
        cut = DimSharding(layout.dims[1].axes, max(layout.dims[1].unit // (spec.shape[1] // groups), 1))
        groups = call.emit.extent((groups,), Layout(layout.mesh, (cut,)), 0)
    return guarded(call, *call.args[:position], groups, *call.args[position + 1 :])


add(aten.convolution.default, _convolution, on_piece=OnPiece(partial(_own_groups, operand=0, position=8)))
add(
    aten.convolution_backward.default,
    _convolution_backward,
    on_piece=OnPiece(partial(_own_groups, operand=1, position=9)),
)


def _planes(node: fx.Node, spatial: int, linear: tuple[Linear, ...] = ()) -> Rule:
    """Every plane (the last `spatial` dims) is independent: planes may be distributed, a plane is whole."""
    build = RuleBuilder()
    tensors = [spec_of(n).shape for n in tensor_inputs(node)]
    known = {d: (build.factor(size),) for d, size in enumerate(tensors[0][: len(tensors[0]) - spatial])}
    results = [build.dims_from(s.shape, known) for s in result_specs(node)]
    return build.rule([build.dims_from(s, known) for s in tensors], results, linear)


def _resized_backward(call: PieceCall) -> fx.Node | None:
    """Backward of a resize: argument 2 is the shape of the result."""
    return guarded(call, *call.args[:2], call.local_shape(), *call.args[3:])


_LINEAR_IN_FIRST = sums({0})  # linear in operand 0: the values, or the gradient

add(
    [aten.max_pool2d_with_indices.default, aten.adaptive_max_pool2d.default],
    partial(_planes, spatial=2),
    on_piece=GUARDED,
)
add(
    [aten.max_pool3d_with_indices.default, aten.adaptive_max_pool3d.default],
    partial(_planes, spatial=3),
    on_piece=GUARDED,
)
add(
    aten_ops(
        "reflection_pad1d reflection_pad1d_backward replication_pad1d replication_pad1d_backward upsample_nearest1d "
        "_upsample_nearest_exact1d upsample_linear1d"
    ),
    partial(_planes, spatial=1, linear=_LINEAR_IN_FIRST),
    on_piece=GUARDED,
)
add(
    aten_ops(
        "max_pool2d_with_indices_backward adaptive_max_pool2d_backward avg_pool2d "
        "avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward reflection_pad2d "
        "reflection_pad2d_backward replication_pad2d replication_pad2d_backward upsample_nearest2d.vec "
        "upsample_bilinear2d.vec upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
    ),
    partial(_planes, spatial=2, linear=_LINEAR_IN_FIRST),
    on_piece=GUARDED,
)
add(
    aten_ops(
        "max_pool3d_with_indices_backward adaptive_max_pool3d_backward avg_pool3d "
        "avg_pool3d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward reflection_pad3d "
        "reflection_pad3d_backward replication_pad3d replication_pad3d_backward upsample_nearest3d "
        "_upsample_nearest_exact3d upsample_trilinear3d"
    ),
    partial(_planes, spatial=3, linear=_LINEAR_IN_FIRST),
    on_piece=GUARDED,
)
for _spatial, _targets in {
    1: aten_ops("upsample_nearest1d_backward _upsample_nearest_exact1d_backward upsample_linear1d_backward"),
    2: aten_ops(
        "upsample_nearest2d_backward _upsample_nearest_exact2d_backward upsample_bilinear2d_backward "
        "upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward"
    ),
    3: aten_ops("upsample_nearest3d_backward _upsample_nearest_exact3d_backward upsample_trilinear3d_backward"),
}.items():
    add(_targets, partial(_planes, spatial=_spatial, linear=_LINEAR_IN_FIRST), on_piece=OnPiece(_resized_backward))


def _windows(node: fx.Node, to_windows: bool) -> Rule:
    """im2col [n, c, h, w] -> [n, c x window, places], and col2im back: free over batch and channels."""
    image = spec_of(tensor_inputs(node)[0] if to_windows else node).shape
    columns = spec_of(node if to_windows else tensor_inputs(node)[0]).shape
    build = RuleBuilder()
    batch = build.dims(image[:-3])
    channel = build.factor(image[-3])
    window = build.factor(columns[-2] // max(image[-3], 1))
    plane = [*batch, (channel,), *build.dims(image[-2:], whole=(0, 1))]
    column = [*batch, (channel, window), (build.factor(columns[-1], whole=True),)]
    return build.rule([plane if to_windows else column], [column if to_windows else plane], _LINEAR_IN_FIRST)


add(aten.im2col.default, partial(_windows, to_windows=True), on_piece=GUARDED)
add(aten.col2im.default, partial(_windows, to_windows=False), on_piece=GUARDED)


def _samples(build: RuleBuilder, image: Spec, grid: Spec) -> tuple[list[Dim], list[Dim], list[Dim]]:
    """Dims of an image [n, c, ...], of the sampling grid [n, ..., k] and of the samples [n, c, ...]."""
    batch, channel = (build.factor(image.shape[0]),), (build.factor(image.shape[1]),)
    at = build.dims(grid.shape[1:-1])
    plane = build.dims(image.shape[2:], whole=range(len(image.shape)))
    return [batch, channel, *plane], [batch, *at, (build.factor(grid.shape[-1], whole=True),)], [batch, channel, *at]


def _grid_sampler(node: fx.Node) -> Rule:
    build = RuleBuilder()
    image, grid, sampled = _samples(build, *(spec_of(n) for n in tensor_inputs(node)))
    return build.rule([image, grid], [sampled], _LINEAR_IN_FIRST)


def _grid_sampler_backward(node: fx.Node) -> Rule:
    """The image's gradient is a sum over the grid's places, the grid's gradient a sum over the channels."""
    _, x, places = (spec_of(n) for n in tensor_inputs(node))
    build = RuleBuilder()
    image, grid, sampled = _samples(build, x, places)
    results = [dims for spec, dims in zip(node.meta["spec"], (image, grid), strict=True) if spec is not None]
    return build.rule([sampled, image, grid], results, _LINEAR_IN_FIRST)


add([aten.grid_sampler_2d.default, aten.grid_sampler_3d.default], _grid_sampler)
add([aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default], _grid_sampler_backward)
