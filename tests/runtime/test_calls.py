"""Calls that ranks do not make alike, and processes that end, are an error on every rank within seconds; slow processes
are not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
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
from meshweave.errors import MeshweaveError, StepError
from meshweave.runtime import coordinator, process_groups, watch
from meshweave.runtime import rows as rows_module
from meshweave.runtime.cluster import shutdown
from meshweave.runtime.coordinator import different_calls
from meshweave.runtime.process_groups import ClusterCommunicator
from meshweave.runtime.rows import ALWAYS_FIRST

SECONDS = 60.0  # on a machine with other work; on a quiet one under 10 s


def be_impatient() -> None:
    """Ranks wait a quarter of the time that they do wait: for others, before they post a call, and after a failure."""
    coordinator.GRACE = watch.GRACE = 0.5  # type: ignore[misc]
    watch.STUCK, watch.LOCKSTEP, watch._LOOK = 1.0, 0.5, 0.25  # type: ignore[misc]


def made(mesh: str, dropout: float = 0.0, kind: type[nn.Sequential] = nn.Sequential) -> mw.TrainStep:
    torch.manual_seed(0)
    model = kind(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), *([nn.Dropout(dropout)] if dropout else []))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return mw.compile(model, loss=mse, example=rows(8), optimizer=optimizer, mesh=mesh, profile="alpha-beta")


def rows(num: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(num)
    return {"input": torch.randn(num, 4, generator=draw), "y": torch.randn(num, 2, generator=draw)}


def evaluate_alone(step: mw.TrainStep, rank: int) -> None:
    step.evaluate(rows(8)) if rank == 0 else step(rows(8))


def save_alone(step: mw.TrainStep, rank: int) -> None:
    if rank == 1:
        step.save("/nowhere/at/all")
    step(rows(8))


def parameters_alone(step: mw.TrainStep, rank: int) -> None:
    if rank == 0:
        step.parameters()
    step(rows(8))


def forward_alone(step: mw.TrainStep, rank: int) -> None:
    if rank == 0:
        step.model(rows(8)["input"])
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


# By name the mesh, what ranks do, and what the error says.
SCENARIOS: dict[str, tuple[str, Callable[[mw.TrainStep, int], None], tuple[str, ...]]] = {
    "evaluate": ("dp=2", evaluate_alone, ("call 3", "rank 0: evaluate", "rank 1: step", "under `if rank == 0`")),
    "save": ("dp=2", save_alone, ("call 3", "rank 0: step", "rank 1: save")),
    "parameters": ("fsdp=2", parameters_alone, ("call 3", "rank 0: parameters", "rank 1: step")),
    "forward": (
        "fsdp=2",
        forward_alone,
        (
            *("call 3", "rank 0: model(x), which gathers sharded parameters at tests/runtime/test_calls.py"),
            *("rank 1: step", "step.evaluate(batch) on every rank"),
        ),
    ),
    "skip": ("dp=2", skip_a_step, ("call 5", "rank 0: step", "rank 1: save")),
    "size": ("dp=2", another_size, ("call 19", "rank 0: step (input [4, 4]", "rank 1: step (input [8, 4]")),
    "leave": (
        "dp=2",
        leave_early,
        ("has ended its script", "call 5", "never, its script has ended after call 4 (step"),
    ),
    "compile": ("dp=2", compile_alone, ("call 3", "rank 0: step", "rank 1: mw.compile")),
    "eval": ("dp=2", eval_alone, ("rank 0: step at tests", "rank 1: step in eval mode at tests")),
    "eval, compiled": ("fsdp=2", eval_compiled_alone, ("rank 0: step at tests", "rank 1: step in eval mode at tests")),
    "option": (
        "fsdp=2",
        option_alone,
        ("rank 0: step (", "which compiles again: the optimizer's options require another update"),
    ),
}


def job(pipe: Connection, name: str, debug: str = "") -> dict[str, Any]:
    os.environ["MESHWEAVE_DEBUG"] = debug
    if name != "evaluate":  # as it is for a user
        be_impatient()
    mesh, does, _ = SCENARIOS[name]
    rank, step = dist.get_rank(), made(mesh, 0.5 if name in ("eval", "eval, compiled") else 0.0)
    step(rows(8))
    began = time.monotonic()
    try:
        does(step, rank)
    except (MeshweaveError, ValueError) as error:
        return {"text": str(error), "seconds": time.monotonic() - began}
    return {"text": "none"}


@pytest.mark.slow_rows("compile", "eval", "eval, compiled", "option", "parameters", "save", "size", "skip")
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


@pytest.mark.multiprocess
def test_every_call_meets_if_asked_for(start: Callable[..., Job]) -> None:
    for outcome in start(f"{__name__}:job", 2, "skip", "ranks").finish(240):
        assert "call 5 is rank 0: step" in outcome["text"]


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


@pytest.mark.slow
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
    shown = texts[0].replace("[rank0]: ", "")  # by which torch marks the lines of an uncaught exception
    expected = r"rank 1 failed\n  where: seen by rank 0\n  got: KeyError: 'no such column' at .*:\d+ in "
    assert re.search(expected, shown), shown
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
        step(rows(8))
    other = made("fsdp=2")
    losses = [one(rows(8)) for _ in range(3) for one in (step, other)]
    assert set(other.parameters()) == set(step.parameters())
    return {"losses": [float(loss) for loss in losses], "num": step.num_steps}


@pytest.mark.multiprocess
def test_calls_that_ranks_share_go_on(start: Callable[..., Job]) -> None:
    first, second = start(f"{__name__}:job_alike", 2).finish(240)
    assert first.get("num") == 8, first
    assert first == second


def test_calls_are_compared_where_ranks_have_them() -> None:
    ours = {1: "mw.compile", 2: "step (x [4, 6])", 3: "evaluate"}
    first = {1: "mw.compile", 2: "step (x [4, 6])"}
    assert different_calls({0: ours, 1: first}, {}) is None  # late
    assert different_calls({0: ours, 1: {30: "save"}, 2: {}}, {}) is None  # too far ahead to say; not there yet
    error = different_calls({0: ours, 1: {**first, 3: "step (x [4, 6])", 4: "save"}, 2: first, 3: {30: "save"}}, {})
    assert error is not None
    assert error["got"] == (
        "call 3 is rank 0: evaluate; rank 1: step (x [4, 6]); rank 2: not begun, after call 2 (step (x [4, 6])); "
        "rank 3: past, now in call 30 (save)"
    )
    error = different_calls({0: ours, 1: {**first, 3: "save"}}, {}, {0: "a.py:3 in f", 1: "b.py:1 in g"})
    assert error is not None
    assert error["got"] == "call 3 is rank 0: evaluate at a.py:3 in f; rank 1: save at b.py:1 in g"
    error = different_calls({0: ours, 1: first}, {1: 2})
    assert error is not None
    assert error["what"] == "a rank has ended its script while others go on"
    assert "rank 1: never, its script has ended after call 2 (step (x [4, 6]))" in error["got"]
    assert different_calls({0: first, 1: first}, {1: 2}) is None


def job_beside_a_stopped_rank(pipe: Connection, does: str) -> dict[str, Any]:
    """Rank 1 is stopped in its third step, for longer than others wait before they post their calls."""
    be_impatient()
    rank, step = dist.get_rank(), made("dp=2")
    step(rows(8))
    pipe.send("ready")
    assert pipe.recv() == "go"
    if does == "raise" and rank == 0:
        with pytest.raises(ValueError, match="on fire"), step.session.world.guard():
            raise ValueError("the disk is on fire")
        shutdown(step.session.world)
        return {}
    losses = [float(step(rows(8))) for _ in range(2)]
    if rank == 1:  # rank 0, which hosts the store, has ended its last step
        time.sleep(1.0)
        dist.distributed_c10d._get_default_store().set("still", "here")
    return {"losses": losses}


@pytest.mark.multiprocess
def test_a_stopped_process_is_waited_for(start: Callable[..., Job]) -> None:
    job = start(f"{__name__}:job_beside_a_stopped_rank", 2, "wait")
    job.await_ready()
    os.kill(job.processes[1].pid, signal.SIGSTOP)
    job.pipes[0].send("go")
    time.sleep(3.0)
    os.kill(job.processes[1].pid, signal.SIGCONT)
    job.pipes[1].send("go")
    first, second = job.finish(60)
    assert len(first["losses"]) == 2
    assert first == second


@pytest.mark.multiprocess
def test_a_process_ends_after_a_failure_though_another_is_stopped(start: Callable[..., Job]) -> None:
    job = start(f"{__name__}:job_beside_a_stopped_rank", 2, "raise")
    job.await_ready()
    os.kill(job.processes[1].pid, signal.SIGSTOP)
    job.pipes[0].send("go")
    assert job.pipes[0].poll(30)
    assert job.pipes[0].recv() == {}
    job.processes[0].join(30)
    assert job.processes[0].exitcode == 0


def job_with_a_child(pipe: Connection) -> dict[str, Any]:
    """Rank 1 has a child that outlives it, as a loader's worker may."""
    be_impatient()
    rows_module.ALWAYS_FIRST = 1  # type: ignore[misc]
    step = made("dp=2")
    for _ in range(2):
        step(rows(8))
    if dist.get_rank() == 1:
        if os.fork() == 0:
            pipe.close()
            time.sleep(15)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(StepError, match=r"rank 1 is gone\n  where: seen by rank 0 at all_reduce of \d bytes over dp"):
        step(rows(8))
    return {"seconds": time.monotonic() - began}


