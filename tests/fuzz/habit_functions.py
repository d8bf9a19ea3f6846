"""Functions that users write in the middle of a forward pass, of a value [batch, steps, features] and its mask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    w = mask.to(x.dtype).unsqueeze(-1)
    return x - (x * w).sum(1, keepdim=True) / w.sum(1, keepdim=True).clamp(min=1)


def set_first(x: Tensor, mask: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = x[:, -1] * 2
    x[:, 1:, ::2] += 0.5
    return x


def inplace(x: Tensor, mask: Tensor) -> Tensor:
    y = x * 1.5
    y += x
    y.mul_(0.5).clamp_(-3, 3)
    y.masked_fill_(~mask.unsqueeze(-1), 0.1)
    return F.relu(y, inplace=True) + x


def topk_gate(x: Tensor, mask: Tensor) -> Tensor:
    v, i = x.topk(2, dim=-1)
    return x * 0.5 + torch.zeros_like(x).scatter(-1, i, v.softmax(-1))


def ste(x: Tensor, mask: Tensor) -> Tensor:
    return x + (x.round() - x).detach() * 0.1


def loop(x: Tensor, mask: Tensor) -> Tensor:
    out = []
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        h = torch.tanh(0.5 * h + x[:, t])
        out.append(h)
    return torch.stack(out, dim=1)


def gathered(x: Tensor, mask: Tensor) -> Tensor:
    index = mask.long().sum(1).sub(1).clamp(min=0)
    last = x[torch.arange(x.shape[0], device=x.device), index]
    return x + 0.1 * last.unsqueeze(1)


def sorting(x: Tensor, mask: Tensor) -> Tensor:
    return x + 0.1 * x.sort(dim=1).values.flip(1)


def stats(x: Tensor, mask: Tensor) -> Tensor:
    return (x - x.mean((0, 1), keepdim=True)) / (x.std((0, 1), keepdim=True, unbiased=True) + 0.5)


def batch_similarity(x: Tensor, mask: Tensor) -> Tensor:
    z = F.normalize(x.mean(1), dim=-1)
    return x + 0.1 * ((z @ z.T).softmax(-1) @ z).unsqueeze(1)


def shift(x: Tensor, mask: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, 0))[:, :-1] + 0.3 * x.roll(1, dims=-1) + torch.flip(x, [1]) * 0.1


def buckets(x: Tensor, mask: Tensor) -> Tensor:
    T = x.shape[1]
    rel = (torch.arange(T)[None, :] - torch.arange(T)[:, None]).clamp(-2, 2) + 2
    return x + torch.einsum("ts,bsc->btc", rel.to(x.dtype) * 0.05, x)


def cum(x: Tensor, mask: Tensor) -> Tensor:
    return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]


def outer(x: Tensor, mask: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1) if x.shape[-1] % 2 == 0 else (x, x)
    return x + 0.05 * torch.einsum("bti,btj->bt", a, b).unsqueeze(-1)


def wherey(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.unsqueeze(-1), x, torch.zeros((), dtype=x.dtype)) + torch.where(x > 0, x, 0.1 * x)


def windows(x: Tensor, mask: Tensor) -> Tensor:
    return x + F.pad(x, (0, 0, 0, 2)).unfold(1, 3, 1).mean(-1) * 0.2


def logsum(x: Tensor, mask: Tensor) -> Tensor:
    return x - torch.logsumexp(x, dim=-1, keepdim=True) + x.norm(dim=-1, keepdim=True) * 0.1


def views(x: Tensor, mask: Tensor) -> Tensor:
    B, T, C = x.shape
    return x.transpose(0, 1).reshape(T * B, C).view(T, B, C).permute(1, 0, 2).contiguous() + x.reshape(B, -1).view(
        B, T, C
    )


def nograd(x: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().amax(dim=(1, 2), keepdim=True)
    return x / (scale + 1)


def repeat(x: Tensor, mask: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=1)[:, ::2] + x.repeat(1, 2, 1)[:, : x.shape[1]] * 0.5


def cdisted(x: Tensor, mask: Tensor) -> Tensor:
    return x + torch.softmax(-((x[:, :, None] - x[:, None]) ** 2).sum(-1), -1) @ x * 0.3


def dist2(x: Tensor, mask: Tensor) -> Tensor:
    return x + 0.1 * torch.cdist(x, x).mean(-1, keepdim=True)


def compare(x: Tensor, mask: Tensor) -> Tensor:
    return (
        x * (x > x.mean(-1, keepdim=True)).float().to(x.dtype)
        + x.sign() * 0.1
        + x.argmax(-1, keepdim=True).to(x.dtype) * 0.05
    )


def minmax(x: Tensor, mask: Tensor) -> Tensor:
    return (x - x.amin(1, keepdim=True)) / (x.amax(1, keepdim=True) - x.amin(1, keepdim=True) + 1) + x.max(
        dim=2, keepdim=True
    )[0] * 0.1


def addmms(x: Tensor, mask: Tensor) -> Tensor:
    return torch.baddbmm(x, x @ x.transpose(1, 2) * 0.1, x, beta=0.5, alpha=0.1)


def median(x: Tensor, mask: Tensor) -> Tensor:
    return x - x.median(dim=1, keepdim=True).values


def prods(x: Tensor, mask: Tensor) -> Tensor:
    return x + 0.1 * (1 + 0.1 * x).prod(dim=1, keepdim=True)


FUNCTIONS = [
    masked_mean,
    set_first,
    inplace,
    topk_gate,
    ste,
    loop,
    gathered,
    sorting,
    stats,
    batch_similarity,
    shift,
    buckets,
    cum,
    outer,
    wherey,
    windows,
    logsum,
    views,
    nograd,
    repeat,
    cdisted,
    dist2,
    compare,
    minmax,
    addmms,
    median,
    prods,
]
