"""Optimizers as data: hyper-parameters read once, and each kind's update as a pure function of tensors.

An update is made of pointwise ops alone (neg, add, sub, mul, div, sqrt, maximum, expm1, eq, where and dtype
conversions), so that it can be traced and runs on any piece of a parameter. It rounds to the parameter's dtype where
the single-tensor optimizers of torch do, and computes between in float32 at least (torch's `opmath`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.errors import PlanError
from meshweave.interop.hooks import optimizer_hooks


@dataclass(frozen=True, slots=True)
class SGDHyper:
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False


@dataclass(frozen=True, slots=True)
class AdamHyper:
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    decoupled_weight_decay: bool = False


Hyper = SGDHyper | AdamHyper
State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """What an optimizer does to each parameter. `group_of` maps a parameter's name to its index in `groups`.

    The learning rate is not part of it: it may change with every step and is read by `current_lrs`.
    """

    kind: str
    groups: tuple[Hyper, ...]
    group_of: Mapping[str, int] = field(hash=False)

    def hyper(self, name: str) -> Hyper:
        return self.groups[self.group_of[name]]

    def slots(self, name: str) -> tuple[str, ...]:
        """Names of the state tensors of parameter `name`; each has the parameter's shape and dtype, and begins as 0."""
        return KINDS[self.kind].slots(self.hyper(name))


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """State of an optimizer that has taken steps already: the number of the last step, and tensors by name and slot.

    SGD does not count its steps; `num_steps` is then 1, which says all that its update asks: not the first step.
    A parameter that has taken no step has no entry.
    """

    num_steps: int
    tensors: Mapping[str, State]


def _opmath(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _lerp(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """As ATen's lerp with a scalar weight (aten/src/ATen/native/Lerp.h), which changes its formula at 0.5."""
    if weight < 0.5:
        return start + weight * (end - start)
    return end - (end - start) * (1 - weight)


def _bias_correction(beta: float, step: Tensor) -> Tensor:
    """1 - beta ** step, as -expm1(step * log(beta)): the plain form loses 3 digits at beta 0.999, step 1."""
    return -torch.expm1(step * (math.log(beta) if beta > 0 else -math.inf))


def _update_sgd(
    h: SGDHyper, param: Tensor, grad: Tensor, state: State, lr: Tensor, step: Tensor
) -> tuple[Tensor, State]:
    dtype, wide = param.dtype, _opmath(param.dtype)
    p, g = param.to(wide), (-grad if h.maximize else grad).to(wide)
    if h.weight_decay:
        g = (g + h.weight_decay * p).to(dtype).to(wide)
    if not h.momentum:
        return (p - lr * g).to(dtype), {}
    decayed = (h.momentum * state["momentum_buffer"].to(wide)).to(dtype).to(wide)
    buffer = (decayed + (1 - h.dampening) * g).to(dtype).to(wide)
    if h.dampening:
        buffer = torch.where(step == 1, g, buffer)
    direction = (g + h.momentum * buffer).to(dtype).to(wide) if h.nesterov else buffer
    return (p - lr * direction).to(dtype), {"momentum_buffer": buffer.to(dtype)}


def _update_adam(
    h: AdamHyper, param: Tensor, grad: Tensor, state: State, lr: Tensor, step: Tensor
) -> tuple[Tensor, State]:
    dtype, wide = param.dtype, _opmath(param.dtype)
    beta1, beta2 = h.betas
    p, g = param.to(wide), (-grad if h.maximize else grad).to(wide)
    if h.weight_decay and h.decoupled_weight_decay:
        p = (p * (1 - lr * h.weight_decay)).to(dtype).to(wide)
    elif h.weight_decay:
        g = (g + h.weight_decay * p).to(dtype).to(wide)
    mean = _lerp(state["exp_avg"].to(wide), g, 1 - beta1).to(dtype)
    decayed = (beta2 * state["exp_avg_sq"].to(wide)).to(dtype).to(wide)
    square = (decayed + (1 - beta2) * g * g).to(dtype)
    new_state = {"exp_avg": mean, "exp_avg_sq": square}
    if h.amsgrad:
        square = new_state["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], square)
    root = square.to(wide).sqrt().to(dtype).to(wide)
    scaled = (root / _bias_correction(beta2, step).sqrt()).to(dtype).to(wide)
    denominator = (scaled + h.eps).to(dtype).to(wide)
    step_size = lr / _bias_correction(beta1, step)
    return (p - step_size * mean.to(wide) / denominator).to(dtype), new_state


def _sgd_slots(h: SGDHyper) -> tuple[str, ...]:
    return ("momentum_buffer",) if h.momentum else ()


def _adam_slots(h: AdamHyper) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if h.amsgrad else ()))


@dataclass(frozen=True, slots=True)
class Kind:
    """One row per kind of optimizer: how its options are named, which state it keeps, and how it updates."""

    hyper: type[SGDHyper] | type[AdamHyper]
    slots: Callable[[Any], tuple[str, ...]]
    update: Callable[[Any, Tensor, Tensor, State, Tensor, Tensor], tuple[Tensor, State]]


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "SGD": Kind(SGDHyper, _sgd_slots, _update_sgd),
        "Adam": Kind(AdamHyper, _adam_slots, _update_adam),
    }
)
# AdamW is Adam with decoupled_weight_decay, in torch too (torch/optim/adamw.py).
_KIND_OF: Mapping[type[torch.optim.Optimizer], str] = MappingProxyType(
    {torch.optim.SGD: "SGD", torch.optim.Adam: "Adam", torch.optim.AdamW: "Adam"}
)
# Options that must be off, each with what to do about it. The last two are left in a group by OneCycleLR and CyclicLR
# when they change the momentum with every step (torch/optim/lr_scheduler.py).
_UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "differentiable": "leave differentiable=False",
        "max_momentum": "give the scheduler cycle_momentum=False: only the learning rate may change between steps",
        "base_momentum": "give the scheduler cycle_momentum=False: only the learning rate may change between steps",
    }
)


