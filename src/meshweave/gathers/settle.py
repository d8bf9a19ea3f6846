"""Gradients on their way: when the steps of their moves are waited for in backward.

What has been handed to a communication is held until that has been waited for. Waited for where the update uses them,
the whole gradients of a model would live beside their shards to the end of backward; waited for at once, they would
hide behind nothing. ZeRO-3 implementations wait for a block's gradients when those of the next one are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from meshweave.gathers.prefetch import block_of
from meshweave.ir.collectives import COLLECTIVES, STARTS
from meshweave.ir.graph import PARTS, origin_of
from meshweave.ir.rank import SYMBOLS, RankGraph

_BACKWARD, _UPDATE = PARTS["backward"], PARTS["update"]


@dataclass(frozen=True, slots=True)
class _Way:
    """A gradient's first start, and per step of its move the nodes from its wait to the start of the next step, or to
    the gradient."""

    first: fx.Node
    legs: tuple[tuple[fx.Node, ...], ...]


def settle(role: RankGraph) -> RankGraph:
    """Give every step of a gradient's move the time in which backward computes one block, and no more.

    The wait for a step stands before the start of the like gradient of the next block (the last ones of two blocks are
    alike, the ones before them, and so on), with what leads from it to the next step. So a device holds the unreduced
    gradients of one block, not of the model. Values are exactly the same. The graph is changed in place and returned.
    """
    blocks: dict[tuple[str, str], list[_Way]] = {}
    for way in _ways(role):
        blocks.setdefault((origin_of(way.first).phase, block_of(way.first)), []).append(way)
    order = list(blocks.values())
    end = _end(role)
    position = {node: i for i, node in enumerate(role.graph.nodes)}
    for number, ways in enumerate(order):
        for i, way in enumerate(ways):
            following: fx.Node | None = None  # the wait of the next step: a step starts before that
            for later, leg in reversed(list(enumerate(way.legs, number + 1))):
                anchor = _like(order[later], len(ways) - i) if later < len(order) else end
                if following is not None and anchor is not None and position[following] <= position[anchor]:
                    anchor = following
                if anchor is not None and not (anchor is end and position[leg[0]] > position[end]):
                    _put(leg, anchor, position, role)  # what the update waits for, it may wait for where it needs it
                following = leg[0]
    return role


def _like(ways: Sequence[_Way], from_end: int) -> fx.Node:
    """The start of the gradient that is the `from_end`-th last of a block, or of its first."""
    return ways[max(0, len(ways) - from_end)].first


def _put(leg: Sequence[fx.Node], anchor: fx.Node, position: dict[fx.Node, int], role: RankGraph) -> None:
    """Put a leg before its anchor, if that comes after its start. The wait for a last step may come from behind it."""
    if position[anchor] <= position[leg[0].all_input_nodes[0]]:
        return
    is_last = leg[-1].target not in STARTS
    if position[leg[0]] > position[anchor]:
        leg = leg[:1] if is_last else ()
    elif not _may_be_late(leg, anchor, position) or not (is_last or _is_alone(leg[-1], role)):
        return
    for node in leg:
        if node is leg[0] or position[node] <= position[anchor]:  # what stands behind the anchor is late enough
            anchor.prepend(node)
            position[node] = position[anchor]


def _may_be_late(leg: Sequence[fx.Node], anchor: fx.Node, position: dict[fx.Node, int]) -> bool:
    """Whether nobody needs what a leg makes before its anchor."""
    inside = all(len(node.users) == 1 for node in leg[:-1])
    return inside and all(position[user] >= position[anchor] for user in leg[-1].users)


def _is_alone(start: fx.Node, role: RankGraph) -> bool:
    """Whether devices of this role alone take part in a communication."""
    return start.target in COLLECTIVES and role.has_all_of(str(start.args[-1]))


def _end(role: RankGraph) -> fx.Node | None:
    """The first node of the update."""
    run = (n for n in role.graph.nodes if n.op == "call_function" and n.target not in SYMBOLS)
    return next((n for n in run if origin_of(n).phase == "update"), None)


def _ways(role: RankGraph) -> Iterator[_Way]:
    """The moves of gradients that begin in backward, in the order of their first starts."""
    position = {node: i for i, node in enumerate(role.graph.nodes)}
    results = next(iter(reversed(role.graph.nodes))).args[0]
    ways: dict[fx.Node, _Way] = {}
    for (kind, _), value in zip(role.outputs, results, strict=True):  # type: ignore[arg-type]
        if kind not in ("grad", "acc"):
            continue
        for node in _moved(value, kind):  # type: ignore[arg-type]
            way = _way(node)
            if way is not None and PARTS[origin_of(way.first).phase] == _BACKWARD:
                ways[way.first] = way
    yield from sorted(ways.values(), key=lambda way: position[way.first])


def _moved(value: fx.Node, kind: str) -> Sequence[fx.Node]:
    """What has been moved last to make an output: the value itself, or what is added to a sum so far."""
    if kind == "grad":
        return (value,)
    return [n for n in value.all_input_nodes if n.op != "placeholder" and n.target not in SYMBOLS]


def _way(value: fx.Node) -> _Way | None:
    """The steps of the move that made a value; None where no communication did."""
    chain: list[fx.Node] = []
    while value.op == "call_function" and len(operands := _tensors(value)) == 1:
        chain.append(value)
        (value,) = operands
    starts = [i for i, node in enumerate(chain) if node.target in STARTS]
    starts = [i for i in starts if origin_of(chain[i]) == origin_of(chain[starts[0]])]  # others are of other moves
    if not starts:
        return None
    legs = [tuple(reversed(chain[later:start])) for later, start in pairwise(starts)]
    return _Way(chain[starts[-1]], (*reversed(legs), tuple(reversed(chain[: starts[0]]))))


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if n.target not in SYMBOLS]
