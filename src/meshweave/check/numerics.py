"""Numerics: compares a step on a mesh with the same step on one device, and that with eager PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshweave.check.runs import Compiler, Eager, Exact, RunRecord, Training, Updates, run_perturbed
from meshweave.errors import MeshweaveError
from meshweave.interop.process_groups import is_in_job
from meshweave.ir.mesh import Mesh

# AdamW divides a gradient by its own magnitude, so that the rounding of a tiny gradient moves a parameter by up to the
# learning rate, even in a correct step. Worst parameter of hf:llama on dp=2,tp=2 after 3 steps (torch 2.13, CPU,
# November 2026): 3.0e-6 at 3e-5, just beyond the bound of 1e-5 at 1e-4. The effect of a wrong term of the update at
# this rate may be below the bound: updates are compared separately, see `Updates`.
CHECK_LR = 3e-5

# Two float32 runs that add in different orders have independent errors, so their largest errors differ by chance, more
# so for small tensors. Largest ratio over the models and meshes of benchmarks/check_matrix.py: 8.0, a key bias of qwen2
# (torch 2.13, CPU, November 2026); twice that leaves room for other machines. Wrong values are off by factors of
# thousands: the noise of such a tensor is 1e-3 of an update.
_ROUNDING = 16.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Largest errors allowed: of the loss, relative; of a tensor, relative to its largest magnitude; and of a tensor
    that is computed from the same gradients."""

    loss: float = 1e-6
    tensor: float = 1e-5
    update: float = 2e-6

    @staticmethod
    def under(autocast: torch.dtype | None) -> Bounds:
        """Wider bounds under autocast, by the ratio of the units of rounding: 2**16 for bfloat16 against float32."""
        plain = Bounds()
        if autocast is None:
            return plain
        ratio = torch.finfo(autocast).eps / torch.finfo(torch.float32).eps
        return Bounds(plain.loss * ratio, plain.tensor * ratio, plain.update)


