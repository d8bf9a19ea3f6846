"""Numerics: a step on a mesh against the same step on one device, and that against eager PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshweave.capture.step import Substituted, call_model, cast_for_eager, state_name
from meshweave.capture.trace import GlobalRandom
from meshweave.errors import MeshweaveError
from meshweave.ir.mesh import Mesh

# AdamW divides a gradient by its own size, so that the rounding of a tiny gradient moves a parameter by up to the
# learning rate, however right the step is. Worst parameter of hf:llama on dp=2,tp=2 after 3 steps (torch 2.13, CPU,
# November 2026): 3.0e-6 at 3e-5, just beyond the bound of 1e-5 at 1e-4. A wrong update still shows: at 3e-5 three steps
# move weights of at most 0.08 by up to 9e-5, a hundred times the bound.
CHECK_LR = 3e-5
CHECK_STEPS = 3

# Two float32 runs that add in other orders err independently, so their largest errors differ by chance, the more the
# fewer elements a tensor has. Largest ratio seen over the models and meshes of benchmarks/check_matrix.py: 8.0, a key
# bias of qwen2 (torch 2.13, CPU, November 2026); twice that leaves room for other machines. What is wrong is off by
# thousands: the noise of such a tensor is 1e-3 of what an update moves.
_ROUNDING = 16.0

MakeModel = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]


class Trainee(Protocol):
    """What is compared: a training step with its state, full tensors by name. `meshweave.TrainStep` is one."""

    def __call__(self, batch: Any) -> float: ...
    def gradients(self) -> dict[str, Tensor]: ...
    def parameters(self) -> dict[str, Tensor]: ...
    def buffers(self) -> dict[str, Tensor]: ...
    def optimizer_state(self) -> dict[str, Tensor]: ...


Compiler = Callable[[nn.Module, torch.optim.Optimizer, Mesh, Any], Trainee]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a step does beside the model, as in `meshweave.compile`. `split(batch)` are the microbatches of a batch."""

    loss: Callable[[Any, Any], Tensor]
    split: Callable[[Any], Sequence[Any]] = lambda batch: [batch]
    clip_grad_norm: float | None = None
    autocast: torch.dtype | None = None
    seed: int = 0
    forward: Callable[[nn.Module, Any], Any] = call_model
    param_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest errors allowed: of the loss, relative; of a tensor, as a part of its largest magnitude."""

    loss: float = 1e-6
    tensor: float = 1e-5

    @staticmethod
    def under(autocast: torch.dtype | None) -> Bounds:
        """Wider under autocast, by the ratio of the units of rounding: 2**16 for bfloat16 against float32."""
        plain = Bounds()
        if autocast is None:
            return plain
        ratio = torch.finfo(autocast).eps / torch.finfo(torch.float32).eps
        return Bounds(plain.loss * ratio, plain.tensor * ratio)


@dataclass(frozen=True, slots=True)
class TensorError:
    """The largest difference of one tensor between a run and its reference.

    `error` is the largest absolute difference over the reference's largest magnitude (absolute, where that is 0), at
    `index`. `problem` is set where they cannot be compared. `rounding` is set where the error is beyond `bound` but
    one device itself errs as much: its own error against a float64 run, on the same scale.
    """

    run: str
    reference: str
    kind: str
    name: str
    error: float
    bound: float
    index: tuple[int, ...] = ()
    got: float = 0.0
    expected: float = 0.0
    problem: str = ""
    rounding: float | None = None

    @property
    def ok(self) -> bool:
        return not self.problem and (self.error <= self.bound or self.rounding is not None)

    @property
    def badness(self) -> tuple[bool, bool, float]:
        """Sorts the worst last: what fails, then what is excused by rounding, then by error in units of the bound."""
        return not self.ok, self.rounding is not None, math.inf if self.problem else self.error / self.bound

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"ok": self.ok}


@dataclass(frozen=True, slots=True)
class NumericsReport:
    """What a check found, the worst tensors first. `losses` are those of every run, by its name."""

    mesh: str
    num_steps: int
    bounds: Bounds
    losses: Mapping[str, tuple[float, ...]]
    errors: tuple[TensorError, ...]

    @property
    def ok(self) -> bool:
        return bool(self.errors) and all(e.ok for e in self.errors)

    @property
    def failed(self) -> tuple[TensorError, ...]:
        return tuple(e for e in self.errors if not e.ok)

    @property
    def within_rounding(self) -> tuple[TensorError, ...]:
        """Tensors beyond the bound whose reference is no better: see `TensorError.rounding`."""
        return tuple(e for e in self.errors if e.ok and e.rounding is not None)

    def worst(self, kind: str, run: str) -> TensorError | None:
        """The worst tensor of one kind in one run, as the errors are sorted."""
        return next((e for e in self.errors if e.kind == kind and e.run == run), None)

    def _kind_row(self, run: str, kind: str) -> dict[str, Any]:
        """Largest error of one kind in one run, without the tensors that rounding excuses."""
        rows = [e for e in self.errors if (e.run, e.kind) == (run, kind)]
        plain = [e.error for e in rows if e.rounding is None]
        return {"run": run, "kind": kind, "error": max(plain, default=0.0), "excused": len(rows) - len(plain)}

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "mesh": self.mesh,
            "steps": self.num_steps,
            "loss_bound": self.bounds.loss,
            "tensor_bound": self.bounds.tensor,
            "losses": {name: list(values) for name, values in self.losses.items()},
            "num_compared": len(self.errors),
            "num_failed": len(self.failed),
            "num_within_rounding": len(self.within_rounding),
            "by_kind": [self._kind_row(run, kind) for run, kind in sorted({(e.run, e.kind) for e in self.errors})],
            "worst": [e.as_dict() for e in self.errors[:10]],
        }


def check_numerics(
    make_model: MakeModel,
    batches: Callable[[int], Any],
    recipe: Recipe,
    mesh: Mesh,
    plan: Any,
    compiler: Compiler,
    *,
    steps: int = CHECK_STEPS,
    bounds: Bounds | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> NumericsReport:
    """Train `steps` steps on `mesh`, on one device and eagerly, from the same parameters on the same batches.

    Compares the initial parameters, the loss of every step, every gradient of the first and the last, and every
    parameter, buffer and piece of optimizer state after the last: the mesh with one device, one device with eager
    PyTorch. `make_model()` gives the model and its optimizer, the same at every call; `compiler` makes a step that
    keeps its gradients. Under torch.distributed every rank calls this, and all return the same report.

    A tensor beyond its bound still passes where its reference is no better than that: a gradient that is 0 in exact
    arithmetic, as of a key bias before a softmax, is nothing but rounding on any device. For this the run may be at
    most 16 times as far from a float64 run as its reference is.
    """
    bounds = bounds or Bounds.under(recipe.autocast)
    progress("mesh")
    on_mesh = _record(compiler(*make_model(), mesh, plan), batches, steps)
    progress("one device")
    single = _record(compiler(*make_model(), Mesh(""), None), batches, steps)
    progress("eager")
    eager = _record(_Eager(*make_model(), recipe), batches, steps)
    _same_start(single, eager)

    @cache
    def exact() -> _Record | None:
        progress("float64")
        return _exact(make_model, batches, recipe, steps)

    named = {"mesh": on_mesh, "one device": single, "eager": eager}
    errors = [
        *_compare("mesh", "one device", named, bounds, _Rounding(exact, (single, eager))),
        *_compare("one device", "eager", named, bounds, _Rounding(exact, (eager,))),
    ]
    losses = {name: record.losses for name, record in named.items()}
    ordered = sorted(_worst_of_all_ranks(errors), key=lambda e: e.badness, reverse=True)
    return NumericsReport(str(mesh), steps, bounds, losses, tuple(ordered))


# runs


@dataclass(frozen=True, slots=True)
class _Record:
    """What a run left: its losses, and tensors by (kind, name), those of before it began among them."""

    losses: tuple[float, ...]
    tensors: dict[tuple[str, str], Tensor]

    @property
    def start(self) -> dict[str, Tensor]:
        return {name: t for (kind, name), t in self.tensors.items() if kind == "initial"}


def _record(trainee: Trainee, batches: Callable[[int], Any], steps: int) -> _Record:
    losses: list[float] = []
    tensors = {("initial", n): t for n, t in _copied(trainee.parameters()).items()}
    for i in range(steps):
        losses.append(trainee(batches(i)))
        if i in (0, steps - 1):
            tensors |= {(f"gradient {i + 1}", n): t for n, t in _copied(trainee.gradients()).items()}
    ends = {"parameter": trainee.parameters, "buffer": trainee.buffers, "state": trainee.optimizer_state}
    tensors |= {(kind, n): t for kind, read in ends.items() for n, t in _copied(read()).items()}
    return _Record(tuple(losses), tensors)


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}


class _Eager:
    """The plain model and the torch optimizer, run eagerly on the random numbers that a captured step draws."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
        self.model, self.optimizer, self.recipe, self.num_steps = model, optimizer, recipe, 0

    def __call__(self, batch: Any) -> float:
        micros = self.recipe.split(batch)
        self.optimizer.zero_grad()
        losses = []
        for i, micro in enumerate(micros):
            draw = torch.tensor(self.num_steps * len(micros) + i)  # as the runtime counts them
            with GlobalRandom(draw, self.recipe.seed):
                cast = cast_for_eager(self.model, self.recipe.param_dtype)
                losses.append(Substituted.run(self.model, cast, partial(self._backward, micro, len(micros))))
        self._gradients = _copied({n: p.grad for n, p in self.model.named_parameters() if p.grad is not None})
        if self.recipe.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_grad_norm)
        self.optimizer.step()
        self.num_steps += 1
        return sum(losses) / len(losses)

    def _backward(self, micro: Any, parts: int, model: nn.Module) -> float:
        with self._autocast():
            loss = self.recipe.loss(self.recipe.forward(model, micro), micro)
        (loss / parts).backward()
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
        held = {n: self.optimizer.state.get(p, {}) for n, p in self.model.named_parameters()}
        return {
            state_name(slot, n): t
            for n, slots in held.items()
            for slot, t in slots.items()
            if slot != "step" and isinstance(t, Tensor)
        }


