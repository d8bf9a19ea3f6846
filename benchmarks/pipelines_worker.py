"""A rank of benchmarks/pipelines.py: ways to train the same stages, in turns; rank 0 prints medians as JSON.

Every stage sleeps for its compute, so that several processes on a few cores compute at the same time, as GPUs do.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

import meshweave as mw

SECONDS, WIDTH, ROWS, MICROBATCHES = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), 8
PEERS: dict[str, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zbv": (ScheduleZBVZeroBubble, 2),
}


def slow(name: str, sleeps: tuple[bool, bool]) -> Any:
    """An op that returns its operand, and sleeps in forward and in backward as told."""

    def forward(x: Tensor) -> Tensor:
        time.sleep(SECONDS * sleeps[0])
        return x.clone()

    def backward(gradient: Tensor, x: Tensor) -> Tensor:
        time.sleep(SECONDS * sleeps[1])
        return gradient.clone()

    ops = [torch.library.custom_op(f"slow::{name}{i}", f, mutates_args=()) for i, f in enumerate((forward, backward))]
    for op in ops:
        op.register_fake(lambda *operands: torch.empty_like(operands[0]))
    ops[0].register_autograd(
        lambda ctx, gradient: ops[1](gradient, ctx.saved_tensors[0]),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    mw.register_rule(ops[0], "b w -> b w" if name == "input" else "w -> w", backward=ops[1])
    return ops[0]


INPUT, WEIGHT = slow("input", (True, True)), slow("weight", (False, True))


class Layer(nn.Module):
    """F, I and W of SECONDS each."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return INPUT(x) * WEIGHT(self.scale)


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def own(name: str, x: Tensor, ranks: int) -> Callable[[], Any]:
    model = Layers(2 * ranks)
    step = mw.compile(
        model,
        loss=lambda out, batch: out.square().mean(),
        example={"x": x},
        optimizer=torch.optim.SGD(model.parameters(), 1e-3),
        mesh=f"pp={ranks}",
        accumulate=MICROBATCHES,
        profile="alpha-beta",
        passes="none",
        pipeline=None if name == "sequential" else name,
    )
    return lambda: step({"x": x})


def peer(name: str, x: Tensor, ranks: int, is_compiled: bool) -> Callable[[], Any]:
    schedule, per_rank = PEERS[name]
    rank, count = dist.get_rank(), ranks * per_rank
    stages = [rank] if per_rank == 1 else [rank, count - 1 - rank if name == "zbv" else rank + ranks]
    parts = [Layers(2 * ranks // count) for _ in stages]
    made = [
        PipelineStage(torch.compile(part) if is_compiled else part, stage, count, x.device)
        for part, stage in zip(parts, stages, strict=True)
    ]
    run = schedule(made[0] if per_rank == 1 else made, MICROBATCHES, loss_fn=lambda out, _: out.square().mean())
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        run.step(*((x,) if 0 in stages else ()), **({"target": x} if count - 1 in stages else {}))
        optimizer.step()

    return step


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ranks, x = dist.get_world_size(), torch.randn(ROWS * MICROBATCHES, WIDTH)
    ways = {name: own(name, x, ranks) for name in ("sequential", *PEERS, "zb-h1")}
    ways |= {f"torch {name}": peer(name, x, ranks, False) for name in PEERS}
    ways["torch 1f1b, compiled"] = peer("1f1b", x, ranks, True)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(int(sys.argv[4]) + 1):
        for name, run in ways.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            dist.barrier()
            if number:
                seconds[name].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        print(json.dumps({name: statistics.median(each) for name, each in seconds.items()}), flush=True)


if __name__ == "__main__":
    main()
