"""Bytes that a device holds at most while it runs a rank graph in its order: no clock and no profile, only liveness."""

from __future__ import annotations

from torch import fx

from meshweave.ir.collectives import STARTS
from meshweave.ir.rank import SYMBOLS, RankGraph
from meshweave.ir.values import Value, local_values

_REPLACED = ("param", "state", "acc", "carry")  # kinds of inputs that an output of their name takes the place of


def peak_bytes(role: RankGraph, keeps_gradients: bool = False) -> int:
    """The most that the first device of a role holds in the last microbatch of a step, which holds the most.

    Every storage lives from the op that makes it to its last use, as in `runtime.executor`; operands of communications
    live until these have been waited for.
    """
    values = local_values(role).values
    nodes = [n for n in role.graph.nodes if n.op == "call_function" and n.target not in SYMBOLS]
    last: dict[int, fx.Node | None] = {}
    sizes: dict[int, int] = {}
    sources = (n for n in role.graph.nodes if n.op == "placeholder")
    replaced = {key for key in role.outputs if key[0] in _REPLACED}
    for node, item in zip(sources, role.inputs, strict=True):
        for x in values[node]:
            sizes[x.storage] = x.storage_bytes
            last[x.storage] = nodes[0] if nodes and (item.kind, item.name) in replaced else None
    for node in nodes:
        for x in _used(node, values):
            if last.get(x.storage, node) is not None:
                last[x.storage] = node
    for (kind, _), node in zip(role.outputs, next(iter(reversed(role.graph.nodes))).args[0], strict=True):  # type: ignore[arg-type]
        if kind != "acc" and (kind != "grad" or keeps_gradients):
            last.update((x.storage, None) for x in values[node])  # type: ignore[index]
    return _peak(nodes, values, sizes, last)


def _used(node: fx.Node, values: dict[fx.Node, tuple[Value, ...]]) -> list[Value]:
    """What a node reads and makes; a wait also the operand of what it waits for."""
    inputs = list(node.all_input_nodes)
    inputs += [n for start in inputs if start.target in STARTS for n in start.all_input_nodes]
    return [x for n in (node, *inputs) for x in values[n]]


def _peak(
    nodes: list[fx.Node],
    values: dict[fx.Node, tuple[Value, ...]],
    sizes: dict[int, int],
    last: dict[int, fx.Node | None],
) -> int:
    ends: dict[fx.Node, list[int]] = {}
    for storage, node in last.items():
        if node is not None:
            ends.setdefault(node, []).append(storage)
    held = peak = sum(sizes.values())
    for node in nodes:
        for x in values[node]:
            if x.storage not in sizes:
                sizes[x.storage] = x.storage_bytes
                held += x.storage_bytes
        peak = max(peak, held)
        held -= sum(sizes[storage] for storage in ends.get(node, ()))
    return peak
