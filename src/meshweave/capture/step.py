"""Model, loss and optimizer as a single functional graph of a whole training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from meshweave.capture.batch import (
    Batch,
    call_model,
    check_microbatches,
    is_number,
    split_loss,
    unused_parameters,
)
from meshweave.capture.contract import Contract
from meshweave.capture.functions import CapturedFunctions, refuse_communication
from meshweave.capture.model_checks import check_aliases, check_hooks, check_leaves, check_parameters
from meshweave.capture.module_state import module_roots
from meshweave.capture.normalize import Normalizer, normalize
from meshweave.capture.optimizers import OptimizerSpec
from meshweave.capture.outputs import ModelOutputs
from meshweave.capture.param_dtype import ParamDtype, cast_gradients_early, cast_parameters, dtypes_of
from meshweave.capture.record import REGISTER, Call, ConstantsWritten, Record, storage_of
from meshweave.capture.step_inputs import (
    LOSS_SCALE,
    StepValues,
    by_kind,
    fake_inputs,
    rebuild_batch,
    state_name,
    step_inputs,
)
from meshweave.capture.trace import Provenance, capture_errors, trace
from meshweave.capture.tracer import GraphTracer
from meshweave.errors import CaptureError, PlanError
from meshweave.interop.fake import FakeTensorMode
from meshweave.interop.modules import pass_for_parameter, plain_batch_norm
from meshweave.interop.process_groups import refused_communication
from meshweave.interop.tracing import check_checkpoints, gradients
from meshweave.ir.graph import Origin, StepGraph, origin_of, wide_dtype
from meshweave.ir.ops import square_sum
from meshweave.ops.registry import result_specs

Hooks = Callable[[nn.Module], AbstractContextManager[None]]


# the part of a step: all of it, forward with loss, or forward's return value
Part = Literal["train", "loss", "outputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """How the loss is scaled before backward, so that gradients do not underflow in float16: the numbers of
    `torch.amp.GradScaler`. After a step whose gradients are not finite, which changes no parameter, the scale is
    multiplied by `backoff_factor`, after `growth_interval` other steps in a row by `growth_factor`."""

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        is_valid = self.init_scale > 0 and self.growth_factor > 1 > self.backoff_factor > 0 and self.growth_interval > 0
        if not is_valid:
            raise PlanError(
                "invalid loss scale",
                got=str(self),
                expected="init_scale > 0, growth_factor > 1, 0 < backoff_factor < 1, growth_interval > 0",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtypes of a step's values, of sums over devices and microbatches, and the scale of the loss.

    autocast: dtype of the forward pass, as `torch.autocast` casts.
    param_dtype: cast floating-point parameters to this dtype before the forward pass. Stored parameters, gradients in
        sums over devices, and optimizer state keep the parameters' own dtype; batch and buffers keep theirs.
        {"*": torch.bfloat16, "*.norm": None} has exceptions: globs over modules and parameters, of which the last that
        matches counts; None keeps their own dtype.
    reduce_after_cast: cast to the smaller dtype before a sum over devices instead of after it. This rounds each part.
    accumulate_in: where gradients of microbatches are added up, in the parameter's own dtype. "whole": unsharded, so
        that devices reduce them once a step but store whole gradients where fsdp stores shards; "shards":
        reduce-scattered in each microbatch over the axes that shard the parameter; "auto": as `Plan.zero1` and `zero2`
        say, beside which others are an error, else whole, unless a device would then exceed memory_cap_bytes or,
        without it, the machine profile's memory. Beside whole sums, parameters are gathered once a step as far as that
        memory allows. `program.accumulation` and `meshweave plan` report the choice.
    loss_scale: whether the loss is scaled. "auto": if gradients are computed through float16, as by
        `torch.amp.GradScaler()`; a `LossScale` with other numbers; None: never. `step.metrics` has `loss_scale` and
        `skipped_steps`.
    """

    autocast: torch.dtype | None = None
    param_dtype: ParamDtype = None
    reduce_after_cast: bool = False
    accumulate_in: Literal["auto", "whole", "shards"] = "auto"
    loss_scale: LossScale | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        for name, dtype in (("autocast", self.autocast), *(("param_dtype", each) for each in self.of_params)):
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise PlanError(f"{name} is not a floating-point dtype", got=str(dtype), expected="torch.bfloat16")
        if self.accumulate_in not in ("auto", "whole", "shards"):
            raise PlanError(
                "unknown value of accumulate_in", got=repr(self.accumulate_in), expected="auto, whole or shards"
            )
        if not (self.loss_scale in ("auto", None) or isinstance(self.loss_scale, LossScale)):
            raise PlanError(
                "not a loss scale", got=repr(self.loss_scale), expected='mw.LossScale(...), None (off) or "auto"'
            )

    @property
    def of_params(self) -> tuple[torch.dtype | None, ...]:
        """The dtypes to which parameters are cast."""
        return tuple(self.param_dtype.values()) if isinstance(self.param_dtype, Mapping) else (self.param_dtype,)

    def scales_loss(self, model: nn.Module) -> bool:
        """Whether the loss is scaled by what is known before the model runs."""
        dtypes = {self.autocast, *self.of_params, *(p.dtype for p in model.parameters() if p.requires_grad)}
        return torch.float16 in dtypes if self.loss_scale == "auto" else self.loss_scale is not None

    @classmethod
    def of(cls, value: Precision | torch.dtype | None) -> Precision:
        """The precision for an argument: a dtype means autocast. Raises PlanError for any other value."""
        if isinstance(value, cls):
            return value
        if value is None or isinstance(value, torch.dtype):
            return cls(autocast=value)
        raise PlanError(
            "not a precision", where="precision=", got=repr(value), expected="a dtype, or mw.Precision(...)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """How the step is built from the model: clipping by global norm, microbatches per step, seed, precision, and the
    part of a step. `exact_microbatches`: what couples microbatches is an error. `is_whole`: the example has the rows of
    all microbatches; else those of one, whose loss counts as one of `accumulate`.
    """

    clip_grad_norm: float | None = None
    accumulate: int = 1
    seed: int = 0
    precision: Precision = field(default_factory=Precision)
    part: Part = "train"
    exact_microbatches: bool = False
    is_whole: bool = False
    pipeline: Any = None  # a `meshweave.pipeline.PipelineChoice`

    def __post_init__(self) -> None:
        check_microbatches(self.accumulate)
        if self.clip_grad_norm is not None and not (is_number(self.clip_grad_norm, Real) and self.clip_grad_norm > 0):
            raise PlanError("invalid norm", got=repr(self.clip_grad_norm), expected="a number above 0")
        if not is_number(self.seed, Integral):
            raise PlanError("the seed is not an integer", where="seed=", got=repr(self.seed), expected="such as 0")


_WRITTEN_AND_ACCUMULATED = (
    "accumulate=1, with which a parameter may be changed by forward; or change it between steps; or keep an average in "
    "buffers, or in torch.optim.swa_utils.AveragedModel"
)
_RESERVED = ("loss", "grad_norm", "loss_scale", "skipped_steps")  # names of numbers that every step has
_MOST_TRACES = 8  # constants may be nested: each trace finds another layer of those that are written


class Substituted(nn.Module):
    """A model under its own name, and a function to call while its parameters are substituted."""

    def __init__(self, model: nn.Module, body: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model, self.body = model, body

    def forward(self) -> Any:
        return self.body(self.model)

    @staticmethod
    def run(model: nn.Module, tensors: Mapping[str, Tensor], body: Callable[[nn.Module], Any]) -> Any:
        """`body(model)`, with `tensors` as the parameters and buffers of the model, also in functions that backward
        runs again."""
        named = {f"model.{name}": t for name, t in tensors.items()}
        return torch.func.functional_call(Substituted(model, body), named, ())


def cast_for_eager(model: nn.Module, dtype: ParamDtype) -> dict[str, Tensor]:
    """The parameters of an eager run by name, cast as by `Precision.param_dtype`; empty without a dtype.

    Parameters of a smaller dtype are cast, too; those of a float64 run are not, because such a run is meant to be
    exact.
    """
    if dtype is None or any(p.dtype == torch.float64 for p in model.parameters()):
        return {}
    params = {n: p for n, p in model.named_parameters() if p.is_floating_point()}
    return {n: params[n].to(wanted) for n, wanted in dtypes_of(params, dtype).items() if wanted is not None}


@dataclass(frozen=True, slots=True)
class StepSource:
    """What a step is captured from: the model, how it is called (`forward(model, batch)`), the loss, and a context
    manager for tracing (it may pin values)."""

    model: nn.Module
    loss: Callable[[Any, Any], Tensor]
    forward: Callable[[nn.Module, Any], Any] = call_model
    hooks: Hooks = lambda model: nullcontext()


def capture(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    example: Any,
    optimizer: OptimizerSpec | None,
    options: CaptureOptions,
    *,
    forward: Callable[[nn.Module, Any], Any] = call_model,
    hooks: Hooks | None = None,
) -> StepGraph:
    """The step of `capture_source`, without its contract."""
    source = StepSource(model, loss, forward, hooks) if hooks else StepSource(model, loss, forward)
    return capture_source(source, example, optimizer, options)[0]


def capture_source(
    source: StepSource,
    example: Any,
    optimizer: OptimizerSpec | None,
    options: CaptureOptions,
    like: Contract | None = None,
) -> tuple[StepGraph, Contract]:
    """The whole step as a StepGraph: forward, loss, backward and, with an optimizer, update; and its contract.

    `like` is the contract of the step for other sizes, if there is one. The model may be real, on meta or fake: only
    shapes are read. It is left unchanged. Raises CaptureError, with the user's line, for a model that is not a fixed
    graph.
    """
    overwritten, line = frozenset[Call](), ""
    is_scaled = options.part == "train" and options.precision.scales_loss(source.model)
    may_be_scaled = options.part == "train" and options.precision.loss_scale == "auto"
    for _ in range(_MOST_TRACES):
        try:
            step, contract = _captured(source, example, optimizer, options, overwritten, is_scaled, like)
        except ConstantsWritten as error:
            line = min(where for where, _, _ in error.calls - overwritten)
            overwritten |= error.calls
            continue
        if is_scaled or not may_be_scaled or not _has_half_gradients(step):
            return step, contract
        is_scaled = True
    raise CaptureError(
        "the model does not repeat itself",
        where=line,
        got=f"{_MOST_TRACES} traces, each of which writes into other constants",
        expected="the same ops in every step",
        hint="pass values that change from step to step in the batch as tensors",
    )


def _captured(
    source: StepSource,
    example: Any,
    optimizer: OptimizerSpec | None,
    options: CaptureOptions,
    overwritten: Set[Call],
    is_scaled: bool,
    like: Contract | None,
) -> tuple[StepGraph, Contract]:
    """`capture_source`, where results of the calls `overwritten` are not constants. `is_scaled`: whether the loss
    is."""
    is_accumulated = options.accumulate > 1
    inputs = step_inputs(source.model, example, optimizer, options.part == "train", is_accumulated, is_scaled)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = fake_inputs(inputs, source.model, example, mode)
    batch = Batch.of(example)
    outputs: list[tuple[str, str]] = []
    updated: list[str] = []  # parameters

    def again(record: Record, batch: Batch) -> None:
        values = by_kind(inputs, fakes)
        values.batch = dict(zip(batch.names, batch.tensors, strict=True))
        tracker = Provenance(values.scalars["draw"], options.seed, record, None, overwritten)
        with capture_errors(), tracker:
            _StepRun(source, rebuild_batch(batch, values), options, tracker, values, optimizer, is_second=True).run()

    named = by_kind(inputs, fakes).batch
    batch = Batch(batch.names, tuple(named.values()), batch.rest, batch.join)
    roots = module_roots(model=source.model, loss=source.loss, forward=source.forward)
    contract = Contract(roots, batch, fakes, again, like)

    def step(tracer: GraphTracer, *flat: Tensor) -> list[Tensor]:
        values = by_kind(inputs, flat)
        tracker = Provenance(values.scalars["draw"], options.seed, contract.record, tracer, overwritten)
        with tracker, contract.record.without_stale_constants(overwritten):
            run = _StepRun(source, rebuild_batch(batch, values), options, tracker, values, optimizer)
            results, grads = run.run()
            contract.outputs = run.returned
        outputs[:] = list(results)
        updated[:] = list(grads)
        # Parameters too, as forward leaves them: it may have changed them in place.
        return [*results.values(), *grads.values(), *(values.params[n] for n in grads)]

    def update(writer: Normalizer, traced: Sequence[fx.Node]) -> dict[tuple[str, str], fx.Node]:
        grads, params = traced[: len(updated)], traced[len(updated) :]
        return {} if optimizer is None else _update(writer, optimizer, updated, grads, params)

    with contract.checking():
        traced = trace(step, fakes)
    graph = normalize(traced.graph, inputs, tuple(outputs), traced.constants, update)
    check_aliases(source.model, graph)
    return cast_gradients_early(graph), contract


@dataclass(slots=True)
class _StepRun:
    """A run of a step under the tracer. A second run, for comparison, ends with the backward pass.

    `tensors` replace the model's parameters and buffers; gradients are with respect to `leaves`.
    """

    source: StepSource
    data: Any
    options: CaptureOptions
    tracker: Provenance
    values: StepValues
    optimizer: OptimizerSpec | None
    is_second: bool = False
    returned: ModelOutputs | None = None  # how to rebuild the model's outputs
    leaves: dict[str, Tensor] = field(init=False)
    buffers: dict[str, Tensor] = field(init=False)
    tensors: dict[str, Tensor] = field(init=False)
    storages: dict[str, int] = field(init=False)
    frozen: set[str] = field(init=False)

    def run(self) -> tuple[dict[tuple[str, str], Tensor], dict[str, Tensor]]:
        """Outputs by (kind, name), and the gradients for the update, by parameter."""
        with torch.enable_grad():
            results, grads = self.traced()
        if self.is_second:
            return results, {}
        if self.options.accumulate > 1:
            self.accumulate(grads)
            results |= {("acc", n): g for n, g in grads.items()}
        results |= {("grad", n): g for n, g in grads.items()}
        clip, scale = self.options.clip_grad_norm, self.values.scalars.get(LOSS_SCALE)
        inverse = None
        if (clip is not None or scale is not None) and self.options.part == "train":
            self.tracker.phase = "reduce"  # the norm is read before the update
            inverse = None if scale is None else scale.double().reciprocal().float()
            results["norm", ""] = _norm(grads, inverse)
        self.tracker.phase = "update"
        if inverse is not None:
            grads = {n: unscaled(g, inverse) for n, g in grads.items()}
        if clip is not None and self.options.part == "train":
            grads = _clip(grads, results["norm", ""], clip)
        if self.optimizer is None:
            return results, {}
        return results, {n: g for n, g in grads.items() if n in self.optimizer.kind_of}

    def traced(self) -> tuple[dict[tuple[str, str], Tensor], dict[str, Tensor]]:
        """The results of forward and backward, and gradients by parameter."""
        source, options, tracker = self.source, self.options, self.tracker
        wanted = {n: p.requires_grad for n, p in source.model.named_parameters()}
        self.leaves = {n: p.detach().requires_grad_(wanted[n]) for n, p in self.values.params.items()}
        self.buffers = {n: b.clone() for n, b in self.values.buffers.items()}
        with _autocast(options.precision.autocast):
            self.tensors = {**cast_parameters(self.leaves, options.precision.param_dtype, tracker), **self.buffers}
        self.storages = {n: storage_of(tensor) for n, tensor in self.tensors.items()}
        trained = {n for n in self.leaves if wanted[n] and (options.part != "train" or self._is_updated(n))}
        # A frozen parameter may be changed by forward: the average that teaches a student. One that is cast is not it.
        self.frozen = {n for n in self.leaves if not wanted[n] and self.tensors[n] is self.leaves[n]}
        kept = [n for n in self.leaves if options.accumulate > 1 or n not in trained | self.frozen]
        kept_storages = (storage for n in kept for storage in (self.storages[n], storage_of(self.leaves[n])))
        changeable = {
            self.storages[n]: _WRITTEN_AND_ACCUMULATED for n in trained | self.frozen if options.accumulate > 1
        }
        tracker.record.protected = {**dict.fromkeys(kept_storages, REGISTER), **changeable}
        known = (*source.model.named_parameters(), *source.model.named_buffers())
        # the first run may have given the model a new buffer
        own = [(t, self.tensors[n]) for n, t in known if n in self.tensors]
        tracker.substituted = {id(t): n for n, t in known}
        for name in self.leaves:
            pass_for_parameter(self.tensors[name])
        functions = CapturedFunctions(own, [self.tensors[n] for n in self.frozen])
        alone = refused_communication(refuse_communication)
        with functions, tracker.inside(source.model), source.hooks(source.model), alone, plain_batch_norm():
            body = self.forward_and_backward if options.part == "train" else self.forward_alone
            return Substituted.run(source.model, self.tensors, body)  # type: ignore[no-any-return]

    def _is_updated(self, name: str) -> bool:
        return self.optimizer is not None and name in self.optimizer.kind_of

    def forward_and_backward(self, model: nn.Module) -> tuple[dict[tuple[str, str], Tensor], dict[str, Tensor]]:
        with _autocast(self.options.precision.autocast):
            out = self.source.forward(model, self.data)
            self.tracker.phase = "loss"
            value, metrics = _loss_and_metrics(self.source.loss(out, self.data), self._loss_hint(model))
        check_parameters(model, self.tensors, self.storages, set(self.leaves))
        check_hooks({n: self.tensors[n] for n in self.leaves})
        results = {("loss", ""): value.detach().to(torch.promote_types(value.dtype, torch.float32)), **metrics}
        written = self.tracker.record.written
        results |= {("param", n): self.tensors[n] for n in sorted(self.frozen) if self.storages[n] in written}
        self.tracker.record.finish([*results.values(), *_buffers(model, self.buffers).values()])
        check_checkpoints(value)
        check_leaves(value, self.tracker.substituted)
        self.tracker.phase = "backward"
        trained = {n: p for n, p in self.leaves.items() if p.requires_grad}
        scale = self.values.scalars.get(LOSS_SCALE)
        if self.options.accumulate > 1 and not self.options.is_whole:  # as of loss / accumulate
            part = 1.0 / self.options.accumulate
            scale = torch.full_like(value, part) if scale is None else scale * part
        grads = _gradients(value, trained, scale)
        results |= _buffers(model, self.buffers)
        self.tracker.record.finish([*results.values(), *grads.values()])
        return results, grads

    def forward_alone(self, model: nn.Module) -> tuple[dict[tuple[str, str], Tensor], dict[str, Tensor]]:
        with torch.no_grad(), _autocast(self.options.precision.autocast):
            out = self.source.forward(model, self.data)
            if self.options.part == "outputs":
                self.returned, tensors = ModelOutputs.of(out)
                results = {("output", n): t.detach() for n, t in tensors.items()}
            else:
                self.tracker.phase = "loss"
                value, metrics = _loss_and_metrics(self.source.loss(out, self.data), self._loss_hint(model))
                results = {("loss", ""): value.to(torch.promote_types(value.dtype, torch.float32)), **metrics}
        check_parameters(model, self.tensors, self.storages, set(self.leaves))
        self.tracker.record.finish([*results.values()])
        return results, {}

    def _loss_hint(self, model: nn.Module) -> str:
        """What to write where the loss is no number."""
        unused = unused_parameters(model, self.data) if self.source.forward is call_model else []
        if not unused:
            return "return the mean over the batch from loss(outputs, batch)"
        return (
            f"forward did not get its optional argument {', '.join(unused)}: of a tuple it gets the items for its "
            "required arguments. To pass all items write mw.compile(..., forward=lambda model, batch: model(*batch))"
        )

    def accumulate(self, grads: dict[str, Tensor]) -> None:
        """Add the gradients of a microbatch to the sums of earlier microbatches."""
        for name, gradient in grads.items():
            self.tracker.modules = [name.rpartition(".")[0]]
            grads[name] = self.values.acc[name] + gradient
        self.tracker.modules = []


def _buffers(model: nn.Module, before: Mapping[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """The present buffers of the model: changed in place, or other tensors.
    Raises CaptureError for a buffer whose shape or dtype has changed."""
    now = dict(model.named_buffers(remove_duplicate=False))
    for name, old in before.items():
        new = now.get(name)
        if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
            raise CaptureError(
                f"the model changes the shape or the dtype of the buffer '{name}'",
                got="no tensor" if new is None else f"{new.dtype} of shape {tuple(new.shape)} after a step",
                expected=f"{old.dtype} of shape {tuple(old.shape)}, as before it",
                hint="give the buffer its final shape and dtype when the model is built",
            )
    return {("buffer", name): now[name] for name in before}


def _has_half_gradients(step: StepGraph) -> bool:
    """Whether the backward pass computes in float16: the model may enter autocast by itself."""
    nodes = (n for n in step.graph.nodes if n.op == "call_function" and origin_of(n).phase == "backward")
    return any(spec is not None and spec.dtype == torch.float16 for n in nodes for spec in result_specs(n))


def _gradients(value: Tensor, leaves: Mapping[str, Tensor], scale: Tensor | None) -> dict[str, Tensor]:
    """The gradient of each leaf that has a gradient, including additions by a `backward()` inside the backward pass.
    With a scale, that of the scaled loss."""
    grads = gradients(value, list(leaves.values()), None if scale is None else scale.to(value.dtype))
    parts = {n: [g for g in (grad, leaves[n].grad) if g is not None] for n, grad in zip(leaves, grads, strict=True)}
    return {n: sum(rest, first) for n, (first, *rest) in ((n, p) for n, p in parts.items() if p)}


def _autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype, cache_enabled=False)


def _loss_and_metrics(value: Any, hint: str) -> tuple[Tensor, dict[tuple[str, str], Tensor]]:
    """The loss, and the further numbers that the loss function returns with it, as results of the step."""
    loss, numbers = split_loss(value)
    for name, number in numbers.items():
        if name in _RESERVED or not isinstance(number, Tensor) or number.numel() != 1 or number.is_complex():
            got = f"of shape {tuple(number.shape)}" if isinstance(number, Tensor) else type(number).__name__
            raise CaptureError(
                "a metric that the loss returns is not a single number of the step",
                where=f"metric '{name}'",
                got=f"a name that is taken: {', '.join(_RESERVED)}" if name in _RESERVED else got,
                expected="(loss, {name: a tensor with one element, ...})",
                hint="return means over the batch, such as (predicted == labels).float().mean(); what is computed for "
                "each row (a hidden state) is returned by the model's forward, and step.forward_only(batch) gives it",
            )
    detached = {name: number.detach().reshape(()) for name, number in numbers.items()}
    wide = {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in detached.items()}
    return _scalar_loss(loss, hint), {("metric", name): x for name, x in wide.items()}


def _scalar_loss(value: Any, hint: str) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise CaptureError(
            "the loss is not a single number",
            got=got,
            expected="a floating-point tensor with one element",
            hint=hint,
        )
    if torch.is_grad_enabled() and not value.requires_grad:
        raise CaptureError("the loss does not depend on any trained parameter", hint="check for detach() or no_grad()")
    return value.reshape(())


def _norm(grads: Mapping[str, Tensor], inverse: Tensor | None) -> Tensor:
    """The global norm, as in torch.nn.utils.clip_grad_norm_, which rounds the norm of each gradient, and the norm of
    these, to their dtype. Squares are added in float64, so that none overflows: the norm is finite if all gradients
    are. With the inverse of a scale, the norm of the unscaled gradients."""
    dtype = reduce(torch.promote_types, (g.dtype.to_real() for g in grads.values()))
    dtype = dtype if inverse is None else wide_dtype(dtype)
    norms = torch.stack([square_sum(g) for g in grads.values()]).sqrt().to(dtype)
    norm = square_sum(norms).sqrt().to(dtype)
    return norm if inverse is None else norm * inverse


def _clip(grads: Mapping[str, Tensor], norm: Tensor, largest: float) -> dict[str, Tensor]:
    """The gradients, as torch.nn.utils.clip_grad_norm_ clips them."""
    scale = torch.clamp(largest / (norm + 1e-6), max=1.0)
    return {n: (g * scale).to(g.dtype) for n, g in grads.items()}


def unscaled(gradient: Tensor, inverse: Tensor | float) -> Tensor:
    """The gradient of the loss, from that of the scaled loss: multiplied in float32 or its own dtype."""
    return (gradient.to(wide_dtype(gradient.dtype)) * inverse).to(gradient.dtype)


def _update(
    writer: Normalizer,
    optimizer: OptimizerSpec,
    names: Sequence[str],
    grads: Sequence[fx.Node],
    params: Sequence[fx.Node],
) -> dict[tuple[str, str], fx.Node]:
    """The update of each parameter, from its value after forward. Its graph is known (`optimizers.py`)."""
    results: dict[tuple[str, str], fx.Node] = {}
    numbers = {name: writer.own["scalar", name] for name in optimizer.numbers()}
    for name, grad, param in zip(names, grads, params, strict=True):
        writer.origin = Origin("update", name)
        state = {slot: writer.own["state", state_name(slot, name)] for slot in optimizer.slots[name]}
        new, new_state = optimizer.update(name, param, grad, state, numbers, writer.call)
        results["param", name] = new
        results |= {("state", state_name(slot, name)): s for slot, s in new_state.items()}
    return results
