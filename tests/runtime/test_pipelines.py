"""Steps whose stages follow a schedule: every number is that of one device, in the order that the schedule says."""

from __future__ import annotations

import copy
import operator
import os
import re
import signal
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tests.experts import mixture, own_loss, tokens
from tests.processes import Job
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import meshweave as mw
from meshweave.engine.actions import Action, Schedule
from meshweave.engine.schedules.csv_files import save_schedule
from meshweave.engine.schedules.generators import SCHEDULES, make_schedule
from meshweave.engine.sections import sections_of_roles
from meshweave.errors import MeshweaveError, PlanError, StepError

HALF = mw.Precision(autocast=torch.float16, loss_scale=mw.LossScale(init_scale=2.0**10))
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
        **({"profile": "alpha-beta"} | options),
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


class Attending(nn.Module):
    """Attention written out, with a number where the mask is set."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return x + (q @ k.transpose(1, 2)).masked_fill(self.mask, -1e4).softmax(-1) @ v


class Attentions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(Attending() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_recomputed_constants_are_where_they_are_used() -> None:
    """The number that all layers set is one node: recomputed, it must not draw their backward to the first stage."""
    losses = []
    pipelined: dict[str, Any] = {"pipeline": "1f1b", "accumulate": 4}
    for mesh, options in (("", dict[str, Any]()), ("pp=2", pipelined)):
        torch.manual_seed(0)
        model = Attentions().double()
        step = mw.compile(
            model,
            loss=lambda out, batch: out.square().mean(),
            example=(torch.randn(8, 3, 8, dtype=torch.float64),),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            mesh=mesh,
            profile="alpha-beta",
            passes="recompute=full",
            **options,
        )
        batches = torch.randn(3, 8, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        losses.append([float(step((batch,))) for batch in batches])
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


@pytest.mark.parametrize("scheme", ["zero1", "fsdp"])
def test_gathers_of_two_stages_of_a_device_are_not_merged(scheme: str) -> None:
    """The first stage runs before the second one gathers."""
    plan = f"stages:pp:2+{scheme}:dp"
    found = trained("pp=2,dp=2", plan=plan, pipeline="interleaved", profile="h100", passes="overlap")
    assert_equal(found, on_one_device("sgd", None))


class Sequences(nn.Module):
    """Two blocks of PyTorch's modules alone, which no line of the model calls again when they are recomputed."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        make = lambda: nn.Sequential(nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))  # noqa: E731
        self.blocks, self.is_checkpointed = nn.ModuleList([make(), make()]), is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x))
        return x


def losses_of_sequences(mesh: str, is_checkpointed: bool, **options: Any) -> list[float]:
    torch.manual_seed(0)
    model, batches = Sequences(is_checkpointed), torch.randn(3, 8, 8)
    step = mw.compile(
        model,
        loss=lambda out, _: (out.half() if options.get("precision") else out).square().mean(),
        example=(batches[0],),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        mesh=mesh,
        **options,
    )
    return [float(step((batch,))) for batch in batches]


@pytest.mark.parametrize(
    ("is_checkpointed", "options"), [(True, {}), (False, {"passes": "recompute=full"}), (False, {"precision": HALF})]
)
def test_blocks_that_are_sequences_are_the_stages(is_checkpointed: bool, options: dict[str, Any]) -> None:
    """Neither is a block cut, nor is a part of it recomputed in the stage before; the loss is scaled in the last."""
    found = losses_of_sequences("pp=2", is_checkpointed, accumulate=2, pipeline="1f1b", **options)
    expected = losses_of_sequences("", False, precision=options.get("precision"))
    assert found == pytest.approx(expected, rel=2e-3 if "precision" in options else 1e-6)


class Stem(nn.Module):
    """A batch norm in front of the layers: nothing else uses the new values of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))
        self.layers = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class Biased(nn.Module):
    """Attentions in front of the layers and in them, whose bias learns: where all is masked all write one zero."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4, 4))
        self.first, self.layers = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, *self.layers):
            q = layer(x).unflatten(2, (2, 2)).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(q, q, q, self.bias).transpose(1, 2).flatten(2)
        return x


