"""Model, loss and optimizer as one functional graph of a whole training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshweave.capture.aliases import check_aliases
from meshweave.capture.batch import Batch, call_model
from meshweave.capture.contract import Contract
from meshweave.capture.functions import CapturedFunctions
from meshweave.capture.guards import check_shapes
from meshweave.capture.normalize import normalize
from meshweave.capture.optimizers import OptimizerSpec
from meshweave.capture.outputs import ModelOutputs
from meshweave.capture.param_dtype import cast_gradients_early, cast_parameters
from meshweave.capture.record import Record, storage_of
from meshweave.capture.trace import Provenance, capture_errors, fake_like, trace
from meshweave.errors import CaptureError, PlanError
from meshweave.interop.fake import FakeTensorMode
from meshweave.interop.hooks import tensor_hooks
from meshweave.interop.modules import own_parameters
from meshweave.interop.tracing import check_checkpoints, gradients
from meshweave.ir.graph import Input, Spec, StepGraph
from meshweave.ir.ops import square_sum

Hooks = Callable[[nn.Module], AbstractContextManager[None]]


Part = Literal["train", "loss", "outputs"]  # of a step: all of it, forward with loss, or what forward returns


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """How the step is made from the model: clipping by global norm, microbatches per step, autocast dtype, seed,
    whether sums over devices may be taken after a cast to a smaller dtype, the dtype to which parameters are cast
    before they are used, and where gradients of microbatches are added up (see `sharding.sums`)."""

    clip_grad_norm: float | None = None
    accumulate: int = 1
    autocast: torch.dtype | None = None
    seed: int = 0
    reduce_after_cast: bool = False
    param_dtype: torch.dtype | None = None
    accumulate_in: str = "auto"
    part: Part = "train"

    def __post_init__(self) -> None:
        if self.param_dtype is not None and not self.param_dtype.is_floating_point:
            raise PlanError("param_dtype is no dtype of floating-point numbers", got=str(self.param_dtype))
        if self.accumulate_in not in ("auto", "whole", "shards"):
            raise PlanError(
                "unknown way to add gradients up", got=repr(self.accumulate_in), expected="auto, whole or shards"
            )
        if self.accumulate < 1:
            raise PlanError("accumulate counts microbatches", got=str(self.accumulate), expected="1 or more")
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise PlanError("clip_grad_norm is a norm", got=str(self.clip_grad_norm), expected="a number above 0")


class Substituted(nn.Module):
    """A model under its own name, and what is to be done with it while its parameters are substituted."""

    def __init__(self, model: nn.Module, body: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model, self.body = model, body

    def forward(self) -> Any:
        return self.body(self.model)

    @staticmethod
    def run(model: nn.Module, tensors: Mapping[str, Tensor], body: Callable[[nn.Module], Any]) -> Any:
        """`body(model)`, in which the parameters and buffers of the model are `tensors`, also those of functions that
        backward runs again."""
        named = {f"model.{name}": t for name, t in tensors.items()}
        return torch.func.functional_call(Substituted(model, body), named, ())


def cast_for_eager(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The parameters of an eager run by name, as `CaptureOptions.param_dtype` casts them; none without a dtype.

    Parameters of a smaller dtype are cast, too; those of a run in float64 are not, for that is there to be exact.
    """
    if dtype is None or any(p.dtype == torch.float64 for p in model.parameters()):
        return {}
    return {n: p.to(dtype) for n, p in model.named_parameters() if p.is_floating_point()}


