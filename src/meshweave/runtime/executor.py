"""Runs a rank graph for the devices that this process holds: all virtual ones, or the one of this rank."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from meshweave.errors import MeshweaveError, StepError
from meshweave.ir.graph import map_nodes, op_name, origin_of
from meshweave.ir.ops import KERNELS
from meshweave.ir.rank import STARTS, SYMBOLS, WAIT, RankGraph, bind_symbols

Values = list[Any]  # one value per held device


class Communicator(Protocol):
    """What collectives become where the graph runs. Lists are in the order of the held devices."""

    def start(self, op: Any, axes: tuple[str, ...], operands: Sequence[Tensor], args: Sequence[Any]) -> Values:
        """Begin a collective over the groups of the flattened `axes`; the values may be used after `wait`."""
        ...

    def wait(self, values: Values) -> Values:
        """The finished values of a start."""
        ...


class Meter(Protocol):
    """Told of every value as it appears and disappears, for measurements."""

    def made(self, node: fx.Node, values: Values) -> None: ...

    def freed(self, node: fx.Node) -> None: ...


@dataclass(frozen=True, slots=True)
class Slot:
    index: int


@dataclass(frozen=True, slots=True)
class Task:
    """One instruction: where operands are, where the result goes, which values nobody needs afterwards."""

    node: fx.Node
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: int
    frees: tuple[int, ...]
    is_flat: bool


@dataclass(slots=True)
class Compiled:
    """The tasks of a rank graph in two parts: what runs once per microbatch, and the update.

    A value is freed after its last use: an output that `keep` does not name, too, and an input that an output of the
    same name replaces.
    """

    graph: RankGraph
    tasks: tuple[tuple[Task, ...], tuple[Task, ...]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    num_slots: int
    nodes: tuple[fx.Node, ...]


# Made from nothing, so told where; everything else runs where its operands are.
_FACTORIES = (torch.ops.aten.full.default, torch.ops.aten.arange.start_step)


def compile_tasks(
    graph: RankGraph, device: torch.device, keep: Callable[[str, str], bool] = lambda kind, name: True
) -> Compiled:
    nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
    slot = {n: i for i, n in enumerate(graph.graph.nodes)}
    results = list(next(iter(reversed(graph.graph.nodes))).args[0])
    kept = {n for (kind, name), n in zip(graph.outputs, results, strict=True) if keep(kind, name)}
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for used in node.all_input_nodes:
            last[used] = node
    split = next(
        (i for i, n in enumerate(nodes) if origin_of(n).phase == "update" and n.target not in SYMBOLS), len(nodes)
    )
    replaced = {key for key in graph.outputs if key[0] in ("param", "state")}
    sources = [n for n in graph.graph.nodes if n.op == "placeholder"]
    held = {n for n, i in zip(sources, graph.inputs, strict=True) if (i.kind, i.name) not in replaced}
    lasting = held | {n for n in nodes if n.target in SYMBOLS} | kept
    frees: dict[fx.Node, list[int]] = {}
    for used, node in last.items():
        if used not in lasting:
            frees.setdefault(node, []).append(slot[used])

    def task(node: fx.Node) -> Task:
        args, kwargs = map_nodes(node, lambda n: Slot(slot[n]))
        if node.target in _FACTORIES and device.type != "cpu":
            kwargs = {**kwargs, "device": device}
        unused = [] if node in last or node in kept else [slot[node]]
        is_flat = not kwargs and not any(isinstance(a, (list, tuple)) for a in args)
        function: Any = KERNELS.get(node.target, node.target)
        return Task(node, function, args, kwargs, slot[node], (*frees.get(node, ()), *unused), is_flat)

    parts = tuple(tuple(task(n) for n in part if n.target not in SYMBOLS) for part in (nodes[:split], nodes[split:]))
    inputs = tuple(slot[n] for n in graph.graph.nodes if n.op == "placeholder")
    return Compiled(graph, parts, inputs, tuple(slot[n] for n in results), len(slot), tuple(slot))  # type: ignore[arg-type]


@dataclass(slots=True)
class Executor:
    """Runs compiled tasks in lockstep on the held devices.

    `positions` are row-major positions of the held devices in the mesh. Raises StepError that names the op, its
    source line and the device when an op fails.
    """

    compiled: Compiled
    positions: Sequence[int]
    communicator: Communicator
    device: torch.device
    meter: Meter | None = None
    symbols: list[dict[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        graph = self.compiled.graph
        slot = {n: i for i, n in enumerate(graph.graph.nodes)}
        for position in self.positions:
            bound = bind_symbols(graph.graph, graph.mesh.coordinates(position))
            self.symbols.append({slot[n]: value for n, value in bound.items()})

    def environment(self) -> list[Values | None]:
        """One entry per node; symbolic integers are filled in."""
        env: list[Values | None] = [None] * self.compiled.num_slots
        for index in self.symbols[0] if self.symbols else ():
            env[index] = [bound[index] for bound in self.symbols]
        return env

    def run(self, env: list[Values | None], part: int, after: Callable[[Task], None] | None = None) -> None:
        """Run one part over `env`. `after(task)` is called when a task's result is in place."""
        with torch.no_grad():
            for task in self.compiled.tasks[part]:
                env[task.out] = self._result(task, env)
                if self.meter is not None:
                    self.meter.made(task.node, env[task.out] or [])
                if after is not None:
                    after(task)
                for index in task.frees:
                    env[index] = None
                    if self.meter is not None:
                        self.meter.freed(self.compiled.nodes[index])

    def _result(self, task: Task, env: list[Values | None]) -> Values:
        if task.function in STARTS:
            return self._start(task, env)
        if task.function is WAIT:
            return self.communicator.wait(env[task.args[0].index])  # type: ignore[arg-type]
        if task.function is operator.getitem:
            source, index = env[task.args[0].index], task.args[1]
            return [value[index] for value in source]  # type: ignore[union-attr]
        return [self._call(task, env, rank) for rank in range(len(self.positions))]

    def _call(self, task: Task, env: list[Values | None], rank: int) -> Any:
        try:
            if task.is_flat:
                return task.function(*[env[a.index][rank] if type(a) is Slot else a for a in task.args])  # type: ignore[index]
            args = [_fill(a, env, rank) for a in task.args]
            return task.function(*args, **{k: _fill(v, env, rank) for k, v in task.kwargs.items()})
        except MeshweaveError:
            raise
        except Exception as error:
            device = self.compiled.graph.mesh.devices[self.positions[rank]]
            raise StepError(
                f"{op_name(task.node.target)} failed on device {device}",
                where=str(origin_of(task.node)),
                got=f"{type(error).__name__}: {error}",
            ) from error

    def _start(self, task: Task, env: list[Values | None]) -> Values:
        *rest, group = task.args[1:]
        operands = env[task.args[0].index]
        args = [_fill(a, env, 0) for a in rest]
        try:
            return self.communicator.start(task.function, tuple(group.split(",")), operands, args)  # type: ignore[arg-type]
        except MeshweaveError:
            raise
        except Exception as error:
            raise StepError(
                f"{op_name(task.node.target)} over {group} failed", where=str(origin_of(task.node)), got=str(error)
            ) from error


def _fill(value: Any, env: list[Values | None], rank: int) -> Any:
    if type(value) is Slot:
        return env[value.index][rank]  # type: ignore[index]
    if isinstance(value, (list, tuple)):
        return [_fill(v, env, rank) for v in value]
    return value
