"""Models over long sequences, and their step on a mesh beside one device, for tests of context parallelism."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tests.models import hugging_face
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.capture.batch import call_model


@dataclass(frozen=True)
class Shape:
    """Of a plain model: heads, key heads, head size, batch, tokens; which mask it is given."""

    heads: int = 4
    key_heads: int = 2
    size: int = 8
    batch: int = 2
    tokens: int = 8
    mask: str = "causal"  # causal, none, bool, float or documents
    layers: int = 1


class Attention(nn.Module):
    """q, k, v, attention with rotary positions and a mask, and a projection, as a model of its own would write them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, width = shape, shape.heads * shape.size
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * shape.key_heads * shape.size)
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        s, (b, n, width) = self.shape, x.shape
        k, v = self.kv(x).view(b, n, 2 * s.key_heads, s.size).chunk(2, 2)
        q, k, v = (y.transpose(1, 2) for y in (rotated(self.q(x).view(b, n, s.heads, s.size)), rotated(k), v))
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=s.mask == "causal", enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(b, n, width))


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None] / (1 + torch.arange(half, dtype=x.dtype))
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angle.cos() - right * angle.sin(), left * angle.sin() + right * angle.cos()], -1)


class Plain(nn.Module):
    """Embedding, attention with a residual, a gated MLP on tokens as rows, and logits."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, width = shape, shape.heads * shape.size
        self.embed = nn.Embedding(31, width)
        self.layers = nn.ModuleList(Attention(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 24), nn.Linear(24, width)
        self.head = nn.Linear(width, 31)

    def forward(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x, self.mask(ids, documents, x.dtype))
        rows = self.norm(x).view(-1, x.shape[-1])
        return self.head(x + self.down(F.gelu(self.up(rows))).view(x.shape))

    def mask(self, ids: Tensor, documents: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if self.shape.mask in ("causal", "none"):
            return None
        at = torch.arange(ids.shape[1])
        seen = at[:, None] >= at[None]
        if self.shape.mask == "documents":
            assert documents is not None
            return (seen & (documents[:, :, None] == documents[:, None, :]))[:, None]
        if self.shape.mask == "float":
            return torch.where(seen, 0.0, float("-inf")).to(dtype) - 0.1 * (at[:, None] - at[None]).abs().to(dtype)
        return seen


def next_token_loss(out: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross entropy of the next token, shifted in the loss: a label stands in another piece than its logits."""
    return F.cross_entropy(out[:, :-1].reshape(-1, out.shape[-1]), batch["ids"][:, 1:].reshape(-1))


def plain(shape: Shape) -> tuple[nn.Module, dict[str, Tensor], Any]:
    torch.manual_seed(0)
    model = Plain(shape)
    random = torch.Generator().manual_seed(1)
    batch = {"ids": torch.randint(0, 31, (shape.batch, shape.tokens), generator=random)}
    if shape.mask == "documents":
        batch["documents"] = torch.randint(0, 2, batch["ids"].shape, generator=random).cumsum(1)
    return model, batch, next_token_loss


def named(name: str, tokens: int = 8) -> tuple[nn.Module, Any, Any]:
    """A Hugging Face model without dropout, or `plain`."""
    if name == "plain":
        return plain(Shape(tokens=tokens))
    model, batch, loss = hugging_face(name, batch=2, seq=tokens, heads=4, layers=1)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, batch, loss


def difference(
    made: tuple[nn.Module, Any, Any], mesh: str, dtype: torch.dtype, **options: Any
) -> tuple[float, mw.TrainStep]:
    """The largest error of loss and gradients on `mesh` against eager PyTorch, as a share of the largest number of each
    tensor; and the step."""
    model, batch, loss = made
    model = model.to(dtype)
    eager = copy.deepcopy(model)
    step = mw.compile(model, loss=loss, example=batch, mesh=mesh, **options)
    got = step(batch)
    want = loss(call_model(eager, batch), batch)
    want.backward()
    errors = [abs(float(got) - want.item()) / abs(want.item())]
    for name, parameter in eager.named_parameters():
        assert parameter.grad is not None
        gap = (step.gradients()[name] - parameter.grad).abs().max()
        errors.append(float(gap / parameter.grad.abs().max().clamp_min(1e-3)))
    return max(errors), step
