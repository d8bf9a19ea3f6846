"""Rows in sorted order, chunk by chunk: each chunk sorts its own rows.

A model of experts sorts the rows of all tokens by expert, processes them, and puts the results back in token order. A
token's result does not depend on the other rows in the sort, so a chunk may sort, process and put back its own rows.
This is valid if every op on the sorted rows treats each row independently, sums all of them, or indexes them by
positions of the same sort; the labels below track that through a graph, and any other use is rejected.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from meshweave.ir.collectives import WAIT, communicates
from meshweave.ir.graph import argument, is_descending, row_index, spec_of, tensor_inputs
from meshweave.ir.traits import CASTS, IDENTITIES, RANK_CHANGES, RESHAPES
from meshweave.optimize.decompose.cut import Cut, NoCut, Shape

Combine = Literal["sum", "avg", "max", "min", "same", "chain"]  # "same": equal in all chunks; "chain": see RowRule


@dataclass(frozen=True, slots=True)
class RowRule:
    """How an op runs chunk by chunk.
    `operands`: for each tensor operand the cut whose chunk c is used by chunk c, None if it is used whole. `results`:
    for each result its cut, or how the chunks' results are combined; "chain": the first operand of chunk c + 1 is the
    result of chunk c. `shape_at`: the argument that is the shape of the result, -1 without; `splits_at`: arguments that
    are sizes along the cut dim, a single size or a list."""

    operands: tuple[Cut | None, ...]
    results: tuple[Cut | Combine, ...]
    shape_at: int = -1
    splits_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """Operand or result `index` of an op."""

    is_result: bool
    index: int


aten = torch.ops.aten
ours = torch.ops.meshweave
_SORTS = (aten.sort.default, aten.sort.stable)
# ops whose second result is never negative
_INDICES = frozenset({*_SORTS, aten.topk.default, aten.max.dim, aten.min.dim})
_SAME_VALUES = CASTS | RESHAPES | RANK_CHANGES | IDENTITIES
_EXACT = frozenset({torch.int32, torch.int64, torch.float32, torch.float64})  # any number of rows
Order = fx.Node | None  # the sort that has produced the order, or the order of the value that is cut


@dataclass(frozen=True, slots=True)
class SortedChunks(Cut):
    """Chunk c has the rows of `Cut`, in the order of `order`; the whole value has them sorted among all. With `into`
    the values are positions of rows: (their order, how many rows all chunks have)."""

    order: Order = None
    into: tuple[Order, int] | None = None

    @property
    def sorts(self) -> set[fx.Node]:
        return {order for order in (self.order, self.into and self.into[0]) if order is not None}


@dataclass(frozen=True, slots=True)
class HistogramChunks(Cut):
    """Chunk c has its own value of the whole shape, and the whole value is the sum of all: how often each number occurs
    in the chunk's rows of the value `of`, or how often that and lesser numbers do."""

    of: Order = None
    is_running: bool = False

    def fits(self, shape: Shape) -> bool:
        return True

    def chunk(self, shape: Shape) -> Shape:
        return shape


Plain = Callable[[fx.Node, End, Cut], RowRule]


def needs_chunks(cut: Cut | None) -> bool:
    """Whether chunks of this kind cannot be cut out of a whole value."""
    return isinstance(cut, (SortedChunks, HistogramChunks))


def rule_in_order(node: fx.Node, end: End, cut: Cut, plain: Plain) -> RowRule:
    """How an op runs in chunks of rows that may be sorted; `plain` decides for unsorted rows."""
    find = _TABLE.get(node.target)
    rule = find(node, end, cut) if find is not None else None
    if rule is not None:
        return rule
    if isinstance(cut, HistogramChunks):
        raise NoCut("counts of the rows of a chunk are used as those of all")
    if not isinstance(cut, SortedChunks):
        return plain(node, end, cut)
    if cut.into is not None and (node.target not in _SAME_VALUES or not spec_of(node).is_integer):
        raise NoCut("positions of rows are used as numbers")
    if node.target is WAIT or communicates(node.target):
        raise NoCut("it communicates rows in another order")
    rule = plain(node, end, Cut(cut.dim, cut.outer, cut.count))
    if node.target in RESHAPES and not _keeps_rows(node, rule):
        raise NoCut("it combines sorted rows")
    return replace(
        rule,
        operands=tuple(_sorted_as(cut, c) if c is not None else None for c in rule.operands),
        results=tuple(_sorted_as(cut, c) if isinstance(c, Cut) else c for c in rule.results),
    )


def _sorted_as(like: SortedChunks, cut: Cut) -> Cut:
    return SortedChunks(cut.dim, cut.outer, cut.count, like.order, like.into)


def _keeps_rows(node: fx.Node, rule: RowRule) -> bool:
    (operand,), (result,) = rule.operands, rule.results
    assert isinstance(operand, Cut)
    assert isinstance(result, Cut)
    before, after = spec_of(tensor_inputs(node)[0]).shape, spec_of(node).shape
    return before[operand.dim] == after[result.dim] and operand.outer == result.outer


