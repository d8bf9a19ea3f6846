"""All-to-alls decomposed by peer: the region between an all-to-all and its inverse (an expert's matmuls) is computed
for the chunk of a device while that of the next is in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from meshweave.ir import local_ops
from meshweave.ir.collectives import ALL_TO_ALL, permute
from meshweave.ir.graph import erase_unused, origin_of
from meshweave.ir.rank import operands_of
from meshweave.optimize.decompose.chains import Chunker, Downstream, Shapes, Upstream, cuttable
from meshweave.optimize.decompose.cut import Cut, NoCut, kind_of
from meshweave.optimize.decompose.emit import blocks_of, write_exchange
from meshweave.optimize.decompose.find import cuts_to, earlier
from meshweave.optimize.decompose.rewrite import Products, RingScheme, finish, inherit, wait_of
from meshweave.optimize.decompose.writer import ChunkWriter, Number, Ring


@dataclass(slots=True)
class ExchangeRegion:
    """What is computed from the chunks of an all-to-all, up to `back`, the start of the inverse all-to-all. `cuts` has
    the cut of every value on the path, the received value first; `kept` are those with other readers."""

    cuts: dict[fx.Node, Cut]
    back: fx.Node
    read_outside: list[fx.Node] = field(default_factory=list)

    @property
    def matmuls(self) -> list[fx.Node]:
        return [node for node in self.cuts if (kind := kind_of(node)) is not None and kind.is_matmul]


def is_even(start: fx.Node) -> bool:
    """Whether all blocks of an all-to-all have the same size."""
    received, sent = start.args[1:3]
    return received == sent and len(set(received)) == 1  # type: ignore[arg-type]


def region_after(
    start: fx.Node, ring: Ring, shapes: Shapes, order: Mapping[fx.Node, int], why: list[str]
) -> ExchangeRegion | None:
    """The region after an all-to-all; None, with a reason in `why`, if there is none with a matmul in it."""
    wait, block = wait_of(start), Cut(0, 1, ring.size)
    cuts, returns = {wait: block}, list[fx.Node]()
    for node in sorted(order, key=order.__getitem__)[order[wait] + 1 :]:
        if origin_of(node).phase != origin_of(wait).phase or not any(n in cuts for n in operands_of(node)):
            continue
        if node.target is ALL_TO_ALL.op and node.args[3] == start.args[3] and is_even(node):
            returns += [node] if cuts[operands_of(node)[0]] == block else []
        elif cut := _follow(node, cuts, shapes, why):
            cuts[node] = cut
    for back in returns:
        region = ExchangeRegion(cuts_to(Downstream(cuts), wait, [back]), back)
        late = [n for node in region.cuts if node is not wait for n in operands_of(node) if n not in region.cuts]
        late = [n for n in late if earlier(n, wait, order) is None]
        if late:
            why.append(f"{late[0].name} is computed later")
        elif region.matmuls:
            inside = {*region.cuts, back}
            region.read_outside = [node for node in region.cuts if any(user not in inside for user in node.users)]
            return region
    return None


def _follow(node: fx.Node, cuts: Mapping[fx.Node, Cut], shapes: Shapes, why: list[str]) -> Cut | None:
    """The cut of a value computed from chunks; None if chunks do not give chunks."""
    kind = cuttable(node, [])
    if kind is None:
        return None
    operands = operands_of(node)
    at = next(i for i, n in enumerate(operands) if n in cuts)
    try:
        op = shapes.op(node)
        result = kind.forward(op, at, cuts[operands[at]])
        if result == "sum" or not shapes.fits(node, result):
            return None
        wanted = kind.backward(op, result)
    except NoCut as error:
        why.append(f"{node.name}: {error}")
        return None
    return result if all(cuts.get(n, cut) == cut for n, cut in zip(operands, wanted, strict=True)) else None


def rewrite_exchange(
    write: ChunkWriter, start: fx.Node, region: ExchangeRegion, ring: Ring, scheme: RingScheme, shapes: Shapes
) -> None:
    """Chunks of a device are sent back to it as soon as they are computed. Values with other readers are
    concatenated."""
    assert scheme.row is not None
    wait, last = wait_of(start), wait_of(region.back)
    (piece,), (operand,) = operands_of(start), operands_of(region.back)
    write.follow(start, wait)
    parts: dict[fx.Node, list[fx.Node]] = {node: [] for node in region.read_outside}
    numbers, results, sent = list[Number](), list[fx.Node](), iter(scheme.row.steps(ring.size))

    def consume(number: Number, chunk: fx.Node) -> None:
        chunker, step = Chunker(write, shapes, number, {wait: chunk}), next(sent)
        numbers.append(number)
        result = chunker.through(operand, region.cuts)
        for node, pieces in parts.items():
            pieces.append(chunker.through(node, region.cuts))
        back = -step.shift % ring.size
        results.append(write.call(permute, write.contiguous(result), back, ring.group) if back else result)

    write_exchange(write, scheme.row, ring, blocks_of(write, piece, ring), consume, start)
    for node, pieces in parts.items():
        cut = region.cuts[node]
        inherit(write.call(local_ops.join_chunks, pieces, list(numbers), cut.dim, cut.outer), node, shapes)
    write.follow(region.back, last)
    steps = scheme.row.steps(ring.size)
    whole = [write.wait(begun) if step.shift else begun for begun, step in zip(results, steps, strict=True)]
    sources = [write.index(ring, step.sends) for step in steps]
    inherit(write.call(local_ops.join_chunks, whole, sources, 0, 1), last, shapes)
    erase_unused(write.graph, [last, *region.read_outside])


def rewrite_deal(
    write: ChunkWriter, start: fx.Node, chain: Upstream, ring: Ring, scheme: RingScheme, shapes: Shapes
) -> None:
    """The results of matmuls for each device are sent as soon as they are computed, this device's own chunk last."""
    assert scheme.row is not None
    wait, (operand,) = wait_of(start), operands_of(start)
    write.follow(start, start)
    produce = Products(write, shapes, chain, operand)
    first, *others = scheme.row.steps(ring.size)
    sent = []
    for step in others:
        product = write.contiguous(produce(write.index(ring, step.sends)))
        sent.append(write.call(permute, product, step.shift, ring.group))
    parts, numbers = [produce(write.index(ring, first.sends))], [write.index(ring, first.chunk)]
    write.place = wait
    for step, begun in zip(others, sent, strict=True):
        parts.append(write.wait(begun))
        numbers.append(write.index(ring, step.chunk))
    product = write.call(local_ops.join_chunks, parts, numbers, 0, 1)
    finish(write, product, start, produce)
