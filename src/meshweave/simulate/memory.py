"""What a device of a role holds over time: every storage from the task that makes it to the last that uses it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from torch import fx

from meshweave.ir.collectives import STARTS
from meshweave.ir.graph import origin_of
from meshweave.ir.liveness import live_bytes
from meshweave.simulate.allocator import reserved_bytes
from meshweave.simulate.clock import Times
from meshweave.simulate.kernels import Fusion
from meshweave.simulate.result import LiveTensor
from meshweave.simulate.tasks import RoleTasks, Task, Tasks

Key = tuple[int, int]  # storage, microbatch that made it (-1: before the step)

_STEPS = 3  # after which an allocator asks for nothing more, where all steps are alike
_IN_PLACE = ("param", "state", "buffer", "acc")
_PASSING = {"carry": "gathered", "acc": "grad"}  # inputs that live to their last use, and as what they are shown


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes over time of one device, the peak, and what is held then (the largest first)."""

    curve: tuple[tuple[float, int], ...]
    peak_bytes: int
    peak_at: float
    reserved_bytes: int
    persistent_bytes: int
    at_peak: tuple[LiveTensor, ...]


@dataclass(slots=True)
class _Life:
    node: fx.Node
    bytes: int
    kind: str
    begin: float
    end: float  # inf: it outlives the step
    used: float = 0.0  # when it was first used
    crosses: bool = False  # made in forward, used in backward


@dataclass(slots=True)
class _Ledger:
    """The lives of all storages of a role, from its tasks in their order."""

    tasks: Tasks
    held: RoleTasks
    times: Times
    fusion: Fusion
    last_microbatch: int
    lives: dict[Key, _Life] = field(default_factory=dict)
    lasting: set[int] = field(default_factory=set)  # storages that outlive the step
    replaced: dict[int, int] = field(default_factory=dict)  # new storage -> the storage of what it replaces
    sums: dict[int, int] = field(default_factory=dict)  # a sum of gradients so far -> the storage of the new one
    start_operands: dict[tuple[fx.Node, int], list[Key]] = field(default_factory=dict)

    def run(self) -> list[_Life]:
        self.enter_inputs()
        for number in self.held.tasks:
            self.enter(self.tasks.tasks[number], self.times.starts[number], self.times.ends[number])
        for (storage, _), life in self.lives.items():
            if storage in self.lasting or life.end >= self.times.seconds:
                life.end = inf
        return list(self.lives.values())

    def enter_inputs(self) -> None:
        role = self.held.role
        output = next(iter(reversed(role.graph.nodes)))
        returned = dict(zip(role.outputs, list(output.args[0]), strict=True))
        sources = [n for n in role.graph.nodes if n.op == "placeholder"]
        for node, item in zip(sources, role.inputs, strict=True):
            for x in self.held.local.values[node]:
                end = 0.0 if item.kind in _PASSING else inf
                kind = _PASSING.get(item.kind, item.kind)
                self.lives[x.storage, -1] = _Life(node, x.storage_bytes, kind, 0.0, end)
                made = returned.get((item.kind, item.name))
                if made is not None and item.kind in _IN_PLACE:
                    for new in self.held.local.values[made]:
                        self.replaced[new.storage] = x.storage
                        if item.kind == "acc":
                            self.sums[x.storage] = new.storage
        for (kind, _), node in returned.items():
            if kind not in ("grad", "acc"):
                self.lasting |= {x.storage for x in self.held.local.values[node]}
        if self.fusion == "ops":  # a new tensor is made, and the old one freed after its last use
            for old in self.replaced.values():
                self.lives[old, -1].end = 0.0

    def enter(self, task: Task, begin: float, end: float) -> None:
        microbatch = task.microbatch
        if task.kind == "kernel":
            assert task.kernel is not None
            for node in task.kernel.writes:
                self.make(node, microbatch, begin, end)
            self.use(self.held.storages_read(task), task, end)
        elif task.kind == "start":
            self.make(task.node, microbatch, begin, end)
            self.start_operands[task.node, microbatch] = self.use(self.held.storages_read(task), task, end)
        else:
            started: Any = task.node.args[0]
            self.use(self.held.storages_written(task), task, end)
            late = origin_of(task.node).phase == "update" and (started, self.last_microbatch) in self.start_operands
            of = self.last_microbatch if late else microbatch
            for key in self.start_operands.get((started, of), ()):
                self.lives[key].end = max(self.lives[key].end, end)

    def make(self, node: fx.Node, microbatch: int, begin: float, end: float) -> None:
        held = {x.storage for i in node.all_input_nodes for x in self.held.local.values.get(i, ())}
        for x in self.held.local.values[node]:
            in_place = self.fusion != "ops" and x.storage in self.replaced
            if x.storage not in held and not in_place and (x.storage, microbatch) not in self.lives:
                self.lives[x.storage, microbatch] = _Life(node, x.storage_bytes, "", begin, end)

    def use(self, storages: frozenset[int], task: Task, end: float) -> list[Key]:
        found = []
        for storage in storages:
            choices = [(storage, task.microbatch), (storage, self.last_microbatch), (storage, -1)]
            if storage in self.sums:  # what the microbatch before has left, or the zeros of the first
                choices = [(self.sums[storage], task.microbatch - 1), (storage, -1)]
            elif self.replaced.get(storage) in self.sums:
                choices.append((self.replaced[storage], -1))  # in place
            if origin_of(task.node).phase == "update":
                choices[:2] = choices[1::-1]
            key = next((key for key in choices if key in self.lives), None)
            if key is not None:
                life = self.lives[key]
                life.used = life.used or end
                life.end = max(life.end, end)
                made, used = origin_of(life.node).phase, origin_of(task.node).phase
                life.crosses = life.crosses or (made in ("forward", "loss") and used == "backward")
                found.append(key)
        return found


