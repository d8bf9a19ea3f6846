"""Measures what devices hold while a step runs: parameters, gradients and optimizer state, byte by byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx

from meshweave.ir.graph import origin_of
from meshweave.ir.rank import SYMBOLS, RankGraph

KINDS = ("param", "grad", "state")


def classify(graph: RankGraph) -> dict[fx.Node, str]:
    """Node -> param (a parameter, or what only parameters went into: casts, gathers, views), grad (a gradient from the
    op that makes it until it is used) or state. Other nodes are activations and are left out."""
    kinds: dict[fx.Node, str] = {}
    sources = [n for n in graph.graph.nodes if n.op == "placeholder"]
    for node, item in zip(sources, graph.inputs, strict=True):
        kind = "grad" if item.kind == "acc" else item.kind
        if kind in KINDS:
            kinds[node] = kind
    for node in graph.graph.nodes:
        tensors = _tensor_operands(node)
        computed = node.op == "call_function" and tensors and origin_of(node).phase != "update"
        if computed and all(kinds.get(n) == "param" for n in tensors):
            kinds[node] = "param"
    results = list(next(iter(reversed(graph.graph.nodes))).args[0])
    for (kind, _), node in zip(graph.outputs, results, strict=True):
        if kind == "grad":
            kinds.update((n, "grad") for n in _upstream(node) if n not in kinds)
        elif kind in ("param", "state"):
            kinds[node] = kind
    return kinds


def _tensor_operands(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if n.target not in SYMBOLS]


def _upstream(node: fx.Node) -> Iterator[fx.Node]:
    """The node and those it comes from through ops of one operand, down to the op that computed it."""
    yield node
    while len(_tensor_operands(node)) == 1 and node.op == "call_function":
        (node,) = _tensor_operands(node)
        yield node


class StateMeter:
    """A Meter: `peak[i]` is the most bytes of parameters, gradients and optimizer state that held device i had at once.

    A storage is counted once per device however many views there are of it; a view counts its whole storage.
    """

    def __init__(self, graph: RankGraph, num_devices: int) -> None:
        self.kinds = classify(graph)
        self.live: list[Counter[int]] = [Counter() for _ in range(num_devices)]
        self.bytes = [0] * num_devices
        self.peak = [0] * num_devices
        self._storages: dict[fx.Node, list[list[tuple[int, int]]]] = {}
        self._inputs = dict(zip(((i.kind, i.name) for i in graph.inputs), graph.graph.nodes, strict=False))

    def begin(self, pieces: Mapping[tuple[str, str], list[Tensor]]) -> None:
        """Count the state that a step begins with."""
        for node in list(self._storages):
            self.freed(node)
        for key, values in pieces.items():
            if key[0] in KINDS:
                self.made(self._inputs[key], values)

    def made(self, node: fx.Node, values: list[Any]) -> None:
        if node not in self.kinds:
            return
        self._storages[node] = [[_storage(v)] if isinstance(v, Tensor) else [] for v in values]
        for i, storages in enumerate(self._storages[node]):
            for pointer, size in storages:
                self.bytes[i] += size if not self.live[i][pointer] else 0
                self.live[i][pointer] += 1
            self.peak[i] = max(self.peak[i], self.bytes[i])

    def freed(self, node: fx.Node) -> None:
        for i, storages in enumerate(self._storages.pop(node, ())):
            for pointer, size in storages:
                self.live[i][pointer] -= 1
                self.bytes[i] -= size if not self.live[i][pointer] else 0


def _storage(x: Tensor) -> tuple[int, int]:
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
