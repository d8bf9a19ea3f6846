"""Whole training steps: the rank graphs of all roles, ordered and bucketed by what the simulator says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.hardware.collectives import collective_seconds
from meshweave.hardware.profile import MachineProfile
from meshweave.ir.collectives import TABLE, transfer
from meshweave.ir.graph import StepGraph
from meshweave.ir.rank import RankGraph, copied
from meshweave.ir.values import local_values, varying
from meshweave.overlap.carry import Block, carriable, carried
from meshweave.overlap.decide import NoOrderError, OrderOptions, OverlapOptions, decide
from meshweave.overlap.figures import priced
from meshweave.overlap.merge import Merger
from meshweave.overlap.phases import Marked, marking
from meshweave.overlap.prices import SIZES, Curve, copy_rate_of
from meshweave.overlap.read import Reading, read
from meshweave.overlap.report import OverlapReport
from meshweave.simulate.kernels import Fusion
from meshweave.simulate.step import SimulateOptions, simulate_roles
from meshweave.simulate.tasks import lower_tasks

_ENOUGH = 1e-3  # a step that is faster by less is no faster
_PATIENCE = 2  # numbers of blocks in a row that bring nothing: the first may be small, as an embedding's


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How a program is scheduled, and the most bytes that a device may hold (None: a little more than before).

    `keeps_gradients`: those of a step live to its end.
    """

    options: OverlapOptions | None = None
    memory_cap_bytes: int | None = None
    keeps_gradients: bool = False


@dataclass(slots=True)
class StepTasks:
    """What the simulator of whole steps says of the nodes of a program's roles.

    A fused kernel's seconds are shared out evenly among its ops; what a compiler makes once costs nothing again.
    """

    seconds: dict[fx.Node, float] = field(default_factory=dict)
    usage: dict[fx.Node, tuple[tuple[str, float], ...]] = field(default_factory=dict)  # of starts
    lines: dict[fx.Node, str] = field(default_factory=dict)  # of starts: the queue that they go into
    shared: set[fx.Node] = field(default_factory=set)  # starts that several roles meet in


def tasks_of(roles: Sequence[RankGraph], profile: MachineProfile) -> StepTasks:
    """Raises MeshweaveError for an op, dtype or link that the profile has no cost for."""
    fusion: Fusion = "compiled" if profile.fusion == "pointwise" else "ops"
    tasks = lower_tasks(roles, profile, fusion)
    made = StepTasks()
    for number, task in enumerate(tasks.tasks):
        if task.kernel is not None:
            made.seconds.update(dict.fromkeys(task.kernel.nodes, task.seconds / len(task.kernel.nodes)))
        elif task.kind == "copy":
            needed = (tasks.tasks[n] for n in tasks.schedule.needs[number])
            starts = [one.node for one in needed if one.kind == "start"]
            made.seconds.update(dict.fromkeys(starts, task.seconds))
            made.usage.update(dict.fromkeys(starts, task.usage))
            made.lines.update(dict.fromkeys(starts, tasks.streams[tasks.schedule.stream_of[number]]))
            made.shared.update(starts if len(task.roles) > 1 else ())
    return made


@dataclass(frozen=True, slots=True)
class StepPrices:
    """The costs of one role's graph (`overlap.prices.Prices`)."""

    role: RankGraph
    profile: MachineProfile
    tasks: StepTasks
    reading: Reading

    def compute(self, node: fx.Node) -> float:
        return self.tasks.seconds.get(node, 0.0)  # a fence, or an op that a compiler makes once

    def start(self, item: int, num_bytes: float) -> float:
        return self.tasks.seconds[self.reading.nodes[item]]

    def curve(self, item: int) -> Curve:
        node = self.reading.nodes[item]
        if node.target is transfer:  # it is never merged
            return Curve((self.tasks.seconds[node],) * len(SIZES))
        mesh, axes = self.role.group_axes(str(node.args[-1]))
        row = TABLE[node.target]
        return Curve(tuple(collective_seconds(self.profile, node, row, mesh, axes, size) for size in SIZES))

    def usage(self, item: int) -> tuple[tuple[str, float], ...]:
        return self.tasks.usage[self.reading.nodes[item]]

    def copy_rate(self) -> float:
        return copy_rate_of(self.profile)


