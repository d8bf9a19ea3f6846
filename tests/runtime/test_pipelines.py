"""Steps whose stages follow a schedule: every number is that of one device, in the order that the schedule says."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.processes import Job
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.engine.actions import Action, Schedule
from meshweave.engine.schedules.csv_files import save_schedule
from meshweave.engine.schedules.generators import SCHEDULES, make_schedule
from meshweave.errors import MeshweaveError, PlanError

MESHES = ("pp=2", "pp=4", "pp=2,dp=2", "pp=2,tp=2", "fsdp=2,pp=2")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


class Tied(nn.Module):
    """An embedding that is also the head, a connection that skips stages, and dropout."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(depth)])
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = h = self.embedding(x)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        h = F.dropout(h + 0.5 * first, 0.0)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def batch_of(seed: int, rows: int = 8) -> dict[str, Tensor]:
    """Rows with different numbers of valid tokens."""
    made = torch.Generator().manual_seed(seed)
    x, y = (torch.randint(0, 16, (rows, 3), generator=made) for _ in range(2))
    y[0, 1:] = -100
    y[3] = -100
    return {"x": x, "y": y}


def trained(mesh: str, optimizer: str = "sgd", *, microbatches: int = 4, **options: Any) -> tuple[list[float], Any]:
    """Losses and parameters after three steps in float64."""
    torch.manual_seed(0)
    model = Tied().double()
    step = mw.compile(
        model,
        loss=lambda out, _: out,
        example=batch_of(0),
        optimizer=OPTIMIZERS[optimizer](model.parameters()),
        mesh=mesh,
        accumulate=microbatches,
        profile="alpha-beta",
        **options,
    )
    return [float(step(batch_of(i))) for i in range(3)], step.parameters()


@cache
def on_one_device(optimizer: str, clip: float | None) -> tuple[list[float], Any]:
    return trained("", optimizer, microbatches=1, clip_grad_norm=clip)


def assert_equal(found: tuple[list[float], Any], expected: tuple[list[float], Any]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-10, atol=1e-12)


ROWS = [(name, MESHES[i % len(MESHES)], (*OPTIMIZERS,)[i % 2]) for i, name in enumerate(SCHEDULES)]
PRODUCT = [(name, mesh, optimizer) for name in SCHEDULES for mesh in MESHES for optimizer in OPTIMIZERS]


@pytest.mark.parametrize(
    ("name", "mesh", "optimizer"),
    [*ROWS, *(pytest.param(*row, marks=pytest.mark.slow) for row in PRODUCT if row not in ROWS)],
)
def test_each_schedule_trains_as_one_device(name: str, mesh: str, optimizer: str) -> None:
    clip = 0.5 if optimizer == "adamw" else None
    found = trained(mesh, optimizer, pipeline=name, clip_grad_norm=clip)
    assert_equal(found, on_one_device(optimizer, clip))


@pytest.mark.parametrize("microbatches", [1, 2, 8])
def test_any_number_of_microbatches(microbatches: int) -> None:
    found = trained("pp=2", microbatches=microbatches, pipeline="zbv")
    assert_equal(found, on_one_device("sgd", None))


def test_stages_run_in_the_order_of_the_schedule() -> None:
    torch.manual_seed(0)
    model = Tied()
    step = mw.compile(
        model, loss=lambda out, _: out, example=batch_of(0), mesh="pp=2", accumulate=4, pipeline="zb-h1",
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
    )  # fmt: skip
    turns = [" ".join(str(turn.action) for turn in its) for its in step.session.turns.of_device]
    assert turns == [
        "F0 F1 I0 W0 F2 I1 W1 F3 I2 W2 I3 W3 L0 L1 L2 L3 N4 U4",
        "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3 L0 L1 L2 L3 N4 U4",
    ]
    spans = [s for s in step.trace(batch_of(0)).spans if s.kind == "compute" and s.phase in ("forward", "backward")]
    order = [(s.phase, s.microbatch) for s in sorted((s for s in spans if s.role == 0), key=lambda s: s.start)]
    assert list(dict.fromkeys(order))[:3] == [("forward", 0), ("forward", 1), ("backward", 0)]


