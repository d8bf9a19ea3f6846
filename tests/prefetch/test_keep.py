"""Results of collectives are kept for a second use where memory is free, and nothing else changes."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from tests.models import Made, hugging_face
from tests.training import assert_equals_eager, batches
from torch import nn

import meshweave as mw
from meshweave.check.same import check_same
from meshweave.errors import VerifyError
from meshweave.ir.collectives import COLLECTIVES
from meshweave.ir.graph import origin_of
from meshweave.ir.liveness import peak_bytes
from meshweave.ir.rank import RankGraph, copied
from meshweave.optimize.prefetch.keep import KeepReport, keep
from meshweave.train_step import TrainStep


@cache
def llama(layers: int = 3) -> Made:
    return hugging_face("llama", batch=4, heads=4, layers=layers)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def compiled(passes: str, mesh: str, profile: str | None = None, layers: int = 3) -> TrainStep:
    model, batch, loss = llama(layers)
    model = copy.deepcopy(model)
    return mw.compile(model, loss=loss, example=batch, optimizer=sgd(model), mesh=mesh, passes=passes, profile=profile)


shared = cache(compiled)  # only the first test runs such a step, the others read its program


def num_gathers(role: RankGraph, phase: str) -> dict[str, int]:
    """By layer, or "" outside of layers, the gathers of a phase."""
    counts: dict[str, int] = {}
    for node in role.graph.nodes:
        if node.target in COLLECTIVES and "all_gather" in str(node.target) and origin_of(node).phase == phase:
            layer = origin_of(node).module.partition(".layers.")[2].partition(".")[0]
            counts[layer] = counts.get(layer, 0) + 1
    return counts


def report_of(step: TrainStep) -> KeepReport:
    (report,) = step.program.optimized.reports["keep"]
    return report


@pytest.mark.parametrize(
    "mesh",
    [
        "fsdp=4",
        pytest.param("fsdp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("dp=2,fsdp=2", marks=pytest.mark.slow),
        "pp=2,fsdp=2",
        pytest.param("fsdp=3", marks=pytest.mark.slow),
    ],
)
def test_parameters_are_gathered_once_and_values_stay_to_the_bit(mesh: str) -> None:
    batch = llama()[1]
    layers = 2 if "pp" in mesh else 3  # one for each stage
    plain, kept = (shared(passes, mesh, layers=layers) for passes in ("none", "keep"))
    for before, after in zip(plain.program.roles, kept.program.roles, strict=True):
        assert sum(num_gathers(after, "backward").values()) < sum(num_gathers(before, "backward").values())
        assert num_gathers(after, "forward") == num_gathers(before, "forward")
    assert all(report.num_kept == report.num_repeated for report in kept.program.optimized.reports["keep"])
    assert [float(kept(batch)) for _ in range(2)] == [float(plain(batch)) for _ in range(2)]
    assert all(torch.equal(value, kept.parameters()[name]) for name, value in plain.parameters().items())


def test_the_last_blocks_come_first_and_the_peak_stays_under_the_limit() -> None:
    plain = shared("none", "fsdp=4").program.rank
    peak = peak_bytes(plain)
    everything = report_of(shared("keep", "fsdp=4"))
    kept_by_room: list[int] = []
    for room in (1.0, 1.05, 1.1, 1.2, 1.4):
        role, report = keep(plain, lambda peak, room=room: int(peak * room))  # type: ignore[misc]
        assert report.peak_before == peak
        assert peak_bytes(role) <= report.peak_bytes <= int(peak * room)
        kept_by_room.append(report.kept_bytes)
        before, again = num_gathers(plain, "backward"), num_gathers(role, "backward")
        missing = [before[layer] - again.get(layer, 0) for layer in ("0", "1", "2")]
        assert missing == sorted(missing)  # the later a layer, the more of it is kept
    assert kept_by_room == sorted(kept_by_room)
    assert kept_by_room[0] < kept_by_room[-1] <= everything.kept_bytes


def test_a_value_that_is_gathered_three_times_is_gathered_once() -> None:
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.tanh(x @ self.w)
            return x

    torch.manual_seed(0)
    model = Thrice()
    data = [{"x": batch["x"], "y": batch["y"]} for batch in batches(2, (4, 8), (4, 8))]
    assert_equals_eager(model, data, "fsdp=2", passes="keep")


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"passes": "recompute=full"}, {"clip_grad_norm": 0.1}])
def test_with_what_else_a_step_does(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.0)) for _ in range(3)))
    data = [{"input": batch["x"], "y": batch["y"]} for batch in batches(2, (8, 8), (8, 8))]
    losses = []
    for asked in ("", "keep"):
        own = copy.deepcopy(model)
        step = mw.compile(
            own,
            loss=lambda out, batch: (out - batch["y"]).square().mean(),
            example=data[0],
            optimizer=sgd(own),
            mesh="fsdp=2",
            forward=lambda m, batch: m(batch["input"]),
            **options | {"passes": ",".join(filter(None, [asked, options.get("passes")])) or "none"},
        )
        losses.append([float(step(batch)) for batch in data])
    assert losses[0] == losses[1]


def test_random_numbers_are_drawn_anew() -> None:
    """Two dropouts of the same shape are two values, though they are the same op on equal operands."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(8, 8) - torch.rand(8, 8)
            return self.b(torch.tanh(self.a(x)) * noise.abs().sum())

    model, x = Dropped(), torch.randn(8, 8)
    losses = []
    for passes in ("none", "keep"):
        torch.manual_seed(3)
        step = mw.compile(
            copy.deepcopy(model), loss=lambda out, _: out.sum(), example=(x,), mesh="fsdp=2", passes=passes
        )
        losses.append([float(step((x,))) for _ in range(3)])
    assert losses[0] == losses[1]
    assert losses[0][0] != 0.0


def test_another_parameter_in_the_place_of_one_is_found() -> None:
    """What the pass did is proven: a role in which backward takes up the wrong value is refused."""
    role = shared("keep", "fsdp=4").program.optimized.unscheduled[0]
    wrong = copied(role)
    gathers = [n for n in wrong.graph.nodes if n.target in COLLECTIVES and "all_gather" in str(n.target)]
    square = [n for n in gathers if origin_of(n).module.endswith("q_proj.weight")]
    first, other = (next(iter(n.users)) for n in square[:2])
    other.replace_all_uses_with(first)
    with pytest.raises(VerifyError, match="computed differently"):
        check_same(role, wrong)


@cache
def loss_without_passes() -> torch.Tensor:
    return compiled("none", "cp=2", layers=2)(llama()[1])


@pytest.mark.parametrize("passes", [pytest.param("keep,decompose", marks=pytest.mark.slow), "keep,ring=always"])
def test_messages_of_ring_attention_are_left_alone(passes: str) -> None:
    """Forward and backward pass the same keys around. Each ring keeps its own messages and is proven by them."""
    kept = compiled(passes, "cp=2", profile="h100", layers=2)
    if "always" in passes:
        (report,) = kept.program.optimized.reports["ring"]
        assert report.num_taken == 4  # in forward and backward of 2 layers
    torch.testing.assert_close(kept(llama()[1]), loss_without_passes())
