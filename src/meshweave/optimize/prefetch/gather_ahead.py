"""Gathers parameters ahead of the block that needs them, as ZeRO-3 implementations prefetch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from meshweave.errors import PlanError
from meshweave.ir.collectives import COLLECTIVES, STARTS, WAIT
from meshweave.ir.graph import PARTS, block_name, origin_of, with_ancestors
from meshweave.ir.rank import SYMBOLS, RankGraph, distinct_operands


@dataclass(frozen=True, slots=True)
class _Unit:
    """Gathers of a block in a phase, and the first wait for any of them."""

    # starts by the number of steps from them to the parameter, each after the ops that compute its operand
    starts: dict[int, list[fx.Node]]
    first_wait: fx.Node


def prefetch(role: RankGraph, ahead: int) -> RankGraph:
    """Start the collectives that depend only on inputs `ahead` blocks before the block that waits for them, and each
    earlier step of a gather in several steps `ahead` blocks before the next, so that every step has their time.

    A block is everything under an index of a repeated module (`model.layers.3`), or a module outside of those. With 0
    nothing moves. Values are exactly the same; up to `ahead` more blocks are kept gathered. Starts do not leave their
    phase. Collectives with devices of other roles keep their places, because all roles have them in the same order. The
    graph is changed in place and returned. Raises PlanError for a negative number.
    """
    if ahead < 0:
        raise PlanError("the number of blocks to prefetch is negative", got=f"prefetch={ahead}", expected="0 or more")
    if ahead:
        for phase in ("prepare", "forward", "backward"):
            units = list(_units(role, phase))
            for i, unit in enumerate(units):
                for steps, nodes in sorted(unit.starts.items(), reverse=True):
                    _move(nodes, units[max(0, i - ahead * steps)].first_wait)
    return role


def _units(role: RankGraph, phase: str) -> Iterator[_Unit]:
    free = _free(role)
    order = {node: i for i, node in enumerate(role.graph.nodes)}
    groups: dict[str, list[fx.Node]] = {}
    for node in role.graph.nodes:
        if is_alone(node, role) and node in free and origin_of(node).phase == phase:
            groups.setdefault(block_of(node), []).append(node)
    units = []
    for starts in groups.values():
        chains = {start: _chain(start, order) for start in starts}
        steps: dict[fx.Node, int] = {}
        for start in reversed(starts):
            steps[start] = 1 + max((steps[later] for later in steps if start in chains[later]), default=0)
        moved: dict[int, list[fx.Node]] = {}
        for start in starts:
            moved.setdefault(steps[start], []).extend((*chains[start], start))
        waits = [user for start in starts if steps[start] == 1 for user in start.users if user.target is WAIT]
        units.append(_Unit(moved, min(waits, key=order.__getitem__)))
    yield from sorted(units, key=lambda unit: order[unit.first_wait])


def _free(role: RankGraph) -> set[fx.Node]:
    """The nodes that depend only on inputs: not on an activation or a communication of several roles. A batch also
    exists from the beginning, but is gathered where it is used."""
    free = {n for n, item in role.sources.items() if item.kind != "batch"}
    for node in role.graph.nodes:
        is_ours = node.target is not WAIT or is_alone(node.all_input_nodes[0], role)
        if node.op == "call_function" and is_ours and all(n in free for n in node.all_input_nodes):
            free.add(node)
    return free


def is_alone(start: fx.Node, role: RankGraph) -> bool:
    """Whether only devices of this role take part in a communication."""
    return start.target in COLLECTIVES and role.has_all_of(str(start.args[-1]))


def block_of(node: fx.Node) -> str:
    """The unit of gathering: a block, or a module outside of blocks."""
    origin = origin_of(node)
    return block_name(origin) or origin.module


def _chain(start: fx.Node, order: dict[fx.Node, int]) -> Sequence[fx.Node]:
    """The ops that compute the operand of a start, in order."""
    chain = (node for node in with_ancestors(start.all_input_nodes) if node.op == "call_function")
    return sorted(chain, key=order.__getitem__)


def _move(nodes: Sequence[fx.Node], anchor: fx.Node) -> None:
    """Move nodes, in order, before `anchor`, unless they are there already or depend on it. Shared operands of several
    starts (symbols, a tensor) move once, with the first of them."""
    position = {node: i for i, node in enumerate(anchor.graph.nodes)}
    dependents = {anchor}
    for node in dict.fromkeys(nodes):
        if not dependents.isdisjoint(node.all_input_nodes):
            dependents.add(node)
        elif position[node] > position[anchor]:
            anchor.prepend(node)


# Decides when the moves of gradients are waited for in backward. The operand of a communication lives until its wait.
# If the update waited for them, the whole gradients of a model would live beside their shards to the end of backward;
# if they were waited for at once, nothing would hide them. ZeRO-3 implementations wait for a block's gradients when
# those of the next block are computed.

_BACKWARD = PARTS["backward"]


@dataclass(frozen=True, slots=True)
class _GradientMove:
    """A gradient's first start, and for each step of its move the nodes from its wait to the start of the next step, or
    to the gradient."""

    first: fx.Node
    legs: tuple[tuple[fx.Node, ...], ...]


def delay_gradient_waits(role: RankGraph) -> RankGraph:
    """Give every step of a gradient's move the time in which backward computes a block, and no more.

    The wait for a step comes before the start of the corresponding gradient of the next block (the last ones of two
    blocks correspond, the ones before them, and so on), with the nodes that lead from it to the next step. So a device
    has the unreduced gradients of a single block, not of the model. Values are exactly the same. The graph is changed
    in place and returned.
    """
    blocks: dict[tuple[str, str], list[_GradientMove]] = {}
    for move in _gradient_moves(role):
        blocks.setdefault((origin_of(move.first).phase, block_of(move.first)), []).append(move)
    order = list(blocks.values())
    end = _end(role)
    position = {node: i for i, node in enumerate(role.graph.nodes)}
    for number, moves in enumerate(order):
        for i, move in enumerate(moves):
            following: fx.Node | None = None  # the wait of the next step: a step starts before it
            for later, leg in reversed(list(enumerate(move.legs, number + 1))):
                anchor = _like(order[later], len(moves) - i) if later < len(order) else end
                if following is not None and anchor is not None and position[following] <= position[anchor]:
                    anchor = following
                if anchor is not None and not (anchor is end and position[leg[0]] > position[end]):
                    # gradients that the update waits for may be waited for where it uses them
                    _place_leg(leg, anchor, position, role)
                following = leg[0]
    return role


def _like(moves: Sequence[_GradientMove], from_end: int) -> fx.Node:
    """The start of the gradient that is the `from_end`-th last of a block, or of its first."""
    return moves[max(0, len(moves) - from_end)].first


def _place_leg(leg: Sequence[fx.Node], anchor: fx.Node, position: dict[fx.Node, int], role: RankGraph) -> None:
    """Move a leg before its anchor, if that comes after its start. The wait for a last step may move forward from
    behind it."""
    if position[anchor] <= position[leg[0].all_input_nodes[0]]:
        return
    is_last = leg[-1].target not in STARTS
    if position[leg[0]] > position[anchor]:
        leg = leg[:1] if is_last else ()
    elif not _may_be_late(leg, anchor, position) or not (is_last or is_alone(leg[-1], role)):
        return
    for node in leg:
        if node is leg[0] or position[node] <= position[anchor]:  # nodes after the anchor are late enough
            anchor.prepend(node)
            position[node] = position[anchor]


def _may_be_late(leg: Sequence[fx.Node], anchor: fx.Node, position: dict[fx.Node, int]) -> bool:
    """Whether nothing needs the leg's result before its anchor."""
    inside = all(len(node.users) == 1 for node in leg[:-1])
    return inside and all(position[user] >= position[anchor] for user in leg[-1].users)


