"""Gathers parameters ahead of the block that needs them, as ZeRO-3 implementations prefetch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from meshweave.errors import PlanError
from meshweave.ir.collectives import COLLECTIVES, WAIT
from meshweave.ir.graph import block_name, origin_of
from meshweave.ir.rank import RankGraph


@dataclass(frozen=True, slots=True)
class _Unit:
    """Gathers of a block in a phase, with the ops that compute their operands, and the first wait for any of them."""

    starts: tuple[tuple[fx.Node, ...], ...]  # each with the chain before it, the start last
    first_wait: fx.Node


def prefetch(role: RankGraph, ahead: int) -> RankGraph:
    """Start the collectives that depend only on inputs `ahead` blocks before the block that waits for them.

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
                anchor = units[max(0, i - ahead)].first_wait
                _move(unit, anchor)
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
        waits = [user for start in starts for user in start.users if user.target is WAIT]
        first = min(waits, key=order.__getitem__)
        units.append(_Unit(tuple((*_chain(s, order), s) for s in starts), first))
    yield from sorted(units, key=lambda unit: order[unit.first_wait])


def _free(role: RankGraph) -> set[fx.Node]:
    """The nodes that depend only on inputs: not on a communication or an activation. A batch also exists from the
    beginning, but is gathered where it is used."""
    free = {n for n, item in role.sources.items() if item.kind != "batch"}
    for node in role.graph.nodes:
        if node.op == "call_function" and node.target is not WAIT and all(n in free for n in node.all_input_nodes):
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
    chain: dict[fx.Node, None] = {}
    waiting = list(start.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and node not in chain:
            chain[node] = None
            waiting += node.all_input_nodes
    return sorted(chain, key=order.__getitem__)


def _move(unit: _Unit, anchor: fx.Node) -> None:
    """Move the starts of a unit, in order, before `anchor`, unless they are there already. Shared operands of several
    starts (symbols, a tensor) move once, with the first of them."""
    position = {node: i for i, node in enumerate(anchor.graph.nodes)}
    for node in dict.fromkeys(node for chain in unit.starts for node in chain):
        if position[node] > position[anchor]:
            anchor.prepend(node)
