"""Rank graphs as tasks of a device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from meshweave.engine.actions import Actions, actions_of, forms_of
from meshweave.engine.sections import Sections, sections_of
from meshweave.errors import MeshweaveError, StepError
from meshweave.ir.collectives import STARTS, WAIT, transfer
from meshweave.ir.graph import map_nodes, op_name, origin_of
from meshweave.ir.liveness import replaced_inputs
from meshweave.ir.ops import KERNELS
from meshweave.ir.rank import SYMBOLS, RankGraph, bind_symbols, prepared_values
from meshweave.ir.traits import FACTORIES
from meshweave.ir.values import local_values
from meshweave.runtime.regions.cut import Fused

WHOLE: Actions = forms_of(actions_of(1))[0]  # the actions of a step of a single microbatch
_CAT, _ADD = torch.ops.aten.cat.default, torch.ops.aten.add.Tensor

Env = list[Any]  # the values of a device: a cell per node of its rank graph
After = Callable[[int, "Task"], None]


class Meter(Protocol):
    """Gets every value of local device `index` when it appears and disappears, for measurements."""

    def on_value(self, index: int, node: fx.Node, value: Any) -> None: ...

    def freed(self, index: int, node: fx.Node) -> None: ...


@dataclass(frozen=True, slots=True)
class Slot:
    index: int


Step = fx.Node | Fused
Fuse = Callable[[Sequence[Sequence[fx.Node]], Collection[fx.Node]], Sequence[Sequence[Step]]]


@dataclass(frozen=True, slots=True)
class Task:
    """An instruction: where operands are, where results go, which values are dead afterwards.

    A task of several nodes (`fused`, of which `node` is the first) has its operands in the slots `args`, and releases
    those in `frees` before it begins: the function frees each after its last use. A start that `owns_operand` may write
    into its operand. A task that `is_renewal` has new parameters or optimizer state among its results.
    """

    node: fx.Node
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int, ...]
    frees: tuple[int, ...]
    is_flat: bool
    is_start: bool = False
    is_wait: bool = False
    fused: Fused | None = None
    owns_operand: bool = False
    is_renewal: bool = False

    @property
    def out(self) -> int:
        """The slot of the only result."""
        return self.outs[0]

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The nodes whose values are in `outs`."""
        return (self.node,) if self.fused is None else self.fused.outputs


