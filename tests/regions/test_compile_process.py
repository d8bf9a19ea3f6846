"""Regions that another process compiles while steps run op by op."""

from __future__ import annotations

import gc
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import Job
from tests.regions.test_backend import MODELS, assert_alike, num_regions, trained

import meshweave as mw
from meshweave.interop import inductor, inductor_settings
from meshweave.runtime import session
from meshweave.runtime.regions.compile_process import CompileProcess, begin_compiling, rotate_to_own_share
from meshweave.runtime.regions.compiler import Kernels, RegionCompiler, backend_for

MOST_SECONDS = 240.0


def steps_until_compiled(step: mw.TrainStep, batch: Any) -> int:
    """Take steps until regions run, and one with them. Returns how many ran op by op."""
    began = time.monotonic()
    for count in range(10_000):
        step(batch)
        if num_regions(step):
            return count
        assert time.monotonic() - began < MOST_SECONDS
        time.sleep(0.1)
    raise AssertionError


@pytest.mark.slow
def test_steps_run_op_by_op_until_regions_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_here: list[Any] = []
    lower = inductor.compile_fx_inner

    def compile_here(*args: Any, **options: Any) -> Any:
        compiled_here.append(args)
        return lower(*args, **options)

    monkeypatch.setattr(inductor, "compile_fx_inner", compile_here)
    step, losses = trained("linear", "background", steps=1)
    assert not num_regions(step)
    assert not compiled_here
    batch = MODELS["linear"]()[1]
    count = 1 + steps_until_compiled(step, batch)
    assert compiled_here
    eager, expected = trained("linear", "eager", steps=count + 1)
    assert losses[0] == expected[0]
    assert_alike(step, eager, 1e-4)
    assert not step.session.compiler.notes


@pytest.fixture
def never_done(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Processes that sleep in place of those that compile."""
    begun: list[Any] = []

    class Sleeper:
        is_running = True
        failure = ""

        def wait(self, seconds: float | None = None) -> None:
            self.is_running = False

        def close(self) -> str:
            return self.failure

    def begin(*_: Any) -> Sleeper:
        begun.append(Sleeper())
        return begun[-1]

    monkeypatch.setattr(session, "begin_compiling", begin)
    return begun


def test_processes_ask_each_other_before_early_steps_and_then_now_and_then(never_done: list[Any]) -> None:
    step, _ = trained("linear", "background", steps=20)
    batch = MODELS["linear"]()[1]
    never_done[0].is_running = False
    for _ in range(11):
        step(batch)
        assert not num_regions(step)
    step(batch)
    assert num_regions(step)


def test_a_trace_waits_for_the_regions(never_done: list[Any]) -> None:
    step, _ = trained("linear", "background", steps=1)
    step.trace(MODELS["linear"]()[1])
    assert num_regions(step)


def test_a_process_that_fails_leaves_the_regions_to_this_one(
    never_done: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    step, _ = trained("linear", "background", steps=1)
    never_done[0].is_running, never_done[0].failure = False, "exit code -9: "
    with caplog.at_level(logging.WARNING, "meshweave"):
        step(MODELS["linear"]()[1])
    assert num_regions(step)
    assert "exit code -9" in caplog.text


def test_without_memory_for_steps_op_by_op_or_a_cache_regions_come_first(
    never_done: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "free_bytes", lambda device: 100.0)
    step, _ = trained("linear", "background", steps=1)
    assert num_regions(step)
    assert not never_done
    monkeypatch.undo()  # of `never_done`, too
    with inductor.config.patch(force_disable_caches=True):
        step, _ = trained("linear", "background", steps=1)
    assert num_regions(step)


def test_deterministic_algorithms_compile_before_the_first_step() -> None:
    gpu = torch.device("cuda", 1)
    torch.use_deterministic_algorithms(True)
    try:
        assert backend_for("auto", gpu, 1) == "inductor"
    finally:
        torch.use_deterministic_algorithms(False)
    assert backend_for("auto", gpu, 1) == "background"


def test_a_process_ends_with_the_one_that_asked() -> None:
    step, _ = trained("linear", "background", steps=1)
    process = step.session._process._process  # type: ignore[union-attr]
    del step
    gc.collect()
    assert process.wait(10.0) == -signal.SIGKILL


def test_ranks_of_a_host_begin_with_different_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    regions: Any = list("abcdef")
    assert rotate_to_own_share(regions) == regions
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rotate_to_own_share(regions) == list("cdefab")


def test_what_a_process_has_started_ends_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script, has_begun = tmp_path / "python", tmp_path / "begun"
    script.write_text(f"#!/bin/sh\nsleep 60 & touch {has_begun}; wait\n")  # as it waits for a C++ compiler
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    process = CompileProcess((), Kernels(), {})
    while not has_begun.exists():
        time.sleep(0.01)
    process._end()
    process._thread.join(10.0)  # all have closed its stderr
    assert not process.is_running


def test_settings_without_a_form_of_bytes_compile_before_the_first_step() -> None:
    with inductor.config.patch(_micro_pipeline_tp=True):
        found = inductor_settings.settings()
    assert found is not None
    assert found["config"]["_micro_pipeline_tp"]
    compiler = RegionCompiler("background")
    with inductor.config.patch(inductor_choices_class=Path):  # torch asks for its `uuid`
        assert begin_compiling(compiler, ()) is None
    assert len(compiler.notes) == 1


def job(pipe: Any) -> dict[str, Any]:
    """Two replicas: the first step with regions, and a digest of the parameters."""
    step, _ = trained("mlp", "background", "dp=2", steps=1, profile="alpha-beta")
    count = steps_until_compiled(step, MODELS["mlp"]()[1])
    own = torch.cat([p.detach().flatten() for p in step.model.parameters()])
    return {"count": count, "sum": float(own.double().sum())}


@pytest.mark.slow
def test_ranks_take_the_regions_before_the_same_step(start: Callable[..., Job]) -> None:
    first, second = start(f"{__name__}:job", 2).finish(MOST_SECONDS)
    assert first["count"] == second["count"]
    assert first["sum"] == second["sum"]
