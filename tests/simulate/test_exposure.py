"""Exposed seconds and their reasons, on steps written by hand: every reason is met once, and all of them add up."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from meshweave.cost.simulate.exposure import Exposure, exposure_of
from meshweave.cost.simulate.kernels import Kernel
from meshweave.cost.simulate.step import times_of
from meshweave.cost.simulate.tasks import RoleTasks, SimulatedTask, Tasks
from meshweave.engine.task_graph import TaskGraph
from meshweave.ir.collectives import WAIT, functional
from meshweave.ir.graph import Origin, Spec
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph
from meshweave.ir.values import Local, Value

ALL_REDUCE = functional.all_reduce.default


class Step:
    """A role's stream, written task by task: `kernel`, `start`, `wait`; every start has its copy in a channel."""

    def __init__(self) -> None:
        self.graph, self.values = fx.Graph(), dict[fx.Node, tuple[Value, ...]]()
        self.tasks: list[SimulatedTask] = []
        self.needs: list[list[int]] = []
        self.stream: list[int] = []
        self.pending: list[tuple[str, int, float, str, int | None]] = []
        self.x = self._made(self.graph.placeholder("x"), len(self.values))

    def _made(self, node: fx.Node, storage: int) -> fx.Node:
        self.values[node] = (Value((4,), (1,), torch.float32, storage, 16),)
        node.meta.update(spec=Spec((4,), torch.float32), origin=Origin("forward", "m", f"model.py:{storage}"))
        return node

    def _add(self, task: SimulatedTask) -> int:
        self.tasks.append(task)
        self.needs.append([])
        return len(self.tasks) - 1

    def kernel(self, seconds: float, *reads: fx.Node) -> fx.Node:
        node = self._made(self.graph.call_function(torch.relu, (*reads,) or (self.x,)), len(self.values))
        made = Kernel((node,), float(len(self.stream)), (), reads or (self.x,), (node,))
        self.stream.append(
            self._add(SimulatedTask(kind="kernel", node=node, roles=(0,), seconds=seconds, microbatch=0, kernel=made))
        )
        return node

    def start(self, x: fx.Node, seconds: float, channel: str = "a", level: str = "net") -> fx.Node:
        node = self._made(self.graph.call_function(ALL_REDUCE, (x, "sum", channel)), len(self.values))
        self.stream.append(self._add(SimulatedTask(kind="start", node=node, roles=(0,), seconds=0.0, microbatch=0)))
        self.pending.append((channel, self.stream[-1], seconds, level, None))
        return node

    def wait(self, start: fx.Node) -> fx.Node:
        node = self.graph.call_function(WAIT, (start,))
        self.values[node] = self.values[start]
        node.meta.update(origin=Origin("forward"))
        self.stream.append(self._add(SimulatedTask(kind="wait", node=node, roles=(0,), seconds=0.0, microbatch=0)))
        at = next(i for i, p in enumerate(self.pending) if self.tasks[p[1]].node is start)
        self.pending[at] = (*self.pending[at][:4], self.stream[-1])
        return node

    def run(self) -> tuple[Exposure, Tasks, float]:
        channels: dict[str, list[int]] = {}
        for channel, start, seconds, level, wait in self.pending:
            usage, node = ((level, 1.0),), self.tasks[start].node
            task = self._add(
                SimulatedTask(
                    kind="copy",
                    node=node,
                    roles=(0,),
                    seconds=seconds,
                    microbatch=0,
                    kernel=None,
                    usage=usage,
                    op="all_reduce",
                )
            )
            self.needs[task].append(start)
            channels.setdefault(channel, []).append(task)
            if wait is not None:
                self.needs[wait].append(task)
        streams = (tuple(self.stream), *map(tuple, channels.values()))
        graph = TaskGraph(streams, tuple(map(tuple, self.needs)), (0,) * len(self.tasks))
        self.graph.output(())
        role = RankGraph(self.graph, Mesh("a=2"), (), (), (), ())
        held = RoleTasks(role, Local(0, self.values, {}), (), (), tuple(self.stream))
        tasks = Tasks(graph=graph, tasks=tuple(self.tasks), roles=(held,), streams=("compute", *channels))
        times = times_of(tasks, lambda levels: 1.0)
        return exposure_of(tasks, times), tasks, times.seconds


