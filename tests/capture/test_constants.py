"""Masks and positions that forward makes of numbers: what is looked up by them has a fixed shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.training import assert_equals_eager, batches, mse
from torch import Tensor, nn

import meshweave as mw
from meshweave.capture.constants import is_large
from meshweave.errors import CaptureError, StepError

WIDTH = 6


def products(h: Tensor) -> Tensor:
    return h[:, :, None] * h[:, None]


def no_diagonal(size: int) -> Tensor:
    mask = torch.ones(size, size, dtype=torch.bool)
    mask.fill_diagonal_(False)
    return mask


def written(h: Tensor) -> Tensor:
    out = h.clone()
    out[:, torch.arange(WIDTH) % 2 == 0] = h[:, :3].tanh()
    return out


def widened(positions: Tensor) -> Tensor:
    """Positions that forward changes in place after it has got them."""
    positions += 1
    return positions % WIDTH


# Name -> what forward makes of h, [batch, WIDTH].
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "triu_indices": lambda h: products(h)[(slice(None), *torch.triu_indices(WIDTH, WIDTH, 1))],
    "tril_indices": lambda h: products(h)[(slice(None), *torch.tril_indices(WIDTH, WIDTH, -1, device=h.device))],
    "combinations": lambda h: h[:, torch.combinations(torch.arange(WIDTH), 2)].prod(-1),
    "nonzero": lambda h: h[:, torch.ones(WIDTH, WIDTH).triu(1).nonzero()[:, 1]],
    "nonzero as a tuple": lambda h: products(h)[(slice(None), *no_diagonal(WIDTH).nonzero(as_tuple=True))],
    "where": lambda h: h[:, torch.where(torch.arange(WIDTH) > 2)[0]],
    "a mask": lambda h: h[:, torch.arange(WIDTH) > 2],
    "a mask of two dims": lambda h: products(h)[:, no_diagonal(WIDTH)],
    "a mask of pairs in the batch": lambda h: (h @ h.mT)[no_diagonal(len(h))].tanh().mean() * h,
    "a mask of one element": lambda h: h * h[:, torch.arange(WIDTH) == 2],
    "a mask that is written under": written,
    "a number under a mask": lambda h: torch.where(torch.arange(WIDTH) > 2, h, h.detach() * 0),
    "a dim of no size": lambda h: h * h[torch.tensor(True)].sum(0),
    "repeats": lambda h: h.repeat_interleave(torch.tensor([1, 2, 0, 3, 1, 1]), dim=1),
    "unique": lambda h: h[:, torch.unique(torch.arange(WIDTH) // 2)],
    "counts": lambda h: h / torch.bincount(torch.arange(WIDTH) // 2, minlength=WIDTH).clamp(min=1),
    "positions that are changed": lambda h: h[:, widened((torch.arange(WIDTH) > 2).nonzero()[:, 0])],
    "logspace": lambda h: h * torch.logspace(0.0, 1.0, WIDTH, dtype=h.dtype),
}


class Looks(nn.Module):
    def __init__(self, form: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.form = nn.Linear(4, WIDTH), form
        self.down = nn.Linear(form(torch.randn(4, WIDTH)).shape[1], 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.form(self.up(x)))


@pytest.mark.parametrize("mesh", ["", "dp=2,tp=2"])
@pytest.mark.parametrize("form", FORMS)
def test_constants_decide_shapes(form: str, mesh: str) -> None:
    torch.manual_seed(0)
    assert_equals_eager(Looks(FORMS[form]), batches(2, (4, 4), (4, 4)), mesh)


def test_a_mask_goes_by_the_size_of_the_batch() -> None:
    """The loss of SimCLR: similarities of all pairs but those of a row with itself."""

    def loss(out: Tensor, batch: Any) -> Tensor:
        rows = F.normalize(torch.cat([out, batch["y"]]), dim=1)
        others = (rows @ rows.mT)[~torch.eye(len(rows), dtype=torch.bool)].view(len(rows), -1)
        return others.logsumexp(1).mean()

    torch.manual_seed(0)
    data = [*batches(2, (4, 4), (4, 4)), *batches(1, (3, 4), (3, 4)), *batches(1, (4, 4), (4, 4))]
    assert_equals_eager(nn.Sequential(nn.Linear(4, 4)), [b | {"input": b.pop("x")} for b in data], "dp=2", loss=loss)


class Masks(nn.Module):
    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        mask = torch.tensor([True, False, True, False])
        self.register_buffer("mask", mask) if is_buffer else setattr(self, "mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, self.mask].sum(1, keepdim=True).expand(-1, 4)


def compiled(model: nn.Module, batch: Any) -> mw.TrainStep:
    return mw.compile(model, loss=mse, example=batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), mesh="")


def test_large_masks_are_not_computed_at_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that is repeated for every sequence is described while captured, and computed on the devices."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            length = x.shape[1]
            causal = torch.ones(length, length, dtype=torch.bool).tril()
            bias = torch.where(causal.expand(len(x), length, length), 0.0, -1e9)
            return (self.proj(x) @ x.mT + bias).softmax(-1) @ x

    monkeypatch.setattr("meshweave.capture.constants._MOST_COMPUTED", 64)
    assert_equals_eager(Masked(), batches(2, (4, 5, WIDTH), (4, 5, WIDTH)), "dp=2")


def test_large_ranges_are_not_computed_at_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of all rows of a batch, as experts of transformers make them to sort rows back, may be many GB."""

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            order = x.detach().sum(-1).argsort()
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order), device=x.device)
            return self.proj(x[order])[back]

    assert not is_large(torch.ops.aten.arange.start_step, (0, 64, 1), {})
    monkeypatch.setattr("meshweave.capture.constants._MOST_COMPUTED", 3)
    assert is_large(torch.ops.aten.arange.start_step, (0, 8, 2), {"dtype": torch.int64})
    assert_equals_eager(Sorted(), batches(2, (8, WIDTH), (8, WIDTH)), "")