def overlap_role(
    role: RankGraph,
    profile: MachineProfile,
    memory_cap_bytes: int | None = None,
    options: OrderOptions | None = None,
    *,
    tasks: StepTasks | None = None,
    microbatches: int = 1,
    keeps_gradients: bool = False,
) -> OverlapReport:
    """Put the graph of a role in the order that the scheduler finds, in place, and merge its collectives.

    Parts of the step stay one after the other, but gathers that backward needs may start in forward, and what a
    communication brings may be waited for in a later part (with several `microbatches`
    in the update only what the last of them alone begins).
    `memory_cap_bytes` caps what a device holds at once: parameters, optimizer state, batch and all that the step makes,
    results beside operands. `keeps_gradients`: they live to the end. `tasks`: of all roles of the program.
    Raises MeshweaveError where no order is under the cap, naming the least peak and its tensors, and for an op that the
    profile has no cost for.
    """
    options = options or OrderOptions()
    options.check()
    if options.orders:
        raise MeshweaveError("whole steps take no orders that are handed in", hint="leave OrderOptions.orders out")
    found = tasks or tasks_of((role,), profile)
    values = dict(local_values(role).values)
    uneven = varying(role) if options.bucket else frozenset()
    with marking(Marked(role, values, found.lines, found.shared, microbatches, keeps_gradients)) as marked:
        reading = read(role.graph, values, options.releasable or marked.releasable())
        marked.hold(reading)
        prices = StepPrices(role, profile, found, reading)
        merger = Merger(reading, priced(reading, prices, options.communication_factor, None))
        _keep_even(merger, uneven)
        ceiling = int(profile.usable_bytes)
        return decide(merger, profile.compute_slowdown, memory_cap_bytes, options, ceiling=ceiling)


def _keep_even(merger: Merger, uneven: frozenset[fx.Node]) -> None:
    """Merge only what has one shape on every device, for a merged collective is written in numbers."""
    for key, starts in list(merger.kinds.items()):
        able = [c for c in starts if merger.reading.nodes[c].args[0] not in uneven]
        if able:
            merger.kinds[key] = able
        else:
            del merger.kinds[key]


def overlap_roles(
    roles: Sequence[RankGraph],
    profile: MachineProfile,
    scheduling: Scheduling | None = None,
    microbatches: int = 1,
    placed: StepGraph | None = None,
) -> tuple[tuple[RankGraph, ...], tuple[OverlapReport, ...]]:
    """The roles of a program in new orders, and a report for each; `roles` stay as they are.

    Communications that several roles meet in keep their order on every role, so that no two wait for each other. With
    `placed`, the graph that the roles were made of, the first blocks' parameters may be gathered in the step before
    (`overlap.carry`). Where `simulate_roles` finds the step no faster, and the cap allows, orders stay as they were.
    """
    how = scheduling or Scheduling()
    plain = _ordered(roles, profile, how, microbatches)
    found = plain if placed is None else _carrying(roles, placed, plain, profile, how, microbatches)
    before = simulate_roles(roles, profile, SimulateOptions(microbatches=microbatches)).seconds
    told = f"the simulated step takes {before * 1e3:.3f} ms as it was, {found.seconds * 1e3:.3f} ms in this order"
    cap = how.memory_cap_bytes
    is_forced = cap is not None and any(r.peak_before > cap for r in found.reports)
    if found.seconds <= before or is_forced:
        return found.roles, tuple(replace(r, notes=(*r.notes, told)) for r in found.reports)
    return tuple(map(copied, roles)), tuple(r.left(told) for r in plain.reports)


@dataclass(frozen=True, slots=True)
class _Ordered:
    """The roles of a program in an order, a report for each, and the simulated step."""

    roles: tuple[RankGraph, ...]
    reports: tuple[OverlapReport, ...]
    seconds: float


