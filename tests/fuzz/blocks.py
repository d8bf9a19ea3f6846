"""Random blocks of models in plain PyTorch. A block takes a value and returns a value; sizes leave the batch out.

A value is a vector (features), a sequence (length, features), a signal (channels, length) or an image (channels,
height, width). `MAKERS[kind]` are the functions that make a block for a value of that kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Sizes = tuple[int, ...]
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.tanh,
    torch.sigmoid,
    F.gelu,
    F.silu,
    F.softplus,
    F.elu,
    F.mish,
    F.leaky_relu,
    lambda x: F.gelu(x, approximate="tanh"),
    lambda x: F.relu(x) + 0.1 * x,
    lambda x: torch.sin(x) * x,
    lambda x: F.hardswish(x),
    lambda x: x.clamp(-1.5, 1.5),
    lambda x: torch.where(x > 0, x, 0.3 * x),
)


@dataclass(frozen=True)
class Made:
    """A block, and the kind and sizes of its result. No kind: that of what it takes."""

    module: nn.Module
    kind: str
    sizes: Sizes


Maker = Callable[[Random, Sizes], Made]


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor], text: str = "") -> None:
        super().__init__()
        self.function, self.text = function, text

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.text


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.inner(x)


class Twice(nn.Module):
    """A module that is called twice: its parameters have two users."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class Joined(nn.Module):
    """Two branches side by side along `dim`."""

    def __init__(self, a: nn.Module, b: nn.Module, dim: int) -> None:
        super().__init__()
        self.a, self.b, self.dim = a, b, dim

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), self.b(x)], self.dim)


class Gated(nn.Module):
    """One linear layer whose result is cut in two, unevenly or in halves, and put together again."""

    def __init__(self, size: int, way: str) -> None:
        super().__init__()
        self.wide, self.way, self.size = nn.Linear(size, 2 * size), way, size

    def forward(self, x: Tensor) -> Tensor:
        wide = self.wide(x)
        if self.way == "chunk":
            a, b = wide.chunk(2, -1)
            return F.silu(a) * b
        if self.way == "glu":
            return F.glu(wide, -1)
        a, b = wide.split([1, 2 * self.size - 1], -1)
        return a * b[..., : self.size] + b[..., self.size - 1 :]


class Scale(nn.Module):
    """Parameters of its own: a vector, a scalar, and one that is normalized."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain, self.number = nn.Parameter(torch.rand(size) + 0.5), nn.Parameter(torch.tensor(0.7))
        self.direction = nn.Parameter(torch.randn(size, size) / size)

    def forward(self, x: Tensor) -> Tensor:
        direction = self.direction / (self.direction.norm(dim=1, keepdim=True) + 0.1)
        return (x * self.gain) @ direction + self.number * x


class Einsum(nn.Module):
    def __init__(self, size: int, heads: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(size, heads, inner) / size**0.5)
        self.down = nn.Parameter(torch.randn(heads, inner, size) / (heads * inner) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...hd,hdf->...f", torch.tanh(torch.einsum("...f,fhd->...hd", x, self.up)), self.down)


class Mix(nn.Module):
    """A linear layer along the sequence."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.mix = nn.Linear(length, length)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.transpose(1, 2)).transpose(1, 2)


class Attention(nn.Module):
    """Attention with grouped heads, as one function of torch or spelled out, with a mask, causal or neither."""

    def __init__(self, size: int, heads: int, groups: int, width: int, way: str, mask: str) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(size, heads * width), nn.Linear(size, groups * width, bias=False)
        self.v, self.out = nn.Linear(size, groups * width), nn.Linear(heads * width, size)
        self.heads, self.groups, self.width, self.way, self.mask = heads, groups, width, way, mask

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, self.width).transpose(1, 2)
        k = self.k(x).view(batch, length, self.groups, self.width).transpose(1, 2)
        v = self.v(x).view(batch, length, self.groups, self.width).transpose(1, 2)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        banded = torch.ones(length, length, dtype=torch.bool).tril(1)
        if self.way == "sdpa":
            mask = banded if self.mask == "banded" else None
            found = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.mask == "causal")
        else:
            scores = q @ k.transpose(-2, -1) * self.width**-0.5
            if self.mask != "none":
                scores = scores.masked_fill(~(banded if self.mask == "banded" else banded.tril()), float("-inf"))
            found = torch.softmax(scores, -1) @ v
        return self.out(found.transpose(1, 2).reshape(batch, length, self.heads * self.width))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, groups={self.groups}, {self.way}, mask={self.mask}"


