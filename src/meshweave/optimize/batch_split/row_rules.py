"""How an op of any graph runs on chunks of rows: collectives, views, attention; all others by sharding rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from meshweave.errors import RuleError
from meshweave.interop.ops import arguments_of, is_mutable, is_operator
from meshweave.ir import local_ops
from meshweave.ir.collectives import OURS, WAIT, communicates
from meshweave.ir.graph import Spec, argument, spec_of, tensor_inputs
from meshweave.ir.traits import RANK_CHANGES, RESHAPES, is_random, names_of
from meshweave.ops.factors import Dim, Dims, Rule, RuleBuilder
from meshweave.ops.pieces import AS_IT_IS, OnPiece
from meshweave.ops.registry import RuleFunction, pointwise, result_specs, row_for
from meshweave.optimize.batch_split.orders import Combine, End, RowRule, rule_in_order
from meshweave.optimize.decompose.cut import FIXED, Cut, NoCut, Op, Shape, kind_of, through_view

aten = torch.ops.aten
ours = torch.ops.meshweave


def _blocks(node: fx.Node, end: End, cut: Cut) -> RowRule:
    """Blocks of a group, stacked or side by side: every block is cut equally, along another dim than that of blocks."""
    dim = int(node.args[3])  # type: ignore[arg-type]
    (source,) = tensor_inputs(node)
    op, kind = Op(node, (spec_of(source).shape,), spec_of(node).shape), kind_of(node)
    assert kind is not None, "blocks have their own table of kinds"
    other = kind.backward(op, cut)[0] if end.is_result else kind.forward(op, 0, cut)
    operand, result = (other, cut) if end.is_result else (cut, other)
    if not isinstance(operand, Cut) or not isinstance(result, Cut):
        raise NoCut("its chunks do not match its blocks")
    side_by_side = result if node.target is local_ops.join_blocks else operand
    if side_by_side.dim == dim:
        raise NoCut("the rows are the dim that its blocks divide")
    return RowRule((operand,), (result,))


def _embedding(node: fx.Node, end: End, cut: Cut) -> RowRule:
    """Rows of indices; the table is whole."""
    _, index = tensor_inputs(node)
    if (not end.is_result and end.index == 0) or cut.dim >= len(spec_of(index).shape):
        raise NoCut("the rows are the dim that its indices refer to")
    return RowRule((None, cut), (cut,))


def _along(node: fx.Node, end: End, cut: Cut) -> RowRule:
    """gather, index into equally many rows, and scatter: all operands are cut equally, beside their dim."""
    operands = tensor_inputs(node)
    shapes = [spec_of(n).shape for n in (*operands, node)]
    if cut.dim == int(node.args[1]) % len(shapes[0]):  # type: ignore[arg-type, operator]
        raise NoCut("the rows are the dim that its indices refer to")
    if len({shape[cut.dim : cut.dim + 1] for shape in shapes}) > 1:
        raise NoCut("its index has other rows than its operand")
    return RowRule((cut,) * len(operands), (cut,))


def _extreme(node: fx.Node, end: End, cut: Cut) -> RowRule:
    """Max or min over some dims."""
    rank = len(spec_of(tensor_inputs(node)[0]).shape)
    reduced = {d % rank for d in node.args[1]} or set(range(rank))  # type: ignore[union-attr, operator]
    kept_dims = [d for d in range(rank) if node.args[2] or d not in reduced]  # dims of the result
    at = kept_dims[cut.dim] if end.is_result else cut.dim
    if at in reduced:
        raise NoCut("the rows are reduced by max or min")
    return RowRule((Cut(at, cut.outer, cut.count),), (Cut(kept_dims.index(at), cut.outer, cut.count),))


LOCAL: Mapping[Any, Callable[[fx.Node, End, Cut], RowRule]] = {
    local_ops.join_blocks: _blocks,
    local_ops.deal_blocks: _blocks,
    local_ops.embedding: _embedding,
    local_ops.gather: _along,
    local_ops.scatter: _along,
    local_ops.extreme: _extreme,
}


def _swap(node: fx.Node) -> Rule:
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
    **dict.fromkeys((aten.t.default, aten.transpose.int), _swap),
    **dict.fromkeys((aten.select.int, aten.unbind.int), _without),
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), _parts),
    **dict.fromkeys((aten.mean.default, aten.mean.dim), partial(_reduced, op="avg")),
    aten.sum.default: partial(_reduced, op="sum"),
    **dict.fromkeys((aten.addmm.default, aten.baddbmm.default), _added_product),
}


# collectives: blocks of the members of the group follow each other on dim 0


def _gather(node: fx.Node, end: End, cut: Cut) -> RowRule:
    size = _arguments(node)["group_size"]
    small, large = (_fewer(cut, size), cut) if end.is_result else (cut, _more(cut, size))
    return RowRule((small,), (large,))


def _scatter(node: fx.Node, end: End, cut: Cut) -> RowRule:
    size = _arguments(node)["group_size"]
    small, large = (cut, _more(cut, size)) if end.is_result else (_fewer(cut, size), cut)
    return RowRule((large,), (small,))


def _more(cut: Cut, size: int) -> Cut:
    return Cut(0, cut.outer * size, cut.count) if cut.dim == 0 else cut


def _fewer(cut: Cut, size: int) -> Cut:
    if cut.dim:
        return cut
    if cut.outer % size:
        raise NoCut(f"a chunk of its rows is not the same part of the blocks of all {size} ranks")
    return Cut(0, cut.outer // size, cut.count)


def _exchange(node: fx.Node, end: End, cut: Cut) -> RowRule:
    """All-to-all of equal blocks; every block is cut equally."""
    arguments = _arguments(node)
    sizes = (*arguments["output_split_sizes"], *arguments["input_split_sizes"])
    blocks = len(arguments["input_split_sizes"])
    if cut.dim:
        return RowRule((cut,), (cut,))
    if any(type(s) is not int for s in sizes) or len(set(sizes)) != 1:
        raise NoCut("its blocks have several sizes, or sizes that depend on data")
    if cut.outer % blocks:
        raise NoCut(f"a chunk of its rows is not the same part of all {blocks} blocks")
    return RowRule((cut,), (cut,), splits_at=(1, 2))


def _same(node: fx.Node, end: End, cut: Cut) -> RowRule:
    return RowRule((cut,), (cut,))


_BY_BLOCKS = {"": _same, "result": _gather, "operand": _scatter, "both": _exchange}


# views that keep the order of elements


def _view(node: fx.Node, end: End, cut: Cut) -> RowRule:
    before, after = spec_of(tensor_inputs(node)[0]).shape, spec_of(node).shape
    shape_at = 1 if node.target in RESHAPES else -1
    if end.is_result:
        return RowRule((through_view(cut, after, before),), (cut,), shape_at)
    return RowRule((cut,), (through_view(cut, before, after),), shape_at)


# attention: sequences of the batch are independent


def _attention(node: fx.Node, end: End, cut: Cut) -> RowRule:
    arguments = _arguments(node)
    query: fx.Node = arguments["query"]
    batch = spec_of(query).shape[0]
    if arguments.get("dropout_p", 0.0) or any(arguments.get(name) is not None for name in _VARLEN):
        raise NoCut("its dropout draws from a single stream, or its sequences have several lengths")
    rows = [spec_of(n).shape[:1] == (batch,) and len(spec_of(n).shape) > 2 for n in tensor_inputs(node)]
    results = [s is not None and s.shape[:1] == (batch,) and len(s.shape) > 2 for s in specs_of(node)]
    if cut.dim or not (results if end.is_result else rows)[end.index]:
        raise NoCut("attention can be cut only along its batch")
    results_of_cut: list[Cut | Combine] = [cut if has else "same" for has in results]
    return RowRule(tuple(cut if has else None for has in rows), tuple(results_of_cut))


_VARLEN = ("cum_seq_q", "cum_seq_k", "cu_seqlens_q", "cu_seqlens_k")


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments by the names of the op's schema, including defaults."""
    arguments = arguments_of(node.target)  # type: ignore[arg-type]
    passed = dict(zip([a.name for a in arguments], node.args, strict=False)) | node.kwargs
    return {a.name: a.default_value for a in arguments} | passed


