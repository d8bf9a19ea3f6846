"""Random ops of ATen by numbers that are functions of the global index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from meshweave.errors import CaptureError

aten = torch.ops.aten


class Draws(Protocol):
    """What numbers come from: each call is another draw."""

    def uniform(self, shape: Any) -> Tensor: ...

    def chance(self, shape: Any, p: float) -> Tensor: ...

    def normal(self, shape: Any) -> Tensor: ...


_MOST_INTEGERS = 1 << 24  # a number in [0, 1) has 24 bits


def _like(options: dict[str, Any], x: Tensor | None = None) -> torch.dtype:
    return options.get("dtype") or (x.dtype if x is not None else torch.get_default_dtype())


def _dropout(mode: Draws, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = mode.chance(x.shape, 1 - p)
    return x * keep * (0.0 if p == 1 else 1.0 / (1.0 - p)), keep


def _integers(mode: Draws, shape: Any, low: int, high: int, dtype: torch.dtype) -> Tensor:
    if high - low > _MOST_INTEGERS:
        raise CaptureError(
            "random integers of so wide a range have no mesh-independent form",
            got=f"{low} to {high}",
            expected=f"at most {_MOST_INTEGERS} of them",
            hint="draw them outside the model and pass them in the batch",
        )
    return (torch.floor(mode.uniform(shape).double() * (high - low)) + low).to(dtype)


def _rrelu(
    mode: Draws, x: Tensor, noise: Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, *_: Any
) -> Tensor:
    if not training:
        return torch.where(x > 0, x, x * ((lower + upper) / 2))
    slope = torch.where(x > 0, torch.ones_like(x), (mode.uniform(x.shape) * (upper - lower) + lower).to(x.dtype))
    noise.copy_(slope)
    return x * slope


RANDOM: dict[Any, Callable[..., Any]] = {
    aten.bernoulli_.float: lambda m, x, p=0.5, **_: x.copy_(m.chance(x.shape, p)),
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
}
