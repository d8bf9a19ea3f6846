"""Runs an optimizer's own `step()` on stand-ins, and records what it does.

Parameters, gradients and state tensors are on the meta device; numbers are real.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshweave.capture.optimizer_arithmetic import ARITHMETIC, base_of
from meshweave.capture.optimizer_lists import calls_by_element
from meshweave.capture.optimizer_numbers import DataNumber, of_data, untraceable
from meshweave.capture.optimizer_record import FILLS, Num, OptimizerCall, OptimizerRecord, Ref, TakenBranch
from meshweave.errors import CaptureError
from meshweave.interop import pytree
from meshweave.interop.fake import DispatchMode
from meshweave.interop.ops import arguments_of, operator_name, returns_of
from meshweave.interop.storages import storage_key
from meshweave.ir.traits import changes_form, is_random

aten = torch.ops.aten

_META = torch.device("meta")
_TENSOR: Any = Tensor
_SET_DATA: Any = _TENSOR.data.__set__
_PLAIN = frozenset({int, bool, str, type(None), torch.dtype})
# A call: the function, names of keywords, types of arguments, and stand-ins by number and plain values.
_Form = tuple[Any, tuple[str, ...], tuple[type, ...], tuple[Any, ...]]
_SHAPES = frozenset(
    {_TENSOR.shape.__get__, _TENSOR.ndim.__get__, Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.__len__}
)


class _Items(TorchFunctionMode):
    """`.item()` and `bool()` of stand-ins, and what is assigned to them."""

    def __init__(self, recorder: OptimizerRecorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == _META and not any(self.recorder.is_known(x) for x in args):
            return func(*args, **{**kwargs, "device": None})  # a number next to a parameter is a number
        if func in _SHAPES and self.recorder.is_known(args[0]):
            self.recorder.record.reads_shape = True
        if func == _SET_DATA and self.recorder.is_known(args[0]):
            return self.recorder.assign(*args)
        if func not in (Tensor.item, Tensor.__bool__, Tensor.__setitem__) or not self.recorder.is_known(args[0]):
            return self.recorder.call(func, args, kwargs)
        if func is Tensor.__setitem__:
            return self._set(*args)
        if func is Tensor.__bool__:
            return self.recorder.decide(args[0])
        return DataNumber(args[0].to(torch.float64).reshape(()), self.recorder.decide)

    def _set(self, x: Tensor, index: Any, value: Any) -> None:
        """x[index] = value, as the op that it is for a mask and a number."""
        is_mask = self.recorder.is_known(index) and index.dtype == torch.bool
        if is_mask and not isinstance(value, Tensor):
            x.masked_fill_(index, value)
        else:
            x[index].copy_(value if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype))


class OptimizerRecorder(DispatchMode):
    """Records a run.

    `decisions` are taken in order where the code branches on data; further branches are False. `before` is an earlier
    run that began with the same inputs: as long as this run does the same, nothing is computed, and its tensors are
    reused.
    """

    def __init__(self, decisions: Sequence[bool] = ()) -> None:
        super().__init__()
        self.record, self.decisions = OptimizerRecord(), tuple(decisions)
        self.before: OptimizerRecorder | None = None
        self._refs: dict[int, int] = {}  # id of a tensor -> its number
        self._alive: list[Tensor] = []  # keeps ids unique
        self._results: list[Any] = []  # of each call
        self._forms: dict[int, _Form] = {}  # by op, the call that is this op alone
        self._kept_results: list[Tensor] = []
        self.changes_forms = False  # whether an op has changed the shape of a stand-in

    def know(self, tensor: Tensor) -> int:
        """The number of a tensor, a new number for a new tensor."""
        if id(tensor) not in self._refs:
            self._refs[id(tensor)] = len(self._alive)
            self._alive.append(tensor)
        return self._refs[id(tensor)]

    def is_known(self, x: Any) -> bool:
        return isinstance(x, Tensor) and id(x) in self._refs

    def assign(self, tensor: Tensor, value: Tensor) -> None:
        """`tensor.data = value`: from now on both are the same tensor."""
        if not self.is_known(value) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
            raise untraceable(
                "the optimizer assigns other data to a tensor than values of its form",
                f".data = a tensor {value.dtype} of shape {tuple(value.shape)}",
                "compute it from the parameter, its gradient or its state, in their shape and dtype",
            )
        self._refs[id(tensor)] = self._refs[id(value)]

    def shared_memory(self) -> list[tuple[str, str]]:
        """Pairs of outputs, by slot (of a parameter: ""), that share memory when the run ends."""
        memory = {key[2]: storage_key(self._alive[i]) for key, i in self.record.outputs.items() if key[0] != "grad"}
        return [(a, b) for a, b in combinations(memory, 2) if memory[a] == memory[b]]

    @property
    def is_reusable(self) -> bool:
        """Whether the tensors that this run computed, and the gradient, are as ops returned them: of the same shape,
        and without attributes."""
        lasting = {i for key, i in self.record.inputs.items() if key[0] != "grad"}
        return not self.changes_forms and not any(vars(x) for i, x in enumerate(self._alive) if i not in lasting)

    @property
    def is_repeated(self) -> bool:
        """Whether this run did the same as the previous run."""
        known = self.before
        return known is not None and len(self.record.calls) == len(known.record.calls)

    def decide(self, condition: Tensor) -> bool:
        turn = len(self.record.outcomes)
        outcome = self.decisions[turn] if turn < len(self.decisions) else False
        self._enter(TakenBranch(Ref(self._refs[id(condition)]), outcome), None)
        return outcome

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of a function that the code calls. A function that is a single op is not run again where the
        previous run called it on the same stand-ins: the result is that run's, and only a float is new."""
        at = len(self.record.calls)
        form, floats = self._form_of(func, args, kwargs)
        if form is not None and self.before is not None and self.before._forms.get(at) == form:
            self._forms[at] = form
            self.record.numbers += floats
            return self._repeated(self.before.record.calls[at], (*args, *kwargs.values()))
        result = func(*args, **kwargs)
        if form is not None and self._is_single(func, result, at, floats):
            self._forms[at] = form
        return result

    def _repeated(self, call: Any, operands: Sequence[Any]) -> Any:
        """The result of a call of the previous run; if it wrote to an operand, that operand."""
        assert self.before is not None
        index = call.results[0].index
        result = self.before._results[len(self.record.calls)]
        if index < len(self._alive):
            result = next(x for x in operands if self._refs.get(id(x)) == index)
        self._take(index, result)
        self._enter(call, result)
        return result

    def _form_of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[_Form | None, list[float]]:
        """All of a call but its floats, and these. No form for a call that takes anything but stand-ins and plain
        values, or no stand-in."""
        kinds, values, floats = list[type](), list[Any](), list[float]()
        is_on_known = False
        for x in (*args, *kwargs.values()):
            kind = type(x)
            if (ref := self._refs.get(id(x))) is not None:
                is_on_known = True
                values.append(ref)
            elif kind is float:
                floats.append(x)
            elif kind in _PLAIN:
                values.append(x)
            else:
                return None, []
            kinds.append(kind)
        return (func, tuple(kwargs), tuple(kinds), tuple(values)) if is_on_known else None, floats

    def _is_single(self, func: Any, result: Any, at: int, floats: Sequence[float]) -> bool:
        """Whether a function was the op of its own name and nothing else, with at most one number: its only float."""
        if len(self.record.calls) != at + 1 or not isinstance(call := self.record.calls[at], OptimizerCall):
            return False
        if result is not self._results[at] or len(call.results) != 1 or _is_view(call.func) or len(floats) > 1:
            return False
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        used = [self.record.numbers[x.index] for x in leaves if isinstance(x, Num)]
        return used == floats and operator_name(call.func) == getattr(func, "__name__", "")

    def _repeats(self, func: Any, args: Any, kwargs: Any) -> OptimizerCall | None:
        """The call of the previous run that this call repeats."""
        at = len(self.record.calls)
        call = self.before.record.calls[at] if self.before and at < len(self.before.record.calls) else None
        same = isinstance(call, OptimizerCall) and (call.func, call.args, call.kwargs) == (func, args, kwargs)
        return call if same else None  # type: ignore[return-value]

    def _enter(self, call: OptimizerCall | TakenBranch, result: Any) -> None:
        at = len(self.record.calls)
        if self.before is not None and (at >= len(self.before.record.calls) or self.before.record.calls[at] != call):
            self.before = None
        self.record.calls.append(call)
        self._results.append(result)

    @contextmanager
    def running(self) -> Iterator[None]:
        with torch.no_grad(), _Items(self), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(map(self._holds_known, (*args, *kwargs.values()))):
            return self._host(func, args, kwargs)
        if (calls := calls_by_element(func, args, kwargs)) is not None:
            with self:
                results = [op(*own_args, **own_kwargs) for op, own_args, own_kwargs in calls]
            return results if returns_of(func) else None
        if func is aten._local_scalar_dense.default:
            raise of_data("float() or int()")
        if func is aten.detach.default:
            result = func(args[0])
            self._refs[id(result)] = self._refs[id(args[0])]
            self._kept_results.append(result)
            return result
        self.changes_forms |= changes_form(func)
        if is_random(func):
            raise untraceable(
                "the optimizer draws random numbers", str(func), "draw them in the model, where they are captured"
            )
        return self._written(func, args, kwargs, {})

    def _holds_known(self, x: Any) -> bool:
        return id(x) in self._refs or (isinstance(x, (list, tuple)) and any(map(self._holds_known, x)))

    def _written(self, func: Any, args: Any, kwargs: dict[str, Any], forced: dict[str, Any]) -> Any:
        """The result of an op, which is recorded. `forced` options apply only to stand-ins."""
        names = _names_of(func)
        described = tuple(self._described(func, n, x) for n, x in zip(names, args, strict=False))
        options = tuple(
            (n, self._described(func, n, x)) for n, x in kwargs.items() if n not in ("device", "pin_memory")
        )
        known = self._repeats(func, described, options)
        if known is not None and self.before is not None:
            result = func(*args, **kwargs) if _is_view(func) else self.before._results[len(self.record.calls)]
            for ref, x in zip(known.results, _tensors(result), strict=True):
                self._take(ref.index, x)
            self._enter(known, result)
            return result
        args, kwargs = pytree.tree_map(self._stand_in, (args, kwargs))
        result = func(*args, **{**kwargs, **forced})
        outs = _tensors(result)
        refs = tuple(Ref(self.know(x)) for x in outs)
        self._enter(OptimizerCall(func, described, options, refs, tuple(x.dtype for x in outs)), result)
        return result

    def _take(self, index: int, x: Tensor) -> None:
        """A tensor of the previous run, under its number."""
        if index == len(self._alive):
            self._refs[id(x)] = index
            self._alive.append(x)

    def _host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An op without stand-ins: it computes the code's own numbers, or creates a tensor."""
        kept = {k: v for k, v in kwargs.items() if not (k == "device" and v == _META)}
        if func.overloadpacket not in FILLS or len(args[0]) == 0:
            return func(*args, **kept)
        return self._written(func, args, kwargs, {"device": _META})

    def runs(self, owner: dict[int, str]) -> dict[str, tuple[Any, ...]]:
        """What was done to each parameter: ops and numbers. `owner`: number of a tensor -> its parameter.
        Raises CaptureError for an op that takes tensors of two parameters."""
        done: dict[str, list[Any]] = {name: [] for name in owner.values()}
        for call in (c for c in self.record.calls if isinstance(c, OptimizerCall)):
            refs = [x for x in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(x, Ref)]
            owners = sorted({owner[ref.index] for ref in refs if ref.index in owner})
            if len(owners) > 1:
                raise CaptureError(
                    "the optimizer combines the values of several parameters in an update",
                    got=f"{call.func} of {owners[0]} and {owners[1]}",
                    expected="an update of each parameter by its own gradient and state",
                    hint="clip gradients by clip_grad_norm=, and loop over parameters in step()",
                )
            owner.update((ref.index, owner_of) for ref in call.results for owner_of in owners)
            used = [x for x in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(x, Num)]
            for name in owners:
                done[name] += [call.func, *(self.record.numbers[x.index] for x in used)]
        return {name: tuple(calls) for name, calls in done.items()}

    def _stand_in(self, x: Any) -> Any:
        if isinstance(x, Tensor) and not self.is_known(x):
            return torch.empty(x.shape, dtype=x.dtype, device="meta")
        return x

    def _described(self, func: Any, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            if self.is_known(value):
                return Ref(self._refs[id(value)])
            if value.numel() != 1 or value.device.type == "meta":
                raise untraceable(
                    "the optimizer uses a tensor that is not a parameter, gradient or state of its own",
                    f"{value.dtype} of shape {tuple(value.shape)} in {func}",
                    "keep tensors in optimizer.state[param], created in step() from the parameter or its gradient",
                )
            return self._number(float(value))
        if isinstance(value, (list, tuple)):
            return tuple(self._described(func, name, x) for x in value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and _is_number(func, name, value):
            return self._number(float(value))
        return value

    def _number(self, value: float) -> Num:
        self.record.numbers.append(value)
        return Num(len(self.record.numbers) - 1)


def _is_number(func: Any, name: str, value: float) -> bool:
    """Whether an argument is a number that may differ in every step and does not select what is computed."""
    return name in _places_of_numbers(func) and not (base_of(func) == "pow" and isinstance(value, int))


@cache
def _places_of_numbers(func: Any) -> frozenset[str]:
    if base_of(func) not in ARITHMETIC:
        return frozenset()
    kinds = {a.name: str(a.type).removeprefix("Optional[").rstrip("]") for a in arguments_of(func)}
    return frozenset(name for name, kind in kinds.items() if kind in ("number", "Scalar", "Tensor", "float"))


@cache
def _names_of(func: Any) -> tuple[str, ...]:
    return tuple(a.name for a in arguments_of(func))


@cache
def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns_of(func))


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