# In float64, where the models of benchmarks/check_matrix.py have errors of 1e-12 at most.
EXACT = Bounds(1e-10, 1e-9, 1e-11)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """The largest difference of a tensor between a run and its reference.

    `error` is the largest absolute difference over the reference's largest magnitude (absolute if that is 0), at
    `index`. `problem` is set if they cannot be compared. `rounding` is set if the error exceeds `bound` but a single
    device has a similar error: its own error against a float64 run (or a run with `shaken` parameters), on the same
    scale.
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
        """Sort key, worst last: failures, then those excused by rounding, then by error in units of the bound."""
        return not self.ok, self.rounding is not None, math.inf if self.problem else self.error / self.bound

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"ok": self.ok}


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsReport:
    """The result of a check, the worst tensors first. `losses` are those of every run, by its name; `note` says what
    was compared in float64, or why nothing was."""

    mesh: str
    num_steps: int
    bounds: Bounds
    losses: Mapping[str, tuple[float, ...]]
    errors: tuple[TensorError, ...]
    note: str = ""

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

    def _kind_row(self, run: str, kind: str) -> dict[str, Any]:
        """Largest error of a kind in a run, without the tensors that rounding excuses."""
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
            "note": self.note,
            "losses": {name: list(values) for name, values in self.losses.items()},
            "num_compared": len(self.errors),
            "num_failed": len(self.failed),
            "num_within_rounding": len(self.within_rounding),
            "by_kind": [self._kind_row(run, kind) for run, kind in sorted({(e.run, e.kind) for e in self.errors})],
            "worst": [e.as_dict() for e in self.errors[:10]],
        }


def check_numerics(
    training: Training,
    mesh: Mesh,
    plan: Any,
    compiler: Compiler,
    *,
    bounds: Bounds | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> NumericsReport:
    """Run `training` on `mesh`, on one device and eagerly, from the same parameters on the same batches.

    Compares the initial parameters, the loss of every step, every gradient of the first and the last, and every
    parameter, buffer and piece of optimizer state after the last: the mesh with one device, one device with eager
    PyTorch. `compiler` compiles a step that keeps its gradients, also of a float64 model (its example batch is
    `widened`, without autocast or casts). Under torch.distributed every rank calls this, and all return the same
    report.

    A model that runs in float64 is also trained so on the mesh, against eager PyTorch in float64, with bounds that
    detect even a small wrong term. And torch's own optimizer gets the gradients of the mesh, for these steps and one at
    a rate at which each term of the update is visible.

    A tensor beyond its bound still passes if its reference is no better: a gradient that is 0 in exact arithmetic, such
    as that of a key bias before a softmax, is pure rounding on any device. For this the run may be at most 16 times as
    far from a float64 run as its reference is; if float64 does not run, from a run with `shaken` parameters.
    """
    bounds = bounds or Bounds.under(training.recipe.autocast)
    checked = _Checked(training, mesh, plan, compiler)
    progress("float64")
    exact = Exact.of(training)
    sharp, note = _in_float64(checked, exact)
    progress("mesh")
    on_mesh, updates = checked.trained()
    progress("one device")
    single = training.record(compiler(*training.make_model(), Mesh(""), None))
    progress("eager")
    eager = training.record(Eager(*training.make_model(), training.recipe))
    _same_start(single, eager)

    @cache
    def truth() -> RunRecord:
        progress("rounding")
        return exact.record or run_perturbed(training)

    errors = [
        *_compare("mesh", "one device", on_mesh, single, bounds, _Rounding(truth, (single, eager))),
        *_compare("one device", "eager", single, eager, bounds, _Rounding(truth, (eager,))),
        *(_update_errors("mesh", updates, bounds.update) if sharp is None else sharp),
    ]
    losses = {name: r.losses for name, r in (("mesh", on_mesh), ("one device", single), ("eager", eager))}
    ordered = sorted(_worst_of_all_ranks(errors), key=lambda e: e.badness, reverse=True)
    return NumericsReport(
        mesh=str(mesh), num_steps=training.steps, bounds=bounds, losses=losses, errors=tuple(ordered), note=note
    )


@dataclass(frozen=True, slots=True)
class _Checked:
    """The training step on the mesh."""

    training: Training
    mesh: Mesh
    plan: Any
    compiler: Compiler

    def trained(self) -> tuple[RunRecord, tuple[RunRecord, RunRecord]]:
        """A run on the mesh, and the values that it and torch's optimizer have after another step that shows every
        term."""
        training = self.training
        (model, optimizer), beside = training.make_model(), training.make_model()
        step = self.compiler(model, optimizer, self.mesh, self.plan)
        updates = Updates(step, optimizer, *beside, training.recipe.clip_grad_norm)
        return training.record(updates), updates.visible_step(training.batches(training.steps))


def _in_float64(checked: _Checked, exact: Exact) -> tuple[list[TensorError] | None, str]:
    """The errors of the float64 run on the mesh, or None without such a run, and a line about it."""
    if exact.record is None:
        return (
            None,
            f"float64 cannot run the model, so faults that float32 does not show are not detected: {exact.problem}",
        )
    try:
        record, updates = replace(checked, training=checked.training.wide()).trained()
    except Exception as error:  # of a program that is compiled only for this
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return None, f"the mesh does not run float64, so faults that float32 does not show are not detected: {reason}"
    errors = list(_update_errors("mesh in float64", updates, EXACT.update))
    if exact.narrow:
        return (
            errors,
            f"the model itself computes in less than float64, so only updates were compared in it: {exact.narrow}",
        )
    return [
        *errors,
        *_compare("mesh in float64", "eager", record, exact.record, EXACT),
    ], "compared in float64, too"


def _update_errors(run: str, updates: tuple[RunRecord, RunRecord], bound: float) -> Iterator[TensorError]:
    """Errors against torch's optimizer, with the rounding of float32 or of the tensor's own dtype if that is coarser as
    bound."""
    for e in _compare(run, "torch's optimizer", *updates, Bounds(tensor=bound)):
        dtype = updates[1].tensors[e.kind, e.name].dtype if (e.kind, e.name) in updates[1].tensors else torch.float32
        eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
        yield replace(e, bound=bound * max(1.0, eps / torch.finfo(torch.float32).eps))


def _same_start(first: RunRecord, other: RunRecord) -> None:
    names = first.start.keys() | other.start.keys()
    same = {n for n in first.start.keys() & other.start.keys() if torch.equal(first.start[n], other.start[n])}
    if names != same:
        raise MeshweaveError(
            "the model differs between calls, so that runs cannot be compared",
            got=f"other initial values of {', '.join(sorted(names - same)[:3])}",
            hint="seed the random numbers of the model's initialisation, for example torch.manual_seed(0)",
        )


# comparing


def _compare(
    run: str, reference: str, record: RunRecord, expected: RunRecord, bounds: Bounds, rounding: _Rounding | None = None
) -> Iterator[TensorError]:
    """Errors of a run. Without a `_Rounding` a tensor far smaller than others of its kind is compared on their
    scale."""
    for i, (a, b) in enumerate(zip(record.losses, expected.losses, strict=True)):
        error = abs(a - b) / abs(b or 1.0)
        yield TensorError(
            run=run,
            reference=reference,
            kind="loss",
            name=f"step {i + 1}",
            error=error,
            bound=bounds.loss,
            index=(),
            got=a,
            expected=b,
        )
    floors = {} if rounding else _floors(expected)
    for kind, name in expected.tensors | record.tensors:
        base = TensorError(run=run, reference=reference, kind=kind, name=name, error=0.0, bound=bounds.tensor)
        got, want = record.tensors.get((kind, name)), expected.tensors.get((kind, name))
        if got is None or want is None:
            # PyTorch has no state for a parameter that never had a gradient; a captured step has zeros.
            if got is None or got.any():
                yield replace(base, problem=f"missing in the run on {run if got is None else reference}")
            continue
        gap = _difference(base, got, want, floors.get(_family(kind, name), 0.0))
        yield gap if gap.ok or gap.problem or rounding is None else _tolerances(gap, got, want, rounding)


def _family(kind: str, name: str) -> tuple[str, str]:
    return kind, name.partition("/")[0] if kind.endswith("state") else ""


# A tensor's scale is at least this fraction of the largest of its kind. In exact arithmetic it may be 0, and its
# rounding is that of larger tensors; such a parameter moves by noise over eps, times the learning rate.
_FLOORS = {"parameter": 1e-3, "updated parameter": 1e-3}
_FLOOR, _SQUARE_FLOOR = 1e-4, 1e-8


def _floors(expected: RunRecord) -> dict[tuple[str, str], float]:
    largest: dict[tuple[str, str], float] = {}
    for (kind, name), tensor in expected.tensors.items():
        family = _family(kind, name)
        if tensor.numel():
            largest[family] = max(largest.get(family, 0.0), _magnitude(tensor))
    parts = {f: _SQUARE_FLOOR if "_sq" in f[1] else _FLOORS.get(f[0], _FLOOR) for f in largest}
    return {family: size * parts[family] for family, size in largest.items()}


def _difference(base: TensorError, got: Tensor, want: Tensor, floor: float) -> TensorError:
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
    scale = max(_magnitude(b), floor) or 1.0
    return replace(base, error=gap[at].item() / scale, index=at, got=a[at].item(), expected=b[at].item())


def _magnitude(reference: Tensor) -> float:
    return float(torch.where(reference.isfinite(), reference.abs(), 0.0).max())


@dataclass(frozen=True, slots=True)
class _Rounding:
    """How far runs on one device are from the exact values, computed on first use."""

    truth: Callable[[], RunRecord]
    runs: tuple[RunRecord, ...]

    def of(self, key: tuple[str, str], value: Tensor) -> float | None:
        """Largest absolute error of a tensor, or None if the exact run lacks it."""
        true = self.truth().tensors.get(key)
        if true is None or true.shape != value.shape:
            return None
        return float((value.double() - true.double()).abs().max())


def _tolerances(error: TensorError, got: Tensor, want: Tensor, rounding: _Rounding) -> TensorError:
    key = error.kind, error.name
    own = rounding.of(key, got)
    if own is None:
        return error
    usual = max(rounding.of(key, run.tensors[key]) or 0.0 for run in rounding.runs if key in run.tensors)
    is_square = error.kind == "state" and "_sq" in error.name.partition("/")[0]  # exp_avg_sq, max_exp_avg_sq
    allowed = usual * (_ROUNDING**2 if is_square else _ROUNDING)
    return replace(error, rounding=usual / (_magnitude(want) or 1.0)) if own <= allowed else error


def _worst_of_all_ranks(errors: list[TensorError]) -> list[TensorError]:
    """For each tensor the worst error on any rank: all ranks return the same verdict."""
    if not is_in_job():
        return errors
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, errors)
    worst: dict[tuple[str, str, str], TensorError] = {}
    for error in (e for part in gathered for e in part):
        key = (error.run, error.kind, error.name)
        worst[key] = max(worst.get(key, error), error, key=lambda e: e.badness)
    return list(worst.values())
