"""Factor rules of ops that captured graphs never contain, because capture rewrites them; other graphs do."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from meshweave.ir.graph import argument, spec_of, tensor_inputs
from meshweave.sharding.factors import Dim, Rule, RuleBuilder
from meshweave.sharding.registry import RuleFunction, pointwise, result_specs

aten = torch.ops.aten


def _swapped(node: fx.Node) -> Rule:
    rank = len(spec_of(node).shape)
    build = RuleBuilder()
    dims = build.dims(spec_of(tensor_inputs(node)[0]).shape)
    a, b = (0, rank - 1) if node.target is aten.t.default else (argument(node, i) % rank for i in (1, 2))
    result = list(dims)
    result[a], result[b] = dims[b], dims[a]
    return build.rule([dims], [result])


def _without(node: fx.Node) -> Rule:
    """A whole dim that the results lack."""
    shape = spec_of(tensor_inputs(node)[0]).shape
    removed = argument(node, 1, 0) % len(shape)
    build = RuleBuilder()
    dims = build.dims(shape, whole=(removed,))
    return build.rule([dims], [[dim for d, dim in enumerate(dims) if d != removed] for _ in result_specs(node)])


def _parts(node: fx.Node) -> Rule:
    """Parts along a whole dim."""
    shape = spec_of(tensor_inputs(node)[0]).shape
    along = argument(node, 2, 0) % len(shape)
    build = RuleBuilder()
    dims = build.dims(shape, whole=(along,))
    results = [list(dims) for _ in result_specs(node)]
    for result, spec in zip(results, result_specs(node), strict=True):
        result[along] = (build.factor(spec.shape[along], whole=True),)
    return build.rule([dims], results)


def _reduced(node: fx.Node, op: str) -> Rule:
    """Sums and means over the listed dims, or all: results of chunks are combined with `op`."""
    shape = spec_of(tensor_inputs(node)[0]).shape
    listed: Any = argument(node, 1, None)
    reduced = {d % len(shape) for d in listed} if listed and shape else set(range(len(shape)))
    build = RuleBuilder()
    dims = build.dims(shape)
    keeps = len(spec_of(node).shape) == len(shape)
    result = [() if d in reduced else dim for d, dim in enumerate(dims) if d not in reduced or keeps]
    return build.rule([dims], [result], reduce={dims[d][0]: op for d in reduced})


def _added_product(node: fx.Node) -> Rule:
    """x + a @ b, x broadcast. Dims of x that a sum over chunks of the contraction would add several times are whole."""
    x, a, b = (spec_of(n).shape for n in tensor_inputs(node))
    build = RuleBuilder()
    batch = build.dims(a[:-2])
    m, k, n = (build.factor(size) for size in (a[-2], a[-1], b[-1]))
    result: list[Dim] = [*batch, (m,), (n,)]
    return build.rule([build.broadcast(x, result), [*batch, (m,), (k,)], [*batch, (k,), (n,)]], [result])


_SAME_SHAPE = (
    *(torch.ops.prims.convert_element_type.default, aten.alias.default, aten.detach.default, aten.clone.default),
    *(aten.contiguous.default, aten.lift_fresh_copy.default, aten.where.ScalarOther, aten.where.ScalarSelf),
    *(aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default),
)
RULES: Mapping[Any, RuleFunction] = {
    **dict.fromkeys(_SAME_SHAPE, pointwise),
    **dict.fromkeys((aten.t.default, aten.transpose.int), _swapped),
    **dict.fromkeys((aten.select.int, aten.unbind.int), _without),
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), _parts),
    **dict.fromkeys((aten.mean.default, aten.mean.dim), partial(_reduced, op="avg")),
    aten.sum.default: partial(_reduced, op="sum"),
    **dict.fromkeys((aten.addmm.default, aten.baddbmm.default), _added_product),
}
