"""Where torch stores the hooks of tensors, modules and optimizers (torch 2.11 to 2.13: torch/nn/modules/module.py,
torch/optim/optimizer.py, torch/_tensor.py), and what its learning-rate schedulers expect of an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell schedulers that the optimizer has taken a step, because a compiled step takes it instead. Schedulers warn
    when they step before the optimizer has, and read this attribute (torch/optim/lr_scheduler.py, LRScheduler.step).
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a compiled step, or a scheduler's wrapper around `step()`, has marked the optimizer."""
    return getattr(optimizer, "_opt_called", False)


# Attributes of a module that contain hooks which run in forward or backward.
MODULE_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"})

# Attributes of a tensor with hooks -> the method that registers them.
TENSOR_HOOKS: Mapping[str, str] = MappingProxyType(
    {
        "_backward_hooks": "register_hook",
        "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
    }
)


def hooks_of_all_modules() -> list[Mapping[Any, Any]]:
    """The registries of hooks that run for every module."""
    return [
        modules._global_forward_pre_hooks,
        modules._global_forward_hooks,
        modules._global_backward_pre_hooks,
        modules._global_backward_hooks,
    ]


def tensor_hooks(tensor: Tensor) -> list[str]:
    """The methods by which hooks were registered on a tensor."""
    return [method for attribute, method in TENSOR_HOOKS.items() if getattr(tensor, attribute, None)]


def is_initialized(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has called its base class: wrappers that only pass calls on do not."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> list[str]:
    """Hooks of an optimizer's own step: on it or on all optimizers, or a replaced method. The wrapper of torch's
    learning-rate schedulers only records that a step was taken."""
    registries = {
        "register_step_pre_hook": optimizer._optimizer_step_pre_hooks,
        "register_step_post_hook": optimizer._optimizer_step_post_hooks,
        "torch.optim.optimizer.register_optimizer_step_pre_hook": optimizers._global_optimizer_pre_hooks,
        "torch.optim.optimizer.register_optimizer_step_post_hook": optimizers._global_optimizer_post_hooks,
    }
    own = vars(optimizer).get("step")
    replaced = [] if own is None or hasattr(own, "_wrapped_by_lr_sched") else ["optimizer.step = ..."]
    return [name for name, hooks in registries.items() if hooks] + replaced