def update(
    kind: str, hyper: Hyper, param: Tensor, grad: Tensor, state: State, lr: Tensor, step: Tensor
) -> tuple[Tensor, State]:
    """One step: the new parameter and its new state. Nothing is written in place.

    `lr` and `step` are 0-dim float64, as the numbers that torch's optimizers compute with; `step` is the number of
    this step and starts at 1. The result has the parameter's dtype.
    """
    return KINDS[kind].update(hyper, param, grad, state, lr, step)


def read_optimizer(optimizer: torch.optim.Optimizer, names: nn.Module | Mapping[int, str]) -> OptimizerSpec:
    """Read `optimizer`. `names` is the model, or a map from id(parameter) to its name.

    `foreach`, `fused` and `capturable` only choose among implementations and are ignored.
    Raises PlanError for another class of optimizer (subclasses too, as they may step differently), an option that is
    not supported, hooks, complex parameters and parameters that the model does not have.
    """
    kind = _kind(optimizer)
    check_hooks(optimizer)
    named = _names(names)
    groups, group_of = [], {}
    for index, group in enumerate(optimizer.param_groups):
        check_options(optimizer, index, group)
        groups.append(_read_hyper(KINDS[kind].hyper, group))
        group_of.update(dict.fromkeys((_name(p, named, optimizer, index) for p in group["params"]), index))
    return OptimizerSpec(kind, tuple(groups), MappingProxyType(group_of))


