"""From the placed graph to rank graphs: global shapes become local shapes, moves become collectives and transfers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from meshweave.engine.sections import CUTS, READ_BEFORE
from meshweave.ir import ops
from meshweave.ir.graph import PARTS, Input, Origin, Spec, StepGraph, map_nodes, origin_of, spec_of
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph, Transfer, in_mesh_order
from meshweave.ir.verify import check_placed
from meshweave.ops.emit import Emitter
from meshweave.ops.registry import row_for
from meshweave.place.expand.moves import SPARSE, STEPS, Finish, dispatch, send, take
from meshweave.place.movement.dispatch import sparse_plan
from meshweave.place.movement.plan import MovePlan
from meshweave.place.movement.steps import Step
from meshweave.place.stages import in_stage, stage_of_move

aten = torch.ops.aten
PlanMove = Callable[[Layout, Layout, tuple[int, ...], torch.dtype], MovePlan]


@dataclass(slots=True)
class _Expander:
    """Writes the rank graph of a role: the values and moves of every mesh that contains its devices."""

    program: _Program
    devices: tuple[int, ...]
    emit: Emitter = field(default_factory=Emitter)
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)
    pending: dict[fx.Node, Finish] = field(default_factory=dict)
    sends: list[tuple[Origin, Finish]] = field(default_factory=list)  # of values that several nodes wait for
    covered: dict[Mesh, bool] = field(default_factory=dict)

    def run(self) -> RankGraph:
        step = self.program.step
        self.emit.meshes = self.program.meshes
        due, part = self._due(), 0
        for node in step.graph.nodes:
            if node.op == "call_function" and PARTS[origin_of(node).phase] != part:
                part = PARTS[origin_of(node).phase]
                self._finish_sends()
                for value in due.pop(part, ()):
                    self._value(value)
            self.emit.origin = origin_of(node)
            self._node(node)
        self.emit.origin = Origin("update")
        self._finish_sends()
        present = [(name, value) for name, value in step.results.items() if self._has(value.meta["layout"])]
        self.emit.graph.output([self._value(value) for _, value in present])
        inputs = self._inputs()
        return RankGraph(
            self.emit.graph,
            self.program.meshes[0],
            tuple(item for item, _ in inputs),
            tuple(layout for _, layout in inputs),
            tuple(name for name, _ in present),
            tuple(value.meta["layout"] for _, value in present),
            dict(step.constants),
            self.devices,
            self.program.meshes,
            {
                key: entry
                for key, entry in self.program.transfers.items()
                if self._has(entry.source) or self._has(entry.target)
            },
        )

    def _has(self, layout: Layout) -> bool:
        if layout.mesh not in self.covered:
            self.covered[layout.mesh] = layout.mesh.covers(self.devices)
        return self.covered[layout.mesh]

    def _node(self, node: fx.Node) -> None:
        if node.target is ops.move:
            self._move(node)
        elif node.op == "output" or not self._has(_layout_of(node)):
            return
        elif node.op == "placeholder":
            self._mark(node, self.emit.graph.placeholder(node.name))
        else:
            self._op(node)

    def _inputs(self) -> list[tuple[Input, Layout]]:
        """The inputs of this role. Batch entries that only other roles use are not among them."""
        nodes = []
        for node, item in self.program.step.sources.items():
            local = self.values.get(node)
            if local is None:
                continue
            if self.program.num_roles > 1 and item.kind in ("batch", "ahead", "constant", "scalar") and not local.users:
                self.emit.graph.erase_node(local)
                continue
            nodes.append((item, node.meta["layout"]))
        return nodes

    def _finish_sends(self) -> None:
        """Wait for this role's sends, so that no buffer outlives its phase."""
        for origin, finish in self.sends:
            self.emit.origin = origin
            finish()
        self.sends.clear()

    def _due(self) -> dict[int, list[fx.Node]]:
        """Outputs by the part of the step before which they are waited for. Gradients are waited for where the update
        uses them."""
        results = self.program.step.results
        present = [(kind, value) for (kind, _), value in results.items() if self._has(value.meta["layout"])]
        return {PARTS[cut]: [value for kind, value in present if kind in READ_BEFORE[cut]] for cut in CUTS}

    def _mark(self, node: fx.Node, local: fx.Node) -> None:
        """Record the value of the local node: the largest piece."""
        spec, layout = node.meta["spec"], node.meta["layout"]
        if isinstance(spec, Spec) and "spec" not in local.meta:
            local.meta["spec"] = Spec(layout.local_shape(spec.shape), spec.dtype)
        if isinstance(spec, tuple) and "spec" not in local.meta:
            pairs = zip(spec, layout, strict=True)
            local.meta["spec"] = tuple(None if s is None else Spec(a.local_shape(s.shape), s.dtype) for s, a in pairs)
        if "global" not in local.meta:  # else a move without communication: the value is there since an earlier phase
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
            local = row_for(node).on_piece.call(self.emit, node, operands, args, kwargs)
        self._mark(node, local)

    def _move(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        shape, steps = spec_of(node).shape, node.meta["plan"].steps
        ends = (source.meta["layout"], *(step.target for step in steps))
        if not any(self._has(layout) for layout in ends):
            return
        finish = self._available(source) if self._has(ends[0]) else None
        if len(node.args) > 2:
            self._dispatch(node, steps[0])
            return
        received, sent = origin_of(node), replace(origin_of(node), stage=origin_of(source).stage)
        for i, step in enumerate(steps):
            key = self.program.keys.get((node, i))
            is_before = step.source.mesh == ends[0].mesh != ends[-1].mesh
            is_sent = is_before and (step.target.mesh == ends[0].mesh or not self._has(step.target))
            self.emit.origin = sent if is_sent else received
            self.emit.move = f"{spec_of(node)}: {step.source} -> {step.target}"
            finish = self._step(key, finish() if finish is not None else None, step, shape)
        if finish is not None and self._has(ends[-1]):
            self.pending[node] = finish

    def _dispatch(self, node: fx.Node, step: Step) -> None:
        """A sparse move: every device reads, or has, only some rows."""
        source, _, readers, share = node.args
        self.emit.move = f"{spec_of(node)}: {step.source} -> {step.target}"
        local = self._value(source), self._value(readers)  # type: ignore[arg-type]
        self.pending[node] = dispatch(self.emit, local[0], step, local[1], share)  # type: ignore[arg-type]

    def _available(self, node: fx.Node) -> Finish:
        local = self._value(node)
        return lambda: local

    def _step(self, key: str | None, local: fx.Node | None, step: Step, shape: tuple[int, ...]) -> Finish | None:
        """This role's part in a step; None if it has none, or has nothing afterwards. `key` is the key of the step's
        transfer, if it has one."""
        if step.kind in STEPS:
            return STEPS[step.kind](self.emit, local, step, shape) if local is not None else None
        sends, receives = self._has(step.source), self._has(step.target)
        if key is None:
            return take(self.emit, local, step, shape) if receives and local is not None else None
        if not sends and not receives:
            return None
        finish = send(self.emit, local if sends else None, key)
        if receives:
            return finish
        self.sends.append((self.emit.origin, finish))
        return None


def _layout_of(node: fx.Node) -> Layout:
    """The layout of a value, or of the first of several: an op runs on a single mesh."""
    layout = node.meta["layout"]
    return layout if isinstance(layout, Layout) else next(item for item in layout if item is not None)


@dataclass(slots=True)
class _Program:
    """What all roles share: the placed step, its meshes, and communications between devices, in the order of the moves.
    `keys` has the key of a transfer by its move and the number of the step."""

    step: StepGraph
    meshes: tuple[Mesh, ...]
    transfers: dict[str, Transfer] = field(default_factory=dict)
    keys: dict[tuple[fx.Node, int], str] = field(default_factory=dict)
    num_roles: int = 1


def _roles(meshes: tuple[Mesh, ...]) -> list[tuple[int, ...]]:
    """Devices that are in the same meshes, in the order of the program's mesh."""
    by_membership: dict[tuple[bool, ...], list[int]] = {}
    for device in meshes[0].devices:
        by_membership.setdefault(tuple(device in mesh for mesh in meshes), []).append(device)
    return [tuple(devices) for devices in by_membership.values()]


def _transfer(step: Step, spec: Spec) -> Transfer:
    return Transfer(step.source, step.target, spec, in_mesh_order(step.source.mesh, step.axes))


def _stays(crossing: Transfer) -> bool:
    """Whether every device of a transfer's target cuts its piece, even if empty, out of its piece of the source."""
    routes, devices, shape = crossing.routes, crossing.target.mesh.devices, crossing.spec.shape
    if not routes.is_local or not crossing.source.mesh.covers(devices):
        return False
    empty = (d for d in devices if not routes.received_by(d))
    return all(crossing.source.box_of(shape, d).contains(crossing.target.box_of(shape, d)) for d in empty)


def expand(step: StepGraph, mesh: Mesh, plan_move: PlanMove) -> tuple[RankGraph, ...]:
    """The rank graphs of a placed graph, one per role. Their size does not depend on the number of devices.

    `plan_move(source, target, shape, dtype)` returns the steps of a move. Every role has its moves in the order of the
    placed graph, so that no two wait for each other.
    """
    check_placed(step)
    meshes = {mesh: None}
    crossing: list[tuple[fx.Node, int, Transfer]] = []
    for node in step.graph.nodes:
        if node.op == "output":
            continue
        meshes.setdefault(_layout_of(node).mesh)
        if node.target is ops.move:
            spec, source = spec_of(node), node.args[0].meta["layout"]
            plan = plan_move(source, node.meta["layout"], spec.shape, spec.dtype)
            if len(node.args) > 2:
                plan = sparse_plan(plan, node.args[3]) or plan
            node.meta["plan"] = plan
            sent = ((i, planned) for i, planned in enumerate(plan.steps) if planned.kind not in (*STEPS, *SPARSE))
            transfers = [(i, _transfer(planned, spec)) for i, planned in sent]
            crossing += [(node, i, planned) for i, planned in transfers if not _stays(planned)]
    for node in step.graph.find_nodes(op="call_function", target=ops.move):
        in_stage(node, stage_of_move(node))
    program = _Program(step, tuple(meshes))
    for number, (node, i, planned) in enumerate(crossing):
        program.keys[node, i] = f"t{number}"
        program.transfers[f"t{number}"] = planned
    roles = _roles(program.meshes)
    program.num_roles = len(roles)
    return tuple(_Expander(program, devices).run() for devices in roles)
