"""Where modules store their tensors and submodules, and traces of torch.compile on them.

Holds for torch 2.11 to 2.13 (torch/nn/modules/module.py). The public interface accesses the dicts entry by entry, and
`register_parameter` runs hooks and rejects names that a property shadows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that the module itself registers, in order."""
    return {name: x for name, x in {**module._parameters, **module._buffers}.items() if x is not None}


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict of parameters itself: writes to it are neither checked nor seen by hooks."""
    return module._parameters


def pass_for_parameter(tensor: Tensor) -> None:
    """Make isinstance(tensor, nn.Parameter) true, which checks an attribute (torch/nn/parameter.py)."""
    tensor._is_param = True  # type: ignore[attr-defined]


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