@pytest.mark.parametrize("kind", [Stem, Biased])
def test_what_is_in_front_of_the_layers_is_in_the_first_stage(kind: type[nn.Module]) -> None:
    found = []
    for mesh, pipeline in (("", None), ("pp=2", "1f1b")):
        torch.manual_seed(0)
        model = kind()
        step = mw.compile(
            model,
            loss=lambda out, _: out.square().mean(),
            example=(torch.randn(4, 4, 4),),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            mesh=mesh,
            accumulate=2,
            pipeline=pipeline,
        )
        batches = torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(1))
        found.append([*(float(step((batch,))) for batch in batches), *map(float, map(torch.sum, model.buffers()))])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


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
    options: dict[str, Any] = {"accumulate": 4, "precision": HALF, "clip_grad_norm": clip}
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


class Rounded(nn.Module):
    """Casts and views between layers, of `form`: at the borders of stages, a moved value is smaller before or after."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.norms = nn.ModuleList([nn.LayerNorm(8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        first = x.bfloat16()
        for layer, norm in zip(self.layers, self.norms, strict=True):
            if self.form == "autocast":
                with torch.autocast("cpu", torch.bfloat16):
                    x = x + F.gelu(layer(norm(x)))
            elif self.form == "narrow":
                x = layer(x.float()).bfloat16()
            elif self.form == "views":
                x = layer(x).unflatten(1, (2, 4)).mT.bfloat16().mT.float().flatten(1)
            else:
                x = layer(x).bfloat16().float() + first.float()
        return x.float()


@pytest.mark.slow_rows(
    *(f"pp=2-zbv-{form}" for form in ("narrow", "views", "skip")),
    *(f"pp=2-gpipe-{form}" for form in ("autocast", "narrow", "views")),
    *(f"pp=2,tp=2-1f1b-{form}" for form in ("autocast", "narrow", "skip")),
)
@pytest.mark.parametrize("form", ["autocast", "narrow", "views", "skip"])
@pytest.mark.parametrize(
    ("mesh", "name"), [("pp=4", "1f1b"), ("pp=2", "zbv"), ("pp=2", "gpipe"), ("pp=2,tp=2", "1f1b")]
)
def test_casts_and_views_between_stages(form: str, mesh: str, name: str) -> None:
    def losses(**options: Any) -> list[float]:
        torch.manual_seed(0)
        model, data = Rounded(form), {key: torch.randn(8, 8) for key in "xy"}
        step = mw.compile(
            model, loss=lambda out, batch: F.mse_loss(out, batch["y"]), example=data, accumulate=4,
            optimizer=torch.optim.SGD(model.parameters(), 0.1), profile="alpha-beta", **options,
        )  # fmt: skip
        return [float(step(data)) for _ in range(3)]

    assert losses(mesh=mesh, pipeline=name) == pytest.approx(losses(mesh=mesh), rel=1e-6)


class Counting(nn.Module):
    """A table from a buffer that grows by itself, and a count of calls: neither depends on parameters. The embedding
    is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.norm = nn.LayerNorm(8)
        self.register_buffer("rates", torch.arange(1.0, 9.0))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        table = self.rates.cos()
        self.rates.add_(1.0)
        self.calls += 1
        h = self.embedding(x)
        for layer in self.layers:
            h = h + layer(h).tanh() * table
        return F.linear(self.norm(h), self.embedding.weight)


