"""Calls that communicate and that ranks do not make alike are an error on every rank within seconds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.processes import Job, free_port
from tests.training import mse
from torch import Tensor, nn

import meshweave as mw
from meshweave.errors import MeshweaveError
from meshweave.runtime.calls import KEPT, Posted, failure_of
from meshweave.runtime.cluster import shutdown
from meshweave.runtime.rows import ALWAYS_FIRST

SECONDS = 60.0  # on a machine with other work; on a quiet one under 2 s


def made(mesh: str, dropout: float = 0.0) -> mw.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), *([nn.Dropout(dropout)] if dropout else []))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
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


def compile_alone(step: mw.TrainStep, rank: int) -> None:
    if rank == 1:
        made("dp=2")
    step(rows(8))


def eval_alone(step: mw.TrainStep, rank: int) -> None:
    step.model.train(rank == 0)
    step(rows(8))


def eval_compiled_alone(step: mw.TrainStep, rank: int) -> None:
    """Both programs are there, and have run on both ranks."""
    step.model.eval()
    step(rows(8))
    eval_alone(step, rank)


def option_alone(step: mw.TrainStep, rank: int) -> None:
    """After the calls in which settings are compared."""
    assert step.optimizer is not None
    for _ in range(ALWAYS_FIRST):
        step(rows(8))
    step.optimizer.param_groups[0]["nesterov"] = rank == 1
    step(rows(8))


def group_alone(step: mw.TrainStep, rank: int) -> None:
    assert step.optimizer is not None
    if rank == 0:
        step.optimizer.param_groups[0]["params"].pop()
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
    "compile": ("dp=2", compile_alone, ("call 3", "rank 0: step", "rank 1: mw.compile")),
    "compile first": ("dp=2", lambda step, rank: compile_alone(step, 1 - rank), ("rank 0: mw.compile", "rank 1: step")),
    "eval": (
        "dp=2",
        eval_alone,
        ("rank 0: step, which runs program 1", "rank 1: step, which compiles program 2", "model.eval()"),
    ),
    "eval, compiled": ("fsdp=2", eval_compiled_alone, ("rank 0: step, which runs program 1", "runs program 2")),
    "option": (
        "fsdp=2",
        option_alone,
        ("which goes on as compiled", "which compiles again: the optimizer's options require another update"),
    ),
    "group": ("dp=2", group_alone, ("rank 0: step, which compiles again", "rank 1: step, which goes on as compiled")),
    "models": ("dp=2", two_models, ("call 4", "rank 0: step of model 2", "rank 1: step")),
}


def job(pipe: Connection, name: str) -> dict[str, Any]:
    mesh, does, _ = SCENARIOS[name]
    rank, step = dist.get_rank(), made(mesh, 0.5 if name in ("eval", "eval, compiled") else 0.0)
    step(rows(8))
    began = time.monotonic()
    try:
        does(step, rank)
    except (MeshweaveError, ValueError) as error:
        return {"text": str(error), "seconds": time.monotonic() - began}
    return {"text": "none"}


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", SCENARIOS)
def test_calls_that_ranks_do_not_share_are_named_on_every_rank(start: Callable[..., Job], name: str) -> None:
    outcomes = start(f"{__name__}:job", 2, name).finish(240)
    if name == "leave":  # the rank that has ended is no longer there to raise
        assert outcomes.pop(0) == {"text": "none"}
    for outcome in outcomes:
        for words in SCENARIOS[name][2]:
            assert words in outcome["text"], outcome["text"]
        assert outcome["seconds"] < SECONDS, outcome


SCRIPT = """
import time, torch, meshweave as mw
from torch import nn
model = nn.Linear(4, 2)
rows = {"input": torch.ones(8, 4)}
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
step = mw.compile(
    model, loss=lambda out, batch: out.mean(), example=rows, optimizer=sgd, mesh="dp=2", profile="alpha-beta"
)
for i in range(40):
    step(rows)
    if i == 3 and torch.distributed.get_rank() == 1:
        raise KeyError("no such column")
"""


@pytest.mark.multiprocess
def test_an_exception_in_the_script_of_one_rank_is_shown_by_the_others(tmp_path: Path) -> None:
    script, port, began = tmp_path / "train.py", free_port(), time.monotonic()
    script.write_text(SCRIPT)
    jobs = []
    for rank in range(2):
        of_job = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        jobs.append(
            subprocess.Popen([sys.executable, script], env={**os.environ, **of_job}, stderr=subprocess.PIPE, text=True)
        )
    texts = [job.communicate(timeout=90)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [1, 1]
    assert "a rank has ended its script while others go on" in texts[0], texts[0]
    assert "rank 1 by KeyError: 'no such column'" in texts[0]
    assert time.monotonic() - began < 60


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
    first, second = start(f"{__name__}:job_alike", 2).finish(240)
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
    asks, runs = replace(ours, choices=("goes on", "runs 1")), replace(ours, choices=("goes on", "runs 2"))
    assert ours.differs_from(asks) is None  # late
    assert asks.differs_from(runs) == 3
    assert "rank 0: evaluate, which runs 1; rank 1: evaluate, which runs 2" in failure_of(3, {0: asks, 1: runs})["got"]
    text = failure_of(3, {0: ours, 1: far, 2: Posted(), 3: Posted(2, False, ("step", "step"))})["got"]
    assert text == (
        "call 3 that communicates is rank 0: evaluate; rank 1: past, now in call 30 (save); "
        "rank 2: not begun, after no call; rank 3: not begun, after call 2 (step)"
    )


def test_batches_of_different_sizes_are_said_to_be_that() -> None:
    """The usual cause is padding to the longest row of a rank, not a call that some ranks leave out."""
    short, long, other = (Posted(1, True, (call,)) for call in ("step (x [4, 6])", "step (x [4, 7])", "save"))
    error = failure_of(1, {0: short, 1: long})
    assert "different sizes" in error["what"]
    assert "padded to the same length" in error["hint"]
    assert "rank 0: step (x [4, 6]); rank 1: step (x [4, 7])" in error["got"]
    assert "different things" in failure_of(1, {0: short, 1: other})["what"]
