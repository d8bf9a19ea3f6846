"""A user's optimizer over stand-ins: its own class, options and attributes, on tensors without data."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.optimizer_attributes import Followed, ValueChange, attributes_of, copied, own_containers
from meshweave.capture.optimizer_numbers import DataNumber, line_of
from meshweave.capture.optimizer_record import Key, Prepared, every_path, prepared
from meshweave.capture.optimizer_recorder import OptimizerRecorder
from meshweave.capture.optimizer_several import name_of, parts_of
from meshweave.capture.optimizer_shared import Place, SharedValues, own_classes
from meshweave.capture.rest import alike, forms_of
from meshweave.errors import CaptureError, MeshweaveError, PlanError
from meshweave.interop.optimizer import make_state
from meshweave.ir.graph import Spec

# Options that choose among implementations of the same update: the plain loop over parameters is traced.
_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True, slots=True)
class Kept:
    """State of a parameter between steps: its tensors, by slot, and the values that the optimizer's code computes
    itself (step counts, 0-dim tensors). `shared`: options of groups and attributes that `step()` has changed."""

    tensors: Mapping[str, Spec] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    shared: Mapping[Place, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        numbers = {k: v.item() if isinstance(v, Tensor) else v for k, v in self.numbers.items()}
        shared = sorted((place, repr(value)) for place, value in self.shared.items())
        return f"{sorted(self.tensors.items())} {sorted(numbers.items())} {shared or ''}"


class StandIns:
    """A copy of `optimizer` that shares nothing with it. `names`: id of a parameter -> its name."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
        self.source = optimizer
        self.params: dict[str, nn.Parameter] = {}
        self.group_of: dict[str, int] = {}
        memo: dict[int, Any] = {}
        self._own = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        self._notes = {name: forms_of(vars(p)) for name, p in self._own.items()}
        for index, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                stand_in = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
                # users' attributes on parameters: its own learning rate, no weight decay
                stand_in.__dict__.update(vars(p))
                memo[id(p)] = self.params[names[id(p)]] = stand_in
                self.group_of[names[id(p)]] = index
        params = tuple(memo)
        state: defaultdict[Any, Any] = defaultdict(dict)
        self.state = state
        memo |= {id(part.state): state for part in parts_of(optimizer)}
        self._memo = dict(memo)
        self._copies = [_copied(part, memo, state) for part in parts_of(optimizer)]
        self._groups = [list(own.param_groups) for own in self._copies]
        containers = self._containers()
        copies = [*map(vars, self._copies), *self._all_groups]
        self._followed = [
            Followed(values, own, params, containers) for values, own in zip(self._values(), copies, strict=True)
        ]
        self.is_unverified = False
        self.shared = SharedValues(parts_of(optimizer), self._copies, self._all_groups, self._memo)
        self.grads = {name: torch.empty_like(p, requires_grad=False) for name, p in self.params.items()}
        self._tensors: dict[tuple[str, str], Tensor] = {}
        self._runs: dict[tuple[str, tuple[bool, ...]], tuple[OptimizerRecorder, Prepared]] = {}

    def take_options(self) -> None:
        """Copy the present options of every group, and the user's attributes on parameters and on the optimizer."""
        for name, p in self._own.items():
            notes = self.params[name].__dict__
            notes.clear()
            notes.update(vars(p))
        containers = self._containers()
        changes = [
            followed.take(values, containers, self._memo_now)
            for followed, values in zip(self._followed, self._values(), strict=True)
        ]
        for own in self._all_groups:
            own.update({k: False for k in _IMPLEMENTATIONS if k in own})
        distinguishes = any(followed.distinguishes for followed in self._followed)
        is_relevant = max(changes) > (ValueChange.NONE if distinguishes else ValueChange.NUMBER)
        self.is_unverified |= is_relevant and any(map(own_classes, parts_of(self.source)))
        self.shared.note()

    def _values(self) -> list[dict[str, Any]]:
        """The attributes of each of the user's optimizers, and the options of each group."""
        groups = [group for part in parts_of(self.source) for group in part.param_groups]
        options = [{k: v for k, v in group.items() if k not in ("params", *_IMPLEMENTATIONS)} for group in groups]
        return [*map(attributes_of, parts_of(self.source)), *options]

    def _containers(self) -> set[int]:
        return {i for part in parts_of(self.source) for i in own_containers(part)}

    def _memo_now(self) -> dict[int, Any]:
        """The stand-ins of the user's objects, by id, for copies of attributes that refer to them."""
        memo: dict[int, Any] = {id(p): self.params[name] for name, p in self._own.items()}
        for part, own, groups in zip(parts_of(self.source), self._copies, self._groups, strict=True):
            memo |= {id(part): own, id(part.state): self.state, id(part.param_groups): own.param_groups}
            memo |= {id(group): own_group for group, own_group in zip(part.param_groups, groups, strict=True)}
        return memo

    @property
    def _all_groups(self) -> list[dict[str, Any]]:
        return [group for each in self._groups for group in each]

    def are_alike(self, kinds: Iterable[Sequence[str]]) -> bool:
        """Whether a first step still does the same to all parameters of each kind, for whatever `take_options` has
        copied; the next steps rely on it."""
        runs, _ = self.runs_of(self.trained())
        self.is_unverified = any(runs[name] != runs[names[0]] for names in kinds for name in names)
        return not self.is_unverified

    def have_other_notes(self, names: Sequence[str]) -> bool:
        """Whether user attributes on some parameters are neither as at first nor the same on all of them."""
        noted = [name for name in names if vars(self._own[name]) or self._notes[name]]
        if not noted:
            return False
        now = {name: forms_of(vars(self._own[name])) for name in names}
        changed = any(not alike(now[name], self._notes[name]) for name in noted)
        return changed and any(not alike(forms, now[names[0]]) for forms in now.values())

    def step(self, name: str, kept: Kept) -> tuple[list[Prepared], Kept]:
        """A step of a parameter, by every path through it, and its state after it."""
        after: list[Kept] = []

        def run(decisions: Sequence[bool]) -> Prepared:
            path, left = self._run(name, kept, decisions)
            after.append(left)
            return path

        records = every_path(run)
        if any(left.shown != after[0].shown for left in after[1:]):
            raise CaptureError(
                "the optimizer stores a number that depends on data",
                where=name_of(self.source),
                got=" or ".join(sorted({left.shown for left in after})),
                hint="keep it as a tensor: in optimizer.state[param], computed from the parameter or its gradient",
            )
        return records, after[0]

    def _run(self, name: str, kept: Kept, decisions: Sequence[bool]) -> tuple[Prepared, Kept]:
        key, param = (name, tuple(decisions)), self.params[name]
        before, path = self._runs.get(key, (None, None))
        recorder = OptimizerRecorder(decisions)
        self._begin([name])
        if kept.tensors or kept.numbers:
            tensors = {slot: self._tensor(name, slot, spec) for slot, spec in kept.tensors.items()}
            self.state[param].update(tensors | {slot: _own(number) for slot, number in kept.numbers.items()})
            for slot, tensor in tensors.items():
                recorder.record.inputs["state", 0, slot] = recorder.know(tensor)
        recorder.record.inputs |= {
            ("param", 0, ""): recorder.know(param),
            ("grad", 0, ""): recorder.know(self.grads[name]),
        }
        if before is not None and path is not None and not path.fills:
            recorder.before = before if before.record.inputs == recorder.record.inputs else None
        self.shared.begin(kept.shared)
        with self._errors(), recorder.running():
            self._step()
        recorder.record.outputs["param", 0, ""] = recorder.know(param)
        left = replace(self._left(name, recorder), shared=self._changed([name]))
        if pairs := recorder.shared_memory():
            raise _shares_memory(name_of(self.source), *sorted(pairs[0], reverse=True))
        path = path.again(recorder.record) if path and recorder.is_repeated else prepared(recorder.record)
        if recorder.is_reusable:
            self._runs[key] = recorder, path
        else:
            self._runs.pop(key, None)
            self._tensors.clear()
        recorder.before = None
        return path, left

    def _tensor(self, name: str, slot: str, spec: Spec) -> Tensor:
        """The stand-in of a state tensor, the same in all runs."""
        stand_in = self._tensors.get((name, slot))
        if stand_in is None or (tuple(stand_in.shape), stand_in.dtype) != (spec.shape, spec.dtype):
            stand_in = self._tensors[name, slot] = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        return stand_in

    def _step(self) -> None:
        for own in self._copies:
            if own.param_groups:
                make_state(own)
                own.step()

    def _left(self, name: str, recorder: OptimizerRecorder) -> Kept:
        tensors: dict[str, Spec] = {}
        numbers: dict[str, Any] = {}
        for slot, value in self.state.get(self.params[name], {}).items():
            if recorder.is_known(value):
                tensors[slot] = Spec(tuple(value.shape), value.dtype)
                recorder.record.outputs["state", 0, slot] = recorder.know(value)
            elif isinstance(value, DataNumber) or (isinstance(value, Tensor) and value.numel() != 1):
                raise CaptureError(
                    f"the optimizer stores '{slot}' in a form that cannot be traced",
                    where=name_of(self.source),
                    got="a number from .item()" if isinstance(value, DataNumber) else f"shape {tuple(value.shape)}",
                    expected="a tensor computed from the parameter or its gradient, or a number",
                )
            elif value is not None:
                numbers[slot] = _own(value)
        return Kept(tensors, numbers)

    def _errors(self) -> _Errors:
        return _Errors(name_of(self.source))

    def trained(self) -> list[str]:
        return [name for name, param in self.params.items() if param.requires_grad]

    def runs_of(self, names: Sequence[str]) -> tuple[dict[str, tuple[Any, ...]], dict[Place, Any]]:
        """What a first step of some parameters together does to each of them: ops and numbers; and the values of
        groups and attributes that it changes. Raises CaptureError if the update of a parameter depends on another."""
        recorder, owner = OptimizerRecorder(), dict[int, str]()
        self._begin(names)
        for name in names:
            owner |= {recorder.know(self.params[name]): name, recorder.know(self.grads[name]): name}
        with self._errors(), recorder.running():
            self._step()
        return recorder.runs(owner), self._changed(names)

    def changed_by_idle(self) -> dict[Place, Any]:
        """What a step changes in groups of which no parameter is trained: their counts, and attributes."""
        trained = {self.group_of[name] for name in self.trained()}
        names = [name for name, group in self.group_of.items() if group not in trained]
        self._begin(names)
        for name in names:
            self.params[name].grad = None
        with self._errors(), OptimizerRecorder().running():
            self._step()
        return self._changed(names)

    def _changed(self, names: Sequence[str]) -> dict[Place, Any]:
        """The values of groups and attributes that the last run changed."""
        others = [key for key in self.state if not isinstance(key, Tensor)]
        if others:
            raise CaptureError(
                "the optimizer keeps state that belongs to no parameter",
                where=name_of(self.source),
                got=f"optimizer.state[{others[0]!r}]",
                expected="state of parameters: optimizer.state[param]",
                hint='keep numbers in param_groups (group["k"] += 1) or in attributes of the optimizer',
            )
        return self.shared.taken({self.group_of[name] for name in names})

    def _begin(self, names: Sequence[str]) -> None:
        """Give the optimizer only some parameters, without state."""
        self.state.clear()
        first = 0
        for own, groups in zip(self._copies, self._groups, strict=True):
            for i, group in enumerate(groups, first):
                group["params"] = [self.params[n] for n in names if self.group_of[n] == i]
            own.param_groups[:] = [group for group in groups if group["params"]]
            first += len(groups)
        for name in names:
            self.params[name].grad = self._grad(name)

    def _grad(self, name: str) -> Tensor:
        """The stand-in of a gradient: a new one if a step has changed its shape or noted something on it."""
        grad, param = self.grads[name], self.params[name]
        if vars(grad) or (grad.shape, grad.stride()) != (param.shape, param.stride()):
            grad = self.grads[name] = torch.empty_like(param, requires_grad=False)
        return grad


