"""The runs that a check compares: of a compiled step, of eager PyTorch, and of torch's optimizer by itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshweave.capture.batch import call_model, in_float64, split_loss
from meshweave.capture.param_dtype import ParamDtype
from meshweave.capture.step import Precision, Substituted, cast_for_eager
from meshweave.capture.step_inputs import state_name
from meshweave.capture.trace import GlobalRandom
from meshweave.interop import pytree
from meshweave.interop.fake import DispatchMode
from meshweave.ir.mesh import Mesh

# An optimizer's update, and the effect of a wrong term in it, grow with the learning rate: at 0.03 the weight decay of
# AdamW (0.01) moves a parameter by 3e-4 of itself in a step, 300 times the rounding of float32. Gradients are fixed in
# this step, so that no difference feeds back through the model.
VISIBLE_LR = 0.03
CHECK_STEPS = 3

MakeModel = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


class Trainee(Protocol):
    """The object under comparison: a training step with its state, full tensors by name. `meshweave.TrainStep` is
    one."""

    def __call__(self, batch: Any) -> float | Tensor: ...
    def gradients(self) -> dict[str, Tensor]: ...
    def parameters(self) -> dict[str, Tensor]: ...
    def buffers(self) -> dict[str, Tensor]: ...
    def optimizer_state(self) -> dict[str, Tensor]: ...


Compiler = Callable[[nn.Module, torch.optim.Optimizer, Mesh, Any], Trainee]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a step does besides the model, as in `meshweave.compile`. `split(batch)` returns the microbatches of a
    batch."""

    loss: Callable[[Any, Any], Tensor]
    split: Callable[[Any], Sequence[Any]] = lambda batch: [batch]
    clip_grad_norm: float | None = None
    autocast: torch.dtype | None = None
    seed: int = 0
    forward: Callable[[nn.Module, Any], Any] = call_model
    param_dtype: ParamDtype = None


@dataclass(frozen=True, slots=True)
class Training:
    """A training run, in whatever way it is executed: `steps` steps, of which step i gets `batches(i)`. `make_model()`
    returns the model and its optimizer, the same at every call."""

    make_model: MakeModel
    batches: Callable[[int], Any]
    recipe: Recipe
    steps: int = CHECK_STEPS

    def record(self, trainee: Trainee) -> RunRecord:
        return record(trainee, self.batches, self.steps)

    def wide(self) -> Training:
        """The same in float64, without autocast."""

        def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
            model, optimizer = self.make_model()
            return model.double(), optimizer

        recipe = replace(self.recipe, autocast=None)
        return replace(self, make_model=make_model, batches=lambda i: in_float64(self.batches(i)), recipe=recipe)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The results of a run: its losses, and tensors by (kind, name), including those before it began."""

    losses: tuple[float, ...]
    tensors: dict[tuple[str, str], Tensor]

    @property
    def start(self) -> dict[str, Tensor]:
        return {name: t for (kind, name), t in self.tensors.items() if kind == "initial"}


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU."""
    return {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}


def record(trainee: Trainee, batches: Callable[[int], Any], steps: int) -> RunRecord:
    """Train for some steps, and copy the results."""
    losses: list[float] = []
    tensors = {("initial", n): t for n, t in copied(trainee.parameters()).items()}
    for i in range(steps):
        losses.append(float(trainee(batches(i))))
        if i in (0, steps - 1):
            tensors |= {(f"gradient {i + 1}", n): t for n, t in copied(trainee.gradients()).items()}
    ends = {"parameter": trainee.parameters, "buffer": trainee.buffers, "state": trainee.optimizer_state}
    tensors |= {(kind, n): t for kind, read in ends.items() for n, t in copied(read()).items()}
    return RunRecord(tuple(losses), tensors)


@dataclass(slots=True)
class Updates:
    """A trainee, and beside it torch's own optimizer, which gets the same gradients at every step. `optimizer` is the
    one that the trainee was compiled with (its learning rates are used), `model` and `own` are another model and
    optimizer with the same parameters."""

    trainee: Trainee
    optimizer: torch.optim.Optimizer
    model: nn.Module
    own: torch.optim.Optimizer
    clip_grad_norm: float | None

    def __call__(self, batch: Any) -> float:
        loss = float(self.trainee(batch))
        gradients = self.trainee.gradients()
        for name, param in self.model.named_parameters():
            gradient = gradients.get(name)
            param.grad = None if gradient is None else gradient.detach().to(param, copy=True)
        if self.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad_norm)
        self.own.step()
        return loss

    def gradients(self) -> dict[str, Tensor]:
        return self.trainee.gradients()

    def parameters(self) -> dict[str, Tensor]:
        return self.trainee.parameters()

    def buffers(self) -> dict[str, Tensor]:
        return self.trainee.buffers()

    def optimizer_state(self) -> dict[str, Tensor]:
        return self.trainee.optimizer_state()

    def visible_step(self, batch: Any) -> tuple[RunRecord, RunRecord]:
        """Another step, at a rate at which every term of the update is visible: the values of the trainee and of
        torch's optimizer after it."""
        for group in (*self.optimizer.param_groups, *self.own.param_groups):
            group["lr"] = max(float(group["lr"]), VISIBLE_LR)
        self(batch)
        params = dict(self.model.named_parameters())
        updated = self.trainee.parameters(), self.trainee.optimizer_state()
        return _updated(*updated), _updated(params, _state_of(self.model, self.own))