def count_labels(out: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Metrics of the batch alone, and of both."""
    is_right = (out.argmax(-1) == batch["y"]).sum()
    labels = (batch["y"] >= 0).sum()
    return F.cross_entropy(out.flatten(0, 1).float(), batch["y"].flatten()), {"labels": labels, "right": is_right}


@pytest.mark.slow_rows("None-pp=2-1f1b", "None-pp=4-zb-h1", "None-pp=2,dp=2-1f1b")
@pytest.mark.parametrize(
    ("mesh", "name"), [("pp=2", "1f1b"), ("pp=4", "zb-h1"), ("pp=2", "zbv"), ("pp=2,dp=2", "1f1b")]
)
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_what_depends_on_no_rows(mesh: str, name: str, precision: torch.dtype | None) -> None:
    """Casts of parameters, buffers and metrics of the batch are computed with a stage of their devices."""

    def run(**options: Any) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        model = Counting()
        step = mw.compile(
            model, loss=count_labels, example=batch_of(0), optimizer=torch.optim.SGD(model.parameters(), 0.1),
            mesh=mesh, accumulate=4, precision=precision, **options,
        )  # fmt: skip
        found = [value for i in range(2) for value in (float(step(batch_of(i))), *step.metrics.values())]
        return found, step.buffers()

    (found, buffers), (expected, expected_buffers) = run(pipeline=name), run()
    assert found == pytest.approx(expected, rel=1e-5)
    assert buffers["calls"] == 2
    torch.testing.assert_close(buffers, expected_buffers)


def test_the_results_of_an_op_are_in_its_part_of_backward() -> None:
    """What runs a part hands over tensors, never all results of an op: Inductor's regions do not."""
    model, data = Rounded("autocast"), {key: torch.randn(8, 8) for key in "xy"}
    step = mw.compile(
        model, loss=lambda out, batch: F.mse_loss(out, batch["y"]), example=data, accumulate=4, mesh="pp=2",
        optimizer=torch.optim.SGD(model.parameters(), 0.1), pipeline="zb-h1",
    )  # fmt: skip
    kinds = set[tuple[str, str]]()
    for its in sections_of_roles(step.program.roles, is_pipeline=True, has_parts=True):
        items = [node for node in its.kinds if node.target is operator.getitem]
        kinds.update((its.kinds[node.all_input_nodes[0]], its.kinds[node]) for node in items)
    assert kinds == {("forward", "forward"), ("input", "input"), ("weight", "weight")}


def test_a_checkpoint_and_state_go_from_schedule_to_schedule(tmp_path: Path) -> None:
    def start(mesh: str, name: str | None) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = Tied().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = mw.compile(
            model, loss=lambda out, _: out, example=batch_of(0), optimizer=optimizer, mesh=mesh, accumulate=4,
            pipeline=name,
        )  # fmt: skip
        return model, optimizer, step

    model, optimizer, step = start("pp=2", "1f1b")
    step(batch_of(0))
    step.save(str(tmp_path / "own"))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = copy.deepcopy(optimizer.state_dict())
    expected = [float(step(batch_of(i))) for i in (1, 2)]
    for mesh, name in [("pp=4", "zbv"), ("", None)]:
        model, optimizer, step = start(mesh, name)
        step.load(str(tmp_path / "own"))
        assert [float(step(batch_of(i))) for i in (1, 2)] == pytest.approx(expected, rel=1e-12)
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))
        assert [float(step(batch_of(i))) for i in (1, 2)] == pytest.approx(expected, rel=1e-12)


def rows_of(*stages_of_rank: tuple[int, ...]) -> Schedule:
    """Ranks with these stages: forward of two microbatches on each, then backward."""
    of_rank = []
    for stages in stages_of_rank:
        passes: Any = [("forward", stage) for stage in stages] + [("backward", stage) for stage in reversed(stages)]
        of_rank.append(tuple(Action((kind,), number, stage) for kind, stage in passes for number in range(2)))
    return Schedule("own", tuple(of_rank))


@pytest.mark.parametrize("stages", [((0, 2), (1,)), ((1,), (0, 2)), ((0, 3), (1, 2)), ((0, 1), (2, 3)), ((1,), (0,))])
def test_stages_on_any_ranks(stages: tuple[tuple[int, ...], ...]) -> None:
    """Without a plan the layers go where the schedule has their stages."""
    assert_equal(trained("pp=2", microbatches=2, pipeline=rows_of(*stages)), on_one_device("sgd", None))


# processes


