"""A record of a run of an optimizer's own `step()`: which ops on which tensors, with which numbers.

Numbers of the code (options of param_groups, step counts, its own 0-dim tensors) are real, and the code itself computes
them: an `OptimizerRecord` has the numbers that were passed to ops, separate from the ops. Numbers differ from step to
step; everything else has to stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshweave.capture.optimizer_arithmetic import base_of
from meshweave.errors import CaptureError

aten = torch.ops.aten

_MOST_PATHS = 64
FILLS = {aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.zeros,
          aten.ones, aten.full}  # fmt: skip
_FILL_VALUES: Mapping[str, float] = {"zeros_like": 0.0, "ones_like": 1.0, "new_zeros": 0.0, "new_ones": 1.0,
                                     "zeros": 0.0, "ones": 1.0}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor of a record, by its number."""

    index: int


@dataclass(frozen=True, slots=True)
class Num:
    """A number that the code passes to an op, by its index among the numbers of a record."""

    index: int


@dataclass(frozen=True, slots=True)
class OptimizerCall:
    """An op on stand-ins. `results`: the tensors that it returns, and their dtypes."""

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[Ref, ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class TakenBranch:
    """A branch of the code on a tensor: which branch this record took."""

    condition: Ref
    outcome: bool


Key = tuple[str, int, str]  # ("param" | "grad" | "state", number of the parameter, slot or "")


@dataclass(slots=True)
class OptimizerRecord:
    """What a run did. `inputs` and `outputs` name tensors; numbers are separate, in the order of their use.
    `reads_shape`: whether the code read a shape, so that its numbers may depend on it."""

    inputs: dict[Key, int] = field(default_factory=dict)
    calls: list[OptimizerCall | TakenBranch] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    outputs: dict[Key, int] = field(default_factory=dict)
    reads_shape: bool = False

    @property
    def outcomes(self) -> tuple[bool, ...]:
        return tuple(call.outcome for call in self.calls if isinstance(call, TakenBranch))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A record without the ops that fill fresh state with a single number: `fills` has these numbers, by key, and
    `record` has the tensors as inputs. `signature` is everything that must not change from step to step. `order` maps
    the numbers of `record` to their indices in the original run."""

    record: OptimizerRecord
    fills: Mapping[Key, complex]
    signature: tuple[Any, ...]
    order: tuple[int, ...]

    def again(self, run: OptimizerRecord) -> Prepared:
        """The same for a run that did the same with other numbers. It contains no fills."""
        numbers = [run.numbers[i] for i in self.order]
        record = OptimizerRecord(self.record.inputs, self.record.calls, numbers, self.record.outputs, run.reads_shape)
        return Prepared(record, {}, self.signature, self.order)


def prepared(record: OptimizerRecord) -> Prepared:
    """A state tensor that is first filled with a single number becomes an input with that value."""
    labels: dict[int, Key] = {index: key for key, index in record.inputs.items()}
    fills: dict[Key, complex] = {}
    created = {i: key for key, i in record.outputs.items() if key[0] == "state" and key not in record.inputs}
    calls: list[OptimizerCall | TakenBranch] = []
    for call in record.calls:
        (first,) = call.results[:1] if isinstance(call, OptimizerCall) and call.results else (None,)
        if first is not None and first.index in created and call.func.overloadpacket in FILLS:  # type: ignore[union-attr]
            labels[first.index] = created.pop(first.index)
            fills[labels[first.index]] = _fill_value(call, record)  # type: ignore[arg-type]
        else:
            calls.append(call)
    return _renumbered(
        OptimizerRecord(dict(record.inputs), calls, record.numbers, record.outputs, record.reads_shape), labels, fills
    )


def _fill_value(call: OptimizerCall, record: OptimizerRecord) -> complex:
    base = base_of(call.func)
    if base in _FILL_VALUES:
        return _FILL_VALUES[base]
    numbers = (a for a in call.args[1:] if isinstance(a, (Num, int, float, bool, complex)))
    value = next(numbers, dict(call.kwargs).get("fill_value"))
    if isinstance(value, Num):
        return record.numbers[value.index]
    return value if isinstance(value, complex) else float(value)  # type: ignore[arg-type]


def _renumbered(record: OptimizerRecord, labels: Mapping[int, Key], fills: dict[Key, complex]) -> Prepared:
    """Tensors and numbers renumbered in order of appearance, so that equal runs have equal records."""
    order: dict[int, int] = {}
    inputs = {key: order.setdefault(index, len(order)) for key, index in sorted((k, i) for i, k in labels.items())}
    numbers: list[float] = []
    places: list[int] = []

    def renamed(x: Any) -> Any:
        if isinstance(x, Ref):
            return Ref(order.setdefault(x.index, len(order)))
        if isinstance(x, Num):
            numbers.append(record.numbers[x.index])
            places.append(x.index)
            return Num(len(numbers) - 1)
        return tuple(renamed(y) for y in x) if isinstance(x, tuple) else x

    calls: list[OptimizerCall | TakenBranch] = []
    for call in record.calls:
        if isinstance(call, TakenBranch):
            calls.append(TakenBranch(renamed(call.condition), call.outcome))
            continue
        args, kwargs = renamed(call.args), tuple((k, renamed(v)) for k, v in call.kwargs)
        calls.append(OptimizerCall(call.func, args, kwargs, renamed(call.results), call.dtypes))
    outputs = {key: order[index] for key, index in record.outputs.items() if index in order}
    result = OptimizerRecord(inputs, calls, numbers, outputs, record.reads_shape)
    signature = (tuple(sorted(inputs.items())), tuple(calls), tuple(sorted(outputs.items())))
    return Prepared(result, fills, signature, tuple(places))


def every_path(run: Callable[[Sequence[bool]], Prepared]) -> list[Prepared]:
    """The records of all outcomes of branches on data. `run(decisions)` follows one of them."""
    records: list[Prepared] = []
    decisions: list[bool] | None = []
    while decisions is not None:
        records.append(run(decisions))
        outcomes = list(records[-1].record.outcomes)
        while outcomes and outcomes[-1]:
            outcomes.pop()
        decisions = [*outcomes[:-1], True] if outcomes else None
        if len(records) > _MOST_PATHS:
            raise CaptureError(
                "the optimizer branches on data in too many ways",
                got=f"more than {_MOST_PATHS} paths through step()",
                hint="use torch.where or torch.clamp instead of if, max and min on numbers from .item()",
            )
    return records
