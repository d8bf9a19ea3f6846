"""What capture assumes of a model and a loss: what breaks it is an error that names it, and the rest goes on working.

Every model of the first table trains differently in eager PyTorch from what its first step, repeated, would do.
"""

from __future__ import annotations

import functools
import gc
import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.training import assert_equals_eager, batches, mse, sgd, train, train_eagerly
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import meshweave as mw
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, capture
from meshweave.errors import CaptureError

DATA = batches(3, (4, 4), (4, 4))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


# What breaks the contract


class CountsSteps(Base):
    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num += 1
        return super().forward(x) * self.num


class CountsForLater(CountsSteps):
    def forward(self, x: Tensor) -> Tensor:
        self.num += 1
        return Base.forward(self, x) * (2.0 if self.num > 2 else 1.0)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = CountsForLater()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class KeepsLastInput(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x if self.last is None else x + self.last)
        self.last = x
        return out


class KeepsLastOutput(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) + self.last
        self.last = out.detach()
        return out


class FreezesFirstBatch(Base):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "mean" not in self.cache:
            self.cache["mean"] = x.mean(0)
        return super().forward(x) - self.cache["mean"]


class AddsInPlace(Base):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.total[1:] += 1.0
        return super().forward(x) * self.total


class AveragesInPlace(AddsInPlace):
    def forward(self, x: Tensor) -> Tensor:
        self.total.mul_(0.5).add_(x.detach().mean(0))
        return Base.forward(self, x) * self.total


class ListOfTensors(Base):
    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.history.append(out.detach())
        return out


