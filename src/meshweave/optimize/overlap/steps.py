"""Orders whole training steps: the rank graphs of all roles, ordered and bucketed by the simulator's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from meshweave.cost.hardware.profile import MachineProfile
from meshweave.cost.simulate.step import default_fusion, seconds_of_step, times_of
from meshweave.cost.simulate.tasks import Tasks, lower_tasks
from meshweave.errors import MeshweaveError
from meshweave.ir.rank import RankGraph, copied
from meshweave.optimize.overlap.decide import OverlapOptions
from meshweave.optimize.overlap.order import order_program
from meshweave.optimize.overlap.parts import form_of
from meshweave.optimize.overlap.prices import ProfileCosts, SimulatedSeconds
from meshweave.optimize.overlap.report import OverlapReport


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
            needed = (tasks.tasks[n] for n in tasks.schedule.needs[number])
            starts = [task_before.node for task_before in needed if task_before.kind == "start"]
            costs.seconds.update(dict.fromkeys(starts, task.seconds))
            costs.usage.update(dict.fromkeys(starts, task.usage))
            costs.lines.update(dict.fromkeys(starts, tasks.streams[tasks.schedule.stream_of[number]]))
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
    seconds: float


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
    if microbatches == 1:
        before = times_of(tasks, profile.compute_slowdown).seconds
    else:
        before = seconds_of_step(roles, profile, microbatches)
    note = f"the simulated step takes {before * 1e3:.3f} ms as it was, {seconds * 1e3:.3f} ms in this order"
    cap = memory_cap_bytes
    is_forced = cap is not None and any(report.peak_before > cap for report in reports)
    if seconds <= before or is_forced:
        return OrderedRoles(new_roles, tuple(replace(r, notes=(*r.notes, note)) for r in reports), seconds)
    return OrderedRoles(tuple(map(copied, roles)), tuple(r.left(note) for r in reports), before)
