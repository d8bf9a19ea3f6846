"""Losses that capture spells in its own way: the values and gradients of PyTorch's, on every mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training import batches
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

import meshweave as mw
from meshweave.errors import CaptureError, PlanError

T, N, C, S = 8, 4, 5, 3
Batch = dict[str, Tensor]


def example() -> Batch:
    made = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(N, T, 6, generator=made),
        "labels": torch.randint(1, C, (N, S), generator=made),
        "frames": torch.tensor([8, 7, 8, 5]),
        "lengths": torch.tensor([3, 0, 2, 1]),
    }


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(6, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def log_probs(out: Tensor) -> Tensor:
    return out.log_softmax(-1).transpose(0, 1)


def weighed(loss: Tensor) -> Tensor:
    return (loss * torch.arange(1.0, loss.numel() + 1).view(loss.shape) / loss.numel()).mean()


LOSSES: dict[str, Callable[[Tensor, Batch], Tensor]] = {
    "ctc": lambda out, b: F.ctc_loss(log_probs(out), b["labels"], b["frames"], b["lengths"]),
    "ctc, a module": lambda out, b: nn.CTCLoss(2)(log_probs(out), b["labels"] * 0 + 1, b["frames"], b["lengths"]),
    "ctc, each": lambda out, b: weighed(
        F.ctc_loss(log_probs(out), b["labels"], b["frames"], b["lengths"], reduction="none")
    ),
    "ctc, lists": lambda out, b: F.ctc_loss(log_probs(out), b["labels"], (T,) * N, (2,) * N, reduction="sum"),
    "ctc, impossible": lambda out, b: F.ctc_loss(
        log_probs(out), b["labels"], b["frames"] - 4, b["lengths"], reduction="sum", zero_infinity=True
    ),
    "ctc, one after the other": lambda out, b: F.ctc_loss(
        log_probs(out), b["labels"].flatten()[:6], torch.full((N,), T), torch.tensor([3, 0, 2, 1])
    ),
    "ctc of one": lambda out, b: F.ctc_loss(
        out[0].log_softmax(-1), b["labels"][0], b["frames"][0], b["lengths"][0], reduction="none"
    ),
    "gaussian of a number": lambda out, b: nn.GaussianNLLLoss()(out, b["x"][..., :C], 0.5),
    "soft margin": lambda out, b: F.soft_margin_loss(out, b["x"][..., :C].sign()),
    "soft margin, each": lambda out, b: weighed(F.soft_margin_loss(out, b["x"][..., :C].sign(), reduction="none")),
    "multi margin": lambda out, b: F.multi_margin_loss(out[:, 0], b["labels"][:, 0]),
}


def compiled(loss: Any, mesh: str, model: nn.Module | None = None) -> mw.TrainStep:
    model = model or Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mw.compile(
        model, loss=loss, example=example(), optimizer=optimizer, mesh=mesh, run=mw.RunOptions(backend="eager")
    )


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_loss_trains_as_in_eager(name: str) -> None:
    loss = LOSSES[name]
    model, expected = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(model(example()["x"]), example())
        value.backward()
        optimizer.step()
        expected.append(value.item())
    assert len(set(expected)) == 3
    for mesh in ("", "dp=2,tp=2") if name == "ctc" else ("dp=2",):
        step = compiled(loss, mesh)
        assert [float(step(example())) for _ in range(3)] == pytest.approx(expected, rel=1e-4)


def test_ctc_is_cut_by_sequences() -> None:
    step = compiled(LOSSES["ctc"], "dp=2")
    (node,) = step.program.placed.graph.find_nodes(op="call_function", target=torch.ops.meshweave.ctc_loss.default)
    assert all("dp" in str(x.meta["layout"]) for x in node.all_input_nodes)


def test_ctc_targets_at_places_that_depend_on_data_are_refused() -> None:
    flat = lambda out, b: F.ctc_loss(log_probs(out), b["labels"].flatten()[:6], b["frames"], b["lengths"])  # noqa: E731
    with pytest.raises(CaptureError, match="are concatenated") as error:
        compiled(flat, "")
    assert "a row of targets for each sequence" in error.value.hint


REFUSED: dict[str, tuple[Callable[[Tensor, Batch], Any], str, str]] = {
    "a variance": (
        lambda out, b: F.gaussian_nll_loss(out, b["x"][..., :C], out.exp()),
        "control flow depends on data",
        "var.clamp",
    ),
    "bincount": (
        lambda out, b: (out[:, 0, 0] * torch.bincount(b["lengths"], minlength=4)).sum(),
        "the length of what torch.bincount returns depends on data",
        "index_add",
    ),
    "a distribution's arguments": (
        lambda out, b: Normal(out, 1.0).rsample().sum(),
        "control flow depends on data",
        "validate_args=False",
    ),
    "a distribution's sample": (
        lambda out, b: Categorical(torch.ones(C)).log_prob(b["labels"]).sum() * out.sum(),
        "control flow depends on data",
        "set_default_validate_args",
    ),
    "a branch": (lambda out, b: out.sum() if out.sum() > 0 else out.mean(), "control flow depends on data", "where"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_refused_says_what_to_write(name: str) -> None:
    loss, what, hint = REFUSED[name]
    with pytest.raises(CaptureError, match=what) as error:
        compiled(loss, "")
    assert hint in error.value.hint
    assert "experts" not in error.value.hint
    assert ("validate_args" in error.value.hint) == ("distribution" in name)


def test_what_is_written_in_place_of_bincount() -> None:
    def loss(out: Tensor, b: Batch) -> Tensor:
        x = b["lengths"]
        return (out[:, 0, 0] * torch.zeros(4).index_add(0, x, torch.ones(x.shape))).sum()

    out = Model()(example()["x"])
    expected = (out[:, 0, 0] * torch.bincount(example()["lengths"], minlength=4)).sum().item()
    assert float(compiled(loss, "dp=2")(example())) == pytest.approx(expected, rel=1e-5)


class Weighs(nn.Module):
    """A loss that learns how much each of its parts counts."""

    def __init__(self) -> None:
        super().__init__()
        self.logs = nn.Parameter(torch.zeros(2))

    def forward(self, out: Tensor, batch: Any) -> Tensor:
        parts = torch.stack([F.mse_loss(out, batch["y"]), F.l1_loss(out, batch["y"])])
        return (parts * torch.exp(-self.logs) + self.logs).sum()


class WithCriterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.criterion = nn.Linear(4, 4), Weighs()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # what FakeTensor asks a weight of the loss for
def test_a_loss_that_learns_lies_in_the_model() -> None:
    data, model = batches(3, (4, 4), (4, 4)), nn.Linear(4, 4)
    criterion = Weighs()
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    with pytest.raises(PlanError, match=r"self\.criterion = "):
        mw.compile(model, loss=criterion, example=data[0], optimizer=optimizer, mesh="", forward=lambda m, b: m(b["x"]))
    ours, twin = WithCriterion(), WithCriterion()
    step = mw.compile(
        ours,
        loss=ours.criterion,
        example=data[0],
        optimizer=torch.optim.SGD(ours.parameters(), lr=0.1),
        mesh="dp=2,tp=2",
    )
    eager = torch.optim.SGD(twin.parameters(), lr=0.1)
    for batch in data:
        expected = twin.criterion(twin(batch["x"]), batch)
        eager.zero_grad()
        expected.backward()
        eager.step()
        torch.testing.assert_close(step(batch), expected.detach())
    torch.testing.assert_close(step.parameters(), dict(twin.named_parameters()))
    assert ours.criterion.logs.abs().min() > 0


@pytest.mark.parametrize("loss", [F.cross_entropy, F.logsigmoid, nn.CrossEntropyLoss()])
def test_a_loss_that_takes_no_batch(loss: Any) -> None:
    data = example()
    model = nn.Sequential(nn.Flatten(), nn.Linear(T * 6, C))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError, match="this loss takes") as error:
        mw.compile(model, loss=loss, optimizer=optimizer, example=(data["x"], data["labels"][:, 0]), mesh="dp=2")
    assert error.value.got.startswith("torch.nn.")


@pytest.mark.parametrize("loss", [F.mse_loss, nn.MSELoss()])
def test_a_batch_that_is_its_own_target(loss: Any) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    model = nn.Linear(3, 3)
    expected = F.mse_loss(model(x), x).item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mw.compile(model, loss=loss, optimizer=optimizer, example=x, mesh="dp=2")
    assert step(x).item() == pytest.approx(expected)