def _exact(make_model: MakeModel, batches: Callable[[int], Any], recipe: Recipe, steps: int) -> _Record | None:
    """The eager run in float64, or None for a model that float64 does not run."""
    model, optimizer = make_model()
    wide = lambda leaf: leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf  # noqa: E731
    try:
        eager = _Eager(model.double(), optimizer, replace(recipe, autocast=None))
        return _record(eager, lambda i: pytree.tree_map(wide, batches(i)), steps)
    except Exception:  # whatever the model has against float64, it then has to do without an excuse
        return None


def _same_start(one: _Record, other: _Record) -> None:
    names = one.start.keys() | other.start.keys()
    same = {n for n in one.start.keys() & other.start.keys() if torch.equal(one.start[n], other.start[n])}
    if names != same:
        raise MeshweaveError(
            "the model differs from one call to the next, so that runs cannot be compared",
            got=f"other initial values of {', '.join(sorted(names - same)[:3])}",
            hint="seed the random numbers that the model is made with, for example torch.manual_seed(0)",
        )


# comparing


def _compare(
    run: str, reference: str, records: Mapping[str, _Record], bounds: Bounds, rounding: _Rounding
) -> Iterator[TensorError]:
    found, expected = records[run], records[reference]
    for i, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True)):
        error = abs(a - b) / abs(b or 1.0)
        yield TensorError(run, reference, "loss", f"step {i + 1}", error, bounds.loss, (), a, b)
    for kind, name in expected.tensors | found.tensors:
        base = TensorError(run, reference, kind, name, 0.0, bounds.tensor)
        got, want = found.tensors.get((kind, name)), expected.tensors.get((kind, name))
        if got is None or want is None:
            # PyTorch holds no state for a parameter that never had a gradient; a captured step holds zeros.
            if got is None or got.any():
                yield replace(base, problem=f"missing in the run on {run if got is None else reference}")
            continue
        gap = _difference(base, got, want)
        yield gap if gap.ok or gap.problem else _excused(gap, got, want, rounding)


