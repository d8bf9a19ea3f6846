"""The cost of running tasks on virtual devices, and that devices really run beside each other.

    python benchmarks/engine.py

1. Overhead per task: programs of empty tasks (`operator.pos` of a Python number), alone in the machine and through the
   whole local runtime with its worker threads, on 1 to 8 virtual devices; with a collective after every 10 tasks, too.
2. Two independent branches of large matmuls on two virtual devices: a timeline of the tasks, and the wall time against
   both branches on one device. One intra-op thread, so that a branch keeps one core busy.
"""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

import meshweave as mw
from meshweave.engine.machine import Done, Event, EventMachine, Release, Run
from meshweave.ir.collectives import WAIT, functional
from meshweave.ir.graph import Input, Origin, Spec
from meshweave.ir.layout import Layout
from meshweave.ir.rank import RankGraph
from meshweave.runtime.executor import FORWARD, compile_tasks
from meshweave.runtime.virtual import LocalExecutor

CPU = torch.device("cpu")
NUM_TASKS = 2000


def chain(mesh: mw.Mesh, num_tasks: int, every: int) -> RankGraph:
    """`num_tasks` empty tasks one after the other; after every `every` of them an all-reduce of one number."""
    graph, origin = fx.Graph(), Origin("forward")
    value = x = graph.placeholder("x")
    for i in range(num_tasks):
        value = graph.call_function(operator.pos, (value,))
        value.meta["origin"] = origin
        if every and i % every == every - 1:
            started = graph.call_function(functional.all_reduce.default, (x, "sum", "d"))
            done = graph.call_function(WAIT, (started,))
            started.meta["origin"] = done.meta["origin"] = origin
    graph.output([value])
    item, layout = Input("batch", "x", Spec((), torch.float32)), Layout.replicated(mesh, 0)
    return RankGraph(graph, mesh, (item,), (layout,), (("loss", ""),), (layout,))


def executor(num_devices: int, every: int) -> LocalExecutor:
    mesh = mw.Mesh(f"d={num_devices}")
    rank = compile_tasks(chain(mesh, NUM_TASKS, every), CPU)
    return LocalExecutor([rank] * num_devices, mesh.devices, CPU)


def median_us(run: Callable[[], Any], num_tasks: int, repeats: int = 15) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) / num_tasks * 1e6


def run_machine(made: LocalExecutor) -> None:
    machine = EventMachine(made.lowered.schedule)
    events: list[Event] = [Release(0)]
    while events:
        events += [Done(a.stream, a.stop) for a in machine.handle(events.pop()) if isinstance(a, Run)]
    assert not machine.unfinished()


def run_threads(made: LocalExecutor) -> None:
    envs = made.environment()
    for env, rank in zip(envs, made.ranks, strict=True):
        env[rank.inputs[0]] = torch.tensor(1.0)
    made.begin(envs)
    made.run(FORWARD)


def overhead() -> None:
    print("| virtual devices | a collective after | tasks | machine alone, us per task | local runtime, us per task |")
    print("|---|---|---|---|---|")
    for every in (0, 100, 10):
        for count in (1, 2, 4, 8):
            made = executor(count, every)
            num = made.lowered.schedule.num_tasks
            run_threads(made)
            alone = median_us(lambda made=made: run_machine(made), num)
            whole = median_us(lambda made=made: run_threads(made), num)
            said = f"{every} tasks" if every else "never"
            print(f"| {count} | {said} | {num:,} | {alone:.2f} | {whole:.2f} |", flush=True)


class Branches(torch.nn.Module):
    """Two chains of matmuls that meet in a sum; each on its own device, or both on one."""

    def __init__(self, mesh: mw.Mesh | None, size: int = 768, depth: int = 6) -> None:
        super().__init__()
        self.mesh, self.depth = mesh, depth
        self.weights = torch.nn.ParameterList(torch.randn(size, size) / size**0.5 for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = []
        for i, weight in enumerate(self.weights):
            value, held = x, weight
            if self.mesh is not None:
                value, held = (mw.on(v, self.mesh["pp"][i]) for v in (x, weight))
            for _ in range(self.depth):
                value = torch.tanh(value @ held)
            ends.append(mw.on(value, self.mesh["pp"][0]) if self.mesh is not None else value)
        return ends[0] + ends[1]


class Timeline:
    """A meter that notes when the result of every task appears."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, float, fx.Node]] = []

    def on_value(self, index: int, node: fx.Node, value: Any) -> None:
        self.ends.append((index, time.perf_counter(), node))

    def freed(self, index: int, node: fx.Node) -> None:
        pass


def compiled(mesh: mw.Mesh, branches: bool) -> tuple[mw.TrainStep, tuple[torch.Tensor]]:
    batch = (torch.randn(768, 768),)
    model = Branches(mesh if branches else None)
    plan = mw.Plan.replicate("pp") if branches else None
    step = mw.compile(model, loss=lambda out, _: out.square().mean(), example=batch, mesh=mesh, plan=plan)
    return step, batch


def side_by_side() -> None:
    torch.set_num_threads(1)
    together, batch = compiled(mw.Mesh("pp=2"), True)
    apart, _ = compiled(mw.Mesh(""), False)
    ratios = []
    for _ in range(9):  # paired: the machine may be shared
        began = time.perf_counter()
        apart(batch)
        middle = time.perf_counter()
        together(batch)
        ratios.append((middle - began) / (time.perf_counter() - middle))
    print(f"\nboth branches on one device / one each on two: {statistics.median(ratios):.2f}x "
          f"(of {min(ratios):.2f} to {max(ratios):.2f}; 2 is the most)")  # fmt: skip
    meter = together.session.executor.meter = Timeline()
    began = time.perf_counter()
    together(batch)
    print("\nms after the start at which each matmul was done:")
    for index in range(2):
        ends = [end for i, end, node in meter.ends if i == index and "mm" in node.name]
        print(f"  device {index}: " + "  ".join(f"{(end - began) * 1e3:6.1f}" for end in ends))


if __name__ == "__main__":
    print(f"torch {torch.__version__}, {torch.get_num_threads()} cores\n")
    overhead()
    side_by_side()