@dataclass(slots=True)
class _Values:
    """The inputs of one traced step, by kind and name."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    state: dict[str, Tensor]
    acc: dict[str, Tensor]
    batch: dict[str, Tensor]
    scalars: dict[str, Tensor]


def state_name(slot: str, param: str) -> str:
    """Name of one piece of optimizer state: `exp_avg/model.embed.weight`."""
    return f"{slot}/{param}"


@dataclass(frozen=True, slots=True)
class StepSource:
    """What a step is captured from: the model, how it is called (`forward(model, batch)`), the loss, and a context in
    which the model is traced (it may pin values)."""

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
    """The step of `capture_source`, without what it rests on."""
    source = StepSource(model, loss, forward, hooks) if hooks else StepSource(model, loss, forward)
    return capture_source(source, example, optimizer, options)[0]


def capture_source(
    source: StepSource, example: Any, optimizer: OptimizerSpec | None, options: CaptureOptions
) -> tuple[StepGraph, Contract]:
    """The whole step as a StepGraph: forward, loss, backward and, with an optimizer, update; and what it rests on.

    The model may be real, on meta or fake: only shapes are read. It is left as it was. Raises CaptureError, with the
    user's line, for a model that is no fixed graph.
    """
    inputs = _describe(source.model, example, optimizer, options)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = _fake_inputs(inputs, source.model, example, mode)
    batch = Batch.of(example)
    outputs: list[tuple[str, str]] = []

    def again(record: Record, batch: Batch) -> None:
        values = _unflatten(inputs, fakes)
        tracker = Provenance(values.scalars["draw"], options.seed, record)
        with capture_errors(), tracker:
            _step(source, batch, None, options, tracker, values, is_second=True)

    named = _unflatten(inputs, fakes).batch
    batch = Batch(batch.names, tuple(named.values()), batch.rest, batch.join)
    roots = {"model": source.model, "loss": source.loss, "forward": source.forward}
    contract = Contract(roots, batch, fakes, again)

    def step(*flat: Tensor) -> list[Tensor]:
        values = _unflatten(inputs, flat)
        tracker = Provenance(values.scalars["draw"], options.seed, contract.record)
        with tracker:
            results, contract.outputs = _step(source, batch, optimizer, options, tracker, values)
        outputs[:] = list(results)
        return list(results.values())

    with contract.checking():
        module = trace(step, fakes)
    constants = {name: value for name, value in module.named_buffers(recurse=False)}
    constants |= {n: v for n, v in vars(module).items() if isinstance(v, Tensor) and n.startswith("_tensor_constant")}
    constants |= {n: p.detach() for n, p in module.named_parameters(recurse=False)}  # of modules that are no submodules
    graph = normalize(module.graph, inputs, tuple(outputs), constants)
    check_aliases(source.model, graph)
    return cast_gradients_early(graph), contract


def _describe(
    model: nn.Module, example: Any, optimizer: OptimizerSpec | None, options: CaptureOptions
) -> tuple[Input, ...]:
    def spec_like(x: Tensor) -> Spec:
        return Spec(tuple(x.shape), x.dtype)

    check_shapes(model)
    _check_hooks(model)
    params = {n: Input("param", n, spec_like(p), p.requires_grad) for n, p in model.named_parameters()}
    is_trained = options.part == "train"
    trained = [p for p in params.values() if p.requires_grad and is_trained]
    if is_trained and not trained:
        raise CaptureError("the model has no parameter to train", hint="set requires_grad on what should be trained")
    batch = Batch.of(example)
    scalars = [Input("scalar", "draw", Spec((), torch.int64))]
    state: list[Input] = []
    if optimizer is not None:
        scalars += [Input("scalar", name, Spec((), torch.float64)) for name in optimizer.numbers()]
        for p in (p for p in trained if p.name in optimizer.kind_of):
            state += [Input("state", state_name(slot, p.name), spec) for slot, spec in optimizer.slots(p.name).items()]
    acc = [Input("acc", p.name, p.spec) for p in trained] if options.accumulate > 1 else []
    buffers = [Input("buffer", n, spec_like(b)) for n, b in model.named_buffers()]
    inputs = [Input("batch", n, spec_like(t)) for n, t in zip(batch.names, batch.tensors, strict=True)]
    return (*params.values(), *buffers, *state, *acc, *inputs, *scalars)


def _check_hooks(model: nn.Module) -> None:
    """Raises CaptureError for hooks on parameters, which run when PyTorch itself accumulates a gradient."""
    for name, param in model.named_parameters():
        hooks = tensor_hooks(param)
        if hooks:
            raise CaptureError(
                f"the parameter '{name}' has a hook, which a compiled step would not call",
                got=", ".join(hooks),
                expected="parameters without hooks",
                hint="change gradients by clip_grad_norm=, in the loss, or by an autograd.Function in the model",
            )


def _fake_inputs(inputs: Sequence[Input], model: nn.Module, example: Any, mode: FakeTensorMode) -> list[Tensor]:
    real: dict[tuple[str, str], Tensor] = {("param", n): p for n, p in model.named_parameters()}
    real |= {("buffer", n): b for n, b in model.named_buffers()}
    real |= {("batch", n): t for n, t in zip(Batch.of(example).names, Batch.of(example).tensors, strict=True)}
    fakes = []
    for item in inputs:
        like = real.get((item.kind, item.name))
        fakes.append(
            fake_like(
                mode, like if like is not None else torch.empty(item.spec.shape, dtype=item.spec.dtype, device="meta")
            )
        )
    return fakes


def _unflatten(inputs: Sequence[Input], flat: Sequence[Tensor]) -> _Values:
    by_kind: dict[str, dict[str, Tensor]] = {k: {} for k in ("param", "buffer", "state", "acc", "batch", "scalar")}
    for item, value in zip(inputs, flat, strict=True):
        by_kind[item.kind][item.name] = value
    return _Values(
        by_kind["param"],
        by_kind["buffer"],
        by_kind["state"],
        by_kind["acc"],
        by_kind["batch"],
        by_kind["scalar"],
    )


def _step(
    source: StepSource,
    batch: Batch,
    optimizer: OptimizerSpec | None,
    options: CaptureOptions,
    tracker: Provenance,
    values: _Values,
    is_second: bool = False,
) -> tuple[dict[tuple[str, str], Tensor], ModelOutputs | None]:
    """Outputs by (kind, name), and how those of the model are put together. Runs under the tracer. A second run, which
    is for comparison, ends with the loss."""
    returned: list[ModelOutputs] = []
    wanted = {n: p.requires_grad for n, p in source.model.named_parameters()}
    leaves = {n: p.detach().requires_grad_(wanted[n]) for n, p in values.params.items()}
    buffers = {n: b.clone() for n, b in values.buffers.items()}
    data = batch.rebuild([values.batch[name] for name in batch.names])

    def forward_and_backward(model: nn.Module) -> tuple[dict[tuple[str, str], Tensor], dict[str, Tensor]]:
        with _autocast(options.autocast):
            out = source.forward(model, data)
            tracker.phase = "loss"
            value = _scalar_loss(source.loss(out, data))
        _check_parameters(model, tensors, storages, set(leaves))
        results = {("loss", ""): value.detach().to(torch.promote_types(value.dtype, torch.float32))}
        tracker.record.finish([*results.values(), *_buffers(model, buffers).values()])
        if is_second:
            return results, {}
        check_checkpoints(value)
        tracker.phase = "backward"
        grads = _gradients(value, {n: p for n, p in leaves.items() if p.requires_grad})
        return results | _buffers(model, buffers), grads

    def forward_alone(model: nn.Module) -> tuple[dict[tuple[str, str], Tensor], dict[str, Tensor]]:
        with torch.no_grad(), _autocast(options.autocast):
            out = source.forward(model, data)
            if options.part == "outputs":
                shape, found = ModelOutputs.of(out)
                returned.append(shape)
                results = {("output", n): t.detach() for n, t in found.items()}
            else:
                tracker.phase = "loss"
                value = _scalar_loss(source.loss(out, data))
                results = {("loss", ""): value.to(torch.promote_types(value.dtype, torch.float32))}
        _check_parameters(model, tensors, storages, set(leaves))
        tracker.record.finish([*results.values()])
        return results, {}

    with torch.enable_grad():
        with _autocast(options.autocast):
            tensors = {**cast_parameters(leaves, options.param_dtype, tracker), **buffers}
        storages = {n: storage_of(tensor) for n, tensor in tensors.items()}
        kept = [n for n in leaves if options.accumulate > 1 or not wanted[n]]
        tracker.record.protected = {storages[n] for n in kept} | {storage_of(leaves[n]) for n in kept}
        known = (*source.model.named_parameters(), *source.model.named_buffers())
        own = [(t, tensors[n]) for n, t in known if n in tensors]  # the first run may have given the model a new buffer
        with CapturedFunctions(own), tracker.inside(source.model), source.hooks(source.model):
            body = forward_and_backward if options.part == "train" else forward_alone
            results, grads = Substituted.run(source.model, tensors, body)
    if options.accumulate > 1:
        for name, gradient in grads.items():
            tracker.modules = [name.rpartition(".")[0]]
            grads[name] = values.acc[name] + gradient * (1.0 / options.accumulate)
        tracker.modules = []
        results |= {("acc", n): g for n, g in grads.items()}
    results |= {("grad", n): g for n, g in grads.items()}
    if optimizer is not None and not is_second:
        tracker.phase = "update"
        results |= _update(optimizer, options, tracker, values, grads)
    return results, returned[0] if returned else None


def _check_parameters(
    model: nn.Module, tensors: Mapping[str, Tensor], storages: Mapping[str, int], params: Set[str]
) -> None:
    """Raises CaptureError for a parameter that forward has replaced, and for a parameter or buffer that it has given
    other values by `.data`."""
    for name, storage in storages.items():
        path, _, key = name.rpartition(".")
        is_replaced = name in params and own_parameters(model.get_submodule(path)).get(key) is not tensors[name]
        if is_replaced or storage_of(tensors[name]) != storage:
            raise CaptureError(
                f"the model replaces its {'parameter' if name in params else 'buffer'} '{name}'",
                got="another tensor, or other values by .data, after forward",
                expected="parameters that the optimizer alone changes, buffers that are assigned or changed in place",
                hint="compute a new tensor from the parameter, or keep what lasts from step to step in a buffer "
                "(self.k = ..., without .data)",
            )


def _buffers(model: nn.Module, before: Mapping[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """The buffers as the model has them now: changed in place, or other tensors.

    Raises CaptureError for a buffer that is something else than it was.
    """
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


def _gradients(value: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of each leaf that has one, with what a `backward()` inside the backward pass has added to it."""
    grads = gradients(value, list(leaves.values()))
    parts = {n: [g for g in (grad, leaves[n].grad) if g is not None] for n, grad in zip(leaves, grads, strict=True)}
    return {n: sum(rest, first) for n, (first, *rest) in ((n, p) for n, p in parts.items() if p)}


