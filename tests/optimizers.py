"""Optimizers with three settings each, one per group of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import meshweave as mw


class Lion(torch.optim.Optimizer):
    """As users write it (Chen et al., arXiv 2302.06675)."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    def look(self, p: Tensor) -> float:
        return 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"], state["count"] = torch.zeros_like(p), 0
                state["count"] += 1
                self.look(p)
                p.data.mul_(1 - group["lr"] * group["decay"])
                update = state["exp_avg"] * beta1 + p.grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)


def lion(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], n: Any) -> tuple[Tensor, dict[str, Tensor]]:
    mean = state["exp_avg"]
    change = (mean * n["beta1"] + grad * n["rest1"]).sign()
    return param * n["shrink"] + change * n["size"], {"exp_avg": mean * n["beta2"] + grad * n["rest2"]}


def lion_numbers(o: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    beta1, beta2 = o["betas"]
    numbers = {"beta1": beta1, "rest1": 1 - beta1, "beta2": beta2, "rest2": 1 - beta2, "size": -o["lr"]}
    return numbers | {"shrink": 1 - o["lr"] * o["decay"]}, {"count": state.get("count", 0) + 1}


mw.register_update(Lion, lion, lion_numbers, {"exp_avg": 0.0})

# Name of a class -> its options in the first, second and third group.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "SGD": (
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"momentum": 0.8, "nesterov": True},
        {"maximize": True},
    ),
    "Adam": (
        {"weight_decay": 0.1},
        {"betas": (0.3, 0.95), "eps": 0.001},
        {"amsgrad": True, "maximize": True},
    ),
    "AdamW": (
        {"weight_decay": 0.1},
        {"amsgrad": True, "weight_decay": 0.0},
        {"betas": (0.0, 0.5), "eps": 0.001},
    ),
    "Adafactor": (
        {},
        {"weight_decay": 0.1, "d": 0.5},
        {"beta2_decay": -0.5, "eps": (1e-06, 0.01), "maximize": True},
    ),
    "Adagrad": (
        {},
        {"lr_decay": 0.1, "weight_decay": 0.1},
        {"eps": 0.01, "maximize": True},
    ),
    "Adadelta": (
        {},
        {"rho": 0.5, "weight_decay": 0.1},
        {"eps": 0.01, "maximize": True},
    ),
    "Adamax": (
        {},
        {"betas": (0.5, 0.9), "weight_decay": 0.1},
        {"eps": 0.01, "maximize": True},
    ),
    "NAdam": (
        {},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"momentum_decay": 0.1, "maximize": True},
    ),
    "RAdam": (
        {},
        {"weight_decay": 0.1, "betas": (0.5, 0.9)},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
    "RMSprop": (
        {"eps": 0.001},
        {"momentum": 0.9, "weight_decay": 0.1, "eps": 0.001},
        {"centered": True, "eps": 0.1, "maximize": True},
    ),
    "Rprop": (
        {},
        {"etas": (0.3, 1.5)},
        {"step_sizes": (0.001, 0.01), "maximize": True},
    ),
    "ASGD": (
        {},
        {"t0": 2, "weight_decay": 0.1},
        {"lambd": 0.1, "alpha": 0.5, "maximize": True},
    ),
    "Muon": (
        {},
        {"nesterov": False, "weight_decay": 0.0},
        {"momentum": 0.5, "adjust_lr_fn": "match_rms_adamw"},
    ),
    "Lion": (
        {},
        {"betas": (0.5, 0.6)},
        {"decay": 0.1},
    ),
}


def make(kind: str, model: nn.Module, lr: float = 0.05, options: Any = None) -> torch.optim.Optimizer:
    """An optimizer over a model's parameters (of 2 dims alone for Muon), dealt to three groups with their settings."""
    params = [p for p in model.parameters() if kind != "Muon" or p.dim() == 2]
    groups = [{"params": params[i::3], "lr": lr / (i + 1), **options_of} for i, options_of in enumerate(SETTINGS[kind])]
    maker = Lion if kind == "Lion" else getattr(torch.optim, kind)
    return maker([g for g in groups if g["params"]], **(options or {}))
