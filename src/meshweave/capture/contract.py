"""The assumption of a captured step: the model does the same in every step, whatever the numbers in its tensors.

Capture runs forward, loss and backward twice on fake tensors, the second time on the attributes that the first run
left. Both runs must run the same ops on the same operands, and leave the same attributes: then every later step does
so, too. After that the attributes are restored. For further sizes one run is enough if it does what a step of other
sizes does, apart from numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from meshweave.capture.batch import Batch
from meshweave.capture.module_state import MISSING, ModuleState, is_plain, shown
from meshweave.capture.outputs import ModelOutputs
from meshweave.capture.record import Constant, Difference, Record, RecordedValue
from meshweave.errors import CaptureError, MeshweaveError
from meshweave.interop.fake import fake_like, meta_like

_ONCE = "ops, numbers and attributes that are the same in every step"
_HINT = (
    "keep state between steps in a buffer (a counter: self.register_buffer('step', torch.zeros((), dtype=torch.long)) "
    "in __init__, self.step += 1 in forward, torch.where(self.step > 10, a, b) for a branch), draw random numbers with "
    "torch, and pass other values that depend on the step (a schedule, a time) in the batch as tensors"
)


@dataclass(slots=True)
class Contract:
    """The record of a captured step, and how to run it again, up to its gradients, on fake tensors.

    `again(record, batch)` runs them; `roots` are the modules whose attributes they can reach, the model by that name.
    `batch` is the example, with fake tensors. `like` is the contract of a step of other sizes, if there is one.
    `written` are the places of attributes that forward assigns, `computed` those to which it assigns values that it
    computes.
    """

    roots: Mapping[str, nn.Module]
    batch: Batch
    inputs: Sequence[Tensor]
    again: Callable[[Record, Batch], None]
    like: Contract | None = None
    outputs: ModelOutputs | None = None  # what the model returns, if the program returns it
    written: set[str] = field(default_factory=set)
    computed: set[str] = field(default_factory=set)
    record: Record = field(init=False)

    def __post_init__(self) -> None:
        self.record = Record(self.inputs)

    @contextmanager
    def checking(self) -> Iterator[None]:
        """The block traces the step into `record`; then forward, loss and backward run again on the attributes that it
        left, unless `like` did the same and was run again. In any case attributes and random number generators are
        restored at the end. Raises CaptureError, with the user's line, if the second run differs."""
        try:
            with self._restoring() as before:
                yield
                if not self._is_known(before):
                    self._repeat(before, self.record, self.batch)
        finally:
            self.record.release()
            self.like = None  # else each size would keep all before it

    def _is_known(self, before: ModuleState) -> bool:
        """Whether the run has done what `like` did, and has written no other attributes."""
        like = self.like
        if like is None or before.used_generator() or not self.record.is_alike(like.record):
            return False
        if not before.changes().keys() <= like.written:
            return False
        self.written |= like.written
        self.computed |= like.computed
        return True

    def difference(self, batch: Batch) -> Difference | None:
        """Run the step on fake tensors for a batch, in the present state of the modules: the first op that differs from
        the captured one, or None. Its changes to attributes are undone."""
        like = self._fake(batch)
        record = Record(self._inputs(like), expected=self.record)
        try:
            with self._restoring() as before:
                self.again(record, like)
                self._repeat(before, record, like)
        except Difference as difference:
            return difference
        except MeshweaveError as error:
            return Difference(error.where, f"{error.what} ({error.got})", "what was captured")
        return None

    def _fake(self, batch: Batch) -> Batch:
        """A batch with the example's fake tensors, and others without data for entries that the example lacks."""
        own = dict(zip(batch.names, batch.tensors, strict=True))
        known = dict(zip(self.batch.names, self.batch.tensors, strict=True))
        fakes = [
            fake
            if fake.requires_grad == own[name].requires_grad
            else fake.detach().requires_grad_(not fake.requires_grad)
            for name, fake in known.items()
        ]
        like = self.batch.tensors[0]
        more = {name: fake_like(meta_like(tensor), like) for name, tensor in own.items() if name not in known}
        return Batch(self.batch.names, tuple(fakes), {**batch.rest, **more}, batch.join)

    def _inputs(self, batch: Batch) -> list[Tensor]:
        """The inputs, with the tensors of a batch instead of the example's."""
        own = {id(old): new for old, new in zip(self.batch.tensors, batch.tensors, strict=True)}
        return [own.get(id(tensor), tensor) for tensor in self.inputs]

    @contextmanager
    def _restoring(self) -> Iterator[ModuleState]:
        before = ModuleState(self.roots)
        try:
            yield before
        finally:
            before.restore()

    def _repeat(self, before: ModuleState, first: Record, batch: Batch) -> None:
        """Run the step again on the state that the run `first` has left.
        Raises CaptureError unless it does the same and leaves the same state."""
        if generator := before.used_generator():
            raise CaptureError(
                "the model draws random numbers outside of PyTorch, which would be the same in every step",
                got=f"the step used a generator of {generator}",
                expected="random numbers of PyTorch (torch.rand, dropout)",
                hint="draw them with torch, or outside of the model and pass them in the batch as tensors",
            )
        changes = before.changes()
        between = {place: first.canonical(new) for place, (_, new) in changes.items()}
        second = Record(self._inputs(batch), expected=first)
        try:
            self.again(second, batch)
        except Difference as difference:
            is_stale = "of the previous step" in difference.got
            texts = (f"{place}: {shown(old)} -> {shown(new)}" for place, (old, new) in changes.items())
            raise CaptureError(
                "the model uses a value of the previous step" if is_stale else "the model does not repeat itself",
                where=difference.where,
                got=f"in the first run {difference.expected}, in the second {difference.got}"
                + "".join(f"; the step has changed {text}" for text in list(texts)[:1]),
                expected=_ONCE,
                hint=_HINT,
            ) from None
        after = {place: second.canonical(new) for place, (_, new) in before.changes().items()}
        _check_state(between, after)
        self.written |= {*between, *after}
        self.computed |= {place for place, value in after.items() if isinstance(value, RecordedValue)}


def _check_state(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Raises CaptureError if what the second run leaves differs from what the first has left. A value that each run
    computes anew counts as equal to the constant that the first run leaves."""
    for place in {**first, **second}:
        old, new = first.get(place, MISSING), second.get(place, MISSING)
        if not _is_same(old, new):
            raise CaptureError(
                "every step changes the Python state of the model",
                where=place,
                got=f"{_text(old)} after one step, {_text(new)} after the next",
                expected=_ONCE,
                hint=_HINT,
            )


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, RecordedValue | Constant) else shown(value)


def _is_same(a: Any, b: Any) -> bool:
    """Objects that are neither numbers nor tensors count as the same if they are of one class."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, RecordedValue | Constant):
        return bool(a == b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return not is_plain(a) or repr(a) == repr(b)
