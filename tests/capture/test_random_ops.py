"""Random ops of PyTorch: the right distribution, the same on every mesh, other numbers in each call."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Beta, Categorical, Normal
from torch.nn import functional as F

import meshweave as mw
from meshweave.capture.trace import GlobalRandom
from meshweave.errors import CaptureError

N = 20_000
# What is drawn for ones of N x 2, and the mean and standard deviation that it has.
CASES: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "randint": (lambda x: torch.randint(3, 8, x.shape), 5.0, 2**0.5),
    "randint to": (lambda x: torch.randint(5, x.shape), 2.0, 2**0.5),
    "randint_like": (lambda x: torch.randint_like(x, 5), 2.0, 2**0.5),
    "randint_like from": (lambda x: torch.randint_like(x, 3, 8), 5.0, 2**0.5),
    "normal": (lambda x: torch.normal(2.0, 3.0, x.shape), 2.0, 3.0),
    "normal of means": (lambda x: torch.normal(2 * x, 3.0), 2.0, 3.0),
    "normal of deviations": (lambda x: torch.normal(2.0, 3 * x), 2.0, 3.0),
    "normal of both": (lambda x: torch.normal(2 * x, 3 * x[0]), 2.0, 3.0),
    "rrelu": (lambda x: F.rrelu(-x, 0.1, 0.5, training=True), -0.3, 0.4 / 12**0.5),
    "rrelu in place": (lambda x: F.rrelu(-x, 0.1, 0.5, training=True, inplace=True), -0.3, 0.4 / 12**0.5),
    "dropout": (lambda x: F.dropout(x, 0.2), 1.0, 0.5),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_draw_has_its_distribution_and_the_next_is_another(name: str) -> None:
    draw, mean, deviation = CASES[name]
    x = torch.ones(N, 2)
    with GlobalRandom(torch.tensor(1), 0):
        first, second = draw(x).double(), draw(x).double()
    with GlobalRandom(torch.tensor(1), 0):
        assert torch.equal(draw(x).double(), first)
    assert not torch.equal(first, second)
    assert first.mean().item() == pytest.approx(mean, abs=5 * deviation / (2 * N) ** 0.5)
    assert first.std().item() == pytest.approx(deviation, rel=0.03)


def drawn(draw: Callable[[], Tensor], step: int = 3) -> Tensor:
    with GlobalRandom(torch.tensor(step), 0):
        return draw()


def of(size: Any = N, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype)


def _at(alpha: float) -> Tensor:
    return torch.full((N,), alpha)


# What draws N numbers, and the chance P(X <= x) of their distribution.
DISTRIBUTIONS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "exponential_": (lambda: of().exponential_(2.0), lambda x: 1 - torch.exp(-2 * x)),
    "exponential_ of float64": (lambda: of(dtype=torch.float64).exponential_(), lambda x: 1 - torch.exp(-x)),
    "log_normal_": (lambda: of().log_normal_(0.5, 0.7), lambda x: torch.special.ndtr((torch.log(x) - 0.5) / 0.7)),
    "bernoulli_": (lambda: of().bernoulli_(_at(0.3)), lambda x: torch.where(x < 1, 0.7, 1.0)),
    "randint, wide": (lambda: torch.randint(-(2**40), 2**40, (N,)), lambda x: (x / 2**40 + 1) / 2),
    "random_": (lambda: of(dtype=torch.int64).random_(), lambda x: x / 2**63),
    "random_ of float32": (lambda: of().random_(), lambda x: x / 2**24),
    "random_ of int8": (lambda: of(dtype=torch.int8).random_(), lambda x: (x + 1) / 128),
    "random_ of bool": (lambda: of(dtype=torch.bool).random_(), lambda x: (x + 1) / 2),
    "random_ to": (lambda: of().random_(7), lambda x: (x + 1) / 7),
    "random_ from": (lambda: of().random_(-3, 2), lambda x: (x + 4) / 5),
}


@pytest.mark.parametrize("name", list(DISTRIBUTIONS))
def test_a_draw_has_its_distribution_by_the_largest_difference(name: str) -> None:
    """Of Kolmogorov and Smirnov: beyond 1.95 / sqrt(N) by a chance of 0.001 (the numbers are fixed). Where some are
    equal the shares at their values are compared, for which the bound is a looser one."""
    draw, chance = DISTRIBUTIONS[name]
    first = drawn(draw)
    values, counts = torch.unique(first.double(), return_counts=True)
    upto = torch.cumsum(counts, 0) / N
    assert (upto - chance(values)).abs().max().item() < 1.95 / math.sqrt(N) + 1 / N
    assert torch.equal(drawn(draw), first)
    assert not torch.equal(drawn(draw, step=2), first)
    assert first.shape == (N,)


def test_values_keep_their_dtype_and_their_range() -> None:
    assert drawn(lambda: of().exponential_()).min() > 0  # its logarithm is finite: Gumbel's
    assert drawn(lambda: of(dtype=torch.bfloat16).log_normal_()).dtype == torch.bfloat16
    assert drawn(lambda: torch.randperm(5, dtype=torch.int32)).dtype == torch.int32
    assert drawn(lambda: torch.randint(1 << 30, (4,), dtype=torch.int32)).dtype == torch.int32


def test_every_permutation_is_as_likely() -> None:
    with GlobalRandom(torch.tensor(1), 0):
        seen = Counter(tuple(torch.randperm(3).tolist()) for _ in range(1800))
    assert sorted(seen) == sorted(itertools.permutations(range(3)))
    assert all(abs(count - 300) < 4 * math.sqrt(300 * 5 / 6) for count in seen.values())
    assert sorted(drawn(lambda: torch.randperm(N)).tolist()) == list(range(N))


WEIGHTS = torch.tensor([0.0, 1.0, 3.0, 0.0, 4.0, 0.0])


def test_multinomial_with_replacement_draws_by_weight() -> None:
    found = drawn(lambda: torch.multinomial(WEIGHTS, N, replacement=True))
    share = torch.bincount(found, minlength=6) / N
    expected = WEIGHTS / 8
    assert found.dtype == torch.int64
    assert ((share - expected).abs() <= 4 * torch.sqrt(expected * (1 - expected) / N)).all()


def test_multinomial_without_replacement_draws_one_after_the_other() -> None:
    found = drawn(lambda: torch.multinomial(WEIGHTS.expand(N, 6), 2))
    assert found.shape == (N, 2)
    pairs = Counter(map(tuple, found.tolist()))
    left = {1: 1 / 8, 2: 3 / 8, 4: 4 / 8}
    assert set(pairs) == set(itertools.permutations(left, 2))
    for (first, second), count in pairs.items():
        chance = left[first] * left[second] / (1 - left[first])
        assert abs(count / N - chance) < 4 * math.sqrt(chance * (1 - chance) / N)


def test_a_range_of_integers_too_wide_is_an_error() -> None:
    with GlobalRandom(torch.tensor(1), 0), pytest.raises(CaptureError, match="such a wide range"):
        torch.empty(4, dtype=torch.int64).random_(-(1 << 63), None)


class Noisy(nn.Module):
    """A step of a diffusion model: a time and noise are drawn in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.times, self.net = nn.Embedding(10, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        t = torch.randint(0, 10, (x.shape[0],))
        noise = torch.normal(torch.zeros_like(x), 1.0)
        return F.dropout(F.rrelu(self.net(x + noise + self.times(t)), training=True), 0.1)


def test_every_mesh_draws_the_same() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 4)}
    losses = []
    for mesh in ("", "dp=4", "tp=2"):
        torch.manual_seed(1)
        model = Noisy()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile(model, loss=lambda out, b: out.square().mean(), example=batch, optimizer=optimizer, mesh=mesh)
        losses.append([float(step(batch)) for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


# What is drawn for a value x [8, 4] that the step computes, of the same shape or one that broadcasts to it.
IN_A_STEP: dict[str, Callable[[Tensor], Tensor]] = {
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "of a constant": lambda x: torch.empty(8, 4).normal_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "random_": lambda x: torch.empty(x.shape, dtype=torch.int64).random_(1 << 40),
    "randperm": lambda x: x[torch.randperm(8)],
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 3),
    "multinomial, replacement": lambda x: torch.multinomial(x.softmax(-1), 4, replacement=True),
    "normal": lambda x: Normal(x, 1.0, validate_args=False).rsample(),
    "categorical": lambda x: Categorical(logits=x, validate_args=False).sample()[:, None],
}


class DrawsAll(nn.Module):
    """Forward keeps in the buffer of each case what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4)
        for i, draw in enumerate(IN_A_STEP.values()):
            self.register_buffer(f"seen{i}", torch.zeros_like(drawn(lambda draw=draw: draw(torch.ones(8, 4)))))

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        for i, draw in enumerate(IN_A_STEP.values()):
            getattr(self, f"seen{i}").copy_(draw(x))
        return out + F.gumbel_softmax(out, tau=0.7)


def test_every_mesh_draws_the_same_of_every_distribution() -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(8, 4)} for _ in range(2)]
    runs = []
    for mesh in ("", "dp=2,tp=2"):
        torch.manual_seed(1)
        model = DrawsAll()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile(
            model,
            loss=lambda out, b: out.square().mean(),
            example=batches[0],
            optimizer=optimizer,
            mesh=mesh,
            run=mw.RunOptions(backend="eager"),
        )
        runs.append([(float(step(batch)), {n: b.clone() for n, b in step.buffers().items()}) for batch in batches])
    for (loss, seen), *others in zip(*runs, strict=True):
        for other_loss, other_seen in others:
            assert other_loss == pytest.approx(loss, rel=1e-5)
            torch.testing.assert_close(other_seen, seen, rtol=1e-6, atol=0)
    (_, first), (_, second) = runs[0]
    for name, values in first.items():
        assert not torch.equal(values, second[name]), name


@pytest.mark.parametrize("hard", [False, True])
def test_the_gradient_through_gumbel_softmax_is_that_of_the_numbers_drawn(hard: bool) -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits = nn.Parameter(torch.linspace(-1, 1, 32).view(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (F.gumbel_softmax(self.logits, tau=0.7, hard=hard) * x).square()

    torch.manual_seed(0)
    batch, model = {"x": torch.randn(8, 4)}, Chooses()
    step = mw.compile(model, loss=lambda out, b: out.sum(), example=batch, mesh="dp=2", seed=3)
    noise = -torch.log(drawn_with_seed(3, lambda: torch.empty(8, 4).exponential_()))
    logits = torch.linspace(-1, 1, 32).view(8, 4).requires_grad_()
    soft = torch.softmax((logits + noise) / 0.7, -1)
    chosen = F.one_hot(soft.argmax(-1), 4) + soft - soft.detach() if hard else soft
    loss = (chosen * batch["x"]).square().sum()
    loss.backward()
    assert float(step(batch)) == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(step.gradients()["logits"], logits.grad)


def drawn_with_seed(seed: int, draw: Callable[[], Tensor]) -> Tensor:
    with GlobalRandom(torch.tensor(0), seed):
        return draw()


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.poisson(x.abs()),
        lambda x: Beta(x.exp(), x.exp(), validate_args=False).sample(),
        lambda x: x.clone().cauchy_(),
        lambda x: x.clone().geometric_(0.5),
    ],
)
def test_other_distributions_are_errors_that_say_what_to_do(draw: Callable[[Tensor], Tensor]) -> None:
    class Draws(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) + draw(x)

    with pytest.raises(CaptureError, match="pass them in the batch"):
        mw.compile(Draws(), loss=lambda out, b: out.sum(), example={"x": torch.ones(8, 4)}, mesh="")


def test_a_constant_filled_with_random_numbers_depends_on_data() -> None:
    class Decides(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            drop = torch.zeros(1).uniform_()
            return self.net(x) if drop < 0.5 else x

    with pytest.raises(CaptureError, match="control flow depends on data"):
        mw.compile(Decides(), loss=lambda out, b: out.sum(), example={"x": torch.ones(8, 4)}, mesh="")