def random_schedule(random: Random, ranks: int, microbatches: int, stages_per_rank: int) -> Schedule:
    """Any order in which what an action needs has run, with backward whole or in parts."""
    stages = ranks * stages_per_rank
    is_split = {(s, m): random.random() < 0.5 for s in range(stages) for m in range(microbatches)}
    done: set[tuple[str, int, int]] = set()
    waiting = {(kind, s, m) for s, m in is_split for kind in ("FIW" if is_split[s, m] else "FB")}

    def is_ready(kind: str, s: int, m: int) -> bool:
        before = {"F": [("F", s - 1, m)] if s else [], "W": [("I", s, m)]}.get(kind)
        if before is None:
            before = [("F", s, m)]
            if s + 1 < stages:
                before.append(("I" if is_split[s + 1, m] else "B", s + 1, m))
        return done.issuperset(before)

    kinds: Any = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
    of_rank: list[list[Action]] = [[] for _ in range(ranks)]
    while waiting:
        kind, s, m = random.choice(sorted(each for each in waiting if is_ready(*each)))
        waiting.remove((kind, s, m))
        done.add((kind, s, m))
        of_rank[s % ranks].append(Action((kinds[kind],), m, s))
    return Schedule("random", tuple(map(tuple, of_rank)))


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(i, marks=pytest.mark.slow) for i in range(6, 200))])
def test_any_order_of_actions_trains_as_one_device(seed: int) -> None:
    random = Random(seed)
    ranks = random.choice([2, 2, 4])
    schedule = random_schedule(random, ranks, 4, random.choice([1, 2]))
    assert_equal(trained(f"pp={ranks}", pipeline=schedule), on_one_device("sgd", None))


def test_a_file_of_torchs_form(tmp_path: Path) -> None:
    save_schedule(make_schedule("interleaved", 2, 4), tmp_path / "own.csv")
    assert_equal(trained("pp=2", pipeline=tmp_path / "own.csv"), on_one_device("sgd", None))


