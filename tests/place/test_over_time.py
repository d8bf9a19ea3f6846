"""Steps cut over time: what is needed of the whole batch, what couples microbatches, and sums over microbatches that
equal the step on the whole batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from meshweave.capture.step import CaptureOptions, StepSource, capture_source
from meshweave.ir.graph import Input, StepGraph, op_name
from meshweave.ir.ops import KERNELS
from meshweave.place.microbatches import NoCutError, microbatches_of
from meshweave.place.over_time import cut_over_time

Batch = dict[str, Tensor]
Loss = Callable[[Tensor, Batch], Any]
ROWS, CLASSES = 12, 4
F64 = torch.float64


def example() -> Batch:
    generator = torch.Generator().manual_seed(3)
    y = torch.tensor([0, -100, 2, 3, -100, -100, -100, 1, 1, 0, -100, 2])
    return {
        "x": torch.randn(ROWS, 5, generator=generator, dtype=F64),
        "y": y,
        "w": torch.rand(ROWS, generator=generator, dtype=F64),
        "count": (y >= 0).sum(),
        "prototypes": torch.randn(ROWS, CLASSES, generator=generator, dtype=F64),
    }


class Small(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6, dtype=F64)
        self.norm = nn.BatchNorm1d(6, dtype=F64) if norm else nn.Identity()
        self.last = nn.Linear(6, CLASSES, dtype=F64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return out


def captured(loss: Loss, norm: bool = False) -> tuple[StepGraph, nn.Module]:
    torch.manual_seed(0)
    model = Small(norm)
    source = StepSource(model, loss, lambda module, batch: module(batch["x"]))
    return capture_source(source, example(), None, CaptureOptions())[0], model


class Run(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        target = torch.ops.aten.reshape.default if target is torch.ops.aten.view.default else target
        return KERNELS.get(target, target)(*args, **kwargs)


def results(step: StepGraph, model: nn.Module, batch: Batch, draw: int = 0) -> dict[tuple[str, str], Tensor]:
    def value(item: Input) -> Tensor:
        known = {"param": dict(model.named_parameters()), "buffer": dict(model.named_buffers())}
        known |= {"constant": step.constants, "scalar": {"draw": torch.tensor(draw)}}
        return known.get(item.kind, batch)[item.name].detach()  # type: ignore[attr-defined]

    values = Run(fx.GraphModule({}, step.graph)).run(*map(value, step.inputs))
    return dict(zip(step.outputs, values, strict=True))


def in_microbatches(
    step: StepGraph, model: nn.Module, number: int, batch: Batch | None = None
) -> dict[tuple[str, str], Tensor]:
    """The sums over microbatches of loss, metrics and gradients."""
    cut = cut_over_time(step, number)
    parts, batch = microbatches_of(step, cut), batch or example()
    ahead = {name: x for (_, name), x in results(parts.ahead, model, batch).items()} if parts.ahead else {}
    total: dict[tuple[str, str], Tensor] = {}
    for index in range(number):
        rows = {name: x.chunk(number)[index] if name in cut.rows else x for name, x in batch.items()}
        for key, value in results(parts.step, model, rows | ahead, index).items():
            total[key] = total[key] + value if key in total else value
    return total


def error_of(step: StepGraph, model: nn.Module, number: int, batch: Batch | None = None) -> float:
    whole, summed = results(step, model, batch or example()), in_microbatches(step, model, number, batch)
    return max(float((summed[key] - value).abs().max()) for key, value in whole.items() if key[0] != "buffer")


def tokens(batch: Batch) -> Tensor:
    return batch["y"] >= 0


def per_row(out: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(out, batch["y"], reduction="none")


FAR = torch.arange(ROWS).flip(0)


def two_views(out: Tensor) -> Tensor:
    first, second = out.chunk(2)
    return -F.cosine_similarity(first, second.detach()).mean() + (out[:ROWS] - out[ROWS:]).pow(2).mean()


def confusion(out: Tensor, batch: Batch) -> Tensor:
    at = (batch["y"].clamp(min=0) * CLASSES + out.argmax(1), torch.ones(ROWS, dtype=torch.long))
    return torch.zeros(CLASSES, CLASSES, dtype=torch.long).view(-1).index_add(0, *at).view(CLASSES, CLASSES).trace()


EXACT: dict[str, tuple[Loss, int]] = {  # with the number of values that are needed ahead
    "mean over valid tokens": (lambda o, b: F.cross_entropy(o, b["y"]), 1),
    "sum over a count in the batch": (lambda o, b: F.cross_entropy(o, b["y"], reduction="sum") / b["count"], 0),
    "sum over a count in the loss": (lambda o, b: per_row(o, b).sum() / tokens(b).sum(), 1),
    "sum": (lambda o, b: o.pow(2).sum(), 0),
    "a count and one": (lambda o, b: (per_row(o, b).sum() / (tokens(b).sum() + 1), {"n": tokens(b).sum() + 1}), 1),
    "a number beside a mean": (lambda o, b: 2 - (o.pow(2).mean() + 1.5), 0),
    "mean": (lambda o, b: o.pow(2).mean(), 0),
    "mean of means of rows": (lambda o, b: (o * b["w"][:, None]).mean(1).mean(), 0),
    "weighted mean": (lambda o, b: (per_row(o, b) * b["w"]).sum() / b["w"].sum().clamp(min=1e-3), 1),
    "weights of classes": (lambda o, b: F.cross_entropy(o, b["y"], weight=torch.arange(1.0, 5.0, dtype=F64)), 1),
    "label smoothing": (lambda o, b: F.cross_entropy(o, b["y"], label_smoothing=0.1), 2),
    "counts of classes": (
        lambda o, b: (o.softmax(1) / F.one_hot(b["y"].clamp(min=0), 4).sum(0).clamp(min=1)).sum(),
        0,  # no op ties labels to rows: each microbatch has all of them
    ),
    "two heads": (lambda o, b: F.cross_entropy(o, b["y"]) + 0.1 * o.logsumexp(1).pow(2).mean(), 1),
    "an entry that is no rows": (lambda o, b: F.cross_entropy(o @ b["prototypes"].t(), tokens(b).long()), 1),
    "metrics": (lambda o, b: (F.cross_entropy(o, b["y"]), {"right": (o.argmax(1) == b["y"]).sum()}), 1),
    "rows beside rows": (lambda o, b: F.cross_entropy(torch.cat([o, o.tanh()]), b["y"].repeat(2)), 1),
    "one view beside the other": (lambda o, b: two_views(torch.cat([o, o * b["w"][:, None]])), 0),
    "confusion": (lambda o, b: (o.mean(), {"m": confusion(o, b)}), 0),
    "mixture of means": (lambda o, b: torch.lerp(per_row(o, b).mean(), o.pow(2).mean(), 0.3), 0),
    "positions": (lambda o, b: (o.sum(1) * torch.arange(float(ROWS), dtype=F64)).mean(), 0),
    "ranks": (lambda o, b: (o.sum(1) * b["w"].argsort().argsort()).mean(), 0),
    "rows of the batch by number": (lambda o, b: (o * b["x"][FAR, :CLASSES]).mean(), 1),
    "rows with the same label": (lambda o, b: (o * (b["y"][:, None] == b["y"]).sum(1)[:, None]).mean(), 1),
    "dropout": (lambda o, b: F.dropout(o.exp(), 0.3).mean(), 0),
    "dropout of whole rows": (lambda o, b: (o.sum(1) * torch.rand(ROWS) * F.dropout(b["w"], 0.3)).mean(), 0),
    "dropout of tokens before rows": (lambda o, b: F.dropout(o.view(ROWS, 2, 2).transpose(0, 1), 0.3).sum(), 0),
    "noise in merged dims": (lambda o, b: (o.t().reshape(-1) * torch.rand(ROWS * CLASSES)).sum(), 0),
    "each row at its label": (lambda o, b: o[torch.arange(ROWS), b["y"].clamp(min=-1)].mean(), 0),
    "the whole batch of labels": (lambda o, b: (o.sum(1) * (b["w"] / b["w"].max())).mean(), 1),
}


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, groups=4), nn.MaxPool2d(2)
        )
        self.up = nn.Sequential(nn.ConvTranspose2d(4, 2, 2), nn.Upsample(scale_factor=2), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.up(self.layers(x[:, None]))
        return out


class Tokens(nn.Module):
    """Layers that work on [tokens, rows, features], whatever they get."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.last = layer, nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        logits: Tensor = self.last((out[0] if isinstance(out, tuple) else out).transpose(0, 1))
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "images": Images,
    "attention": lambda: Tokens(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)),
    "gru": lambda: Tokens(nn.GRU(6, 6, batch_first=True)),
    "lstm": lambda: Tokens(nn.LSTM(6, 6, num_layers=2, batch_first=True)),
}


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_layers_in_microbatches(name: str, number: int) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    batch = {"x": torch.randn(ROWS, 6, 6, dtype=F64), "y": torch.randint(0, CLASSES, (ROWS, 6))}

    def loss(out: Tensor, batch: Batch) -> Tensor:
        if out.dim() == 2:
            return out.pow(2).mean()
        return F.cross_entropy(out.reshape(-1, CLASSES), batch["y"].t().reshape(-1))  # tokens before rows

    step, _ = capture_source(StepSource(model, loss, lambda m, b: m(b["x"])), batch, None, CaptureOptions())
    assert error_of(step, model, number, batch) < 1e-12