def memory_of(
    tasks: Tasks, index: int, times: Times, fusion: Fusion, last_microbatch: int, num_at_peak: int = 40
) -> Memory:
    """Memory of role `index`. Where kernels are fused, updates are in place; else (as our executor does) the new tensor
    stands beside the old one. The inputs of a communication live until it has been waited for."""
    held = tasks.roles[index]
    lives = _Ledger(tasks, held, times, fusion, last_microbatch).run()
    moments = sorted({moment for life in lives for moment in (life.begin, life.end)} - {inf})
    number = {moment: i for i, moment in enumerate([*moments, inf])}
    ranges = [(number[life.begin], number[life.end], life.bytes) for life in lives]
    levels = live_bytes(ranges, len(moments))
    peak = max(levels, default=0)
    at = levels.index(peak) if levels else 0
    alive = [life for life, (begin, end, _) in zip(lives, ranges, strict=True) if begin <= at < end]
    alive.sort(key=lambda life: (-life.bytes, life.node.name, life.begin))
    lasting = sum(life.bytes for life in lives if life.kind in ("param", "state", "buffer", "constant"))
    gradients = _gradients(held)
    shown = tuple(_held(life, gradients) for life in alive[:num_at_peak])
    reserved = reserved_bytes(_allocations(lives))
    curve = tuple(zip(moments, levels, strict=True))
    return Memory(curve, peak, curve[at][0] if curve else 0.0, reserved, lasting, shown)


def _allocations(lives: Sequence[_Life]) -> Iterator[tuple[int, int, str]]:
    """What a caching allocator is asked for in the first steps of a training. Parameters are there from the beginning;
    optimizers make their state in the first update, in whatever room activations have left; results of communications
    come from the pool of another stream."""
    changes = []
    for i, life in enumerate(lives):
        stream = "communication" if life.node.target in STARTS else "compute"
        begin = life.used if life.kind == "state" else life.begin
        changes.append((begin, 1, i, life.bytes, stream))
        if life.end < inf:
            changes.append((life.end, 0, i, life.bytes, stream))
    changes.sort()
    yield from ((i, num_bytes, stream) for _, _, i, num_bytes, stream in changes)
    ended = {i for _, is_made, i, _, _ in changes if not is_made}
    for _ in range(_STEPS - 1):
        yield from ((i, num_bytes, stream) for _, _, i, num_bytes, stream in changes if i in ended)


def _held(life: _Life, gradients: frozenset[fx.Node]) -> LiveTensor:
    origin = origin_of(life.node)
    return LiveTensor(life.node.name, life.bytes, life.kind or _kind(life, gradients), origin.module, origin.source)


def _kind(life: _Life, gradients: frozenset[fx.Node]) -> str:
    name = getattr(life.node.target, "__name__", str(life.node.target))
    if "all_gather" in name:
        return "gathered"
    if life.crosses:
        return "activation"
    return "grad" if life.node in gradients else "temporary"


def _gradients(held: RoleTasks) -> frozenset[fx.Node]:
    """The nodes that share a storage with a gradient that the role returns."""
    values, output = held.local.values, next(iter(reversed(held.role.graph.nodes)))
    pairs = zip(held.role.outputs, output.args[0], strict=True)  # type: ignore[arg-type]
    storages = {x.storage for (kind, _), n in pairs if kind == "grad" for x in values[n]}  # type: ignore[index]
    return frozenset(n for n, made in values.items() if any(x.storage in storages for x in made))


def bytes_by_kind(at_peak: Iterable[LiveTensor]) -> Mapping[str, int]:
    """Bytes per kind of tensor, the largest first."""
    found: dict[str, int] = {}
    for one in at_peak:
        found[one.kind] = found.get(one.kind, 0) + one.bytes
    return dict(sorted(found.items(), key=lambda item: -item[1]))
