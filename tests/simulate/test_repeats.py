"""Steps of many microbatches from steps of few, beside those of which every microbatch is played."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.cost.hardware import load_profile
from meshweave.passes import pass_list_of
from meshweave.pipeline import PipelineChoice
from meshweave.program import Program
from meshweave.whatif import simulate


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(512), nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(512, 2048)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def compiled(
    mesh: str, microbatches: int, passes: str = "none", pipeline: str | None = None, rows: int = 1024
) -> Program:
    with torch.device("meta"):
        model, data = Model(), {"x": torch.empty(rows * microbatches, 512)}
    source = StepSource(model, lambda out, batch: out.square().mean())
    options = CaptureOptions(accumulate=microbatches, clip_grad_norm=1.0, pipeline=PipelineChoice.of(pipeline))
    optimizer = read_optimizer(torch.optim.AdamW(model.parameters()), model)
    target = Target(mw.Mesh(mesh), None, load_profile("h100"))
    return build_program(source, data, optimizer, target, options, pass_list_of(passes))


def played(program: Program) -> tuple[bool, float]:
    """Whether few microbatches were played, and the difference of the step, as a share; other totals are compared."""
    whole, few = simulate(program, "h100"), simulate(program, "h100", every_microbatch=False)
    assert few.peak_bytes == whole.peak_bytes
    assert (few.tokens, few.flops) == (whole.tokens, pytest.approx(whole.flops))
    error = few.seconds / whole.seconds - 1
    assert few.mfu == pytest.approx(whole.mfu, rel=max(1e-9, 2 * abs(error)))
    for name in ("compute_seconds", "communication_seconds", "exposed_seconds", "idle_seconds"):
        for a, b in zip(few.roles, whole.roles, strict=True):
            assert abs(getattr(a, name) - getattr(b, name)) <= max(1e-9, 2 * abs(error)) * whole.seconds
    is_few = any("were played" in note for note in few.notes)
    assert is_few == (len(few.spans) < len(whole.spans))
    return is_few, abs(error)


@pytest.mark.slow_rows("fsdp=2,tp=2-none", "fsdp=2,tp=2-prefetch=1", "dp=4-overlap")
@pytest.mark.parametrize("passes", ["none", "prefetch=1", "overlap"])
@pytest.mark.parametrize("mesh", ["dp=4", "fsdp=2,tp=2"])
def test_microbatches_one_after_the_other_repeat_exactly(mesh: str, passes: str) -> None:
    is_few, error = played(compiled(mesh, 25, passes))
    assert is_few
    assert error < 1e-9


@pytest.mark.slow_rows("1f1b", "zbv")
@pytest.mark.parametrize("pipeline", ["1f1b", "zb-h1", "zbv"])
def test_pipelines_repeat_within_a_percent(pipeline: str) -> None:
    _, error = played(compiled("pp=2", 61, pipeline=pipeline))
    assert error < 0.01


def test_losses_whose_reports_are_hidden_at_first_are_not_guessed() -> None:
    """The last stage ends first: reports of a few losses cost nothing, those of many do (2% of a step this short)."""
    assert played(compiled("pp=2", 66, pipeline="1f1b", rows=128)) == (False, 0.0)


def test_memory_that_grows_is_not_guessed() -> None:
    assert played(compiled("pp=2", 40, pipeline="gpipe")) == (False, 0.0)


def test_few_microbatches_are_all_played() -> None:
    assert played(compiled("dp=2", 8)) == (False, 0.0)


def test_a_clip_of_gradients_of_stages_is_simulated() -> None:
    """The norm is passed on between stages in the update, once a step."""
    program = compiled("pp=2", 4, pipeline="1f1b")
    names = [
        span.name for span in simulate(program, "h100").spans if span.phase == "update" and span.kind == "transfer"
    ]
    assert len(names) == len(set(names)) > 0
