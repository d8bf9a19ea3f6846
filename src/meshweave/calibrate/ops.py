"""Single ops, timed as meshweave's executor runs them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from meshweave.cost.simulate.classify import work_of
from meshweave.ir.graph import Input, Origin, Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph
from meshweave.ir.values import Value
from meshweave.ir.work import MemoryWork, Work
from meshweave.runtime.executor import Compiled, compile_tasks, evaluate
from meshweave.runtime.serial import Alone, SerialExecutor

MOST_MEDIANS = 3.0
LEAST_ROUNDS = 3
_ALONE = Mesh("")


@dataclass(frozen=True, slots=True)
class OpCase:
    """An op to time: `target` on each of `operands` in turn, so that operands need not be in a near cache. `kind` is
    that of the memory work that it represents, if not the simulator's."""

    target: Any
    operands: tuple[tuple[Any, ...], ...]
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """`work` took `seconds`, including the executor's overhead."""

    work: Work
    seconds: float


def time_run(run: Callable[[], None], repeats: int = 1) -> float:
    """Wall time of `run` in seconds, divided by `repeats`."""
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) / repeats


def typical(samples: Sequence[float]) -> float:
    """The mean of repetitions, each clipped to MOST_MEDIANS medians.

    A step is a sum of hundreds of ops, so its median is near the sum of their means: if every tenth repetition takes
    twice as long (processes that share cores and caches), every step contains such ops, and the sum of medians would
    miss them. Outliers (another program, garbage collection) are clipped.
    """
    most = MOST_MEDIANS * median(samples)
    return sum(min(seconds, most) for seconds in samples) / len(samples)


class RepeatedOp:
    """Repetitions of an op in the executor's own loop: every result is freed before the next op runs, as in a step
    whose values are used at once."""

    def __init__(self, case: OpCase, repeats: int, device: torch.device) -> None:
        self.case, self.repeats, self.device = case, repeats, device
        tensors = [x for args in case.operands for x in tensors_of(args)]
        compiled = compile_tasks(_graph(case, repeats), device)
        self._executor = SerialExecutor(compiled, 0, Alone())
        (self._env,) = self._executor.environment()
        for slot, tensor in zip(compiled.inputs, tensors, strict=True):
            self._env[slot] = tensor
        self.work = self._work(compiled)

    def _work(self, compiled: Compiled) -> Work:
        """The simulator's work of an op, from its actual operands and results."""
        task = compiled.tasks["forward"][0]
        with torch.no_grad():
            result = evaluate(task, self._env, 0)
        results = [_value(x, -1 - i) for i, x in enumerate(result if isinstance(result, tuple) else (result,))]
        operands = [_value(x, i) for i, x in enumerate(tensors_of(self.case.operands[0]))]
        (work,) = work_of(task.node, operands, results)
        if self.case.kind:
            assert isinstance(work, MemoryWork)
            return MemoryWork(self.case.kind, work.bytes, work.elements, work.dtype)
        return work

    def run(self) -> None:
        self._executor.begin([self._env])
        self._executor.run("forward")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def sample(self) -> float:
        """Wall time of an op, the mean of the block."""
        return time_run(self.run, self.repeats)


def tensors_of(args: Any) -> list[Tensor]:
    """The tensors among an op's arguments, including lists."""
    tensors: list[Tensor] = []
    map_aggregate(args, lambda x: tensors.append(x) if isinstance(x, Tensor) else None)
    return tensors


def _value(x: Tensor, storage: int) -> Value:
    return Value(tuple(x.shape), tuple(x.stride()), x.dtype, storage, x.numel() * x.itemsize)


def _graph(case: OpCase, repeats: int) -> RankGraph:
    """`repeats` independent nodes of an op; node i reads the operands i modulo their number."""
    graph = fx.Graph()
    inputs: list[Input] = []

    def placed(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        inputs.append(Input("batch", f"x{len(inputs)}", Spec(tuple(x.shape), x.dtype)))
        return graph.placeholder(inputs[-1].name)

    sets: list[Any] = [map_aggregate(args, placed) for args in case.operands]
    for i in range(repeats):
        graph.call_function(case.target, tuple(sets[i % len(sets)])).meta["origin"] = Origin("forward")
    graph.output([])
    layouts = tuple(Layout.replicated(_ALONE, len(item.spec.shape)) for item in inputs)
    return RankGraph(graph, _ALONE, tuple(inputs), layouts, (), ())


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: at most `rounds` over all cases, at most `case_seconds` in total on a case, and the
    caller's part of a communication in `host_rounds`. After `most_seconds` in total, three rounds of each are
    enough."""

    rounds: int
    case_seconds: float
    block_seconds: float = 1e-3  # a block is long enough that the clock and the loop are negligible
    max_repeats: int = 50
    host_rounds: int = 3
    most_seconds: float = math.inf

    def turns(self, most: int, began: float, peers: Peers) -> Iterator[int]:
        """Numbers of the rounds, up to `most` while there is time since `began`: equally many on all peers."""
        for turn in range(most):
            if turn >= LEAST_ROUNDS and self.most_seconds < math.inf:
                (late,) = peers.most([float(time.perf_counter() - began > self.most_seconds)])
                if late:
                    return
            yield turn


@dataclass(frozen=True, slots=True)
class Peers:
    """The other processes that measure at the same time: `meet` returns when all are there, `mean` and `most` are taken
    over all, figure by figure. All of them call each in the same order."""

    meet: Callable[[], None]
    mean: Callable[[Sequence[float]], list[float]]
    most: Callable[[Sequence[float]], list[float]]


ALONE = Peers(lambda: None, list, list)


def time_ops(cases: Sequence[OpCase], device: torch.device, effort: Effort, peers: Peers) -> list[Measurement]:
    """Typical seconds of each case. Repetitions of all cases take turns, so that a disturbance affects few of each;
    with peers, all of them run the same case at the same time, and the mean over them counts."""
    began, firsts = time.perf_counter(), []
    for case in cases:
        block = RepeatedOp(case, 1, device)
        block.run()
        firsts.append(min(block.sample() for _ in range(2)))
    blocks, rounds = [], []
    for case, first in zip(cases, peers.mean(firsts), strict=True):
        repeats = max(len(case.operands), min(effort.max_repeats, round(effort.block_seconds / first)))
        blocks.append(RepeatedOp(case, repeats, device))
        rounds.append(max(LEAST_ROUNDS, min(effort.rounds, round(effort.case_seconds / (first * repeats)))))
    samples: list[list[float]] = [[] for _ in cases]
    for turn in effort.turns(max(rounds, default=0), began, peers):
        for block, durations, count in zip(blocks, samples, rounds, strict=True):
            if turn < count:
                peers.meet()
                durations.append(block.sample())
    seconds = peers.mean([typical(durations) for durations in samples])
    return [Measurement(block.work, each) for block, each in zip(blocks, seconds, strict=True)]
