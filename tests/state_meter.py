"""Measures the memory of parameters, gradients and optimizer state on each device while a step runs, byte by byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from meshweave.ir.graph import origin_of
from meshweave.ir.rank import RankGraph, distinct_operands
from meshweave.runtime.state import State

KINDS = ("param", "grad", "state")


class StateMeter:
    """A Meter: `peak[i]` is the most bytes of parameters, gradients and optimizer state that were live on local device
    i at once.

    A storage is counted once per device however many views of it there are; a view counts its whole storage.
    """

    def __init__(self, ranks: Sequence[RankGraph]) -> None:
        """`ranks[i]` is the rank graph of local device i."""
        kinds = {id(rank): classify(rank) for rank in ranks}
        self.kinds = [kinds[id(rank)] for rank in ranks]
        self.live: list[Counter[int]] = [Counter() for _ in ranks]
        self.bytes = [0] * len(ranks)
        self.peak = [0] * len(ranks)
        self._storages: list[dict[fx.Node, tuple[int, int]]] = [{} for _ in ranks]
        self._inputs = [dict(zip(((i.kind, i.name) for i in r.inputs), r.graph.nodes, strict=False)) for r in ranks]

    def begin(self, state: State) -> None:
        """Count the state at the beginning of a step."""
        for i, storages in enumerate(self._storages):
            for node in list(storages):
                self.freed(i, node)
        for item, layout in state.items:
            if item.kind in KINDS:
                pieces = state.pieces[item.kind, item.name]
                for device, piece in zip(state.holders(layout), pieces, strict=True):
                    i = state.devices.index(device)
                    self.on_value(i, self._inputs[i][item.kind, item.name], piece)

    def on_value(self, index: int, node: fx.Node, value: Any) -> None:
        if node not in self.kinds[index] or not isinstance(value, Tensor):
            return
        pointer, size = self._storages[index][node] = _storage(value)
        self.bytes[index] += size if not self.live[index][pointer] else 0
        self.live[index][pointer] += 1
        self.peak[index] = max(self.peak[index], self.bytes[index])

    def freed(self, index: int, node: fx.Node) -> None:
        if node in self._storages[index]:
            pointer, size = self._storages[index].pop(node)
            self.live[index][pointer] -= 1
            self.bytes[index] -= size if not self.live[index][pointer] else 0


def _storage(x: Tensor) -> tuple[int, int]:
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def classify(graph: RankGraph) -> dict[fx.Node, str]:
    """Node -> param (a parameter, or values computed from parameters only: casts, gathers, views), grad (a gradient
    from the op that computes it until its use) or state. Other nodes are activations and are omitted."""
    kinds: dict[fx.Node, str] = {}
    for node, item in graph.sources.items():
        kind = "grad" if item.kind == "acc" else item.kind
        if kind in KINDS:
            kinds[node] = kind
    for node in graph.graph.nodes:
        tensors = distinct_operands(node)
        computed = node.op == "call_function" and tensors and origin_of(node).phase != "update"
        if computed and all(kinds.get(n) == "param" for n in tensors):
            kinds[node] = "param"
    for (kind, _), node in graph.results.items():
        if kind == "grad":
            kinds.update((n, "grad") for n in _upstream(node) if n not in kinds)
        elif kind in ("param", "state"):
            kinds[node] = kind
    return kinds


def _upstream(node: fx.Node) -> Iterator[fx.Node]:
    """The node and its ancestors through ops of a single operand, down to the op that computed it."""
    yield node
    while len(distinct_operands(node)) == 1 and node.op == "call_function":
        (node,) = distinct_operands(node)
        yield node