def _own(value: Any) -> Any:
    """A copy of a number that an optimizer keeps."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _copied(optimizer: torch.optim.Optimizer, memo: dict[int, Any], state: Any) -> torch.optim.Optimizer:
    """A copy of an optimizer, with all its attributes and its own state."""
    attributes = {k: v for k, v in vars(optimizer).items() if k not in ("state", "step")}
    own = memo[id(optimizer)] = object.__new__(type(optimizer))
    own.__dict__.update(copied(type(optimizer).__name__, attributes, memo), state=state)
    return own


def _shares_memory(optimizer: str, slot: str, other: str) -> CaptureError:
    owner = f"'{other}'" if other else "the parameter"
    return CaptureError(
        f"the optimizer keeps '{slot}' in the memory of {owner}",
        where=optimizer,
        got="two tensors on the same storage, so that an update of one changes the other",
        expected="a storage of its own for each value between steps",
        hint="clone() it where it is stored, or compute it when it is needed",
    )


class _Errors:
    """Turns an error of the traced optimizer into a CaptureError with its line."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, MeshweaveError):
            raise CaptureError(
                f"the step of the optimizer {self.name} cannot be captured",
                where=line_of(error),
                got=f"{type(error).__name__}: {error}",
                hint="its step() has to run on tensors only, without closure, for dense gradients",
            ) from error


def check_callable(optimizer: torch.optim.Optimizer) -> None:
    """Raises PlanError for an optimizer whose step needs the loss again."""
    for part in parts_of(optimizer):
        _check_callable(part)


def _check_callable(optimizer: torch.optim.Optimizer) -> None:
    step: Callable[..., Any] = inspect.unwrap(type(optimizer).step)
    needed = [
        p.name
        for p in list(inspect.signature(step).parameters.values())[1:]
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise PlanError(
            f"the optimizer {type(optimizer).__name__} evaluates the loss several times in a step",
            where=f"{step.__code__.co_filename}:{step.__code__.co_firstlineno} in {step.__name__}",
            got=f"step({', '.join(needed)})",
            expected="an optimizer whose step() takes the gradients of one backward pass",
            hint="train with such an optimizer (SGD, Adam, Muon, ...), or use eager PyTorch",
        )


__all__ = ["Kept", "Key", "StandIns", "check_callable"]