COUPLED: dict[str, tuple[Loss, str]] = {  # with the op that needs other rows
    "logarithm of a mean": (lambda o, b: o.exp().mean().log(), "aten.log"),
    "product of two means": (lambda o, b: (o.mean(0) * o.pow(2).mean(0)).sum(), "aten.mul.Tensor"),
    "contrastive": (lambda o, b: F.cross_entropy(o @ o.t(), torch.arange(ROWS)), "aten.mm"),
    "quantile": (lambda o, b: o.sum(1).sort().values[:4].mean(), "aten.sort"),
    "largest": (lambda o, b: o.max(), "aten.max"),
}


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("name", EXACT)
def test_what_is_linear_in_the_rows_is_exact(name: str, number: int) -> None:
    loss, needed = EXACT[name]
    step, model = captured(loss)
    assert len(cut_over_time(step, number).ahead) == needed
    assert error_of(step, model, number) < 1e-13


def test_pairs_of_neighbouring_rows() -> None:
    step, model = captured(lambda o, b: F.logsigmoid((o[::2] - o[1::2]).sum(1)).mean())
    assert error_of(step, model, 3) < 1e-13
    assert cut_over_time(step, 4).couplings  # 3 rows are no pairs


@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_rows_is_named(name: str) -> None:
    loss, op = COUPLED[name]
    step, _ = captured(loss)
    first = cut_over_time(step, 2).couplings[0]
    assert op_name(first.node.target) == op
    with pytest.raises(NoCutError, match="rows of all microbatches"):
        microbatches_of(step, cut_over_time(step, 2))