def _updated(params: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> RunRecord:
    kinds = {"updated parameter": params, "updated state": state}
    return RunRecord((), {(kind, n): t for kind, tensors in kinds.items() for n, t in copied(tensors).items()})


def _state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    kept = {n: optimizer.state.get(p, {}) for n, p in model.named_parameters()}
    return {
        state_name(slot, n): t
        for n, slots in kept.items()
        for slot, t in slots.items()
        if slot != "step" and isinstance(t, Tensor)
    }


class Eager:
    """The plain model and the torch optimizer, run eagerly on the random numbers of a captured step."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        watch: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.model, self.optimizer, self.recipe, self.num_steps = model, optimizer, recipe, 0
        self.watch = watch or nullcontext()
        precision = Precision(autocast=recipe.autocast, param_dtype=recipe.param_dtype)
        self.scaler = torch.amp.GradScaler("cpu", enabled=precision.scales_loss(model))

    def __call__(self, batch: Any) -> float:
        micros = self.recipe.split(batch)
        self.optimizer.zero_grad()
        losses = []
        for i, micro in enumerate(micros):
            draw = torch.tensor(self.num_steps * len(micros) + i)  # counted as in the runtime
            with GlobalRandom(draw, self.recipe.seed), self.watch:
                cast = cast_for_eager(self.model, self.recipe.param_dtype)
                losses.append(Substituted.run(self.model, cast, partial(self._backward, micro, len(micros))))
        self.scaler.unscale_(self.optimizer)
        self._gradients = copied({n: p.grad for n, p in self.model.named_parameters() if p.grad is not None})
        if self.recipe.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.num_steps += 1
        return sum(losses) / len(losses)

    def _backward(self, micro: Any, parts: int, model: nn.Module) -> float:
        with self._autocast():
            loss, _ = split_loss(self.recipe.loss(self.recipe.forward(model, micro), micro))
        self.scaler.scale(loss / parts).backward()
        return float(loss.detach())

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.recipe.autocast
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype, cache_enabled=False)

    def gradients(self) -> dict[str, Tensor]:
        return self._gradients

    def parameters(self) -> dict[str, Tensor]:
        return dict(self.model.named_parameters())

    def buffers(self) -> dict[str, Tensor]:
        return dict(self.model.named_buffers())

    def optimizer_state(self) -> dict[str, Tensor]:
        return _state_of(self.model, self.optimizer)


class Narrowest(DispatchMode):
    """While active, records whether an op returns floating-point numbers of less than float64."""

    def __init__(self) -> None:
        super().__init__()
        self.op = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64:
                self.op = self.op or f"{func} of {str(leaf.dtype).removeprefix('torch.')}"
        return result


@dataclass(frozen=True, slots=True)
class Exact:
    """The eager run in float64: its record, or why there is none, and an op that computes in less than float64, or
    ""."""

    record: RunRecord | None
    problem: str = ""
    narrow: str = ""

    @staticmethod
    def of(training: Training) -> Exact:
        wide, narrowest = training.wide(), Narrowest()
        try:
            model, optimizer = wide.make_model()
            return Exact(wide.record(Eager(model, optimizer, wide.recipe, narrowest)), "", narrowest.op)
        except Exception as error:  # whatever error the model raises in float64
            return Exact(None, f"{type(error).__name__}: {error}".splitlines()[0])


def run_perturbed(training: Training) -> RunRecord:
    """The eager run from parameters that are changed by a unit in the last place: what this changes, rounding changes,
    too."""
    model, optimizer = training.make_model()
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in (p for p in model.parameters() if p.is_floating_point()):
            sign = torch.randint(0, 2, param.shape, generator=chance).to(param) * 2 - 1
            param.mul_(1 + sign * torch.finfo(param.dtype).eps)
    return training.record(Eager(model, optimizer, training.recipe))