@pytest.mark.multiprocess
def test_a_killed_process_is_gone_though_its_child_lives(start: Callable[..., Job]) -> None:
    first, _ = start(f"{__name__}:job_with_a_child", 2).finish(60)
    assert first.get("seconds", 99.0) < 10, first


class Net(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        for layer in self:
            input = layer(input)
        return input


class Waiting:
    """As the stream of a GPU behind a communication that does not end."""

    def query(self) -> bool:
        return False


def job_beside_a_late_rank(pipe: Connection, mesh: str, case: str) -> dict[str, Any]:
    """The last rank sleeps for longer than a communication may take, between two steps or inside one (in case
    "stream" Gloo itself would wait longer), or raises inside a step."""
    be_impatient()
    process_groups.TIMEOUT = timedelta(seconds=60 if case == "stream" else 3)  # type: ignore[misc]
    rows_module.ALWAYS_FIRST = 1  # type: ignore[misc]
    start, step, is_last = ClusterCommunicator.start, made(mesh, kind=Net), dist.get_rank() == dist.get_world_size() - 1

    def begin_late(*args: Any) -> Any:
        if case == "raise":
            raise ValueError("the disk is on fire")
        time.sleep(3 if case == "stream" else 6)
        ClusterCommunicator.start = start  # type: ignore[method-assign]
        return start(*args)

    for _ in range(2):
        step(rows(8))
    if is_last and case != "between":
        ClusterCommunicator.start = begin_late  # type: ignore[method-assign]
    elif is_last:
        time.sleep(6)
    elif case == "stream":
        process_groups.TIMEOUT = timedelta(seconds=1)  # type: ignore[misc]
        step.session.world.communicator.stream = Waiting()
    began = time.monotonic()
    try:
        step(rows(8))
    except StepError as error:
        return {"text": str(error), "seconds": time.monotonic() - began}
    return {}


ROWS = [("dp=2", "between"), ("fsdp=2", "inside"), ("fsdp=2", "stream"), ("fsdp=2", "raise")]


@pytest.mark.slow_rows("dp=2-between", "fsdp=2-inside", "fsdp=2-raise")
@pytest.mark.multiprocess
@pytest.mark.parametrize(("mesh", "case"), ROWS)
def test_a_rank_that_is_late_is_named_with_the_communication_and_its_line(
    start: Callable[..., Job], mesh: str, case: str
) -> None:
    first, last = start(f"{__name__}:job_beside_a_late_rank", 2, mesh, case).finish(60)
    op = "all_reduce of 4 bytes" if mesh == "dp=2" else "all_gather_into_tensor of 64 bytes"
    line = "tests/training.py" if mesh == "dp=2" else "tests/runtime/test_calls.py"
    where = f"{op} over {mesh[:-2]} of ranks 0, 1 for {line}"
    if case == "raise":
        assert f"rank 1 failed\n  where: seen by rank 0 at {where}" in first["text"]
        assert "ValueError: the disk is on fire" in first["text"]
        return
    assert f"rank 1 did not come to {where}" in first["text"]
    place = "past call 3 (step)" if case == "between" else "in call 4 (step)"
    assert f"rank 1 is {place} at tests/runtime/test_calls.py" in first["text"]
    assert ("a communication does not end" if case == "stream" else "Timed out waiting 3000ms") in first["text"]
    assert "rank 1 did not come to" in last["text"]
    assert first["seconds"] < 10
