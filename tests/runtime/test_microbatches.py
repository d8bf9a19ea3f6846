"""Steps with `accumulate=` beside the same steps without: loss, metrics, gradients by way of the next loss."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshweave as mw
from meshweave.ir.graph import origin_of

Batch = dict[str, Any]
ROWS, CLASSES = 8, 4


def example() -> Batch:
    generator = torch.Generator().manual_seed(0)
    y = torch.tensor([0, -100, 2, 3, -100, -100, -100, 1])  # the third pair of rows has no valid token
    return {
        "x": torch.randn(ROWS, 5, generator=generator, dtype=torch.float64),
        "y": y,
        "w": torch.rand(ROWS, generator=generator, dtype=torch.float64),
        "count": (y >= 0).sum(),
        "prototypes": torch.randn(ROWS, CLASSES, generator=generator, dtype=torch.float64),
        "partner": torch.tensor([3, 2, 1, 0, 1, 0, 3, 2]),
    }


def with_metrics(out: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    numbers = {"tokens": (batch["y"] >= 0).sum(), "right": (out.argmax(-1) == batch["y"]).sum()}
    return F.cross_entropy(out, batch["y"]), numbers


LOSSES: dict[str, Callable[[Tensor, Batch], Any]] = {
    "metrics": with_metrics,
    "count in the batch": lambda o, b: F.cross_entropy(o, b["y"], reduction="sum") / b["count"],
    "sum": lambda o, b: o.pow(2).sum(),
    "weighted": lambda o, b: (F.cross_entropy(o, b["y"], reduction="none") * b["w"]).sum() / b["w"].sum(),
    "counts of classes": lambda o, b: F.cross_entropy(
        o, b["y"].clamp(min=0), weight=1.0 + F.one_hot(b["y"].clamp(min=0), CLASSES).sum(0).double()
    ),
    "random": lambda o, b: (F.dropout(o.view(-1, 2, 2).transpose(0, 1), 0.5).sum((0, 2)) * torch.rand(ROWS)).mean(),
    "places": lambda o, b: (o[torch.arange(ROWS), b["partner"]] * b["w"].flip(0) * torch.arange(ROWS)).mean(),
    "no rows": lambda o, b: F.cross_entropy(o @ b["prototypes"].t(), b["y"].clamp(min=0) + b["partner"]),
}


def trained(loss: Any, mesh: str, accumulate: int, **options: Any) -> tuple[list[float], dict[str, float]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    step = mw.compile(
        model,
        loss=loss,
        example=example(),
        optimizer=torch.optim.SGD(model.parameters(), 0.5, momentum=0.9),
        mesh=mesh,
        forward=lambda m, b: m(b["x"]),
        accumulate=accumulate,
        **options,
    )
    losses = [step(example()).item() for _ in range(3)]
    return losses, {name: float(value) for name, value in step.metrics.items()}


@cache
def trained_whole(name: str) -> tuple[list[float], dict[str, float]]:
    return trained(LOSSES[name], "", 1)


@pytest.mark.slow_rows(
    *(f"{name}-{mesh}" for name in LOSSES if name != "metrics" for mesh in ("dp=2", "fsdp=2", "tp=2"))
)
@pytest.mark.parametrize("mesh", ["", "dp=2", "fsdp=2", "tp=2", "pp=2", "fsdp=2,tp=2"])
@pytest.mark.parametrize("name", LOSSES)
def test_microbatches_change_nothing(mesh: str, name: str) -> None:
    whole, metrics = trained_whole(name)
    for number in (2, 4):
        losses, own = trained(LOSSES[name], mesh, number, clip_grad_norm=1e9)
        assert losses == pytest.approx(whole, rel=1e-12, abs=1e-12)
        assert {n: own[n] for n in metrics} == pytest.approx(metrics, rel=1e-12, abs=1e-12)


class Placed(nn.Module):
    """Layers whose devices and layouts are in the model's code: on the two indices of an axis in turn, or by operators
    of an axis."""

    def __init__(self, mesh: str) -> None:
        super().__init__()
        self.mesh = mw.Mesh(mesh)
        self.layers = nn.ModuleList([nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)])

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if "pp" in self.mesh.axis_names:
                x = mw.on(x, self.mesh["pp"][i % 2])
            x = torch.tanh(layer(x))
            if "tp" in self.mesh.axis_names:
                x = mw.replicate(mw.repartition(x, dim=i % 2, axis="tp"), "tp")
        return x


@pytest.mark.parametrize("mesh", ["pp=2", "dp=2,pp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("name", ["metrics", "weighted", "random"])
def test_microbatches_of_layers_that_the_model_places(mesh: str, name: str) -> None:
    def losses(mesh: str, accumulate: int) -> list[float]:
        torch.manual_seed(1)
        model = Placed(mesh).double()
        step = mw.compile(
            model, loss=LOSSES[name], example=example(), optimizer=torch.optim.SGD(model.parameters(), 0.5), mesh=mesh,
            forward=lambda m, b: m(b["x"]), accumulate=accumulate, run=mw.RunOptions(exact_microbatches=True),
        )  # fmt: skip
        return [step(example()).item() for _ in range(3)]

    whole = losses("", 1)
    assert losses(mesh, 2) == pytest.approx(whole, rel=1e-12)
    assert losses(mesh, 4) == pytest.approx(whole, rel=1e-12)


def test_zero_and_an_argument_of_a_call() -> None:
    whole, _ = trained(LOSSES["weighted"], "dp=2", 1)
    for stage in (mw.Plan.zero1("dp"), mw.Plan.zero2("dp")):
        assert trained(LOSSES["weighted"], "dp=2", 4, plan=stage)[0] == pytest.approx(whole, rel=1e-12, abs=1e-12)
    torch.manual_seed(1)
    model = nn.Linear(5, CLASSES).double()
    twin = copy.deepcopy(model)
    steps = [
        mw.compile(
            each,
            loss=LOSSES["metrics"],
            example=example(),
            optimizer=torch.optim.AdamW(each.parameters()),
            mesh="fsdp=2",
            forward=lambda m, b: m(b["x"]),
        )
        for each in (model, twin)
    ]
    for number in (1, 2, 4, 2):
        assert steps[0](example(), accumulate=number).item() == pytest.approx(steps[1](example()).item(), abs=1e-12)
        assert len(steps[0]._compiled.variants.all) <= 3


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2"])
def test_a_batch_that_the_number_does_not_divide(mesh: str) -> None:
    """It is cut into more microbatches: the step is the same with any number."""
    torch.manual_seed(1)
    models = [nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.3), nn.Linear(6, CLASSES)).double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    steps = [
        mw.compile(
            model,
            loss=LOSSES["metrics"],
            example=example(),
            optimizer=torch.optim.SGD(model.parameters(), 0.5, momentum=0.9),
            mesh=mesh,
            forward=lambda m, b: m(b["x"]),
            accumulate=number,
        )
        for model, number in zip(models, (1, 4), strict=True)
    ]
    for rows in (8, 6, 7, 8, 3):
        batch = {name: x[:rows] if x.shape[:1] == (ROWS,) else x for name, x in example().items()}
        assert steps[1](batch).item() == pytest.approx(steps[0](batch).item(), rel=1e-12)
    assert [v.accumulate for v in steps[1]._compiled.variants.all] == [4, 6, 7, 3]


def test_it_says_what_is_computed_ahead() -> None:
    torch.manual_seed(1)
    model = nn.Linear(5, CLASSES).double()
    step = mw.compile(
        model,
        loss=LOSSES["weighted"],
        example=example(),
        optimizer=torch.optim.SGD(model.parameters(), 0.5),
        mesh="",
        forward=lambda m, b: m(b["x"]),
        accumulate=2,
    )
    (note,) = (note for note in step.program.notes if "before the first microbatch" in note)
    assert "aten.sum" in note
    assert "test_microbatches.py" in note


def test_what_couples_microbatches_is_a_warning_or_an_error(caplog: pytest.LogCaptureFixture) -> None:
    def coupled(out: Tensor, batch: Batch) -> Tensor:
        return out.exp().mean().log()

    with caplog.at_level(logging.WARNING, "meshweave"):
        losses, _ = trained(coupled, "dp=2", 2)
    assert "accumulate=2 loss, metrics and gradients are means over microbatches" in caplog.text
    assert "test_microbatches.py" in caplog.text
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
    halves = [coupled(model(x), {}).item() for x in example()["x"].chunk(2)]
    assert losses[0] == pytest.approx(sum(halves) / 2)
    with pytest.raises(mw.CaptureError, match="means over microbatches") as error:
        trained(coupled, "dp=2", 2, run=mw.RunOptions(exact_microbatches=True))
    assert "test_microbatches.py" in str(error.value)


def test_an_error_says_why_neither_a_cut_nor_a_loop_runs() -> None:
    with pytest.raises(mw.CaptureError, match="does not run on a microbatch by itself") as error:
        trained(lambda o, b: F.cross_entropy(o @ o.t(), torch.arange(ROWS)), "dp=2", 2)
    assert "aten.mm of aten.permute" in str(error.value)
    assert "on a microbatch: " in str(error.value)
    assert "test_microbatches.py" in str(error.value)


def test_numbers_of_rows_are_an_error_that_names_the_entry() -> None:
    with pytest.raises(mw.PlanError, match="a microbatch has only some rows") as error:
        trained(lambda o, b: (o - o[b["partner"]]).square().mean(), "dp=2", 2)
    assert "'partner'" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_in_fewer_bits_is_the_sum_of_those_of_microbatches(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Up to the rounding of each."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(24, 32)}

    def losses(count: int) -> list[float]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
        step = mw.compile(
            model,
            loss=lambda out, batch: out.square().mean(),
            example=batch,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
            mesh="dp=2",
            accumulate=count,
            precision=mw.Precision(autocast=dtype, loss_scale=None),
            forward=lambda model, batch: model(batch["x"]),
        )
        return [step(batch).item() for _ in range(3)]

    assert losses(4) == pytest.approx(losses(1), rel=2 * torch.finfo(dtype).eps)
    assert not caplog.records


class Recomputed(nn.Module):
    """Blocks whose backward computes their forward, and so the casts of their parameters, again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("passes", ["prefetch=1", "keep"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_parameter_that_a_recomputed_block_casts_again_is_one_value(passes: str, accumulate: int) -> None:
    torch.manual_seed(0)
    model, example = Recomputed(), {"x": torch.randn(8, 8)}
    losses = []
    for mesh, how in (("", ""), ("fsdp=2", passes)):
        own = copy.deepcopy(model)
        step = mw.compile(
            own,
            loss=lambda out, _: out.float().square().mean(),
            example=example,
            optimizer=torch.optim.SGD(own.parameters(), lr=0.1),
            mesh=mesh,
            accumulate=accumulate,
            precision=torch.bfloat16,
            passes=how or None,
            profile="h100",
        )
        losses.append([float(step(example)) for _ in range(3)])
        casts = [n for n in step.program.placed.graph.nodes if n.target is torch.ops.aten._to_copy.default]
        prepared = Counter(n.args[0] for n in casts if origin_of(n).phase == "prepare")
        assert all(count == 1 for count in prepared.values())
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
