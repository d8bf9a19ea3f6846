"""All-to-alls taken apart by peer: what stands between one and the one that takes it back (an expert's matmuls) is
computed for the chunk of one device while that of the next is on its way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from meshweave.chunks.chains import Chunker, Downstream, Shapes, Upstream, cuttable
from meshweave.chunks.cut import Cut, NoCut, kind_of, operands_of
from meshweave.chunks.writer import ChunkWriter, Number, Ring
from meshweave.ir import local_ops
from meshweave.ir.collectives import ALL_TO_ALL, permute
from meshweave.ir.graph import origin_of
from meshweave.rings.emit import blocks_of, write_exchange
from meshweave.rings.find import earlier, needed
from meshweave.rings.rewrite import Products, RingWay, erase_unused, finish, inherit, wait_of


@dataclass(slots=True)
class Region:
    """What is made of the chunks that an all-to-all brings, up to `back`, the start of the one that takes them back.

    `cuts` has the cut of every value on the way, the arrived one first; `kept` are those that others read, too.
    """

    cuts: dict[fx.Node, Cut]
    back: fx.Node
    kept: list[fx.Node] = field(default_factory=list)

    @property
    def matmuls(self) -> list[fx.Node]:
        return [node for node in self.cuts if (kind := kind_of(node)) is not None and kind.is_matmul]


def is_even(start: fx.Node) -> bool:
    """Whether all blocks of an all-to-all are of one size."""
    received, sent = start.args[1:3]
    return received == sent and len(set(received)) == 1  # type: ignore[arg-type]


def exchanged(
    start: fx.Node, ring: Ring, shapes: Shapes, order: Mapping[fx.Node, int], why: list[str]
) -> Region | None:
    """The region behind an all-to-all; None, with a reason in `why`, where there is none with a matmul in it."""
    wait, block = wait_of(start), Cut(0, 1, ring.size)
    cuts, found = {wait: block}, list[fx.Node]()
    for node in sorted(order, key=order.__getitem__)[order[wait] + 1 :]:
        if origin_of(node).phase != origin_of(wait).phase or not any(n in cuts for n in operands_of(node)):
            continue
        if node.target is ALL_TO_ALL.op and node.args[3] == start.args[3] and is_even(node):
            found += [node] if cuts[operands_of(node)[0]] == block else []
        elif cut := _followed(node, cuts, shapes, why):
            cuts[node] = cut
    for back in found:
        region = Region(needed(Downstream(cuts), wait, [back]), back)
        late = [n for node in region.cuts if node is not wait for n in operands_of(node) if n not in region.cuts]
        late = [n for n in late if earlier(n, wait, order) is None]
        if late:
            why.append(f"{late[0].name} is made later")
        elif region.matmuls:
            inside = {*region.cuts, back}
            region.kept = [node for node in region.cuts if any(user not in inside for user in node.users)]
            return region
    return None


def _followed(node: fx.Node, cuts: Mapping[fx.Node, Cut], shapes: Shapes, why: list[str]) -> Cut | None:
    """The cut of what is made of chunks; None where chunks do not give chunks."""
    kind = cuttable(node, [])
    if kind is None:
        return None
    operands = operands_of(node)
    at = next(i for i, n in enumerate(operands) if n in cuts)
    try:
        op = shapes.op(node)
        made = kind.forward(op, at, cuts[operands[at]])
        if made == "sum" or not shapes.fits(node, made):
            return None
        taken = kind.backward(op, made)
    except NoCut as error:
        why.append(f"{node.name}: {error}")
        return None
    return made if all(cuts.get(n, cut) == cut for n, cut in zip(operands, taken, strict=True)) else None


def rewrite_exchange(
    write: ChunkWriter, start: fx.Node, found: Region, ring: Ring, way: RingWay, shapes: Shapes
) -> None:
    """Chunks of a device are sent back to it as soon as they are computed. Values that others read are put together."""
    assert way.row is not None
    wait, last = wait_of(start), wait_of(found.back)
    (piece,), (operand,) = operands_of(start), operands_of(found.back)
    write.follow(start, wait)
    parts: dict[fx.Node, list[fx.Node]] = {node: [] for node in found.kept}
    numbers, results, sent = list[Number](), list[fx.Node](), iter(way.row.steps(ring.size))

    def consume(number: Number, chunk: fx.Node) -> None:
        chunker, step = Chunker(write, shapes, number, {wait: chunk}), next(sent)
        numbers.append(number)
        made = chunker.through(operand, found.cuts)
        for node, those in parts.items():
            those.append(chunker.through(node, found.cuts))
        back = -step.shift % ring.size
        results.append(write.call(permute, write.contiguous(made), back, ring.group) if back else made)

    write_exchange(write, way.row, ring, blocks_of(write, piece, ring), consume, start)
    for node, those in parts.items():
        cut = found.cuts[node]
        inherit(write.call(local_ops.join_chunks, those, list(numbers), cut.dim, cut.outer), node, shapes)
    write.follow(found.back, last)
    steps = way.row.steps(ring.size)
    whole = [write.wait(one) if step.shift else one for one, step in zip(results, steps, strict=True)]
    sources = [write.index(ring, step.sends) for step in steps]
    inherit(write.call(local_ops.join_chunks, whole, sources, 0, 1), last, shapes)
    erase_unused(write.graph, [last, *found.kept])


def rewrite_deal(write: ChunkWriter, start: fx.Node, found: Upstream, ring: Ring, way: RingWay, shapes: Shapes) -> None:
    """What matmuls make for each device is sent as soon as it is made, the own chunk last."""
    assert way.row is not None
    wait, (operand,) = wait_of(start), operands_of(start)
    write.follow(start, start)
    produce = Products(write, shapes, found, operand)
    first, *others = way.row.steps(ring.size)
    sent = []
    for step in others:
        made = write.contiguous(produce(write.index(ring, step.sends)))
        sent.append(write.call(permute, made, step.shift, ring.group))
    parts, numbers = [produce(write.index(ring, first.sends))], [write.index(ring, first.chunk)]
    write.place = wait
    for step, one in zip(others, sent, strict=True):
        parts.append(write.wait(one))
        numbers.append(write.index(ring, step.chunk))
    made = write.call(local_ops.join_chunks, parts, numbers, 0, 1)
    finish(write, made, start, produce)
