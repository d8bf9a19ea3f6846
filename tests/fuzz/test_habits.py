"""Programs as users write them train as in eager PyTorch, dropout included: eager mode gets the masks that were drawn.

python -m tests.fuzz.test_habits 17          one program, printed, with its outcome
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.fuzz.habit_programs import Program
from tests.fuzz.habits import Drop
from tests.test_autocast import RoundsFirst
from torch import Tensor, nn

import meshweave as mw
from meshweave.errors import CaptureError, MeshweaveError, PlanError, RuleError

SAMPLE, ALL, PARTS = (2, 18, 19, 20, 99), 60, 4
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-3}  # of the largest magnitude of a tensor
AUTOCAST_BOUND = 6e-2
MOST_MOVED = 30.0  # times what rounding the parameters moves eager PyTorch
LINEARS = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)  # the second: of nn.MultiheadAttention
REFUSALS = (CaptureError, PlanError, RuleError)  # what a user can mend: an op without a rule, nothing to recompute
Masks = list[dict[str, Tensor]]  # of each step, by the buffer that has them


@dataclass
class Trained:
    """`in_parts`: into how many batches of its own a batch was cut: one, unless something couples microbatches."""

    losses: list[float]
    tensors: dict[str, Tensor]
    in_parts: int = 1


def compiled(program: Program) -> tuple[Trained, Masks]:
    model = copy.deepcopy(program.model)
    optimizer = program.optimizer(model)
    step = mw.compile(
        model,
        loss=program.loss,
        example=program.data[0],
        optimizer=optimizer,
        mesh=program.mesh,
        accumulate=program.accumulate,
        passes=program.passes or None,
        **program.options,
    )
    schedule, losses, masks = program.scheduler(optimizer), [], []
    for batch in program.data:
        losses.append(float(step(batch)))
        masks.append({n: v.clone() for n, v in step.buffers().items() if n.endswith("masks")})
        if schedule:
            schedule.step()
    in_parts = program.accumulate if step.program.coupling else 1
    return Trained(losses, {**step.parameters(), **step.buffers()}, in_parts), masks


def eagerly(
    program: Program,
    masks: Masks | None = None,
    *,
    in_parts: int | None = None,
    nudge: float = 0.0,
    linear: type[nn.Linear] = nn.Linear,
) -> Trained:
    """In plain PyTorch on one device, each batch in so many microbatches (default: the program's), with those masks of
    dropout or its own, from parameters that are off by a share `nudge`, with another class in place of nn.Linear where
    that is asked for."""
    in_parts = program.accumulate if in_parts is None else in_parts
    model = copy.deepcopy(program.model)
    for module in model.modules():
        if type(module) in LINEARS and linear is not nn.Linear:
            module.__class__ = linear
    with torch.no_grad(), torch.random.fork_rng():
        for x in model.parameters() if nudge else ():
            x.mul_(1 + nudge * torch.randn_like(x))
    for name, module in model.named_modules():
        if isinstance(module, Drop) and masks is not None:
            module.replay = [mask for step in masks for mask in reversed(step[f"{name}.masks"])]
        if isinstance(module, nn.InstanceNorm1d):  # see judge.py: a fault of PyTorch's CPU kernel
            module.register_full_backward_pre_hook(lambda _, grads: tuple(g.contiguous() for g in grads))
    optimizer = program.optimizer(model)
    schedule, losses = program.scheduler(optimizer), []
    autocast: Any = program.options.get("precision")
    for batch in program.data:
        optimizer.zero_grad()
        total = 0.0
        for i in range(in_parts):
            micro = {k: v.chunk(in_parts)[i] for k, v in batch.items()}
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None, cache_enabled=False):
                value = program.loss(model(micro["ids"], micro["x"], micro["mask"]), micro)
            (value / in_parts).backward()
            total += value.item() / in_parts
        if "clip_grad_norm" in program.options:
            nn.utils.clip_grad_norm_(model.parameters(), program.options["clip_grad_norm"])
        optimizer.step()
        losses.append(total)
        if schedule:
            schedule.step()
    return Trained(losses, {n: v.detach() for n, v in (*model.named_parameters(), *model.named_buffers())})


def errors(got: Trained, want: Trained) -> dict[str, float]:
    """How far each loss and tensor is off, of the largest magnitude; infinitely if it is of another form."""
    pairs = [
        (f"loss {i}", torch.tensor(a), torch.tensor(b))
        for i, (a, b) in enumerate(zip(got.losses, want.losses, strict=True))
    ]
    pairs += [(name, got.tensors[name], want.tensors[name]) for name in want.tensors if name in got.tensors]
    found = dict.fromkeys(set(got.tensors) ^ set(want.tensors), math.inf)
    for name, a, b in pairs:
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            found[name] = math.inf
        elif b.numel():
            found[name] = float((a.double() - b.double()).abs().max()) / max(float(b.double().abs().max()), 1e-2)
    return found


def differences(program: Program, got: Trained, masks: Masks) -> list[str]:
    """What is off from eager PyTorch by more than the bound: under autocast also from PyTorch with the only rounding
    that is known, else also by more than rounding the parameters moves PyTorch itself."""
    parts = got.in_parts
    is_coarse, want = "precision" in program.options, eagerly(program, masks, in_parts=parts)
    bound = AUTOCAST_BOUND if is_coarse else BOUNDS[program.dtype]
    off = beyond(errors(got, want), bound)
    if off and is_coarse:
        off = beyond(errors(got, eagerly(program, masks, in_parts=parts, linear=RoundsFirst)), bound)
    elif off:
        moved = errors(eagerly(program, masks, in_parts=parts, nudge=torch.finfo(program.dtype).eps), want)
        off = {name: error for name, error in off.items() if not error <= MOST_MOVED * moved.get(name, 0.0)}
    return [f"{name}: off by {error:.3g}" for name, error in off.items()]


def beyond(errors: dict[str, float], bound: float) -> dict[str, float]:
    return {name: error for name, error in errors.items() if not error <= bound}


def fault(seed: int) -> str:
    """What is wrong with the program of a seed; nothing where it trains as in eager PyTorch or is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own
        program = Program(seed)
        try:
            eagerly(program)
        except Exception:
            return ""  # eager PyTorch cannot run it
        try:
            got, masks = compiled(program)
        except REFUSALS as error:
            return "" if error.hint else f"{program}\n{error}"
        except (MeshweaveError, Exception) as error:
            return f"{program}\n{type(error).__name__}: {error}"
        return "\n".join(differences(program, got, masks))


@pytest.mark.slow_rows("18", "19", "20", "99")
@pytest.mark.parametrize("seed", SAMPLE)
def test_a_program_as_users_write_it_trains_as_in_eager_pytorch(seed: int) -> None:
    assert not fault(seed)


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_programs_as_users_write_them_train_as_in_eager_pytorch_or_are_refused(part: int) -> None:
    faults = {seed: text for seed in range(part, ALL, PARTS) if (text := fault(seed))}
    assert not faults, faults


if __name__ == "__main__":
    print(Program(int(sys.argv[1])), fault(int(sys.argv[1])) or "nothing wrong", sep="\n")
