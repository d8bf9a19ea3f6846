"""Ordinary settings of training in random combinations: precision, checkpointing, microbatches, mesh, schedule, passes.

python -m tests.fuzz.test_settings 17          one combination, printed, with its outcome
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from tests.models import hugging_face
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import meshweave as mw
from meshweave.errors import CaptureError, MeshweaveError, PlanError, RuleError
from meshweave.whatif import simulate

SAMPLE, ALL, PARTS = (13, 14, 15), 60, 4
ROWS, STEPS = 12, 3
REFUSALS = (CaptureError, PlanError, RuleError)  # what a user can mend
BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-4}  # of losses; parts of steps are float32 in any model
AUTOCAST_BOUND = 2e-2
STAGES = {"interleaved": "stages:pp:2", "zbv": "stages:pp:2:v", "dualpipev": "stages:pp:2:v"}


class Stack(nn.Module):
    """Layers of PyTorch's own classes between two Linears, or one table of embeddings at both ends."""

    def __init__(self, layer: Callable[[], nn.Module], number: int, is_recomputed: bool, is_tied: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(33, 16) if is_tied else nn.Linear(8, 16)
        self.layers = nn.ModuleList(layer() for _ in range(number))
        self.last = nn.Linear(16, 33, bias=not is_tied)
        self.is_recomputed = is_recomputed
        if is_tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.is_recomputed else layer(x))
        result: Tensor = self.last(x)
        return result


def mlp() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)


def tokens_loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), batch["y"].flatten())


class Settings:
    """Drawn for a seed."""

    def __init__(self, seed: int) -> None:
        chance = Random(seed)
        self.seed = seed
        self.kind = chance.choice(["mlp", "encoder", "tied", "llama", "qwen2", "vit"])
        self.is_recomputed = chance.random() < 0.5
        self.dtype = chance.choice([torch.float64, torch.float32])
        self.autocast = chance.choice([None, torch.bfloat16]) if self.dtype == torch.float32 else None
        meshes = ["dp=2", "fsdp=2", "fsdp=4", "tp=2", "dp=2,tp=2", "fsdp=2,tp=2", "dp=2,fsdp=2"]
        self.mesh = chance.choice([*meshes, *["pp=2", "pp=2,fsdp=2", "pp=2,dp=2"] * 2])
        self.pipeline = None
        if "pp" in self.mesh:
            self.pipeline = chance.choice([None, "1f1b", "gpipe", "zb-h1", "interleaved", "zbv", "dualpipev", "best"])
        self.accumulate = chance.choice([2, 4] if self.pipeline else [1, 2, 3])
        self.plan = STAGES.get(self.pipeline or "")
        if self.plan:
            self.plan = "+".join(
                [self.plan, *(f"{axis}:{axis}" for axis in ("dp", "fsdp") if f",{axis}=" in self.mesh)]
            )
        self.passes = chance.choice([
            "none", "default", "default", "prefetch=1", "keep", "recompute=full", "recompute=pointwise",
            "default,recompute=full", "keep,prefetch=1,overlap",
        ])  # fmt: skip
        self.clip = chance.choice([None, 0.5])
        self.optimizer = chance.choice(["adamw", "sgd", "nadam"])

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in vars(self).items())

    def made(self) -> tuple[nn.Module, Any, Callable[..., Any]]:
        """The model, the batch and the loss."""
        number = 4 if self.pipeline in STAGES else 2
        torch.manual_seed(self.seed)
        random = torch.Generator().manual_seed(self.seed)
        if self.kind in ("llama", "qwen2", "vit"):
            model, batch, loss = hugging_face(self.kind, batch=ROWS, heads=4, seq=8, layers=number)
            if self.is_recomputed:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            batch = {n: v.to(self.dtype) if v.is_floating_point() else v for n, v in batch.items()}
            return model.to(self.dtype), batch, loss
        model = Stack(encoder if self.kind == "encoder" else mlp, number, self.is_recomputed, self.kind == "tied")
        x = torch.randn(ROWS, 5, 8, generator=random).to(self.dtype)
        if self.kind == "tied":
            x = torch.randint(0, 33, (ROWS, 5), generator=random)
        y = torch.randint(0, 33, (ROWS, 5), generator=random)
        y[::3, :3] = -100
        return model.to(self.dtype), {"x": x, "y": y}, tokens_loss

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return {"adamw": torch.optim.AdamW, "nadam": torch.optim.NAdam}[self.optimizer](
            model.parameters(), lr=1e-3, eps=1e-5
        )


def compiled(settings: Settings) -> tuple[list[float], int]:
    """The losses of a few steps, and into how many batches of its own a batch was cut."""
    model, batch, loss = settings.made()
    step = mw.compile(
        model,
        loss=loss,
        example=batch,
        optimizer=settings.optimizer_of(model),
        mesh=settings.mesh,
        plan=settings.plan,
        profile="h100",
        passes=settings.passes,
        accumulate=settings.accumulate,
        pipeline=settings.pipeline,
        clip_grad_norm=settings.clip,
        precision=settings.autocast,
    )
    losses = [float(step(batch)) for _ in range(STEPS)]
    found = simulate(step.program, "h100")
    for role in found.roles:
        assert role.compute_seconds + role.exposed_seconds + role.idle_seconds == pytest.approx(found.seconds)
    return losses, settings.accumulate if step.program.coupling else 1


def eagerly(settings: Settings, in_parts: int) -> list[float]:
    model, whole, loss = settings.made()
    optimizer, losses = settings.optimizer_of(model), []
    for _ in range(STEPS):
        total = 0.0
        for number in range(in_parts):
            batch = {name: value.chunk(in_parts)[number] for name, value in copy.copy(whole).items()}
            with torch.autocast("cpu", dtype=settings.autocast, enabled=settings.autocast is not None):
                value = loss(model(batch["x"]) if "x" in batch else model(**batch), batch) / in_parts
            value.backward()
            total += value.item()
        if settings.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def fault(seed: int) -> str:
    """What is wrong with the combination of a seed; nothing where it trains as in eager PyTorch or is refused."""
    settings = Settings(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found, in_parts = compiled(settings)
        except REFUSALS as error:
            return "" if error.hint else f"{settings}\n{error}"
        except (MeshweaveError, Exception) as error:
            return f"{settings}\n{type(error).__name__}: {error}"
        expected = eagerly(settings, in_parts)
    bound = BOUNDS[settings.dtype] if settings.autocast is None else AUTOCAST_BOUND
    is_near = found == pytest.approx(expected, rel=bound)
    return "" if is_near else f"{settings}\nlosses {found} for {expected}"


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_combination_of_settings_trains_as_in_eager_pytorch(seed: int) -> None:
    assert not fault(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_combinations_of_settings_train_as_in_eager_pytorch_or_are_refused(part: int) -> None:
    faults = {seed: text for seed in range(part, ALL, PARTS) if (text := fault(seed))}
    assert not faults, faults


if __name__ == "__main__":
    print(Settings(int(sys.argv[1])), fault(int(sys.argv[1])) or "nothing wrong", sep="\n")