# a sum over rows that is written to an existing tensor: the chunks write in turn


def _accumulate(node: fx.Node, end: End, cut: Cut) -> RowRule:
    """x with values added at indices of its first dim: index, mask and values are cut along the index's dims."""
    arguments = _arguments(node)
    indices = arguments["indices"]
    if not arguments.get("accumulate", True):
        raise NoCut("several rows may write to the same place")
    if end.is_result or end.index == 0 or len(indices) != 1:
        raise NoCut("it writes anywhere into the rows that are cut")
    operands = tensor_inputs(node)
    width = len(spec_of(indices[0]).shape)
    if cut.dim >= width:
        raise NoCut("it can be cut only along its index")
    size = spec_of(operands[end.index]).shape[cut.dim]
    if any(spec_of(n).shape[cut.dim : cut.dim + 1] != (size,) for n in operands[1:]):
        raise NoCut("its values are repeated along the rows")
    return RowRule((None, *(cut for _ in operands[1:])), ("chain",))


# everything else: by factors


def _by_rule(node: fx.Node, end: End, cut: Cut) -> RowRule:
    """A factor is cut where it is alone in a dim; results that lack it are combined."""
    if None in specs_of(node):
        raise NoCut("some of its results are not tensors")
    rule, on_piece = _rule(node)
    if on_piece.in_chunks == "batch" and cut.dim:
        raise NoCut("attention can be cut only along its batch")
    dims = (rule.results if end.is_result else rule.operands)[end.index]
    factors = [f for f in dims[cut.dim] if rule.sizes[f] > 1]
    beside = {f for each in (*rule.operands, *rule.results) for dim in each if {*dim} & {*factors} for f in dim}
    if rule.whole & beside:
        raise NoCut(f"it works along the whole of dim {cut.dim}")
    if len(factors) != 1:
        raise NoCut("the rows are a part of several loops over a dim")
    factor = factors[0]
    if on_piece.in_chunks == "index" and not any(factor in dim for dim in rule.operands[1]):
        raise NoCut("the rows are the dim that its indices refer to")
    results = tuple(_cut_of(rule, dims, factor, cut) or rule.reduce_op(factor) for dims in rule.results)
    operands = tuple(_cut_of(rule, dims, factor, cut) for dims in rule.operands)
    if node.target in PRODUCTS and "sum" in results and any(node.kwargs.get(k, 1) != 1 for k in ("alpha", "beta")):
        raise NoCut("the addend of its product is scaled")
    return RowRule(operands, results, on_piece.shape_at)  # type: ignore[arg-type]