def _rows(like: Cut, order: Order, into: tuple[Order, int] | None = None) -> Cut:
    """Rows along dim 0, cut like others, in another order."""
    plain = order is None and into is None
    return Cut(0, like.outer, like.count) if plain else SortedChunks(0, like.outer, like.count, order, into)


# sorts, and positions of rows


def _sort(node: fx.Node, end: End, cut: Cut) -> RowRule | None:
    (x,) = tensor_inputs(node)
    if len(spec_of(x).shape) != 1:
        return None
    if end.is_result:
        raise NoCut("it sorts all rows")
    size = spec_of(x).shape[0]
    order, into = (cut.order, cut.into) if isinstance(cut, SortedChunks) else (None, None)
    if isinstance(cut, HistogramChunks):
        raise NoCut("it sorts counts")
    if into is None:
        return RowRule((cut,), (_rows(cut, node), _rows(cut, node, (order, size))))
    if into[1] != size or is_descending(node):
        raise NoCut("it sorts incomplete positions")
    return RowRule((cut,), (_rows(cut, into[0], into), _rows(cut, into[0], (order, size))))  # the inverse


def _quotient(node: fx.Node, end: End, cut: Cut) -> RowRule | None:
    """The rows that each consist of k consecutive positions."""
    if not isinstance(cut, SortedChunks) or cut.into is None:
        return None
    order, size = cut.into
    by, is_floor = node.args[1], node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode")
    if end.is_result or order is not None or type(by) is not int or by < 1 or not is_floor:
        raise NoCut("positions of rows are used as numbers")
    if size % (cut.outer * cut.count * by):
        raise NoCut("rows that belong together are in several chunks")
    return RowRule((cut,), (_rows(cut, cut.order, (None, size // by)),))


def _lookup(node: fx.Node, end: End, cut: Cut) -> RowRule | None:
    """Rows of a table: of a whole table at sorted numbers, or of a table in chunks at positions of its rows."""
    at = row_index(node)
    if at is None or end.is_result or tensor_inputs(node)[end.index] is not at or not isinstance(cut, SortedChunks):
        return None
    table, result = tensor_inputs(node)[0], _rows(cut, cut.order)
    if table is at:
        raise NoCut("it indexes positions by positions")
    if cut.into is None:
        return RowRule((None, cut), (result,))
    order, size = cut.into
    if spec_of(table).shape[0] != size:
        raise NoCut("its positions are of other rows")
    return RowRule((_rows(cut, order), cut), (result,))


def _put(node: fx.Node, end: End, cut: Cut) -> RowRule | None:
    """Rows that are added, or written, at positions of the rows of a chunk."""
    at, args = row_index(node), node.args
    if at is None or not isinstance(cut, SortedChunks) or end.is_result or tensor_inputs(node)[end.index] is not at:
        return None
    if cut.into is None:
        return None
    (order, size), values = cut.into, argument(node, 2)
    base, rows = spec_of(tensor_inputs(node)[0]).shape, spec_of(at).shape
    if base[0] != size or not isinstance(values, fx.Node) or spec_of(values).shape[:1] != rows:
        raise NoCut("its positions are of other rows")
    if len(args) > 3 and args[3]:
        return RowRule((_rows(cut, order), cut, _rows(cut, cut.order)), (_rows(cut, order),))
    if rows[0] != size:
        raise NoCut("several rows may write to the same place")
    into = (cut.order, size) if _counts_up(values, size) else None
    return RowRule((_rows(cut, order), cut, _rows(cut, cut.order, into)), (_rows(cut, order, into),))


def _numbers(node: fx.Node, end: End, cut: Cut) -> RowRule | None:
    """Positions of rows, in order."""
    if not isinstance(cut, SortedChunks):
        return None
    size = spec_of(node).shape[0]
    if cut.into != (cut.order, size) or not _counts_up(node, size):
        raise NoCut("its numbers depend on positions of rows")
    return RowRule((), (cut,), splits_at=(1,))


def _counts_up(node: fx.Node, size: int) -> bool:
    return node.target is aten.arange.start_step and node.args == (0, size, 1)


# how many rows each expert has


def counted(node: fx.Node) -> fx.Node | None:
    """The numbers of which a node counts how many are 0, 1, ...: by a histogram, or by a sum over rows of whether they
    equal each; None for other nodes."""
    args: Any = node.args
    if node.target is aten.histc.default:
        return args[0] if len(args) == 4 and args[2] == 0 and args[3] == args[1] - 1 else None
    is_sum = node.target is aten.sum.dim_IntList and args[1:] == ([0],) and args[0].target is aten.eq.Tensor
    wide, numbers = args[0].args if is_sum else (None, None)
    is_one_hot = (
        isinstance(wide, fx.Node)
        and isinstance(numbers, fx.Node)
        and _counts_up(numbers, spec_of(node).shape[0])
        and spec_of(wide).shape == (*spec_of(args[0]).shape[:1], 1)
        and len(spec_of(args[0]).shape) == 2
    )
    return wide if is_one_hot else None


def _count(node: fx.Node, end: End, cut: Cut) -> RowRule | None:
    ids = counted(node)
    return None if ids is None else _counts(node, ids, end, cut)


def _counts(node: fx.Node, ids: Any, end: End, cut: Cut) -> RowRule | None:
    if end.is_result:
        raise NoCut("it counts rows")
    if spec_of(node).dtype not in _EXACT:
        raise NoCut("its counts are rounded")
    if isinstance(cut, HistogramChunks) or cut.dim or (isinstance(cut, SortedChunks) and cut.into is not None):
        return None
    return RowRule((cut,), (HistogramChunks(0, cut.outer, cut.count, numbers_of(ids)),))


def _running(node: fx.Node, end: End, cut: Cut) -> RowRule | None:
    if not isinstance(cut, HistogramChunks):
        return None
    if end.is_result or cut.is_running or len(spec_of(node).shape) != 1:
        raise NoCut("counts of the rows of a chunk are used as those of all")
    if spec_of(node).dtype not in _EXACT:
        raise NoCut("its counts are rounded")
    return RowRule((cut,), (replace(cut, is_running=True),))


def _same_counts(node: fx.Node, end: End, cut: Cut) -> RowRule | None:
    is_exact = isinstance(cut, HistogramChunks) and not end.is_result and spec_of(node).dtype in _EXACT
    return RowRule((cut,), (cut,)) if is_exact else None


def counted_before(ends: fx.Node) -> fx.Node | None:
    """The numbers of which a value counts how many are at most 0, 1, ..., exactly; None for other values."""
    running = uncast(ends, _EXACT)
    is_running = running.target is aten.cumsum.default and spec_of(running).dtype in _EXACT
    counts = uncast(running.args[0], _EXACT) if is_running else None
    is_exact = counts is not None and spec_of(counts).dtype in _EXACT and len(spec_of(counts).shape) == 1
    return counted(counts) if counts is not None and is_exact else None


def uncast(value: Any, dtypes: Collection[torch.dtype] | None = None) -> fx.Node:
    """A value before its casts, or before those to `dtypes` that it has last."""
    while value.target in CASTS and (dtypes is None or spec_of(value).dtype in dtypes):
        value = value.args[0]
    node: fx.Node = value
    return node


def sorted_numbers(value: fx.Node) -> fx.Node | None:
    """The numbers that a value has in ascending order; None for other values."""
    sort: Any = value.args[0] if value.target is operator.getitem and value.args[1] == 0 else None
    if sort is None or sort.target not in _SORTS or len(spec_of(value).shape) != 1 or is_descending(sort):
        return None
    return numbers_of(value)


def numbers_of(value: Any) -> fx.Node:
    """The value whose rows these are, in some order."""
    while True:
        if value.target in _SAME_VALUES and spec_of(value).dtype in _EXACT:
            value = value.args[0]
        elif value.target is operator.getitem and value.args[0].target in _SORTS and value.args[1] == 0:
            value = value.args[0].args[0]
        else:
            root: fx.Node = value
            return root


# experts


def _of_experts(node: fx.Node, end: End, cut: Cut) -> RowRule | None:
    """Rows by expert, with the ends of each expert's rows: those of the chunk's own rows."""
    sums = node.target is ours.grouped_outer.default
    rows = (0, 1) if sums else (0,)
    if (end.is_result and sums) or (not end.is_result and end.index not in rows) or cut.dim:
        raise NoCut("expert ops can be cut only along their rows")
    if not isinstance(cut, SortedChunks) or cut.order is None or cut.into is not None:
        raise NoCut("its rows are not sorted by expert in every chunk")
    ids = numbers_of(cut.order.args[0])
    args: Any = ids.args
    is_index = ids.target is operator.getitem and args[1] == 1 and args[0].target in _INDICES
    if is_descending(cut.order) or not (is_index or ids.target is aten.argmax.default):
        raise NoCut("its rows may belong to no expert: their sort key may be negative, or descending")
    ends = HistogramChunks(0, cut.outer, cut.count, ids, True)
    return RowRule((cut, cut, ends), ("sum",)) if sums else RowRule((cut, None, ends), (cut,))


_TABLE: Mapping[Any, Callable[[fx.Node, End, Cut], RowRule | None]] = {
    **dict.fromkeys(_SORTS, _sort),
    **dict.fromkeys((aten.floor_divide.default, aten.div.Tensor_mode), _quotient),
    **dict.fromkeys((aten.index.Tensor, aten.index_select.default), _lookup),
    **dict.fromkeys((aten.index_put.default, aten._unsafe_index_put.default), _put),
    aten.arange.start_step: _numbers,
    **dict.fromkeys((aten.histc.default, aten.sum.dim_IntList), _count),
    aten.cumsum.default: _running,
    **dict.fromkeys(CASTS, _same_counts),
    **dict.fromkeys((ours.grouped_mm.default, ours.grouped_outer.default), _of_experts),
}