def on_processes(pipe: Any, mesh: str, names: str) -> dict[str, Any]:
    """Losses and parameters by schedule, as numbers."""
    found = {name: trained(mesh, "adamw", pipeline=name, clip_grad_norm=0.5) for name in names.split()}
    return {name: (losses, {n: p.tolist() for n, p in params.items()}) for name, (losses, params) in found.items()}


@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        ("pp=4", "1f1b zbv"),
        pytest.param("pp=4", "interleaved dualpipev", marks=pytest.mark.slow),
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


def on_own_rows(pipe: Any) -> list[float]:
    """Losses of a step whose ranks pass their own rows: in a mesh pp=2,dp=2 those of rank % 2."""
    torch.manual_seed(0)
    model, own = Tied().double(), torch.distributed.get_rank() % 2
    batches = [{key: value.chunk(2)[own] for key, value in batch_of(i).items()} for i in range(3)]
    step = mw.compile(
        model, loss=lambda out, _: out, example=batches[0], optimizer=OPTIMIZERS["sgd"](model.parameters()),
        mesh="pp=2,dp=2", accumulate=4, pipeline="zbv", batch="local",
    )  # fmt: skip
    return [float(step(batch)) for batch in batches]


@pytest.mark.multiprocess
def test_ranks_of_a_pipeline_pass_their_own_rows(start: Callable[..., Job]) -> None:
    for losses in start(f"{__name__}:on_own_rows", 4).finish(120):
        assert losses == pytest.approx(on_one_device("sgd", None)[0], rel=1e-12)


def beside_a_rank_that_dies(pipe: Any) -> str:
    """Rank 1 is killed in place of its second send of the second step; what rank 0 says."""
    torch.manual_seed(0)
    model, data = Chain(), {name: torch.randn(8, 4) for name in "xy"}
    step = mw.compile(
        model, loss=mean_square, example=data, optimizer=torch.optim.SGD(model.parameters(), 0.1), mesh="pp=2",
        accumulate=4, pipeline="1f1b",
    )  # fmt: skip
    step(data)
    send, sent = torch.distributed.isend, list[int]()

    def send_once(*args: Any, **options: Any) -> Any:
        if sent:
            os.kill(os.getpid(), signal.SIGKILL)
        sent.append(0)
        return send(*args, **options)

    if torch.distributed.get_rank() == 1:
        torch.distributed.isend = send_once
    with pytest.raises(StepError) as error:
        step(data)
    return str(error.value)


@pytest.mark.multiprocess
def test_a_peer_says_in_which_action_it_waits_for_a_rank_that_died(start: Callable[..., Job]) -> None:
    text = start(f"{__name__}:beside_a_rank_that_dies", 2).finish(60)[0]
    place = r"transfer of 32 bytes over t\d+ of ranks 0, 1 in backward of microbatch 1 of stage 0 for \S+\.py:\d+"
    assert re.search(rf"rank 1 is gone\n  where: seen by rank 0 at {place}", text), text


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


def by_hand(*indices: int) -> mw.Plan:
    """Each layer of a chain on an index of axis pp."""
    return mw.Plan.on({f"layers.{i}": f"pp={index}" for i, index in enumerate(indices)})


def test_layers_that_are_placed_in_another_order_than_the_schedule_has() -> None:
    """What the error says to write runs."""
    expected = pytest.approx(losses_of(""), rel=1e-5)
    for name, message in [("zbv", "not those of schedule zbv"), ("1f1b", "fixed number of stages")]:
        with pytest.raises(PlanError, match=message) as error:
            losses_of("pp=2", accumulate=4, pipeline=name, plan=by_hand(0, 1, 1, 0))
        assert 'pipeline="best"' in error.value.hint
        assert "plan=mw.Plan.stages(AXIS)" in error.value.hint
        assert losses_of("pp=2", accumulate=4, pipeline=name, plan=mw.Plan.stages("pp")) == expected
    assert losses_of("pp=2", accumulate=4, pipeline="best", plan=by_hand(0, 1, 1, 0)) == expected


