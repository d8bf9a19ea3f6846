"""A step trained twice, by eager torch and by meshweave, for tests that compare the two."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn

import meshweave as mw
from meshweave.build import build_program
from meshweave.capture.batch import call_model
from meshweave.capture.module_state import module_roots
from meshweave.capture.step import StepSource
from meshweave.errors import StepError
from meshweave.ir.graph import origin_of
from meshweave.program import Program

MakeOptimizer = Callable[[Iterable[Any]], torch.optim.Optimizer]


def sgd(params: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def mse(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return ((out - batch["y"]) ** 2).mean()


def batches(num: int, shape: Sequence[int], target: Sequence[int], seed: int = 0) -> list[dict[str, Tensor]]:
    """`num` batches of x and y, each its own values."""
    made = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(*shape, generator=made), "y": torch.randn(*target, generator=made)} for _ in range(num)]


def train_eagerly(
    model: nn.Module,
    data: Sequence[Any],
    loss: Callable[[Any, Any], Tensor] = mse,
    make: MakeOptimizer = sgd,
    after_backward: Callable[[nn.Module], Any] = lambda model: None,
) -> tuple[nn.Module, list[float]]:
    """A trained copy of the model, and the losses."""
    model = copy.deepcopy(model)
    optimizer = make(model.parameters())
    losses = []
    for batch in data:
        optimizer.zero_grad()
        value = loss(call_model(model, batch), batch)
        value.backward()
        after_backward(model)
        optimizer.step()
        losses.append(value.item())
    return model, losses


def train(
    model: nn.Module,
    data: Sequence[Any],
    mesh: str = "",
    loss: Callable[[Any, Any], Tensor] = mse,
    make: MakeOptimizer = sgd,
    **options: Any,
) -> tuple[mw.TrainStep, list[float]]:
    """A compiled step after it has trained a copy of the model on `data`, and the losses."""
    model = copy.deepcopy(model)
    step = mw.compile(model, loss=loss, example=data[0], optimizer=make(model.parameters()), mesh=mesh, **options)
    return step, [float(step(batch)) for batch in data]


_PROGRAMS: dict[Any, Program] = {}


def compile_once(key: Any, model: nn.Module, **options: Any) -> mw.TrainStep:
    """`mw.compile`, whose program (of the example, not of other batches) is built once a process for all models alike
    that are given the same key. Not for models whose Python state changes between steps, and nothing may change the
    program's graphs."""

    def build(source: StepSource, *rest: Any) -> Program:
        if rest[-1] is not None:  # it shares the state of another program
            return build_program(source, *rest)
        if key not in _PROGRAMS:
            _PROGRAMS[key] = build_program(source, *rest)
        contract = copy.copy(_PROGRAMS[key].contract)
        contract.roots = module_roots(model=source.model, loss=source.loss, forward=source.forward)
        return replace(_PROGRAMS[key], contract=contract)

    with patch.object(importlib.import_module("meshweave.compile"), "build_program", build):
        return mw.compile(model, **options)


def assert_trained_alike(step: mw.TrainStep, losses: list[float], eager: nn.Module, expected: list[float]) -> None:
    """Losses, every parameter and every buffer to float32 rounding."""
    torch.testing.assert_close([float(loss) for loss in losses], expected, rtol=2e-6, atol=1e-6)
    assert_tensors(step.parameters(), {n: p.detach() for n, p in eager.named_parameters()})
    assert_tensors(step.buffers(), dict(eager.named_buffers()))


def assert_tensors(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Same names, and each tensor within `tolerance` of the largest magnitude of the expected one."""
    assert set(found) == set(expected)
    for name, want in expected.items():
        scale = max(float(want.abs().max()) if want.numel() else 0.0, 1e-3)
        torch.testing.assert_close(found[name], want, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}")


def assert_equals_eager(model: nn.Module, data: Sequence[Any], mesh: str = "", **options: Any) -> mw.TrainStep:
    """Train both ways; losses, parameters and buffers agree. Returns the compiled step."""
    known = {k: options[k] for k in ("loss", "make") if k in options}
    eager, expected = train_eagerly(model, data, **known)
    step, losses = train(model, data, mesh, **options)
    assert_trained_alike(step, losses, eager, expected)
    return step


def assert_equals_one_device(model: nn.Module, data: Sequence[Any], mesh: str, **options: Any) -> mw.TrainStep:
    """Train a float64 model on one device and on `mesh`; losses and parameters agree. Returns the step of `mesh`."""
    alone, expected = train(model, data)
    step, losses = train(model, data, mesh, **options)
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-10)
    assert_tensors(step.parameters(), alone.parameters(), 1e-10)
    return step


class Breaks:
    """A meter that fails once, on one held device in one phase."""

    def __init__(self, index: int, phase: str) -> None:
        self.index, self.phase, self.broken = index, phase, False

    def on_value(self, index: int, node: fx.Node, value: Any) -> None:
        if not self.broken and (index, origin_of(node).phase) == (self.index, self.phase):
            self.broken = True
            raise StepError("the device is on fire", where=f"device {index}")

    def freed(self, index: int, node: fx.Node) -> None:
        pass
