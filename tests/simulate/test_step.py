"""Whole simulated steps: totals that add up, determinism, pipelines, clusters of any size, verdicts, bad input."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from tests.models import hugging_face
from torch import nn

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.cost.hardware import load_profile
from meshweave.errors import MeshweaveError
from meshweave.ir.graph import tokens_of
from meshweave.program import Program
from meshweave.whatif import best_of, simulate


def compiled(mesh: str, plan: mw.Plan | None = None, accumulate: int = 1, batch: int = 8, layers: int = 1) -> Program:
    model, data, loss = hugging_face("llama", batch=batch, heads=4, seq=16, layers=layers)
    spec = read_optimizer(torch.optim.AdamW(model.parameters()), model)
    options = CaptureOptions(accumulate=accumulate)
    return build_program(
        StepSource(model, loss), data, spec, Target(mw.Mesh(mesh), plan, load_profile("h100")), options
    )


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled("fsdp=2,tp=2")


def test_totals_add_up(program: Program) -> None:
    found = simulate(program, "h100")
    (role,) = found.roles
    assert role.compute_seconds + role.exposed_seconds + role.idle_seconds == pytest.approx(found.seconds)
    assert sum(s.exposed_seconds for s in found.spans) == pytest.approx(found.exposed_seconds)
    for span in found.spans:
        assert sum(r.seconds for r in span.reasons) == pytest.approx(span.exposed_seconds)
        assert all(found.spans[need].end <= span.start + 1e-12 for need in span.needs)
        assert 0 <= span.start <= span.end <= found.seconds + 1e-12
    assert role.memory[-1][1] <= role.peak_bytes == max(level for _, level in role.memory)
    assert sum(h.bytes for h in role.at_peak) == role.peak_bytes
    assert found.tokens == 8 * 16
    assert found.tokens_per_s_per_gpu == pytest.approx(found.tokens / found.seconds / 4)
    assert found.mfu is not None
    assert 0 < found.mfu < 1
    assert {s.kind for s in found.spans} == {"compute", "collective"}
    assert all(s.layout for s in found.spans if s.kind == "collective")
    assert all(s.line for s in found.spans if s.phase == "forward")


def test_its_text_is_a_few_lines_of_totals(program: Program) -> None:
    found = simulate(program, "h100")
    assert f"step {found.seconds:.4g} s" in str(found)
    assert "fits" in str(found)
    assert len(str(found)) < 2000
    assert len(repr(found)) < 2000


def test_equal_inputs_give_equal_bytes(program: Program) -> None:
    one, two = (json.dumps(asdict(simulate(p, "h100"))) for p in (program, compiled("fsdp=2,tp=2")))
    assert one == two


def test_model_flops_do_not_depend_on_the_mesh(program: Program) -> None:
    alone = simulate(compiled(""), "h100")
    assert simulate(program, "h100").flops == pytest.approx(alone.flops, rel=5e-3)  # a sliver is done by all


def test_devices_cost_nothing() -> None:
    """The same work per device on 64 and on 4,096 devices: as many spans."""
    few, many = (simulate(compiled(f"dp={n}", batch=n), "h100") for n in (64, 4096))
    assert len(few.spans) == len(many.spans)
    assert few.roles[0].compute_seconds == pytest.approx(many.roles[0].compute_seconds)
    assert few.exposed_seconds < many.exposed_seconds


def test_faster_links_and_more_compute_help(program: Program) -> None:
    machine = load_profile("h100")
    base = simulate(program, machine)
    assert simulate(program, machine.scaled(bandwidth=2.0, latency=0.5)).seconds < base.seconds
    assert simulate(program, machine.scaled(compute=2.0)).roles[0].compute_seconds <= base.roles[0].compute_seconds
    assert simulate(program, machine, fusion="ops").seconds > base.seconds


def test_a_model_that_does_not_fit_is_simulated_and_said_so(program: Program) -> None:
    fits = simulate(program, "h100")
    assert fits.verdict == ""
    small = simulate(program, load_profile("h100").scaled(memory_bytes=2.2e9))
    assert small.seconds == fits.seconds
    tight = simulate(program, load_profile("h100").scaled(memory_bytes=2.0e9 + fits.peak_bytes / 2))
    if tight.memory_bytes is not None and tight.memory_bytes < fits.peak_bytes:
        assert "does not fit" in tight.verdict
        assert "what would make it fit" in tight.verdict_text
        assert tight.mfu is None


@pytest.mark.parametrize(("share", "fit"), [(0.9, "no"), (0.97, "may"), (1.03, "may"), (1.1, "yes")])
def test_near_its_limit_memory_may_suffice(program: Program, share: float, fit: str) -> None:
    machine = load_profile("h100")
    peak = simulate(program, machine).peak_bytes
    low, high = 0.0, 1e12
    while high - low > 1:  # the memory of which so much is usable
        middle = (low + high) / 2
        low, high = (middle, high) if machine.scaled(memory_bytes=middle).usable_bytes < share * peak else (low, middle)
    tight = simulate(program, machine.scaled(memory_bytes=high))
    assert tight.fit == tight.as_dict()["fit"] == fit
    assert bool(tight.verdict) == (fit == "no")
    assert any("within the model's error of 4%" in note for note in tight.notes) == (fit == "may")


def test_the_best_fits_and_is_fast(program: Program) -> None:
    fast, slow = simulate(program, "h100"), simulate(program, "h100", fusion="ops")
    assert best_of([slow, fast]) == 1


def test_tokens_of_other_inputs() -> None:
    model = nn.Linear(4, 4)
    step = mw.compile(model, loss=lambda out, _: out.sum(), example=(torch.randn(6, 4),), mesh="")
    assert tokens_of(step.program.captured) == 6


# pipelines


@pytest.fixture(scope="module")
def stages() -> Program:
    return compiled("pp=2", mw.Plan.stages("pp"), accumulate=8, layers=2)


def test_stages_overlap_in_a_pipeline_and_not_one_after_the_other(stages: Program) -> None:
    sequential, gpipe, one = (simulate(stages, "h100", pipeline=p) for p in ("sequential", "gpipe", "1f1b"))
    assert len(sequential.roles) == 2
    assert one.seconds < 0.75 * sequential.seconds
    assert gpipe.seconds < 0.8 * sequential.seconds
    busy = [sum(r.compute_seconds for r in s.roles) for s in (sequential, gpipe, one)]
    assert busy[1] == pytest.approx(busy[0], rel=0.05)
    assert busy[2] == pytest.approx(busy[0], rel=0.05)
    assert one.roles[0].peak_bytes < gpipe.roles[0].peak_bytes  # fewer microbatches are in flight
    assert "stages follow schedule 1f1b" in one.notes


def test_microbatches_are_numbered_as_in_measured_steps(stages: Program) -> None:
    """tests/runtime/test_tracing.py has the same numbers."""
    for name in ("sequential", "1f1b"):
        spans = simulate(stages, "h100", pipeline=name).spans
        numbers = {phase: {s.microbatch for s in spans if s.phase == phase} for phase in ("forward", "update")}
        assert numbers == {"forward": set(range(8)), "update": {0}}


# bad input


def test_unknown_profile(program: Program) -> None:
    with pytest.raises(MeshweaveError, match="h100"):
        simulate(program, "h10")


def test_a_mesh_that_the_machine_cannot_hold(program: Program) -> None:
    with pytest.raises(MeshweaveError, match="cannot hold"):
        simulate(program, load_profile("h100").scaled(num_devices=2))
