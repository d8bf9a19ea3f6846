"""A process compiles regions beside the steps, which use them once they are there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch
from torch import Tensor, nn

import meshweave as mw
from meshweave.interop import inductor
from meshweave.ir.ops import KERNELS
from meshweave.runtime.regions.compiler import RegionCompiler
from meshweave.runtime.regions.process import _SCRIPT, CompilerProcess, dump, load
from meshweave.runtime.regions.trace import Form, RegionCall, RegionFunction

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


class Wide(nn.Module):
    """Element by element over 2 MiB: enough to save what compiling takes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = (x * self.scale).tanh().exp() + x.cos()
        return x.mean(1)


def started() -> tuple[mw.TrainStep, Tensor]:
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    x = torch.randn(512, 1024)
    step = mw.compile(model, loss=lambda out, _: out.mean(), example={"x": x}, optimizer=optimizer, mesh="")
    return step, x


def num_regions(step: mw.TrainStep) -> int:
    return sum(task.fused is not None for part in step.session.ranks[0].tasks for task in part)


def eager_losses(x: Tensor, count: int) -> list[float]:
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(count):
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither verdicts nor compiled code of earlier runs."""
    monkeypatch.setenv("MESHWEAVE_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def test_functions_are_handed_over_by_the_names_of_their_ops() -> None:
    form: Form = ((2, 3), (3, 1), torch.float32)
    calls = (
        RegionCall(torch.ops.aten.add.Tensor, (1, float("inf")), {"alpha": 2}),
        RegionCall(KERNELS[torch.ops.meshweave.matmul.default], (torch.bfloat16, CPU, [1, None]), {}),
    )
    function = RegionFunction(calls, (form,), (1,), ((0, 0),), CPU, "key")
    assert load(dump(function)) == function


@pytest.mark.slow
def test_steps_run_op_by_op_until_the_process_is_done(caches: None) -> None:
    """In a process of its own: what pytest sets is part of the keys of Inductor's cache."""
    done = subprocess.run([sys.executable, "-m", __name__], capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def train_beside_the_compiler() -> None:
    step, x = started()
    losses = [float(step({"x": x}))]
    assert not num_regions(step)
    assert step.session.compiler.is_busy
    step.wait_for_compiler()
    assert step.session.compiler.compiled
    assert num_regions(step)
    assert inductor.counters["inductor"]["fxgraph_cache_miss"] == 0  # the process compiled for this one, too
    losses += [float(step({"x": x})) for _ in range(2)]
    assert losses == pytest.approx(eager_losses(x, 3), rel=1e-6)
    again, _ = started()
    assert float(again({"x": x})) == pytest.approx(losses[0], rel=1e-6)
    assert num_regions(again)  # what was measured is remembered: compiled at once
    assert not again.session.compiler.is_busy
    shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    lost, _ = started()
    assert float(lost({"x": x})) == pytest.approx(losses[0], rel=1e-6)
    assert not num_regions(lost)  # Inductor's cache is lost: training does not wait for the compiler
    lost.wait_for_compiler()
    lost({"x": x})
    assert num_regions(lost)


def test_a_compiler_that_crashes_leaves_its_region_as_it_is(
    caches: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step, x = started()
    losses = [float(step({"x": x}))]
    (process,) = step.session.compiler._processes.values()
    assert process._process is None  # the first step has the processor to itself
    losses += [float(step({"x": x}))]
    assert process._process is not None
    os.kill(process._process.pid, signal.SIGKILL)
    step.wait_for_compiler()
    losses += [float(step({"x": x}))]
    assert losses == pytest.approx(eager_losses(x, 3), rel=1e-6)
    assert "ended with signal 9" in caplog.text
    assert None in step.session.compiler.compiled.values()


def test_a_process_that_ends_between_two_graphs_of_a_step_is_looked_for_again() -> None:
    """The first graph was left op by op: the step has to be built once more."""
    process = CompilerProcess(())
    compiler = RegionCompiler("auto", lambda flag: flag, _processes={frozenset({"of the first graph"}): process})
    with ThreadPoolExecutor(1) as pool:
        end = Event()
        pool.submit(end.wait)
        process._reader, process.is_started = next(iter(pool._threads)), True
        assert compiler._compiles_beside((), CPU)
        end.set()
    assert not compiler._compiles_beside((), CPU)
    assert compiler.is_waiting


@pytest.mark.slow
def test_a_process_ends_with_the_one_that_started_it() -> None:
    function = RegionFunction((), (), (), (), CPU, "nothing")
    process = CompilerProcess((function,) * 10_000)
    process.start()
    assert process._process is not None
    assert process._process.stdin is not None
    while not process.finished:
        time.sleep(0.05)
    process._process.stdin.close()  # as the end of this process would
    process.wait()
    assert process.is_done


def test_a_process_ends_with_the_step_that_it_compiles_for() -> None:
    process = CompilerProcess((RegionFunction((), (), (), (), CPU, "nothing"),) * 10_000)
    process.start()
    popen, reader = process._process, process._reader
    assert popen is not None
    assert reader is not None
    assert popen.poll() is None
    del process
    reader.join(60)
    assert popen.poll() == -signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of Linux")
def test_a_process_gives_way_and_ends_with_its_parent_before_it_has_imported_torch() -> None:
    process = subprocess.Popen([sys.executable, "-c", _SCRIPT], stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    end = time.monotonic() + 30
    while os.getpriority(os.PRIO_PROCESS, process.pid) != 10 and time.monotonic() < end:
        time.sleep(0.01)
    process.stdin.write((4).to_bytes(8, "big") + b"none")  # an error once torch is there
    process.stdin.close()
    assert process.wait(60) == -signal.SIGTERM


if __name__ == "__main__":
    train_beside_the_compiler()