def attends(out: Tensor, batch: Batch) -> Tensor:
    """Causal attention whose queries are rows, along a dim that is not the first."""
    queries, keys = out.view(1, 1, ROWS, CLASSES), batch["prototypes"].view(1, 1, ROWS, CLASSES)
    return F.scaled_dot_product_attention(queries, keys, keys, is_causal=True).sum()


BY_NUMBER: dict[str, Loss] = {
    "index": lambda o, b: o[FAR].mean(),
    "index_select": lambda o, b: o.index_select(0, FAR).mean(),
    "gather": lambda o, b: o.gather(0, FAR[:, None].expand(ROWS, CLASSES)).mean(),
    "embedding": lambda o, b: F.embedding(FAR, o).sum(),
    "causal attention": attends,
}


@pytest.mark.parametrize("name", BY_NUMBER)
def test_rows_by_number_are_no_cut(name: str) -> None:
    step, _ = captured(BY_NUMBER[name])
    with pytest.raises(NoCutError, match="which rows of the batch"):
        microbatches_of(step, cut_over_time(step, 2))


def test_batch_norm_is_named() -> None:
    step, _ = captured(lambda o, b: o.mean(), norm=True)
    assert cut_over_time(step, 2).couplings


def test_a_penalty_counts_once() -> None:
    model = Small()
    source = StepSource(model, lambda o, b: o.mean() + model.last.weight.pow(2).sum(), lambda m, b: m(b["x"]))
    step, _ = capture_source(source, example(), None, CaptureOptions())
    assert error_of(step, model, 4) < 1e-13


def test_a_metric_that_couples_rows_does_not_spoil_the_loss() -> None:
    step, model = captured(lambda o, b: (o.mean(), {"largest": o.max(), "rms": o.pow(2).mean().sqrt()}))
    cut, whole, summed = cut_over_time(step, 2), results(step, model, example()), in_microbatches(step, model, 2)
    assert not cut.couplings
    assert [op_name(node.target) for node in cut.averaged] == ["aten.max", "aten.sqrt"]
    assert summed["loss", ""] == pytest.approx(whole["loss", ""].item(), abs=1e-13)
    halves = [model(x) for x in example()["x"].chunk(2)]
    assert summed["metric", "largest"].item() == pytest.approx(sum(x.max().item() for x in halves) / 2)
    assert summed["metric", "rms"].item() == pytest.approx(sum(x.pow(2).mean().sqrt().item() for x in halves) / 2)


