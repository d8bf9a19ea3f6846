"""ATen's random ops, computed from numbers that are functions of the global index."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from meshweave.errors import CaptureError

if TYPE_CHECKING:
    from meshweave.capture.trace import GlobalRandom

aten = torch.ops.aten


_BITS = 24  # of a number in [0, 1)
_MOST_INTEGERS = 1 << 63  # the range of which PyTorch's generator takes the remainder


def _like(options: dict[str, Any], x: Tensor | None = None) -> torch.dtype:
    return options.get("dtype") or (x.dtype if x is not None else torch.get_default_dtype())


def _dropout(mode: GlobalRandom, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = mode.chance(x.shape, 1 - p)
    return x * keep * (0.0 if p == 1 else 1.0 / (1.0 - p)), keep


def _fine(mode: GlobalRandom, shape: Any) -> Tensor:
    """float64 in (0, 1), from two draws: the midpoints of 2**48 cells."""
    return mode.uniform(shape).double() + (mode.uniform(shape).double() + 2.0 ** -(_BITS + 1)) * 2.0**-_BITS


def _exponential(mode: GlobalRandom, shape: Any, dtype: torch.dtype) -> Tensor:
    """Exponential variables of rate 1, never 0: a Gumbel variable is -log of it. float64 for a float64 `dtype`,
    otherwise float32."""
    if dtype == torch.float64:
        return -torch.log1p(-_fine(mode, shape))
    return -torch.log1p(-torch.clamp_min(mode.uniform(shape), 2.0 ** -(_BITS + 1)))


def _integers(mode: GlobalRandom, shape: Any, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """Integers in [low, high). A range of more than 24 bits takes three draws, and the remainder of their 63 highest
    bits."""
    if high - low > _MOST_INTEGERS:
        raise CaptureError(
            "random integers of such a wide range have no mesh-independent form",
            got=f"{low} to {high}",
            expected=f"at most {_MOST_INTEGERS} of them",
            hint="draw them outside the model and pass them in the batch",
        )
    if high - low <= 1 << _BITS:
        return (torch.floor(mode.uniform(shape).double() * (high - low)) + low).to(dtype)
    first, second, third = ((mode.uniform(shape) * 2.0**_BITS).to(torch.int64) for _ in range(3))
    bits = (first << 39) | (second << 15) | (third >> 9)
    within = bits if high - low == _MOST_INTEGERS else bits % (high - low)
    return (within + low).to(dtype)


def _most(dtype: torch.dtype) -> int:
    """The largest integer that `random_` draws: for a float dtype the first that its successor is not distinct from."""
    if dtype.is_floating_point:
        return 1 << (1 - round(math.log2(torch.finfo(dtype).eps)))
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _random_(mode: GlobalRandom, x: Tensor, low: int = 0, high: int | None = None, **_: Any) -> Tensor:
    return x.copy_(_integers(mode, x.shape, low, _most(x.dtype) + 1 if high is None else high, torch.int64))


def _multinomial(mode: GlobalRandom, weights: Tensor, num: int, replacement: bool = False, **_: Any) -> Tensor:
    """`num` indices of the last dim, with `weights` that need not add up to 1; weight 0 is drawn only when no others
    are left.

    Without replacement: those with the largest weight over an exponential variable, which has the distribution of
    successive draws, in that order (Efraimidis and Spirakis, Information Processing Letters 97, 2006)."""
    wide = weights.double()
    if not replacement:
        return torch.topk(wide / _exponential(mode, weights.shape, torch.float64), num, -1).indices
    upto = torch.cumsum(wide, -1)
    drawn = _fine(mode, (*weights.shape[:-1], num)) * upto[..., -1:]
    return torch.searchsorted(upto, drawn, right=True)


def _rrelu(
    mode: GlobalRandom,
    x: Tensor,
    noise: Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    *_: Any,
) -> Tensor:
    if not training:
        return torch.where(x > 0, x, x * ((lower + upper) / 2))
    slope = torch.where(x > 0, torch.ones_like(x), (mode.uniform(x.shape) * (upper - lower) + lower).to(x.dtype))
    noise.copy_(slope)
    return x * slope


RANDOM: dict[Any, Callable[..., Any]] = {
    aten.bernoulli_.float: lambda m, x, p=0.5, **_: x.copy_(m.chance(x.shape, p)),
    aten.bernoulli_.Tensor: lambda m, x, p, **_: x.copy_(m.uniform(x.shape) < p),
    aten.bernoulli.default: lambda m, x, **_: (m.uniform(x.shape) < x).to(x.dtype),
    aten.bernoulli.p: lambda m, x, p=0.5, **_: m.chance(x.shape, p).to(x.dtype),
    aten.native_dropout.default: _dropout,
    aten.rand.default: lambda m, size, **o: m.uniform(size).to(_like(o)),
    aten.rand_like.default: lambda m, x, **o: m.uniform(x.shape).to(_like(o, x)),
    aten.randn.default: lambda m, size, **o: m.normal(size).to(_like(o)),
    aten.randn_like.default: lambda m, x, **o: m.normal(x.shape).to(_like(o, x)),
    aten.uniform_.default: lambda m, x, low=0.0, high=1.0, **_: x.copy_(m.uniform(x.shape) * (high - low) + low),
    aten.normal_.default: lambda m, x, mean=0.0, std=1.0, **_: x.copy_(m.normal(x.shape) * std + mean),
    aten.randint.default: lambda m, high, size, **o: _integers(m, size, 0, high, o.get("dtype") or torch.int64),
    aten.randint.low: lambda m, low, high, size, **o: _integers(m, size, low, high, o.get("dtype") or torch.int64),
    aten.randint_like.default: lambda m, x, high, **o: _integers(m, x.shape, 0, high, _like(o, x)),
    aten.randint_like.low_dtype: lambda m, x, low, high, **o: _integers(m, x.shape, low, high, _like(o, x)),
    aten.normal.float_float: lambda m, mean, std, size, **o: (m.normal(size) * std + mean).to(_like(o)),
    aten.normal.Tensor_float: lambda m, mean, std=1.0, **_: (m.normal(mean.shape) * std + mean).to(mean.dtype),
    aten.normal.float_Tensor: lambda m, mean, std, **_: (m.normal(std.shape) * std + mean).to(std.dtype),
    aten.normal.Tensor_Tensor: lambda m, mean, std, **_: (
        m.normal(torch.broadcast_shapes(mean.shape, std.shape)) * std + mean
    ).to(mean.dtype),
    aten.rrelu_with_noise.default: _rrelu,
    aten.rrelu_with_noise_.default: lambda m, x, *rest: x.copy_(_rrelu(m, x, *rest)),
    aten.random_.default: _random_,
    aten.random_.to: lambda m, x, high, **_: _random_(m, x, 0, high),
    getattr(aten.random_, "from"): _random_,
    aten.randperm.default: lambda m, n, **o: torch.sort(_fine(m, [n])).indices.to(o.get("dtype") or torch.int64),
    aten.exponential_.default: lambda m, x, rate=1.0, **_: x.copy_(_exponential(m, x.shape, x.dtype) / rate),
    aten.log_normal_.default: lambda m, x, mean=1.0, std=2.0, **_: x.copy_(torch.exp(m.normal(x.shape) * std + mean)),
    aten.multinomial.default: _multinomial,
}
