"""Model, loss and optimizer as one functional graph of a whole training step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from meshweave.capture.functions import CapturedFunctions
from meshweave.capture.normalize import normalize
from meshweave.capture.optimizers import OptimizerSpec, update
from meshweave.capture.param_dtype import cast_gradients_early, cast_parameters
from meshweave.capture.recompute import check_policy
from meshweave.capture.trace import Provenance, fake_like, trace
from meshweave.errors import CaptureError, PlanError
from meshweave.interop.tracing import gradients
from meshweave.ir.graph import Input, Spec, StepGraph
from meshweave.ir.ops import square_sum

Hooks = Callable[[nn.Module], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """How the step is made from the model: clipping by global norm, microbatches per step, autocast dtype, seed,
    whether sums over devices may be taken after a cast to a smaller dtype, what the backward pass makes again (see
    `capture.recompute`), the dtype to which parameters are cast before they are used, and where gradients of
    microbatches are added up (see `sharding.sums`)."""

    clip_grad_norm: float | None = None
    accumulate: int = 1
    autocast: torch.dtype | None = None
    seed: int = 0
    reduce_after_cast: bool = False
    recompute: str = "none"
    param_dtype: torch.dtype | None = None
    accumulate_in: str = "auto"

    def __post_init__(self) -> None:
        check_policy(self.recompute)
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


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of a batch by name, and how to put them back together."""

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    rebuild: Callable[[Sequence[Any]], Any] = field(repr=False)

    @staticmethod
    def of(batch: Any) -> Batch:
        """Flatten a dict, tuple or nest of them. Leaves that are no tensors stay what they are in the example."""
        plain = dict(batch) if isinstance(batch, Mapping) else batch
        leaves, tree = pytree.tree_flatten_with_path(plain)
        held = [i for i, (_, leaf) in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not held:
            raise CaptureError(
                "the batch holds no tensor", got=type(batch).__name__, expected="a dict or tuple of tensors"
            )
        fixed = [leaf for _, leaf in leaves]

        def rebuild(values: Sequence[Any]) -> Any:
            filled = list(fixed)
            for i, value in zip(held, values, strict=True):
                filled[i] = value
            return pytree.tree_unflatten(filled, tree)

        names = tuple(_path_name(leaves[i][0]) for i in held)
        return Batch(names, tuple(fixed[i] for i in held), rebuild)

    def split(self, parts: int) -> list[tuple[Tensor, ...]]:
        """The tensors of each of `parts` equal microbatches: cut along dim 0 where they have the batch's size.

        Raises PlanError where the batch does not divide.
        """
        size = batch_size(t.shape for t in self.tensors) or 0
        if size % parts:
            raise PlanError(
                "the batch does not divide into microbatches",
                got=f"batch size {size}, accumulate={parts}",
                expected=f"a batch size that {parts} divides",
            )
        cut = [t.chunk(parts) if t.dim() and t.shape[0] == size else (t,) * parts for t in self.tensors]
        return list(zip(*cut, strict=True))

    def micros(self, parts: int) -> list[Any]:
        """The microbatches, each put together as the batch was."""
        return [self.rebuild(tensors) for tensors in self.split(parts)]


def _path_name(path: Sequence[Any]) -> str:
    return ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path) or "batch"


