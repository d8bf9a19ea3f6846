"""Mapping: on which devices every op of a captured step runs.

A plan or a model (`Plan.on`, `Plan.stages`, `mw.on`) decides some ops; the others run where their operands are, so that
nothing moves without need. By default everything runs on the program's mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import torch
from torch import fx

from meshweave.errors import MeshError, PlanError
from meshweave.ir.graph import Input, Spec, StepGraph, origin_of, spec_of, tensor_inputs, with_ancestors
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.traits import is_random
from meshweave.place.operators import Pin

aten = torch.ops.aten
PIN = torch.ops.meshweave.pin.default
Homes = Mapping[fx.Node, Mesh]
NO_STAGES: Mapping[str, int] = {}


def map_devices(
    step: StepGraph, modules: Mapping[str, Mesh], mesh: Mesh, stages: Mapping[str, int] = NO_STAGES
) -> dict[fx.Node, Mesh]:
    """The mesh of every op and of every placeholder: where a parameter lives, and its gradient and state with it.

    `modules` are the modules that the plan places, `stages` those that it puts on stages of a pipeline. Any other op
    runs where its largest operand is, on a mesh that has a stage at or after those of its operands (among equals, that
    of the latest stage, on the mesh that comes last in the model); an op of only parameters and inputs of the step runs
    where it is first used, a metric with the loss, others on the whole mesh. What follows from buffers and numbers
    alone (tables of positions, masks) and is used on several meshes is computed on all devices, which costs less than
    to send it. A gradient is computed where its forward op ran; a parameter is updated where it lives, which is where
    it is first used. Raises MeshError with the user's line for devices that the mesh lacks, PlanError for idle devices
    of the mesh.
    """
    mapper = _Mapper(step, modules, mesh, stages)
    if mesh.num_devices > 1:
        mapper.run()
        _check_busy(mapper, mesh)
    return {node: mapper.homes.get(node, mesh) for node in step.graph.nodes}


def stage_of(node: fx.Node, stages: Mapping[fx.Node, int], homes: Homes, of_plan: Mapping[str, int]) -> int:
    """The stage of a forward op in a pipeline, from the `stages` of its operands: that of its module in a plan, or the
    latest of its operands. Without a plan a value enters the next stage when it comes to other devices."""
    before = [stages[n] + (not of_plan and homes[n] != homes[node]) for n in node.all_input_nodes if n in stages]
    return max([*before, stage_of_module(origin_of(node).module, of_plan) or 0])


def stage_of_module(module: str, of_plan: Mapping[str, int]) -> int | None:
    """The stage of the innermost module around this that a plan has put on a stage."""
    while module and module not in of_plan:
        module = module.rpartition(".")[0]
    return of_plan[module] if module else None


def _is_left(node: fx.Node) -> bool:
    """Whether no forward op uses a node any more, because its users were rewritten."""
    return not any(origin_of(user).phase in ("forward", "loss") or user.op == "output" for user in node.users)


def _takes_elsewhere(node: fx.Node) -> bool:
    """Whether a node is an operator that names devices; a plan's pin fixes how a value is laid out, not where it is."""
    return node.target is PIN and Pin.parse(str(node.args[1])).mesh is not None


