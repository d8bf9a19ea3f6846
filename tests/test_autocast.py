"""Where a step under bf16 autocast rounds other than eager PyTorch: two places, and no other (docs/guarantees.md)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.training import assert_tensors
from torch import Tensor, nn

import meshweave as mw

ROWS = 8


class Net(nn.Module):
    """Matmuls with and without a bias, attention, norms and what autocast runs in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16, bias=False)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        scores = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, dim=-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return self.head(x + self.down(F.gelu(self.up(x))))


class RoundsFirst(nn.Linear):
    """A Linear whose product is rounded to bf16 before the bias is added."""

    def forward(self, x: Tensor) -> Tensor:
        product = x.bfloat16() @ self.weight.bfloat16().t()
        return product if self.bias is None else product + self.bias.bfloat16()


def loss_of(out: Tensor, tokens: Tensor, rows: int = ROWS) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), tokens.flatten(), reduction="sum") / (rows * tokens.shape[1])


def nets() -> tuple[Net, Net, Tensor]:
    """A model, its twin with `RoundsFirst`, and tokens."""
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if type(module) is nn.Linear:
            module.__class__ = RoundsFirst
    return model, twin, torch.randint(0, 32, (ROWS, 6))


def eager(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(tokens), tokens)
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, [*model.parameters()]), strict=True))


def gradients(model: nn.Module, tokens: Tensor, mesh: str) -> dict[str, Tensor]:
    options: dict[str, Any] = {"mesh": mesh, "precision": torch.bfloat16, "profile": "alpha-beta"}
    step = mw.compile(
        copy.deepcopy(model), loss=loss_of, example=tokens, run=mw.RunOptions(keep_gradients=True), **options
    )
    step(tokens)
    return step.gradients()


def test_on_one_device_a_bias_is_added_to_a_product_that_is_rounded() -> None:
    """The only place: all gradients are those of eager PyTorch with such a Linear, to float32's rounding."""
    model, twin, tokens = nets()
    found = gradients(model, tokens, "dp=1")
    assert_tensors(found, eager(twin, tokens), 1e-6)
    own = eager(model, tokens)
    assert max(float((found[n] - g).abs().max()) for n, g in own.items()) > 1e-5  # so the difference is seen here


@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=4"])
def test_over_devices_gradients_of_matmuls_are_summed_in_bf16(mesh: str) -> None:
    """The other place: each device rounds its rows' gradient of a weight to bf16, as backward gives it; the sum over
    devices is rounded to bf16 again. Other gradients are summed in float32."""
    model, twin, tokens = nets()
    num = int(mesh[-1])
    parts = [eager(twin, rows) for rows in tokens.chunk(num)]
    linear = {
        f"{name}.{p}" for name, m in model.named_modules() if isinstance(m, nn.Linear) for p, _ in m.named_parameters()
    }
    expected = {}
    for name in parts[0]:
        total = torch.stack([part[name] for part in parts]).sum(0)
        expected[name] = total.bfloat16().float() if name in linear else total
    found = gradients(model, tokens, mesh)
    assert_tensors(found, expected, 1e-6)


def test_what_tensor_parallelism_sums_is_within_the_rounding_of_its_parts() -> None:
    model, twin, tokens = nets()
    expected = eager(twin, tokens)
    for name, value in gradients(model, tokens, "tp=2").items():
        worst = float((value - expected[name]).abs().max() / expected[name].abs().max())
        assert worst < 2**-5, (name, worst)  # a handful of roundings to 8 bits on the way back