def _rule(node: fx.Node) -> tuple[Rule, OnPiece]:
    try:
        if node.target in RULES:
            return RULES[node.target](node), AS_IT_IS
        op = row_for(node)
        if not op.on_piece.in_chunks:
            raise NoCut("its result on a part depends on the position of the part")
        return op.rule(node), op.on_piece
    except RuleError as error:
        raise NoCut(error.what) from error


def _cut_of(rule: Rule, dims: Dims, factor: int, cut: Cut) -> Cut | None:
    at = [d for d, dim in enumerate(dims) if factor in dim]
    if not at:
        return None
    if len(at) > 1 or any(f != factor and rule.sizes[f] > 1 for f in dims[at[0]]):
        raise NoCut("the rows are merged with another loop")
    return Cut(at[0], cut.outer, cut.count)


# A product with an addend -> the product alone.
PLAIN: Mapping[Any, Any] = {aten.addmm.default: aten.mm.default, aten.baddbmm.default: aten.bmm.default}
# A product -> the op that adds it to that of the earlier chunks, if it sums over rows.
PRODUCTS: Mapping[Any, Any] = {
    aten.mm.default: aten.addmm.default,
    aten.addmm.default: aten.addmm.default,
    aten.bmm.default: aten.baddbmm.default,
    aten.baddbmm.default: aten.baddbmm.default,
}
WayOf = Callable[[fx.Node, End, Cut], RowRule]
_ACCUMULATING = ("index_put", "_unsafe_index_put", "_unsafe_masked_index_put_accumulate")


