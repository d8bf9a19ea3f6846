"""Problems in which collectives are merged, and the graphs that are written from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from tests.overlap.graphs import ATEN, WAIT, Builder, assert_same_values, by_size, groups_of
from torch import fx

from meshweave.ir.device_program import graph_program
from meshweave.ir.graph import copied_graph
from meshweave.optimize.overlap.merge import Merged, MergedWriter, Merger
from meshweave.optimize.overlap.model import Order, Problem
from meshweave.optimize.overlap.prices import costs_of, fill_prices
from meshweave.optimize.overlap.read import read_problem
from meshweave.optimize.overlap.write_buckets import rewrite

LATENCY, PER_BYTE = 4.0, 0.01
RANK_0 = groups_of(0)


class Merging:
    """A copy of a graph, read and priced: kernels cost nothing, a collective 4 s and 1 s for each 100 bytes."""

    def __init__(self, gm: fx.GraphModule, groups: Mapping[str, Sequence[int]] = RANK_0) -> None:
        self.before = gm
        self.graph = copied_graph(gm.graph)
        reading = read_problem(graph_program(self.graph, groups))
        prices = costs_of(by_size({}, LATENCY, PER_BYTE, 1)).prices(reading)
        self.merger = Merger(reading, fill_prices(reading, prices, 1.0, None))
        self.number = {name: i for i, name in enumerate(reading.problem.names)}

    def merged(self, *buckets: Sequence[str]) -> Merged:
        return self.merger.merged([tuple(self.number[name] for name in bucket) for bucket in buckets])

    def write(self, merged: Merged, order: Order | None = None) -> fx.GraphModule:
        """The written graph, which gives the same values."""
        rewrite(self.merger.reading, merged, merged.problem.order if order is None else order)
        after = fx.GraphModule({}, self.graph)
        after.graph.lint()
        assert_same_values(self.before, after)
        return after


def any_order(problem: Problem, seed: int) -> list[int]:
    """An order of items and waits at random."""
    generator, order = random.Random(seed), list[int]()
    open_entries = [*range(problem.num_items), *(~c for c in problem.starts if problem.is_waited[c])]
    while open_entries:
        able = [x for x in open_entries if _may_follow(problem, x, set(order))]
        order.append(generator.choice(able))
        open_entries.remove(order[-1])
    return order


def _may_follow(problem: Problem, x: int, done: set[int]) -> bool:
    if x < 0:
        return ~x in done
    return done.issuperset(problem.deps[x]) and done.issuperset(~c for c in problem.waits[x])


def three(kind: str, read: bool = True) -> fx.GraphModule:
    """Collectives of 256, 128 and 64 bytes, of values computed one after the other; sums of two results, at the end."""
    b = Builder()
    value, done = b.placeholder("input"), []
    for name, rows in (("x", 8), ("y", 4), ("z", 2)):
        above = b.call(None, ATEN.slice.Tensor, value, 0, 0, rows)
        value = b.add(f"value_{name}", b.placeholder(name, (rows, 8)), above)
        done.append(b.wait(f"done_{name}", b.start(f"start_{name}", kind, value)))
    return b.done(*(b.relu(f"out_{i}", x) for i, x in enumerate(done)) if read else done)


KINDS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


def shown(merged: Merged) -> list[str]:
    """Items by name, in the order in which they are written."""
    return merged.problem.names


def test_buckets_that_wait_for_each_other_are_left_out() -> None:
    """The second of a needs the first of b, and the second of b the first of a."""
    b = Builder()
    x = b.placeholder("x", (8, 8))
    first_a, first_b = b.reduce("first_a", x, "a"), b.reduce("first_b", x, "b")
    of_a, of_b = b.wait("of_a", first_a), b.wait("of_b", first_b)
    second_a, second_b = b.reduce("second_a", of_b, "a"), b.reduce("second_b", of_a, "b")
    gm = b.done(*(b.relu(None, b.wait(None, n)) for n in (second_a, second_b)), b.relu(None, of_a), b.relu(None, of_b))
    merging = Merging(gm)
    pairs = [("first_a", "second_a"), ("first_b", "second_b")]
    both = tuple(tuple(merging.number[name] for name in pair) for pair in pairs)
    writer = MergedWriter(merging.merger, both)
    assert writer.run() is None
    assert writer.stuck() == 1
    merged = merging.merged(*pairs)
    assert merged.buckets == both[:1]
    merging.write(merged)


def test_results_of_a_bucket_are_copied_out_for_the_next() -> None:
    """Gathered values are gathered again: each is copied out of its bucket before the second is packed."""
    b = Builder()
    first = [b.wait(f"done_{n.name}", b.gather(f"start_{n.name}", n)) for n in b.placeholders("x y")]
    second = [b.wait(f"more_{i}", b.gather(f"again_{i}", x, "b")) for i, x in enumerate(first)]
    merging = Merging(b.done(*(b.relu(f"out_{i}", x) for i, x in enumerate(second))))
    merged = merging.merged(("start_x", "start_y"), ("again_0", "again_1"))
    names = shown(merged)
    pack = names.index("pack again_0+again_1")
    assert names[:pack] == ["pack start_x+start_y", "start_x+start_y", "unpack start_x", "unpack start_y"]
    assert merged.problem.deps[pack] == (1, 2, 3)  # the wait for their bucket, and both copies
    merging.write(merged)


# written graphs


Members = Callable[[Builder], list[fx.Node]]  # the operands of collectives


def _shapes(b: Builder) -> list[fx.Node]:
    return [b.relu(None, b.placeholder(n, s)) for n, s in (("x", (8, 8)), ("y", (4, 2, 3)), ("z", (2,)))]


def _strided(b: Builder) -> list[fx.Node]:
    x, y = b.placeholder("x", (8, 6)), b.placeholder("y", (6, 4))
    turned = b.call("turned", ATEN.t.default, y)
    return [b.call("columns", ATEN.slice.Tensor, x, 1, 0, 4), turned, b.call("every", ATEN.slice.Tensor, y, 0, 0, 6, 3)]


def _equal_operands(b: Builder) -> list[fx.Node]:
    x = b.placeholder("x", (4, 4))
    return [x, x, b.relu("relu", x)]


def _of_inputs(b: Builder) -> list[fx.Node]:
    return [b.placeholder("x", (4, 2)), b.placeholder("y", (2, 2)), b.placeholder("z", (6, 1))]


def _several_dtypes(b: Builder) -> list[fx.Node]:
    x, y, z = (
        b.placeholder("x", (2, 3)),
        b.placeholder("y", (1,), torch.bfloat16),
        b.placeholder("z", (3,), torch.int64),
    )
    return [x, b.relu("relu", y), z]


def _single_elements_of_several_dtypes(b: Builder) -> list[fx.Node]:
    """An element with a stride that is not 1 counts as contiguous, but is not seen as bytes."""
    column = b.call("column", ATEN.select.int, b.placeholder("x", (2, 8)), 1, 3)
    y = b.placeholder("y", (2, 3), torch.bfloat16)
    return [b.call("element", ATEN.slice.Tensor, column, 0, 1, 2), y, b.relu("relu", y)]


MEMBERS: dict[str, Members] = {
    m.__name__.lstrip("_"): m
    for m in (_shapes, _strided, _equal_operands, _of_inputs, _several_dtypes, _single_elements_of_several_dtypes)
}
CASES = [(name, kind) for name in MEMBERS for kind in KINDS if "dtypes" not in name or kind == KINDS[0]]


def collectives(name: str, kind: str, reads: bool) -> fx.GraphModule:
    """Their results are read by kernels, or returned as they are: then they are copied out."""
    b = Builder()
    waits = [b.wait(f"done_{i}", b.start(f"start_{i}", kind, x)) for i, x in enumerate(MEMBERS[name](b))]
    return b.done(*(b.relu(f"out_{i}", x) if reads else x for i, x in enumerate(waits)))


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_merged_collectives_give_the_same_values_in_any_order(name: str, kind: str, reads: bool) -> None:
    gm = collectives(name, kind, reads)
    for seed, bucket in enumerate([(0, 1, 2), (2, 0), (1, 2)]):
        merging = Merging(gm)
        merged = merging.merged([f"start_{i}" for i in bucket])
        after = merging.write(merged, any_order(merged.problem, seed))
        assert len([n for n in after.graph.nodes if n.target in _OPS]) == 4 - len(bucket)


_OPS = {getattr(torch.ops._c10d_functional, kind).default for kind in KINDS}


def test_gathers_in_a_group_of_a_single_rank() -> None:
    mesh = {"s": ((0,), (1,), (2,), (3,))}
    b = Builder(mesh)
    waits = [
        b.wait(None, b.gather(f"start_{n.name}", n, "s")) for n in (b.placeholder("x", (2, 3)), b.placeholder("y"))
    ]
    gm = b.done(*(b.relu(None, x) for x in waits))
    merging = Merging(gm, groups={"s": (0,)})
    rewrite(merging.merger.reading, merged := merging.merged(("start_x", "start_y")), merged.problem.order)
    assert_same_values(gm, fx.GraphModule({}, merging.graph), mesh)


def test_a_second_wait_for_a_part_is_for_a_part_that_is_there() -> None:
    b = Builder()
    waits = [b.wait(f"done_{n.name}", b.reduce(f"start_{n.name}", n)) for n in b.placeholders("x y")]
    merging = Merging(b.done(*(b.relu(None, b.wait(f"again_{i}", x)) for i, x in enumerate(waits))))
    after = merging.write(merging.merged(("start_x", "start_y")))
    assert len(after.graph.find_nodes(op="call_function", target=WAIT)) == 1


def test_the_meta_of_a_start_and_of_its_wait_stay_with_its_part() -> None:
    gm = three("all_reduce")
    nodes = {node.name: node for node in gm.graph.nodes}
    nodes["start_x"].meta |= {"stack_trace": "model.py:1", "tensor_meta": "of the start"}
    nodes["done_y"].meta |= {"recompute": 7, "tensor_meta": "of the wait"}
    merging = Merging(gm)
    after = merging.write(merging.merged(("start_x", "start_y")))
    outs = {n.name: n.all_input_nodes[0] for n in after.graph.nodes if n.name.startswith("out_")}
    assert outs["out_0"].meta["stack_trace"] == "model.py:1"
    assert outs["out_1"].meta["recompute"] == 7
    assert not any("tensor_meta" in n.meta for n in outs.values())
    (start,) = (n for n in after.graph.nodes if n.target in _OPS and "start_z" not in n.name)
    assert start.meta["stack_trace"] == "model.py:1"
