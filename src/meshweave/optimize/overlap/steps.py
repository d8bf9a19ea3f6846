"""Orders whole training steps: the rank graphs of all roles, ordered and bucketed by the simulator's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import fx

from meshweave.cost.hardware.profile import MachineProfile
from meshweave.cost.simulate.step import default_fusion, seconds_of_step, times_of
from meshweave.cost.simulate.tasks import Tasks, lower_tasks
from meshweave.errors import MeshweaveError
from meshweave.ir.graph import StepGraph
from meshweave.ir.rank import RankGraph, copied
from meshweave.optimize.overlap.decide import NoOrderError, OverlapOptions
from meshweave.optimize.overlap.order import order_program
from meshweave.optimize.overlap.parts import form_of
from meshweave.optimize.overlap.prices import ProfileCosts, SimulatedSeconds
from meshweave.optimize.overlap.report import OverlapReport
from meshweave.optimize.prefetch.carry import GatheredBlock, carriable, carry_gathers

_ENOUGH = 1e-3  # a gain below this share does not count
_PATIENCE = 2  # failures in a row before giving up: the first block may be small, such as an embedding


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How a program is scheduled, and the most bytes on a device (None: a little more than before).
    `keeps_gradients`: gradients of a step live to its end. `carry`: for how many blocks of the model, from the first,
    the previous step gathers parameters during its updates; "auto": as many as shorten the simulated step."""

    options: OverlapOptions | None = None
    memory_cap_bytes: int | None = None
    keeps_gradients: bool = False
    carry: int | Literal["auto"] = "auto"


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
    scheduling: Scheduling | None = None,
    microbatches: int = 1,
    placed: StepGraph | None = None,
) -> OrderedRoles:
    """The roles of a program in new orders; `roles` are not changed.

    Communications between roles keep their order on every role, so that no two wait for each other. With `placed`,
    the graph that the roles were expanded from, the first blocks' parameters may be gathered in the previous step
    (`gathers.carry`). If `simulate_roles` is no faster for the new orders, and the cap allows, the old orders stay.
    """
    how = scheduling or Scheduling()
    tasks = lower_tasks(roles, profile, default_fusion(profile))
    plain = _order_roles(roles, profile, how, microbatches, _figures(tasks))
    ordered = plain if placed is None else _carrying(roles, placed, plain, profile, how, microbatches)
    if microbatches == 1:
        before = times_of(tasks, profile.compute_slowdown).seconds
    else:
        before = seconds_of_step(roles, profile, microbatches)
    note = f"the simulated step takes {before * 1e3:.3f} ms as it was, {ordered.seconds * 1e3:.3f} ms in this order"
    cap = how.memory_cap_bytes
    is_forced = cap is not None and any(r.peak_before > cap for r in ordered.reports)
    if ordered.seconds <= before or is_forced:
        return replace(ordered, reports=tuple(replace(r, notes=(*r.notes, note)) for r in ordered.reports))
    return OrderedRoles(tuple(map(copied, roles)), tuple(r.left(note) for r in plain.reports), before)


def _order_roles(
    roles: Sequence[RankGraph],
    profile: MachineProfile,
    how: Scheduling,
    microbatches: int,
    tasks: StepTasks,
    caps: Sequence[int | None] | None = None,
) -> OrderedRoles:
    """`caps` are those of each role in bytes; without them all have that of `how`."""
    ordered = [
        overlap_role(
            role,
            profile,
            cap,
            how.options,
            tasks=tasks,
            microbatches=microbatches,
            keeps_gradients=how.keeps_gradients,
        )
        for role, cap in zip(roles, caps or [how.memory_cap_bytes] * len(roles), strict=True)
    ]
    ordered_roles = tuple(role for role, _ in ordered)
    reports = tuple(report for _, report in ordered)
    return OrderedRoles(ordered_roles, reports, seconds_of_step(ordered_roles, profile, microbatches))


def _carrying(
    roles: Sequence[RankGraph],
    placed: StepGraph,
    plain: OrderedRoles,
    profile: MachineProfile,
    how: Scheduling,
    microbatches: int,
) -> OrderedRoles:
    """The fastest variant: the step as it is, or with the parameters of the first 1, 2, 4, ... blocks gathered in the
    previous step, all under the caps of `plain`; with a fixed number of blocks if the options have one."""
    wanted = how.carry
    blocks = [carriable(role, placed) for role in roles]
    caps = [report.cap_bytes for report in plain.reports]
    best, tried, num_worse = plain, list[str](), 0
    for count in _counts(wanted, max(map(len, blocks))):
        chosen = [gathered_blocks[:count] for gathered_blocks in blocks]
        carrying = [
            carry_gathers(r, [g for b in gathered_blocks for g in b.gathered])
            for r, gathered_blocks in zip(roles, chosen, strict=True)
        ]
        try:
            ordered = _order_roles(carrying, profile, how, microbatches, tasks_of(carrying, profile), caps)
        except NoOrderError:
            if wanted != "auto":
                raise
            tried.append(f"{count} blocks no order is under the cap")
            break
        tried.append(f"{count} blocks it takes {ordered.seconds * 1e3:.3f} ms")
        num_worse = num_worse + 1 if ordered.seconds > best.seconds * (1 - _ENOUGH) else 0
        if ordered.seconds < best.seconds or wanted != "auto":
            notes = [_carry_note(gathered_blocks, plain, ordered, microbatches) for gathered_blocks in chosen]
            rows = zip(ordered.reports, plain.reports, notes, strict=True)
            best = replace(ordered, reports=tuple(_since(*row) for row in rows))
        if num_worse == _PATIENCE:
            break
    if best is plain and tried:
        note = f"no parameters are gathered in the previous step; with those of the first {'; of '.join(tried)}"
        return replace(plain, reports=tuple(replace(r, notes=(*r.notes, note)) for r in plain.reports))
    return best


def _counts(wanted: int | str, most: int) -> list[int]:
    """The numbers of blocks to try, if there are `most` blocks."""
    if isinstance(wanted, int):
        return [min(wanted, most)] if min(wanted, most) else []
    counts = [2**k for k in range(most.bit_length()) if 2**k < most]
    return [*counts, most] if most else []


def _carry_note(blocks: Sequence[GatheredBlock], plain: OrderedRoles, ordered: OrderedRoles, microbatches: int) -> str:
    """What a role carries over from the previous step, and the gain."""
    if not blocks:
        return "nothing is carried over from the previous step"
    names = ", ".join(block.name or "the model itself" for block in blocks)
    once = ", once a step instead of once a microbatch" if microbatches > 1 else ""
    return (
        f"the previous step gathers the parameters of {names} during its updates{once}: the simulated step takes "
        f"{plain.seconds * 1e3:.3f} ms without, {ordered.seconds * 1e3:.3f} ms with that"
    )


def _since(report: OverlapReport, plain: OverlapReport, note: str) -> OverlapReport:
    """The report of a role that carries values over, relative to the original role."""
    return replace(
        report,
        seconds_before=plain.seconds_before,
        exposed_before=plain.exposed_before,
        peak_before=plain.peak_before,
        notes=(*report.notes, note),
    )