def _table() -> Mapping[Any, WayOf]:
    attentions = [name for name in names_of("attention") if name.startswith("_scaled_dot_product")]
    named = {**dict.fromkeys(attentions, _attention), **dict.fromkeys(_ACCUMULATING, _accumulate)}
    return {
        **{row.op: _BY_BLOCKS[row.blocks] for row in OURS if row.may_cut},
        WAIT: _same,
        **LOCAL,
        **dict.fromkeys(RESHAPES | RANK_CHANGES, _view),
        **{getattr(aten, name).default: rule for name, rule in named.items() if hasattr(aten, name)},
    }


TABLE = _table()
ATTENTION = frozenset({*(target for target, way in TABLE.items() if way is _attention), ours.attention.default})


def rule_of(node: fx.Node, end: End, cut: Cut) -> RowRule:
    """How `node` runs in chunks if an end of it is cut in this way. Raises NoCut with the reason if it cannot."""
    if FIXED in node.meta:
        raise NoCut(node.meta[FIXED])
    find = TABLE.get(node.target)
    if find is None:
        _check_operator(node)
    if not _is_described(node):
        raise NoCut("the shape of an operand or a result is symbolic, or unknown")
    rule = rule_in_order(node, end, cut, find or _by_rule)
    if max(rule.shape_at, *rule.splits_at, -1) >= len(node.args):
        raise NoCut("its sizes are passed by name")
    shapes = [(spec_of(n).shape, c) for n, c in zip(tensor_inputs(node), rule.operands, strict=True)]
    shapes += [(s.shape, c) for s, c in zip(specs_of(node), rule.results, strict=True) if s is not None]  # type: ignore[misc]
    if any(isinstance(c, Cut) and not fits(c, shape) for shape, c in shapes):
        raise NoCut(f"its rows do not divide into {cut.count} equal chunks")
    return rule


def _check_operator(node: fx.Node) -> None:
    """Raise NoCut for ops that sharding rules do not describe."""
    if node.op != "call_function" or not is_operator(node.target):
        raise NoCut("it is not a known operator")
    if is_mutable(node.target):
        raise NoCut("it writes into an operand")
    if communicates(node.target):
        raise NoCut("it is a collective that has no row here: split before collectives are merged")
    if is_random(node.target):
        raise NoCut("its random numbers are drawn from a single stream")


def _is_described(node: fx.Node) -> bool:
    """Whether all operands and results of an op have known, non-symbolic shapes."""
    for value in (node, *node.all_input_nodes):
        val = value.meta.get("val")
        tensors = val if isinstance(val, (list, tuple)) else (val,)
        if val is None or any(
            isinstance(x, torch.Tensor) and s is None for x, s in zip(tensors, specs_of(value), strict=True)
        ):
            return False
    return True


def fits(cut: Cut, shape: Shape) -> bool:
    return cut.dim < len(shape) and cut.fits(shape)


def specs_of(node: fx.Node) -> list[Spec | None]:
    """For each result of a node its spec, None if it is not a tensor."""
    spec = node.meta.get("spec")
    return list(spec) if isinstance(spec, tuple) else [spec]