@pytest.mark.parametrize("mesh", ["pp=2,dp=2", "pp=2,dp=4", "pp=2,fsdp=4"])
@pytest.mark.parametrize("microbatches", [4, 8])
def test_microbatches_with_fewer_rows_than_devices(mesh: str, microbatches: int) -> None:
    assert_equal(trained(mesh, microbatches=microbatches, pipeline="1f1b"), on_one_device("sgd", None))


def test_a_schedule_for_another_number_of_ranks() -> None:
    with pytest.raises(PlanError, match=r"(?s)3 ranks, and an axis of size 2.*mesh=\"pp=3\""):
        trained("pp=2", pipeline=make_schedule("1f1b", 3, 4))


def test_a_schedule_for_another_number_of_microbatches() -> None:
    with pytest.raises(MeshweaveError, match="microbatch"):
        trained("pp=2", pipeline=make_schedule("1f1b", 2, 3))


def test_a_schedule_that_cannot_run_names_its_actions() -> None:
    first = (Action(("forward",), 0), Action(("backward",), 0), Action(("forward",), 1), Action(("backward",), 1))
    second = tuple(Action(a.kinds, 1 - a.microbatch, 1) for a in first)
    with pytest.raises(MeshweaveError, match="wait") as error:
        trained("pp=2", microbatches=2, pipeline=Schedule("crossed", (first, second)))
    assert "0B0" in error.value.got


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_experts_train_as_on_one_device(optimizer: str) -> None:
    """With each schedule (SGD: with two), beside one device with the same microbatches."""

    def losses(mesh: str, pipeline: str | None) -> list[float]:
        model = mixture("qwen3_moe", num_hidden_layers=4, output_router_logits=False).double()
        step = mw.compile(
            model,
            loss=own_loss,
            example=tokens(batch=8),
            optimizer=OPTIMIZERS[optimizer](model.parameters()),
            mesh=mesh,
            accumulate=4,
            profile="alpha-beta",
            pipeline=pipeline,
        )
        return [step(tokens(batch=8, seed=seed)).item() for seed in range(3)]

    expected = losses("", None)
    for name in SCHEDULES if optimizer == "adamw" else ("1f1b", "zbv"):
        assert losses("pp=2,ep=2", name) == pytest.approx(expected, rel=1e-6), name


class Counted(nn.Module):
    """A layer that counts its calls, before its first op that autograd records, and ends with a fixed buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.full((8,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return torch.tanh(self.linear(x)) * self.scale


class CountedChain(nn.Module):
    def __init__(self, is_recomputed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counted() for _ in range(4))
        self.is_recomputed = is_recomputed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_recomputed else layer(x)
        return x


@pytest.mark.parametrize("is_recomputed", [False, True])
@pytest.mark.parametrize(("mesh", "pipeline"), [("pp=2", "1f1b"), ("pp=2", "zbv"), ("pp=2,fsdp=2", "gpipe")])
def test_layers_that_count_their_calls(mesh: str, pipeline: str, is_recomputed: bool) -> None:
    """Neither where a buffer lives nor where an op's gradient is computed follows from the next layer's count."""
    torch.manual_seed(0)
    model, batches = CountedChain(is_recomputed).double(), torch.randn(3, 8, 8, dtype=torch.float64)

    def trained(mesh: str, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
        own = copy.deepcopy(model)
        step = mw.compile(
            own,
            loss=lambda out, batch: out.square().mean(),
            example={"x": batches[0]},
            optimizer=torch.optim.SGD(own.parameters(), lr=0.1),
            mesh=mesh,
            accumulate=4,
            profile="alpha-beta",
            **options,
        )
        losses = [step({"x": x}).item() for x in batches]
        return losses, {name: x.clone() for name, x in own.state_dict().items()}

    losses, state = trained("")
    in_stages, state_in_stages = trained(mesh, pipeline=pipeline)
    assert in_stages == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(state_in_stages, state)
    assert state["layers.3.count"] == (6 if is_recomputed else 3)
