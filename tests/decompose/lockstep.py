"""Graphs on all devices of a single group at once, node by node, with PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from meshweave.ir.collectives import WAIT, functional, permute
from meshweave.ir.rank import ring_index

Parts = Sequence[Tensor]


def _permuted(parts: Parts, to: int, group: str) -> list[Tensor]:
    return [parts[(r - to) % len(parts)] for r in range(len(parts))]


def _scattered(parts: Parts, op: str, size: int, group: str) -> list[Tensor]:
    return list(_reduced(parts, op, group)[0].chunk(size))


def _reduced(parts: Parts, op: str, group: str) -> list[Tensor]:
    total = torch.stack(list(parts)).amax(0) if op == "max" else torch.stack(list(parts)).sum(0)
    return [total] * len(parts)


def _exchanged(parts: Parts, received: Sequence[int], sent: Sequence[int], group: str) -> list[Tensor]:
    return [torch.cat([part.split(list(sent))[r] for part in parts]) for r in range(len(parts))]


_EXCHANGES: Mapping[Any, Callable[..., list[Tensor]]] = {
    permute: _permuted,
    functional.all_gather_into_tensor.default: lambda parts, size, group: [torch.cat(list(parts))] * size,
    functional.reduce_scatter_tensor.default: _scattered,
    functional.all_reduce.default: _reduced,
    functional.all_to_all_single.default: _exchanged,
}


def on_devices(graph: fx.Graph, inputs: Sequence[Mapping[str, Tensor]]) -> dict[fx.Node, list[Any]]:
    """The value of every node on every device, from the inputs of each by name."""
    env: dict[fx.Node, list[Any]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = [given[node.name] for given in inputs]
        elif node.target is ring_index:
            _, sizes, sign, shift = node.args
            assert torch.Size(sizes).numel() == len(inputs)
            env[node] = [(sign * r + shift) % len(inputs) for r in range(len(inputs))]
        elif node.target is WAIT:
            env[node] = env[node.args[0]]
        elif node.target in _EXCHANGES:
            env[node] = _EXCHANGES[node.target](env[node.args[0]], *node.args[1:])
        else:
            env[node] = [_computed(node, {n: env[n][r] for n in node.all_input_nodes}) for r in range(len(inputs))]
    return env


def _computed(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    return args[0] if node.op == "output" else node.target(*args, **kwargs)  # type: ignore[operator]


def results(graph: fx.Graph, inputs: Sequence[Mapping[str, Tensor]]) -> list[Any]:
    """What the graph returns on every device."""
    (output,) = graph.find_nodes(op="output")
    return on_devices(graph, inputs)[output]
