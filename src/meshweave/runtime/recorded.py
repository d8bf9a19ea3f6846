"""A pass over a step as a few recordings (CUDA graphs), which the host launches instead of every kernel.

The first pass runs task by task, the second finds out for which tasks the host waits for the device, the third records
every run of the other tasks, and later passes replay them. Parameters, optimizer state and constants must stay where
they are, or all is recorded again; any other value that a recording reads and no recording computes (a batch, numbers
of the optimizer, what a communication receives) is copied in before each replay.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meshweave.interop.pytree import tree_leaves, tree_map_only
from meshweave.ir.traits import is_random
from meshweave.ir.values import ragged
from meshweave.runtime.cuda_graphs import CudaGraphs, Place, RecordingFailed
from meshweave.runtime.executor import After, Compiled, Env, Slot, Task, perform
from meshweave.runtime.straight_line import Run, straight_line

LEAST_TASKS = 4  # fewer are called as fast as replayed
# Bytes copied in for each task of a recording: 5 us of a GPU that copies at 1.5 TB/s; the host takes 20 us or more to
# call a compiled region (NVIDIA H200, torch 2.11, 2026-11).
COPIED_BYTES = 8 << 20
# Where parameters move again and again, all is recorded anew once in so many passes, beside some recordings that are
# free: recording takes as long as a few passes.
PASSES, FREE_RECORDINGS = 20, 3
_OBSERVED = 2  # runs of an action after which it may be recorded
_FIXED = ("param", "state", "buffer", "constant")
_NOTES = logging.getLogger("meshweave")


@dataclass(frozen=True, slots=True)
class FixedInput:
    """The value of an input that stays where it is, by its slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class Recording:
    """`copies`: the memory for the values of slots, into which they are copied before a replay. `results` are by slot;
    `frees` are the slots that are empty afterwards."""

    replay: Callable[[], None]
    copies: tuple[tuple[int, Tensor], ...]
    results: tuple[tuple[int, Any], ...]
    frees: tuple[int, ...]


@dataclass(slots=True)
class Block:
    """Tasks that follow each other. `reads` are the slots that they read and none of them computes, `results` those
    that have a value afterwards."""

    num_tasks: int
    run: Run
    reads: tuple[int, ...]
    results: tuple[int, ...]
    frees: tuple[int, ...]
    is_recorded: bool
    recording: Recording | None = None


