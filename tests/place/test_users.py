"""Dims that an op makes from nothing take the sharding that users of the result have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.training import assert_equals_eager
from torch import Tensor, nn
from torch.nn import functional as F

from meshweave.ir.graph import Spec
from meshweave.place.plans import Plan

VOCABULARY, TOKENS = 1021, 12  # a prime: pieces are uneven


class Head(nn.Module):
    """Logits [tokens, vocabulary] and a loss of them, vocabulary-parallel over tp."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.out = nn.Linear(16, VOCABULARY)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.out(x), labels)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=3)


def one_hot(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.sigmoid() - F.one_hot(labels, VOCABULARY)).square().sum()


def compared(logits: Tensor, labels: Tensor) -> Tensor:
    hot = torch.where(torch.arange(VOCABULARY) == labels.unsqueeze(-1), 2.0, -0.1)
    return (logits * hot).mean() + logits.logsumexp(-1).mean()


def scattered(logits: Tensor, labels: Tensor) -> Tensor:
    several = torch.stack([labels, (labels + 7) % VOCABULARY], 1)
    return (logits * torch.zeros_like(logits).scatter(1, several, 0.5) * labels.unsqueeze(-1)).square().mean()


@pytest.mark.slow_rows("cross_entropy-tp=2", "one_hot-fsdp=2,tp=3", "compared-tp=2", "scattered-fsdp=2,tp=3")
@pytest.mark.parametrize("mesh", ["tp=2", "fsdp=2,tp=3"])
@pytest.mark.parametrize("loss", [cross_entropy, one_hot, compared, scattered])
def test_no_device_makes_a_vocabulary_that_the_logits_are_sharded_by(
    loss: Callable[[Tensor, Tensor], Tensor], mesh: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    data = [
        {
            "x": torch.randn(TOKENS, 16, generator=generator),
            "labels": torch.randint(0, VOCABULARY, (TOKENS,), generator=generator),
        }
        for _ in range(2)
    ]
    plan = Plan.tp("tp", {"out": "colwise"}) + (Plan.fsdp("fsdp") if "fsdp" in mesh else Plan())
    step = assert_equals_eager(Head(loss), data, mesh, loss=lambda out, _: out, plan=plan)
    for node in step.program.placed.graph.nodes:
        spec = node.meta.get("spec")
        if isinstance(spec, Spec) and VOCABULARY in spec.shape and spec.num_elements > VOCABULARY:
            assert "tp" in node.meta["layout"].sharded_axes, f"{node.name} {spec} {node.meta['layout']}"
