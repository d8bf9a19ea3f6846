"""Writes into an existing rank graph: nodes at a place, symbols at the top, groups by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from meshweave.ir.collectives import STARTS, WAIT
from meshweave.ir.device_program import DeviceProgram
from meshweave.ir.rank import ring_index

aten = torch.ops.aten
RingKind = Literal["gather", "sum", "attention"]
Number = Any  # an int, or the fx.Node of a symbolic one
KEPT = (  # the meta of a node that also applies to its chunks
    *("origin", "stack_trace", "nn_module_stack", "original_aten", "source_fn_stack", "from_node", "seq_nr"),
    *("partitioner_tag", "recompute", "ac_graph_id"),
)


@dataclass(frozen=True, slots=True)
class Index:
    """Number (sign * r + shift) mod n."""

    sign: int
    shift: int

    def at(self, r: int, n: int) -> int:
        return (self.sign * r + self.shift) % n


@dataclass(frozen=True, slots=True)
class Ring:
    """The group of a collective: its name, and the sizes of its axes."""

    group: str
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        return torch.Size(self.sizes).numel()


def ring_of(program: DeviceProgram, start: fx.Node) -> Ring:
    """The group of a start."""
    mesh, axes = program.group_of(start)
    return Ring(str(start.args[-1]), tuple(map(mesh.size, axes)))


@dataclass(frozen=True, slots=True)
class Mark:
    """Which ring a node belongs to (`meta["ring"]`): its number in the graph, its group, and its function: "gather" the
    devices' values, "sum" them, or "attend" to each."""

    number: int
    ring: Ring
    kind: RingKind


def kept_meta(node: fx.Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in KEPT if key in node.meta}


@dataclass(slots=True)
class ChunkWriter:
    """Writes nodes before `place`, with the meta of the nodes that they replace, as far as it applies to chunks."""

    graph: fx.Graph
    place: fx.Node
    meta: dict[str, Any] = field(default_factory=dict)
    move: str = ""
    mark: Mark | None = None
    symbols: dict[Any, fx.Node] = field(default_factory=dict)

    def begin(self, ring: Ring, kind: RingKind) -> None:
        """Mark the nodes written from now on as a ring."""
        if self.mark is None:
            number = max((node.meta["ring"].number + 1 for node in self.graph.nodes if "ring" in node.meta), default=0)
        else:
            number = self.mark.number + 1
        self.mark = Mark(number, ring, kind)

    @contextmanager
    def at(self, place: fx.Node) -> Iterator[None]:
        """Write before another node meanwhile."""
        self.place, before = place, self.place
        try:
            yield
        finally:
            self.place = before

    def follow(self, node: fx.Node, place: fx.Node) -> None:
        """From now on write, before `place`, replacements of `node`."""
        self.place, self.meta, self.move = place, kept_meta(node), node.meta.get("move", "")

    def call(
        self, target: Any, *args: Any, like: fx.Node | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """A node before the place; its origin is that of `like`, if not None."""
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(target, args, dict(kwargs or {}))
        node.meta |= self.meta if like is None else kept_meta(like)
        if target in STARTS and self.move:
            node.meta["move"] = self.move
        if self.mark is not None:
            node.meta["ring"] = self.mark
        return node

    def wait(self, started: fx.Node) -> fx.Node:
        return self.call(WAIT, started)

    def contiguous(self, x: fx.Node) -> fx.Node:
        """x contiguous, as an operand of a communication; results of communications are contiguous already."""
        return x if x.target in (aten.contiguous.default, WAIT) else self.call(aten.contiguous.default, x)

    def cast(self, x: fx.Node, before: torch.dtype, after: torch.dtype) -> fx.Node:
        return x if before == after else self.call(aten._to_copy.default, x, kwargs={"dtype": after})

    def index(self, ring: Ring, index: Index) -> Number:
        """An index of a device or chunk: a number if all devices have the same, else a symbol, created once."""
        shift = index.shift % ring.size
        if not index.sign or ring.size == 1:
            return shift
        key = (ring, index.sign, shift)
        if key not in self.symbols:
            first = next(n for n in self.graph.nodes if n.op != "placeholder")
            args = (tuple(ring.group.split(",")), ring.sizes, index.sign, shift)
            with self.graph.inserting_before(first):
                self.symbols[key] = self.graph.call_function(ring_index, args)
        return self.symbols[key]
