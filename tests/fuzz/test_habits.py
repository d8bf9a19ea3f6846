"""Programs as users write them train as in eager PyTorch, dropout included: eager mode gets the masks that were drawn.

python -m tests.fuzz.test_habits 17          one program, printed, with its outcome
"""

from __future__ import annotations

import copy
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.fuzz.habit_programs import Program
from tests.fuzz.habits import Drop
from torch import Tensor, nn

import meshweave as mw
from meshweave.errors import CaptureError, MeshweaveError, PlanError, RuleError

SAMPLE, ALL, PARTS = (2, 18, 19, 20, 99), 150, 10
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-3}  # of the largest magnitude of a tensor
AUTOCAST_BOUND = 6e-2
# times what rounding the parameters moves in eager PyTorch; under autocast a rounding is coarse already
MOST_MOVED, MOST_MOVED_AUTOCAST = 30.0, 3.0
REFUSALS = (CaptureError, PlanError, RuleError)  # what a user can mend: an op without a rule, nothing to recompute
Masks = list[dict[str, Tensor]]  # of each step, by the buffer that has them


@dataclass
class Trained:
    losses: list[float]
    tensors: dict[str, Tensor]


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
        **program.options,
    )
    schedule, losses, masks = program.scheduler(optimizer), [], []
    for batch in program.data:
        losses.append(float(step(batch)))
        masks.append({n: v.clone() for n, v in step.buffers().items() if n.endswith("masks")})
        if schedule:
            schedule.step()
    return Trained(losses, {**step.parameters(), **step.buffers()}), masks


def eagerly(program: Program, masks: Masks | None = None, nudge: float = 0.0) -> Trained:
    """In plain PyTorch on one device, with those masks of dropout or its own, from parameters that are off by a share
    `nudge`."""
    model = copy.deepcopy(program.model)
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
    autocast: Any = program.options.get("autocast")
    for batch in program.data:
        optimizer.zero_grad()
        total = 0.0
        for i in range(program.accumulate):
            micro = {k: v.chunk(program.accumulate)[i] for k, v in batch.items()}
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None, cache_enabled=False):
                value = program.loss(model(micro["ids"], micro["x"], micro["mask"]), micro)
            (value / program.accumulate).backward()
            total += value.item() / program.accumulate
        if "clip_grad_norm" in program.options:
            nn.utils.clip_grad_norm_(model.parameters(), program.options["clip_grad_norm"])
        optimizer.step()
        losses.append(total)
        if schedule:
            schedule.step()
    return Trained(losses, {n: v.detach() for n, v in (*model.named_parameters(), *model.named_buffers())})


def differences(program: Program, got: Trained, want: Trained, nudged: Trained) -> list[str]:
    """What is off by more than the bound, and by more than rounding the parameters moves it in eager PyTorch."""
    is_coarse = "autocast" in program.options
    bound, most_moved = (AUTOCAST_BOUND, MOST_MOVED_AUTOCAST) if is_coarse else (BOUNDS[program.dtype], MOST_MOVED)
    losses = {f"loss {i}": [torch.tensor(x) for x in its] for i, its in enumerate(_losses(got, want, nudged))}
    tensors = {n: [x.tensors[n] for x in (got, want, nudged)] for n in want.tensors if n in got.tensors}
    found = [f"{name} on one side only" for name in set(got.tensors) ^ set(want.tensors)]
    for name, (a, b, c) in (losses | tensors).items():
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            found.append(f"{name}: {a.dtype} {tuple(a.shape)} for {b.dtype} {tuple(b.shape)}")
        elif b.numel():
            largest = max(float(b.double().abs().max()), 1e-2)
            error, moved = (float((x.double() - b.double()).abs().max()) / largest for x in (a, c))
            found += [] if error <= max(bound, most_moved * moved) else [f"{name}: off by {error:.3g} ({moved:.3g})"]
    return found


def _losses(*trained: Trained) -> list[tuple[float, ...]]:
    return list(zip(*(x.losses for x in trained), strict=True))


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
        rounding = torch.finfo(program.options.get("autocast", program.dtype)).eps
        return "\n".join(differences(program, got, eagerly(program, masks), eagerly(program, masks, rounding)))


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
