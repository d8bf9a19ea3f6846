"""Where modules store their tensors and submodules, and traces of torch.compile on them.

Holds for torch 2.11 to 2.13 (torch/nn/modules/module.py). The public interface accesses the dicts entry by entry, and
`register_parameter` runs hooks and rejects names that a property shadows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

Dicts = tuple[dict[str, Any], dict[str, Any]]


def own_tensors(module: nn.Module) -> dict[str, Tensor | None]:
    """Parameters and buffers that the module itself registers, in order, None for a name without a tensor."""
    return {**module._parameters, **module._buffers}


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict of parameters itself: writes to it are neither checked nor seen by hooks."""
    return module._parameters


def pass_for_parameter(tensor: Tensor) -> None:
    """Make isinstance(tensor, nn.Parameter) true, which checks an attribute (torch/nn/parameter.py)."""
    tensor._is_param = True  # type: ignore[attr-defined]


def copied_dicts(module: nn.Module) -> Dicts:
    """The parameters and the buffers of a module, for `restore_dicts`."""
    return dict(module._parameters), dict(module._buffers)


def restore_dicts(module: nn.Module, dicts: Dicts) -> None:
    module._parameters, module._buffers = dicts


def twin_of(module: nn.Module, tensor: Callable[[Tensor | None], Any]) -> tuple[Any, Mapping[str, Any]]:
    """A module of the same type and attributes with `tensor` of each of its own tensors, without submodules, and the
    submodules of `module`, for `set_submodules`."""
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    twin._parameters = {key: tensor(p) for key, p in module._parameters.items()}
    twin._buffers = {key: tensor(b) for key, b in module._buffers.items()}
    return twin, module._modules


def set_submodules(module: nn.Module, children: Mapping[str, nn.Module | None]) -> None:
    module._modules = dict(children)


def compiled_modules(model: nn.Module) -> list[str]:
    """The names of the modules ("" for the model itself) that were passed to torch.compile or have called compile()
    (torch/_dynamo/eval_frame.py, OptimizedModule)."""
    return [
        name
        for name, module in model.named_modules()
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None
    ]


@contextmanager
def plain_batch_norm() -> Iterator[None]:
    """A context in which SyncBatchNorm runs as BatchNorm: on a global batch the statistics are global anyway."""
    own, nn.SyncBatchNorm.forward = nn.SyncBatchNorm.forward, nn.modules.batchnorm._BatchNorm.forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward = own  # type: ignore[method-assign]
