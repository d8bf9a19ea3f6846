"""From the placed graph to rank graphs: global shapes become local ones, moves become collectives."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import fx

from meshweave.errors import LayoutError
from meshweave.expand.emit import Emitter
from meshweave.expand.localize import LOCALIZERS
from meshweave.expand.moves import STEPS, Finish
from meshweave.ir import ops
from meshweave.ir.graph import Origin, Spec, StepGraph, map_nodes, origin_of, spec_of
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph
from meshweave.movement.plan import MovePlan
from meshweave.sharding.registry import row_for

aten = torch.ops.aten
PlanMove = Callable[[Layout, Layout, tuple[int, ...], torch.dtype], MovePlan]


@dataclass(slots=True)
class _Expander:
    step: StepGraph
    mesh: Mesh
    plan_move: PlanMove
    emit: Emitter = field(default_factory=Emitter)
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)
    pending: dict[fx.Node, Finish] = field(default_factory=dict)

    def run(self) -> RankGraph:
        due = self._due_before_update()
        for node in self.step.graph.nodes:
            if node.op == "call_function" and origin_of(node).phase == "update":
                while due:
                    self._value(due.pop())
            self.emit.origin = origin_of(node)
            if node.op == "placeholder":
                self._mark(node, self.emit.graph.placeholder(node.name))
            elif node.target is ops.move:
                self._move(node)
            elif node.op == "call_function":
                self._op(node)
        outputs = self.step.output_values
        self.emit.origin = Origin("update")
        self.emit.graph.output([self._value(n) for n in outputs])
        return RankGraph(
            self.emit.graph,
            self.mesh,
            self.step.inputs,
            tuple(n.meta["layout"] for n in self.step.placeholders),
            self.step.outputs,
            tuple(n.meta["layout"] for n in outputs),
            dict(self.step.constants),
        )

    def _due_before_update(self) -> list[fx.Node]:
        """Outputs that the update must not wait for, or that the next microbatch needs: waited for before it begins.

        Gradients are waited for where the update uses them, unless they are accumulated.
        """
        accumulates = any(item.kind == "acc" for item in self.step.inputs)
        kinds = {"loss", "buffer", "grad"} if accumulates else {"loss", "buffer"}
        pairs = zip(self.step.outputs, self.step.output_values, strict=True)
        return [value for (kind, _), value in reversed(list(pairs)) if kind in kinds]

    def _mark(self, node: fx.Node, local: fx.Node) -> None:
        """Note what the local node makes: the largest piece."""
        spec, layout = node.meta["spec"], node.meta["layout"]
        if isinstance(spec, Spec) and "spec" not in local.meta:
            local.meta["spec"] = Spec(layout.local_shape(spec.shape), spec.dtype)
        if isinstance(spec, tuple) and "spec" not in local.meta:
            pairs = zip(spec, layout, strict=True)
            local.meta["spec"] = tuple(None if s is None else Spec(a.local_shape(s.shape), s.dtype) for s, a in pairs)
        local.meta["origin"] = origin_of(node)
        local.meta["global"] = node.name
        self.values[node] = local

    def _value(self, node: fx.Node) -> fx.Node:
        """The local value; a move's last collective is waited for here, at its first use."""
        finish = self.pending.pop(node, None)
        if finish is not None:
            keep, self.emit.origin = self.emit.origin, origin_of(node)
            self._mark(node, finish())
            self.emit.origin = keep
        return self.values[node]

    def _op(self, node: fx.Node) -> None:
        operands: list[fx.Node] = []

        def swap(n: fx.Node) -> fx.Node:
            local = self._value(n)
            if isinstance(n.meta.get("spec"), Spec):
                operands.append(local)
            return local

        args, kwargs = map_nodes(node, swap)
        if node.target is operator.getitem:
            local = self.emit.call(node.target, args, kwargs)
        else:
            local = LOCALIZERS[row_for(node).localize](self.emit, node, operands, args, kwargs)
        self._mark(node, local)

    def _move(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        spec, layout = spec_of(node), source.meta["layout"]
        if layout.mesh != node.meta["layout"].mesh:
            raise LayoutError("a move between meshes cannot be expanded yet", where=str(origin_of(node)))
        plan = self.plan_move(layout, node.meta["layout"], spec.shape, spec.dtype)
        node.meta["plan"] = plan
        local = self._value(source)
        finish: Finish = lambda: local  # noqa: E731
        for i, step in enumerate(plan.steps):
            finish = STEPS[step.kind](self.emit, local, step, spec.shape)
            if i + 1 < len(plan.steps):
                local = finish()
        self.pending[node] = finish


def expand(step: StepGraph, mesh: Mesh, plan_move: PlanMove) -> RankGraph:
    """The rank graph of a placed graph. Its size does not depend on the number of devices.

    `plan_move(source, target, shape, dtype)` says which steps a move takes.
    """
    return _Expander(step, mesh, plan_move).run()