def _autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype, cache_enabled=False)


def _scalar_loss(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        got = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise CaptureError(
            "the loss is not one number",
            got=got,
            expected="a floating-point tensor with one element",
            hint="return the mean over the batch from loss(outputs, batch)",
        )
    if torch.is_grad_enabled() and not value.requires_grad:
        raise CaptureError("the loss does not depend on any trained parameter", hint="check for detach() or no_grad()")
    return value.reshape(())


def _clipped(grads: Mapping[str, Tensor], largest: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The global norm and the gradients, as torch.nn.utils.clip_grad_norm_ has them: it rounds the norm of each
    gradient, and the norm of these, to their dtype. Squares are added in float64, so that none overflows."""
    dtype = reduce(torch.promote_types, (g.dtype for g in grads.values()))
    norms = torch.stack([square_sum(g) for g in grads.values()]).sqrt().to(dtype)
    norm = square_sum(norms).sqrt().to(dtype)
    scale = torch.clamp(largest / (norm + 1e-6), max=1.0)
    return norm, {n: (g * scale).to(g.dtype) for n, g in grads.items()}


def _update(
    optimizer: OptimizerSpec, options: CaptureOptions, tracker: Provenance, values: _Values, grads: dict[str, Tensor]
) -> dict[tuple[str, str], Tensor]:
    results: dict[tuple[str, str], Tensor] = {}
    if options.clip_grad_norm is not None:
        results["norm", ""], grads = _clipped(grads, options.clip_grad_norm)
    for name in (n for n in grads if n in optimizer.kind_of):
        tracker.modules = [name]
        state = {slot: values.state[state_name(slot, name)] for slot in optimizer.slots(name)}
        new, new_state = optimizer.update(name, values.params[name], grads[name], state, values.scalars)
        results["param", name] = new
        results |= {("state", state_name(slot, name)): s for slot, s in new_state.items()}
    tracker.modules = []
    return results
