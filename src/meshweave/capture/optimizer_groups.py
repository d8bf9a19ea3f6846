"""A user's optimizers as a single optimizer: whether they can be compiled, and the options of their groups."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.errors import OutdatedUpdate, PlanError
from meshweave.interop.hooks import is_initialized, optimizer_hooks

_LOG = logging.getLogger("meshweave")
_PLAIN = (bool, int, float, str, type(None))


class SeveralOptimizers(torch.optim.Optimizer):
    """An optimizer that steps each of `optimizers`.

    Groups and state are theirs, not copies: writes to either are visible in both. The list of groups is new on each
    access; add a group to the individual optimizer."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)  # does not call the base class, which would create its own groups
        self.defaults: dict[str, Any] = {}
        self._states = _States(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> MutableMapping[Tensor, Any]:  # type: ignore[override]
        return self._states


class _States(MutableMapping[Tensor, Any]):
    """The state of all optimizers by parameter, each in the optimizer that has the parameter."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self._owners: dict[Tensor, torch.optim.Optimizer] = {}

    def _of(self, param: Tensor) -> MutableMapping[Tensor, Any]:
        if param not in self._owners:
            self._owners = {p: o for o in self.optimizers for group in o.param_groups for p in group["params"]}
        owner = self._owners.get(param)
        if owner is not None:
            return owner.state
        return next((o.state for o in self.optimizers if param in o.state), {})  # of a parameter that left its group

    def __getitem__(self, param: Tensor) -> Any:
        return self._of(param)[param]

    def __setitem__(self, param: Tensor, value: Any) -> None:
        self._of(param)[param] = value

    def __delitem__(self, param: Tensor) -> None:
        del self._of(param)[param]

    def __contains__(self, param: object) -> bool:
        return isinstance(param, Tensor) and param in self._of(param)

    def __iter__(self) -> Iterator[Tensor]:
        return (param for optimizer in self.optimizers for param in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self.optimizers)


def optimizer_of(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimizer itself; several, in a list or tuple, as a single optimizer. Raises PlanError if they share a
    parameter, and for other objects."""
    parts = tuple(optimizer) if isinstance(optimizer, (list, tuple)) else (optimizer,)
    if optimizer is None:
        return None
    for index, part in enumerate(parts):
        if not isinstance(part, torch.optim.Optimizer):
            raise PlanError(
                "not an optimizer",
                where="optimizer=" if part is optimizer else f"optimizer=, item {index}",
                got=type(part).__name__,
                expected="a torch.optim.Optimizer, or a list of several over disjoint parameters",
            )
        if not all(map(is_initialized, parts_of(part))):
            raise PlanError(
                "a wrapper around an optimizer, or an optimizer that has not called its base class",
                where="optimizer=" if part is optimizer else f"optimizer=, item {index}",
                got=type(part).__name__,
                expected="the torch.optim.Optimizer itself",
                hint="of Accelerate's and Lightning's wrapper: optimizer=optimizer.optimizer; in an optimizer of your "
                "own call super().__init__(params, defaults)",
            )
    if not parts:
        raise PlanError(
            "no optimizer in the list", where="optimizer=", got=repr(optimizer), hint="optimizer=None trains nothing"
        )
    owners: dict[Tensor, int] = {}
    for index, part in enumerate(parts):
        for param in (p for group in part.param_groups for p in group["params"]):
            if param in owners:
                raise PlanError(
                    "two optimizers have the same parameter",
                    where=f"optimizer=, items {owners[param]} and {index}",
                    got=f"a parameter of shape {list(param.shape)} in both",
                    expected="every parameter in one optimizer",
                    hint="matrices = [p for p in model.parameters() if p.dim() == 2], the rest for the other",
                )
        owners |= {p: index for group in part.param_groups for p in group["params"]}
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else SeveralOptimizers(parts)


def parts_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that step: itself, or its parts."""
    return optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def name_of(optimizer: torch.optim.Optimizer) -> str:
    return " and ".join(type(part).__name__ for part in parts_of(optimizer))


def check_callable(optimizer: torch.optim.Optimizer) -> None:
    """Raises PlanError for an optimizer whose step needs the loss again."""
    for part in parts_of(optimizer):
        _check_callable(part)


def _check_callable(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise PlanError(
            "SparseAdam takes sparse gradients, which a compiled step does not have",
            hint="train with Adam, or use eager PyTorch",
        )
    step: Callable[..., Any] = inspect.unwrap(type(optimizer).step)
    needed = [
        p.name
        for p in list(inspect.signature(step).parameters.values())[1:]
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        where = f"{step.__code__.co_filename}:{step.__code__.co_firstlineno} in {step.__name__}"
        raise evaluates_loss(type(optimizer).__name__, where, f"step({', '.join(needed)})")


def evaluates_loss(name: str, where: str, got: str) -> PlanError:
    """The error for an optimizer that needs a closure."""
    return PlanError(
        f"the optimizer {name} evaluates the loss several times in a step",
        where=where,
        got=got,
        expected="an optimizer whose step() takes the gradients of one backward pass",
        hint="train with such an optimizer (SGD, Adam, Muon, ...), or use eager PyTorch",
    )


def check_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raises PlanError for hooks that would run with the optimizer's own step but not with a compiled step."""
    hooks = [hook for part in parts_of(optimizer) for hook in optimizer_hooks(part)]
    if hooks:
        raise PlanError(
            "the optimizer has hooks, which a compiled step would not call",
            where=name_of(optimizer),
            got=", ".join(hooks),
            expected="an optimizer without hooks",
            hint="remove them, and do their work before or after each call of the compiled step",
        )


def names_by_id(names: nn.Module | Mapping[int, str]) -> Mapping[int, str]:
    return {id(p): name for name, p in names.named_parameters()} if isinstance(names, nn.Module) else names


def check_param(param: Tensor, named: Mapping[int, str], optimizer: torch.optim.Optimizer, index: int) -> None:
    where = f"{name_of(optimizer)}, param_groups[{index}]"
    if id(param) not in named:
        raise PlanError(
            "the optimizer has a parameter that the model lacks",
            where=where,
            got=f"a parameter of shape {tuple(param.shape)}",
            hint="create the optimizer from model.parameters() of the same model, after its last change; parameters "
            "of a loss belong in the model (self.criterion = ... in it, and loss=model.criterion)",
        )


class OptimizerGuard:
    """The guard of a compiled step's optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.params = [list(group["params"]) for group in optimizer.param_groups]

    def check(self) -> None:
        """Raises OutdatedUpdate for changes; PlanError for hooks."""
        check_hooks(self.optimizer)
        groups = self.optimizer.param_groups
        if not _equal([group["params"] for group in groups], self.params):
            got = f"{len(groups)} groups, or other parameters in them"
            raise OutdatedUpdate(
                "the optimizer has changed since the step was compiled",
                where=f"{name_of(self.optimizer)}, param_groups",
                got=got,
                expected=f"{len(self.params)} groups",
                hint="step.save(path), compile again with it, step.load(path)",
            )


def _equal(now: Any, before: Any) -> bool:
    """Equal containers of the same tensors."""
    try:
        return bool(now == before)
    except RuntimeError:  # other tensors, whose comparison has no truth value
        return False


def note_untrained(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Warn about parameters that require gradients but are in no group of the optimizer: another optimizer would get
    none."""
    if optimizer is None:
        return
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in trained]
    if names:
        shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        _LOG.warning(
            "%d parameters require gradients, but are in no group of the optimizer (%s): they keep their values, and "
            "p.grad is not written for another optimizer",
            len(names),
            shown,
        )


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """By group, the options that are plain values, sequences of them or tensors of a single number."""
    return [
        {key: _number(value) for key, value in group.items() if key != "params" and _is_plain(_number(value))}
        for group in optimizer.param_groups
    ]


def put_options(optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Set the saved options in groups, as `optimizer.load_state_dict` does. If the groups differ now, all stay
    unchanged, with a warning."""
    if not saved:  # from a checkpoint without options
        return
    if len(saved) != len(optimizer.param_groups):
        _LOG.warning(
            "%s has %d groups of parameters, and had %d when the checkpoint was written: options (lr, ...) stay as "
            "they are",
            name_of(optimizer), len(optimizer.param_groups), len(saved),
        )  # fmt: skip
        return
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        for key, value in options.items():
            now = group.get(key)
            if isinstance(now, Tensor):
                now.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value


def numbers_in(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group, with numbers as floats."""

    def plain(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(map(plain, value))
        is_number = type(value) is int or (isinstance(value, Tensor) and value.numel() == 1)
        return float(value) if is_number else value

    return {key: plain(value) for key, value in group.items() if key != "params"}


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, (list, tuple)) else isinstance(value, _PLAIN)