class Normalized(nn.Module):
    """Batch norm, whose buffers go from microbatch to microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_buffers_metrics_and_evaluation_are_those_without_a_pipeline() -> None:
    data = [{"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(i))} for i in range(3)]

    def run(**options: Any) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = Normalized()
        step = mw.compile(
            model, loss=lambda out, _: (out.square().mean(), {"most": out.abs().mean()}), example=data[0],
            optimizer=torch.optim.Adam(model.parameters(), 0.01), mesh="pp=2", accumulate=2, **options,
        )  # fmt: skip
        found = [(float(step(batch)), float(step.metrics["most"])) for batch in data]
        return found, step.buffers(), float(step.evaluate(data[0]))

    (found, buffers, evaluated), (expected, expected_buffers, expected_loss) = run(pipeline="gpipe"), run()
    assert found == [pytest.approx(pair, rel=1e-6) for pair in expected]
    assert evaluated == pytest.approx(expected_loss, rel=1e-6)
    for name, value in expected_buffers.items():
        torch.testing.assert_close(buffers[name], value)


class Chain(nn.Module):
    """Four layers, each beside a layer that all stages use if `is_shared`, `times` times, from the last to the first if
    `is_reversed`. The outputs are the values after each layer."""

    def __init__(self, is_shared: bool = False, is_reversed: bool = False, times: int = 1) -> None:
        super().__init__()
        self.is_reversed, self.times = is_reversed, times
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.shared = nn.Linear(4, 4) if is_shared else None

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for layer in [*self.layers][:: -1 if self.is_reversed else 1] * self.times:
            x = layer(x).tanh() + (0 if self.shared is None else self.shared(x))
            found.append(x)
        return found


def mean_square(out: list[Tensor], batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(out[-1].float(), batch["y"])


def losses_of(mesh: str, loss: Any = mean_square, model: dict[str, Any] | None = None, **options: Any) -> list[float]:
    """Losses of three steps, and their last metrics, of a chain."""
    torch.manual_seed(0)
    chain, data = Chain(**model or {}), {name: torch.randn(8, 4) for name in "xy"}
    step = mw.compile(
        chain, loss=loss, example=data, optimizer=torch.optim.SGD(chain.parameters(), 0.1), mesh=mesh, **options
    )
    losses = [float(step(data)) for _ in range(3)]
    return [*losses, *(float(value) for name, value in sorted(step.metrics.items()) if name != "loss")]


@pytest.mark.parametrize(("mesh", "name"), [("pp=4", "1f1b"), ("pp=2", "zbv"), ("pp=2,dp=2", "zb-h1")])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_loss_that_is_scaled(mesh: str, name: str, clip: float | None) -> None:
    precision = mw.Precision(autocast=torch.float16, loss_scale=mw.LossScale(init_scale=2.0**10))
    options: dict[str, Any] = {"accumulate": 4, "precision": precision, "clip_grad_norm": clip}
    found = losses_of(mesh, pipeline=name, **options)
    assert found == pytest.approx(losses_of("", **options), rel=1e-2)


def of_all(out: list[Tensor], batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(torch.stack(out), batch["y"].expand(len(out), -1, -1))


def of_each(out: list[Tensor], batch: dict[str, Tensor]) -> Tensor:
    return torch.stack([F.mse_loss(each, batch["y"]) for each in out]).sum()


@pytest.mark.parametrize(("mesh", "name"), [("pp=4", "1f1b"), ("pp=2", "zbv")])
@pytest.mark.parametrize(
    ("loss", "model"), [(of_all, {}), (of_each, {}), (mean_square, {"is_shared": True}), (of_each, {"is_shared": True})]
)
def test_values_that_several_stages_use(mesh: str, name: str, loss: Any, model: dict[str, Any]) -> None:
    expected = losses_of("", loss, model)
    assert losses_of(mesh, loss, model, accumulate=4, pipeline=name) == pytest.approx(expected, rel=1e-5)


def with_first(out: list[Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return mean_square(out, batch), {"first": out[0].mean(), "second": (out[1] - batch["y"]).abs().mean()}


@pytest.mark.parametrize(("mesh", "name"), [("pp=4", "1f1b"), ("pp=2", "zbv"), ("pp=2,dp=2", "1f1b")])
def test_metrics_of_several_stages(mesh: str, name: str) -> None:
    found = losses_of(mesh, with_first, accumulate=4, pipeline=name)
    assert len(found) == 5
    assert found == pytest.approx(losses_of("", with_first), rel=1e-5)


@pytest.mark.parametrize(("mesh", "name"), [("pp=4", "1f1b"), ("pp=2", "zbv"), ("pp=2", "interleaved")])
def test_layers_that_run_from_the_last_to_the_first(mesh: str, name: str) -> None:
    found = losses_of(mesh, model={"is_reversed": True}, accumulate=4, pipeline=name)
    assert found == pytest.approx(losses_of("", model={"is_reversed": True}), rel=1e-5)


# processes


def on_processes(pipe: Any, mesh: str, names: str) -> dict[str, Any]:
    """Losses and parameters by schedule, as numbers."""
    found = {name: trained(mesh, "adamw", pipeline=name, clip_grad_norm=0.5) for name in names.split()}
    return {name: (losses, {n: p.tolist() for n, p in params.items()}) for name, (losses, params) in found.items()}


@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        ("pp=4", "1f1b interleaved zbv dualpipev"),
        pytest.param("pp=2,dp=2", "gpipe zb-h2 zbv", marks=pytest.mark.slow),
        pytest.param("pp=2,tp=2", "v-half looped-bfs", marks=pytest.mark.slow),
    ],
)
def test_processes_train_as_one_device(mesh: str, names: str, start: Callable[..., Job]) -> None:
    outcomes = start(f"{__name__}:on_processes", 4, mesh, names).finish(120)
    for outcome in outcomes:
        assert [*outcome] == names.split(), outcome
        for losses, params in outcome.values():
            found = {name: torch.tensor(value, dtype=torch.float64) for name, value in params.items()}
            assert_equal((losses, found), on_one_device("adamw", 0.5))


# bad input


def test_unknown_schedule() -> None:
    with pytest.raises(PlanError, match="unknown pipeline schedule") as error:
        trained("pp=2", pipeline="1b1f")
    assert "1f1b" in error.value.hint


def test_a_step_without_stages() -> None:
    with pytest.raises(PlanError, match="a pipeline needs stages on several devices"):
        trained("dp=2", pipeline="1f1b")


def test_layers_that_run_twice_have_no_chain_of_stages() -> None:
    for mesh in ("pp=4", "pp=2"):
        with pytest.raises(PlanError, match="comes back to a stage that it has passed") as error:
            losses_of(mesh, model={"times": 2}, accumulate=4, pipeline="1f1b")
        assert "in forward" in error.value.where


def test_microbatches_of_a_row_are_whole_on_every_device() -> None:
    """A single row is not cut over dp: no device asks one of another stage for it."""
    found = losses_of("pp=2,dp=2", accumulate=8, pipeline="1f1b")
    assert found == pytest.approx(losses_of(""), rel=1e-5)


def test_microbatches_that_do_not_divide_the_rows_say_how_many_do() -> None:
    with pytest.raises(PlanError, match="does not divide") as error:
        losses_of("pp=2", accumulate=3, pipeline="1f1b")
    assert error.value.hint.startswith("accumulate=4 for this batch")


def test_more_stages_than_layers() -> None:
    with pytest.raises(PlanError, match="fewer layers than there are stages"):
        trained("pp=8", pipeline="interleaved")


def test_a_plan_with_other_stages_than_the_schedule() -> None:
    with pytest.raises(PlanError, match="fixed number of stages per rank"):
        trained("pp=2", pipeline="1f1b", plan="stages:pp:2")
    with pytest.raises(PlanError, match="the stages of the plan are not those of schedule zbv"):
        trained("pp=2", pipeline="zbv", plan="stages:pp:2:looped")


def test_a_schedule_for_another_number_of_microbatches() -> None:
    with pytest.raises(MeshweaveError, match="microbatch"):
        trained("pp=2", pipeline=make_schedule("1f1b", 2, 3))


def test_a_schedule_that_cannot_run_names_its_actions() -> None:
    first = (Action(("forward",), 0), Action(("backward",), 0), Action(("forward",), 1), Action(("backward",), 1))
    second = tuple(Action(a.kinds, 1 - a.microbatch, 1) for a in first)
    with pytest.raises(MeshweaveError, match="wait") as error:
        trained("pp=2", microbatches=2, pipeline=Schedule("crossed", (first, second)))
    assert "0B0" in error.value.got
