"""Values that placement does not place once and for all: values computed on demand, and casts and views of
parameters."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from meshweave.ir.graph import Input, Spec, map_nodes, origin_of, spec_of, tensor_inputs
from meshweave.ir.layout import Layout
from meshweave.ir.traits import CASTS, FACTORIES, RANDOM, VIEWS, is_pointwise
from meshweave.ops.registry import row_for
from meshweave.place.assign import follow_result

aten = torch.ops.aten
_VIEWS_AND_CASTS = VIEWS | CASTS
_PASSED = _VIEWS_AND_CASTS | {torch.ops.meshweave.round_parts.default}
Due = tuple[Layout, str]  # a layout in which a value is needed, and the phase


def due_at_casts(due: Mapping[fx.Node, list[Due]]) -> dict[fx.Node, list[Due]]:
    """The layouts of `due`, moved up to casts that no partial sum passes, where only casts and views lead to the
    values. A gradient that is rounded later is so reduce-scattered before the cast, not all-reduced and then cut."""
    due_by_node: dict[fx.Node, list[Due]] = {}
    for value, wanted in due.items():
        for layout, phase in wanted:
            node, at = value, layout
            while node.target in _PASSED and len(tensor_inputs(node)) == 1:
                rule, (operand,) = row_for(node).rule(node), tensor_inputs(node)
                if node is not value and not any("sum" in term.ops for term in rule.linear):
                    due_by_node.setdefault(node, []).append((at, phase))
                option = follow_result(rule, at, [spec_of(operand)], [spec_of(node)])
                if option.results[0] != at or len(operand.users) > 1:
                    break
                node, at = operand, option.operands[0]
    return due_by_node


@dataclass(slots=True)
class Forms:
    """Which nodes of a captured step are computed on demand, and which are forms (casts and views) of a parameter.
    `items`: its inputs. `placed_once`: values that are not computed on demand because other values name them."""

    items: Mapping[fx.Node, Input]
    placed_once: frozenset[fx.Node] = frozenset()
    on_demand: dict[fx.Node, bool] = field(default_factory=dict)
    random: dict[fx.Node, bool] = field(default_factory=dict)
    of_parameter: dict[fx.Node, bool] = field(default_factory=dict)
    firsts: dict[Hashable, fx.Node] = field(default_factory=dict)  # by what a form of a parameter is computed from

    def is_created_on_demand(self, node: fx.Node) -> bool:
        """Whether a value has no tensor inputs, or is pointwise of such values and scalars: any piece of it can be
        computed alone."""
        if node not in self.on_demand:
            is_created = node.target in FACTORIES or node.target in RANDOM or self._spreads(node)
            self.on_demand[node] = is_created and node not in self.placed_once
        return self.on_demand[node]

    def _spreads(self, node: fx.Node) -> bool:
        spec = node.meta.get("spec")
        spreads = node.target in _VIEWS_AND_CASTS or is_pointwise(node.target)
        if not spreads or not isinstance(spec, Spec) or spec.num_elements < 2:
            return False
        return all(self.is_created_on_demand(n) or spec_of(n).num_elements == 1 for n in tensor_inputs(node))

    def is_random(self, node: fx.Node) -> bool:
        """Whether an on-demand value depends on random numbers: drawing them again costs more than keeping them."""
        if node not in self.random:
            operands = tensor_inputs(node) if self.is_created_on_demand(node) else []
            self.random[node] = node.target in RANDOM or any(self.is_random(n) for n in operands)
        return self.random[node]

    def is_of_parameter(self, node: fx.Node) -> bool:
        """Whether a node is a parameter, or a cast or view of a parameter outside of the update. Casts and views are
        repeated in each phase that needs them, so that a gathered parameter does not live from forward to backward."""
        if node not in self.of_parameter:
            self.of_parameter[node] = self._leads_to_parameter(node)
        return self.of_parameter[node]

    def _leads_to_parameter(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return self.items[node].kind == "param"
        inputs = tensor_inputs(node) if node.target in _VIEWS_AND_CASTS else []
        return len(inputs) == 1 and origin_of(node).phase != "update" and self.is_of_parameter(inputs[0])

    def is_stored(self, node: fx.Node) -> bool:
        """Whether a form of a parameter is computed in the layout in which the parameter is stored: cast, but not
        viewed."""
        return node.op == "placeholder" or (node.target in CASTS and self.is_stored(tensor_inputs(node)[0]))

    def first_of(self, node: fx.Node) -> fx.Node:
        """The first node that computes the same form of a parameter: a block that is recomputed casts it again."""
        if node.op == "placeholder":
            return node
        args, kwargs = map_nodes(node, lambda n: ("first", self.first_of(n).name))
        return self.firsts.setdefault((node.target, repr(args), repr(sorted(kwargs.items()))), node)

    def parameter(self, node: fx.Node) -> fx.Node:
        """The input that a form of a parameter comes from."""
        while node.op != "placeholder":
            (node,) = tensor_inputs(node)
        return node

    def name(self, node: fx.Node) -> str:
        """Name of the parameter that a node is a form of."""
        return self.items[self.parameter(node)].name
