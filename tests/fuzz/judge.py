"""The judge: the same program as a user of eager PyTorch would write it, and the comparison."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tests.fuzz.programs import Program
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import meshweave as mw

# Largest difference allowed, as a part of a tensor's largest magnitude (or of 1e-2, below that). Learning rates and
# corrections of Adam are float32 numbers in a step, whatever the model's dtype: 6e-8 of an update, which shows up to
# 3e-7 in the gradients of the next steps.
BOUNDS = {torch.float64: 2e-6, torch.float32: 3e-4}
AUTOCAST_BOUND = 6e-2


@dataclass
class Trained:
    """What a training run leaves behind: losses, gradients of the last step, parameters, buffers, the clip norm.
    `in_parts`: into how many batches of its own a batch was cut: one, unless something couples microbatches."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    in_parts: int = 1


def eagerly(program: Program, in_parts: int | None = None, linear: type[nn.Linear] = nn.Linear) -> Trained:
    """The program in plain PyTorch on one device, each batch in so many microbatches (default: the program's), with
    another class in place of nn.Linear where that is asked for. What PyTorch warns of itself is not judged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _trained(program, in_parts, linear)


def _trained(program: Program, in_parts: int | None, linear: type[nn.Linear]) -> Trained:
    settings, found = program.settings, Trained()
    in_parts = settings.accumulate if in_parts is None else in_parts
    model = copy.deepcopy(program.model)
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = linear
    _with_contiguous_gradients(model)
    optimizer, loss = program.make_optimizer(model), program.loss(model)
    autocast = settings.options.get("precision")
    for batch in program.batches:
        model.zero_grad(set_to_none=True)
        total = 0.0
        for micro in _micros(batch, in_parts):
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None, cache_enabled=False):
                out = model(micro["x"] if isinstance(micro, dict) else micro[0])
                value = loss(out, micro)
            (value / in_parts).backward()
            total += value.item() / in_parts
        found.losses.append(total)
        found.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if "clip_grad_norm" in settings.options:
            norm = nn.utils.clip_grad_norm_(model.parameters(), settings.options["clip_grad_norm"])
            found.norms.append(norm.item())
        if optimizer is not None:
            optimizer.step()
    found.parameters = {n: p.detach() for n, p in model.named_parameters()}
    found.buffers = dict(model.named_buffers())
    return found


def _with_contiguous_gradients(model: nn.Module) -> None:
    """PyTorch 2.13 itself is wrong here: the CPU kernel of batch_norm's backward pass, on a batch of one sample, reads
    a gradient that lies in memory as channels-last as if it did not. (instance_norm makes any batch one sample.)"""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.register_full_backward_pre_hook(lambda _, grads: tuple(g.contiguous() for g in grads))


def _micros(batch: Any, count: int) -> list[Any]:
    if isinstance(batch, dict):
        parts = [v.chunk(count) for v in batch.values()]
        return [dict(zip(batch, part, strict=True)) for part in zip(*parts, strict=True)]
    return list(zip(*(v.chunk(count) for v in batch), strict=True))


def compiled(program: Program) -> Trained:
    """The program through `meshweave.compile`."""
    settings, found = program.settings, Trained()
    model = copy.deepcopy(program.model)
    optimizer = program.make_optimizer(model)
    step = mw.compile(
        model,
        loss=program.loss(model),
        example=program.batches[0],
        optimizer=optimizer,
        mesh=settings.mesh,
        plan=settings.plan,
        accumulate=settings.accumulate,
        passes=settings.passes or None,
        **settings.options,
    )
    for batch in program.batches:
        found.losses.append(float(step(batch)))
        if "clip_grad_norm" in settings.options:
            found.norms.append(step.metrics["grad_norm"])
    if optimizer is None or "run" in settings.options:
        found.gradients = step.gradients()
    found.parameters, found.buffers = step.parameters(), step.buffers()
    found.in_parts = settings.accumulate if step.program.coupling else 1
    return found


def widened(program: Program) -> Program:
    """The program in float64."""
    model = program.model.double()
    batches = [pytree.tree_map(lambda v: v.double() if v.is_floating_point() else v, b) for b in program.batches]
    return replace(program, model=model, batches=batches, settings=replace(program.settings, dtype=torch.float64))


def differences(program: Program, got: Trained, expected: Trained, share: float = 1.0) -> list[str]:
    """What differs by more than a share of the bound, the largest first; nothing where the two agree."""
    bound = AUTOCAST_BOUND if "precision" in program.settings.options else BOUNDS[program.settings.dtype]
    found: list[tuple[float, str]] = []
    for kind in ("losses", "norms"):
        for i, (a, b) in enumerate(zip(getattr(got, kind), getattr(expected, kind), strict=True)):
            found.append((_error(torch.tensor(a), torch.tensor(b)), f"{kind}[{i}]: {a} for {b}"))
    for kind in ("gradients", "parameters", "buffers"):
        have, want = getattr(got, kind), getattr(expected, kind)
        if kind == "gradients" and not have and "run" not in program.settings.options:
            continue
        scale = (
            max((float(v.abs().max()) for v in want.values() if v.numel()), default=0.0) if kind == "gradients" else 0
        )
        if set(have) != set(want):
            found.append((float("inf"), f"{kind}: {sorted(set(have) ^ set(want))} on one side only"))
        for name in set(have) & set(want):
            if have[name].dtype != want[name].dtype or have[name].shape != want[name].shape:
                found.append((float("inf"), f"{kind} {name}: {have[name].dtype} {tuple(have[name].shape)}"))
                continue
            error = _error(have[name], want[name], 0.1 * scale)
            found.append((error, f"{kind} {name}: off by {error:.3g} of its magnitude"))
    return [text for error, text in sorted(found, reverse=True) if not error <= share * bound]


def _error(got: Tensor, want: Tensor, least: float = 0.0) -> float:
    """The largest difference over the largest magnitude."""
    if not want.numel():
        return 0.0
    scale = max(float(want.double().abs().max()), 1e-2, least)
    return float((got.double() - want.double()).abs().max()) / scale
