"""One run of an optimizer's own `step()`, written down: which ops on which tensors, with which numbers.

What the code keeps as numbers (options of param_groups, counts of steps, 0-dim tensors of its own) is real, and is
computed by the code itself: an `OptimizerRecord` holds the numbers that it handed to ops, apart from the ops. Numbers
differ from step to step, the rest has to stay.
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
    """A number that the code hands to an op, by its place among the numbers of a record."""

    index: int


@dataclass(frozen=True, slots=True)
class OptimizerCall:
    """An op on stand-ins. `results`: the tensors that it gives, and their dtypes."""

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[Ref, ...]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """A branch of the code on a tensor: which way this record went."""

    condition: Ref
    outcome: bool


Key = tuple[str, int, str]  # ("param" | "grad" | "state", number of the parameter, slot or "")


@dataclass(slots=True)
class OptimizerRecord:
    """What one run did. `inputs` and `outputs` name tensors; numbers stand apart, in the order of their use.
    `reads_shape`: whether the code looked at a shape, so that its numbers may come of it."""

    inputs: dict[Key, int] = field(default_factory=dict)
    calls: list[OptimizerCall | Decision] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    outputs: dict[Key, int] = field(default_factory=dict)
    reads_shape: bool = False

    @property
    def outcomes(self) -> tuple[bool, ...]:
        return tuple(call.outcome for call in self.calls if isinstance(call, Decision))


@dataclass(frozen=True, slots=True)
class Prepared:
    """A record with the state that it fills with one number taken out: `fills` has these, by key, and `record` has the
    tensors as inputs. `signature` is all that must not change from step to step. `order` are the numbers of `record`,
    by their places in the run that it was."""

    record: OptimizerRecord
    fills: Mapping[Key, float]
    signature: tuple[Any, ...]
    order: tuple[int, ...]

    def again(self, run: OptimizerRecord) -> Prepared:
        """The same of a run that did the same with other numbers. Nothing is filled in it."""
        numbers = [run.numbers[i] for i in self.order]
        record = OptimizerRecord(self.record.inputs, self.record.calls, numbers, self.record.outputs, run.reads_shape)
        return Prepared(record, {}, self.signature, self.order)


def prepared(record: OptimizerRecord) -> Prepared:
    """A state tensor that begins as one number, before anything else is done with it, is an input that holds it."""
    labels: dict[int, Key] = {index: key for key, index in record.inputs.items()}
    fills: dict[Key, float] = {}
    created = {i: key for key, i in record.outputs.items() if key[0] == "state" and key not in record.inputs}
    calls: list[OptimizerCall | Decision] = []
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


def _fill_value(call: OptimizerCall, record: OptimizerRecord) -> float:
    base = base_of(call.func)
    if base in _FILL_VALUES:
        return _FILL_VALUES[base]
    value = next(
        (a for a in call.args[1:] if isinstance(a, (Num, int, float, bool))), dict(call.kwargs).get("fill_value")
    )
    return record.numbers[value.index] if isinstance(value, Num) else float(value)  # type: ignore[arg-type]


def _renumbered(record: OptimizerRecord, labels: Mapping[int, Key], fills: dict[Key, float]) -> Prepared:
    """Tensors and numbers in the order in which they come, so that equal runs give equal records."""
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

    calls: list[OptimizerCall | Decision] = []
    for call in record.calls:
        if isinstance(call, Decision):
            calls.append(Decision(renamed(call.condition), call.outcome))
            continue
        args, kwargs = renamed(call.args), tuple((k, renamed(v)) for k, v in call.kwargs)
        calls.append(OptimizerCall(call.func, args, kwargs, renamed(call.results), call.dtypes))
    outputs = {key: order[index] for key, index in record.outputs.items() if index in order}
    result = OptimizerRecord(inputs, calls, numbers, outputs, record.reads_shape)
    signature = (tuple(sorted(inputs.items())), tuple(calls), tuple(sorted(outputs.items())))
    return Prepared(result, fills, signature, tuple(places))


def every_path(run: Callable[[Sequence[bool]], Prepared]) -> list[Prepared]:
    """The records of all ways in which branches on data can go. `run(decisions)` goes one of them."""
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