def kinds(found: Exposure) -> list[list[tuple[str, float]]]:
    for copy, seconds in found.exposed.items():
        assert sum(r.seconds for r in found.reasons[copy]) == pytest.approx(seconds)
    return [[(r.kind, pytest.approx(r.seconds)) for r in found.reasons[c]] for c in sorted(found.reasons)]


def test_what_is_hidden_is_not_exposed() -> None:
    step = Step()
    gathered = step.start(step.x, 1.0)
    step.kernel(2.0)
    step.kernel(1.0, step.wait(gathered))
    found, _, makespan = step.run()
    assert makespan == 3.0
    assert kinds(found) == []
    assert (found.total[0], found.idle[0], found.compute[0], found.communication[0]) == (0.0, 0.0, 3.0, 1.0)


def test_dependency_when_nothing_else_is_left() -> None:
    step = Step()
    made = step.kernel(1.0)
    step.kernel(1.0, step.wait(step.start(made, 2.0)))
    found, _, makespan = step.run()
    assert kinds(found) == [[("dependency", 2.0)]]
    assert (makespan, found.total[0]) == (4.0, 2.0)
    ((reason,),) = found.reasons.values()
    assert "nothing else is ready" in reason.text


def test_late_when_its_input_was_ready_before() -> None:
    step = Step()
    step.kernel(3.0)
    step.kernel(1.0, step.wait(step.start(step.x, 2.0)))
    found, _, _ = step.run()
    assert kinds(found) == [[("late", 2.0)]]
    ((reason,),) = found.reasons.values()
    assert "ready 3000.000 ms before it is started, after relu" in reason.text


def test_order_when_independent_compute_stands_behind_the_wait() -> None:
    step = Step()
    made = step.kernel(1.0)
    waited = step.wait(step.start(made, 5.0))
    step.kernel(1.0, waited)
    step.kernel(2.0, made)
    found, tasks, _ = step.run()
    assert kinds(found) == [[("order", 2.0), ("dependency", 3.0)]]
    ((reason, _),) = found.reasons.values()
    assert tasks.tasks[reason.blocker].seconds == 2.0


def test_channel_when_another_stands_before_it() -> None:
    step = Step()
    made = step.kernel(1.0)
    first, second = step.start(made, 2.0), step.start(made, 2.0)
    step.kernel(1.0, step.wait(second))
    step.kernel(1.0, step.wait(first))
    found, _, _ = step.run()
    assert kinds(found) == [[("channel", 2.0)], [("channel", 2.0)]]
    ahead, behind = (found.reasons[c][0] for c in sorted(found.reasons))
    assert "comes after it" in ahead.text
    assert "was busy with" in behind.text


def test_link_when_it_is_shared() -> None:
    """Both take 4 s instead of 2: half of the stall is the other's."""
    step = Step()
    made = step.kernel(1.0)
    first, _ = step.start(made, 2.0, "a"), step.start(made, 2.0, "b")
    step.kernel(1.0, step.wait(first))
    found, _, _ = step.run()
    assert kinds(found) == [[("link", 2.0), ("dependency", 2.0)]]


def test_what_runs_after_the_last_kernel_is_exposed() -> None:
    step = Step()
    made = step.kernel(1.0)
    step.start(made, 2.0)
    found, _, makespan = step.run()
    assert (makespan, found.total[0]) == (3.0, 2.0)
    assert kinds(found) == [[("dependency", 2.0)]]
    ((reason,),) = found.reasons.values()
    assert "the step ends with it" in reason.text
