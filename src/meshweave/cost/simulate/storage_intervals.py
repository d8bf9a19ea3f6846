"""The lifetime of every storage of a role: from the task that allocates it to the last that uses it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf
from typing import Any

from torch import fx

from meshweave.cost.simulate.clock import Times
from meshweave.cost.simulate.kernels import Fusion, is_compiled
from meshweave.cost.simulate.tasks import RoleTasks, SimulatedTask, Tasks
from meshweave.ir.graph import block_name, origin_of
from meshweave.ir.liveness import REPLACED
from meshweave.ir.traits import PRODUCTS

Key = tuple[int, int]  # storage, microbatch that allocated it (-1: before the step)

IN_PLACE = (*REPLACED, "buffer")  # kinds of inputs that an output of the same name replaces, if kernels are fused


@dataclass(slots=True)
class Life:
    """A storage. `stream`: the stream whose memory pool it belongs to."""

    node: fx.Node
    bytes: int
    kind: str
    begin: float
    end: float  # inf: it outlives the step
    used: float = 0.0  # time of first use
    crosses: bool = False  # allocated in forward, used in backward
    stream: str = "compute"


@dataclass(frozen=True, slots=True)
class LifetimeRules:
    """What decides how long a step keeps its tensors, beside its graph.

    keeps_every_second_matmul: for selective checkpoints. Eager mode stores the results that the policy saves, the
    first, third, ... matmul of a block among them, whether or not the backward pass reads them, and keeps the store
    while the block's backward pass runs (`create_selective_checkpoint_contexts`, torch/utils/checkpoint.py, 2.13).
    Compilers keep only what is read.
    """

    fusion: Fusion
    keeps_every_second_matmul: bool = False


@dataclass(slots=True)
class Ledger:
    """The lives of all storages of a role, from its tasks in their order."""

    tasks: Tasks
    of_role: RoleTasks
    times: Times
    holding: LifetimeRules
    lives: dict[Key, Life] = field(default_factory=dict)
    lasting: set[int] = field(default_factory=set)  # storages that outlive the step
    replaced: dict[int, int] = field(default_factory=dict)  # new storage -> the storage that it replaces
    sums: dict[int, int] = field(default_factory=dict)  # a sum of gradients so far -> the storage of the new sum
    start_operands: dict[tuple[fx.Node, int], list[Key]] = field(default_factory=dict)
    calls: dict[tuple[int, str, int], tuple[set[Key], float]] = field(default_factory=dict)  # for eager mode

    def run(self) -> None:
        self.enter_inputs()
        for number in self.of_role.tasks:
            self.enter(self.tasks.tasks[number], self.times.starts[number], self.times.ends[number])
        for (_, *call), (keys, end) in self.calls.items():  # arguments of a call live until it returns
            for life in (self.lives[key] for key in keys):
                origin = origin_of(life.node)
                life.end = life.end if [origin.phase, origin.call] == call else max(life.end, end)
        if self.holding.fusion == "eager" and self.holding.keeps_every_second_matmul:
            self.keep_every_second_matmul()
        for (storage, _), life in self.lives.items():
            if storage in self.lasting or life.end >= self.times.seconds:
                life.end = inf

    def keep_every_second_matmul(self) -> None:
        kernels = [(n, self.tasks.tasks[n]) for n in self.of_role.tasks if self.tasks.tasks[n].kind == "kernel"]
        places = {n: (block_name(origin_of(task.node)), task.microbatch) for n, task in kernels}
        phases = {n: origin_of(task.node).phase for n, task in kernels}
        ends = {places[n]: self.times.ends[n] for n, _ in kernels if phases[n] == "backward" and places[n][0]}
        counts: Counter[tuple[str, int]] = Counter()
        for number, task in kernels:
            place = places[number]
            is_matmul = task.kernel is not None and any(n.target in PRODUCTS for n in task.kernel.nodes)
            if is_matmul and phases[number] == "forward" and place in ends:
                counts[place] += 1
                for key in self.allocated_by(task) if counts[place] % 2 else ():
                    self.lives[key].end = max(self.lives[key].end, ends[place])

    def allocated_by(self, task: SimulatedTask) -> list[Key]:
        keys = ((storage, task.microbatch) for storage in self.of_role.storages_written(task))
        return [key for key in keys if key in self.lives]

    def enter_inputs(self) -> None:
        role = self.of_role.role
        returned = role.results
        for node, item in role.sources.items():
            for x in self.of_role.local.values[node]:
                kind, end = ("grad", 0.0) if item.kind == "acc" else (item.kind, inf)  # sums live to their last use
                self.lives[x.storage, -1] = Life(node, x.storage_bytes, kind, 0.0, end)
                new_value = returned.get((item.kind, item.name))
                if new_value is not None and item.kind in IN_PLACE:
                    for new in self.of_role.local.values[new_value]:
                        self.replaced[new.storage] = x.storage
                        if item.kind == "acc":
                            self.sums[x.storage] = new.storage
        for (kind, _), node in returned.items():
            if kind not in ("grad", "acc"):
                self.lasting |= {x.storage for x in self.of_role.local.values[node]}
        if self.holding.fusion == "ops":  # a new tensor is allocated, and the old tensor freed after its last use
            for old in self.replaced.values():
                self.lives[old, -1].end = 0.0

    def enter(self, task: SimulatedTask, begin: float, end: float) -> None:
        microbatch = task.microbatch
        if task.kind == "kernel":
            assert task.kernel is not None
            for node in task.kernel.writes:
                self.make(node, microbatch, begin, end)
            used = self.use(self.of_role.storages_read(task), task, end)
            origin = origin_of(task.node)
            if self.holding.fusion != "ops" and origin.call and not is_compiled(origin, self.holding.fusion):
                keys, _ = self.calls.get((microbatch, origin.phase, origin.call), (set(), 0.0))
                self.calls[microbatch, origin.phase, origin.call] = keys | {*used}, end
        elif task.kind == "start":
            self.make(task.node, microbatch, begin, end)
            self.start_operands[task.node, microbatch] = self.use(self.of_role.storages_read(task), task, end)
        else:
            started: Any = task.node.args[0]
            self.use(self.of_role.storages_written(task), task, end)
            for key in self.start_operands.get((started, microbatch), ()):
                self.lives[key].end = max(self.lives[key].end, end)

    def make(self, node: fx.Node, microbatch: int, begin: float, end: float) -> None:
        input_storages = {x.storage for i in node.all_input_nodes for x in self.of_role.local.values.get(i, ())}
        for x in self.of_role.local.values[node]:
            in_place = self.holding.fusion != "ops" and x.storage in self.replaced
            if x.storage not in input_storages and not in_place and (x.storage, microbatch) not in self.lives:
                self.lives[x.storage, microbatch] = Life(node, x.storage_bytes, "", begin, end)

    def use(self, storages: frozenset[int], task: SimulatedTask, end: float) -> list[Key]:
        used_storages = []
        for storage in storages:
            choices = [(storage, task.microbatch), (storage, -1), (storage, 0)]
            if storage in self.sums:  # what the previous microbatch left, or the zeros of the first
                choices = [(self.sums[storage], task.microbatch - 1), (storage, -1)]
            elif self.replaced.get(storage) in self.sums:
                choices.append((self.replaced[storage], -1))  # in place
            key = next((key for key in choices if key in self.lives), None)
            if key is not None:
                life = self.lives[key]
                life.used = life.used or end
                life.end = max(life.end, end)
                born_in, used = origin_of(life.node).phase, origin_of(task.node).phase
                life.crosses = life.crosses or (born_in in ("forward", "loss") and used == "backward")
                used_storages.append(key)
        return used_storages
