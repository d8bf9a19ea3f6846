"""A compiled step with its state: takes batches, keeps parameters, saves and loads."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshweave.errors import CheckpointError, LayoutError, StepError
from meshweave.ir.graph import Input
from meshweave.ir.layout import Layout
from meshweave.ir.rank import RankGraph
from meshweave.runtime import checkpoint
from meshweave.runtime.executor import Executor, Meter, Task, Values, compile_tasks
from meshweave.runtime.state import LASTING, Key, State
from meshweave.runtime.world import World, boxes_of

MICRO, UPDATE = 0, 1


@dataclass(frozen=True, slots=True)
class Settings:
    """What a session keeps and checks. `accumulate` is the number of microbatches of a step."""

    accumulate: int = 1
    seed: int = 0
    keep_gradients: bool = False
    check_finite: bool = True


class Session:
    """Runs one rank graph step by step on the devices of a world.

    A failed step leaves the state of the last completed one, unless the failure came during the update: then the
    state says so and refuses to go on.
    """

    def __init__(self, graph: RankGraph, world: World, settings: Settings, meter: Meter | None = None) -> None:
        self.graph, self.world, self.settings = graph, world, settings
        world.prepare(graph)
        kept = {"loss", "norm", "buffer", "param", "state"} | ({"grad"} if self._needs_gradients() else set())
        compiled = compile_tasks(graph, world.device, lambda kind, name: kind in kept)
        self.executor = Executor(compiled, world.positions, world.communicator, world.device, meter)
        self.state = State(graph, world.positions, world.device)
        self.metrics: dict[str, float] = {}
        self._gradients: dict[str, list[Tensor]] = {}
        self._slots = {(i.kind, i.name): s for i, s in zip(graph.inputs, compiled.inputs, strict=True)}
        self._results = list(zip(graph.outputs, compiled.outputs, strict=True))

    def _needs_gradients(self) -> bool:
        return self.settings.keep_gradients or self.settings.accumulate > 1

    # running

    def run(self, micros: Sequence[Mapping[str, Tensor]], lrs: Sequence[float]) -> float:
        """One step over its microbatches; the loss is their mean. `lrs` are the learning rates of the groups.

        Raises StepError when the loss is not finite, before anything is updated.
        """
        self.state.check_usable()
        with self.world.guard():
            env, loss = self._forward_backward(micros)
            if self.settings.check_finite and not math.isfinite(loss):
                raise StepError(
                    f"the loss of step {self.state.num_steps + 1} is {loss}",
                    got="a loss that is not finite; nothing was updated",
                    hint="lower the learning rate, clip gradients or look at the batch; "
                    "check_finite=False carries on regardless",
                )
            self._update(env, lrs)
        if self.settings.keep_gradients:
            self._gradients = {n: env[slot] for (kind, n), slot in self._results if kind == "grad"}  # type: ignore[misc]
        self.metrics = {"loss": loss, **self._norm(env)}
        return loss

    def _forward_backward(self, micros: Sequence[Mapping[str, Tensor]]) -> tuple[list[Values | None], float]:
        losses = []
        carried: dict[Key, list[Tensor]] = {}
        env: list[Values | None] = []
        for i, batch in enumerate(micros):
            env = self._inputs(batch, self.state.num_steps * len(micros) + i, carried)
            self.executor.run(env, MICRO)
            losses.append(float(self._result(env, "loss", "")[0]))
            carried = {
                ("acc" if kind == "grad" else kind, name): env[slot]  # type: ignore[misc]
                for (kind, name), slot in self._results
                if kind == "buffer" or (kind == "grad" and self.settings.accumulate > 1)
            }
        self._buffers = {key: value for key, value in carried.items() if key[0] == "buffer"}
        return env, sum(losses) / len(losses)

    def _inputs(
        self, batch: Mapping[str, Tensor], draw: int, carried: Mapping[Key, list[Tensor]]
    ) -> list[Values | None]:
        env = self.executor.environment()
        count = len(self.world.positions)
        for item, layout in zip(self.graph.inputs, self.graph.layouts, strict=True):
            slot = self._slots[item.kind, item.name]
            if (item.kind, item.name) in carried:
                env[slot] = carried[item.kind, item.name]
            elif item.kind in LASTING:
                env[slot] = self.state.pieces[item.kind, item.name]
            elif item.kind == "batch":
                env[slot] = self._batch_pieces(item, layout, batch[item.name])
            elif item.kind == "acc":
                env[slot] = [
                    torch.zeros(b.size, dtype=item.spec.dtype, device=self.world.device)
                    for b in boxes_of(layout, item.spec.shape, self.world.positions)
                ]
            elif item.kind == "constant":
                env[slot] = [self.graph.constants[item.name].to(self.world.device)] * count
            elif item.name == "draw":
                env[slot] = [torch.tensor(draw, dtype=torch.int64, device=self.world.device)] * count
        return env

    def _batch_pieces(self, item: Input, layout: Layout, value: Tensor) -> Values:
        """Pieces of a global tensor; or the tensor itself where a process holds one device and was given its piece."""
        boxes = boxes_of(layout, item.spec.shape, self.world.positions)
        if value.dtype != item.spec.dtype:
            raise _other_batch(item, value, self.settings)
        if tuple(value.shape) == item.spec.shape:
            return [value[b.slices()].to(self.world.device) for b in boxes]
        if self.world.is_distributed and tuple(value.shape) == boxes[0].size:
            return [value.to(self.world.device)]
        raise _other_batch(item, value, self.settings)

    def _update(self, env: list[Values | None], lrs: Sequence[float]) -> None:
        count = len(self.world.positions)
        numbers = {"step": float(self.state.num_steps + 1), **{f"lr.{g}": lr for g, lr in enumerate(lrs)}}
        for name, number in numbers.items():
            slot = self._slots.get(("scalar", name))
            if slot is not None:
                env[slot] = [torch.tensor(number, dtype=torch.float32, device=self.world.device)] * count
        replaced = {slot: key for key, slot in self._results if key[0] in ("param", "state")}
        with _uninterrupted():
            self.state.torn = bool(replaced)
            for key in replaced.values():
                del self.state.pieces[key]

            def commit(task: Task) -> None:
                if task.out in replaced:
                    self.state.pieces[replaced[task.out]] = env[task.out]  # type: ignore[assignment]

            self.executor.run(env, UPDATE, commit)
            # A buffer may be a view of the batch, which is the caller's.
            self.state.pieces.update({key: [piece.clone() for piece in held] for key, held in self._buffers.items()})
            self._buffers = {}
            self.state.num_steps += 1
            self.state.torn = False

    def _result(self, env: list[Values | None], kind: str, name: str) -> Values:
        slot = next(slot for key, slot in self._results if key == (kind, name))
        return env[slot]  # type: ignore[return-value]

    def _norm(self, env: list[Values | None]) -> dict[str, float]:
        return {"grad_norm": float(self._result(env, "norm", "")[0])} if ("norm", "") in self.graph.outputs else {}

    # looking at values

    def full(self, kind: str, pieces: Mapping[str, list[Tensor]] | None = None) -> dict[str, Tensor]:
        """Full tensors by name of one kind (param, buffer, state), or of gradients handed in. All processes call it."""
        source = "param" if kind == "grad" else kind
        found = {}
        for item, layout in zip(self.graph.inputs, self.graph.layouts, strict=True):
            held = pieces.get(item.name) if pieces is not None else self.state.pieces.get((kind, item.name))
            if item.kind == source and held is not None:
                found[item.name] = self.world.assemble(item.spec.shape, layout, held)
        return found

    def gradients(self) -> dict[str, Tensor]:
        """Full gradients of the last step by parameter name. StepError unless the session keeps them."""
        if not self.settings.keep_gradients:
            raise StepError("gradients were not kept", hint="compile with keep_gradients=True")
        return self.full("grad", self._gradients)

    def pieces(self, kind: str) -> Iterator[tuple[Input, Layout, list[Tensor]]]:
        """Input, layout and held pieces of every value of one kind."""
        for item, layout in self.state.items:
            if item.kind == kind:
                yield item, layout, self.state.pieces[kind, item.name]

    # checkpoints

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state as a torch.distributed.checkpoint that any other mesh may load."""
        self.state.check_usable()
        info = {"num_steps": self.state.num_steps, "seed": self.settings.seed}
        with self.world.guard():
            checkpoint.save(path, self.state.views(), info)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from a checkpoint of the same model, saved on whatever mesh.

        The old state lives until the new one is whole, so that a load that fails changes nothing.
        """
        with self.world.guard():
            loaded = self.state.blank()
            info = checkpoint.load(path, loaded.views())
            if int(info["seed"]) != self.settings.seed:
                raise CheckpointError(
                    "the checkpoint was trained with another seed",
                    where=str(path),
                    got=str(info["seed"]),
                    expected=str(self.settings.seed),
                    hint="compile with that seed, so that dropout goes on as it would have",
                )
            loaded.num_steps = int(info["num_steps"])
            self.state = loaded


def _other_batch(item: Input, value: Tensor, settings: Settings) -> LayoutError:
    parts = f" in each of {settings.accumulate} microbatches" if settings.accumulate > 1 else ""
    return LayoutError(
        f"batch entry '{item.name}' differs from the example",
        got=f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}",
        expected=f"{item.spec}{parts}",
        hint="a compiled step takes batches of one shape: pad or drop the last batch, or compile once more for it",
    )


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done, so that an update is never left half-way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before: Callable[..., Any] | int | None = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt
