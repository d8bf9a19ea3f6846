"""Virtual devices of one process: what their communications do, and the executor that runs them side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from meshweave.errors import StepError
from meshweave.ir.pieces import Box
from meshweave.ir.rank import RankGraph, Transfer, collectives, transfer
from meshweave.ir.routes import Message, routes
from meshweave.runtime.executor import After, Compiled, Env, Meter, Task, environment, evaluate, fill, finish

Values = list[Any]


def reduce_in_order(parts: Sequence[Tensor], op: str) -> Tensor:
    """Reduce in the order of the group: sums of half-precision values are taken in float32."""
    if op == "sum":
        wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
        total = parts[0].to(wide, copy=True)
        for part in parts[1:]:
            total += part
        return total.to(parts[0].dtype)
    combine = {"max": torch.maximum, "min": torch.minimum}[op]
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return total


def _all_gather(parts: Sequence[Tensor], args: Sequence[Any]) -> Values:
    return [torch.cat(list(parts), 0)] * len(parts)


def _all_reduce(parts: Sequence[Tensor], args: Sequence[Any]) -> Values:
    return [reduce_in_order(parts, args[0])] * len(parts)


def _reduce_scatter(parts: Sequence[Tensor], args: Sequence[Any]) -> Values:
    dealt = [part.chunk(len(parts), 0) for part in parts]
    return [reduce_in_order([row[i] for row in dealt], args[0]) for i in range(len(parts))]


def _all_to_all(parts: Sequence[Tensor], args: Sequence[Any]) -> Values:
    dealt = [part.chunk(len(parts), 0) for part in parts]  # blocks are equal, though not the same in every group
    return [torch.cat([row[i] for row in dealt], 0) for i in range(len(parts))]


_TABLE: dict[Any, Callable[[Sequence[Tensor], Sequence[Any]], Values]] = {
    collectives.all_gather_into_tensor.default: _all_gather,
    collectives.all_reduce.default: _all_reduce,
    collectives.reduce_scatter_tensor.default: _reduce_scatter,
    collectives.all_to_all_single.default: _all_to_all,
}


def exchange(op: Any, operands: Sequence[Tensor], args: Sequence[Any]) -> Values:
    """What every member of a group gets of a collective, in the order of the group; `args` without the group."""
    return _TABLE[op](operands, args)


def piece_of(box: Box, inside: Box) -> tuple[slice, ...]:
    """Where a global box lies in a piece that holds it."""
    pairs = zip(box.offset, box.size, inside.offset, strict=True)
    return tuple(slice(at - start, at - start + size) for at, size, start in pairs)


def receive(
    made: Transfer,
    device: int,
    messages: Sequence[Message],
    own: Tensor | None,
    part: Callable[[Message], Tensor],
    on: torch.device,
) -> Tensor:
    """A device's piece of a transfer's target, put together from what it has (`own`) and the parts that others sent."""
    shape = made.spec.shape
    mine = made.target.box_of(shape, device)
    if own is not None and len(messages) == 1 and messages[0].sender == device and own.shape == torch.Size(mine.size):
        return own
    piece = torch.empty(mine.size, dtype=made.spec.dtype, device=on)
    for message in messages:
        if message.sender == device:
            assert own is not None
            piece[piece_of(message.box, mine)] = own[piece_of(message.box, made.source.box_of(shape, device))]
        else:
            piece[piece_of(message.box, mine)] = part(message)
    return piece


class LocalExecutor:
    """Runs every virtual device of a process."""

    def __init__(
        self,
        roles: Sequence[RankGraph],
        ranks: Sequence[Compiled],
        devices: Sequence[int],
        on: torch.device,
        meter: Meter | None = None,
    ) -> None:
        self.ranks, self.devices, self.on, self.meter = tuple(ranks), tuple(devices), on, meter
        self._fresh = [environment(rank, d) for rank, d in zip(self.ranks, self.devices, strict=True)]
        self._envs: list[Env] = []
        self._posts: dict[Any, dict[int, Any]] = {}
        self._counts: dict[Any, int] = {}

    def environment(self) -> list[Env]:
        return [list(fresh) for fresh in self._fresh]

    def begin(self, envs: list[Env]) -> None:
        self._envs, self._posts, self._counts = envs, {}, {}

    def run(self, part: int, after: After | None = None) -> None:
        with torch.no_grad():
            live = {i: self._work(i, part, after) for i in range(len(self.devices))}
            while live:
                before = sum(self._counts.values()), len(live)
                for i in list(live):
                    if next(live[i], "done") == "done":
                        del live[i]
                if live and before == (sum(self._counts.values()), len(live)):
                    raise StepError("devices wait for each other", got=str([self.devices[i] for i in live]))

    def _work(self, i: int, part: int, after: After | None) -> Iterator[str]:
        rank, env, device = self.ranks[i], self._envs[i], self.devices[i]
        for task in rank.tasks[part]:
            if task.is_start:
                env[task.out] = self._start(rank.graph, task, env, device)
            elif task.is_wait:
                while (found := self._finished(rank.graph, env[task.args[0].index], device)) is None:
                    yield "waits"
                env[task.out] = found[0]
            else:
                env[task.out] = evaluate(task, env, device)
            finish(task, env, i, self.meter, after, rank)

    def _start(self, graph: RankGraph, task: Task, env: Env, device: int) -> Any:
        operand, *args = (fill(a, env) for a in task.args)
        key = args[-1] if task.function is transfer else (args[-1], graph.group_members(args[-1], device))
        count = self._counts[key, device] = self._counts.get((key, device), 0) + 1
        self._posts.setdefault((key, count), {})[device] = operand
        return task, key, count, args

    def _finished(self, graph: RankGraph, started: Any, device: int) -> Any:
        task, key, count, args = started
        posts = self._posts[key, count]
        if task.function is not transfer:
            group = key[1]
            if len(posts) < len(group):
                return None
            return [exchange(task.function, [posts[d] for d in group], args[:-1])[group.index(device)]]
        made = graph.transfers[key]
        if device not in made.target.mesh:
            return [None]
        messages = routes(made.source, made.target, made.spec.shape).received_by(device)
        if not all(m.sender in posts for m in messages):
            return None

        def part(message: Message) -> Tensor:
            inside = made.source.box_of(made.spec.shape, message.sender)
            return posts[message.sender][piece_of(message.box, inside)]

        return [receive(made, device, messages, posts.get(device), part, self.on)]
