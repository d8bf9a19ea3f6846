"""Splits and cats of a group's blocks as single ops: only where they are just that, and with the same values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tests.overlap.graphs import ATEN, Builder, assert_same_values
from torch import fx

from meshweave.ir import local_ops
from meshweave.ir.graph import copied_graph
from meshweave.optimize.decompose.lower import raise_blocks

Build = Callable[[Builder, fx.Node], fx.Node]
SPLIT, SIZES, CAT = ATEN.split.Tensor, ATEN.split_with_sizes.default, ATEN.cat.default


def items(b: Builder, split: fx.Node, order: Sequence[int] = (0, 1)) -> list[fx.Node]:
    return [b.item(f"{split.name}_{i}", split, i) for i in order]


def joined(b: Builder, full: fx.Node, to: int = 1, op: object = SPLIT, *dims: int) -> fx.Node:
    """The two blocks of 8 rows of a gathered value, side by side."""
    size = 8 if op is SPLIT else [8, 8]
    return b.call("joined", CAT, items(b, b.call("split", op, full, size, *dims)), to)


def dealt(b: Builder, x: fx.Node, *, dim: int = 1, op: object = SPLIT, to: tuple[int, ...] = ()) -> fx.Node:
    """The halves of the columns, stacked, and scattered."""
    size = 6 if op is SPLIT else [6, 6]
    stacked = b.call("stacked", CAT, items(b, b.call("split", op, x, size, dim)), *to)
    return b.wait("own", b.scatter("start", stacked))


def after_a_gather(build: Build) -> fx.GraphModule:
    b = Builder()
    x = b.placeholder("x")
    return b.done(b.relu("out", build(b, b.wait("full", b.gather("gather", x)))))


def before_a_scatter(build: Build) -> fx.GraphModule:
    b = Builder()
    return b.done(build(b, b.placeholder("x", (8, 12))))


def raised(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy with blocks as single ops, and the same values."""
    after = fx.GraphModule({}, copied_graph(gm.graph))
    raise_blocks(after.graph)
    after.graph.lint()
    assert_same_values(gm, after)
    return after


JOINED: dict[str, Build] = {
    "split": joined,
    "split along dim 0": lambda b, x: joined(b, x, 1, SPLIT, 0),
    "split along dim -2": lambda b, x: joined(b, x, -1, SPLIT, -2),
    "split with sizes": lambda b, x: joined(b, x, 1, SIZES),
}
DEALT: dict[str, Build] = {
    "split": dealt,
    "split along dim -1": lambda b, x: dealt(b, x, dim=-1),
    "split with sizes, cat of dim -2": lambda b, x: dealt(b, x, op=SIZES, to=(-2,)),
}


@pytest.mark.parametrize("name", JOINED)
def test_blocks_of_a_received_value_side_by_side_are_a_join(name: str) -> None:
    gm = raised(after_a_gather(JOINED[name]))
    names = [n.name for n in gm.graph.nodes]
    (node,) = gm.graph.find_nodes(op="call_function", target=local_ops.join_blocks)
    assert node.args[1:] == ([2], [0], 1, None)
    assert node.args[0].name == "full"
    assert names == ["x", "gather", "full", node.name, "out", "output"]


@pytest.mark.parametrize("name", DEALT)
def test_blocks_of_columns_stacked_for_a_collective_are_a_deal(name: str) -> None:
    gm = raised(before_a_scatter(DEALT[name]))
    names = [n.name for n in gm.graph.nodes]
    (node,) = gm.graph.find_nodes(op="call_function", target=local_ops.deal_blocks)
    assert node.args[1:] == ([2], [0], 1, None, 6)
    assert names == ["x", node.name, "start", "own", "output"]


def _reordered(b: Builder, x: fx.Node) -> fx.Node:
    return b.call("joined", CAT, items(b, b.call("split", SPLIT, x, 8), (1, 0)), 1)


def _twice_the_first(b: Builder, x: fx.Node) -> fx.Node:
    first = items(b, b.call("split", SPLIT, x, 8), (0,))
    return b.call("joined", CAT, first * 2, 1)


