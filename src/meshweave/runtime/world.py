"""Where a program runs: which devices of the mesh this process has, and how they communicate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.engine.lower import ChannelCopy, lower
from meshweave.engine.task_graph import cycle, run_order
from meshweave.errors import MeshError, MeshweaveError, StepError
from meshweave.ir.collectives import TABLE, transfer
from meshweave.ir.graph import Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph, Transfer
from meshweave.ir.routes import Message
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
from meshweave.runtime.interfaces import Executor, Observer
from meshweave.runtime.local import boxes_of, piece_of, receive
from meshweave.runtime.serial import Alone, SerialExecutor

# The executor of virtual devices, which run on the calling thread in an order that is known before the first step.


@dataclass(frozen=True, slots=True)
class _DeviceCopy:
    """A communication: the tasks that post its operands and those that wait for its results, each with the index of
    its local device."""

    planned: ChannelCopy
    starts: tuple[tuple[int, Task], ...]
    waits: tuple[tuple[int, Task], ...]


class Mailbox:
    """What virtual devices of other stages have sent: by transfer, microbatch and sender, until all have received."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, int], dict[int, Tensor | None]] = {}
        self._waiting: dict[tuple[str, int], int] = {}  # how many devices have not received yet

    def put(self, entry: Transfer, message: tuple[str, int], device: int, value: Tensor) -> None:
        self._sent.setdefault(message, {})[device] = value
        self._waiting.setdefault(message, entry.target.mesh.num_devices)

    def take(self, entry: Transfer, message: tuple[str, int], device: int, on: torch.device) -> Tensor:
        """The piece of a device, assembled from what its senders (perhaps itself) have put."""
        sent, shape = self._sent[message], entry.spec.shape

        def part(message: Message) -> Tensor:
            piece = sent[message.sender]
            assert piece is not None
            return piece[piece_of(message.box, entry.source.box_of(shape, message.sender))]

        value = receive(entry, device, entry.routes.received_by(device), sent.get(device), part, on)
        self._waiting[message] -= 1
        if not self._waiting[message]:
            del self._sent[message], self._waiting[message]
        return value

    def clear(self) -> None:
        """Drop what nobody has received, after a failure."""
        self._sent.clear()
        self._waiting.clear()


