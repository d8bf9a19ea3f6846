"""The inputs of a captured step: their kinds and names, tensors without data for them, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.batch import Batch
from meshweave.capture.model_checks import check_shapes
from meshweave.capture.optimizers import OptimizerSpec
from meshweave.capture.trace import fake_like
from meshweave.errors import CaptureError
from meshweave.interop.fake import FakeTensorMode
from meshweave.interop.hooks import tensor_hooks
from meshweave.ir.graph import Input, Spec

LOSS_SCALE = "loss_scale"  # the number by which a step multiplies its loss


@dataclass(slots=True)
class StepValues:
    """The inputs of a traced step, by kind and name."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    state: dict[str, Tensor]
    acc: dict[str, Tensor]
    batch: dict[str, Tensor]
    scalars: dict[str, Tensor]


def state_name(slot: str, param: str) -> str:
    """Name of a piece of optimizer state: `exp_avg/model.embed.weight`."""
    return f"{slot}/{param}"


def step_inputs(
    model: nn.Module,
    example: Any,
    optimizer: OptimizerSpec | None,
    is_trained: bool,
    is_accumulated: bool,
    is_scaled: bool,
) -> tuple[Input, ...]:
    """The inputs of a step. In a training step parameters require gradients; a step that accumulates gradients has
    their sums as inputs, one that scales the loss the scale. Raises CaptureError for a model that cannot be
    captured."""

    def spec_like(x: Tensor) -> Spec:
        return Spec(tuple(x.shape), x.dtype)

    check_shapes(model)
    _check_hooks(model)
    params = {n: Input("param", n, spec_like(p), p.requires_grad) for n, p in model.named_parameters()}
    trained = [p for p in params.values() if p.requires_grad and is_trained]
    if is_trained and not trained:
        raise CaptureError("the model has no parameter to train", hint="set requires_grad on the parameters to train")
    batch = Batch.of(example)
    scalars = [Input("scalar", "draw", Spec((), torch.int64))]
    if is_scaled:
        scalars.append(Input("scalar", LOSS_SCALE, Spec((), torch.float32)))
    state: list[Input] = []
    if optimizer is not None:
        scalars += [Input("scalar", name, Spec((), torch.float64)) for name in optimizer.numbers()]
        for p in (p for p in trained if p.name in optimizer.kind_of):
            state += [Input("state", state_name(slot, p.name), spec) for slot, spec in optimizer.slots[p.name].items()]
    acc = [Input("acc", p.name, p.spec) for p in trained] if is_accumulated else []
    buffers = [Input("buffer", n, spec_like(b)) for n, b in model.named_buffers()]
    inputs = [Input("batch", n, spec_like(t)) for n, t in zip(batch.names, batch.tensors, strict=True)]
    return (*params.values(), *buffers, *state, *acc, *inputs, *scalars)


def _check_hooks(model: nn.Module) -> None:
    """Raises CaptureError for hooks on parameters, which run when PyTorch accumulates a gradient."""
    for name, param in model.named_parameters():
        hooks = tensor_hooks(param)
        if hooks:
            raise CaptureError(
                f"the parameter '{name}' has a hook, which a compiled step would not call",
                got=", ".join(hooks),
                expected="parameters without hooks",
                hint="change gradients by clip_grad_norm=, in the loss, or by an autograd.Function in the model",
            )


def fake_inputs(inputs: Sequence[Input], model: nn.Module, example: Any, mode: FakeTensorMode) -> list[Tensor]:
    real: dict[tuple[str, str], Tensor] = {("param", n): p for n, p in model.named_parameters()}
    real |= {("buffer", n): b for n, b in model.named_buffers()}
    real |= {("batch", n): t for n, t in zip(Batch.of(example).names, Batch.of(example).tensors, strict=True)}
    fakes = []
    for item in inputs:
        like = real.get((item.kind, item.name))
        if like is None:
            like = torch.empty(item.spec.shape, dtype=item.spec.dtype, device="meta")
        fakes.append(fake_like(mode, like).requires_grad_(item.kind == "batch" and like.requires_grad))
    return fakes


def by_kind(inputs: Sequence[Input], flat: Sequence[Tensor]) -> StepValues:
    """The values of the inputs, in their order."""
    values: dict[str, dict[str, Tensor]] = {k: {} for k in ("param", "buffer", "state", "acc", "batch", "scalar")}
    for item, value in zip(inputs, flat, strict=True):
        values[item.kind][item.name] = value
    return StepValues(*values.values())


def rebuild_batch(batch: Batch, values: StepValues) -> Any:
    """The batch in the form that forward takes, from the step's values."""
    return batch.rebuild([values.batch[name] for name in batch.names])
