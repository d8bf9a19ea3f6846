"""Chains of ops in chunks against whole ops: chunks of a consumer are those of its value, or addends of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.decompose.programs import integers
from tests.decompose.test_cut import all_cuts, chunk
from tests.overlap.graphs import ATEN, Builder
from torch import Tensor, fx

from meshweave.ir import local_ops
from meshweave.ir.device_program import graph_program
from meshweave.ir.graph import Origin, copied_graph
from meshweave.ir.rank import ring_index
from meshweave.ir.values import Value
from meshweave.optimize.decompose.chains import (
    Chunker,
    Downstream,
    Shapes,
    Upstream,
    cuttable,
    downstream,
    part_of,
    read_outside,
    reshape,
    upstream,
)
from meshweave.optimize.decompose.cut import FIXED, Cut, NoCut
from meshweave.optimize.decompose.writer import ChunkWriter

Build = Callable[[Builder], fx.Node]


class Chains:
    """A graph whose last value is its output, and the whole value of every node."""

    def __init__(self, build: Build) -> None:
        b = Builder()
        b.done(build(b))
        self.graph = b.graph
        self.nodes = {node.name: node for node in self.graph.nodes}
        self.order = {node: i for i, node in enumerate(self.graph.nodes)}
        self.shapes = Shapes(dict(graph_program(self.graph).values))
        self.inputs = {
            node.name: integers(*node.meta["val"].shape, seed=i)
            for i, node in enumerate(self.graph.find_nodes(op="placeholder", sort=True))
        }
        self.values = evaluated(self.graph, self.inputs)

    def named(self, nodes: Any) -> list[str]:
        return [node.name for node in nodes]

    def chunker(self, number: int) -> Chunker:
        """Writes into a graph of its own, whose nodes have the same names and numbers as this one's."""
        graph = copied_graph(self.graph)
        copies = dict(zip(self.graph.nodes, graph.nodes, strict=True))
        (output,) = graph.find_nodes(op="output")
        shapes = Shapes({copies[n]: v for n, v in self.shapes.values.items()})
        return Chunker(ChunkWriter(graph, output), shapes, number)

    def chunk_of(self, chunker: Chunker, write: Callable[[dict[str, fx.Node]], fx.Node]) -> Tensor:
        """The value of a node that `write` writes for a chunk."""
        copies = {node.name: node for node in chunker.write.graph.nodes}
        node = write(copies)
        return evaluated(chunker.write.graph, self.inputs)[node.name]