def _difference(base: TensorError, got: Tensor, want: Tensor) -> TensorError:
    if got.shape != want.shape or got.dtype != want.dtype:
        shown = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (got, want)]
        return replace(base, problem=f"{shown[0]} instead of {shown[1]}")
    if not got.numel():
        return base
    a, b = got.double(), want.double()
    strange = (a != b) & ~(a.isfinite() & b.isfinite()) & ~(a.isnan() & b.isnan())
    if strange.any():
        at = tuple(strange.nonzero()[0].tolist())
        return replace(base, index=at, problem=f"{a[at].item()} instead of {b[at].item()}")
    gap = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(0.0)
    at = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
    return replace(base, error=gap[at].item() / _scale(b), index=at, got=a[at].item(), expected=b[at].item())


def _scale(reference: Tensor) -> float:
    finite = torch.where(reference.isfinite(), reference.abs(), 0.0)
    return float(finite.max()) or 1.0


@dataclass(frozen=True, slots=True)
class _Rounding:
    """How far runs on one device are from a float64 run, which is made when it is first asked for."""

    exact: Callable[[], _Record | None]
    runs: tuple[_Record, ...]

    def of(self, key: tuple[str, str], value: Tensor) -> float | None:
        """Largest absolute error of a tensor, or None for one that the float64 run lacks."""
        exact = self.exact()
        true = None if exact is None else exact.tensors.get(key)
        if true is None or true.shape != value.shape:
            return None
        return float((value.double() - true.double()).abs().max())


def _excused(error: TensorError, got: Tensor, want: Tensor, rounding: _Rounding) -> TensorError:
    key = error.kind, error.name
    own = rounding.of(key, got)
    if own is None:
        return error
    usual = max(rounding.of(key, run.tensors[key]) or 0.0 for run in rounding.runs if key in run.tensors)
    is_square = error.kind == "state" and "_sq" in error.name.partition("/")[0]  # exp_avg_sq, max_exp_avg_sq
    allowed = usual * (_ROUNDING**2 if is_square else _ROUNDING)
    return replace(error, rounding=usual / _scale(want)) if own <= allowed else error


def _worst_of_all_ranks(errors: list[TensorError]) -> list[TensorError]:
    """For each tensor the worst error that any rank found: all ranks give one verdict."""
    if not (dist.is_available() and dist.is_initialized()):
        return errors
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, errors)
    worst: dict[tuple[str, str, str], TensorError] = {}
    for error in (e for part in gathered for e in part):
        key = (error.run, error.kind, error.name)
        worst[key] = max(worst.get(key, error), error, key=lambda e: e.badness)
    return list(worst.values())