class LocalExecutor:
    """Runs the tasks of virtual devices: `ranks[i]` on device `devices[i]`. Transfers with devices that are not among
    them go through a mailbox.

    A device runs until it waits for a communication that others have not begun, then it is the turn of the next. An
    operand that a start has posted stays in the cell of the start, until the copy is done (a collective) or this device
    has sent everything (a transfer); a copy writes its result to the cell of the wait. Raises StepError if devices
    would wait for each other.
    """

    def __init__(
        self,
        ranks: Sequence[Compiled],
        devices: Sequence[int],
        on: torch.device,
        meter: Meter | None = None,
        mailbox: Mailbox | None = None,
        places: Sequence[int] | None = None,
    ) -> None:
        """`places`: the indices of these devices among the local ones, for whoever observes them."""
        self.ranks, self.devices, self.on, self.meter = tuple(ranks), tuple(devices), on, meter
        self._places = tuple(range(len(devices)) if places is None else places)
        self._mailbox, self._microbatch = mailbox, 0
        roles = list({id(rank): rank for rank in self.ranks}.values())
        actions = [[[task.node for task in its] for its in rank.tasks.values()] for rank in roles]
        self.lowered = lower([rank.graph for rank in roles], self.devices, actions)
        self._own_keys = {copy.key for copy in self.lowered.copies if copy.op is transfer}
        self._transfers = {key: entry for rank in roles for key, entry in rank.graph.transfers.items()}
        order = run_order(self.lowered.graph, len(roles[0].tasks))
        if circle := cycle(self.lowered.graph, order):
            raise StepError(
                "devices wait for each other: a deadlock",
                got="\n    waits for ".join(map(self.lowered.describe, circle)),
                hint="run meshweave check, which finds deadlocks before anything runs",
            )
        tasks = [[task for its in rank.tasks.values() for task in its] for rank in self.ranks]
        self._order = {
            action: [self._step(task, tasks) for task in its] for action, its in zip(roles[0].tasks, order, strict=True)
        }
        self._fresh = [environment(rank, d) for rank, d in zip(self.ranks, self.devices, strict=True)]
        self._envs: list[Env] = []
        self._recorder: Observer | None = None

    def _step(self, number: int, tasks: Sequence[Sequence[Task]]) -> tuple[int, Task] | _DeviceCopy:
        """What a task of the graph does: a task of a local device, or a copy."""
        graph, first_copy = self.lowered.graph, self.lowered.first_copy

        def placed(number: int) -> tuple[int, Task]:
            i = graph.stream_of[number]
            return i, tasks[i][graph.index_of[number]]

        if number < first_copy:
            return placed(number)
        planned = self.lowered.copies[number - first_copy]
        return _DeviceCopy(planned, tuple(map(placed, planned.sources)), tuple(map(placed, planned.targets)))

    def record(self, recorder: Observer | None) -> None:
        self._recorder = recorder

    def environment(self) -> list[Env]:
        return [list(fresh) for fresh in self._fresh]

    def begin(self, envs: list[Env], microbatch: int = 0) -> None:
        self._envs, self._microbatch = envs, microbatch

    def post(self, action: str, envs: list[Env], microbatch: int) -> None:
        pass

    def finish_sends(self, waits: bool) -> None:
        if waits and self._mailbox is not None:
            self._mailbox.clear()

    def end(self) -> None:
        self._envs = []

    @torch.no_grad()
    def run(self, action: str, after: After | None = None) -> None:
        for step in self._order[action]:
            if isinstance(step, _DeviceCopy):
                self._copy(step)
            else:
                self._compute(*step, after)

    def _compute(self, i: int, task: Task, after: After | None) -> None:
        env, recorder = self._envs[i], self._recorder
        began = None if recorder is None else recorder.mark()
        passed = self._passed_on(task)
        if passed is not None and task.is_start:
            self._mailbox.put(*passed, self.devices[i], fill(task.args[0], env))  # type: ignore[union-attr]
        elif passed is not None:
            env[task.out] = self._mailbox.take(*passed, self.devices[i], self.on)  # type: ignore[union-attr]
            if recorder is not None:
                recorder.copied(self._places[i], task.node.all_input_nodes[0], began)
            if self.meter is not None:
                self.meter.on_value(self._places[i], task.node, env[task.out])
        elif task.is_start:
            env[task.out] = fill(task.args[0], env)
        elif not task.is_wait:
            perform(task, env, self.devices[i])
        if recorder is not None:
            recorder.ran(self._places[i], task, began)
        if self.meter is not None and not task.is_wait:  # the copy has reported the results of a copy
            report_value(self.meter, task, env, self._places[i])
        finish(task, env, self._places[i], self.meter, after, self.ranks[i])

    def run_piece(self, action: str, stops: tuple[str, ...], index: int) -> None:
        if index == 0:  # devices in turn on a thread hide nothing
            self.run(action)

    def _passed_on(self, task: Task) -> tuple[Transfer, tuple[str, int]] | None:
        """The transfer and the message of a start or wait that concerns devices elsewhere."""
        if self._mailbox is None or not (task.is_start or task.is_wait):
            return None
        start = task.node if task.is_start else task.node.all_input_nodes[0]
        key = str(start.args[-1])
        if start.target is not transfer or key in self._own_keys:
            return None
        return self._transfers[key], (key, self._microbatch)

    def _copy(self, copy: _DeviceCopy) -> None:
        planned, starts, waits = copy.planned, copy.starts, copy.waits
        operands = [self._envs[i][task.out] for i, task in starts]
        i, task = (starts or waits)[0]
        began = None if self._recorder is None else self._recorder.mark()
        try:
            if planned.op is transfer:
                results = [self._received(planned, operands, waits[0][0])]
            else:
                results = TABLE[planned.op].exchange(operands, [fill(a, self._envs[i]) for a in task.args[1:-1]])
        except MeshweaveError:
            raise
        except Exception as error:
            raise failed(task, f"over {planned.key} failed", error) from error
        operands.clear()
        if self._recorder is not None:
            for i, wait in waits:
                self._recorder.copied(self._places[i], wait.node.all_input_nodes[0], began)
        for (i, wait), value in zip(waits, results, strict=True):
            self._envs[i][wait.out] = value
            if self.meter is not None:
                self.meter.on_value(self._places[i], wait.node, value)
        for i, start in starts if planned.op is not transfer else ():
            self._envs[i][start.out] = None
            if self.meter is not None:
                self.meter.freed(self._places[i], start.node)

    def _received(self, copy: ChannelCopy, operands: Sequence[Tensor], i: int) -> Tensor:
        entry, device = self.ranks[i].graph.transfers[copy.key], self.devices[i]
        sent = {message.sender: x for message, x in zip(copy.messages, operands, strict=True)}

        def part(message: Message) -> Tensor:
            inside = entry.source.box_of(entry.spec.shape, message.sender)
            return sent[message.sender][piece_of(message.box, inside)]

        return receive(entry, device, copy.messages, sent.get(device), part, self.on)


