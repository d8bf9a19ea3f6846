"""Writes algorithms into a rank graph, with the computation on their chunks between the messages.

At most `ahead` messages of an algorithm are in flight while a chunk is computed: the message of the next step is
started before the step's computation, so that the two overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx

from meshweave.ir import local_ops
from meshweave.ir.collectives import permute
from meshweave.optimize.decompose.algorithms import Algorithm, RingStep
from meshweave.optimize.decompose.writer import ChunkWriter, Index, Number, Ring

aten = torch.ops.aten
Produce = Callable[[Number], fx.Node]  # the index of a chunk -> the chunk, computed here
Consume = Callable[[Number, fx.Node], None]  # the index of a chunk, and the received chunk


@dataclass(slots=True)
class _Emission:
    write: ChunkWriter
    row: Algorithm
    ring: Ring
    steps: tuple[RingStep, ...] = ()
    started: dict[int, fx.Node] = field(default_factory=dict)  # by step, its message in flight
    chunks: dict[int, fx.Node] = field(default_factory=dict)  # by step, the received or own chunk

    def __post_init__(self) -> None:
        self.steps = self.row.steps(self.ring.size)

    def number(self, step: RingStep) -> Number:
        return self.write.index(self.ring, step.chunk)

    def send(self, k: int, x: fx.Node) -> None:
        """Start the message of step k."""
        step, ring = self.steps[k], self.ring
        x = self.write.contiguous(x)
        self.started[k] = self.write.call(permute, x, step.shift % ring.size, ring.group)

    def received(self, k: int) -> fx.Node:
        """The received chunk of step k."""
        return self.write.wait(self.started.pop(k))


def write_gather(
    write: ChunkWriter, row: Algorithm, ring: Ring, piece: fx.Node, consume: Consume, early: fx.Node | None = None
) -> None:
    """An all-gather of every device's `piece`: `consume(number, chunk)` is called for every chunk, in the order of the
    steps. The first messages are started before `early`, if not None."""
    done = _Emission(write, row, ring)
    posted = int(not done.steps[0].has_message)

    def post(until: int, last: int) -> None:
        """Start the messages of the steps before `until` whose chunks have been received up to step `last`."""
        nonlocal posted
        while posted < min(until, len(done.steps)) and done.steps[posted].of <= last:
            step = done.steps[posted]
            done.send(posted, done.chunks[step.of] if step.of else piece)
            posted += 1

    with write.at(early or write.place):
        piece = write.contiguous(piece)
        post(row.ahead + posted, 0)
    for k, step in enumerate(done.steps):
        done.chunks[k] = done.received(k) if step.has_message else piece
        post(k + 1 + row.ahead, k)
        consume(done.number(step), done.chunks[k])


def write_reduce(
    write: ChunkWriter,
    row: Algorithm,
    ring: Ring,
    produce: Produce,
    dtype: torch.dtype,
    wide: torch.dtype,
    late: fx.Node | None = None,
) -> fx.Node:
    """A reduce-scatter (sum) of the parts `produce(number)` of each chunk, in `dtype`; returns the own chunk.

    Sums are accumulated in `wide`. A message to which the receiver adds is sent in `wide`, a message to the owner of
    its chunk in `dtype`. Nodes after the last part come before `late`, if not None."""
    done = _Emission(write, row, ring)
    last = len(done.steps) - 1
    is_chain = row.is_chain(ring.size)
    for k, step in enumerate(done.steps):
        part = produce(done.number(step))
        write.place = late if late is not None and k == last else write.place
        if is_chain:
            part = write.cast(part, dtype, wide)
            for earlier in step.adds:
                part = write.call(aten.add.Tensor, part, done.received(earlier))
        elif step.adds:
            part = _summed(done, step, part, wide)
        if k < last:
            done.send(k, part)
    return write.cast(part, wide, dtype) if is_chain else part


def _summed(done: _Emission, step: RingStep, own: fx.Node, wide: torch.dtype) -> fx.Node:
    """This device's part and the received parts, added up in group order."""
    parts, numbers = [own], [done.number(step)]
    for earlier in step.adds:
        numbers.append(done.write.index(done.ring, Index(1, -done.steps[earlier].shift)))
        parts.append(done.received(earlier))
    return done.write.call(local_ops.sum_parts, parts, numbers, wide)