class SelfAttention(nn.Module):
    """nn.MultiheadAttention over one value."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(size, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Spatial(nn.Module):
    """The attention block of diffusion models: group norm, attention over pixels, back to an image, added."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(groups, channels), 2 if channels % 2 == 0 else 1
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        flat = self.norm(x).view(batch, channels, height * width).transpose(1, 2)
        q, k, v = (
            t.view(batch, -1, self.heads, channels // self.heads).transpose(1, 2) for t in self.qkv(flat).chunk(3, -1)
        )
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, height * width, channels)
        return x + self.out(found).transpose(-1, -2).reshape(batch, channels, height, width)


class UpDown(nn.Module):
    """A small U: strided convolution down, nearest upsampling back, the skip concatenated, group norms between."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm, self.down = (
            nn.GroupNorm(groups, channels),
            nn.Conv2d(channels, channels, 3, stride=2, padding=1),
        )
        self.middle = nn.Conv2d(channels, channels, 3, padding=1)
        self.up = nn.Conv2d(2 * channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        low = self.middle(F.silu(self.norm(self.down(x))))
        return self.up(torch.cat([x, F.interpolate(low, size=x.shape[-2:], mode="nearest")], 1))


class Penalized(nn.Module):
    """Its result plus the squared gradient of an inner network with respect to the block's input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            value = self.inner(x)
            (slope,) = torch.autograd.grad(torch.tanh(value).sum(), x, create_graph=True)
        return value + 0.1 * (slope * slope).sum(-1, keepdim=True)


class Experts(nn.Module):
    """Every expert on every row, weighted by a softmax: einsums with a batch of weights."""

    def __init__(self, size: int, experts: int) -> None:
        super().__init__()
        self.gate, self.weights = nn.Linear(size, experts), nn.Parameter(torch.randn(experts, size, size) / size)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(
            "...e,...ef->...f", torch.softmax(self.gate(x), -1), torch.einsum("...f,efg->...eg", x, self.weights)
        )


# makers


def linear(chance: Random, sizes: Sizes) -> Made:
    out = chance.choice([3, 4, 6, 7, 8, 12, sizes[-1]])
    layer = nn.Linear(sizes[-1], out, bias=chance.random() < 0.7)
    return Made(layer, "", (*sizes[:-1], out))


def activation(chance: Random, sizes: Sizes) -> Made:
    at = chance.randrange(len(ACTIVATIONS))
    return Made(Call(ACTIVATIONS[at], f"activation {at}"), "", sizes)


def features_norm(chance: Random, sizes: Sizes) -> Made:
    last = sizes[-1:] if len(sizes) == 1 or chance.random() < 0.8 else sizes
    affine = chance.random() < 0.8
    norm = nn.LayerNorm(last, elementwise_affine=affine) if chance.random() < 0.6 else nn.RMSNorm(last, eps=1e-3)
    return Made(norm, "", sizes)


def same(make: Callable[[Random, Sizes], nn.Module]) -> Maker:
    """A maker of blocks whose result is of the kind and sizes of what they take."""
    return lambda chance, sizes: Made(make(chance, sizes), "", sizes)


def _gated(chance: Random, sizes: Sizes) -> nn.Module:
    return Gated(sizes[-1], chance.choice(["chunk", "glu", "uneven"]))


def _mlp(chance: Random, sizes: Sizes) -> nn.Module:
    wide = chance.choice([5, 8, 12])
    act = Call(chance.choice(ACTIVATIONS))
    return nn.Sequential(nn.Linear(sizes[-1], wide), act, nn.Dropout(0.0), nn.Linear(wide, sizes[-1]))


def _attention(chance: Random, sizes: Sizes) -> nn.Module:
    groups = chance.choice([1, 2, 3])
    heads = groups * chance.choice([1, 2])
    way, mask = chance.choice(["sdpa", "spelled"]), chance.choice(["none", "causal", "banded"])
    return Attention(sizes[-1], heads, groups, chance.choice([2, 4]), way, mask)


def _self_attention(chance: Random, sizes: Sizes) -> nn.Module:
    size = sizes[-1]
    return SelfAttention(size, chance.choice([h for h in (1, 2, 3) if size % h == 0]))


def _roll(chance: Random, sizes: Sizes) -> nn.Module:
    shift, dim = chance.choice([1, 2, -1]), chance.randrange(1, len(sizes) + 1)
    return Call(lambda x: x + torch.roll(x, shift, dim), f"roll {shift} {dim}")


