"""Gradients that are rounded on their way to where they are stored: the sum is scattered before it is rounded."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import meshweave as mw


class Wide(nn.Module):
    """Multiplies in float32 by a bfloat16 weight [out, in], which is transposed, then cast, or the other way round."""

    def __init__(self, size: int, casts_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(size, size) / size**0.5).bfloat16())
        self.casts_first = casts_first

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.float().t() if self.casts_first else self.weight.t().float())


@pytest.mark.parametrize("casts_first", [False, True])
def test_a_gradient_that_is_rounded_is_reduce_scattered(casts_first: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Wide(256, casts_first) for _ in range(3)))
    eager, batch = copy.deepcopy(model), (torch.randn(4096, 256),)
    step = mw.compile(
        model,
        loss=lambda out, _: out.square().mean(),
        example=batch,
        mesh="fsdp=4",
        run=mw.RunOptions(keep_gradients=True),
    )
    rows = [row for row in step.explain() if row.phase == "backward" and row.value.endswith("[256,256]")]
    kinds = Counter(text.partition("(")[0].split()[0] for row in rows for text in row.steps)
    assert kinds == {"all_gather": 2, "reduce_scatter": 3}
    loss = eager(*batch).square().mean()
    loss.backward()
    assert step(batch) == pytest.approx(loss.item(), rel=1e-5)
    for name, gradient in step.gradients().items():
        torch.testing.assert_close(gradient, eager.get_parameter(name).grad, rtol=1e-2, atol=1e-5)
