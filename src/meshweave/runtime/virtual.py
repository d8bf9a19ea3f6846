"""The executor of virtual devices: the event machine, with a worker thread per device and per channel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Event, Lock, Thread
from time import thread_time
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from meshweave.engine.lower import ChannelCopy, lower
from meshweave.engine.machine import Action, Done, EventMachine, Failed, Idle, Release, Run
from meshweave.errors import MeshweaveError, StepError
from meshweave.ir.collectives import TABLE, transfer
from meshweave.ir.routes import Message
from meshweave.runtime.executor import (
    After,
    Compiled,
    Env,
    Meter,
    Task,
    TaskRecorder,
    environment,
    failed,
    fill,
    finish,
    perform,
    report_value,
)
from meshweave.runtime.local import piece_of, receive
from meshweave.runtime.streams import Streams

# A copy of so few bytes runs on the worker that finds it ready: waking another costs more than the copy (a wake-up is
# about 20 us under a contended interpreter lock; 2 shared cores copy 1 MiB in about 100 us; 2026-11, torch 2.13).
INLINE_BYTES = 1 << 20
# Runs whose tasks each took less processor time than this run one at a time: in parallel they would only compete for
# the interpreter lock (two threads of `add` break even with one at about 14 us per op; 2 cores, torch 2.13, 2026-11).
LIGHT_SECONDS = 20e-6
NUM_TURNS = 4
PATIENCE_SECONDS = 5e-3  # a run that has waited this long for its turn starts without: the current holder is not light


class Workers:
    """Threads that run their jobs, each in order. They own nothing but their queues, and end with them."""

    def __init__(self, count: int) -> None:
        self._queues: list[SimpleQueue[Callable[[], None] | None]] = [SimpleQueue() for _ in range(count)]
        self._started = [False] * count
        finalize(self, _stop, self._queues)

    def hand(self, worker: int, job: Callable[[], None]) -> None:
        """Queue a job for a worker. Its thread starts with its first job."""
        if not self._started[worker]:
            self._started[worker] = True
            queue = self._queues[worker]
            Thread(target=_serve, args=(queue,), name=f"meshweave worker {worker}", daemon=True).start()
        self._queues[worker].put(job)


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    with torch.no_grad():
        while (job := queue.get()) is not None:
            job()
            del job  # or the thread would keep its last job alive


def _stop(queues: Iterable[SimpleQueue[Any]]) -> None:
    for queue in queues:
        queue.put(None)


class Turns:
    """Serialises light runs, and lets heavy runs start at once.

    A run is identified by its first task. A run is light once a turn of it was light, and heavy after NUM_TURNS that
    were not (the first warms up, and others may disturb); until then runs go one at a time.
    """

    def __init__(self) -> None:
        self._turn = Lock()
        self._tried: Counter[tuple[int, int]] = Counter()
        self._known: dict[tuple[int, int], bool] = {}  # whether a run is light

    def is_light(self, run: Run) -> bool:
        """Whether a run is known to be light: not worth another thread."""
        return self._known.get((run.stream, run.start), False)

    @contextmanager
    def worker_turn(self, run: Run) -> Iterator[None]:
        place = (run.stream, run.start)
        if not self._known.get(place, True) or not self._turn.acquire(timeout=PATIENCE_SECONDS):
            yield
            return
        began = thread_time()
        try:
            yield
            if place not in self._known:
                self._tried[place] += 1
                is_light = thread_time() - began < LIGHT_SECONDS * (run.stop - run.start)
                if is_light or self._tried[place] == NUM_TURNS:
                    self._known[place] = is_light
        finally:
            self._turn.release()


@dataclass(slots=True)
class _Pass:
    """A pass over the step: its environments, and what the workers share about the running part."""

    envs: list[Env]
    lock: Lock = field(default_factory=Lock)
    idle: Event = field(default_factory=Event)
    num_active: int = 0  # runs in progress
    is_stopped: bool = False
    reached: int = -1  # every task up to this part is settled
    broken: BaseException | None = None  # a worker itself has failed: a bug in meshweave
    after: After | None = None

    def break_off(self, error: BaseException) -> None:
        self.broken, self.is_stopped = error, True
        self.idle.set()


class LocalExecutor:
    """Runs the tasks of all virtual devices: `ranks[i]` on device `devices[i]`, compute and communication in parallel.

    The machine says what may run. A worker that has finished a run reports it, continues with what it may run itself
    (its own stream, and runs and copies that are not worth waking another worker for) and queues the rest for their
    workers. An operand that a start has posted stays in the cell of the start, until the copy is done (a collective) or
    this device has sent everything (a transfer); a copy writes its result to the cell of the wait.
    """

    def __init__(
        self, ranks: Sequence[Compiled], devices: Sequence[int], on: torch.device, meter: Meter | None = None
    ) -> None:
        self.ranks, self.devices, self.on, self.meter = tuple(ranks), tuple(devices), on, meter
        roles = list({id(rank): rank for rank in self.ranks}.values())
        parts = [[[task.node for task in part] for part in rank.tasks] for rank in roles]
        self.lowered = lower([rank.graph for rank in roles], self.devices, parts)
        self._machine = EventMachine(self.lowered.schedule)
        self._tasks = [[task for part in rank.tasks for task in part] for rank in self.ranks]
        self._fresh = [environment(rank, d) for rank, d in zip(self.ranks, self.devices, strict=True)]
        self._streams = Streams(on, len(self.lowered.schedule.streams))
        self._workers = Workers(2 * len(self.devices))
        self._meter_lock, self._turns = Lock(), Turns()
        self._pass = _Pass([])
        self._recorder: TaskRecorder | None = None

    def record(self, recorder: TaskRecorder | None) -> None:
        self._recorder = recorder

    def environment(self) -> list[Env]:
        return [list(fresh) for fresh in self._fresh]

    def begin(self, envs: list[Env]) -> None:
        self._machine.reset()
        self._streams.reset()
        self._pass = _Pass(envs)

    def end(self) -> None:
        self._pass = _Pass([])

    def run(self, part: int, after: After | None = None) -> None:
        now, machine = self._pass, self._machine
        now.after = after
        now.idle.clear()
        self._streams.follow()
        try:
            self._workers.hand(0, partial(self._release, now, part))
            now.idle.wait()
        except BaseException:  # Ctrl-C: running tasks finish, no other starts
            self._stop(now)
            raise
        finally:
            now.after = None
        if now.broken is not None:
            raise now.broken
        if machine.cause is not None:
            cause = machine.cause[1]
            assert isinstance(cause, BaseException)
            raise cause
        if now.reached < part:
            lines = map(self.lowered.describe, machine.cycle() or machine.unfinished()[:1])
            raise StepError(
                "devices wait for each other: a deadlock",
                got="\n    waits for ".join(lines),
                hint="run meshweave check, which finds deadlocks before anything runs",
            )
        self._streams.join()

    # workers

    def _release(self, now: _Pass, part: int) -> None:
        """Begin a part. A worker does it, so that an interrupt of the caller leaves the machine consistent."""
        try:
            with now.lock:
                mine = self._deal(now, [] if now.is_stopped else self._machine.handle(Release(part)), 0)
        except BaseException as error:
            now.break_off(error)
        else:
            self._work(now, mine)

    def _stop(self, now: _Pass) -> None:
        """Let nothing more begin, and return when nothing runs: after at most a task of each worker. An interrupt
        meanwhile does not change that."""
        now.is_stopped = True
        handed = False
        while not now.idle.is_set():
            try:
                if not handed:  # if the part was never begun, nothing else reports that nothing runs
                    handed = True
                    self._workers.hand(0, partial(self._release, now, -1))
                now.idle.wait()
            except KeyboardInterrupt:
                continue

    def _deal(self, now: _Pass, actions: Iterable[Action], own: int) -> list[Run]:
        """Hand out the runs that may start. Returns those that the caller, who works on stream `own`, should run
        itself. Called with the lock acquired."""
        mine: list[Run] = []
        for action in actions:
            if type(action) is Run:
                now.num_active += 1
                if action.stream == own or self._turns.is_light(action) or self._is_small(now, action):
                    mine.append(action)
                else:
                    self._workers.hand(self._worker_of(action.stream), partial(self._work, now, [action]))
            elif type(action) is Idle:
                now.reached = action.part
        if not now.num_active:
            now.idle.set()
        return mine

    def _worker_of(self, stream: int) -> int:
        """Compute streams have a worker each; channels share an equal number of workers."""
        count = len(self.devices)
        return stream if stream < count else count + stream % count

    def _work(self, now: _Pass, todo: list[Run]) -> None:
        """Execute runs, and what follows from them on this thread."""
        try:
            while todo:
                run = todo.pop()
                event = self._do(now, run)
                with now.lock:
                    actions = [] if event is None else self._machine.handle(event)
                    now.is_stopped |= type(event) is Failed
                    now.num_active -= 1
                    todo += self._deal(now, [] if now.is_stopped else actions, run.stream)
        except BaseException as error:
            now.break_off(error)

    def _do(self, now: _Pass, run: Run) -> Done | Failed | None:
        """Run tasks of a stream. None when the pass was stopped meanwhile."""
        index, count = run.start, len(self.devices)
        try:
            with self._turns.worker_turn(run), self._streams.entered(run.stream):
                for index in range(run.start, run.stop):
                    if now.is_stopped:
                        return None
                    task = self.lowered.schedule.streams[run.stream][index]
                    self._streams.await_needs(self.lowered.schedule.needs[task])
                    if run.stream < count:
                        self._compute(now, run.stream, self._tasks[run.stream][index])
                    else:
                        self._copy(now, self.lowered.copies[task - self.lowered.first_copy])
                self._streams.record(self.lowered.schedule.streams[run.stream][run.stop - 1])
            return Done(run.stream, run.stop)
        except BaseException as error:
            return Failed(run.stream, index, error)

    def _compute(self, now: _Pass, i: int, task: Task) -> None:
        env, recorder = now.envs[i], self._recorder
        began = None if recorder is None else recorder.mark()
        if task.is_start:
            env[task.out] = fill(task.args[0], env)
        elif not task.is_wait:
            perform(task, env, self.devices[i])
        if recorder is not None:
            recorder.ran(i, task, began)
        if self.meter is None:
            finish(task, env, i, None, now.after, self.ranks[i])
        else:
            with self._meter_lock:
                if not task.is_wait:  # the copy has reported the results of a copy
                    report_value(self.meter, task, env, i)
                finish(task, env, i, self.meter, now.after, self.ranks[i])

    # communication

    def _at(self, task: int) -> tuple[int, Task]:
        """The local device that a task of the schedule runs on, and its task."""
        schedule = self.lowered.schedule
        i = schedule.stream_of[task]
        return i, self._tasks[i][schedule.index_of[task]]

    def _is_small(self, now: _Pass, run: Run) -> bool:
        """Whether a run is a copy that is not worth a hand-over."""
        schedule = self.lowered.schedule
        if run.stream < len(self.devices) or run.stop - run.start > 1:
            return False
        copy = self.lowered.copies[schedule.streams[run.stream][run.start] - self.lowered.first_copy]
        operands = (now.envs[i][task.out] for i, task in map(self._at, copy.sources))
        return sum(x.nbytes for x in operands if isinstance(x, Tensor)) <= INLINE_BYTES

    def _copy(self, now: _Pass, copy: ChannelCopy) -> None:
        starts, waits = [self._at(t) for t in copy.sources], [self._at(t) for t in copy.targets]
        operands = [now.envs[i][task.out] for i, task in starts]
        i, task = (starts or waits)[0]
        began = None if self._recorder is None else self._recorder.mark()
        args: list[Any] = []
        try:
            if copy.op is transfer:
                results = [self._received(copy, operands, waits[0][0])]
            else:
                args = [fill(a, now.envs[i]) for a in task.args[1:-1]]
                results = TABLE[copy.op].exchange(operands, args)
        except MeshweaveError:
            raise
        except Exception as error:
            raise failed(task, f"over {copy.key} failed", error) from error
        self._streams.share([*operands, *args, *results], [i for i, _ in (*starts, *waits)])
        operands.clear()
        if self._recorder is not None:
            for i, wait in waits:
                self._recorder.copied(i, wait.node.all_input_nodes[0], began)
        for (i, wait), value in zip(waits, results, strict=True):
            now.envs[i][wait.out] = value
            self._tell(i, wait, value)
        if copy.op is not transfer:
            for i, start in starts:
                now.envs[i][start.out] = None
                self._tell(i, start, None)

    def _received(self, copy: ChannelCopy, operands: Sequence[Tensor], i: int) -> Tensor:
        entry, device = self.ranks[i].graph.transfers[copy.key], self.devices[i]
        sent = {message.sender: x for message, x in zip(copy.messages, operands, strict=True)}

        def part(message: Message) -> Tensor:
            inside = entry.source.box_of(entry.spec.shape, message.sender)
            return sent[message.sender][piece_of(message.box, inside)]

        return receive(entry, device, copy.messages, sent.get(device), part, self.on)

    def _tell(self, i: int, task: Task, value: Tensor | None) -> None:
        """Report to the meter a result of a copy, or an operand that it has released."""
        if self.meter is not None:
            with self._meter_lock:
                if value is None:
                    self.meter.freed(i, task.node)
                else:
                    self.meter.on_value(i, task.node, value)