def test_a_metric_of_rows_and_whole_values() -> None:
    """Each microbatch takes its rows, what is whole, and of sums its own times their number."""

    def metrics(out: Tensor, batch: Batch) -> dict[str, Tensor]:
        labels, zeros = batch["y"].clamp(min=0), torch.zeros(CLASSES, dtype=F64)
        return {
            "of classes": zeros.scatter_reduce(0, labels, out.sum(1), "amax", include_self=False).sum(),
            "of means": torch.maximum(out.mean(), batch["w"].mean() - 0.4),
        }

    step, model = captured(lambda o, b: (F.cross_entropy(o, b["y"]), metrics(o, b)))
    whole, summed = results(step, model, example()), in_microbatches(step, model, 2)
    assert summed["loss", ""] == pytest.approx(whole["loss", ""].item(), abs=1e-13)
    halves = [
        {"y": y, "w": example()["w"], "x": x} for x, y in zip(*(example()[n].chunk(2) for n in "xy"), strict=True)
    ]
    each = [metrics(model(half["x"]), half) for half in halves]
    for name in each[0]:
        assert summed["metric", name].item() == pytest.approx(sum(values[name].item() for values in each) / 2), name


def test_the_largest_is_no_sum() -> None:
    """That of a value of the parameters is a mean over microbatches, and named; that of the batch is known ahead."""
    step, model = captured(lambda o, b: (o.mean(), {"of rows": o.amax(), "of batch": b["w"].amax()}))
    cut, summed = cut_over_time(step, 2), in_microbatches(step, model, 2)
    assert [op_name(node.target) for node in cut.averaged] == ["aten.amax"]
    halves = [model(x).max().item() for x in example()["x"].chunk(2)]
    assert summed["metric", "of rows"].item() == pytest.approx(sum(halves) / 2)
    assert summed["metric", "of batch"].item() == pytest.approx(example()["w"].max().item())


def test_entries_are_cut_by_their_use() -> None:
    step, _ = captured(EXACT["an entry that is no rows"][0])
    assert cut_over_time(step, 2).rows == {"x", "y"}


def test_entries_may_come_in_any_order() -> None:
    """The first entry is no rows, though its size is none that the number of microbatches divides."""
    source = StepSource(Small(), lambda o, b: (o * b["scale"][:CLASSES]).mean(), lambda m, b: m(b["x"]))
    step, _ = capture_source(source, {"scale": torch.ones(5, dtype=F64), **example()}, None, CaptureOptions())
    assert cut_over_time(step, 2).rows == {"x"}


def test_microbatches_of_different_sizes_are_no_cut() -> None:
    step, _ = captured(EXACT["mean"][0])
    with pytest.raises(NoCutError, match="different sizes"):
        microbatches_of(step, cut_over_time(step, 5))


class Trees:
    """Random losses: trees of masked sums, ratios and weights over several heads; some couple rows."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.is_coupled = False
        self.made = self.total(3)

    def rows(self) -> Loss:
        scale = self.random.uniform(0.5, 2.0)
        of_rows: list[Loss] = [
            lambda o, b: o.logsumexp(1),
            lambda o, b: o.pow(2).mean(1) * scale,
            per_row,
            lambda o, b: o[:, 1].tanh(),
            lambda o, b: F.relu(o - b["w"][:, None]).sum(1),
            lambda o, b: (o.softmax(1) * b["x"][:, :CLASSES]).sum(1),
        ]
        return self.random.choice(of_rows)

    def weights(self) -> Loss:
        of_batch: list[Loss] = [
            lambda o, b: tokens(b).to(F64),
            lambda o, b: b["w"],
            lambda o, b: b["w"] * tokens(b),
            lambda o, b: (b["y"] == 2).to(F64) + 0.5,
        ]
        return self.random.choice(of_batch)

    def total(self, depth: int) -> Loss:
        rows, weights, others = self.rows(), self.weights(), self.weights()
        kinds: list[Loss] = [
            lambda o, b: rows(o, b).mean(),
            lambda o, b: rows(o, b).sum() / ROWS,
            lambda o, b: (rows(o, b) * weights(o, b)).sum() / weights(o, b).sum(),
            lambda o, b: (rows(o, b) * weights(o, b)).sum() / (others(o, b).sum() * b["count"]).sqrt(),
            lambda o, b: (rows(o, b) * weights(o, b) / others(o, b).max()).mean(),
        ]
        if depth == 0:
            return self.random.choice(kinds)
        first, second, share = self.total(depth - 1), self.total(0), self.random.uniform(-1, 1)
        if self.random.random() < 0.12:
            self.is_coupled = True
            return self.random.choice(
                [lambda o, b: first(o, b) * second(o, b), lambda o, b: (first(o, b).pow(2) + 1).log()]
            )
        return lambda o, b: first(o, b) + share * second(o, b)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[] if s < 40 else pytest.mark.slow) for s in range(300)])
def test_random_losses(seed: int) -> None:
    """Equal or named, and named only what does differ."""
    tree = Trees(seed)
    step, model = captured(tree.made)
    number = (2, 3, 4)[seed % 3]
    assert bool(cut_over_time(step, number).couplings) == tree.is_coupled
    if not tree.is_coupled:
        assert error_of(step, model, number) < 1e-12
