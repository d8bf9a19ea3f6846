"""Blocks as users write them: functions in the middle of forward, masks, statistics, loops of Python, torch's layers.

Each takes a value [batch, steps, features] and the mask of what is there [batch, steps], and gives a value like it.
"""

from __future__ import annotations

import torch
from tests.fuzz.habit_functions import FUNCTIONS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Drop(nn.Module):
    """Dropout whose masks stay in a buffer, the last microbatches' first; `replay` takes them from there instead."""

    def __init__(self, p, shape, keep):
        super().__init__()
        self.p, self.replay = p, None
        self.register_buffer("masks", torch.zeros(keep, *shape, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.replay is not None:
            mask = self.replay.pop(0).to(x.dtype)
            self.masks = torch.cat([mask[None].double(), self.masks[:-1]])
            return x * mask
        mask = F.dropout(torch.ones_like(x), self.p, self.training)
        self.masks = torch.cat([mask.detach()[None].double(), self.masks[:-1]])
        return x * mask


class Written(nn.Module):
    """A function of a value and its mask, as a block."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.function(x, mask)


class Norms(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.n = n

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.n(x.transpose(1, 2)).transpose(1, 2)


class Post(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.f(x)


class Mha(nn.Module):
    def __init__(self, c, heads, form):
        super().__init__()
        self.form = form
        self.a = nn.MultiheadAttention(c, heads, batch_first=True, bias=form != "nobias")

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.form == "pad":
            keep = ~mask
            keep = keep & (torch.arange(x.shape[1]) > 0)  # the first is always there
            return x + self.a(x, x, x, key_padding_mask=keep, need_weights=False)[0]
        if self.form == "causal":
            m = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
            return x + self.a(x, x, x, attn_mask=m, is_causal=True, need_weights=False)[0]
        out, w = self.a(x, x, x)
        return x + out + 0.1 * w.sum(-1, keepdim=True)


class Encoder(nn.Module):
    def __init__(self, c, heads, first):
        super().__init__()
        self.e = nn.TransformerEncoderLayer(
            c, heads, 2 * c + 1, dropout=0.0, batch_first=True, norm_first=first, activation="gelu"
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.e(x)


class Decoder(nn.Module):
    def __init__(self, c, heads):
        super().__init__()
        self.d = nn.TransformerDecoderLayer(c, heads, c + 3, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.d(x, torch.tanh(x[:, :2]))


class Rnn(nn.Module):
    def __init__(self, c, kind):
        super().__init__()
        self.r = getattr(nn, kind)(c, c, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.r(x)[0]


class Cell(nn.Module):
    def __init__(self, c, kind):
        super().__init__()
        self.r = getattr(nn, kind)(c, c)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h, c = torch.zeros(x.shape[0], x.shape[2], dtype=x.dtype), None
        out = []
        for t in range(x.shape[1]):
            if isinstance(self.r, nn.LSTMCell):
                h, c = self.r(x[:, t], None if c is None else (h, c))
            else:
                h = self.r(x[:, t], h)
            out.append(h)
        return torch.stack(out, 1)


class Ckpt(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(self.inner, x, mask, use_reentrant=False)


class Shared(nn.Module):
    """A module used twice, and a projection that uses the transposed weight of another."""

    def __init__(self, c):
        super().__init__()
        self.up = nn.Linear(c, c + 1)
        self.bias = nn.Parameter(torch.zeros(c))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        return x + F.linear(h, self.up.weight.t(), self.bias)


class Ema(nn.Module):
    """Buffers: an average in place, a counter, one that is reassigned."""

    def __init__(self, c):
        super().__init__()
        self.register_buffer("mean", torch.zeros(c))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("level", torch.ones(1), persistent=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.count += 1
                self.mean.mul_(0.9).add_(0.1 * x.mean((0, 1)))
                self.level = 0.5 * self.level + 0.5 * x.abs().mean()
        return (x - self.mean) / (self.level + 1.0) * (1 + 0.01 * self.count)


class Codebook(nn.Module):
    """Vector quantization with a straight-through gradient, counts in a buffer."""

    def __init__(self, c):
        super().__init__()
        self.codes = nn.Embedding(5, c)
        self.register_buffer("usage", torch.zeros(5))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        d = (x.unsqueeze(2) - self.codes.weight).pow(2).sum(-1)
        index = d.argmin(-1)
        q = self.codes(index)
        if self.training:
            self.usage.mul_(0.9).add_(F.one_hot(index, 5).to(x.dtype).sum((0, 1)).detach())
        return x + (q - x).detach() + 0.1 * q


class Parts(nn.Module):
    """ParameterList and ParameterDict, a scalar parameter, a frozen one."""

    def __init__(self, c):
        super().__init__()
        self.l = nn.ParameterList([nn.Parameter(torch.randn(c) * 0.3) for _ in range(3)])
        self.d = nn.ParameterDict(
            {
                "gain": nn.Parameter(torch.tensor(0.7)),
                "cold": nn.Parameter(torch.randn(c, c) * 0.2, requires_grad=False),
            }
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for p in self.l:
            x = x * (1 + 0.1 * p)
        return x * self.d["gain"] + x @ self.d["cold"]


class Weird(nn.Module):
    def __init__(self, chance, c):
        super().__init__()
        kind = chance.choice(["weight_norm", "spectral", "bilinear", "prelu", "glu", "orth"])
        self.kind = kind
        if kind == "weight_norm":
            self.m = nn.utils.parametrizations.weight_norm(nn.Linear(c, c))
        elif kind == "spectral":
            self.m = nn.utils.parametrizations.spectral_norm(nn.Linear(c, c))
        elif kind == "bilinear":
            self.m = nn.Bilinear(c, c, c)
        elif kind == "prelu":
            self.m = nn.PReLU(1)
        elif kind == "glu":
            self.m = nn.Linear(c, 2 * c)
        else:
            self.m = nn.utils.parametrizations.weight_norm(nn.Linear(c, c, bias=False), dim=None)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if self.kind == "bilinear":
            return self.m(x, torch.tanh(x))
        if self.kind == "glu":
            return F.glu(self.m(x), -1)
        return self.m(x)


class Conv(nn.Module):
    def __init__(self, chance, c):
        super().__init__()
        k = chance.choice([1, 3])
        self.c = nn.Conv1d(
            c,
            c,
            k,
            padding=k // 2,
            groups=chance.choice([1, 1, c]),
            padding_mode=chance.choice(["zeros", "zeros", "circular", "reflect"]) if k > 1 else "zeros",
        )
        self.bn = nn.BatchNorm1d(
            c,
            momentum=chance.choice([0.1, 0.1, 0.3]),
            affine=chance.random() < 0.7,
            track_running_stats=chance.random() < 0.8,
        )
        self.pool = chance.choice([None, nn.AvgPool1d(3, 1, 1), nn.MaxPool1d(3, 1, 1), nn.LPPool1d(2, 1)])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = F.relu(self.bn(self.c(x.transpose(1, 2))), inplace=True)
        y = y if self.pool is None else self.pool(y)
        return x + y.transpose(1, 2)


class Moe(nn.Module):
    """Experts with a top-1 router in dense form, as users write it first."""

    def __init__(self, c):
        super().__init__()
        self.router, self.experts = nn.Linear(c, 3), nn.ModuleList(nn.Linear(c, c) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        w, i = p.max(-1)
        out = torch.zeros_like(x)
        for n, e in enumerate(self.experts):
            hit = (i == n).unsqueeze(-1)
            out = out + torch.where(hit, e(x) * w.unsqueeze(-1), torch.zeros_like(x))
        return x + out


class Rope(nn.Module):
    def __init__(self, c, heads):
        super().__init__()
        self.h = heads
        self.qkv, self.o = nn.Linear(c, 3 * c, bias=False), nn.Linear(c, c)
        d = c // heads
        self.register_buffer("freq", 1.0 / (100 ** (torch.arange(0, d, 2)[: d // 2].float() / d)), persistent=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.h, C // self.h).permute(2, 0, 3, 1, 4)
        t = torch.arange(T, device=x.device).to(x.dtype)[:, None] * self.freq.to(x.dtype)
        cos, sin = torch.cat([t.cos(), t.cos()], -1), torch.cat([t.sin(), t.sin()], -1)

        def rot(u):
            a, b = u.chunk(2, -1)
            return u * cos + torch.cat([-b, a], -1) * sin

        q, k = rot(q), rot(k)
        bias = torch.zeros(T, T, dtype=q.dtype).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
        full = bias + torch.zeros(B, 1, 1, T, dtype=q.dtype).masked_fill(
            ~(mask | (torch.arange(T) == 0))[:, None, None], float("-inf")
        )
        return x + self.o(
            F.scaled_dot_product_attention(q, k, v, attn_mask=full.to(q.dtype)).transpose(1, 2).reshape(B, T, C)
        )


def heads_of(chance, c):
    return chance.choice([h for h in (1, 2, 3, 4) if c % h == 0])


def block(chance, c, T, micro, keep, dropout_ok=True):
    r = chance.random()
    if r < 0.33:
        f = chance.choice(FUNCTIONS)
        return Written(f), f.__name__
    if r < 0.40 and dropout_ok:
        return Post(Drop(chance.choice([0.1, 0.5]), (micro, T, c), keep)), "drop"
    make = {
        "mlp": lambda: Post(
            nn.Sequential(nn.Linear(c, 2 * c + 1), nn.GELU(approximate="tanh"), nn.Linear(2 * c + 1, c))
        ),
        "ln": lambda: Post(nn.LayerNorm(c)),
        "rms": lambda: Post(nn.RMSNorm(c, eps=1e-5)),
        "bn": lambda: Norms(nn.BatchNorm1d(c)),
        "gn": lambda: Norms(nn.GroupNorm(1, c)),
        "in": lambda: Norms(nn.InstanceNorm1d(c, affine=True, track_running_stats=True)),
        "mha": lambda: Mha(c, heads_of(chance, c), chance.choice(["pad", "causal", "plain", "nobias"])),
        "encoder": lambda: Encoder(c, heads_of(chance, c), chance.random() < 0.5),
        "decoder": lambda: Decoder(c, heads_of(chance, c)),
        "rnn": lambda: Rnn(c, chance.choice(["LSTM", "GRU", "RNN"])),
        "cell": lambda: Cell(c, chance.choice(["LSTMCell", "GRUCell"])),
        "ckpt": lambda: Ckpt(Encoder(c, heads_of(chance, c), True)) if chance.random() < 0.5 else Ckpt(Shared(c)),
        "shared": lambda: Shared(c),
        "ema": lambda: Ema(c),
        "codes": lambda: Codebook(c),
        "parts": lambda: Parts(c),
        "weird": lambda: Weird(chance, c),
        "conv": lambda: Conv(chance, c),
        "moe": lambda: Moe(c),
        "rope": lambda: Rope(c, heads_of(chance, c) if c % 4 == 0 else 1),
        "zerodrop": lambda: Post(nn.Dropout(0.0)),
    }
    names = list(make)
    if c % 2:
        names.remove("rope")
    name = chance.choice(names)
    return make[name](), name
