"""Rank graphs as tasks with durations: kernels, starts and waits in a compute stream per role, communications in
channels.

The cost grows with roles and nodes, never with devices: a single device represents its role.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Any, Literal

import torch
from torch import fx

from meshweave.cost.hardware.collective_seconds import collective_seconds, host_seconds
from meshweave.cost.hardware.profile import MachineProfile
from meshweave.cost.simulate.buckets import Buckets, Member, check_buckets, group_members
from meshweave.cost.simulate.kernels import Fusion, Kernel, is_compiled, kernels_of
from meshweave.cost.simulate.matmuls import PLAIN, MatmulStyle, Narrow, is_of_parameter, with_sums_in
from meshweave.engine.actions import Action, Schedule
from meshweave.engine.for_roles import scheduled
from meshweave.engine.match import Channel, Start, match_roles, match_transfer, plain_args
from meshweave.engine.pairs import (
    PairedItem,
    PairKey,
    PairTurns,
    groups_of_actions,
    in_turns,
    key_of_pair,
    turns_of_pair,
)
from meshweave.engine.sections import PASSES, Kind, Sections
from meshweave.engine.task_graph import TaskGraph
from meshweave.ir.collectives import ALL_GATHER, REDUCE_SCATTER, STARTS, TABLE, TRANSFER, WAIT, transfer
from meshweave.ir.graph import origin_of
from meshweave.ir.rank import RankGraph, Transfer
from meshweave.ir.values import Local, local_values
from meshweave.ir.work import Matmul, MemoryWork

Starts = dict[int, int]  # role -> its start, as a task
ANY_STAGE = -1  # of what the stages of a role do together
# Merged reductions are waited for as a whole, where the last of their gradients is: FSDP waits for a block's when it
# issues the next one (torch 2.13, _fsdp_param_group.py: post_backward), DDP and Megatron at the end of backward.
_REDUCTIONS = ("reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedTask:
    """A task of a stream. `seconds` is its duration on an otherwise idle machine, `usage` the share of each link level
    that it then takes. A start or a wait marks where a communication is in the order of its role; it takes no time if
    streams are those of an accelerator."""

    kind: Literal["kernel", "start", "wait", "copy"]
    node: fx.Node
    roles: tuple[int, ...]
    seconds: float
    microbatch: int
    kernel: Kernel | None = None
    usage: tuple[tuple[str, float], ...] = ()
    op: str = ""  # of a copy, named as in profiles
    group: str = ""
    received: float = 0.0  # bytes that a device receives
    issued: float = 0.0  # earliest launch by the processor, in seconds from the step's begin
    flops: float = 0.0
    action: Action | None = None  # in which its role runs it; None for a whole copy


@dataclass(frozen=True, slots=True)
class RoleTasks:
    """A role in the simulator: its values, its kernels, what its stream runs (kernels, starts and waits in order, each
    with its section and stage), and its tasks in the stream's order."""

    role: RankGraph
    local: Local
    kernels: tuple[Kernel, ...]
    items: tuple[tuple[Kind, int, Kernel | fx.Node], ...] = ()
    tasks: tuple[int, ...] = ()

    def storages_read(self, task: SimulatedTask) -> frozenset[int]:
        """The storages of a task's operands."""
        operands = task.node.all_input_nodes if task.kernel is None else task.kernel.reads
        return frozenset(x.storage for n in operands for x in self.local.values.get(n, ()))

    def storages_written(self, task: SimulatedTask) -> frozenset[int]:
        """The storages of a task's results."""
        nodes = (task.node,) if task.kernel is None else task.kernel.writes
        return frozenset(x.storage for n in nodes for x in self.local.values[n])


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """A task graph and its tasks. Stream i < len(roles) is role i's compute; the others are channels. The update is a
    task of the last microbatch.
    `flat`: the starts and waits of collectives that share a flat buffer, bucket by bucket (see `simulate.memory`)."""

    graph: TaskGraph
    tasks: tuple[SimulatedTask, ...]
    roles: tuple[RoleTasks, ...]
    streams: tuple[str, ...]
    flat: tuple[tuple[tuple[int, int], ...], ...] = ()