def _softmax(chance: Random, sizes: Sizes) -> nn.Module:
    dim = chance.randrange(1, len(sizes) + 1)
    return Call(lambda x: x + torch.softmax(x, dim) - torch.log_softmax(x, dim), f"softmax {dim}")


def _flip(chance: Random, sizes: Sizes) -> nn.Module:
    dim = chance.randrange(1, len(sizes) + 1)
    return Call(lambda x: x - 0.5 * x.flip(dim), f"flip {dim}")


def _cumsum(chance: Random, sizes: Sizes) -> nn.Module:
    dim = chance.randrange(1, len(sizes) + 1)
    return Call(lambda x: x.cumsum(dim) / x.shape[dim], f"cumsum {dim}")


def _penalized(chance: Random, sizes: Sizes) -> nn.Module:
    return Penalized(nn.Sequential(nn.Linear(sizes[-1], 5), nn.Tanh(), nn.Linear(5, sizes[-1])))


def _twice(chance: Random, sizes: Sizes) -> nn.Module:
    return Twice(nn.Linear(sizes[-1], sizes[-1]))


def joined(chance: Random, sizes: Sizes) -> Made:
    a, b = linear(chance, sizes), linear(chance, sizes)
    return Made(Joined(a.module, b.module, -1), a.kind, (*sizes[:-1], a.sizes[-1] + b.sizes[-1]))


def _residual(chance: Random, sizes: Sizes) -> nn.Module:
    inner = chance.choice([_mlp, _mlp, _gated, _attention if len(sizes) == 2 else _mlp])(chance, sizes)
    norm = nn.LayerNorm(sizes[-1]) if chance.random() < 0.5 else nn.Identity()
    return Residual(nn.Sequential(norm, inner), chance.choice([0.5, 1.0]))


