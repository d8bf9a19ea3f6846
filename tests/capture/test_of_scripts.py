"""What users' scripts do that once failed in capture: uninitialised memory, masks by head, cumulative averages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw


def drop_path(h: Tensor) -> Tensor:
    return h * torch.empty(h.shape[0], 1).bernoulli_(0.7) / 0.7


def noise(h: Tensor) -> Tensor:
    return h + torch.empty(h.shape).uniform_(-0.1, 0.1)


def copied(h: Tensor) -> Tensor:
    out = torch.empty(h.shape)
    out.copy_(h)
    return out


class Applied(nn.Linear):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(6, 4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(super().forward(x))


@pytest.mark.parametrize("function", [drop_path, noise, copied])
def test_what_empty_leaves_in_memory_does_not_matter(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(8, 6)
    losses = set()
    for _ in range(3):
        left = [torch.randn(8, n) for n in (1, 4)] * 3  # what the allocator hands out next
        del left
        torch.manual_seed(0)
        model = Applied(function)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = mw.compile(model, loss=lambda out, _: out.pow(2).mean(), example=(x,), optimizer=optimizer, mesh="dp=2")
        losses.add(float(step((x,))))
    assert len(losses) == 1


class Biased(nn.Module):
    """Attention with a mask of any number of dims."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.project, self.mask = nn.Linear(8, 24), nn.Buffer(mask)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
@pytest.mark.parametrize("shape", [(2, 6, 6), (1, 6, 6), (2, 1, 6)])
def test_attention_takes_masks_of_any_number_of_dims(shape: tuple[int, ...], mesh: str) -> None:
    torch.manual_seed(0)
    eager = Biased(torch.randn(shape, dtype=torch.float64)).double()
    own, x = copy.deepcopy(eager), torch.randn(4, 6, 8, dtype=torch.float64)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    step = mw.compile(own, loss=lambda out, _: out.pow(2).mean(), example=(x,), optimizer=optimizer, mesh=mesh)
    step((x,))
    eager(x).pow(2).mean().backward()
    for p, q in zip(eager.parameters(), own.parameters(), strict=True):
        assert p.grad is not None
        assert torch.allclose(p - 0.1 * p.grad, q, rtol=1e-12, atol=1e-12)