def hyper_names(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The options of a group that the update depends on, without the learning rate."""
    return tuple(f.name for f in fields(KINDS[_kind(optimizer)].hyper))


def check_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raises PlanError for what would run with the optimizer's own step and not with a compiled one."""
    hooks = optimizer_hooks(optimizer)
    if hooks:
        raise PlanError(
            "the optimizer has hooks, which a compiled step would not call",
            where=type(optimizer).__name__,
            got=", ".join(hooks),
            expected="the optimizer's own step alone",
            hint="remove them, and do before or after each call of the compiled step what they do",
        )


def current_lrs(optimizer: torch.optim.Optimizer) -> list[float]:
    """The learning rate of each group, now."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def counts(optimizer: torch.optim.Optimizer, names: Iterable[str], num_steps: int) -> dict[str, dict[str, Tensor]]:
    """What PyTorch's optimizer of this kind keeps of parameters beside tensors of their shape, after so many steps."""
    if KINDS[_kind(optimizer)].hyper is not AdamHyper:
        return {}
    return {name: {"step": torch.tensor(float(num_steps))} for name in names}


def initial_state(
    optimizer: torch.optim.Optimizer, names: nn.Module | Mapping[int, str], updated: Iterable[str] = ()
) -> OptimizerState | None:
    """The state of an optimizer that has taken steps already, or None for a fresh one. Its tensors are not copied.

    `updated` are the parameters that a step changes. Raises PlanError when parameters have taken different numbers of
    steps, or some of those none.
    """
    spec, named = read_optimizer(optimizer, names), _names(names)
    tensors, counts = {}, {}
    for param, kept in optimizer.state.items():
        name = named[id(param)]
        slots = {slot: kept[slot] for slot in spec.slots(name) if kept.get(slot) is not None}
        if not slots:
            continue
        tensors[name] = slots
        counts[name] = int(kept.get("step", 1))
    if not tensors:
        return None
    _check_counts({name: 0 for name in updated if spec.slots(name)} | counts)
    return OptimizerState(next(iter(counts.values())), tensors)


def _kind(optimizer: torch.optim.Optimizer) -> str:
    if type(optimizer) not in _KIND_OF:
        raise PlanError(
            f"the optimizer {type(optimizer).__name__} is not supported",
            got=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            expected="exactly torch.optim.SGD, torch.optim.Adam or torch.optim.AdamW",
            hint="use one of these, or add a row to KINDS in meshweave/capture/optimizers.py",
        )
    return _KIND_OF[type(optimizer)]


def _names(names: nn.Module | Mapping[int, str]) -> Mapping[int, str]:
    return {id(p): name for name, p in names.named_parameters()} if isinstance(names, nn.Module) else names


def _name(param: Tensor, named: Mapping[int, str], optimizer: torch.optim.Optimizer, index: int) -> str:
    where = f"{type(optimizer).__name__}, param_groups[{index}]"
    if id(param) not in named:
        raise PlanError(
            "the optimizer holds a parameter that the model does not have",
            where=where,
            got=f"a parameter of shape {tuple(param.shape)}",
            hint="make the optimizer from model.parameters() of the same model, after it was last changed",
        )
    if param.is_complex():
        raise PlanError("a complex parameter is not supported", where=where, got=f"{named[id(param)]}: {param.dtype}")
    return named[id(param)]


def check_options(optimizer: torch.optim.Optimizer, index: int, group: Mapping[str, Any]) -> None:
    """Raises PlanError for an option of a group that is not supported."""
    for option, hint in _UNSUPPORTED.items():
        if group.get(option):
            raise PlanError(
                f"the option '{option}' is not supported",
                where=f"{type(optimizer).__name__}, param_groups[{index}]",
                got=f"{option}={group[option]}",
                expected=", ".join(f.name for f in fields(KINDS[_kind(optimizer)].hyper)) + " and lr",
                hint=hint,
            )


def _read_hyper(kind: type[SGDHyper] | type[AdamHyper], group: Mapping[str, Any]) -> Hyper:
    # Options may be 1-element tensors in torch; older saved groups lack the newer options, which are then off.
    return kind(**{f.name: plain_option(group[f.name]) for f in fields(kind) if f.name in group})


def plain_option(value: Any) -> Any:
    """An option, which may be a tensor with one element, as a number or a tuple of numbers."""
    if isinstance(value, (tuple, list)):
        return tuple(plain_option(v) for v in value)
    if isinstance(value, bool):
        return value
    return float(value)


def _check_counts(counts: Mapping[str, int]) -> None:
    low, high = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    if counts[low] != counts[high]:
        raise PlanError(
            "the parameters have taken different numbers of steps",
            where="state of the optimizer",
            got=f"{low}: {counts[low]}, {high}: {counts[high]}",
            expected="one number of steps for all",
            hint="train all parameters from the first step on, or start with a fresh optimizer",
        )