def _ordered(
    roles: Sequence[RankGraph],
    profile: MachineProfile,
    how: Scheduling,
    microbatches: int,
    caps: Sequence[int | None] | None = None,
) -> _Ordered:
    """`caps` are those of each role in bytes; without them all have that of `how`."""
    made = tuple(copied(role) for role in roles)
    tasks = tasks_of(made, profile)
    reports = tuple(
        overlap_role(
            role,
            profile,
            cap,
            how.options,
            tasks=tasks,
            microbatches=microbatches,
            keeps_gradients=how.keeps_gradients,
        )
        for role, cap in zip(made, caps or [how.memory_cap_bytes] * len(made), strict=True)
    )
    return _Ordered(made, reports, simulate_roles(made, profile, SimulateOptions(microbatches=microbatches)).seconds)


def _carrying(
    roles: Sequence[RankGraph],
    placed: StepGraph,
    plain: _Ordered,
    profile: MachineProfile,
    how: Scheduling,
    microbatches: int,
) -> _Ordered:
    """The fastest of the step as it is and with the parameters of the first 1, 2, 4, ... blocks gathered in the step
    before, all under the caps of `plain`; with the number of blocks that the options say where they say one."""
    wanted = (how.options or OverlapOptions()).carry
    blocks = [carriable(role, placed) for role in roles]
    caps = [report.cap_bytes for report in plain.reports]
    best, tried, num_worse = plain, list[str](), 0
    for count in _counts(wanted, max(map(len, blocks))):
        taken = [held[:count] for held in blocks]
        made = [carried(r, [g for b in held for g in b.gathered]) for r, held in zip(roles, taken, strict=True)]
        try:
            found = _ordered(made, profile, how, microbatches, caps)
        except NoOrderError:
            if wanted != "auto":
                raise
            tried.append(f"{count} blocks no order is under the cap")
            break
        tried.append(f"{count} blocks it takes {found.seconds * 1e3:.3f} ms")
        num_worse = num_worse + 1 if found.seconds > best.seconds * (1 - _ENOUGH) else 0
        if found.seconds < best.seconds or wanted != "auto":
            notes = [_told(held, plain, found, microbatches) for held in taken]
            rows = zip(found.reports, plain.reports, notes, strict=True)
            best = replace(found, reports=tuple(_since(*row) for row in rows))
        if num_worse == _PATIENCE:
            break
    if best is plain and tried:
        note = f"no parameters are gathered in the step before; with those of the first {'; of '.join(tried)}"
        return replace(plain, reports=tuple(replace(r, notes=(*r.notes, note)) for r in plain.reports))
    return best


def _counts(wanted: int | str, most: int) -> list[int]:
    """The numbers of blocks to try, where at most `most` are there."""
    if isinstance(wanted, int):
        return [min(wanted, most)] if min(wanted, most) else []
    found = [2**k for k in range(most.bit_length()) if 2**k < most]
    return [*found, most] if most else []


def _told(blocks: Sequence[Block], plain: _Ordered, found: _Ordered, microbatches: int) -> str:
    """What a role takes over from the step before, and what that brings."""
    if not blocks:
        return "nothing is carried over from the step before"
    names = ", ".join(block.name or "the model itself" for block in blocks)
    once = ", once a step instead of once a microbatch" if microbatches > 1 else ""
    return (
        f"the step before gathers the parameters of {names} among its updates{once}: the simulated step takes "
        f"{plain.seconds * 1e3:.3f} ms without, {found.seconds * 1e3:.3f} ms with that"
    )


def _since(report: OverlapReport, plain: OverlapReport, note: str) -> OverlapReport:
    """The report of a role that carries something over, against the role as it was."""
    return replace(
        report,
        seconds_before=plain.seconds_before,
        exposed_before=plain.exposed_before,
        peak_before=plain.peak_before,
        notes=(*report.notes, note),
    )
