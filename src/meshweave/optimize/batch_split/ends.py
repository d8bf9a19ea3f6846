"""Ends of rows by expert that are computed from numbers alone: equal ends become a single value.

Layouts name the ends by which devices own rows, so rows by different ends never meet. Where a model chooses tokens for
experts (`arange(capacity, ...)`), each grouped matmul may write down its ends for itself.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from torch import Tensor, fx

from meshweave.ir.graph import StepGraph, copied_graph, map_nodes, tensor_inputs
from meshweave.ir.grouped import BY_ROWS
from meshweave.ir.traits import RANDOM
from meshweave.ir.verify import verify_step
from meshweave.place.mapping import Homes


def share_ends(step: StepGraph, homes: Homes) -> tuple[StepGraph, Homes]:
    """The step in which ops by rows with equal ends on the same devices (`homes` of its nodes) take the same ends, and
    the devices of its nodes; the step itself if no ends are equal."""
    others = _equal(step, homes)
    if not others:
        return step, homes
    copies: dict[fx.Node, fx.Node] = {}
    step = replace(step, graph=copied_graph(step.graph, copies))
    for op, ends in others.items():
        copies[op].replace_input_with(tensor_inputs(copies[op])[-1], copies[ends])
    step.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    at = {copies[node]: mesh for node, mesh in homes.items()}
    return verify_step(step), {node: at[node] for node in step.graph.nodes}


def _equal(step: StepGraph, home: Homes) -> dict[fx.Node, fx.Node]:
    """The ops by rows with other ends than an earlier op at the same `home` whose ends are equal; and these ends."""
    numbers, first = _Numbers(step), dict[Hashable, fx.Node]()
    others: dict[fx.Node, fx.Node] = {}
    for op in step.graph.nodes:
        if op.target in BY_ROWS:
            ends = tensor_inputs(op)[-1]
            number = numbers.of(ends)
            known = ends if number is None else first.setdefault((number, home[op]), ends)
            if known is not ends:
                others[op] = known
    return others


class _Numbers:
    """Value numbering of what a step computes from numbers and constants alone."""

    def __init__(self, step: StepGraph) -> None:
        items = step.sources.items()
        self.constants = {n: step.constants[item.name] for n, item in items if item.kind == "constant"}
        self.expressions: dict[Hashable, int] = {}
        self.known: dict[fx.Node, int | None] = {}

    def of(self, node: fx.Node) -> int | None:
        """A number that equal values share; None for a value that depends on data or on random numbers."""
        if node not in self.known:
            expression = self._expression(node)
            number = None if expression is None else self.expressions.setdefault(expression, len(self.expressions))
            self.known[node] = number
        return self.known[node]

    def _expression(self, node: fx.Node) -> Hashable | None:
        if node in self.constants:
            return _content(self.constants[node])
        is_op = node.op == "call_function" and node.target not in RANDOM
        if not is_op or any(self.of(n) is None for n in node.all_input_nodes):
            return None
        return str(node.target), str(map_nodes(node, lambda n: ("value", self.of(n)))), str(node.meta["spec"])


def _content(constant: Tensor) -> Hashable:
    return str(constant.dtype), tuple(constant.shape), tuple(constant.flatten().tolist())