def evaluated(graph: fx.Graph, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """The value of each node, by name."""
    env: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        if node.op == "placeholder":
            env[node] = inputs[node.name]
        elif node.op == "call_function":
            env[node] = node.target(*args, **kwargs)
    return {node.name: value for node, value in env.items()}


def mapped(table: dict[fx.Node, Any], nodes: dict[str, fx.Node]) -> dict[fx.Node, Any]:
    return {nodes[node.name]: value for node, value in table.items()}


def _activation(b: Builder) -> fx.Node:
    x, bias, w = b.placeholder("x", (8, 6)), b.placeholder("bias", (8, 1)), b.placeholder("w", (6, 4))
    return b.mm("product", b.relu("relu", b.add("added", x, bias)), w)


def _views(b: Builder) -> fx.Node:
    """[8, 6] as [2, 4, 6], transposed to [2, 6, 4], times [2, 4, 4]."""
    x, w = b.placeholder("x", (8, 6)), b.placeholder("w", (2, 4, 4))
    apart = b.call("apart", ATEN.view.default, x, [2, 4, 6])
    return b.call("product", ATEN.bmm.default, b.call("turned", ATEN.transpose.int, apart, 1, 2), w)


def _both_operands(b: Builder) -> fx.Node:
    x, y = b.placeholder("x", (8, 6)), b.placeholder("y", (8, 6))
    return b.mm("product", b.call("turned", ATEN.t.default, b.relu("relu", x)), b.add("added", x, y))


def _squeezed(b: Builder) -> fx.Node:
    """A dim of size 1 goes, and one comes, for which a chunk's shape is in numbers."""
    x, w = b.placeholder("x", (4, 1, 6)), b.placeholder("w", (6, 4))
    flat = b.call("flat", ATEN.squeeze.dim, x, 1)
    wide = b.call("wide", ATEN.unsqueeze.default, flat, 2)
    return b.mm("product", b.call("narrow", ATEN.squeeze.dim, wide, 2), w)


def _squeezed_in_vain(b: Builder) -> fx.Node:
    """A chunk of a single row has a dim of size 1 where x has not."""
    return b.mm("product", b.call("same", ATEN.squeeze.dim, b.placeholder("x", (4, 6)), 0), b.placeholder("w", (6, 4)))


def _dealt(b: Builder) -> fx.Node:
    """Blocks of columns, stacked: a chunk of the columns has smaller blocks."""
    x, w = b.placeholder("x", (4, 12)), b.placeholder("w", (6, 4))
    return b.mm("product", b.call("dealt", local_ops.deal_blocks, x, [2], [0], 1, None, 6), w)


DOWN: dict[str, Build] = {
    build.__name__.lstrip("_"): build
    for build in (_activation, _views, _both_operands, _squeezed, _squeezed_in_vain, _dealt)
}


@pytest.mark.parametrize("name", DOWN)
def test_consumers_of_a_cut_source_are_computed_chunk_by_chunk(name: str) -> None:
    """For every cut of x whose chunks lead to the product."""
    chains = Chains(DOWN[name])
    x, product, num_cuts = chains.nodes["x"], chains.nodes["product"], 0
    for cut in all_cuts(tuple(chains.inputs["x"].shape)):
        chain = downstream(x, cut, chains.shapes, lambda node: False)
        if product not in chain.consumers:
            assert not chain.consumers
            assert list(chain.cuts) == [x]
            continue
        num_cuts += 1
        result, parts = chain.consumers[product], []
        for c in range(cut.count):
            chunker = chains.chunker(c)

            def write(nodes: dict[str, fx.Node], chunker: Chunker = chunker, chain: Downstream = chain) -> fx.Node:
                own = chunker.take(nodes["x"], chain.cuts[x])
                chunker.chunk_of[nodes["x"]] = own
                return chunker.down(nodes["product"], mapped(chain.cuts, nodes), chain.consumers[product])

            parts.append(chains.chunk_of(chunker, write))
        whole = chains.values["product"]
        if isinstance(result, Cut):
            assert all(torch.equal(part, chunk(whole, result, c)) for c, part in enumerate(parts)), f"{cut}: {result}"
        else:
            assert torch.equal(torch.stack(parts).sum(0), whole), str(cut)
    assert num_cuts


def _sum_of_products(b: Builder) -> fx.Node:
    x, w, v = b.placeholder("x", (8, 6)), b.placeholder("w", (6, 4)), b.placeholder("v", (6, 4))
    return b.relu("result", b.add("sum", b.mm("left", x, w), b.mm("right", b.relu("relu", x), v)))


def _product_as_view(b: Builder) -> fx.Node:
    x, w = b.placeholder("x", (8, 6)), b.placeholder("w", (6, 4))
    apart = b.call("apart", ATEN.view.default, b.mm("left", x, w), [2, 4, 4])
    return b.call("result", ATEN.transpose.int, apart, 0, 2)


def _used_twice(b: Builder) -> fx.Node:
    x, w = b.placeholder("x", (8, 6)), b.placeholder("w", (6, 4))
    left = b.mm("left", x, w)
    return b.call("result", ATEN.mul.Tensor, b.relu("relu", left), left)


UP: dict[str, Build] = {
    build.__name__.lstrip("_"): build for build in (_sum_of_products, _product_as_view, _used_twice)
}


@pytest.mark.parametrize("name", UP)
def test_chunks_of_a_result_are_computed_from_chunks_of_matmuls(name: str) -> None:
    chains = Chains(UP[name])
    result, (output,) = chains.nodes["result"], chains.graph.find_nodes(op="output")
    num_cuts = 0
    for cut in all_cuts(tuple(chains.values["result"].shape)):
        chain = upstream(output, result, cut, chains.shapes, chains.order)
        if not chain.matmuls:
            assert chain.cuts == {}
            continue
        num_cuts += 1
        assert {n.name for n in chain.matmuls} <= {"left", "right"}
        for c in range(cut.count):
            chunker = chains.chunker(c)

            def write(nodes: dict[str, fx.Node], chunker: Chunker = chunker, chain: Upstream = chain) -> fx.Node:
                return chunker.up(nodes["result"], mapped(chain.cuts, nodes))

            assert torch.equal(chains.chunk_of(chunker, write), chunk(chains.values["result"], cut, c)), f"{cut} {c}"
    assert num_cuts


def test_a_chunk_is_written_once_however_often_it_is_read() -> None:
    chains = Chains(_used_twice)
    result, (output,) = chains.nodes["result"], chains.graph.find_nodes(op="output")
    chain = upstream(output, result, Cut(0, 1, 2), chains.shapes, chains.order)
    chunker = chains.chunker(1)
    graph = chunker.write.graph
    nodes = {node.name: node for node in graph.nodes}
    before = len(graph.nodes)
    chunker.up(nodes["result"], mapped(chain.cuts, nodes))
    assert len(graph.nodes) - before == 4  # a chunk of x, the product, the relu, the product of both
    assert chunker.take(nodes["x"], Cut(0, 1, 2)) is chunker.take(nodes["x"], Cut(0, 1, 2))
    assert chunker.take(nodes["x"], None) is nodes["x"]
    assert chunker.take(nodes["x"], Cut(1, 1, 2)).args == (nodes["x"], 1, 1, 2, 1)


# where chains end


def up(build: Build, cut: Cut, *, is_other_phase: str = "") -> tuple[list[str], Upstream]:
    chains = Chains(build)
    if is_other_phase:
        chains.nodes[is_other_phase].meta["origin"] = Origin("update")
    start = chains.nodes.get("start") or chains.nodes["output"]
    chain = upstream(start, chains.nodes["result"], cut, chains.shapes, chains.order)
    return chains.named(chain.cuts), chain


def test_a_part_without_a_matmul_is_computed_whole_and_then_cut() -> None:
    def build(b: Builder) -> fx.Node:
        x, w, y = b.placeholder("x", (8, 6)), b.placeholder("w", (6, 4)), b.placeholder("y", (8, 4))
        return b.add("result", b.mm("left", x, w), b.relu("relu", y))

    names, _ = up(build, Cut(0, 1, 2))
    assert names == ["result", "left"]
    names, chain = up(build, Cut(0, 1, 2), is_other_phase="left")
    assert (names, chain.matmuls) == ([], [])


def test_a_value_that_is_cut_in_two_ways_is_not_followed() -> None:
    def build(b: Builder) -> fx.Node:
        product = b.mm("left", b.placeholder("x", (4, 6)), b.placeholder("w", (6, 4)))
        return b.add("result", product, b.call("turned", ATEN.t.default, product))

    names, chain = up(build, Cut(0, 1, 2))
    assert (names, chain.why) == ([], ["left is cut in two ways"])


def test_values_with_earlier_readers_stay_whole_and_later_readers_get_them_joined() -> None:
    def build(b: Builder) -> fx.Node:
        product = b.mm("left", b.placeholder("x", (4, 6)), b.placeholder("w", (6, 4)))
        result = b.relu("result", product)
        if is_early:
            b.call("early", ATEN.exp.default, product)
        start = b.call("start", ATEN.neg.default, result)
        return start if is_early else b.add("late", start, product)

    is_early = True
    names, chain = up(build, Cut(0, 1, 2))
    assert (names, chain.why) == ([], ["left is used by others before"])
    is_early = False
    names, chain = up(build, Cut(0, 1, 2))
    assert names == ["result", "left"]
    assert [n.name for n in chain.read_outside] == ["left"]


def test_an_operand_that_does_not_divide_ends_the_chain() -> None:
    def build(b: Builder) -> fx.Node:
        product = b.mm("left", b.placeholder("x", (4, 6)), b.placeholder("w", (6, 4)))
        return b.call("result", ATEN.cumsum.default, product, 0)

    names, chain = up(build, Cut(0, 1, 2))
    assert (names, chain.why) == ([], ["result cannot run chunk by chunk"])
    names, chain = up(_used_twice, Cut(0, 1, 3))
    assert (names, chain.why) == ([], ["3 chunks do not divide result [8, 4]"])


def test_dims_that_differ_between_devices_are_not_cut() -> None:
    chains = Chains(_squeezed)
    flat, x = chains.nodes["flat"], chains.nodes["x"]
    assert chains.shapes.fits(flat, Cut(0, 1, 2))
    chains.shapes.uneven = {flat: frozenset({1}), x: frozenset({2})}
    assert chains.shapes.fits(x, Cut(0, 1, 2))
    assert not chains.shapes.fits(x, Cut(2, 1, 2))
    assert not chains.shapes.fits(flat, Cut(0, 1, 2))  # a chunk's shape would be in numbers
    other = chains.nodes["wide"]
    chains.shapes.take_over(other, chains.shapes.values[flat], flat)
    assert chains.shapes.of(other) == (4, 6)
    assert chains.shapes.uneven[other] == frozenset({1})
    chains.shapes.take_over(chains.nodes["w"], chains.shapes.values[flat], other)
    chains.shapes.take_over(chains.nodes["narrow"], chains.shapes.values[flat], chains.nodes["product"])
    assert chains.nodes["narrow"] not in chains.shapes.uneven


def test_several_tensors_and_unknown_values_have_no_shape() -> None:
    chains = Chains(_activation)
    with pytest.raises(NoCut, match="it is several tensors, or unknown"):
        chains.shapes.of(fx.Graph().placeholder("unknown"))
    chains.shapes.values[chains.nodes["x"]] *= 2
    with pytest.raises(NoCut, match="it is several tensors, or unknown"):
        chains.shapes.of(chains.nodes["x"])


def test_ops_with_sizes_of_the_device_are_not_cut() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    index = graph.call_function(ring_index, (0, 1, ("d",)))
    relu, view = graph.call_function(ATEN.relu.default, (x,)), graph.call_function(ATEN.view.default, (x, [index]))
    why: list[str] = []
    assert cuttable(relu, why) is not None
    assert why == []
    assert cuttable(view, why) is None
    relu.meta[FIXED] = "is read by a hook"
    assert cuttable(relu, why) is None
    assert cuttable(graph.output(relu), why) is None
    assert why == [f"{view.name} has sizes that differ between devices", f"{relu.name} is read by a hook"]


def test_late_operands_end_a_path_but_not_a_product() -> None:
    """The caller decides about the operands of matmuls."""
    chains = Chains(_activation)
    x = chains.nodes["x"]
    chain = downstream(x, Cut(0, 1, 2), chains.shapes, lambda node: node.name == "bias")
    assert (chain.consumers, chains.named(chain.cuts)) == ({}, ["x"])
    assert chain.why == ["bias, an operand of added, is computed later"]
    chain = downstream(x, Cut(0, 1, 2), chains.shapes, lambda node: node.name == "w")
    assert chains.named(chain.consumers) == ["product"]
    chains.nodes["relu"].meta["origin"] = Origin("backward")
    assert not downstream(x, Cut(0, 1, 2), chains.shapes, lambda node: False).consumers


def test_readers_outside_of_a_path_get_the_value_before_its_views() -> None:
    def build(b: Builder) -> fx.Node:
        x, w = b.placeholder("x", (8, 6)), b.placeholder("w", (6, 4))
        seen = b.call("seen", ATEN.view.default, b.relu("relu", x), [8, 6])
        product = b.mm("product", b.call("exp", ATEN.exp.default, seen), w)
        return b.add("out", product, b.call("total", ATEN.sum.default, seen))

    chains = Chains(build)
    chain = downstream(chains.nodes["x"], Cut(0, 1, 2), chains.shapes, lambda node: False)
    assert chains.named(chain.cuts) == ["x", "relu", "seen", "exp"]
    assert chains.named(read_outside(chain)) == ["relu"]


def test_a_chunk_of_a_value_is_contiguous() -> None:
    x = Value((4, 6), (1, 4), torch.float16, 0, 48)
    assert part_of(x, None) == x
    part = part_of(x, Cut(1, 1, 3))
    assert (part.shape, part.stride, part.storage_bytes) == ((4, 2), (2, 1), 16)
    wide = reshape(x, (2, 3, 5))
    assert (wide.stride, wide.storage_bytes, wide.dtype) == ((15, 5, 1), 60, torch.float16)
