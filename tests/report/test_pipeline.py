"""The picture of a pipeline: blocks, gaps and their reasons, of simulated and measured steps."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
import torch
from rich.console import Console
from tests.report.samples import pipeline_sample, sample
from tests.simulate.test_pipelines import simulated, stages
from torch import nn

import meshweave as mw
from meshweave.engine.actions import Action
from meshweave.engine.schedules.form import COMPUTE
from meshweave.engine.schedules.generators import SCHEDULES, make_schedule
from meshweave.engine.schedules.memory import peak_activations
from meshweave.report.pipeline import PASSES, IdleTime, PipelinePicture, pipeline_of
from meshweave.report.simulation import simulation_table

NAMES = [name for name in SCHEDULES if name != "dualpipev"]  # pairs that run as one are a single gap to the clock


def covered(picture: PipelinePicture, role: int) -> float:
    """Seconds of blocks and gaps of a role, which must not overlap."""
    parts = [(b.start, b.end) for b in picture.blocks if b.role == role and b.action in PASSES]
    parts += [(g.start, g.end) for g in picture.gaps if g.role == role]
    parts.sort()
    for (_, end), (begin, _) in pairwise(parts):
        assert begin == pytest.approx(end, abs=2e-9)
    return sum(end - begin for begin, end in parts)


def has_work(action: Action) -> bool:
    """The first stage sends no gradients: all its backward is weight gradients."""
    return bool(COMPUTE.intersection(action.kinds)) and (action.name, action.stage) != ("input", 0)


@pytest.mark.parametrize("name", NAMES)
def test_gaps_and_their_reasons_are_those_of_the_clock(name: str) -> None:
    step, times = pipeline_sample(name, 4, 8)
    picture = pipeline_of(step)
    assert picture is not None

    def row(gap: IdleTime) -> tuple[object, ...]:
        before = picture.blocks[gap.before] if gap.before >= 0 else None
        return gap.role, round(gap.start, 9), round(gap.end, 9), before and (before.action, before.microbatch)

    expected = {
        (g.rank, round(g.begin_s, 9), round(g.end_s, 9), g.before and (g.before.name, g.before.microbatch)): g
        for g in times.gaps
    }
    assert {row(gap) for gap in picture.gaps} == set(expected)
    for gap in picture.gaps:
        its, source = expected[row(gap)], picture.blocks[gap.source]
        assert (source.action, source.stage, source.microbatch) == (
            its.source.name,
            its.source.stage,
            its.source.microbatch,
        )
        assert source.role == its.source_rank
        assert gap.message_seconds == pytest.approx(its.message_s, abs=2e-9)
        assert str(source) in gap.text
    assert picture.activations == max(peak_activations(make_schedule(name, 4, 8)))
    assert picture.stages_of_role == make_schedule(name, 4, 8).stages_of_role
    assert [covered(picture, role) for role in range(4)] == pytest.approx([times.step_s] * 4, abs=1e-7)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_a_simulated_step(name: str) -> None:
    step = simulated(stages(4), 8, name)
    picture = pipeline_of(step)
    assert picture is not None
    schedule = make_schedule(name, 4, 8)
    for role, actions in enumerate(schedule.of_role):
        expected = [(a.name, a.stage, a.microbatch) for a in actions if has_work(a)]
        found = [(b.action, b.stage, b.microbatch) for b in picture.blocks if b.role == role and b.action in PASSES]
        assert found == expected
    if name != "zb-h1":
        assert picture.bubble == pytest.approx(3 / 11, abs=0.02)
    first = next(gap for gap in picture.gaps if gap.role == 3)
    assert (first.start, str(picture.blocks[first.before])) == (0.0, "F0, stage 3")
    assert first.text == "F0, stage 2 on role 2"
    for gap in picture.gaps:
        if gap.before >= 0:
            assert picture.blocks[gap.source].end + gap.message_seconds == pytest.approx(gap.end)
    out = io.StringIO()
    Console(file=out, width=200).print(simulation_table(step))
    line = f"schedule {name}: 4 stages on 4 ranks, 8 microbatches, bubble {picture.bubble:.1%}"
    assert f"{line}, at most {max(peak_activations(schedule)):g} activations" in out.getvalue()


def test_a_step_without_a_schedule_has_no_pipeline() -> None:
    assert pipeline_of(simulated(stages(4), 8, None)) is None
    assert pipeline_of(sample(roles=2)) is None


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
def test_a_measured_step(name: str) -> None:
    """The actions of a real step, in the order of its schedule."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {"input": torch.randn(8, 16)}
    loss = lambda out, batch: out.square().mean()  # noqa: E731
    step = mw.compile(model, loss=loss, optimizer=optimizer, example=batch, mesh="pp=2", pipeline=name, accumulate=4)
    recorded = step.trace(batch)
    picture, schedule = pipeline_of(recorded), step.program.pipeline
    assert picture is not None
    assert schedule is not None
    assert (picture.schedule, picture.num_microbatches) == (name, 4)
    for role, actions in enumerate(schedule.of_role):
        found = [(b.action, b.stage, b.microbatch) for b in picture.blocks if b.role == role and b.action in PASSES]
        assert list(dict.fromkeys(found)) == [(a.name, a.stage, a.microbatch) for a in actions if has_work(a)]
    received = [gap for gap in picture.gaps if gap.role == 1 and gap.source >= 0 and gap.before >= 0]
    assert received[0].text == "F0, stage 0 on role 0"
    assert (str(picture.blocks[received[0].before]), picture.blocks[received[0].before].role) == ("F0, stage 1", 1)
