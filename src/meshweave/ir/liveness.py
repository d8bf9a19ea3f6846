"""Live ranges of storages, and the bytes that live at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from meshweave.ir.collectives import STARTS
from meshweave.ir.rank import SYMBOLS, RankGraph, prepared_values
from meshweave.ir.values import Value, local_values

# The moment at which a storage is allocated, the moment at which it is freed (the number of moments: never), and its
# bytes.
LiveRange = tuple[int, int, int]

REPLACED = ("param", "state", "acc")  # kinds of inputs that an output of the same name replaces


def replaced_inputs(role: RankGraph) -> set[fx.Node]:
    """The inputs that an output of the same name replaces: they die at their last use, all others live to the end."""
    replaced = {key for key in role.outputs if key[0] in REPLACED}
    return {node for node, item in role.sources.items() if (item.kind, item.name) in replaced}


def live_bytes(ranges: Iterable[LiveRange], num_moments: int) -> list[int]:
    """The live bytes at each of the moments 0 .. num_moments - 1."""
    changes = [0] * (num_moments + 1)
    for begin, end, num_bytes in ranges:
        changes[begin] += num_bytes
        changes[end] -= num_bytes
    return list(accumulate(changes[:-1]))


@dataclass(frozen=True, slots=True)
class RoleLiveness:
    """The storages of the first device of a role, in the last microbatch of a step, in which most of them live.

    Every storage lives from the op that allocates it to its last use, as in `runtime.executor`; operands of
    communications live until their wait. Moments count the ops of the graph, symbols left out.
    """

    values: Mapping[fx.Node, Sequence[Value]]
    ranges: Mapping[int, LiveRange]  # by storage
    num_moments: int

    def storage_of(self, node: fx.Node) -> int:
        """That of a node with one result."""
        (value,) = self.values[node]
        return value.storage

    def levels(self) -> list[int]:
        """The bytes that live at each moment."""
        return live_bytes(self.ranges.values(), self.num_moments)


def peak_bytes(role: RankGraph) -> int:
    """The most that the first device of a role holds at once (`RoleLiveness`)."""
    return max(role_liveness(role).levels())


def role_liveness(role: RankGraph) -> RoleLiveness:
    """When the storages of a role live, in the order of its graph."""
    values = local_values(role).values
    nodes = [n for n in role.graph.nodes if n.op == "call_function" and n.target not in SYMBOLS]
    begin, end, sizes = dict[int, int](), dict[int, int](), dict[int, int]()
    never = len(nodes) + 1
    replaced = replaced_inputs(role)
    for node in role.sources:
        for x in values[node]:
            begin[x.storage], sizes[x.storage] = 0, x.storage_bytes
            end[x.storage] = 1 if node in replaced else never
    for at, node in enumerate(nodes):
        for x in values[node]:
            begin.setdefault(x.storage, at)
            sizes.setdefault(x.storage, x.storage_bytes)
        for x in _storages_in_use(node, values):
            if end.get(x.storage, 0) < never:
                end[x.storage] = at + 1
    for node in prepared_values(role.graph):  # by the first microbatch
        begin.update((x.storage, 0) for x in values[node])
    for (kind, _), node in role.results.items():
        if kind not in ("acc", "grad"):
            end.update((x.storage, never) for x in values[node])
    return RoleLiveness(values, {s: (begin[s], end[s], size) for s, size in sizes.items()}, never)


def _storages_in_use(node: fx.Node, values: dict[fx.Node, tuple[Value, ...]]) -> list[Value]:
    """The operands and results of a node; for a wait also the operand of its communication."""
    inputs = list(node.all_input_nodes)
    inputs += [n for start in inputs if start.target in STARTS for n in start.all_input_nodes]
    return [x for n in (node, *inputs) for x in values[n]]
