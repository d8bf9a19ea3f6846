"""Orders whole training steps: the rank graphs of all roles, ordered and bucketed by the simulator's figures."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from torch import fx

from meshweave.cost.hardware.profile import MachineProfile
from meshweave.cost.simulate.step import StepSeconds, default_fusion, seconds_of_step, seconds_of_tasks
from meshweave.cost.simulate.tasks import Tasks, lower_tasks
from meshweave.engine.sections import CUTS, READ_BEFORE, Cut, Kind, sections_of
from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import STARTS, WAIT, transfer
from meshweave.ir.device_program import DeviceProgram
from meshweave.ir.graph import PARTS, copied_graph, origin_of
from meshweave.ir.liveness import replaced_inputs
from meshweave.ir.rank import SYMBOLS, RankGraph, copied, prepared_values
from meshweave.ir.values import NOTHING, local_values, uneven_dims
from meshweave.optimize.overlap.decide import OverlapOptions
from meshweave.optimize.overlap.driver import order_program
from meshweave.optimize.overlap.prices import ProfileCosts, SimulatedSeconds
from meshweave.optimize.overlap.read import begin
from meshweave.optimize.overlap.report import OverlapReport

# A role as the scheduler takes it: fences between the parts of a step, a fixed order of communications between roles;
# and back.

_BETWEEN = "between roles"  # the queue of communications between roles
# phases that begin a part of the step, and the phases before them
_BEFORE: Mapping[Cut, Kind] = {"backward": "forward", "update": "backward"}


@dataclass(slots=True)
class RoleForm:
    """A copy of a role with fences where backward and update begin. `nodes`: for each node of the role that of the
    copy.

    Communications between roles keep their order in a single queue. Gradients that are not kept die at their last use,
    and the program is that of the last microbatch, which has no sums of gradients.
    """

    copy: RankGraph
    nodes: Mapping[fx.Node, fx.Node]
    microbatches: int = 1
    keeps_gradients: bool = False
    fences: dict[Cut, fx.Node] = field(default_factory=dict)

    def program(self, lines: Mapping[fx.Node, str], shared: Collection[fx.Node], with_uneven: bool) -> DeviceProgram:
        """The copy as a device program. `lines`: the queues of the role's starts; `shared`: those in which several
        roles take part; `with_uneven`: whether to find the nodes whose shapes differ between devices."""
        graph, local = self.copy.graph, local_values(self.copy)
        queues = {
            own: _BETWEEN if node in shared else lines[node]
            for node, own in self.nodes.items()
            if node in shared or node.target is transfer
        }
        uneven = uneven_dims(self.copy, local) if with_uneven else {}
        self._mark()
        return DeviceProgram(
            graph,
            local.values | dict.fromkeys(self.fences.values(), NOTHING),
            lambda start: self.copy.group_axes(str(start.args[-1])),
            replaced_inputs(self.copy).__contains__,
            {self.fences[phase]: phase == "backward" for phase in _BEFORE if phase in self.fences},
            uneven,
            is_whole=True,
            queues=queues,
            dropped=frozenset(i for i, item in enumerate(self.copy.results.items()) if self._is_dropped(*item)),
            prepared=frozenset(prepared_values(graph)),
        )

    def role(self) -> RankGraph:
        """The role with the program's present graph, in any order; the program is used up."""
        for phase, fence in self.fences.items():
            _settle(self.copy.graph, phase, fence)
        for fence in self.fences.values():
            self.copy.graph.erase_node(fence)
        return self.copy

    def _is_dropped(self, key: tuple[str, str], value: fx.Node) -> bool:
        is_gradient = key[0] == "acc" or (key[0] == "grad" and not self.keeps_gradients)
        return is_gradient and value.op == "call_function"

    def _mark(self) -> None:
        sections = sections_of(self.copy)
        for phase, first in {phase: sections.begin(phase) for phase in CUTS}.items():
            if first is not None:
                self.fences[phase] = self._fence(phase, first)

    def _fence(self, phase: Cut, first: fx.Node) -> fx.Node:
        """Make the values that the session reads after a section available there; with several microbatches all pending
        communications, because the next one begins with none."""
        kinds = READ_BEFORE[phase]
        read = {n for key, n in self.copy.results.items() if key[0] in kinds}
        before = list(takewhile(lambda n: n is not first, self.copy.graph.nodes))
        if phase == "update" and self.microbatches > 1:
            waits = (n for n in before if n.target is WAIT and origin_of(n).phase != "reduce")
            read |= {n for n in waits if set(before).isdisjoint(n.users)}
        needed = [n for n in before if n.op == "call_function" and n in read]
        with self.copy.graph.inserting_before(first):
            return self.copy.graph.call_function(begin, (phase, *needed))


def form_of(role: RankGraph, microbatches: int = 1, keeps_gradients: bool = False) -> RoleForm:
    nodes: dict[fx.Node, fx.Node] = {}
    return RoleForm(replace(role, graph=copied_graph(role.graph, nodes)), nodes, microbatches, keeps_gradients)


def _settle(graph: fx.Graph, phase: Cut, fence: fx.Node) -> None:
    """Move nodes that belong after a fence there: views, and kernels grouped with their consumers. Communications of
    backward that start before the fence stay there with their operands: they then belong to forward."""
    ahead, before = set[fx.Node](), dict[fx.Node, None]()
    for node in graph.nodes:
        if node is fence:
            break
        ahead.add(node)
        is_run = node.op == "call_function" and node.target not in SYMBOLS
        if is_run and PARTS[origin_of(node).phase] >= PARTS[phase]:
            before[node] = None
    early = set[fx.Node]()
    for node in reversed(before):
        is_needed = any(user in early or (user in ahead and user not in before) for user in node.users)
        if is_needed or (phase == "backward" and node.target in STARTS):
            early.add(node)
            node.meta["origin"] = replace(origin_of(node), phase=_BEFORE[phase])
    cursor = fence
    for node in before:
        if node not in early:
            cursor.append(node)
            cursor = node