@dataclass(slots=True)
class _TaskLowering:
    graphs: Sequence[RankGraph]
    profile: MachineProfile
    roles: list[RoleTasks]
    schedule: Schedule
    style: MatmulStyle = PLAIN
    buckets: Buckets = "none"
    fusion: Fusion = "ops"
    blocking_messages: bool = False
    narrow: list[Narrow] = field(init=False)  # of each role, if matmuls have a dtype of their own
    ranges: list[tuple[int, int]] = field(default_factory=list)  # of each role, its first task and its last
    priced: dict[str, SimulatedTask] = field(default_factory=dict)  # of transfers, by key
    tasks: list[SimulatedTask] = field(default_factory=list)
    needs: list[list[int]] = field(default_factory=list)
    waits: dict[int, int] = field(default_factory=dict)  # start -> its wait
    following: dict[int, int] = field(default_factory=dict)  # where senders wait: a task -> the next of its stream
    paired: dict[PairKey, PairTurns] = field(default_factory=dict)
    flat: list[tuple[tuple[int, int], ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        is_narrow = self.style.dtype is not None
        self.narrow = [Narrow(self.style, r.role, r.local, self.fusion) for r in self.roles] if is_narrow else []

    def run(self) -> Tasks:
        streams = [self.stream(i) for i in range(len(self.graphs))]
        self.ranges = [(min(stream, default=0), max(stream, default=0)) for stream in streams]
        if self.is_blocking():
            self.following = {task: after for stream in streams for task, after in pairwise(stream)}
        copies = self.profile.matmul.float8_copies
        values = [narrow.in_memory(copies) for narrow in self.narrow] or [role.local for role in self.roles]
        roles = tuple(
            replace(role, tasks=tuple(stream), local=local)
            for role, stream, local in zip(self.roles, streams, values, strict=True)
        )
        names = [f"compute {i}" if len(self.graphs) > 1 else "compute" for i in range(len(self.graphs))]
        lines: dict[Any, list[tuple[int, Channel, Starts]]] = {}
        for channel, numbered in match_roles(self.graphs, [self.starts(stream) for stream in streams]).table.items():
            for met in numbered:
                starts = {role: met[role].task for role in sorted(met)}
                line = self.line_of(channel, starts)
                senders, _ = self.ends(str(channel[0]), str(channel[1]), starts)
                lines.setdefault(line, []).append((min(senders), channel, starts))
        for line, waiting in lines.items():
            names.append(self.line_name(line))
            waiting.sort(key=lambda entry: entry[0])
            streams.append([task for bucket in self.bucketed(waiting) for task in self.copies(bucket)])
        graph = TaskGraph(
            tuple(map(tuple, streams)), tuple(tuple(dict.fromkeys(n)) for n in self.needs), (0,) * len(self.tasks)
        )
        return Tasks(
            graph=graph,
            tasks=tuple(self.tasks),
            roles=roles,
            streams=tuple(names),
            flat=tuple(self.flat),
        )

    def add(self, task: SimulatedTask) -> int:
        self.tasks.append(task)
        self.needs.append([])
        return len(self.tasks) - 1

    def stream(self, number: int) -> list[int]:
        """The tasks of a role's compute stream, action by action."""
        begun: dict[tuple[fx.Node, int], int] = {}
        numbers, actions, last = list[int](), list[Action](), self.schedule.last_microbatch
        for group in groups_of_actions(self.schedule.of_role[number]):
            parts = [[*self.items_of(number, action)] for action in group]
            turns = self.turns(number, group, parts)
            for at, item in in_turns(parts, turns, _name_of):
                microbatch = min(group[at].microbatch, last)
                numbers.append(self.add(self.task(number, item, microbatch)))
                actions.append(group[at])
                if isinstance(item, Kernel):
                    continue
                if item.target is WAIT:
                    started = item.args[0]
                    assert isinstance(started, fx.Node)
                    self.waits.setdefault(begun[started, microbatch], numbers[-1])
                else:
                    begun[item, microbatch] = numbers[-1]
        launches = launch_times([self.tasks[task].node for task in numbers], self.fusion, self.profile.eager_s)
        for task, issued, action in zip(numbers, launches, actions, strict=True):
            self.tasks[task] = replace(self.tasks[task], issued=issued, action=action)
        return numbers

    def turns(self, number: int, group: Sequence[Action], parts: Sequence[Sequence[Kernel | fx.Node]]) -> PairTurns:
        """The turns of the actions of a role that run as one."""
        if len(group) == 1:
            return ((0, ""),)
        key = key_of_pair(number, group)
        if key not in self.paired:
            self.paired[key] = turns_of_pair([[self.timed(number, item) for item in part] for part in parts])
        return self.paired[key]

    def timed(self, number: int, item: Kernel | fx.Node) -> PairedItem:
        """The times of what a role runs, alone."""
        if isinstance(item, Kernel):
            return PairedItem(_name_of(item), self.kernel(number, item, 0).seconds)
        if item.target is WAIT:
            return PairedItem(item.name, start=item.all_input_nodes[0].name)
        if item.target is transfer:  # receives begin an action before
            return PairedItem(item.name)
        start = self.task(number, item, 0)
        return PairedItem(item.name, 0.0, self.collective(str(item.args[-1]), (number,), [start]).seconds)

    def items_of(self, number: int, action: Action) -> Iterator[Kernel | fx.Node]:
        """What a role runs in an action, in order."""
        kinds: set[str] = {*action.kinds, "input", "weight"} if action.name == "backward" else {*action.kinds}
        for kind, stage, item in self.roles[number].items:
            if kind in kinds and (stage in (action.stage, ANY_STAGE)):
                yield item

    def task(self, number: int, item: Kernel | fx.Node, microbatch: int) -> SimulatedTask:
        if isinstance(item, Kernel):
            return self.kernel(number, item, microbatch)
        kind: Literal["wait", "start"] = "wait" if item.target is WAIT else "start"
        return SimulatedTask(
            kind=kind, node=item, roles=(number,), seconds=self.profile.empty_op_s, microbatch=microbatch
        )

    def starts(self, stream: Sequence[int]) -> Iterator[Start]:
        """The starts of a role, for those of the other roles to match."""
        args: dict[fx.Node, tuple[Any, ...]] = {}
        # stages may take microbatches in other orders: what belongs together has the same microbatch
        for number in sorted(stream, key=lambda n: self.tasks[n].microbatch):
            task = self.tasks[number]
            if task.kind == "start":
                if task.node not in args:
                    args[task.node] = plain_args(task.node)
                devices = self.graphs[task.roles[0]].devices
                yield Start(number, self.waits.get(number, -1), task.node, devices, args[task.node])

    def kernel(self, number: int, kernel: Kernel, microbatch: int) -> SimulatedTask:
        works = tuple(self.narrow[number].works(kernel, microbatch)) if self.narrow else kernel.works
        seconds = sum(self.profile.compute_seconds(work) for work in works)
        flops = sum(work.flops for work in works if not isinstance(work, MemoryWork))
        return SimulatedTask(
            kind="kernel",
            node=kernel.node,
            roles=(number,),
            seconds=seconds,
            microbatch=microbatch,
            kernel=kernel,
            flops=flops,
        )

    def line_of(self, channel: Channel, starts: Starts) -> tuple[Any, ...]:
        """The stream in which a channel's copies run, one after the other: transfers between the same meshes, or over
        the same axes, share a stream."""
        kind, key = channel[:2]
        if kind == "group":
            return (kind, key, *starts)
        endpoints = match_transfer(self.graphs, key)
        return (kind, endpoints.source.mesh, endpoints.target.mesh, endpoints.axes, *starts)

    def line_name(self, line: tuple[Any, ...]) -> str:
        if line[0] == "group":
            name, roles = f"comm {line[1]}", line[2:]
        elif line[3]:
            name, roles = f"permute {','.join(line[3])}", line[4:]
        else:
            name, roles = f"transfer {line[1].devices[0]} -> {line[2].devices[0]}", line[4:]
        if len(self.graphs) == 1:
            return name
        return f"{name} (role{'s' * (len(roles) > 1)} {', '.join(map(str, roles))})"

    def bucketed(self, waiting: Sequence[tuple[int, Channel, Starts]]) -> Iterator[list[tuple[Channel, Starts]]]:
        """The starts on a stream, grouped by bucket. Only communications within a role are bucketed."""
        members = [
            Member(task.node, task.microbatch, start, self.waits.get(start, -1), self.bytes_of(task))
            for start, _, _ in waiting
            for task in (self.tasks[start],)
        ]
        is_own = all(channel[0] == "group" and len(starts) == 1 for _, channel, starts in waiting)
        for bucket in group_members(members, self.buckets if is_own else "none"):
            yield [waiting[i][1:] for i in bucket]

    def copies(self, bucket: Sequence[tuple[Channel, Starts]]) -> tuple[int, ...]:
        """The task of a transfer, or of the merged collectives of a bucket; two where it runs beside a matmul: the
        first of its chunks, which the matmul waits for, and the rest, or all but the last, and that, which waits for
        the matmul."""
        task = self.copy(bucket)
        matmul = self.matmul_beside(bucket) if self.style.in_chunks else None
        if matmul is None:
            return (task,)
        ((role, start),) = bucket[0][1].items()
        copy = replace(self.tasks[task], action=self.tasks[start].action)
        mesh, axes = self.graphs[role].group_axes(str(copy.node.args[-1]))
        share = 1 / mesh.flat_size(axes)
        is_gather = copy.op == "all_gather"
        first, second = (share, 1 - share) if is_gather else (1 - share, share)
        self.tasks[task] = replace(copy, seconds=first * copy.seconds, received=first * copy.received)
        rest = self.add(replace(copy, seconds=second * copy.seconds, received=second * copy.received))
        self.needs[rest].append(start)
        if is_gather:
            self.needs[matmul + 1].append(rest)
        else:
            wait = self.waits[start]
            self.needs[task] = [matmul - 1]
            self.needs[wait] = [rest if need == task else need for need in self.needs[wait]]
        return task, rest

    def matmul_beside(self, bucket: Sequence[tuple[Channel, Starts]]) -> int | None:
        """The matmul that reads next what a collective of activations gathers, or that computes just before what it
        reduces."""
        (channel, starts), *others = bucket
        if channel[0] != "group" or others or len(starts) > 1:
            return None
        ((role, start),) = starts.items()
        wait, its = self.waits.get(start), self.roles[role]
        begin, end = self.ranges[role]
        node = self.tasks[start].node
        if wait is None or not begin < start <= wait < end - 2:
            return None
        if node.target is ALL_GATHER.op:
            number, storages = wait + 1, its.storages_written(self.tasks[wait])
            is_fed = not its.storages_read(self.tasks[number]).isdisjoint(storages)
        elif node.target is REDUCE_SCATTER.op:
            number = start - 1
            is_fed = not its.storages_written(self.tasks[number]).isdisjoint(its.storages_read(self.tasks[start]))
        else:
            return None
        kernel = self.tasks[number].kernel
        is_matmul = kernel is not None and any(isinstance(work, Matmul) for work in kernel.works)
        is_beside = is_fed and is_matmul and number > begin and not is_of_parameter(node, its.role)
        return number if is_beside else None

    def copy(self, bucket: Sequence[tuple[Channel, Starts]]) -> int:
        """The task of a transfer, or of the merged collectives of a bucket."""
        (kind, key, *_), starts = bucket[0]
        roles = tuple(starts)
        first = self.tasks[starts[roles[0]]]
        if kind == "transfer":
            self.priced[key] = self.priced.get(key) or self.transferred(key, roles, first)
            copy = replace(self.priced[key], node=first.node, microbatch=first.microbatch)
        else:
            copy = self.collective(key, roles, [self.tasks[each[roles[0]]] for _, each in bucket])
        copy, host = self.split(copy)
        task = self.add(copy)
        waiting = list[int]()
        for _, each in bucket:
            senders, takers = self.ends(kind, key, each)
            self.needs[task] += senders
            for start in senders if kind == "transfer" else ():
                if start in self.following:
                    self.needs[self.following[start]].append(task)
            waiting += [self.waits[start] for start in takers if start in self.waits]
        is_reduced = len(bucket) > 1 and copy.op in _REDUCTIONS
        for wait in [max(waiting)] if is_reduced and waiting else waiting:
            self.needs[wait].append(task)
            self.lengthen(wait, host)
        waits = [(s, self.waits[s]) for _, each in bucket for s in each.values() if s in self.waits]
        if self.buckets == "blocks" and kind == "group" and waits:
            self.flat.append(tuple(waits))
        if len(bucket) > 1 and copy.op == "all_gather" and waits:
            self.lengthen(min(wait for _, wait in waits), self.unpacking(copy, bucket))
        return task

    def lengthen(self, task: int, seconds: float) -> None:
        self.tasks[task] = replace(self.tasks[task], seconds=self.tasks[task].seconds + seconds)

    def unpacking(self, task: SimulatedTask, bucket: Sequence[tuple[Channel, Starts]]) -> float:
        """Seconds in which parameters are copied out of a bucket's buffer. Gradients are packed by the cast that the
        program has before their reduction."""
        operand = sum(self.bytes_of(self.tasks[start]) for _, starts in bucket for start in starts.values())
        size = int(2 * (operand + task.received))
        return self.profile.compute_seconds(MemoryWork("copy", size, size // 2, torch.uint8))

    def is_blocking(self) -> bool:
        """Whether senders wait for their messages; not where a role has several stages, of which another goes on."""
        stages = [{action.stage for action in its if action.name in PASSES} for its in self.schedule.of_role]
        is_single = all(len(own) == 1 for own in stages)
        return self.blocking_messages and self.schedule.is_pipelined and is_single

    def bytes_of(self, start: SimulatedTask) -> float:
        """A device's operand bytes in a collective; 0 for a transfer."""
        operand, number = start.node.args[0], start.roles[0]
        value = self.roles[number].local.single(operand) if isinstance(operand, fx.Node) else None
        size = float(value.num_elements * value.dtype.itemsize) if value is not None else 0.0
        return self.narrow[number].moved_bytes(start.node, size) if self.narrow else size

    def split(self, copy: SimulatedTask) -> tuple[SimulatedTask, float]:
        """A copy without the waiting role's part, and that part: sums and copies of a runtime on a processor."""
        if copy.op == TRANSFER.name:
            return copy, 0.0
        mesh, axes = self.graphs[copy.roles[0]].group_axes(str(copy.node.args[-1]))
        host = host_seconds(self.profile, TABLE[copy.node.target], mesh, axes, copy.seconds)
        return replace(copy, seconds=copy.seconds - host), host

    def ends(self, kind: str, key: str, starts: dict[int, int]) -> tuple[list[int], list[int]]:
        """The starts that a copy needs and those whose waits need it: all. In a pipelined schedule a transfer is
        buffered: it needs its senders and blocks its receivers."""
        every = list(starts.values())
        if kind == "group" or not self.schedule.is_pipelined:
            return every, every
        channel = match_transfer(self.graphs, key)
        senders = [
            s for r, s in starts.items() if not set(self.graphs[r].devices).isdisjoint(channel.source.mesh.devices)
        ]
        takers = [
            s for r, s in starts.items() if not set(self.graphs[r].devices).isdisjoint(channel.target.mesh.devices)
        ]
        return senders, takers

    def collective(self, key: str, roles: Sequence[int], starts: Sequence[SimulatedTask]) -> SimulatedTask:
        """The task of the collectives `starts`, merged over all of their bytes."""
        node, number = starts[0].node, roles[0]
        mesh, axes = self.graphs[number].group_axes(key)
        row = TABLE[node.target]
        size, count, group = sum(map(self.bytes_of, starts)), mesh.flat_size(axes), ",".join(axes)
        seconds = collective_seconds(self.profile, node, row, mesh, axes, size)
        usage = self.profile.usage(row.cost_name, mesh, axes) if seconds else ()
        received = self.profile.bytes_received(row.cost_name, count, row.cost_bytes(node, count, size))
        microbatch = starts[0].microbatch
        return SimulatedTask(
            kind="copy",
            node=node,
            roles=tuple(roles),
            seconds=seconds,
            microbatch=microbatch,
            kernel=None,
            usage=usage,
            op=row.name,
            group=group,
            received=received,
        )

    def transferred(self, key: str, roles: Sequence[int], start: SimulatedTask) -> SimulatedTask:
        """A receiver and a sender represent all: the first devices of the meshes that have anything to move."""
        channel = match_transfer(self.graphs, key)
        item = channel.spec.dtype.itemsize
        routes = channel.routes
        best, usage, received = 0.0, tuple[tuple[str, float], ...](), 0.0
        for messages in _samples(channel):
            crossing = [m for m in messages if m.sender != m.receiver]
            sizes = [m.box.num_elements * item for m in crossing]
            ends = [(m.sender, m.receiver) for m in crossing]
            latency = max((self.profile.transfer_seconds(a, b, 0) for a, b in ends), default=0.0)
            flows = (
                self.profile.transfer_seconds(a, b, n) - self.profile.transfer_seconds(a, b, 0)
                for (a, b), n in zip(ends, sizes, strict=True)
            )
            seconds = latency + sum(flows)
            if seconds > best:
                best, usage = seconds, self.profile.transfer_usage(*ends[0])
        received = max((float(routes.bytes_received(d, item)) for d in channel.target.mesh.devices[:64]), default=0.0)
        return SimulatedTask(
            kind="copy",
            node=start.node,
            roles=tuple(roles),
            seconds=best,
            microbatch=start.microbatch,
            kernel=None,
            usage=usage,
            op="permute" if channel.axes else "transfer",
            group=",".join(channel.axes),
            received=received,
        )


def _name_of(item: Kernel | fx.Node) -> str:
    return (item.node if isinstance(item, Kernel) else item).name


def _samples(transfer: Transfer) -> Iterator[Sequence[Any]]:
    routes = transfer.routes
    yield from (routes.received_by(device) for device in transfer.target.mesh.devices[:16])
    yield from (routes.sent_by(device) for device in transfer.source.mesh.devices[:16])


def _items(role: Sections, kernels: Sequence[Kernel]) -> Iterator[tuple[Kind, int, Kernel | fx.Node]]:
    """Kernels, starts and waits of a role in order, each with its section and stage. A kernel stands on the side of the
    begin of backward on which its position is."""
    places = {node: float(i) for i, node in enumerate(role.role.graph.nodes)}
    backward, update = ((places[n] if (n := role.begin(kind)) else inf) for kind in ("backward", "update"))
    items: list[tuple[float, Kernel | fx.Node]] = [(k.position, k) for k in kernels]
    items += [(places[n], n) for n in places if n.target in STARTS or n.target is WAIT]
    items.sort(key=lambda item: item[0])
    for position, item in items:
        node = item.node if isinstance(item, Kernel) else item
        if node not in role.kinds:  # a wait for what was sent, in a pipeline
            continue
        kind = role.kinds[node]
        if position >= update and (isinstance(item, Kernel) or not role.stages or kind == "update"):
            kind = "update"
        elif kind in ("forward", "backward", "update"):
            kind = "forward" if position < backward else "backward"
        elif kind in ("input", "weight") and position < backward:
            kind = "forward"
        is_of_stage = bool(role.stages) and kind not in ("tell", "report", "total", "update")
        yield kind, role.stages[node] if is_of_stage else ANY_STAGE, item


def role_tasks(its: Sections, profile: MachineProfile, fusion: Fusion, style: MatmulStyle = PLAIN) -> RoleTasks:
    """What the stream of a role runs on a machine."""
    values = with_sums_in(local_values(its.role), its.role, style.sum_dtype)
    kernels, local = kernels_of(its.role, values, fusion, profile.fusion == "none", profile.update, style.adds)
    return RoleTasks(its.role, local, tuple(kernels), tuple(_items(its, kernels)))


def lower_tasks(
    graphs: Sequence[RankGraph],
    profile: MachineProfile,
    fusion: Fusion,
    microbatches: int = 1,
    pipeline: Schedule | None = None,
    style: MatmulStyle = PLAIN,
    buckets: Buckets = "none",
    blocking_messages: bool = False,
) -> Tasks:
    """The tasks of a step on a machine. `pipeline`: the schedule of its stages, if they work on several microbatches at
    a time; for `buckets` see `simulate.buckets`. `blocking_messages`: what is sent from stage to stage is waited for
    before the sender goes on."""
    check_buckets(buckets)
    sections, actions = scheduled(graphs, pipeline, microbatches)
    roles = [role_tasks(its, profile, fusion, style) for its in sections]
    return _TaskLowering(graphs, profile, roles, actions, style, buckets, fusion, blocking_messages).run()


def pair_turns(
    graphs: Sequence[RankGraph], profile: MachineProfile, fusion: Fusion, pipeline: Schedule, microbatches: int
) -> dict[PairKey, PairTurns]:
    """The turns of the actions that run as one in a schedule of the stages, on a machine."""
    sections, actions = scheduled(graphs, pipeline, microbatches)
    if not any(action.with_next for its in actions.of_role for action in its):
        return {}
    lowering = _TaskLowering(graphs, profile, [role_tasks(its, profile, fusion) for its in sections], actions)
    for number, its in enumerate(actions.of_role):
        for group in groups_of_actions(its):
            if len(group) > 1:
                lowering.turns(number, group, [[*lowering.items_of(number, action)] for action in group])
    return lowering.paired


def launch_times(nodes: Sequence[fx.Node], fusion: Fusion, eager_s: float) -> Iterator[float]:
    """Earliest launch times of a stream's tasks, in seconds from the step's begin; tasks are named by a node.

    In eager mode a processor that runs ahead of the device takes `eager_s` for each op. Compiled code launches at no
    cost here, optimizers launch all parameters at once; a wait is an event, which does not block the processor.
    """
    now = 0.0
    for node in nodes:
        origin = origin_of(node)
        if (
            fusion not in ("ops", "compiled")
            and not is_compiled(origin, fusion)
            and origin.phase != "update"
            and node.target is not WAIT
        ):
            now += eager_s
        yield now
