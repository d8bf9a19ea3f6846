"""Values that are seen through a second tensor, or changed past autograd: equal to eager, or a clear error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training import assert_equals_eager, batches
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshweave as mw
from meshweave.errors import CaptureError


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class ReadsAnAttribute(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.other = self.a.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.other


class SharesABuffer(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("other", self.a.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.other


class SharesAStorage(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight = nn.Parameter(self.a.weight.data)


class ViewsABuffer(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(4))
        self.register_buffer("first", self.count[:2])

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return super().forward(x) * self.first.sum()


class AssignsData(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data = 0.9 * self.mean + x.detach().mean(0)
        return super().forward(x) + self.mean


class Reentrant(Pair):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(checkpoint(self.a, x.requires_grad_(), use_reentrant=True))


def compiled(model: nn.Module, loss: Callable[..., Any] | None = None) -> mw.TrainStep:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    square = loss or (lambda out, batch: ((out - batch["y"]) ** 2).mean())
    return mw.compile(model, loss=square, example=batches(1, (4, 4), (4, 4))[0], optimizer=optimizer, mesh="dp=2")


def test_parameters_beside_each_other_in_one_tensor_are_separate() -> None:
    """As torch.nn.utils.vector_to_parameters leaves them."""
    model = Pair()
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == 1
    twin = copy.deepcopy(model)
    step, batch = compiled(model), batches(1, (4, 4), (4, 4))[0]
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = ((twin(batch["x"]) - batch["y"]) ** 2).mean()
        loss.backward()
        optimizer.step()
        assert float(step(batch)) == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (ReadsAnAttribute, "shares memory with the parameter 'a.weight'"),
        (SharesABuffer, "shares memory with the parameter 'a.weight'"),
        (SharesAStorage, "the param 'b.weight' shares memory"),
        (ViewsABuffer, "the buffer 'first' shares memory with the buffer 'count'"),
        (AssignsData, "replaces its buffer 'mean'"),
        (Reentrant, "checkpoint of the reentrant kind"),
    ],
)
def test_what_a_step_would_lose_is_an_error(make: Callable[[], nn.Module], what: str) -> None:
    with pytest.raises(CaptureError, match=what):
        compiled(make())


def test_what_no_step_changes_may_be_shared() -> None:
    """A frozen layer and a buffer that views it."""
    model = SharesABuffer()
    model.a.requires_grad_(False)
    compiled(model)(batches(1, (4, 4), (4, 4))[0])


def test_an_optimizer_that_has_stepped_some_parameters_goes_on_from_there() -> None:
    """Each parameter has the number of steps that it has taken, in its bias correction too."""
    model = Pair()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.a(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    eager = copy.deepcopy(model)
    expected = torch.optim.AdamW(eager.parameters(), lr=0.1)
    expected.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    data = batches(3, (4, 4), (4, 4))
    loss = lambda out, batch: (out - batch["y"]).square().mean()  # noqa: E731
    step = mw.compile(model, loss=loss, example=data[0], optimizer=optimizer, mesh="dp=2")
    for batch in data:
        step(batch)
        loss(eager(batch["x"]), batch).backward()
        expected.step()
        expected.zero_grad()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


class Masked(Pair):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y[y > 0.2] = 0.0
        y[:, 1].zero_()
        y[torch.eye(4).bool()[: y.shape[0]]] = 1.5
        return y


@pytest.mark.parametrize("mesh", ["", "dp=2", "fsdp=2,tp=2"])
def test_numbers_where_a_mask_is_true(mesh: str) -> None:
    assert_equals_eager(Masked(), batches(3, (4, 4), (4, 4)), mesh)