def _end(role: RankGraph) -> fx.Node | None:
    """The first node of the update."""
    run = (n for n in role.graph.nodes if n.op == "call_function" and n.target not in SYMBOLS)
    return next((n for n in run if origin_of(n).phase == "update"), None)


def _gradient_moves(role: RankGraph) -> Iterator[_GradientMove]:
    """The moves of gradients that begin in backward, in the order of their first starts."""
    position = {node: i for i, node in enumerate(role.graph.nodes)}
    moves: dict[fx.Node, _GradientMove] = {}
    for (kind, _), value in role.results.items():
        if kind not in ("grad", "acc"):
            continue
        for node in _moved_values(value, kind):
            move = _gradient_move(node)
            if move is not None and PARTS[origin_of(move.first).phase] == _BACKWARD:
                moves[move.first] = move
    yield from sorted(moves.values(), key=lambda move: position[move.first])


def _moved_values(value: fx.Node, kind: str) -> Sequence[fx.Node]:
    """The last moved value of an output: the value itself, or the addend of a sum so far."""
    if kind == "grad":
        return (value,)
    return [n for n in value.all_input_nodes if n.op != "placeholder" and n.target not in SYMBOLS]


def _gradient_move(value: fx.Node) -> _GradientMove | None:
    """The steps of the move of a value; None if there is no communication."""
    chain: list[fx.Node] = []
    while value.op == "call_function" and len(operands := distinct_operands(value)) == 1:
        chain.append(value)
        (value,) = operands
    starts = [i for i, node in enumerate(chain) if node.target in STARTS]
    starts = [i for i in starts if origin_of(chain[i]) == origin_of(chain[starts[0]])]  # others belong to other moves
    if not starts:
        return None
    legs = [tuple(reversed(chain[later:start])) for later, start in pairwise(starts)]
    return _GradientMove(chain[starts[-1]], (*reversed(legs), tuple(reversed(chain[: starts[0]]))))
