"""Recorded steps as a Simulation: the spans of a device per role, exposed communication, memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import fx

from meshweave.cost.hardware.volumes import bytes_received
from meshweave.cost.simulate.classify import operand_values, work_of
from meshweave.cost.simulate.exposure import covered_seconds
from meshweave.cost.simulate.memory import gradients_of, kind_of, with_twins
from meshweave.cost.simulate.result import LiveTensor, Reason, RoleResult, Simulation, Span
from meshweave.engine.actions import Actions, Schedule
from meshweave.engine.sections import Sections
from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import PERMUTE, STARTS, TABLE, WAIT, transfer
from meshweave.ir.graph import op_name, origin_of
from meshweave.ir.rank import RankGraph
from meshweave.ir.values import Local, local_values
from meshweave.ir.work import Attention, Matmul, Work
from meshweave.runtime.tracing import DeviceTrace, Event

_Run = tuple[str, int, int]  # of a node: for which action, on which stage, in which microbatch


@dataclass(slots=True)
class _Role:
    """The trace of the device that represents a role, as spans."""

    index: int
    sections: Sections
    actions: Actions
    trace: DeviceTrace
    zero: float
    first: int  # of its spans
    is_only: bool
    role: RankGraph = field(init=False)
    nodes: dict[str, fx.Node] = field(init=False)
    local: Local = field(init=False)
    spans: list[Span] = field(default_factory=list)
    exposed: dict[int, float] = field(default_factory=dict)  # by index in `spans`
    copies: dict[tuple[str, int], int] = field(default_factory=dict)  # of a start and microbatch, likewise
    last_microbatch: int = 0

    def __post_init__(self) -> None:
        self.role = self.sections.role
        self.nodes = {node.name: node for node in self.role.graph.nodes}
        self.local = local_values(self.role)

    def run(self) -> RoleResult:
        runs: dict[tuple[str, bool], Iterator[_Run]] = {}
        for event in _queued(self.trace.events, self.nodes):
            node = self.nodes[event.name]
            key = (event.name, event.is_copy)
            if key not in runs:
                runs[key] = self.runs(node)
            span = self.copy(node, event) if event.is_copy else self.task(node, event)
            action, stage, microbatch = next(runs[key])
            microbatch = 0 if span.phase == "update" else microbatch
            index = self.first + len(self.spans)
            self.spans.append(replace(span, index=index, action=action, stage=stage, microbatch=microbatch))
        self.last_microbatch = max((span.microbatch for span in self.spans), default=0)
        self.expose()
        self.connect()
        return self.result()

    def runs(self, node: fx.Node) -> Iterator[_Run]:
        """Each run of a node, in order: those of the role's actions; without a name those of what no action has."""
        known = [
            (action.name, action.stage, action.microbatch)
            for action in self.actions
            if self.sections.has(node, action.kinds, action.stage)
        ]
        yield from known
        yield from (("", 0, number) for number in count(len(known)))

    def task(self, node: fx.Node, event: Event) -> Span:
        """Ops that read and write, and the host's part of communications: starting and finishing them. For fused ops
        the bytes are those that the ops would read and write separately."""
        nodes = [self.nodes[name] for name in event.fused] or [node]
        is_alone = node.target in STARTS or node.target is WAIT
        works = [] if is_alone else [w for n in nodes for w in self.works(n)]
        flops = sum(work.flops for work in works if isinstance(work, Matmul | Attention))
        op = "start" if node.target in STARTS else "wait" if node.target is WAIT else op_name(node.target)
        stream = "compute" if self.is_only else f"compute {self.index}"
        names = tuple(n.name for n in nodes)
        total = float(sum(w.bytes for w in works))
        return self.span(node, event, op, "compute", stream, flops=flops, bytes=total, names=names)

    def works(self, node: fx.Node) -> tuple[Work, ...]:
        return work_of(node, operand_values(node, self.local.values), self.local.values[node])

    def copy(self, node: fx.Node, event: Event) -> Span:
        key = str(node.args[-1])
        suffix = "" if self.is_only else f" ({self.index})"
        if node.target is transfer:
            entry = self.role.transfers[key]
            received = entry.routes.bytes_received(self.trace.device, entry.spec.dtype.itemsize)
            axes = ",".join(entry.axes)
            op = "permute" if entry.axes else "transfer"
            stream = f"transfer {key}{suffix}"
            return self.span(node, event, op, "transfer", stream, bytes=float(received), group=axes)
        mesh, axis_list = self.role.group_axes(key)
        operand = node.args[0]
        value = self.local.single(operand) if isinstance(operand, fx.Node) else None
        size = value.num_elements * value.dtype.itemsize if value is not None else 0
        row, count = TABLE[node.target], mesh.flat_size(axis_list)
        num_bytes = bytes_received(row.cost_name, count, row.cost_bytes(node, count, size), "a measured step")
        kind, group = "transfer" if row is PERMUTE else "collective", ",".join(axis_list)
        return self.span(node, event, row.name, kind, f"comm {key}{suffix}", bytes=float(num_bytes), group=group)

    def span(self, node: fx.Node, event: Event, op: str, kind: str, stream: str, **more: object) -> Span:
        origin = origin_of(node)
        more |= {"phase": origin.phase, "module": origin.module, "line": origin.source}
        more.setdefault("names", (node.name,))
        if kind != "compute":
            more["layout"] = node.meta.get("move", "")
        more |= {"start": event.begin - self.zero, "seconds": event.end - event.begin}
        return Span(index=0, name=node.name, op=op, kind=kind, stream=stream, role=self.index, **more)  # type: ignore[arg-type]

    def expose(self) -> None:
        """Mark exposed time: where the compute stream is idle while a communication that it then waits for is running,
        and earlier communications of the same channel. A wait that computes (a sum) after the communication is cut to
        that part."""
        channels: dict[str, list[int]] = {}
        for i, span in enumerate(self.spans):
            if span.kind != "compute":
                channels.setdefault(span.stream, []).append(i)
                self.copies[span.name, span.microbatch] = i
        free = 0.0
        for i, span in enumerate(self.spans):
            if span.kind == "compute":
                at = self.copies.get(self.started_by(span)) if span.op == "wait" else None
                if at is not None:
                    done = self.spans[at].end
                    self.blame(channels[self.spans[at].stream], free, min(span.end, done))
                    begin = min(max(span.start, done), span.end)
                    self.spans[i] = replace(span, start=begin, seconds=span.end - begin)
                free = max(free, span.end)
        for at, seconds in self.exposed.items():
            reason = Reason("dependency", seconds, "the next op waited for it")
            reasons = (reason,) if seconds > 0 else ()
            self.spans[at] = replace(self.spans[at], exposed_seconds=seconds, reasons=reasons)

    def started_by(self, wait: Span) -> tuple[str, int]:
        """Name and microbatch of the communication of a wait. In the update, which runs once, it is the last
        microbatch's."""
        (start,) = self.nodes[wait.name].all_input_nodes
        is_last = origin_of(start).phase != "update" and wait.phase == "update"
        return start.name, self.last_microbatch if is_last else wait.microbatch

    def blame(self, channel: Sequence[int], begin: float, end: float) -> None:
        """Mark what a channel did from `begin` to `end` as exposed."""
        for at in reversed(channel):
            span = self.spans[at]
            if span.end <= begin:
                return
            seconds = min(span.end, end) - max(span.start, begin)
            if seconds > 0:
                self.exposed[at] = self.exposed.get(at, 0.0) + seconds

    def connect(self) -> None:
        """Predecessors of each span: the spans of its operands, looking through waits for communications."""
        producers: dict[str, int] = {}
        for i, span in enumerate(self.spans):
            if span.op == "wait":
                copy = self.copies.get(self.started_by(span))
                needs = set() if copy is None else {self.first + copy}
            else:
                read = (n.name for name in span.names for n in self.nodes[name].all_input_nodes)
                needs = {producers[name] for name in read if name in producers}
            self.spans[i] = replace(span, needs=tuple(sorted(needs)))
            if span.kind == "compute":
                producers.update((name, self.first + i) for name in span.names)

    def result(self) -> RoleResult:
        compute = covered_seconds([(s.start, s.end) for s in self.spans if s.kind == "compute"])
        communication = covered_seconds([(s.start, s.end) for s in self.spans if s.kind != "compute"])
        exposed = sum(self.exposed.values())
        whole = self.trace.ended - self.trace.began
        curve, peak, peak_at, at_peak = self.memory()
        return RoleResult(
            index=self.index,
            devices=self.role.devices,
            compute_seconds=compute,
            communication_seconds=communication,
            exposed_seconds=exposed,
            idle_seconds=max(0.0, whole - compute - exposed),
            peak_bytes=peak,
            peak_at=peak_at,
            reserved_bytes=max(peak, self.trace.reserved_bytes),
            persistent_bytes=self.trace.persistent_bytes,
            at_peak=at_peak,
            memory=curve,
        )

    def memory(self) -> tuple[tuple[tuple[float, int], ...], int, float, tuple[LiveTensor, ...]]:
        """Memory curve, peak, its time, and the tensors alive then."""
        level, peak, peak_at, count = 0, 0, 0.0, 0
        curve: dict[float, int] = {}
        for i, change in enumerate(self.trace.changes, 1):
            level += change.bytes
            at = max(0.0, change.at - self.zero)
            curve[at] = level
            if level > peak:
                peak, peak_at, count = level, at, i
        alive: dict[str, int] = {}
        for change in self.trace.changes[:count]:
            alive[change.name] = alive.get(change.name, 0) + change.bytes
        kinds = {n: "grad" if i.kind == "acc" else i.kind for n, i in self.role.sources.items()}
        gradients = gradients_of(self.role, self.local.values)
        largest = sorted((-size, name) for name, size in alive.items() if size > 0)
        tensors = [_live_tensor(self.nodes[name], -size, kinds, gradients) for size, name in largest]
        return tuple(sorted(curve.items())), peak, peak_at, with_twins(tensors)