@dataclass(slots=True)
class StepTasks:
    """The simulator's figures for the nodes of a program's roles. A fused kernel's seconds are divided evenly among its
    ops; ops that a compiler computes once cost nothing the second time."""

    seconds: dict[fx.Node, float] = field(default_factory=dict)
    usage: dict[fx.Node, tuple[tuple[str, float], ...]] = field(default_factory=dict)  # of starts
    lines: dict[fx.Node, str] = field(default_factory=dict)  # of starts: their queue
    shared: set[fx.Node] = field(default_factory=set)  # starts in which several roles take part

    def seconds_of(self, nodes: Mapping[fx.Node, fx.Node]) -> SimulatedSeconds:
        """The figures for the nodes of a device program that represent those of a role."""
        seconds = {nodes[node]: value for node, value in self.seconds.items() if node in nodes}
        return SimulatedSeconds(seconds, {nodes[node]: value for node, value in self.usage.items() if node in nodes})


def tasks_of(roles: Sequence[RankGraph], profile: MachineProfile) -> StepTasks:
    """Raises MeshweaveError for a dtype or link without a cost in the profile."""
    return _figures(lower_tasks(roles, profile, default_fusion(profile)))


def _figures(tasks: Tasks) -> StepTasks:
    costs = StepTasks()
    for number, task in enumerate(tasks.tasks):
        if task.kernel is not None:
            costs.seconds.update(dict.fromkeys(task.kernel.nodes, task.seconds / len(task.kernel.nodes)))
        elif task.kind == "copy":
            needed = (tasks.tasks[n] for n in tasks.graph.needs[number])
            starts = [task_before.node for task_before in needed if task_before.kind == "start"]
            costs.seconds.update(dict.fromkeys(starts, task.seconds))
            costs.usage.update(dict.fromkeys(starts, task.usage))
            costs.lines.update(dict.fromkeys(starts, tasks.streams[tasks.graph.stream_of[number]]))
            costs.shared.update(starts if len(task.roles) > 1 else ())
    return costs


def overlap_role(
    role: RankGraph,
    profile: MachineProfile,
    memory_cap_bytes: int | None = None,
    options: OverlapOptions | None = None,
    *,
    tasks: StepTasks | None = None,
    microbatches: int = 1,
    keeps_gradients: bool = False,
) -> tuple[RankGraph, OverlapReport]:
    """The role in the scheduler's order, its collectives merged, and a report; `role` is not changed.

    Parts of the step keep their order, but gathers that backward needs may start in forward, and a communication may be
    waited for in a later part (with several `microbatches` in the update only those that run in the last of them
    alone). `memory_cap_bytes` caps the live bytes of a device: parameters, optimizer state, batch and all values of the
    step, results beside operands. `keeps_gradients`: gradients live to the end. `tasks`: of all roles of the program.
    Raises MeshweaveError if no order is under the cap, with the least peak and its tensors, and for an op without a
    cost in the profile.
    """
    options = options or OverlapOptions()
    if options.orders:
        raise MeshweaveError("orders are not supported for whole steps", hint="omit OverlapOptions.orders")
    tasks = tasks or tasks_of((role,), profile)
    form = form_of(role, microbatches, keeps_gradients)
    costs = ProfileCosts(profile, tasks.seconds_of(form.nodes))
    program = form.program(tasks.lines, tasks.shared, with_uneven=options.bucket)
    report = order_program(program, costs, memory_cap_bytes, options)
    return form.role(), report


@dataclass(frozen=True, slots=True)
class OrderedRoles:
    """The roles of a program in an order, a report for each, and the seconds of the simulated step."""

    roles: tuple[RankGraph, ...]
    reports: tuple[OverlapReport, ...]
    seconds: StepSeconds


def overlap_roles(
    roles: Sequence[RankGraph],
    profile: MachineProfile,
    options: OverlapOptions | None = None,
    *,
    memory_cap_bytes: int | None = None,
    keeps_gradients: bool = False,
    microbatches: int = 1,
) -> OrderedRoles:
    """The roles of a program in new orders; `roles` are not changed. Options as for `overlap_role`.

    Communications between roles keep their order on every role, so that no two wait for each other. If the simulated
    step is no faster in the new orders, and the cap allows, the old orders stay.
    """
    tasks = lower_tasks(roles, profile, default_fusion(profile))
    figures = _figures(tasks)
    ordered = [
        overlap_role(
            role,
            profile,
            memory_cap_bytes,
            options,
            tasks=figures,
            microbatches=microbatches,
            keeps_gradients=keeps_gradients,
        )
        for role in roles
    ]
    new_roles, reports = tuple(role for role, _ in ordered), tuple(report for _, report in ordered)
    seconds = seconds_of_step(new_roles, profile, microbatches)
    before = seconds_of_tasks(tasks, profile) if microbatches == 1 else seconds_of_step(roles, profile, microbatches)
    note = f"the simulated step takes {before.total * 1e3:.3f} ms as it was, {seconds.total * 1e3:.3f} ms in this order"
    cap = memory_cap_bytes
    is_forced = cap is not None and any(report.peak_before > cap for report in reports)
    if seconds.total <= before.total or is_forced:
        return OrderedRoles(new_roles, tuple(replace(r, notes=(*r.notes, note)) for r in reports), seconds)
    return OrderedRoles(tuple(map(copied, roles)), tuple(r.left(note) for r in reports), before)