@dataclass(slots=True)
class RecordedPasses:
    """Runs the actions of passes of one device. `others(task, env)` runs a communication."""

    compiled: Compiled
    device: int
    graphs: CudaGraphs
    others: Callable[[Task, Env], None]
    _num_passes: int = 0
    _num_runs: Counter[str] = field(default_factory=Counter)  # of each action before it is recorded
    _num_recordings: int = 0
    _is_replayed: bool = False  # the current pass
    _waiting: set[int] = field(default_factory=set)  # ids of the tasks for which the host waits
    _blocks: dict[str, list[Block]] = field(default_factory=dict)
    _renewal: Block | None = None  # copies new parameters and optimizer state into the old ones' memory
    _forms: list[Any] = field(default_factory=list)  # address and strides of the inputs that stay where they are
    _fixed: dict[int, Tensor] = field(default_factory=dict)  # these inputs in the current pass, by slot
    _slot_of: dict[int, int] = field(default_factory=dict)  # their slots, by id, while recording
    _own: set[int] = field(default_factory=set)  # slots with values of recordings in the current pass
    _open: set[str] = field(default_factory=set)  # actions that are not recorded yet
    _fixed_slots: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        renewed = {key for key in self.compiled.graph.outputs if key[0] == "buffer"}
        inputs = zip(self.compiled.graph.inputs, self.compiled.inputs, strict=True)
        self._fixed_slots = tuple(s for i, s in inputs if i.kind in _FIXED and (i.kind, i.name) not in renewed)

    def begin(self, env: Env) -> bool:
        """Whether the pass runs here, action by action."""
        if self.graphs.user not in (None, self):
            return False
        self._num_passes += 1
        self.graphs.user = self
        actions = (action for action, tasks in self.compiled.tasks.items() if tasks)
        self._is_replayed = all(self._num_runs[action] >= _OBSERVED for action in actions)
        if not self._is_replayed:
            return True
        self._own.clear()
        self._fixed = {slot: env[slot] for slot in self._fixed_slots if env[slot] is not None}
        forms = [(value.data_ptr(), value.stride()) for value in self._fixed.values()]
        if forms == self._forms:
            return True
        if self._num_recordings * PASSES > self._num_passes + FREE_RECORDINGS * PASSES:
            self.graphs.user = None
            return False
        self._forget()
        self._forms = forms
        self._num_recordings += 1
        self._slot_of = {id(value): slot for slot, value in self._fixed.items()}
        return True

    def end(self) -> None:
        """The pass is over; what an incomplete pass has recorded is dropped."""
        if self.graphs.user is not self:
            return
        self.graphs.user, self._fixed, self._slot_of = None, {}, {}
        if self._is_replayed and self._open:
            self._forget()

    @torch.no_grad()
    def run(self, action: str, env: Env, after: After | None) -> None:
        """Run an action. `after` is called only while passes are observed: later, new parameters and optimizer state
        are in the memory of the old."""
        tasks = self.compiled.tasks[action]
        if not self._is_replayed:
            self._observe(tasks, env, after, is_first=not self._num_runs[action])
            self._num_runs[action] += 1
            return
        if action not in self._blocks:
            self._blocks[action] = list(self._cut(tasks))
        for block in self._blocks[action]:
            self._run(block, env)
        if action == "update":
            self._renew(env)
        self._open.discard(action)

    def _forget(self) -> None:
        self._blocks, self._renewal, self._forms = {}, None, []
        self._open = {action for action, tasks in self.compiled.tasks.items() if tasks}

    def _observe(self, tasks: Sequence[Task], env: Env, after: After | None, is_first: bool) -> None:
        """Run task by task, and note for which of them the host waits; not the first time, when kernels are loaded and
        chosen."""
        for task in tasks:
            run = partial(straight_line((task,), self.device, self.others), env, after)
            if is_first or task.is_start or task.is_wait:
                run()
            elif self.graphs.awaits(run):
                self._waiting.add(id(task))

    # blocks

    def _cut(self, tasks: Sequence[Task]) -> Iterator[Block]:
        sized = ragged(self.compiled.graph)

        def is_recorded(task: Task) -> bool:
            nodes = (task.node,) if task.fused is None else task.fused.nodes
            if task.is_start or task.is_wait or id(task) in self._waiting:
                return False
            return not any(n in sized or sized.intersection(n.all_input_nodes) or is_random(n.target) for n in nodes)

        run: list[Task] = []
        for task in tasks:
            if run and is_recorded(run[-1]) != is_recorded(task):
                yield self._block(run, is_recorded(run[-1]) and len(run) >= LEAST_TASKS)
                run = []
            run.append(task)
        if run:
            yield self._block(run, is_recorded(run[-1]) and len(run) >= LEAST_TASKS)

    def _block(self, tasks: Sequence[Task], is_recorded: bool) -> Block:
        computed: dict[int, None] = {}
        read: dict[int, None] = {}
        freed: dict[int, None] = {}
        for task in tasks:
            slots = task.args if task.fused is not None else _slots((task.args, task.kwargs))
            read.update((slot, None) for slot in slots if slot not in computed)
            computed.update(dict.fromkeys(task.outs))
            freed.update(dict.fromkeys(task.frees))
        code = straight_line(tasks, self.device, self.others if not is_recorded else self._perform)
        results = tuple(slot for slot in computed if slot not in freed)
        frees = tuple(slot for slot in freed if slot not in computed)
        return Block(len(tasks), code, tuple(read), results, frees, is_recorded)

    def _perform(self, task: Task, env: Env) -> None:
        perform(task, env, self.device)

    def _run(self, block: Block, env: Env) -> None:
        if block.recording is not None:
            self._replay(block.recording, env)
            self._own.update(block.results)
            return
        if block.is_recorded and self._is_worth_it(block, env):
            try:
                self._record(block, env)
                return
            except RecordingFailed as failure:
                _NOTES.warning("%d ops are launched one by one, without a CUDA graph: %s", block.num_tasks, failure)
        block.is_recorded = False
        block.run(env, None)
        self._own.difference_update(block.results)

    def _replay(self, recording: Recording, env: Env) -> None:
        if recording.copies:
            _copy([memory for _, memory in recording.copies], [env[slot] for slot, _ in recording.copies])
        recording.replay()
        for slot, value in recording.results:
            env[slot] = self._fixed[value.slot] if type(value) is FixedInput else value
        for slot in recording.frees:
            env[slot] = None

    # recording

    def _copied(self, block: Block, env: Env) -> dict[int, Tensor]:
        """The values that are copied in, by slot."""
        slots = (slot for slot in block.reads if slot not in self._own and slot not in self._fixed)
        return {slot: env[slot] for slot in slots if isinstance(env[slot], Tensor)}

    def _is_worth_it(self, block: Block, env: Env) -> bool:
        """Whether a block can be recorded, and what is copied in does not cost more than calling its tasks."""
        copied = self._copied(block, env)
        tensors = [x for slot in block.reads for x in tree_leaves(env[slot]) if isinstance(x, Tensor)]
        nested = sum(len(tree_leaves(env[s])) > 1 for s in block.reads if s not in self._own)
        is_here = all(map(self.graphs.is_here, tensors)) and not nested
        return is_here and sum(x.nbytes for x in copied.values()) <= COPIED_BYTES * block.num_tasks

    def _record(self, block: Block, env: Env) -> None:
        """Record a block, and replay it. RecordingFailed leaves the environment as it was."""
        sources = self._copied(block, env)
        places: dict[int, Place] = {}
        before = {slot: self._is_unowned(env[slot]) if slot in self._own else env[slot] for slot in block.reads}

        def run() -> None:
            for slot, source in sources.items():
                env[slot] = _memory_for(source)
                places[slot] = Place.of(env[slot])
            block.run(env, None)

        try:
            replay = self.graphs.record(run)
            results = tuple((slot, self._result(env[slot])) for slot in block.results)
        except RecordingFailed:
            for slot in block.results:
                env[slot] = None
            for slot, value in before.items():
                env[slot] = value
            raise
        copies = tuple((slot, self.graphs.at(place)) for slot, place in places.items())
        block.recording = Recording(replay, copies, results, block.frees)
        if copies:
            _copy([memory for _, memory in copies], [sources[slot] for slot, _ in copies])
        replay()
        self._own.update(block.results)  # tensors, which give their memory free for later recordings

    def _result(self, value: Any) -> Any:
        """A value of a recording as every replay returns it."""
        if id(value) in self._slot_of:
            return FixedInput(self._slot_of[id(value)])
        if not all(self.graphs.is_here(x) for x in tree_leaves(value) if isinstance(x, Tensor)):
            raise RecordingFailed("a result is in the memory of the host")
        return self._is_unowned(value)

    def _is_unowned(self, value: Any) -> Any:
        return tree_map_only(Tensor, lambda x: self.graphs.at(Place.of(x)), value)

    # the update

    def _renew(self, env: Env) -> None:
        """Copy new parameters and optimizer state that were not computed in the memory of the old into it."""
        if "update" in self._open:
            self._renewal = self._renewal_block(env)
        if self._renewal is not None:
            self._run(self._renewal, env)

    def _renewal_block(self, env: Env) -> Block | None:
        pairs = [(new, old) for new, old in self._replaced() if env[new] is not self._fixed[old]]
        if not pairs:
            return None
        memory = {value.untyped_storage().data_ptr() for value in self._fixed.values()}
        views = [new for new, _ in pairs if env[new].untyped_storage().data_ptr() in memory]  # of old values

        def run(env: Env, after: After | None) -> None:
            for new in views:
                env[new] = env[new].clone()
            for new, old in pairs:
                self._fixed[old].copy_(env[new])
                env[new] = self._fixed[old]

        slots = tuple(new for new, _ in pairs)
        return Block(len(pairs), run, slots, slots, (), len(pairs) > 1)

    def _replaced(self) -> Iterator[tuple[int, int]]:
        """The slots of new parameters and optimizer state, each with the slot of the old value."""
        graph = self.compiled.graph
        slots = {(item.kind, item.name): slot for item, slot in zip(graph.inputs, self.compiled.inputs, strict=True)}
        for key, new in zip(graph.outputs, self.compiled.outputs, strict=True):
            if key[0] in ("param", "state"):
                yield new, slots[key]


def can_be_recorded(compiled: Compiled) -> bool:
    """Whether passes over a step may be recorded: if its regions are compiled, which computes most new values in the
    memory of the old, and every new parameter and optimizer state is computed by the update, for itself alone."""
    if not any(task.fused is not None for tasks in compiled.tasks.values() for task in tasks):
        return False
    pairs = zip(compiled.graph.outputs, compiled.outputs, strict=True)
    renewed = [slot for key, slot in pairs if key[0] in ("param", "state")]
    computed = {slot for task in compiled.tasks["update"] for slot in task.outs}
    return len(renewed) == len(set(renewed)) and computed.issuperset(renewed)


def _slots(value: Any) -> Iterator[int]:
    """The slots in the arguments of a task."""
    if type(value) is Slot:
        yield value.index
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _slots(item)
    elif isinstance(value, dict):
        yield from _slots(tuple(value.values()))


def _memory_for(source: Tensor) -> Tensor:
    """New memory for a value, with its strides unless its elements share memory."""
    if any(size > 1 and step == 0 for size, step in zip(source.shape, source.stride(), strict=True)):
        return torch.empty_like(source)
    return torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=source.device)


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    torch.ops.aten._foreach_copy_.default(targets, sources, True)
