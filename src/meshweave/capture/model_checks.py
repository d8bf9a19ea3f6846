"""What cannot be captured of a model, and what forward must not do: checked when a step is compiled."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshweave.capture.record import storage_of
from meshweave.errors import CaptureError
from meshweave.interop.fake import FakeTensor
from meshweave.interop.hooks import tensor_hooks
from meshweave.interop.modules import compiled_modules, own_parameters
from meshweave.interop.storages import sharing
from meshweave.interop.tracing import leaves
from meshweave.ir.graph import StepGraph

# Wrappers that communicate by themselves, by the names of their classes (and of the packages that have them).
_WRAPPERS = {
    "DistributedDataParallel": ("torch", "pass the plain model (wrapper.module) with mesh='dp=N'"),
    "DataParallel": ("torch", "pass the plain model (wrapper.module) with mesh='dp=N'"),
    "FullyShardedDataParallel": ("torch", "pass the plain model, before FSDP(...), with mesh='fsdp=N'"),
    "FSDPModule": ("torch", "pass the plain model, without fully_shard(...), with mesh='fsdp=N'"),
    "DeepSpeedEngine": ("deepspeed", "pass the plain model, before deepspeed.initialize(...), with mesh='fsdp=N'"),
}


def check_unwrapped(model: nn.Module) -> None:
    """CaptureError for a model in a wrapper of another library that communicates by itself."""
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            package, hint = _WRAPPERS.get(kind.__name__, ("", ""))
            if package and kind.__module__.partition(".")[0] == package:
                raise CaptureError(
                    "the model, or a part of it, communicates by itself",
                    where=f"module '{name}'",
                    got=kind.__name__,
                    expected="the plain model: meshweave adds all communication",
                    hint=f"{hint} (docs/migrate.md); of Accelerate: prepare_model(model, evaluation_mode=True)",
                )


def check_shapes(model: nn.Module) -> None:
    """Raises CaptureError for a parameter of a lazy module that has not been called, and for an attribute that is a
    tensor on the meta device, but neither a parameter nor a buffer: nothing fills it."""
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta and id(value) not in known:
                raise CaptureError(
                    f"the attribute '{f'{path}.{name}' if path else name}' is a tensor without values",
                    got="a plain tensor attribute, on the meta device",
                    expected="parameters and buffers on the meta device, which are filled when the step is compiled",
                    hint="make it outside of torch.device('meta'), or in forward; or "
                    f"self.register_buffer('{name}', ..., persistent=False) with a reset_parameters() that fills it",
                )
    for name, param in model.named_parameters():
        if isinstance(param, nn.UninitializedParameter):
            raise CaptureError(
                f"the parameter '{name}' has no shape yet", hint="call the model once on a batch before mw.compile"
            )


def check_loss(loss: Any, example: Any) -> None:
    """Raises CaptureError for a loss of torch, module or function, which takes (outputs, target), where a batch is more
    than one tensor."""
    if isinstance(example, Tensor):
        return
    name = next((f"functional.{name}" for name, function in vars(functional).items() if function is loss), "")
    if isinstance(loss, nn.Module) and type(loss).__module__ == "torch.nn.modules.loss":
        name = type(loss).__name__
    if not name:
        return
    raise CaptureError(
        "this loss takes (outputs, targets)",
        where="loss=",
        got=f"torch.nn.{name}",
        expected="a function of (outputs, batch)",
        hint="loss=lambda outputs, batch: criterion(outputs, batch[1]), or batch['y'] for a dict",
    )


def check_not_compiled(model: nn.Module) -> None:
    """CaptureError for modules wrapped by torch.compile, whose graphs no tracer sees into, or by another library."""
    if not isinstance(model, nn.Module):
        raise CaptureError("not a model", got=type(model).__name__, expected="a torch.nn.Module")
    if names := compiled_modules(model):
        raise CaptureError(
            "the model, or a part of it, is compiled by torch.compile",
            where=f"module '{names[0]}' ({type(model.get_submodule(names[0])).__name__})",
            got=f"{len(names)} compiled modules",
            expected="the plain model",
            hint="pass the plain model to meshweave: remove torch.compile(model), model.compile()",
        )
    check_unwrapped(model)


def check_new_tensors() -> None:
    """Raises CaptureError if new tensors have no data: compile creates some that need data."""
    new = torch.empty(0)
    if new.is_meta or isinstance(new, FakeTensor):
        raise CaptureError(
            "compile is called where new tensors have no data",
            got="a default device meta, or a FakeTensorMode",
            expected="compile outside of such a block; only the model may be on the meta device",
            hint="leave the block, torch.device('meta') or FakeTensorMode(), before you call compile",
        )


def check_hooks(parameters: Mapping[str, Tensor]) -> None:
    """Raises CaptureError if forward has left a hook on a parameter: PyTorch would add another in every step."""
    for name, parameter in parameters.items():
        if hooks := tensor_hooks(parameter):
            raise CaptureError(
                f"every step leaves a hook on the parameter '{name}'",
                got=f"{hooks[0]} in forward",
                expected="hooks registered before compile, or removed within the step",
                hint="keep the handle that it returns and call its remove() before forward returns",
            )


def check_leaves(value: Tensor, parameters: Mapping[int, str]) -> None:
    """Raises CaptureError if the loss depends on a parameter (`parameters` are their names by id) directly instead of
    on its substitute in the trace: its gradient would be lost."""
    for leaf in leaves(value):
        if id(leaf) in parameters:
            raise CaptureError(
                f"an autograd.Function gets the parameter '{parameters[id(leaf)]}' from a list, a dict or a closure",
                got="a gradient that would not reach the parameter",
                expected="parameters that the module passes as its attributes",
                hint="keep it as an attribute or in an nn.ParameterList, and pass self.name to apply()",
            )


def check_parameters(
    model: nn.Module, tensors: Mapping[str, Tensor], storages: Mapping[str, int], params: Set[str]
) -> None:
    """Raises CaptureError for a parameter that forward has replaced, and for a parameter or buffer whose values it has
    changed by `.data`."""
    for name, storage in storages.items():
        path, _, key = name.rpartition(".")
        is_replaced = name in params and own_parameters(model.get_submodule(path)).get(key) is not tensors[name]
        if is_replaced or storage_of(tensors[name]) != storage:
            raise CaptureError(
                f"the model replaces its {'parameter' if name in params else 'buffer'} '{name}'",
                got="another tensor, or other values by .data, after forward",
                expected="parameters that only the optimizer changes, buffers that are assigned or changed in place",
                hint="compute a new tensor from the parameter, or keep state between steps in a buffer (self.k = "
                "..., without .data)",
            )


def check_aliases(model: nn.Module, step: StepGraph) -> None:
    """Raises CaptureError if a trained parameter, or a buffer that forward changes, is visible through a second tensor:
    another parameter or buffer, or a constant of the graph (an attribute such as `self.w = self.a.weight.detach()`)."""
    named = {("param", n): p for n, p in model.named_parameters()} | {
        ("buffer", n): b for n, b in model.named_buffers()
    }
    constants = {("constant", n): t for n, t in step.constants.items()}
    changed = _changed(step, named)
    tensors = {key: x.to_local() if hasattr(x, "to_local") else x for key, x in (named | constants).items()}
    for other, key in sharing(tensors, _memory):
        if other in changed or key in changed:
            seen = f"the {key[0]} '{key[1]}'" if key[0] != "constant" else "a tensor that forward or the loss reads"
            raise CaptureError(
                f"{seen} shares memory with the {'parameter' if other[0] == 'param' else 'buffer'} '{other[1]}'",
                got="two tensors on the same storage, and the step changes one of them",
                expected="a storage of its own for each value",
                hint="use the parameter or buffer itself (tie weights by assigning the same Parameter), or clone it",
            )


def _changed(step: StepGraph, named: Mapping[tuple[str, str], Tensor]) -> set[tuple[str, str]]:
    """The parameters that are trained or that forward changes, and the buffers whose final value differs from the
    initial value."""
    inputs = step.sources
    changed = {key for key, value in step.results.items() if key[0] in ("buffer", "param") and value not in inputs}
    return changed | {key for key, tensor in named.items() if key[0] == "param" and tensor.requires_grad}


def _memory(tensor: Tensor) -> int:
    """The address of a strided tensor's storage, which several storages may have (of an array of NumPy); 0 if it is
    empty or, as that of a fake tensor, on the meta device."""
    storage = tensor.untyped_storage()
    return 0 if storage.device.type == "meta" or not storage.nbytes() else storage.data_ptr()