def _queued(events: Sequence[Event], nodes: Mapping[str, fx.Node]) -> list[Event]:
    """Events in order of time. A channel runs its communications one by one: each begins when it has been posted and
    the earlier communications are done (where a backend works on several at once, they end at nearly the same time)."""
    free: dict[tuple[bool, str], float] = {}
    queued = []
    for event in events:
        if event.is_copy:
            node = nodes[event.name]
            channel = (node.target is transfer, str(node.args[-1]))
            begin = max(event.begin, free.get(channel, 0.0))
            event = replace(event, begin=begin, end=max(begin, event.end))
            free[channel] = event.end
        queued.append(event)
    return sorted(queued, key=lambda event: (event.begin, event.end, event.name))


def _live_tensor(node: fx.Node, size: int, inputs: Mapping[fx.Node, str], gradients: Collection[fx.Node]) -> LiveTensor:
    origin = origin_of(node)
    crosses = origin.phase in ("forward", "loss") and any(origin_of(u).phase == "backward" for u in node.users)
    kind = inputs.get(node) or kind_of(node, crosses, gradients)
    return LiveTensor(node.name, size, kind, origin.module, origin.source)


def measured(
    sections: Sequence[Sections],
    schedule: Schedule,
    traces: Sequence[DeviceTrace],
    devices: Sequence[int] = (),
    tokens: int = 0,
) -> Simulation:
    """The recorded step in `traces`, with all devices on a common clock; the roles of `sections` followed `schedule`.
    A role is shown by its first device, or by its device in `devices`. The step lasts from the start of the first
    device to the end of the last. Raises MeshweaveError for a device that was not recorded."""
    by_device = {trace.device: trace for trace in traces}
    if strange := [d for d in devices if d not in by_device]:
        known = ", ".join(map(str, sorted(by_device)))
        raise MeshweaveError("this device was not recorded", where="trace", got=str(strange[0]), expected=known)
    zero = min(trace.began for trace in traces)
    spans: list[Span] = []
    results, shown = [], []
    for i, its in enumerate(sections):
        role = its.role
        device = next((d for d in devices if d in role.devices), role.devices[0])
        shown.append(device)
        role_trace = _Role(i, its, schedule.of_role[i], by_device[device], zero, len(spans), len(sections) == 1)
        results.append(role_trace.run())
        spans += role_trace.spans
    _connect_transfers(spans, sections)
    spans, edges = _in_order(spans)
    computing = [span.stream for span in spans if span.kind == "compute"]
    moving = [span.stream for span in spans if span.kind != "compute"]
    mesh = sections[0].role.mesh
    return Simulation(
        seconds=max(trace.ended for trace in traces) - zero,
        spans=tuple(spans),
        roles=tuple(results),
        streams=tuple(dict.fromkeys(sorted(computing) + moving)),
        mesh=str(mesh) or "one device",
        num_devices=mesh.num_devices,
        profile="this machine",
        profile_version=f"torch {torch.__version__}",
        source="measured",
        schedule=schedule.name if schedule.is_pipelined else "",
        tokens=tokens,
        flops=sum(span.flops for span in spans),
        notes=(f"recorded on device{'s' if len(shown) > 1 else ''} {', '.join(map(str, shown))}",),
        edges=edges,
    )


def _connect_transfers(spans: list[Span], sections: Sequence[Sections]) -> None:
    """What a role receives from another needs what the sender's start needs."""
    keys = [{n.name: str(n.args[-1]) for n in its.role.graph.nodes if n.target is transfer} for its in sections]
    sent: dict[tuple[str, int], tuple[int, ...]] = {}
    for span in spans:
        if span.op == "start" and span.name in keys[span.role] and span.needs:
            sent[keys[span.role][span.name], span.microbatch] = span.needs
    for span in spans:
        if span.op == "transfer" and not span.needs:
            needs = sent.get((keys[span.role][span.name], span.microbatch), ())
            spans[span.index] = replace(span, needs=needs)


def _in_order(spans: Sequence[Span]) -> tuple[list[Span], tuple[tuple[int, int], ...]]:
    """Spans in order of time, renumbered."""
    order = sorted(range(len(spans)), key=lambda i: (spans[i].start, spans[i].end, i))
    number = {old: new for new, old in enumerate(order)}
    events = [
        replace(spans[old], index=new, needs=tuple(sorted(number[n] for n in spans[old].needs)))
        for new, old in enumerate(order)
    ]
    return events, tuple((need, span.index) for span in events for need in span.needs)
