"""Models of images: attention over pixels whose operands are not dense, windows, codebooks. They train as in eager
PyTorch, on every kind of mesh."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.training import assert_equals_eager, batches
from torch import Tensor, nn
from torch.nn import functional as F

CHANNELS, HEADS, SIZE = 8, 2, 8


class PixelAttention(nn.Module):
    """Self-attention over pixels; queries, keys and values come from a 1 x 1 convolution, so their channels are not
    dense in memory."""

    def __init__(self, channels: int, is_copied: bool = False) -> None:
        super().__init__()
        self.norm, self.is_copied = nn.GroupNorm(HEADS, channels), is_copied
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows, channels, height, width = x.shape
        split = self.qkv(self.norm(x)).reshape(rows, 3, HEADS, channels // HEADS, height * width)
        q, k, v = (t.transpose(-1, -2) for t in split.unbind(1))
        if self.is_copied:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(-1, -2).reshape(rows, channels, height, width))


class Block(nn.Module):
    """A residual block with the embedding of a time."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.norm, self.time = nn.GroupNorm(2, inner), nn.Linear(4, outer)
        self.first, self.second = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.first(F.silu(self.norm(x))) + self.time(time)[:, :, None, None]
        result: Tensor = self.skip(x) + self.second(F.silu(hidden))
        return result


class UNet(nn.Module):
    """Down by a stride, attention at the bottom, up by interpolation, a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(4, 4), nn.SiLU())
        self.begin, self.end = nn.Conv2d(3, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, 3, 3, padding=1)
        self.down = nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1)
        self.first, self.middle = Block(CHANNELS, CHANNELS), Block(CHANNELS, 2 * CHANNELS)
        self.attention, self.last = PixelAttention(2 * CHANNELS), Block(3 * CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        angles = x.mean((1, 2, 3))[:, None] * torch.arange(1, 3, dtype=x.dtype)
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        kept = self.first(self.begin(x), time)
        low = self.attention(self.middle(self.down(kept), time))
        up = F.interpolate(low, scale_factor=2.0, mode="nearest")
        result: Tensor = self.end(self.last(torch.cat([up, kept], 1), time))
        return result


class VQGAN(nn.Module):
    """An encoder, the nearest entries of a codebook with a straight-through gradient, a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, CHANNELS, 3, stride=2, padding=1), nn.SiLU(), PixelAttention(CHANNELS))
        self.book = nn.Embedding(16, CHANNELS)
        self.decode = nn.Sequential(
            PixelAttention(CHANNELS, is_copied=True), nn.ConvTranspose2d(CHANNELS, 3, 4, stride=2, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x).permute(0, 2, 3, 1)
        flat = z.reshape(-1, CHANNELS)
        distances = (
            flat.square().sum(1, keepdim=True) - 2 * flat @ self.book.weight.t() + self.book.weight.square().sum(1)
        )
        code = self.book(distances.argmin(1)).view(z.shape)
        through = code + 0.25 * (z - z.detach())
        result: Tensor = self.decode(through.permute(0, 3, 1, 2))
        return result


class Windows(nn.Module):
    """Two Swin blocks: attention in windows, the second time shifted, with a bias by relative position."""

    def __init__(self, window: int = 4) -> None:
        super().__init__()
        self.window, self.patches = window, nn.Conv2d(3, CHANNELS, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(CHANNELS) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(CHANNELS, 3 * CHANNELS) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(CHANNELS, CHANNELS) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(CHANNELS, 16), nn.GELU(), nn.Linear(16, CHANNELS)) for _ in range(2)
        )
        self.bias = nn.Parameter(torch.randn((2 * window - 1) ** 2, HEADS) * 0.1)
        self.head = nn.Linear(CHANNELS, 3)
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        relative = at[:, :, None] - at[:, None] + window - 1
        self.register_buffer("index", relative[0] * (2 * window - 1) + relative[1])

    def attend(self, x: Tensor, number: int, shift: int) -> Tensor:
        rows, height, width, channels = x.shape
        side = self.window
        x = torch.roll(x, (-shift, -shift), (1, 2)) if shift else x
        tiles = x.view(rows, height // side, side, width // side, side, channels).transpose(2, 3)
        tiles = tiles.reshape(-1, side * side, channels)
        q, k, v = self.qkv[number](tiles).view(*tiles.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        bias = self.bias[self.index.view(-1)].view(side * side, side * side, HEADS).permute(2, 0, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0))
        tiles = self.out[number](mixed.transpose(1, 2).reshape(tiles.shape))
        tiles = tiles.view(rows, height // side, width // side, side, side, channels).transpose(2, 3)
        whole = tiles.reshape(rows, height, width, channels)
        return torch.roll(whole, (shift, shift), (1, 2)) if shift else whole

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        for i in range(2):
            x = x + self.attend(self.norms[2 * i](x), i, i * self.window // 2)
            x = x + self.mlp[i](self.norms[2 * i + 1](x))
        result: Tensor = self.head(x).permute(0, 3, 1, 2)
        return result


class ConvAttention(nn.Module):
    """Convolutions in channels_last around attention over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Conv2d(3, CHANNELS, 3, padding=1), PixelAttention(CHANNELS)
        self.depth = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
        self.last = nn.Conv2d(CHANNELS, 3, 1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.contiguous(memory_format=torch.channels_last))
        result: Tensor = self.last(F.relu(self.depth(self.attention(x))))
        return result


MODELS: dict[str, Callable[[], nn.Module]] = {
    "unet": UNet, "vqgan": VQGAN, "swin": Windows, "conv_attention": ConvAttention,
}  # fmt: skip
MESHES = ["dp=2", "fsdp=2", "tp=2", "fsdp=2,tp=2", "cp=2"]
QUICK = (
    ("unet", "fsdp=2,tp=2"),
    ("vqgan", "tp=2"),
    ("swin", "cp=2"),
    ("conv_attention", "dp=2"),
    ("conv_attention", "fsdp=2"),
)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if (name, mesh) in QUICK else pytest.mark.slow)
        for name in MODELS
        for mesh in MESHES
    ],
)
def test_models_of_images_train_as_in_eager_pytorch(name: str, mesh: str) -> None:
    torch.manual_seed(0)
    shape = (4, 3, SIZE, SIZE)
    data = [{key: value.double() for key, value in batch.items()} for batch in batches(3, shape, shape)]
    assert_equals_eager(MODELS[name]().double(), data, mesh)