def convolution(chance: Random, sizes: Sizes) -> Made:
    channels, *space = sizes
    make = nn.Conv1d if len(space) == 1 else nn.Conv2d
    out = chance.choice([3, 4, 6, 8])
    groups = 1
    way = chance.choice(["plain", "plain", "grouped", "depthwise"])
    if way == "depthwise":
        groups, out = channels, channels * chance.choice([1, 1, 2])
    elif way == "grouped":
        groups = chance.choice([g for g in (1, 2, 3) if channels % g == 0])
        out = groups * chance.choice([1, 2, 3])
    kernel, stride, dilation = chance.choice([1, 3]), chance.choice([1, 1, 2]), chance.choice([1, 1, 2])
    padding = chance.choice([0, 1]) if kernel == 3 and dilation == 1 and min(space) >= 3 else dilation * (kernel // 2)
    mode = "circular" if padding == 1 and chance.random() < 0.1 else "zeros"
    layer = make(
        channels,
        out,
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=chance.random() < 0.6,
        padding_mode=mode,
    )
    after = tuple((n + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for n in space)
    return Made(layer, "", (out, *after))


def transposed(chance: Random, sizes: Sizes) -> Made:
    channels, height, width = sizes
    out = chance.choice([3, 4, 6])
    if height * width > 40:
        return convolution(chance, sizes)
    return Made(nn.ConvTranspose2d(channels, out, 2, stride=2), "image", (out, 2 * height, 2 * width))


def channels_norm(chance: Random, sizes: Sizes) -> Made:
    channels, *space = sizes
    groups = chance.choice([g for g in (1, 2, 3, 4) if channels % g == 0])
    affine = chance.random() < 0.8
    wide = len(space) == 2
    ways: list[Callable[[], nn.Module]] = [lambda: nn.GroupNorm(groups, channels, affine=affine)]
    if space[0] * space[-1] > 1:  # eager PyTorch takes no statistics of one value
        ways.append(lambda: (nn.BatchNorm2d if wide else nn.BatchNorm1d)(channels, affine=affine))
        ways.append(lambda: (nn.InstanceNorm2d if wide else nn.InstanceNorm1d)(channels, affine=affine))
    return Made(chance.choice(ways)(), "", sizes)


def pooling(chance: Random, sizes: Sizes) -> Made:
    channels, *space = sizes
    wide = len(space) == 2
    if min(space) < 2:
        return Made(nn.Identity(), "", sizes)
    way = chance.choice(["max", "average", "adaptive"])
    if way == "adaptive":
        to = tuple(chance.choice([d for d in (1, 2) if n % d == 0]) for n in space)
        layer = nn.AdaptiveAvgPool2d(to) if wide else nn.AdaptiveAvgPool1d(to[0])
        return Made(layer, "", (channels, *to))
    kinds = {"max": (nn.MaxPool1d, nn.MaxPool2d), "average": (nn.AvgPool1d, nn.AvgPool2d)}[way]
    return Made(kinds[wide](2), "", (channels, *(n // 2 for n in space)))


def _spatial(chance: Random, sizes: Sizes) -> nn.Module:
    return Spatial(sizes[0], chance.choice([g for g in (1, 2, 3) if sizes[0] % g == 0]))


def _up_down(chance: Random, sizes: Sizes) -> nn.Module:
    return UpDown(sizes[0], chance.choice([g for g in (1, 2) if sizes[0] % g == 0]))


def _convolved(chance: Random, sizes: Sizes) -> nn.Module:
    make = nn.Conv2d if len(sizes) == 3 else nn.Conv1d
    norm = nn.GroupNorm(1, sizes[0]) if chance.random() < 0.5 else nn.Identity()
    return Residual(nn.Sequential(norm, make(sizes[0], sizes[0], 3, padding=1), nn.SiLU()), 0.7)


def _upsampled(chance: Random, sizes: Sizes) -> Made:
    if sizes[1] * sizes[2] > 30:
        return pooling(chance, sizes)
    layer = Call(lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"), "upsample")
    return Made(layer, "image", (sizes[0], 2 * sizes[1], 2 * sizes[2]))


def as_sequence(chance: Random, sizes: Sizes) -> Made:
    """An image or signal as a sequence of pixels."""
    count = 1
    for n in sizes[1:]:
        count *= n
    return Made(Call(lambda x: x.flatten(2).transpose(1, 2), "to sequence"), "sequence", (count, sizes[0]))


def as_vector(chance: Random, sizes: Sizes) -> Made:
    """A mean, a maximum, or everything side by side."""
    total = 1
    for n in sizes:
        total *= n
    way = chance.choice(["mean", "max", "flat"] if total <= 64 else ["mean", "max"])
    if way == "flat":
        return Made(nn.Flatten(), "vector", (total,))
    if len(sizes) == 2:  # a sequence, or a signal seen as one
        function = {"mean": lambda x: x.mean(1), "max": lambda x: x.amax(1)}[way]
        return Made(Call(function, way), "vector", (sizes[1],))
    function = {"mean": lambda x: x.mean((2, 3)), "max": lambda x: x.amax((2, 3))}[way]
    return Made(Call(function, way), "vector", (sizes[0],))


def signal_of(chance: Random, sizes: Sizes) -> Made:
    """A sequence as a signal: its features are channels."""
    return Made(Call(lambda x: x.transpose(1, 2), "to signal"), "signal", (sizes[1], sizes[0]))


_FEATURES: tuple[Maker, ...] = (
    linear,
    linear,
    activation,
    features_norm,
    joined,
    same(_gated),
    same(_mlp),
    same(_residual),
    same(lambda chance, sizes: Scale(sizes[-1])),
    same(lambda chance, sizes: Einsum(sizes[-1], chance.choice([2, 3]), chance.choice([2, 3]))),
    same(_twice),
    same(_softmax),
    same(_penalized),
    same(lambda chance, sizes: Experts(sizes[-1], chance.choice([2, 3]))),
)
_CHANNELS: tuple[Maker, ...] = (convolution, convolution, convolution, channels_norm, channels_norm, pooling)
MAKERS: dict[str, tuple[Maker, ...]] = {
    "vector": _FEATURES,
    "sequence": (
        *_FEATURES,
        same(_attention),
        same(_attention),
        same(_self_attention),
        same(lambda chance, sizes: Mix(sizes[0])),
        same(_roll),
        same(_flip),
        same(_cumsum),
        signal_of,
        as_vector,
    ),
    "signal": (*_CHANNELS, same(_convolved), as_sequence),
    "image": (
        *_CHANNELS,
        activation,
        same(_convolved),
        same(_spatial),
        same(_up_down),
        transposed,
        _upsampled,
        as_sequence,
        as_vector,
    ),
}


def any_block(chance: Random, kind: str, sizes: Sizes) -> Made:
    """A random block for a value of this kind, with the kind of its result."""
    made = chance.choice(MAKERS[kind])(chance, sizes)
    return made if made.kind else replace(made, kind=kind)


def repeated(chance: Random, kind: str, sizes: Sizes, count: int) -> list[nn.Module]:
    """Blocks that are alike, of several modules each, that keep the sizes of a value: what models repeat."""
    seed, make = chance.random(), _convolved if kind in ("signal", "image") else _residual
    return [make(Random(seed), sizes) for _ in range(count)]