@dataclass(slots=True)
class _Mapper:
    step: StepGraph
    modules: Mapping[str, Mesh]
    mesh: Mesh
    of_plan: Mapping[str, int]
    homes: dict[fx.Node, Mesh] = field(default_factory=dict)  # nodes without an entry are undecided
    calls: dict[int, Mesh] = field(default_factory=dict)  # forward op -> where the last part of it ran
    call_stages: dict[int, int] = field(default_factory=dict)  # and its stage
    params: dict[str, Mesh] = field(default_factory=dict)
    order: dict[fx.Node, int] = field(default_factory=dict)
    seen: dict[Mesh, int] = field(default_factory=dict)  # meshes in the order in which they get their first op
    stages: dict[fx.Node, int] = field(default_factory=dict)  # of forward ops, as far as known here
    of_mesh: dict[Mesh, int] = field(init=False)  # the last stage of each mesh that has stages
    everywhere: set[fx.Node] = field(default_factory=set)  # constants of the step that several meshes use

    def __post_init__(self) -> None:
        self.of_mesh = {self.modules[name]: stage for name, stage in sorted(self.of_plan.items(), key=itemgetter(1))}

    def run(self) -> None:
        self.order = {n: i for i, n in enumerate(self.step.graph.nodes)}
        nodes = [n for n in self.step.graph.nodes if n.op == "call_function"]
        ahead = [n for n in nodes if origin_of(n).phase in ("forward", "loss")]
        for node in ahead:
            self._set(node, self._forward(node))
            if node in self.homes:
                self.stages[node] = stage_of(node, self.stages, self.homes, self.of_plan)
        self.everywhere = self._shared_constants(ahead)
        for node in reversed(ahead):
            if node not in self.homes and node not in self.everywhere:
                self._set(node, self._first_use(node) or self._with_loss(node))
        if self.of_plan:
            self._place_buffer_updates(ahead)
        for node in ahead:
            call, stage = origin_of(node).call, self.stages.get(node, 0)
            is_later = call != 0 and stage > self.call_stages.get(call, -1)
            if is_later and node not in self.everywhere and (node in self.homes or not _is_left(node)):
                self.calls[call], self.call_stages[call] = self.homes.get(node, self.mesh), stage
        self._place_parameters()
        for node in nodes:
            phase = origin_of(node).phase
            if phase == "backward":
                self._set(node, self._backward(node))
            elif phase in ("reduce", "update"):
                self._set(node, self._update(node))
        for node in reversed(nodes):
            if node not in self.homes and node.all_input_nodes and origin_of(node).phase == "backward":
                self._set(node, self._only_use(node))

    def _set(self, node: fx.Node, mesh: Mesh | None) -> None:
        if mesh is not None:
            self.homes[node] = mesh
            self.seen.setdefault(mesh, len(self.seen))

    def _forward(self, node: fx.Node) -> Mesh | None:
        if node.target is PIN:
            wanted = Pin.parse(str(node.args[1])).mesh
            if wanted is not None:
                return self._of_program(wanted, node)
        module = origin_of(node).module
        while module and module not in self.modules:
            module = module.rpartition(".")[0]
        return self.modules[module] if module else self._operands(node)

    def _shared_constants(self, ahead: Sequence[fx.Node]) -> set[fx.Node]:
        """The undecided ops whose values are equal in every step and on every device, and that several meshes use."""
        written = {name for kind, name in self.step.results if kind == "buffer"}
        fixed = {
            node
            for node, item in self.step.sources.items()
            if item.kind == "constant" or (item.kind == "buffer" and item.name not in written)
        }
        for node in ahead:
            is_fixed = set(node.all_input_nodes) <= fixed and not is_random(node.target)
            if is_fixed and node.target is not PIN and node not in self.homes:
                fixed.add(node)
        used: dict[fx.Node, set[Mesh]] = {}
        for node in reversed(ahead):
            if node in fixed:
                users = [user for user in node.users if user in self.homes or user in used]
                used[node] = set().union(*({self.homes[u]} if u in self.homes else used[u] for u in users))
        return {node for node, meshes in used.items() if len(meshes) > 1}

    def _of_program(self, wanted: Mesh, node: fx.Node) -> Mesh:
        missing = [d for d in wanted.devices if d not in self.mesh]
        if missing:
            raise MeshError(
                "an operator names devices that the mesh lacks",
                where=str(origin_of(node)),
                got=", ".join(map(str, missing)),
                expected=f"devices of mesh {self.mesh}",
            )
        return wanted

    def _operands(self, node: fx.Node) -> Mesh | None:
        """The mesh of the largest operand that has a mesh; among equals, the mesh that came last. A microbatch does not
        come back to a mesh whose stages it has passed."""
        placed = [n for n in tensor_inputs(node) or node.all_input_nodes if n in self.homes]
        if not placed:
            return None
        latest = max(self.stages.get(n, 0) for n in placed)
        placed = [n for n in placed if self.of_mesh.get(self.homes[n], latest) >= latest] or placed
        late = lambda n: (_size(n), self.stages.get(n, 0), self.seen.get(self.homes[n], -1))  # noqa: E731
        return self.homes[max(placed, key=late)]

    def _first_use(self, node: fx.Node) -> Mesh | None:
        """Where an op without a mesh is first used. An operand that an operator moves elsewhere was on the whole mesh
        before."""
        ahead = [u for u in node.users if u in self.homes and origin_of(u).phase != "backward"]
        users = [u for u in ahead if not _takes_elsewhere(u)]
        return self.homes[min(users, key=self.order.__getitem__)] if users else None

    def _only_use(self, node: fx.Node) -> Mesh | None:
        """Where an op of backward on numbers of the step alone, such as a cast of the scale of the loss, is used, if
        that is a single mesh."""
        meshes = {self.homes.get(user) for user in node.users}
        return meshes.pop() if len(meshes) == 1 else None

    def _with_loss(self, node: fx.Node) -> Mesh | None:
        """Where the loss is, for a metric that no forward op uses, as a count of labels."""
        results = self.step.results
        loss = next((value for (kind, _), value in results.items() if kind == "loss"), None)
        is_metric = any(kind == "metric" and value is node for (kind, _), value in results.items())
        return self.homes.get(loss) if is_metric and loss is not None else None

    def _place_buffer_updates(self, ahead: Sequence[fx.Node]) -> None:
        """What only new values of buffers need, as a count of batches, is where all other ops of its module are."""
        of_module: dict[str, set[Mesh]] = {}
        for node in ahead:
            if node in self.homes:
                of_module.setdefault(origin_of(node).module, set()).add(self.homes[node])
        needed = with_ancestors(value for (kind, _), value in self.step.results.items() if kind == "buffer")
        for node in ahead:
            meshes = of_module.get(origin_of(node).module, set())
            if node in needed and len(meshes) == 1 and node not in self.homes and node not in self.everywhere:
                self._set(node, next(iter(meshes)))

    def _place_parameters(self) -> None:
        for node, item in self.step.sources.items():
            if item.kind in ("param", "buffer"):
                ahead = [u for u in self._uses(node) if origin_of(u).phase in ("forward", "loss")]
                users = [u for u in ahead if u in self.homes or not _is_left(u)]
                home = (
                    self.homes.get(min(users, key=self.order.__getitem__), self.mesh)
                    if users
                    else self._home_of_update(item)
                )
                self.params[item.name] = self.homes[node] = home
        for node, item in self.step.sources.items():
            if item.kind in ("state", "acc"):
                self.homes[node] = self.params[item.name.partition("/")[2] if item.kind == "state" else item.name]

    def _home_of_update(self, item: Input) -> Mesh:
        """Where the last forward op is that the new value of a buffer needs: the buffer itself is known ahead."""
        value = self.step.results.get((item.kind, item.name)) if item.kind == "buffer" else None
        sources = [] if value is None else [n for n in with_ancestors([value]) if n in self.homes]
        return self.homes[max(sources, key=self.order.__getitem__)] if sources else self.mesh

    def _uses(self, node: fx.Node) -> Iterator[fx.Node]:
        """The ops that use a parameter. An operator that moves it elsewhere does not decide where it lives."""
        yield from (user for user in node.users if not _takes_elsewhere(user))

    def _update(self, node: fx.Node) -> Mesh | None:
        """An op of the update runs with its parameter; ops of only numbers of the step (bias corrections) run
        everywhere."""
        at = self._operands(node)
        return at and self.params.get(origin_of(node).module, at)

    def _backward(self, node: fx.Node) -> Mesh | None:
        call = origin_of(node).call
        if _takes_elsewhere(node):
            return self._operand_of(call)
        if node.target is aten.add.Tensor:
            return self._sum(node)
        return self.calls.get(call) or self._operands(node)  # the forward op was rewritten: use its operands

    def _operand_of(self, call: int) -> Mesh:
        """Where the operand of the pin with this number is."""
        pin = next(n for n in self.order if n.target is PIN and origin_of(n).call == call)
        return self.homes.get(tensor_inputs(pin)[0], self.mesh)

    def _sum(self, node: fx.Node) -> Mesh | None:
        """Gradients that are added up are added where they are; if that is several meshes, where their sum is used."""
        meshes = {self.homes.get(n, self.mesh) for n in tensor_inputs(node)}
        if len(meshes) == 1:
            return meshes.pop()
        last, user = node, next(iter(node.users), None)
        while user is not None and user.target is aten.add.Tensor and origin_of(user).phase == "backward":
            last, user = user, next(iter(user.users), None)
        outputs = self.step.results.items()
        name = next((name for (_, name), value in outputs if value is last), None)
        if name is not None:
            return self.params.get(name)
        users = [call for user in last.users if (call := origin_of(user).call) in self.calls]
        # of several, the latest stage is that of the value whose gradient this is
        return self.calls[max(users, key=lambda c: self.call_stages.get(c, 0))] if users else self._operands(node)


