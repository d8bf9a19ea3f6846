"""The runner of a process that has a single device: its tasks in order, its communications through a communicator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from meshweave.engine.pairs import pieces_of
from meshweave.errors import MeshweaveError
from meshweave.ir.rank import RankGraph
from meshweave.runtime.cuda_graphs import CudaGraphs
from meshweave.runtime.executor import (
    After,
    Compiled,
    Env,
    Meter,
    Task,
    environment,
    failed,
    fill,
    finish,
    perform,
    report_value,
)
from meshweave.runtime.interfaces import Communicator, Observer
from meshweave.runtime.recorded import RecordedPasses
from meshweave.runtime.straight_line import Run, straight_line

PieceKey = tuple[str, tuple[str, ...], int]  # an action, the waits before which it is cut, the number of the piece


@dataclass(slots=True)
class Alone:
    """The communicator of a mesh of a single device, whose groups have that member alone."""

    recorder: Observer | None = None
    microbatch: int = 0

    def finish_sends(self, waits: bool) -> None:
        pass

    def start(self, graph: RankGraph, node: fx.Node, operand: Any, args: Sequence[Any], is_owned: bool = False) -> Any:
        return operand

    def wait(self, started: Any, node: fx.Node | None = None) -> Any:
        return started


@dataclass(slots=True, eq=False)
class SerialExecutor:
    """Runs the tasks of one device in order, its communications through a communicator."""

    compiled: Compiled
    device: int
    communicator: Communicator
    meter: Meter | None = None
    _fresh: Env = field(init=False)
    _env: Env = field(default_factory=list)
    _recorder: Observer | None = None
    _microbatch: int = 0
    _codes: dict[PieceKey, Run] = field(default_factory=dict)  # of the actions that have run
    _passes: RecordedPasses | None = None
    _is_recorded: bool = False  # the current pass

    def __post_init__(self) -> None:
        self._fresh = environment(self.compiled, self.device)

    def record_passes(self, graphs: CudaGraphs) -> None:
        """Record passes that nobody observes, and replay them."""
        self._passes = RecordedPasses(self.compiled, self.device, graphs, self._run)

    def record(self, recorder: Observer | None) -> None:
        """Report every task to a recorder from now on, or to none."""
        self._recorder = self.communicator.recorder = recorder

    def environment(self) -> list[Env]:
        """A fresh environment per local device, with its symbols filled in."""
        return [list(self._fresh)]

    def begin(self, envs: list[Env], microbatch: int = 0) -> None:
        """Start a pass over the step. Remains of an earlier pass are dropped."""
        (self._env,), self._microbatch = envs, microbatch
        is_observed = self._recorder is not None or self.meter is not None
        self._is_recorded = self._passes is not None and not is_observed and self._passes.begin(self._env)

    def end(self) -> None:
        """Release the values of the pass."""
        self._env = []
        if self._passes is not None:
            self._passes.end()

    def post(self, action: str, envs: list[Env], microbatch: int) -> None:
        """Begin what an action of a microbatch receives from other stages."""
        self.communicator.microbatch = microbatch
        for task in self.compiled.posts.get(action, ()):
            began = None if self._recorder is None else self._recorder.mark()
            self._run(task, envs[0])
            if self._recorder is not None:
                self._recorder.ran(0, task, began)

    def finish_sends(self, waits: bool) -> None:
        """Release what other stages have received; or wait until they have received all."""
        self.communicator.finish_sends(waits)

    def run_piece(self, action: str, stops: tuple[str, ...], index: int) -> None:
        """Run a piece of an action, which is cut before the waits with these names."""
        pieces = pieces_of(self.compiled.tasks[action], stops, lambda task: task.node.name)
        self._run_tasks((action, stops, index), pieces[index] if index < len(pieces) else (), None)

    def run(self, action: str, after: After | None = None) -> None:
        """Run an action of the microbatch to its end on all local devices.

        `after(i, task)` is called when new parameters or optimizer state are available on local device i. Raises
        StepError when a task fails."""
        if self._passes is not None and self._is_recorded:
            self._passes.run(action, self._env, after)
            return
        self._run_tasks((action, (), 0), self.compiled.tasks[action], after)

    def _run_tasks(self, key: PieceKey, tasks: Sequence[Task], after: After | None) -> None:
        env, recorder = self._env, self._recorder
        self.communicator.microbatch = self._microbatch
        if recorder is None and self.meter is None:
            with torch.no_grad():
                self._code(key, tasks)(env, after)
            return
        if recorder is not None:
            recorder.action_begins()
        with torch.no_grad():
            for task in tasks:
                began = None if recorder is None else recorder.mark()
                self._run(task, env)
                if recorder is not None:
                    recorder.ran(0, task, began)
                if self.meter is not None:
                    report_value(self.meter, task, env, 0)
                finish(task, env, 0, self.meter, after, self.compiled)

    def _code(self, key: PieceKey, tasks: Sequence[Task]) -> Run:
        if key not in self._codes:
            self._codes[key] = straight_line(tasks, self.device, self._run)
        return self._codes[key]

    def _run(self, task: Task, env: Env) -> None:
        if task.is_wait:
            env[task.out] = self.communicator.wait(env[task.args[0].index], task.node.all_input_nodes[0])
        elif task.is_start:
            env[task.out] = self._started(task, env)
        else:
            perform(task, env, self.device)

    def _started(self, task: Task, env: Env) -> Any:
        operand, *rest = (fill(a, env) for a in task.args)
        try:
            return self.communicator.start(self.compiled.graph, task.node, operand, rest, task.owns_operand)
        except MeshweaveError:
            raise
        except Exception as error:
            raise failed(task, f"over {rest[-1]} failed", error) from error
