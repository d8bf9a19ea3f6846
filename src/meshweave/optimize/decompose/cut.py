"""How a tensor is cut into chunks, and the corresponding cuts of operands and results of ops: a table of kinds of
op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Literal

import torch
from torch import fx

from meshweave.ir import local_ops
from meshweave.ir.rank import SYMBOLS
from meshweave.ir.traits import CASTS, MATMULS, RANK_CHANGES, RESHAPES, is_pointwise, is_random

aten = torch.ops.aten
Shape = tuple[int, ...]
Sum = Literal["sum"]
FIXED = "fixed"  # meta of nodes that must neither move nor run chunk by chunk: the reason
LOOSE = "loose"  # meta of starts that may move forward among those of their group: all ranks move them equally


@dataclass(frozen=True, slots=True)
class Cut:
    """Dim `dim` is [outer, count, inner], and chunk c of `count` is [:, c]."""

    dim: int
    outer: int
    count: int

    def fits(self, shape: Shape) -> bool:
        return shape[self.dim] > 0 and shape[self.dim] % (self.outer * self.count) == 0

    def chunk(self, shape: Shape) -> Shape:
        """The shape of a chunk of a tensor of `shape`."""
        return (*shape[: self.dim], shape[self.dim] // self.count, *shape[self.dim + 1 :])


class NoCut(Exception):
    """Why an op cannot run chunk by chunk."""


@dataclass(frozen=True, slots=True)
class Op:
    """An op in the form of the table: the node, the shapes of its tensor operands (repeated if an operand is) and of
    its result."""

    node: fx.Node
    operands: tuple[Shape, ...]
    result: Shape


@dataclass(frozen=True, slots=True)
class Kind:
    """How ops of a kind are cut. `forward(op, i, cut)`: the cut of the result if operand i is cut, or "sum" if the
    results of the chunks are added up; `backward(op, cut)`: the cuts of the operands (None: whole) for a chunk of the
    result. Both raise NoCut. `is_free`: it moves (almost) nothing."""

    forward: Callable[[Op, int, Cut], Cut | Sum]
    backward: Callable[[Op, Cut], tuple[Cut | None, ...]]
    is_matmul: bool = False
    is_free: bool = False


# views: the chunks are a factor of the flattened elements


def through_view(cut: Cut, before: Shape, after: Shape) -> Cut:
    """The cut of the same elements in another shape. Raises NoCut if a chunk is then not a slice of a single dim."""
    if not prod(before):
        raise NoCut("it is empty")
    outer = prod(before[: cut.dim]) * cut.outer
    for dim, size in enumerate(after):
        ahead = prod(after[:dim])
        if ahead > outer:
            break
        if outer % ahead == 0 and size % (outer // ahead * cut.count) == 0 and size:
            return Cut(dim, outer // ahead, cut.count)
    raise NoCut(f"its chunks are not those of a dim of {list(after)}")


def _order(op: Op) -> list[int]:
    """For each dim of the result the dim of the operand."""
    rank, args = len(op.result), op.node.args
    if op.node.target is aten.permute.default:
        return [d % rank for d in args[1]]  # type: ignore[union-attr, operator, misc]
    order = list(range(rank))
    first, second = (0, 1) if op.node.target is aten.t.default else args[1:3]
    a, b = int(first) % rank, int(second) % rank  # type: ignore[arg-type]
    order[a], order[b] = order[b], order[a]
    return order


# blocks of a group: stacked along dim 0, or side by side along a dim


def _other_side(op: Op, cut: Cut, to_stacked: bool) -> Cut:
    """The cut of the stacked blocks for a cut of the joined value, or the reverse: chunks are blocks, or parts of every
    block."""
    sizes, order, dim, uneven = tuple[Any, ...](op.node.args[1:5])
    if uneven is not None or list(order) != list(range(len(order))):
        raise NoCut("its blocks are uneven, or in another order")
    count = prod(sizes)
    stacked, joined = Cut(0, 1, count), Cut(dim, 1, count)
    if cut == (joined if to_stacked else stacked):
        return stacked if to_stacked else joined
    if cut.dim not in (0, dim) and dim:
        return cut
    is_split = to_stacked == (cut.dim == 0)  # the requested side has the blocks in this dim
    if not dim or (not is_split and cut.outer % count):
        raise NoCut("its chunks do not match its blocks")
    return Cut(cut.dim, cut.outer * count if is_split else cut.outer // count, cut.count)


def _blocks(to_stacked: bool) -> Kind:
    """An op that stacks blocks, or joins them."""
    return Kind(
        lambda op, i, cut: _other_side(op, cut, to_stacked), lambda op, cut: (_other_side(op, cut, not to_stacked),)
    )


# elementwise ops


def _pointwise_forward(op: Op, i: int, cut: Cut) -> Cut:
    dim = cut.dim + len(op.result) - len(op.operands[i])
    if op.operands[i][cut.dim] != op.result[dim]:
        raise NoCut("the cut operand is repeated along the cut")
    return Cut(dim, cut.outer, cut.count)


def _pointwise_backward(op: Op, cut: Cut) -> tuple[Cut | None, ...]:
    cuts: list[Cut | None] = []
    for shape in op.operands:
        dim = cut.dim - (len(op.result) - len(shape))
        cuts.append(None if dim < 0 or shape[dim] != op.result[cut.dim] else Cut(dim, cut.outer, cut.count))
    return tuple(cuts)


# sums, means and the like over some dims


def _reduction_dims(op: Op) -> tuple[set[int], bool]:
    """The dims that are reduced over, and whether they are kept as dims of size 1."""
    rank, args, kwargs = len(op.operands[0]), op.node.args, op.node.kwargs
    dims: Any = args[1] if len(args) > 1 else None
    is_kept = bool(args[2] if len(args) > 2 else kwargs.get("keepdim", False))
    return {d % rank for d in ([dims] if isinstance(dims, int) else dims or range(rank))}, is_kept


def _reduction_forward(op: Op, i: int, cut: Cut) -> Cut:
    dims, is_kept = _reduction_dims(op)
    if cut.dim in dims:
        raise NoCut("the cut dim is reduced over")
    return cut if is_kept else Cut(cut.dim - sum(d < cut.dim for d in dims), cut.outer, cut.count)


def _reduction_backward(op: Op, cut: Cut) -> tuple[Cut | None, ...]:
    dims, is_kept = _reduction_dims(op)
    left = [d for d in range(len(op.operands[0])) if d not in dims]
    return (cut if is_kept else Cut(left[cut.dim], cut.outer, cut.count),)


# matmuls: [..., m, k] @ [..., k, n], after the addend


def _matmul_forward(op: Op, i: int, cut: Cut) -> Cut | Sum:
    added, rank = len(op.operands) - 2, len(op.result)
    if i < added:
        raise NoCut("the cut operand is the addend of a product")
    if cut.dim == (rank - 1 if i == added else rank - 2):
        if added:
            raise NoCut("the addend would be added for every chunk")
        return "sum"
    return cut


def _matmul_backward(op: Op, cut: Cut) -> tuple[Cut | None, ...]:
    rank = len(op.result)
    left, right = cut if cut.dim != rank - 1 else None, cut if cut.dim != rank - 2 else None
    return (*_pointwise_backward(Op(op.node, op.operands[:-2], op.result), cut), left, right)


def contraction(op: Op, cut: Cut) -> tuple[Cut | None, ...]:
    """The cuts of both factors if either is cut along the dim that the product sums over."""
    rank = len(op.result)
    return Cut(rank - 1, cut.outer, cut.count), Cut(rank - 2, cut.outer, cut.count)


_VIEW = Kind(
    lambda op, i, cut: through_view(cut, op.operands[0], op.result),
    lambda op, cut: (through_view(cut, op.result, op.operands[0]),),
    is_free=True,
)
_PERMUTE = Kind(
    lambda op, i, cut: Cut(_order(op).index(cut.dim), cut.outer, cut.count),
    lambda op, cut: (Cut(_order(op)[cut.dim], cut.outer, cut.count),),
    is_free=True,
)
_POINTWISE = Kind(_pointwise_forward, _pointwise_backward)
_SAME = Kind(_pointwise_forward, _pointwise_backward, is_free=True)
_REDUCTION = Kind(_reduction_forward, _reduction_backward)
_MATMUL = Kind(_matmul_forward, _matmul_backward, is_matmul=True)
SHAPED = RESHAPES | {aten.expand.default}  # argument 1 is the shape
_KINDS: Mapping[Any, Kind] = {
    **dict.fromkeys(RESHAPES | RANK_CHANGES, _VIEW),
    **dict.fromkeys((aten.expand.default, aten.alias.default, aten.detach.default), _SAME),
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), _PERMUTE),
    local_ops.join_blocks: _blocks(False),
    local_ops.deal_blocks: _blocks(True),
    **dict.fromkeys((aten.contiguous.default, aten.clone.default, *CASTS), _POINTWISE),
    **dict.fromkeys((aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default), _REDUCTION),
    **dict.fromkeys(MATMULS, _MATMUL),
}


def kind_of(node: fx.Node) -> Kind | None:
    """The kind of an op that can run chunk by chunk; None for others."""
    if node.op != "call_function" or FIXED in node.meta:
        return None
    return _kind_of_target(node.target)


@cache
def _kind_of_target(target: Any) -> Kind | None:
    return _KINDS.get(target) or (_POINTWISE if is_pointwise(target) and not is_random(target) else None)


def is_same(node: fx.Node, cut: Cut) -> bool:
    """Whether the chunks are exactly the blocks of a join or deal of blocks, each of which it leaves unchanged."""
    if node.target not in (local_ops.join_blocks, local_ops.deal_blocks):
        return False
    dim = 0 if node.target is local_ops.deal_blocks else node.args[3]
    return cut == Cut(dim, 1, prod(node.args[1]))  # type: ignore[arg-type]


def has_symbols(values: Sequence[Any]) -> bool:
    """Whether a size among the arguments depends on the device."""
    symbols: list[fx.Node] = []
    fx.map_arg(tuple(values), lambda n: symbols.append(n) if n.target in SYMBOLS else None)
    return bool(symbols)


def memory_order(x: torch.Tensor) -> list[int]:
    """Dims from the outermost in memory; dims of one element stay beside their neighbours."""
    if x.is_contiguous():
        return list(range(x.dim()))
    steps = x.stride()
    return sorted(range(x.dim()), key=lambda d: (-steps[d], d))
