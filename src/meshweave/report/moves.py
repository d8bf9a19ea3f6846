"""The table of moves: what moves, why, how, and how many bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from meshweave.ir import ops
from meshweave.ir.graph import StepGraph, op_name, origin_of, spec_of
from meshweave.movement.plan import MovePlan


@dataclass(frozen=True, slots=True)
class MoveRow:
    """One move. Bytes and seconds are per device, of the largest piece, under the profile of the plan."""

    name: str
    phase: str
    kind: str
    source: str
    target: str
    value: str
    steps: tuple[str, ...]
    bytes_received: int
    seconds: float
    why: str
    line: str
    module: str

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def move_rows(placed: StepGraph) -> list[MoveRow]:
    """A row for every move of an expanded step, in the order in which they stand in the graph."""
    return [_row(node, placed) for node in placed.graph.nodes if node.target is ops.move]


def _row(node: fx.Node, placed: StepGraph) -> MoveRow:
    plan: MovePlan = node.meta["plan"]
    origin = origin_of(node)
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return MoveRow(
        name=source.name,
        phase=origin.phase,
        kind="+".join(step.kind for step in plan.steps) or "none",
        source=str(source.meta["layout"]),
        target=str(node.meta["layout"]),
        value=str(spec_of(node)),
        steps=tuple(str(step) for step in plan.steps),
        bytes_received=round(sum(step.bytes_received for step in plan.steps)),
        seconds=plan.seconds,
        why=_why(node, source),
        line=origin.source,
        module=origin.module,
    )


def _why(node: fx.Node, source: fx.Node) -> str:
    """What needs the value in its new layout."""
    users = [u for u in node.users if u.op == "call_function"]
    made = op_name(source.target) if source.op == "call_function" else "input"
    if not users:
        return f"{made} is returned so"
    needs = ", ".join(dict.fromkeys(op_name(u.target) for u in users[:3]))
    return f"{made} -> {needs}"