def batch_size(shapes: Iterable[torch.Size | tuple[int, ...]]) -> int | None:
    """Size of dim 0 of the first tensor of a batch that has one."""
    return next((shape[0] for shape in shapes if len(shape)), None)


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model with what its forward takes of a batch: keys of a dict by name, a tuple by position."""
    if isinstance(batch, Tensor):
        return model(batch)
    parameters = inspect.signature(model.forward).parameters.values()
    if isinstance(batch, Mapping):
        takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
        taken = {p.name for p in parameters}
        return model(**{key: value for key, value in batch.items() if takes_all or key in taken})
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return model(*batch[:1])
    needed = [
        p for p in parameters if p.default is inspect.Parameter.empty and p.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    return model(*batch[: max(1, len([p for p in needed if p.kind is not inspect.Parameter.VAR_KEYWORD]))])


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
    batch: list[Tensor]
    scalars: dict[str, Tensor]


def state_name(slot: str, param: str) -> str:
    """Name of one piece of optimizer state: `exp_avg/model.embed.weight`."""
    return f"{slot}/{param}"


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
    """The whole step as a StepGraph: forward, loss, backward and, with an optimizer, update.

    The model may be real, on meta or fake: only shapes are read. `hooks(model)` is a context in which the model is
    traced; it may pin values. Raises CaptureError, with the user's line, for a model that is no fixed graph.
    """
    inputs = _describe(model, example, optimizer, options)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = _fake_inputs(inputs, model, example, mode)
    batch = Batch.of(example)
    outputs: list[tuple[str, str]] = []

    def step(*flat: Tensor) -> list[Tensor]:
        values = _unflatten(inputs, flat)
        tracker = Provenance(values.scalars["draw"], options.seed)
        with tracker:
            results = _step(model, loss, batch, optimizer, options, forward, hooks, tracker, values)
        outputs[:] = list(results)
        return list(results.values())

    module = trace(step, fakes)
    constants = {name: value for name, value in module.named_buffers(recurse=False)}
    constants |= {n: v for n, v in vars(module).items() if isinstance(v, Tensor) and n.startswith("_tensor_constant")}
    return cast_gradients_early(normalize(module.graph, inputs, tuple(outputs), constants))


def _describe(
    model: nn.Module, example: Any, optimizer: OptimizerSpec | None, options: CaptureOptions
) -> tuple[Input, ...]:
    def spec(x: Tensor) -> Spec:
        return Spec(tuple(x.shape), x.dtype)

    params = {n: Input("param", n, spec(p), p.requires_grad) for n, p in model.named_parameters()}
    trained = [p for p in params.values() if p.requires_grad]
    if not trained:
        raise CaptureError("the model has no parameter to train", hint="set requires_grad on what should be trained")
    batch = Batch.of(example)
    scalars = [Input("scalar", "draw", Spec((), torch.int64))]
    state: list[Input] = []
    if optimizer is not None:
        scalars.append(Input("scalar", "step", Spec((), torch.float64)))
        scalars += [Input("scalar", f"lr.{g}", Spec((), torch.float64)) for g in range(len(optimizer.groups))]
        for p in (p for p in trained if p.name in optimizer.group_of):
            state += [Input("state", state_name(slot, p.name), p.spec) for slot in optimizer.slots(p.name)]
    acc = [Input("acc", p.name, p.spec) for p in trained] if options.accumulate > 1 else []
    buffers = [Input("buffer", n, spec(b)) for n, b in model.named_buffers()]
    held = [Input("batch", n, spec(t)) for n, t in zip(batch.names, batch.tensors, strict=True)]
    return (*params.values(), *buffers, *state, *acc, *held, *scalars)


def _fake_inputs(inputs: Sequence[Input], model: nn.Module, example: Any, mode: FakeTensorMode) -> list[Tensor]:
    real: dict[tuple[str, str], Tensor] = {("param", n): p for n, p in model.named_parameters()}
    real |= {("buffer", n): b for n, b in model.named_buffers()}
    real |= {("batch", n): t for n, t in zip(Batch.of(example).names, Batch.of(example).tensors, strict=True)}
    made = []
    for item in inputs:
        like = real.get((item.kind, item.name))
        made.append(
            fake_like(
                mode, like if like is not None else torch.empty(item.spec.shape, dtype=item.spec.dtype, device="meta")
            )
        )
    return made


def _unflatten(inputs: Sequence[Input], flat: Sequence[Tensor]) -> _Values:
    by_kind: dict[str, dict[str, Tensor]] = {k: {} for k in ("param", "buffer", "state", "acc", "batch", "scalar")}
    for item, value in zip(inputs, flat, strict=True):
        by_kind[item.kind][item.name] = value
    return _Values(
        by_kind["param"],
        by_kind["buffer"],
        by_kind["state"],
        by_kind["acc"],
        list(by_kind["batch"].values()),
        by_kind["scalar"],
    )


def _step(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batch: Batch,
    optimizer: OptimizerSpec | None,
    options: CaptureOptions,
    forward: Callable[[nn.Module, Any], Any],
    hooks: Hooks | None,
    tracker: Provenance,
    values: _Values,
) -> dict[tuple[str, str], Tensor]:
    """Outputs by (kind, name). Runs under the tracer."""
    wanted = {n: p.requires_grad for n, p in model.named_parameters()}
    leaves = {n: p.detach().requires_grad_(wanted[n]) for n, p in values.params.items()}
    buffers = {n: b.clone() for n, b in values.buffers.items()}
    data = batch.rebuild(values.batch)

    def forward_and_backward(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        with _autocast(options.autocast):
            out = forward(model, data)
            tracker.phase = "loss"
            value = _scalar_loss(loss(out, data))
        told = value.detach().to(torch.promote_types(value.dtype, torch.float32))
        tracker.phase = "backward"
        return told, _gradients(value, {n: p for n, p in leaves.items() if p.requires_grad})

    with torch.enable_grad():
        with _autocast(options.autocast):
            tensors = {**cast_parameters(leaves, options.param_dtype, tracker), **buffers}
        own = [(t, tensors[n]) for n, t in (*model.named_parameters(), *model.named_buffers())]
        with CapturedFunctions(own), tracker.inside(model), hooks(model) if hooks else nullcontext():
            told, grads = Substituted.run(model, tensors, forward_and_backward)
    results = {("loss", ""): told, **{("buffer", n): b for n, b in buffers.items()}}
    if options.accumulate > 1:
        for name, gradient in grads.items():
            tracker.modules = [name.rpartition(".")[0]]
            grads[name] = values.acc[name] + gradient * (1.0 / options.accumulate)
        tracker.modules = []
        results |= {("acc", n): g for n, g in grads.items()}
    results |= {("grad", n): g for n, g in grads.items()}
    if optimizer is not None:
        tracker.phase = "update"
        results |= _update(optimizer, options, tracker, values, grads)
    return results


def _gradients(value: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of each leaf that has one, with what a `backward()` inside the backward pass has added to it."""
    found = gradients(value, list(leaves.values()))
    parts = {n: [g for g in (grad, leaves[n].grad) if g is not None] for n, grad in zip(leaves, found, strict=True)}
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
    if not value.requires_grad:
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
    for name in (n for n in grads if n in optimizer.group_of):
        tracker.modules = [name]
        state = {slot: values.state[state_name(slot, name)] for slot in optimizer.slots(name)}
        new, new_state = update(
            optimizer.kind,
            optimizer.hyper(name),
            values.params[name],
            grads[name],
            state,
            values.scalars[f"lr.{optimizer.group_of[name]}"],
            values.scalars["step"],
        )
        results["param", name] = new
        results |= {("state", state_name(slot, name)): s for slot, s in new_state.items()}
    tracker.modules = []
    return results