@dataclass(slots=True)
class Compiled:
    """The tasks of a rank graph in a microbatch, by the key of an action.

    A value is freed after its last use; so is an output that `keep` does not name, and an input that is replaced by an
    output of the same name. `posts`: receives of a pipeline, which may begin before the action. `reads` are the slots
    of what an action reads and no earlier action of the microbatch has made, `makes` those of its results. `renewed`:
    the slots of sums of gradients and of buffers, each with its slot in the next microbatch.
    """

    graph: RankGraph
    tasks: Mapping[str, tuple[Task, ...]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    num_slots: int
    nodes: tuple[fx.Node, ...]
    posts: Mapping[str, tuple[Task, ...]] = field(default_factory=dict)
    reads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    makes: Mapping[str, frozenset[int]] = field(default_factory=dict)
    renewed: tuple[tuple[int, int], ...] = ()


def compile_tasks(
    graph: RankGraph,
    device: torch.device,
    keep: Callable[[str, str], bool] = lambda kind, name: True,
    actions: Actions = WHOLE,
    fuse: Fuse | None = None,
    sections: Sections | None = None,
) -> Compiled:
    """The tasks of a role's graph in the actions of a microbatch. One without the update is followed by others, which
    use what it has prepared. `fuse(parts, kept)` says which nodes of each action run together, given the values `kept`
    that outlive the microbatch. `sections` are those of the role (default: of one that is no stage of a pipeline)."""
    sections = sections or sections_of(graph)
    parts = [sections.nodes(action.kinds, action.stage) for action in actions]
    prepared = prepared_values(graph.graph)
    slot = {n: i for i, n in enumerate(graph.graph.nodes)}
    results = list(next(iter(reversed(graph.graph.nodes))).args[0])
    kept = {n for (kind, name), n in zip(graph.outputs, results, strict=True) if keep(kind, name)}
    if not any("update" in action.kinds for action in actions):
        run = {n for part in parts for n in part} if sections.stages else set()
        kept |= prepared | {n for n in run if any(user in sections.kinds and user not in run for user in n.users)}
    steps: Sequence[Sequence[Step]] = parts if fuse is None else fuse(parts, kept)
    writer = _TaskWriter(graph, device, slot, kept)
    writer.note_last_uses(step for part in steps for step in part)
    tasks, posts = dict[str, tuple[Task, ...]](), dict[str, tuple[Task, ...]]()
    for action, its_steps in zip(actions, steps, strict=True):
        is_early = bool(sections.stages) and action.name not in ("total", "update")
        its_tasks = [(writer.task(step), is_early and is_receive(step)) for step in its_steps]
        posts[action.key] = tuple(each for each, is_post in its_tasks if is_post)
        tasks[action.key] = tuple(each for each, is_post in its_tasks if not is_post)
    reads, makes = _reads_and_results(graph, actions, parts, steps, [n for n in results if n in kept])
    given = {(item.kind, item.name): node for node, item in graph.sources.items()}
    pairs = ((n, given[key]) for key, n in graph.results.items() if key[0] in ("buffer", "acc") and key in given)
    return Compiled(
        graph=graph,
        tasks=tasks,
        inputs=tuple(slot[n] for n in graph.graph.find_nodes(op="placeholder")),
        outputs=tuple(slot[n] for n in results),
        num_slots=len(slot),
        nodes=tuple(slot),
        posts=posts,
        reads={key: tuple(slot[n] for n in its) for key, its in reads.items()},
        makes={key: frozenset(slot[n] for n in its) for key, its in makes.items()},
        renewed=tuple((slot[n], slot[to]) for n, to in pairs),
    )


class _TaskWriter:
    """Writes the steps of a microbatch as tasks, which free what is not `kept` after its last use."""

    def __init__(
        self, graph: RankGraph, device: torch.device, slot: Mapping[fx.Node, int], kept: Collection[fx.Node]
    ) -> None:
        self.device, self.slot, self.kept = device, slot, kept
        self.lasting = (
            ({*graph.sources} - replaced_inputs(graph))
            | {n for n in graph.graph.nodes if n.target in SYMBOLS}
            | set(kept)
        )
        self.renewals = {n for (kind, _), n in graph.results.items() if kind in ("param", "state")}
        self.buckets, self.sums = _buckets(graph), _sums(graph)
        self.last: dict[fx.Node, Step] = {}
        self.frees: dict[Step, list[int]] = {}

    def note_last_uses(self, steps: Iterable[Step]) -> None:
        """Find out after which step each value is dead."""
        for step in steps:
            for used in _read_by(step):
                self.last[used] = step
        for used, step in self.last.items():
            if used not in self.lasting:
                self.frees.setdefault(step, []).append(self.slot[used])

    def task(self, step: Step) -> Task:
        """The task of a step."""
        slot = self.slot
        if isinstance(step, Fused):
            args, outs = tuple(slot[n] for n in step.inputs), tuple(slot[n] for n in step.outputs)
            frees, renews = self._freed(step, step.outputs), not self.renewals.isdisjoint(step.outputs)
            return Task(step.nodes[0], step.function, args, {}, outs, frees, False, fused=step, is_renewal=renews)
        args, kwargs = map_nodes(step, lambda n: Slot(slot[n]))
        if step.target in FACTORIES and self.device.type != "cpu":
            kwargs = {**kwargs, "device": self.device}
        is_flat = not kwargs and not any(isinstance(a, (list, tuple)) for a in args)
        function: Any = torch.Tensor.add_ if step in self.sums else KERNELS.get(step.target, step.target)
        kind = (step.target in STARTS, step.target is WAIT)
        owns = kind[0] and step.args[0] in self.buckets
        out, frees = (slot[step],), self._freed(step, (step,))
        return Task(step, function, args, kwargs, out, frees, is_flat, *kind, None, owns, step in self.renewals)

    def _freed(self, step: Step, results: Sequence[fx.Node]) -> tuple[int, ...]:
        unused = [self.slot[n] for n in results if n not in self.last and n not in self.kept]
        return (*self.frees.get(step, ()), *unused)


def _reads_and_results(
    graph: RankGraph,
    actions: Actions,
    parts: Sequence[Sequence[fx.Node]],
    steps: Sequence[Sequence[Step]],
    kept: Sequence[fx.Node],
) -> tuple[dict[str, list[fx.Node]], dict[str, Sequence[fx.Node]]]:
    """By action, what it reads of other microbatches or of the step's inputs, and what it computes. Whatever is `kept`
    of a step is read after its update."""
    own = {n for n in graph.graph.nodes if n.target in SYMBOLS or n.op == "get_attr"}
    reads: dict[str, list[fx.Node]] = {}
    for action, part, its_steps in zip(actions, parts, steps, strict=True):
        read = dict.fromkeys(n for step in its_steps for n in _read_by(step))
        own.update(part)
        if action.name == "update":
            read.update((n, None) for n in kept if n.op != "placeholder")
        reads[action.key] = [n for n in read if n not in own]
        own.update(read)
    return reads, {action.key: part for action, part in zip(actions, parts, strict=True)}


def is_receive(step: Step) -> bool:
    """Whether a step begins a transfer of which its role only receives."""
    return isinstance(step, fx.Node) and step.target is transfer and step.args[0] is None


def _read_by(step: Step) -> Sequence[fx.Node]:
    """The nodes that a node reads; for a wait also those that its communication reads."""
    if isinstance(step, Fused):
        return step.inputs
    started = step.all_input_nodes
    return [*started, *started[0].all_input_nodes[1:]] if step.target is WAIT else started


def _buckets(graph: RankGraph) -> set[fx.Node]:
    """Concatenations that a communication alone reads. Each is new memory: a compiled region may return an operand as
    a result, but none of another size."""
    cats: list[Any] = [n for n in graph.graph.find_nodes(op="call_function", target=_CAT) if len(n.users) == 1]
    cats = [n for n in cats if next(iter(n.users)).target in STARTS]
    if not cats:
        return set()
    values = local_values(graph).values
    return {n for n in cats if all(values[part][0].num_elements < values[n][0].num_elements for part in n.args[0])}


def _sums(graph: RankGraph) -> set[fx.Node]:
    """Additions of a gradient to the sum of earlier microbatches, which they overwrite: nothing else reads it."""
    earlier = {i.name: n for n, i in graph.sources.items() if i.kind == "acc" and len(n.users) == 1}
    sums = set()
    for (kind, name), node in graph.results.items():
        before = earlier.get(name) if kind == "acc" and node.target is _ADD else None
        if before is not None and before is node.args[0] and before.meta["spec"] == node.meta["spec"]:
            sums.add(node)
    return sums


def environment(compiled: Compiled, device: int) -> Env:
    """The cells of a device, empty except for its symbols."""
    env: Env = [None] * compiled.num_slots
    slot = {n: i for i, n in enumerate(compiled.nodes)}
    for node, value in bind_symbols(compiled.graph.graph, compiled.graph.coordinates(device)).items():
        env[slot[node]] = value
    return env


def perform(task: Task, env: Env, device: int) -> None:
    """Run a local task on a device. Raises StepError with op, source line and device."""
    if task.fused is None:
        env[task.out] = evaluate(task, env, device)
        return
    operands = [env[slot] for slot in task.args]
    for slot in task.frees:
        env[slot] = None
    try:
        results = task.function(operands, device)
    except Exception as error:
        rest = len(task.fused.nodes) - 1
        how = f"and {rest} ops after it failed" if rest else "failed"
        raise failed(task, f"{how} on device {device}", error) from error
    for slot, value in zip(task.outs, results, strict=True):
        env[slot] = value


def evaluate(task: Task, env: Env, device: int) -> Any:
    """The result of a local task on a device. Raises StepError with op, source line and device."""
    try:
        if task.is_flat:
            return task.function(*[env[a.index] if type(a) is Slot else a for a in task.args])
        args = [fill(a, env) for a in task.args]
        return task.function(*args, **{k: fill(v, env) for k, v in task.kwargs.items()})
    except MeshweaveError:
        raise
    except Exception as error:
        raise failed(task, f"failed on device {device}", error) from error


def failed(task: Task, how: str, error: Exception) -> StepError:
    got = f"{type(error).__name__}: {error}"
    return StepError(f"{op_name(task.node.target)} {how}", where=str(origin_of(task.node)), got=got)


def fill(value: Any, env: Env) -> Any:
    """`value` with every slot in it, however deep, replaced by the device's value."""
    if type(value) is Slot:
        return env[value.index]
    if isinstance(value, (list, tuple)):
        return [fill(v, env) for v in value]
    return value


def report_value(meter: Meter, task: Task, env: Env, index: int) -> None:
    for slot, node in zip(task.outs, task.results, strict=True):
        meter.on_value(index, node, env[slot])


def finish(task: Task, env: Env, index: int, meter: Meter | None, after: After | None, compiled: Compiled) -> None:
    """Report that a task's new parameters or optimizer state are available, and release dead values."""
    if after is not None and task.is_renewal:
        after(index, task)
    for slot in task.frees:
        env[slot] = None
        if meter is not None:
            meter.freed(index, compiled.nodes[slot])
