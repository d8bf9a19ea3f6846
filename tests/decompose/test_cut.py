"""The table of cuts against the ops themselves: chunks of operands give the chunk of the result, for every cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Any

import pytest
import torch
from tests.decompose.programs import integers
from torch import Tensor, fx

from meshweave.ir import local_ops
from meshweave.ir.rank import ring_index
from meshweave.optimize.decompose.cut import (
    FIXED,
    Cut,
    Kind,
    NoCut,
    Op,
    Shape,
    contraction,
    has_symbols,
    is_same,
    kind_of,
    memory_order,
    through_view,
)

aten = torch.ops.aten


def all_cuts(shape: Shape) -> Iterator[Cut]:
    """Every cut in at least two chunks that a tensor of `shape` splits into, by trying all numbers."""
    for dim, size in enumerate(shape):
        for outer in range(1, size + 1):
            for count in range(2, size + 1):
                if size % (outer * count) == 0:
                    yield Cut(dim, outer, count)


def chunk(x: Tensor, cut: Cut | None, c: int) -> Tensor:
    """Chunk c: rows c, c + count, ... of the blocks of `inner` rows."""
    if cut is None:
        return x
    inner = x.shape[cut.dim] // (cut.outer * cut.count)
    rows = [(block * cut.count + c) * inner + i for block in range(cut.outer) for i in range(inner)]
    return x.index_select(cut.dim, torch.tensor(rows))


@dataclass(frozen=True)
class Case:
    """An op on operands of these shapes, with a result of this shape; `rest` are the arguments after them, for
    a result of a shape. `is_view`: a chunk is in the shape of a chunk, with dims of size 1 where the op has
    none."""

    target: Any
    result: Shape
    shapes: tuple[Shape, ...]
    rest: Callable[[Shape], tuple[Any, ...]]
    is_view: bool = False

    def run(self, operands: Sequence[Tensor], shape: Shape) -> Tensor:
        """The op on chunks (or all) of its operands, for a result of `shape`."""
        return operands[0].reshape(shape) if self.is_view else self.target(*operands, *self.rest(shape))


def case(target: Any, result: Shape, *shapes: Shape, rest: tuple[Any, ...] = (), is_view: bool = False) -> Case:
    return Case(target, result, shapes, lambda _: rest, is_view)


CASES = {
    "view that merges": case(aten.view.default, (24, 2), (4, 6, 2), rest=([24, 2],), is_view=True),
    "view that splits": case(aten.view.default, (2, 4, 6), (2, 24), rest=([2, 4, 6],), is_view=True),
    "view across dims": case(aten.view.default, (6, 4), (4, 6), rest=([6, 4],), is_view=True),
    "unsqueeze": case(aten.unsqueeze.default, (4, 1, 6), (4, 6), rest=(1,), is_view=True),
    "squeeze": case(aten.squeeze.dim, (4, 6), (4, 1, 6), rest=(1,), is_view=True),
    "permute": case(aten.permute.default, (6, 2, 4), (2, 4, 6), rest=([2, 0, -2],)),
    "transpose": case(aten.transpose.int, (6, 4, 2), (2, 4, 6), rest=(-1, 0)),
    "t": case(aten.t.default, (6, 4), (4, 6)),
    "expand": Case(aten.expand.default, (4, 2, 6), ((1, 6),), lambda shape: (shape,)),
    "addition": case(aten.add.Tensor, (4, 6), (4, 6), (4, 6)),
    "addition of a row": case(aten.add.Tensor, (6, 6), (6, 6), (6,)),
    "product with a column": case(aten.mul.Tensor, (2, 4, 6), (4, 1), (2, 4, 6)),
    "sum": case(aten.sum.dim_IntList, (4, 6), (4, 2, 6), rest=([1],)),
    "sum of several dims": case(aten.sum.dim_IntList, (1, 4, 1), (2, 4, 6), rest=([0, -1], True)),
    "mean": case(aten.mean.dim, (4, 6), (2, 4, 6), rest=([0],)),
    "amax": case(aten.amax.default, (4, 6), (2, 4, 6), rest=([-3],)),
    "mm": case(aten.mm.default, (4, 2), (4, 6), (6, 2)),
    "bmm": case(aten.bmm.default, (2, 4, 8), (2, 4, 6), (2, 6, 8)),
    "addmm": case(aten.addmm.default, (4, 2), (2,), (4, 6), (6, 2)),
    "addmm of a matrix": case(aten.addmm.default, (4, 2), (4, 2), (4, 6), (6, 2)),
    "join of blocks": case(local_ops.join_blocks, (2, 12, 2), (4, 6, 2), rest=([2], [0], 1, None)),
    "join of the first dim": case(local_ops.join_blocks, (4, 6), (4, 6), rest=([2], [0], 0, None)),
    "deal of blocks": Case(local_ops.deal_blocks, (6, 4, 4), ((2, 12, 4),), lambda s: ([3], [0], 1, None, s[1])),
}
by_case = pytest.mark.parametrize("name", CASES)


def op_of(row: Case) -> Op:
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(len(row.shapes))]
    return Op(graph.call_function(row.target, (*nodes, *row.rest(row.result))), row.shapes, row.result)


def kind_in_table(op: Op) -> Kind:
    kind = kind_of(op.node)
    assert kind is not None
    return kind


@dataclass(frozen=True)
class Whole:
    """An op that has run on whole operands."""

    case: Case
    op: Op
    kind: Kind
    operands: list[Tensor]
    result: Tensor

    def runs_in(self, cuts: Sequence[Cut | None], cut: Cut) -> bool:
        """Whether each chunk of the result is the op of the chunks of the operands."""
        return all(
            torch.equal(self.on_chunks(cuts, c, cut.chunk(self.op.result), cut), chunk(self.result, cut, c))
            for c in range(cut.count)
        )

    def on_chunks(self, cuts: Sequence[Cut | None], c: int, shape: Shape, cut: Cut | None = None) -> Tensor:
        chunks = [chunk(x, part, c) for x, part in zip(self.operands, cuts, strict=True)]
        if cut is not None and is_same(self.op.node, cut):
            return chunks[0]
        return self.case.run(chunks, shape)


def whole(name: str) -> Whole:
    row = CASES[name]
    operands = [integers(*shape, seed=i) for i, shape in enumerate(row.shapes)]
    result = row.run(operands, row.result)
    assert result.shape == row.result
    return Whole(row, op_of(row), kind_in_table(op_of(row)), operands, result)


@by_case
def test_a_chunk_of_the_result_is_computed_from_chunks_of_the_operands(name: str) -> None:
    known = whole(name)
    num_cuts = 0
    for cut in all_cuts(known.op.result):
        try:
            cuts = known.kind.backward(known.op, cut)
        except NoCut:
            continue
        if all(c is None or c.fits(shape) for c, shape in zip(cuts, known.op.operands, strict=True)):
            assert known.runs_in(cuts, cut), f"{cut} from {cuts}"
            num_cuts += 1
    assert num_cuts


@by_case
def test_a_cut_operand_gives_a_cut_result_or_a_sum(name: str) -> None:
    known = whole(name)
    num_cuts = 0
    for i, shape in enumerate(known.op.operands):
        for cut in all_cuts(shape):
            try:
                result = known.kind.forward(known.op, i, cut)
            except NoCut:
                continue
            num_cuts += 1
            if result == "sum":
                cuts = contraction(known.op, cut)
                assert cuts[i] == cut
                parts = [known.on_chunks(cuts, c, known.op.result) for c in range(cut.count)]
                assert torch.equal(sum(parts), known.result)
                continue
            assert result.fits(known.op.result)
            cuts = known.kind.backward(known.op, result)
            assert cuts[i] == cut
            assert known.runs_in(cuts, result), f"{cut} of operand {i} gives {result}"
    assert num_cuts


VIEWS = [
    ((4, 6), (24,)),
    ((24,), (4, 6)),
    ((4, 6), (6, 4)),
    ((2, 3, 4), (6, 1, 4)),
    ((12, 2), (3, 8)),
    ((8, 3), (2, 12)),
]


@pytest.mark.parametrize(("before", "after"), VIEWS)
def test_a_view_has_the_cut_with_the_same_elements_or_none(before: Shape, after: Shape) -> None:
    numbers = torch.arange(prod(before))

    def elements(shape: Shape, cut: Cut) -> list[set[int]]:
        return [set(chunk(numbers.reshape(shape), cut, c).flatten().tolist()) for c in range(cut.count)]

    for cut in all_cuts(before):
        same = [other for other in all_cuts(after) if elements(after, other) == elements(before, cut)]
        if same:
            assert [through_view(cut, before, after)] == same
        else:
            with pytest.raises(NoCut, match="its chunks are not those of a dim of"):
                through_view(cut, before, after)


def test_an_empty_tensor_has_no_chunks() -> None:
    with pytest.raises(NoCut, match="it is empty"):
        through_view(Cut(0, 1, 2), (4, 0), (0, 4))
    assert not Cut(0, 1, 2).fits((0, 4))
    assert Cut(0, 2, 2).fits((4, 1))
    assert not Cut(0, 2, 2).fits((6, 1))
    assert Cut(1, 2, 3).chunk((5, 12)) == (5, 4)


REFUSED = [
    ("sum", 0, Cut(1, 1, 2), "the cut dim is reduced over"),
    ("addmm", 0, Cut(0, 1, 2), "the cut operand is the addend of a product"),
    ("addmm", 1, Cut(1, 1, 2), "the addend would be added for every chunk"),
    ("expand", 0, Cut(0, 1, 1), "the cut operand is repeated along the cut"),
    ("join of blocks", 0, Cut(0, 1, 4), "its chunks do not match its blocks"),
    ("view across dims", 0, Cut(0, 1, 4), "its chunks are not those of a dim of"),
]


@pytest.mark.parametrize(("name", "i", "cut", "why"), REFUSED)
def test_cuts_that_an_op_cannot_follow_have_a_reason(name: str, i: int, cut: Cut, why: str) -> None:
    known = whole(name)
    with pytest.raises(NoCut, match=why):
        known.kind.forward(known.op, i, cut)


@pytest.mark.parametrize("rest", [([2], [0], 1, ((0, 6), (6, 5))), ([2, 2], [1, 0], 1, None)])
def test_blocks_that_are_uneven_or_in_another_order_are_not_cut(rest: tuple[Any, ...]) -> None:
    op = op_of(case(local_ops.join_blocks, (2, 12), (4, 6), rest=rest))
    with pytest.raises(NoCut, match="its blocks are uneven, or in another order"):
        kind_in_table(op).forward(op, 0, Cut(0, 1, 2))


def test_the_blocks_of_a_join_are_its_chunks_only_along_its_dim() -> None:
    join, deal = whole("join of blocks").op.node, whole("deal of blocks").op.node
    assert [cut for cut in all_cuts((2, 12, 2)) if is_same(join, cut)] == [Cut(1, 1, 2)]
    assert [cut for cut in all_cuts((6, 4, 4)) if is_same(deal, cut)] == [Cut(0, 1, 3)]
    assert not is_same(whole("mm").op.node, Cut(0, 1, 2))


def test_only_ops_of_the_table_run_in_chunks() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    kinds = {
        name: kind_of(graph.call_function(target, args))
        for name, target, args in [
            ("mm", aten.mm.default, (x, x)),
            ("relu", aten.relu.default, (x,)),
            ("view", aten.view.default, (x, [4])),
            ("rrelu", aten.rrelu.default, (x, 0.1, 0.3, True)),
            ("cumsum", aten.cumsum.default, (x, 0)),
        ]
    }
    assert kind_of(x) is None
    assert {name: kind is not None and (kind.is_matmul, kind.is_free) for name, kind in kinds.items()} == {
        "mm": (True, False),
        "relu": (False, False),
        "view": (False, True),
        "rrelu": False,
        "cumsum": False,
    }
    fixed = graph.call_function(aten.relu.default, (x,))
    fixed.meta[FIXED] = "a hook reads it"
    assert kind_of(fixed) is None


def test_sizes_that_depend_on_the_device_are_seen_however_deep() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    index = graph.call_function(ring_index, (0, 1, ("d",)))
    assert has_symbols((x, [2, index]))
    assert not has_symbols((x, [2, 3]))


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_dims_from_the_outermost_in_memory(order: tuple[int, ...]) -> None:
    x = torch.empty(2, 3, 4).permute(order)
    assert x.permute(memory_order(x)).is_contiguous()
    assert sorted(memory_order(x)) == [0, 1, 2]
    assert memory_order(torch.empty(2, 1, 3)) == [0, 1, 2]
