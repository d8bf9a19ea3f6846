"""Numerics: a step on a mesh against the same step on one device, and that against eager PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshweave.capture.step import call_model, state_name
from meshweave.capture.trace import GlobalRandom
from meshweave.errors import MeshweaveError
from meshweave.ir.mesh import Mesh

# AdamW divides a gradient by its own size, so the rounding of a tiny gradient moves a parameter by up to the learning
# rate, whatever is right about the step. At 1e-4 three steps keep that below the bounds; at 1e-3 they would not.
CHECK_LR = 1e-4
CHECK_STEPS = 3

Loss = Callable[[Any, Any], Tensor]
MakeModel = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


class Trainee(Protocol):
    """What is compared: a training step with its state. `meshweave.Step` is one."""

    def __call__(self, batch: Any) -> float: ...
    def gradients(self) -> dict[str, Tensor]: ...
    def parameters(self) -> dict[str, Tensor]: ...
    def buffers(self) -> dict[str, Tensor]: ...
    def optimizer_state(self) -> dict[str, Tensor]: ...


Compiler = Callable[[nn.Module, torch.optim.Optimizer, Mesh, Any], Trainee]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a step does beside the model: the same fields as `meshweave.compile` has.

    `split(batch)` are the microbatches of a batch.
    """

    loss: Loss
    split: Callable[[Any], Sequence[Any]] = lambda batch: [batch]
    clip_grad_norm: float | None = None
    autocast: torch.dtype | None = None
    seed: int = 0
    forward: Callable[[nn.Module, Any], Any] = call_model


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest errors allowed: of the loss, relative; of a tensor, as part of its largest magnitude."""

    loss: float = 1e-6
    tensor: float = 1e-5

    @staticmethod
    def of(autocast: torch.dtype | None) -> Bounds:
        """Wider under autocast, by the ratio of the two units of rounding: 2**-8 for bfloat16, 2**-24 for float32."""
        if autocast is None:
            return Bounds()
        ratio = torch.finfo(autocast).eps / torch.finfo(torch.float32).eps
        return Bounds(Bounds.loss_default() * ratio, Bounds.tensor_default() * ratio)