def home_of(model: nn.Module) -> torch.device | None:
    """The CUDA device of a model's parameters; None if they are elsewhere."""
    return next((x.device for x in model.parameters() if x.is_cuda), None)


def free_bytes(device: torch.device) -> float:
    """Memory of a GPU that nobody has or PyTorch holds; of other devices: no limit."""
    if device.type != "cuda":
        return math.inf
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def checked_device(device: torch.device | str) -> torch.device:
    """A device on which a step can run in this process. Raises MeshError for any other."""
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise _no_device(device, "unknown device") from error
    if chosen.type not in ("cpu", "cuda"):
        raise _no_device(device, f"a {chosen.type} device")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise _no_device(device, f"{torch.cuda.device_count()} CUDA devices on this machine")
    return chosen


def _no_device(device: object, got: str) -> MeshError:
    hint = "omit device, or pass cpu or cuda"
    return MeshError("a step cannot run on this device", where=f"device={str(device)!r}", got=got, hint=hint)


# The time of a step grows with the square of the number of virtual devices: that of examples/mlp.py is 2 s on 512,
# some 10 s on 1,024 and 50 s on 2,048 (2 cores, torch 2.13, 2026-11).
MAX_VIRTUAL_DEVICES = 1024


def check_virtual_devices(mesh: Mesh) -> None:
    """Raise MeshError if a mesh has too many devices to be virtual devices of this process."""
    if mesh.num_devices > MAX_VIRTUAL_DEVICES:
        raise MeshError(
            "too many virtual devices for a single process",
            where=f"mesh {mesh}",
            got=f"{mesh.num_devices:,} devices",
            expected=f"at most {MAX_VIRTUAL_DEVICES:,}",
            hint="run a smaller mesh with the same axes, or start one process per device with torchrun; "
            "meshweave plan and meshweave simulate take meshes of many thousands of devices",
        )


class LocalWorld:
    """Every device of the mesh is a virtual device in this process: `devices` are the ids of its devices."""

    is_distributed = False

    def __init__(self, mesh: Mesh, device: torch.device | str | None = None) -> None:
        check_virtual_devices(mesh)
        self.mesh, self.devices = mesh, mesh.devices
        self.device = checked_device(device or "cpu")
        self._mailbox = Mailbox()

    def executor(
        self,
        roles: Sequence[RankGraph],
        ranks: Sequence[Compiled],
        meter: Meter | None,
        places: Sequence[int] | None = None,
    ) -> Executor:
        """The executor of `ranks[i]` on local device i, or on local device `places[i]`, one of those that run a stage.
        Every process calls it, with the same `roles`, before the first step."""
        if len(self.devices) == 1:
            return SerialExecutor(ranks[0], self.devices[0], Alone(), meter)
        if places is None:
            return LocalExecutor(ranks, self.devices, self.device, meter)
        devices = [self.devices[i] for i in places]
        return LocalExecutor(ranks, devices, self.device, meter, self._mailbox, places)

    def assemble(self, spec: Spec, layout: Layout, pieces: Sequence[Tensor]) -> Tensor:
        """The full tensor from the pieces on the local devices in the layout's mesh."""
        full = pieces[0].new_empty(spec.shape)
        holders = [device for device in self.devices if device in layout.mesh]
        for box, piece in zip(boxes_of(layout, spec.shape, holders), pieces, strict=True):
            full[box.slices()] = piece
        return full

    @contextmanager
    def guard(self) -> Iterator[None]:
        yield

    def call(self, name: str, detail: Any = (), *, meets: bool | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def note(self, choice: str) -> None:
        pass

    def check(self) -> None:
        pass

    def has_whole(self, layout: Layout) -> bool:
        return True

    def meet(self) -> None:
        pass