def _three_of_four(b: Builder, x: fx.Node) -> fx.Node:
    return b.call("joined", CAT, items(b, b.call("split", SPLIT, x, 4), (0, 1, 2)), 1)


def _of_two_splits(b: Builder, x: fx.Node) -> fx.Node:
    first, _ = items(b, b.call("split", SPLIT, x, 8))
    _, second = items(b, b.call("again", SPLIT, b.relu("relu", x), 8))
    return b.call("joined", CAT, [first, second], 1)


def _beside_another_value(b: Builder, x: fx.Node) -> fx.Node:
    first, second = items(b, b.call("split", SPLIT, x, 8))
    return b.call("joined", CAT, [first, second, b.relu("relu", first)], 1)


def _of_a_computed_value(b: Builder, x: fx.Node) -> fx.Node:
    return joined(b, b.relu("relu", x))


def _along_the_same_dim(b: Builder, x: fx.Node) -> fx.Node:
    return joined(b, x, 0)


def _stacked_for_no_collective(b: Builder, x: fx.Node) -> fx.Node:
    return b.call("joined", CAT, items(b, b.call("split", SPLIT, x, 4, 1)), 0)


def _a_single_block(b: Builder, x: fx.Node) -> fx.Node:
    return b.call("joined", CAT, items(b, b.call("split", SPLIT, x, 16), (0,)), 1)


def _by_chunk(b: Builder, x: fx.Node) -> fx.Node:
    return b.call("joined", CAT, items(b, b.call("chunks", ATEN.chunk.default, x, 2)), 1)


def _with_keywords(b: Builder, x: fx.Node) -> fx.Node:
    cat = b.call("joined", CAT, items(b, b.call("split", SPLIT, x, 4, 1)), dim=1)
    return b.wait("own", b.scatter("start", cat))


def _split_with_keywords(b: Builder, x: fx.Node) -> fx.Node:
    return b.call("joined", CAT, items(b, b.call("split", SPLIT, x, 4, dim=1)), 1)


OTHERS = [
    _reordered, _twice_the_first, _three_of_four, _of_two_splits, _beside_another_value, _of_a_computed_value,
    _along_the_same_dim, _stacked_for_no_collective, _a_single_block, _by_chunk, _with_keywords, _split_with_keywords,
]  # fmt: skip


@pytest.mark.parametrize("build", OTHERS)
def test_other_splits_and_cats_stay(build: Build) -> None:
    gm = after_a_gather(build)
    assert str(raised(gm).graph) == str(gm.graph)


def test_a_split_without_described_parts_stays() -> None:
    gm = after_a_gather(joined)
    (split,) = gm.graph.find_nodes(op="call_function", target=SPLIT)
    del split.meta["val"]
    before = str(gm.graph)
    raise_blocks(gm.graph)
    assert str(gm.graph) == before


def test_parts_that_are_read_elsewhere_stay_there() -> None:
    """The split keeps its other reader, and the join is beside it."""
    b = Builder()
    x = b.placeholder("x")
    full = b.wait("full", b.gather("gather", x))
    first, second = items(b, b.call("split", SPLIT, full, 8))
    gm = raised(b.done(b.call("joined", CAT, [first, second], 1), b.relu("alone", second)))
    assert [n.name for n in gm.graph.nodes if n.target in (SPLIT, CAT)] == ["split"]
    assert len(gm.graph.find_nodes(op="call_function", target=local_ops.join_blocks)) == 1


def test_the_op_has_the_origin_of_the_cat() -> None:
    gm = after_a_gather(joined)
    (cat,) = gm.graph.find_nodes(op="call_function", target=CAT)
    cat.meta |= {"stack_trace": "model.py:7", "tensor_meta": "of the cat alone"}
    (node,) = raised(gm).graph.find_nodes(op="call_function", target=local_ops.join_blocks)
    assert (node.meta["stack_trace"], "tensor_meta" in node.meta) == ("model.py:7", False)
