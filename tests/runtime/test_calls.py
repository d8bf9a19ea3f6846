"""Calls that communicate and that ranks do not make alike are an error on every rank within seconds."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.processes import Job
from tests.training import mse
from torch import Tensor, nn

import meshweave as mw
from meshweave.errors import MeshweaveError
from meshweave.runtime.calls import KEPT, Posted, failure_of
from meshweave.runtime.cluster import shutdown
from meshweave.runtime.rows import ALWAYS_FIRST

SECONDS = 10.0  # on a machine with other work; on a quiet one under 2 s


def made(mesh: str) -> mw.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return mw.compile(model, loss=mse, example=rows(8), optimizer=optimizer, mesh=mesh, profile="alpha-beta")


def rows(num: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(num)
    return {"input": torch.randn(num, 4, generator=draw), "y": torch.randn(num, 2, generator=draw)}


def evaluate_alone(step: mw.TrainStep, rank: int) -> None:
    step.evaluate(rows(8)) if rank == 0 else step(rows(8))


def evaluate_twice(step: mw.TrainStep, rank: int) -> None:
    for _ in range(2 - rank):
        step.evaluate(rows(8))
    step(rows(8))


def save_alone(step: mw.TrainStep, rank: int) -> None:
    if rank == 1:
        step.save("/nowhere/at/all")
    step(rows(8))


def parameters_alone(step: mw.TrainStep, rank: int) -> None:
    if rank == 0:
        step.parameters()
    step(rows(8))


def skip_a_step(step: mw.TrainStep, rank: int) -> None:
    for _ in range(3 - rank):
        step(rows(8))
    step.save("/nowhere/at/all")


def another_size(step: mw.TrainStep, rank: int) -> None:
    """After the calls in which batches are compared."""
    for _ in range(ALWAYS_FIRST):
        step(rows(8))
    step(rows(8 if rank else 4))


def leave_early(step: mw.TrainStep, rank: int) -> None:
    for _ in range(2 + 10 * rank):
        step(rows(8))
    shutdown(step.session.world)  # as a script that ends; rank 1 alone comes no further than its third step


def two_models(step: mw.TrainStep, rank: int) -> None:
    other = made("dp=2")
    (step if rank else other)(rows(8))


def forward_alone(step: mw.TrainStep, rank: int) -> None:
    if rank == 1:
        step.model(rows(8)["input"])
    step(rows(8))


def layer_alone(step: mw.TrainStep, rank: int) -> None:
    model = copy.deepcopy(step.model)
    if rank == 1:
        model[0](rows(8)["input"])
    step(rows(8))


def compile_alone(step: mw.TrainStep, rank: int) -> None:
    if rank == 1:
        made("dp=2")
    step(rows(8))


# By name the mesh, what ranks do, and what the error says.
SCENARIOS: dict[str, tuple[str, Callable[[mw.TrainStep, int], None], tuple[str, ...]]] = {
    "evaluate": ("dp=2", evaluate_alone, ("call 3", "rank 0: evaluate", "rank 1: step", "under `if rank == 0`")),
    "twice": ("fsdp=2", evaluate_twice, ("call 4", "rank 0: evaluate", "rank 1: step")),
    "save": ("dp=2", save_alone, ("call 3", "rank 0: step", "rank 1: save")),
    "parameters": ("fsdp=2", parameters_alone, ("call 3", "rank 0: parameters", "rank 1: step")),
    "skip": ("dp=2", skip_a_step, ("call 5", "rank 0: step", "rank 1: save")),
    "size": ("dp=2", another_size, ("call 19", "rank 0: step (input [4, 4]", "rank 1: step (input [8, 4]")),
    "leave": (
        "dp=2",
        leave_early,
        ("has ended its script", "call 5", "never, its script has ended after call 4 (step"),
    ),
    "forward": ("fsdp=2", forward_alone, ("call 3", "rank 0: step", "rank 1: forward of Sequential")),
    "layer": ("fsdp=2", layer_alone, ("call 3", "rank 0: step", "rank 1: forward of Linear")),
    "compile": ("dp=2", compile_alone, ("call 3", "rank 0: step", "rank 1: mw.compile")),
    "compile first": ("dp=2", lambda step, rank: compile_alone(step, 1 - rank), ("rank 0: mw.compile", "rank 1: step")),
    "models": ("dp=2", two_models, ("call 4", "rank 0: step of model 2", "rank 1: step")),
}


def job(pipe: Connection, name: str) -> dict[str, Any]:
    mesh, does, _ = SCENARIOS[name]
    rank, step = dist.get_rank(), made(mesh)
    step(rows(8))
    began = time.monotonic()
    try:
        does(step, rank)
    except MeshweaveError as error:
        return {"text": str(error), "seconds": time.monotonic() - began}
    return {"text": "none"}


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", SCENARIOS)
def test_calls_that_ranks_do_not_share_are_named_on_every_rank(start: Callable[..., Job], name: str) -> None:
    outcomes = start(f"{__name__}:job", 2, name).finish(60)
    if name == "leave":  # the rank that has ended is no longer there to raise
        assert outcomes.pop(0) == {"text": "none"}
    for outcome in outcomes:
        for words in SCENARIOS[name][2]:
            assert words in outcome["text"], outcome["text"]
        assert outcome["seconds"] < SECONDS, outcome


def job_alike(pipe: Connection) -> dict[str, Any]:
    """Whole parameters are read on one rank; calls of any kind in one order; ranks that are late."""
    rank, step = dist.get_rank(), made("dp=2")
    step(rows(8))
    if rank == 0:
        time.sleep(2.5)  # as one that writes a log
        assert set(step.parameters()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for _ in range(2):
        step(rows(8))
        step.evaluate(rows(8))
        step.evaluate(rows(4))
        step.forward(rows(8))
        step.backward()
        step.update()
    other = made("fsdp=2")
    losses = [one(rows(8)) for _ in range(3) for one in (step, other)]
    assert set(other.parameters()) == set(step.parameters())
    return {"losses": [float(loss) for loss in losses], "num": step.num_steps}


@pytest.mark.multiprocess
def test_calls_that_ranks_share_go_on(start: Callable[..., Job]) -> None:
    first, second = start(f"{__name__}:job_alike", 2).finish(60)
    assert first.get("num") == 8, first
    assert first == second


def test_posts_are_compared_where_both_have_them() -> None:
    ours = Posted(3, True, ("step", "step", "evaluate"))
    assert ours.differs_from(Posted(2, False, ("step", "step"))) is None  # late
    assert ours.differs_from(Posted(2, False, ("step", "step"), has_ended=True)) == 3
    assert ours.differs_from(Posted(3, True, ("step", "step", "step"))) == 3
    assert Posted(3, False, ours.calls).differs_from(Posted(2, False, ("step", "step"), has_ended=True)) is None
    far = Posted(30, True, ("save",) * KEPT)
    assert ours.differs_from(far) is None  # too far ahead to say
    assert ours.differs_from(Posted()) is None
    text = failure_of(3, {0: ours, 1: far, 2: Posted(), 3: Posted(2, False, ("step", "step"))})["got"]
    assert text == (
        "call 3 that communicates is rank 0: evaluate; rank 1: past, now in call 30 (save); "
        "rank 2: not begun, after no call; rank 3: not begun, after call 2 (step)"
    )
