"""Batches of any shape, modes, microbatches and evaluation: one state, as a training loop in eager PyTorch has it."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.effort import calls_of
from tests.models import hugging_face
from tests.training import assert_tensors, assert_trained_alike, train, train_eagerly
from torch import Tensor, nn

import meshweave as mw
from meshweave.capture.contract import Contract
from meshweave.errors import LayoutError, StepError


class Net(nn.Module):
    """Tokens of any length, statistics in buffers, dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(11, 8), nn.Linear(8, 12)
        self.norm, self.drop, self.down = nn.BatchNorm1d(12), nn.Dropout(dropout), nn.Linear(12, 11)

    def forward(self, ids: Tensor) -> dict[str, Any]:
        x = self.drop(torch.relu(self.up(self.embed(ids))))
        x = self.norm(x.flatten(0, 1)).view(x.shape)
        return {"logits": self.down(x), "kind": "net"}


def loss_of(out: dict[str, Any], batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(out["logits"].flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def tokens(rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {key: torch.randint(0, 11, (rows, length), generator=random) for key in ("ids", "labels")}


@dataclass
class Eager:
    """What a step does, in eager PyTorch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __call__(self, batch: dict[str, Tensor], *, accumulate: int = 1) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for ids, labels in zip(batch["ids"].chunk(accumulate), batch["labels"].chunk(accumulate), strict=True):
            value = loss_of(self.model(ids), {"labels": labels}) / accumulate
            value.backward()
            total += value.item()
        self.optimizer.step()
        return total

    @torch.no_grad()
    def evaluate(self, batch: dict[str, Tensor]) -> float:
        self.model.eval()
        value = loss_of(self.model(batch["ids"]), batch)
        self.model.train()
        return value.item()

    @torch.no_grad()
    def forward_only(self, batch: dict[str, Tensor]) -> Any:
        self.model.eval()
        out = self.model(batch["ids"])
        self.model.train()
        return out


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # eps hides the steps that AdamW makes of rounding in gradients that should be 0
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1, eps=1e-4)


def pair(mesh: str, example: Any = None, **options: Any) -> tuple[mw.TrainStep, Eager]:
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    example = tokens(4, 6) if example is None else example
    step = mw.compile(model, loss=loss_of, example=example, optimizer=adamw(model), mesh=mesh, **options)
    return step, Eager(twin, adamw(twin))


def assert_alike(step: mw.TrainStep, eager: Eager) -> None:
    assert_tensors(dict(step.model.state_dict()), dict(eager.model.state_dict()), 1e-4)


MESHES = ["", "fsdp=2,tp=2"]


@pytest.mark.slow_rows("")
@pytest.mark.parametrize("mesh", MESHES)
def test_a_loop_with_a_short_last_batch_and_evaluation_is_eager_pytorchs(mesh: str) -> None:
    step, eager = pair(mesh)
    for epoch in range(2):
        for i, rows in enumerate((4, 4, 3)):
            batch = tokens(rows, 6, seed=3 * epoch + i)
            assert step(batch) == pytest.approx(eager(batch), rel=1e-5)
        assert step.evaluate(tokens(5, 4)) == pytest.approx(eager.evaluate(tokens(5, 4)), rel=1e-5)
        found, expected = step.forward_only({"ids": tokens(2, 6)["ids"]}), eager.forward_only(tokens(2, 6))
        assert (list(found), found["kind"]) == (["logits", "kind"], "net")
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-3, atol=1e-4)
    assert step.num_steps == 6
    assert len(step._compiled.variants.all) == 4  # two shapes to train on, evaluation, outputs
    assert_alike(step, eager)


@pytest.mark.slow_rows("")
@pytest.mark.parametrize("mesh", MESHES)
def test_buckets_of_lengths_share_one_state(mesh: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="meshweave"):
        step, eager = pair(mesh, shapes=[tokens(4, 8)])
        assert len(step._compiled.variants.all) == 2
        assert "ids [4, 8]" in caplog.text
        caplog.clear()
        for i, length in enumerate((6, 8, 8, 6)):
            batch = tokens(4, length, seed=i)
            assert step(batch) == pytest.approx(eager(batch), rel=1e-5)
    assert not caplog.text
    assert all(v.session.state is step.session.state for v in step._compiled.variants.all)
    assert_alike(step, eager)


@pytest.mark.slow_rows("")
@pytest.mark.parametrize("mesh", MESHES)
def test_microbatches_are_an_argument_of_a_call(mesh: str) -> None:
    step, eager = pair(mesh)
    for i, count in enumerate((1, 2, 1)):
        batch = tokens(4, 6, seed=i)
        assert step(batch, accumulate=count) == pytest.approx(eager(batch, accumulate=count), rel=1e-5)
    assert_alike(step, eager)
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(mw.PlanError, match="invalid number of microbatches"):
            step(tokens(4, 6, seed=0), accumulate=wrong)


def eval_mode(model: nn.Module, i: int) -> None:
    model.train(i % 2 == 0)


def norm_in_eval(model: nn.Module, i: int) -> None:
    model.norm.train(i != 1)


@pytest.mark.slow_rows("eval_mode-", "norm_in_eval-")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("change", [eval_mode, norm_in_eval], ids=lambda f: f.__name__)
def test_modes_of_modules_are_as_they_are_at_the_call(change: Callable[..., None], mesh: str) -> None:
    step, eager = pair(mesh)
    for i in range(4):
        for model in (step.model, eager.model):
            change(model, i)
        assert step(tokens(4, 6, seed=i)) == pytest.approx(eager(tokens(4, 6, seed=i)), rel=1e-5)
    assert_alike(step, eager)


def test_evaluation_is_without_dropout_and_changes_nothing() -> None:
    model = Net(dropout=0.5)
    step = mw.compile(model, loss=loss_of, example=tokens(4, 6), optimizer=adamw(model), mesh="dp=2")
    eager, before = Eager(model, step.optimizer), copy.deepcopy(model.state_dict())
    loss = step.evaluate(tokens(4, 6))
    assert loss == pytest.approx(eager.evaluate(tokens(4, 6)), rel=1e-5)
    assert loss == step.evaluate(tokens(4, 6)) != step.evaluate(tokens(4, 6), training=True)
    assert model.training
    assert model.drop.training
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    assert step.num_steps == 0
    step(tokens(4, 6))
    assert step.evaluate(tokens(4, 6)) != loss


def test_what_a_hugging_face_model_returns_is_of_its_class() -> None:
    model, batch, loss = hugging_face("gpt2", batch=4)
    step = mw.compile(model, loss=loss, example=batch, optimizer=adamw(model), mesh="fsdp=2")
    found = step.forward_only({"input_ids": batch["input_ids"]})
    expected = model.eval()(input_ids=batch["input_ids"])
    assert type(found) is type(expected)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)


def test_the_program_used_longest_ago_makes_room(caplog: pytest.LogCaptureFixture) -> None:
    step, eager = pair("fsdp=2", run=mw.RunOptions(max_programs=3))
    for length in (6, 3, 5, 3, 7):  # the fourth length, when three have programs
        assert step(tokens(4, length)) == pytest.approx(eager(tokens(4, length)), rel=1e-5)
    assert sorted(v.batch[0].spec.shape[1] for v in step._compiled.variants.all) == [
        3,
        6,
        7,
    ]  # not the first, which has the state
    assert "the least recently used, for ids [4, 5], labels [4, 5], is dropped" in caplog.text
    assert "ids dim 1: 4, 8" in caplog.text
    gone = [weakref.ref(v.session) for v in step._compiled.variants.all[1:]]
    for length in (5, 9, 6):
        assert step(tokens(4, length)) == pytest.approx(eager(tokens(4, length)), rel=1e-5)
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert_alike(step, eager)


def test_one_program_alone_takes_one_shape() -> None:
    step, _ = pair("", run=mw.RunOptions(max_programs=1))
    with pytest.raises(LayoutError, match="may have no other") as error:
        step(tokens(2, 6))
    assert "ids [2, 6]" in str(error.value)
    assert step.num_steps == 0
    step(tokens(4, 6))


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        (lambda b: {**b, "ids": b["ids"].int()}, "int32[4, 6]"),
        (lambda b: {**b, "labels": b["labels"].flatten()}, "int64[24]"),
        (lambda b: {"ids": b["ids"]}, "lacks entries of the example"),
    ],
)
def test_a_batch_that_is_not_like_the_example_is_an_error(change: Callable[[Any], Any], detail: str) -> None:
    step, _ = pair("")
    with pytest.raises(LayoutError) as error:
        step(change(tokens(4, 6)))
    assert detail in str(error.value)
    assert len(step._compiled.variants.all) == 1


class Scaled(nn.Module):
    """Buffers that eval() reads otherwise than train(), two of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("shift", torch.zeros(3))
        self.register_buffer("again", self.shift)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x) * self.scale + self.shift + self.again
        return out if self.training else 2 * out


def scaled_step(mesh: str) -> tuple[Scaled, mw.TrainStep, Callable[[int], dict[str, Tensor]]]:
    torch.manual_seed(0)
    model, rows = Scaled(), {"x": torch.randn(4, 4), "y": torch.randn(4, 3)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mw.compile(
        model, loss=squares, example=rows, optimizer=optimizer, mesh=mesh, run=mw.RunOptions(backend="eager")
    )
    return model, step, lambda count: {key: value[:count] for key, value in rows.items()}


def squares(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (out - batch["y"]).square().mean()


REPLACED: dict[str, tuple[Callable[[Scaled], None], str]] = {
    "parameter": (
        lambda m: setattr(m.inner, "bias", nn.Parameter(torch.ones(3))),
        "'inner.bias' of the model was repl",
    ),
    "module": (lambda m: setattr(m, "inner", nn.Linear(4, 3)), "where: model.inner"),
    "buffer": (lambda m: setattr(m, "scale", torch.ones(3)), "'scale' of the model was replaced"),
    "untied": (lambda m: setattr(m, "again", torch.ones(3)), "'again' of the model was replaced"),
}


@pytest.mark.parametrize("row", REPLACED)
def test_what_a_program_compiled_later_cannot_share_is_an_error(row: str) -> None:
    change, detail = REPLACED[row]
    model, step, rows = scaled_step("")
    change(model)
    with pytest.raises(StepError) as error:
        step.evaluate(rows(4))
    assert detail in str(error.value)
    with pytest.raises(StepError):
        step(rows(4))


class Masked(nn.Module):
    """Its mask may be missing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = self.inner(x)
        return out.tanh() if mask is None else out * mask[:, None]


@pytest.mark.parametrize("missing", [{}, {"mask": None}])
def test_an_entry_that_is_not_always_there_has_a_program(missing: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = {"x": torch.randn(4, 4), "y": torch.randn(4, 3)}
    whole, part = {**plain, "mask": torch.tensor([1.0, 0.0, 1.0, 1.0])}, {**plain, **missing}
    model = Masked()
    eager, expected = train_eagerly(model, [whole, part, whole, part])
    step, losses = train(model, [whole, part, whole, part], "dp=2")
    assert_trained_alike(step, losses, eager, expected)
    assert len(step._compiled.variants.all) == 2


class Messages(nn.Module):
    """Messages along edges [e, 2] between nodes x [n, 4]; nodes of large graphs are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.first(x)
        sent = torch.zeros_like(h).index_add(0, edges[:, 1], h.index_select(0, edges[:, 0]).tanh())
        return self.last((h + sent).relu_() * (0.5 if len(x) > 20 else 1)) / len(x) ** 0.5


def graph(n: int, e: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(97 * n + e)
    edges = torch.randint(0, n, (e, 2), generator=made)
    return {"x": torch.randn(n, 4, generator=made), "edges": edges, "y": torch.randint(0, 3, (n,), generator=made)}


def graph_loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(out, batch["y"])


def messages(mesh: str) -> tuple[mw.TrainStep, nn.Module, Callable[[dict[str, Tensor]], float]]:
    """A step on graphs, the model of its eager twin, and that twin."""
    torch.manual_seed(0)
    model = Messages()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.01)

    def eager(batch: dict[str, Tensor]) -> float:
        optimizer.zero_grad()
        value = graph_loss(twin(batch["x"], batch["edges"]), batch)
        value.backward()
        optimizer.step()
        return value.item()

    own = torch.optim.AdamW(model.parameters(), lr=0.01)
    return mw.compile(model, loss=graph_loss, example=graph(9, 15), optimizer=own, mesh=mesh), twin, eager


@pytest.mark.slow_rows("dp=2", "dp=4")
@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2", "dp=4"])
def test_sizes_of_every_batch_are_eager_pytorchs(mesh: str) -> None:
    """Uneven sizes, fewer than devices, a single node, no edge, known sizes, and a size for which another op runs."""
    step, twin, eager = messages(mesh)
    for n, e in ((9, 15), (7, 20), (1, 3), (8, 1), (3, 0), (7, 20), (25, 31), (12, 12)):
        assert step(graph(n, e)) == pytest.approx(eager(graph(n, e)), rel=1e-4)
    assert_tensors(step.parameters(), {name: p.detach() for name, p in twin.named_parameters()})


def test_a_new_size_of_a_known_step_is_traced_once_and_costs_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    step, _, _ = messages("fsdp=2")
    repeated, repeat = list[int](), Contract._repeat
    monkeypatch.setattr(Contract, "_repeat", lambda *known: (repeated.append(1), repeat(*known)))
    step(graph(8, 21))
    calls = calls_of(lambda: step(graph(7, 20)))
    assert not repeated
    assert (
        calls / len(step._compiled.variants.all[-1].program.rank.graph.nodes) < 1700
    )  # 1,300 if their moves are known
    step(graph(25, 30))
    assert len(repeated) == 1  # its ops are others
    for place, variant in enumerate(step._compiled.variants.all):
        assert variant.program.contract.like is None, place  # a chain of all sizes would stay alive