def test_gradients_of_large_slices_need_no_memory_at_capture() -> None:
    """The zeros around the gradient of every second column are described only, though they are made of sizes alone."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.proj(x)
            return h[..., ::2] * h[..., 1::2]

    with torch.device("meta"):
        model, rows = Gated(), torch.empty(1 << 22, 1 << 10, 4)  # 128 GiB of results
    study = mw.Study(model, loss=mse, optimizer=torch.optim.SGD(model.parameters()))
    assert study.simulate({"x": rows, "y": rows}, mesh="dp=64", profile="h100").seconds > 0


def test_a_mask_that_changes_is_an_error() -> None:
    model, batch = Masks(is_buffer=False), batches(1, (4, 4), (4, 4))[0]
    step = compiled(model, batch)
    step(batch)
    model.mask[0] = False
    with pytest.raises(StepError, match=r"model\.mask"):
        step(batch)


def test_a_mask_in_a_buffer_is_data() -> None:
    with pytest.raises(CaptureError, match="no buffer"):
        compiled(Masks(is_buffer=True), batches(1, (4, 4), (4, 4))[0])


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])[0]


def test_packed_sequences_say_what_to_write() -> None:
    batch = {**batches(1, (3, 5, 4), (3, 5, 4))[0], "lengths": torch.tensor([5, 2, 3])}
    with pytest.raises(CaptureError, match="without pack_padded_sequence"):
        compiled(Packs(), batch)


class Adaptive(nn.Module):
    """The adaptive softmax, called as it is or, with `of_all`, as the error says."""

    def __init__(self, of_all: bool) -> None:
        super().__init__()
        self.softmax, self.of_all = nn.AdaptiveLogSoftmaxWithLoss(4, 9, [2, 5], div_value=2.0), of_all

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if self.of_all:
            return -self.softmax.log_prob(x).gather(1, labels[:, None]).mean()
        return self.softmax(x, labels).loss


def test_the_adaptive_softmax_says_what_to_write() -> None:
    torch.manual_seed(0)
    model = Adaptive(of_all=False)
    data = [{"x": torch.randn(6, 4), "labels": torch.randint(0, 9, (6,))} for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError, match="of all classes, which is the same"):
        mw.compile(model, loss=lambda o, b: o, example=data[0], optimizer=optimizer, mesh="")
    other = Adaptive(of_all=True)
    other.load_state_dict(model.state_dict())
    assert other(**data[0]).item() == pytest.approx(model(**data[0]).item())
    assert_equals_eager(other, data, "dp=2", loss=lambda o, b: o)