def axes_of_operators(step: StepGraph, mesh: Mesh) -> set[str]:
    """The axes of the program's mesh that operators in the model name, or exclude from the devices that they name."""
    named: set[str] = set()
    for pin in (Pin.parse(str(n.args[1])) for n in step.graph.nodes if n.target is PIN):
        named.update(pin.axes)
        if pin.mesh is not None:
            at = pin.mesh
            named.update(a for a in mesh.axis_names if a not in at.axis_names or at.size(a) != mesh.size(a))
        if pin.mesh is not None and pin.kind == "move":
            layout = Layout.parse(pin.text, pin.mesh)
            named.update(layout.sharded_axes, layout.partial_axes)
    return named


def _size(node: fx.Node) -> int:
    return spec_of(node).num_elements if isinstance(node.meta.get("spec"), Spec) else 0


def _check_busy(mapper: _Mapper, mesh: Mesh) -> None:
    """Check that every device of the program runs an op of the forward pass."""
    meshes = {m for n, m in mapper.homes.items() if n.op == "call_function"}
    used = {device for m in meshes for device in m.devices}
    open_ops = [
        n
        for n in mapper.order
        if n.op == "call_function" and not (n in mapper.homes or n in mapper.everywhere) and _size(n) > 1
    ]
    idle = [] if open_ops or not used else [d for d in mesh.devices if d not in used]
    if idle:
        raise PlanError(
            "devices of the mesh have no layer",
            where=f"mesh {mesh}",
            got=f"nothing runs on device {', '.join(map(str, idle))}",
            expected="at least a single op for every device",
            hint="place a layer there, or remove the devices from the mesh",
        )