class DefaultArgument(Base):
    def forward(self, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
        seen.append(1)
        return super().forward(x) * len(seen)


class Iterates(Base):
    def __init__(self) -> None:
        super().__init__()
        self.counter = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * next(self.counter)


class DrawsWithPython(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if random.random() < 2 else x


class DrawsWithNumpy(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(np.random.rand())


class DrawsWithGenerator(Base):
    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.random.random() < 2 else x


class ReadsTheTime(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * time.perf_counter()


class BufferGrows(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.kept = torch.cat([self.kept, x.mean(0, keepdim=True)])
        return super().forward(x) + self.kept.mean(0)


class LateBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.mean(0) if self.mean is None else 0.5 * self.mean + 0.5 * x.mean(0)
        return super().forward(x) - self.mean


class ClampsData(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


class ReplacesParameter(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight = nn.Parameter(self.linear.weight.detach() * 0.9)
        return super().forward(x)


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class CountsInBackward(Base):
    """A hook whose factor grows with every backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out.register_hook(self.grown)
        return out

    def grown(self, gradient: Tensor) -> Tensor:
        self.num += 1
        return gradient * self.num


class KeepsLastGradient(Base):
    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out.register_hook(self.mixed)
        return out

    def mixed(self, gradient: Tensor) -> Tensor:
        last, self.last = self.last, gradient
        return gradient if last is None else gradient + 0.5 * last


class AddsGradientsInPlace(Base):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out.register_hook(lambda g: g * self.total.add_(g.abs().sum(0)))
        return out


class CentredLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self.centre.mul_(0.5).add_(out.detach().mean(0), alpha=0.5)
        return ((out - self.centre - batch["y"]) ** 2).mean()


# Model, loss -> part of the message: what is wrong, and where or which values.
BROKEN: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str, str]] = {
    "a counter": (CountsSteps, lambda: mse, "does not repeat itself", "the step has changed model.num: 0 -> 1"),
    "a counter read later": (CountsForLater, lambda: mse, "changes the Python state", "where: model.num\n"),
    "in a submodule": (
        Inner,
        lambda: mse,
        "changes the Python state",
        "where: model.inner.num\n  got: 1 after one step",
    ),
    "the last input": (KeepsLastInput, lambda: mse, "does not repeat itself", "model.last: None -> a tensor"),
    "the last output": (KeepsLastOutput, lambda: mse, "a value of the previous step", "of the previous step"),
    "the first batch": (FreezesFirstBatch, lambda: mse, "does not repeat itself", "model.cache['mean']: nothing ->"),
    "in place": (AddsInPlace, lambda: mse, "in place that is not a buffer", "float32[3]"),
    "in place, of the batch": (AveragesInPlace, lambda: mse, "in place that is not a buffer", "float32[4]"),
    "a list of tensors": (ListOfTensors, lambda: mse, "changes the Python state", "where: model.history["),
    "a default argument": (DefaultArgument, lambda: mse, "does not repeat itself", ", 2)"),
    "an iterator": (Iterates, lambda: mse, "does not repeat itself", ", 2)"),
    "random": (DrawsWithPython, lambda: mse, "random numbers outside of PyTorch", "a generator of random"),
    "numpy.random": (DrawsWithNumpy, lambda: mse, "random numbers outside of PyTorch", "a generator of numpy"),
    "a generator": (DrawsWithGenerator, lambda: mse, "random numbers outside of PyTorch", "a generator of numpy"),
    "the time": (ReadsTheTime, lambda: mse, "does not repeat itself", "test_contract.py"),
    "a buffer that grows": (BufferGrows, lambda: mse, "shape or the dtype of the buffer 'kept'", "(2, 4) after a step"),
    "a buffer from None": (LateBuffer, lambda: mse, "a value of the previous step", "model.mean: None -> a tensor"),
    "p.data": (ClampsData, lambda: mse, "replaces its parameter 'linear.weight'", "other values by .data"),
    "a new parameter": (ReplacesParameter, lambda: mse, "replaces its parameter 'linear.weight'", "another tensor"),
    "a lazy module": (Lazy, lambda: mse, "has no shape yet", "linear.weight"),
    "a counter of backward": (CountsInBackward, lambda: mse, "does not repeat itself", "model.num: 0 -> 1"),
    "the last gradient": (
        KeepsLastGradient,
        lambda: mse,
        "a value of the previous step",
        "model.last: None -> a tensor",
    ),
    "in place, of gradients": (AddsGradientsInPlace, lambda: mse, "in place that is not a buffer", "aten.add_.Tensor"),
    "a loss with a buffer": (Base, CentredLoss, "in place that is not a buffer", "float32[4]"),
}


def fakes() -> dict[int, FakeTensor]:
    """The fake tensors that there are now; other tests of this process may have left some."""
    return {id(x): x for x in gc.get_objects() if type(x) is FakeTensor}


def state_of(model: nn.Module) -> dict[str, Any]:
    """Attributes of all modules, tensors by identity and version."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return id(value), value._version
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return list(value) if isinstance(value, list) else value

    return {n: plain(vars(m)) for n, m in model.named_modules()}


@pytest.mark.parametrize("row", BROKEN)
def test_what_would_differ_from_step_to_step_is_an_error(row: str) -> None:
    make, make_loss, what, detail = BROKEN[row]
    model, loss = make(), make_loss()
    before, draws, there_before = state_of(model), random.getstate(), fakes()
    with pytest.raises(CaptureError, match=what) as error:
        mw.compile(model, loss=loss, example=DATA[0], optimizer=sgd(model.parameters()), mesh="dp=2")
    assert detail in str(error.value)
    assert state_of(model) == before
    assert random.getstate() == draws
    del error
    gc.collect()
    assert fakes().keys() <= there_before.keys()


# What keeps it


class ReassignsBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x) - self.mean


class NormalizesWeight(Base):
    """A parameter that forward changes in place, before the optimizer does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.div_(self.linear.weight.norm(dim=1, keepdim=True))
        self.linear.bias.detach().clamp_(-0.01, 0.01)
        return super().forward(x)


class LimitsRows(nn.Module):
    """An embedding whose rows are scaled in place when they are used; some are never used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((x * 2).round().long().clamp(0, 4)).sum(1)


class CastsInside(Base):
    """An autocast of the model's own, in which a parameter is used twice."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = self.linear(self.linear(x))
        return super().forward(out.float())


class ReassignsInner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ReassignsBuffer(), ReassignsBuffer()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        self.layers[0].mean = self.layers[0].mean * 0.5
        return x


class AveragesWeights(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ema", self.linear.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        self.ema = torch.lerp(self.ema, self.linear.weight.detach(), 0.25)
        return super().forward(x) + x @ self.ema


class LazyMask(Base):
    def __init__(self) -> None:
        super().__init__()
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(4, 4).tril_()
        return super().forward(x) * self.mask


class AuxiliaryLoss(Base):
    def __init__(self) -> None:
        super().__init__()
        self.balance: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.balance = (out**2).mean()
        self.shape = list(out.shape)
        return out + 0 * self.balance


class CachedTable(Base):
    @functools.cache  # noqa: B019
    def table(self, num: int) -> Tensor:
        return torch.arange(num).float().cos()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table(x.shape[-1])


class FillsConstant(Base):
    def forward(self, x: Tensor) -> Tensor:
        scale = torch.empty(4)
        scale.fill_(2.0).mul_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        out = torch.empty(4, 4)
        out.copy_(x)
        shifted = x.new_zeros(4, 4)
        shifted[:, 1:] = x[:, :-1].clone()
        return super().forward(out + shifted) * scale


SOUND: dict[str, Callable[[], nn.Module]] = {
    "a buffer reassigned": ReassignsBuffer,
    "buffers reassigned in submodules": ReassignsInner,
    "a weight normalized in place": NormalizesWeight,
    "rows of an embedding limited in place": LimitsRows,
    "an average of weights in a buffer": AveragesWeights,
    "a mask made lazily": LazyMask,
    "an attribute set anew in every step": AuxiliaryLoss,
    "functools.cache of constants": CachedTable,
    "constants filled in place": FillsConstant,
    "batch norm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
}


class Named(nn.Module):
    """A model that calls its input x, as the batches do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("mesh", ["", "dp=2"])
@pytest.mark.parametrize("row", SOUND)
def test_state_that_lasts_in_buffers_and_caches_of_constants_equal_eager(row: str, mesh: str) -> None:
    torch.manual_seed(0)
    model = Named(SOUND[row]())
    before, there_before = state_of(model), fakes()
    assert_equals_eager(model, DATA, mesh)
    assert state_of(model) == before
    gc.collect()
    assert fakes().keys() <= there_before.keys()


def test_an_autocast_inside_the_model_casts_a_parameter_at_each_use() -> None:
    torch.manual_seed(0)
    eager, expected = train_eagerly(CastsInside(), DATA)
    torch.manual_seed(0)
    step, losses = train(CastsInside(), DATA, "dp=2")
    assert losses == pytest.approx(expected, rel=2e-2)
    torch.testing.assert_close(
        step.parameters(), {n: p.detach() for n, p in eager.named_parameters()}, rtol=0, atol=2e-2
    )


@pytest.mark.parametrize("of_optimizer", ["linear.weight", "linear.bias", ""])
def test_a_parameter_that_no_optimizer_updates_may_not_change_in_place(of_optimizer: str) -> None:
    model = NormalizesWeight()
    optimizer = sgd([model.get_parameter(of_optimizer)]) if of_optimizer else None
    with pytest.raises(CaptureError, match="in place that is not a buffer"):
        mw.compile(model, loss=mse, example=DATA[0], optimizer=optimizer, mesh="")


def swish(x):  # type: ignore[no-untyped-def]
    return x * torch.sigmoid(x)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = torch.jit.script(swish)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


@pytest.mark.parametrize("make", [lambda: torch.jit.script(nn.Linear(4, 4)), Scripted], ids=["module", "function"])
def test_what_is_scripted_is_an_error_with_what_to_write(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), make())
    with pytest.raises(CaptureError, match=r"compiled by torch\.jit\.script"):
        mw.compile(Named(model), loss=mse, example=DATA[0], mesh="")


def test_a_sparse_gradient_is_an_error_with_what_to_write() -> None:
    model = LimitsRows()
    model.table = nn.Embedding(7, 4, sparse=True)
    with pytest.raises(CaptureError, match="the gradient of an embedding is sparse"):
        mw.compile(model, loss=mse, example=DATA[0], optimizer=sgd(model.parameters()), mesh="")


def test_a_second_capture_gives_the_same_graph() -> None:
    model = Named(LazyMask())
    spec = read_optimizer(sgd(model.parameters()), model)
    first, second = (capture(model, mse, DATA[0], spec, CaptureOptions()).text() for _ in range(2))
    assert first == second
