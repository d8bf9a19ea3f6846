"""The assumption of a captured step: the model does the same in every step, whatever the numbers in its tensors.

Capture runs forward, loss and backward twice on fake tensors, the second time on the Python state that the first run
left. Both runs must run the same ops on the same operands, and leave the same state: then every later step does so,
too. After that the model is restored.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from meshweave.capture.batch import Batch
from meshweave.capture.outputs import ModelOutputs
from meshweave.capture.record import Constant, Difference, Record, RecordedValue
from meshweave.capture.rest import Form, difference, forms_of
from meshweave.capture.snapshot import Snapshot, generator_state, same, set_generator_state, shown
from meshweave.capture.unread import WasRead
from meshweave.capture.variables import MISSING
from meshweave.errors import CaptureError, MeshweaveError

_ONCE = "ops, numbers and Python state that are the same in every step"
_HINT = (
    "keep state between steps in a buffer (a counter: self.register_buffer('step', torch.zeros((), dtype=torch.long)) "
    "in __init__, self.step += 1 in forward, torch.where(self.step > 10, a, b) for a branch), draw random numbers with "
    "torch, and pass other values that depend on the step (a schedule, a time) in the batch as tensors"
)


@dataclass(slots=True)
class Contract:
    """The record of a captured step, and how to run it again, up to its gradients, on fake tensors.

    `again(record, batch)` runs them; `roots` are the objects whose state they can reach, the model by that name.
    `batch` is the example, with fake tensors. Some of its entries are `written` in place, and some are `strided`: the
    step may depend on their memory layout.
    """

    roots: Mapping[str, Any]
    batch: Batch
    inputs: Sequence[Tensor]
    again: Callable[[Record, Batch], None]
    outputs: ModelOutputs | None = None  # what the model returns, if the program returns it
    written: frozenset[str] = frozenset()
    strided: frozenset[str] = frozenset()
    record: Record = field(init=False)

    def __post_init__(self) -> None:
        self.record = Record(self.inputs)

    @contextmanager
    def checking(self) -> Iterator[None]:
        """The block traces the step into `record`; then forward, loss and backward run again on the state that it left.
        In any case Python state and random number generators are restored at the end. Raises CaptureError, with the
        user's line, if the second run differs."""
        forms = forms_of(self.batch.rest)
        try:
            with self._restoring() as (before, generators):
                yield
                _check_generators(generators)
                self._settle(before, self.record, self.batch)
                _check_rest(forms, forms_of(self.batch.rest))
        finally:
            self.record.release()

    def difference(self, batch: Batch) -> Difference | None:
        """Run the step on fake tensors in the present state: the first op that differs from the captured one, or None.
        Its changes to Python state are undone."""
        record = Record(self._inputs(batch), expected=self.record)
        try:
            with self._restoring() as (before, generators):
                self.again(record, batch)
                _check_generators(generators)
                self._settle(before, record, batch)
        except Difference as difference:
            return difference
        except MeshweaveError as error:
            return Difference(error.where, f"{error.what} ({error.got})", "what was captured")
        except WasRead as error:  # outside of the run, which compares the state
            return Difference("", str(error), "what was captured")
        return None

    def _inputs(self, batch: Batch) -> list[Tensor]:
        """The inputs, with the tensors of a batch instead of the example's."""
        own = {id(old): new for old, new in zip(self.batch.tensors, batch.tensors, strict=True)}
        return [own.get(id(tensor), tensor) for tensor in self.inputs]

    @contextmanager
    def _restoring(self) -> Iterator[tuple[Snapshot, dict[Any, Any]]]:
        """Restore Python state and random number generators at the end of the block; yields both as they are before
        it."""
        before = Snapshot.of(self.roots)
        generators = {g: generator_state(g) for g in (*_global_generators(), *before.generators)}
        try:
            yield before, generators
        finally:
            before.restore()
            for generator, state in generators.items():
                set_generator_state(generator, state)

    def _settle(self, before: Snapshot, first: Record, batch: Batch) -> None:
        """Run the step again on the state that the run `first` has left.
        Raises CaptureError unless it does the same and leaves the same state."""
        changes = [] if before.is_current() else before.changes()
        between = _canonical(Snapshot.of(self.roots), first) if changes else None
        second = Record(self._inputs(batch), expected=first)
        try:
            self.again(second, batch)
        except Difference as difference:
            is_stale = "of the previous step" in difference.got
            raise CaptureError(
                "the model uses a value of the previous step" if is_stale else "the model does not repeat itself",
                where=difference.where,
                got=f"in the first run {difference.expected}, in the second {difference.got}"
                + "".join(f"; the step has changed {change}" for change in changes[:1]),
                expected=_ONCE,
                hint=_HINT,
            ) from None
        if not before.is_current():
            _check_state(before, between, _canonical(Snapshot.of(self.roots), second))


def _global_generators() -> list[Any]:
    numpy = sys.modules.get("numpy.random.mtrand")
    return [random._inst, *([numpy._rand] if numpy is not None else [])]  # type: ignore[attr-defined]


def _check_generators(before: Mapping[Any, Any]) -> None:
    for generator, state in before.items():
        if pickle.dumps(generator_state(generator)) != pickle.dumps(state):
            raise CaptureError(
                "the model draws random numbers outside of PyTorch, which would be the same in every step",
                got=f"the step used a generator of {type(generator).__module__.partition('.')[0]}",
                expected="random numbers of PyTorch (torch.rand, dropout)",
                hint="draw them with torch, or outside of the model and pass them in the batch as tensors",
            )


def _check_rest(before: Mapping[str, Form], after: Mapping[str, Form]) -> None:
    for name, form in before.items():
        if (text := difference(form, after[name])) is not None:
            raise CaptureError(
                "every step changes an object in the batch",
                where=f"the batch entry '{name}'",
                got=text,
                expected=_ONCE,
                hint=_HINT,
            )


def _canonical(snapshot: Snapshot, record: Record) -> dict[str, Any]:
    # The contents of containers have their own places.
    return {
        place: type(value) if isinstance(value, _CONTAINERS) else record.canonical(value)
        for place, value in snapshot.leaves()
    }


def _check_state(before: Snapshot, first: dict[str, Any] | None, second: dict[str, Any]) -> None:
    """Raises CaptureError if the state after the second run differs from that after the first. A value that each run
    computes anew counts as equal to the constant that the first run leaves."""
    if first is None:
        first = {change.place: change.old for change in before.changes()}
        second = {change.place: change.new for change in before.changes()}
    for place in {**first, **second}:
        old, new = first.get(place, MISSING), second.get(place, MISSING)
        if not _alike(old, new):
            raise CaptureError(
                "every step changes the Python state of the model",
                where=place,
                got=f"{_text(old)} after one step, {_text(new)} after the next",
                expected=_ONCE,
                hint=_HINT,
            )


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, RecordedValue | Constant) else shown(value)


def _alike(a: Any, b: Any) -> bool:
    if same(a, b):
        return True
    if type(a) is not type(b) or type(a) in _BY_VALUE:
        return False
    # Also names of other objects, except values of the standard library: times, fractions, paths.
    return type(a).__module__ not in sys.stdlib_module_names or not _has_equality(type(a))


def _has_equality(kind: type) -> bool:
    return getattr(kind, "__eq__", None) is not getattr(object, "__eq__", None)


_CONTAINERS = (list, dict, set, deque)
_BY_VALUE = (int, float, bool, str, bytes, complex, type, RecordedValue, Constant)
