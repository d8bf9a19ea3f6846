"""What forward, loss and backward did, op by op, in a form in which two runs can be compared.

Numbers that depend on the batch, on parameters or on buffers are fake tensors. Each is identified by the order in which
ops returned it, so that a run that uses a value of the previous run differs. Ops on constants only are omitted: a mask
that the first run built and the second reuses is the same operand in both, compared by its elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshweave.errors import CaptureError
from meshweave.interop.fake import FakeTensor, without_modes
from meshweave.interop.storages import storage_key, version_of
from meshweave.ir.aliases import written_of
from meshweave.ir.traits import is_random

aten = torch.ops.aten

# A constant is compared with its value when an op read it; larger constants are not copied for that.
_MAX_COPIED = 1 << 20

REGISTER = "register it in the model with register_buffer (persistent=False keeps it out of checkpoints)"
SILENT = ("prim", "profiler")  # ops that query a tensor's device, and labels of a profile

Entry = tuple[Any, ...]


class Constant:
    """A tensor that depends only on the model's code and attributes; equal to another with the same elements."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and (self.tensor is other.tensor or _equal(self.tensor, other.tensor))

    def __hash__(self) -> int:
        return hash((self.tensor.shape, self.tensor.dtype))

    def __repr__(self) -> str:
        if self.tensor.numel() == 1 and not self.tensor.is_meta:
            return f"constant {self.tensor.item()}"
        return f"constant {_spec(self.tensor)}"


@dataclass(frozen=True, slots=True)
class RecordedValue:
    """A number that the step computes: the `number`-th of its run, or, with `stale`, of the previous run."""

    number: int
    dtype: torch.dtype = field(compare=False)
    shape: torch.Size = field(compare=False)
    stale: bool = False

    def __repr__(self) -> str:
        spec = _spec(self)
        return f"{spec} of the previous step" if self.stale else spec


class Difference(Exception):
    """The first op in which a run differs from the run that it is compared with."""

    def __init__(self, where: str, got: str, expected: str) -> None:
        super().__init__(f"{got} instead of {expected}")
        self.where, self.got, self.expected = where, got, expected


# A call of an op, identified in every trace by its line, its op, and how many calls of the op on the line came before.
Call = tuple[str, Any, int]


class ConstantsWritten(Exception):
    """The step has written computed values into constants, which these `calls` created."""

    def __init__(self, calls: Set[Call]) -> None:
        super().__init__(str(calls))
        self.calls = calls


class Record:
    """The ops of a run, filled in by the dispatch mode around it.

    `inputs` are the fake input tensors of the run. With `expected`, each op is compared as it comes, and the first that
    differs ends the run with a Difference; values of that record's run are stale.
    """

    def __init__(self, inputs: Sequence[Tensor], expected: Record | None = None) -> None:
        self.entries: list[Entry] = []
        self.expected = expected
        self.difference: Difference | None = None  # raised as soon as possible: autograd's own detach must not raise
        self._values: dict[int, RecordedValue] = {}
        self._num_values = 0
        self._alive: list[Tensor] = []  # so that ids stay unique
        # Storages whose values no op may change, because the change would be lost; and what to do instead.
        self.protected: dict[int, str] = {}
        self.written: set[int] = set()  # storages that ops wrote to
        self.call: Call = ("", None, 0)  # the running op
        self.overwritten: set[Call] = set()  # which calls created constants into which computed values were written
        self._num_calls: Counter[tuple[str, Any]] = Counter()
        self._storages: dict[int, Call] = {}  # of constants that this run created: the call that created each
        self._written: set[int] = set()  # of those, the constants into which computed values were written
        self._copies: dict[tuple[int, int], Constant] = {}
        for tensor in inputs:
            self._name(tensor)

    @contextmanager
    def without_stale_constants(self, known: Set[Call]) -> Iterator[None]:
        """Raises Overwritten at the end of the block, whatever error it ended with, if the run has written into
        constants that other calls than `known` created: values that the model has read there since may be stale."""
        try:
            yield
        except Exception:
            if self.overwritten <= known:
                raise
        if not self.overwritten <= known:
            raise ConstantsWritten(self.overwritten)
        if self.overwritten:
            raise CaptureError(
                "the step writes computed values into a constant, which it may have read afterwards",
                hint="compute a new tensor instead (torch.where, torch.cat, torch.stack)",
            )

    def release(self) -> None:
        """Release the tensors of the run; its entries stay."""
        self._values, self._alive, self._copies = {}, [], {}

    def before(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], where: str) -> None:
        """Called before an op runs. CaptureError if it writes into a tensor that outlives the step unseen."""
        self.call = where, func, self._num_calls[where, func]
        self._num_calls[where, func] += 1
        for tensor in _targets(func, args, kwargs):
            self.written.add(storage_of(tensor))
            is_constant = not isinstance(tensor, FakeTensor) and storage_of(tensor) not in self._storages
            if is_constant or storage_of(tensor) in self.protected:
                raise CaptureError(
                    "the model or the loss changes a tensor in place that is not a buffer of the model",
                    where=where,
                    got=f"{func} on {_spec(tensor)}",
                    expected="state between steps in buffers",
                    hint=self.protected.get(storage_of(tensor)) or REGISTER,
                )

    def after(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, where: str) -> None:
        """Called after an op has run. Raises Difference if `expected` has another op here."""
        results = list(tensors_in(result))
        operands = list(tensors_in((args, kwargs)))
        if func.namespace in SILENT:
            return
        if not is_random(func) and not any(self._is_computed(t) for t in (*operands, *results)):
            self._note_constants(func, operands, results)
            return
        # result of new_zeros
        self._note_constants(func, operands, [t for t in results if not isinstance(t, FakeTensor)])
        targets = list(_targets(func, args, kwargs))
        entry = (func, self._canonical(args, targets), self._canonical(kwargs, targets) if kwargs else ())
        self._check(entry, where)
        self.entries.append(entry)
        if self.difference is not None and func is not aten.detach.default:
            raise self.difference
        for tensor in targets:
            if not isinstance(tensor, FakeTensor):
                self._written.add(storage_of(tensor))
                self.overwritten.add(self._storages.get(storage_of(tensor), self.call))
        for tensor in targets:
            self._name(tensor)
        for tensor in results:
            if targets and id(tensor) not in self._values:  # a constant that was written comes back as another
                self._values[id(tensor)] = self._values[id(targets[0])]
                self._alive.append(tensor)
            self._name(tensor)

    def finish(self, results: Iterable[Any]) -> None:
        """The run has ended with these results, which are compared like operands."""
        entry = ("results", self._canonical(list(results), ()))
        self._check(entry, "")
        self.entries.append(entry)
        if self.difference is not None:
            raise self.difference

    def is_alike(self, other: Record) -> bool:
        """Whether both runs did the same ops on the same operands, apart from sizes and other numbers."""
        return _are_alike(tuple(self.entries), tuple(other.entries))

    def canonical(self, leaf: Any) -> Any:
        """A value in comparable form: a RecordedValue, a Constant, or itself."""
        return self._canonical(leaf, ())

    def _check(self, entry: Entry, where: str) -> None:
        if self.expected is None or self.difference is not None:
            return
        index = len(self.entries)
        known = self.expected.entries[index] if index < len(self.expected.entries) else None
        if known is None or not _agree(entry, known):
            self.difference = Difference(where, _text(entry), "nothing more" if known is None else _text(known))

    def _is_computed(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) or id(tensor) in self._values

    def _name(self, tensor: Tensor) -> None:
        if id(tensor) not in self._values:
            self._values[id(tensor)] = RecordedValue(self._num_values, tensor.dtype, tensor.shape)
            self._num_values += 1
            self._alive.append(tensor)

    def _note_constants(self, func: Any, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """A constant that shares no memory with an operand is new; so is the result of torch.tensor()."""
        if not results:
            return
        shared = {storage_of(t) for t in operands}
        if func is aten.lift_fresh.default:
            shared = set()
        self._storages.update((s, self.call) for s in map(storage_of, results) if s not in shared)

    def _canonical(self, value: Any, targets: Sequence[Tensor]) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, targets)
        if isinstance(value, list | tuple):
            return tuple(self._canonical(v, targets) for v in value)
        if isinstance(value, dict):
            return tuple((k, self._canonical(v, targets)) for k, v in value.items())
        return value

    def _tensor(self, tensor: Tensor, targets: Sequence[Tensor]) -> Any:
        known = self._values.get(id(tensor))
        if known is not None:
            return known
        if isinstance(tensor, FakeTensor):
            stale = self.expected._values.get(id(tensor)) if self.expected is not None else None
            return RecordedValue(stale.number if stale else -1, tensor.dtype, tensor.shape, stale=stale is not None)
        if any(tensor is t for t in targets) or storage_of(tensor) in self._written:
            return _spec(tensor)
        return self._constant(tensor)

    def _constant(self, tensor: Tensor) -> Constant:
        key = id(tensor), version_of(tensor)
        if key not in self._copies:
            self._alive.append(tensor)
            self._copies[key] = Constant(_copy(tensor) if tensor.numel() <= _MAX_COPIED else tensor)
        return self._copies[key]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def _targets(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an op writes."""
    for position, name in written_of(func):
        yield from tensors_in(args[position] if position < len(args) else kwargs.get(name))


def storage_of(tensor: Tensor) -> int:
    return storage_key(tensor) if tensor.layout == torch.strided else id(tensor)


def _copy(tensor: Tensor) -> Tensor:
    with without_modes(), torch.no_grad():
        return tensor.detach().clone()


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    with without_modes():
        if a.is_meta:
            return True
        return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _agree(a: Any, b: Any) -> bool:
    """Equality in which NaN equals itself, and 1 equals neither 1.0 nor True."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_agree, a, b))
    if isinstance(a, float | complex) and type(a) is type(b):
        return repr(a) == repr(b)
    return type(a) is type(b) and bool(a == b)


def _are_alike(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_are_alike, a, b))
    if isinstance(a, Constant):
        return (a.tensor.dtype, a.tensor.dim()) == (b.tensor.dtype, b.tensor.dim())
    if isinstance(a, RecordedValue):
        return a == b and (a.dtype, len(a.shape)) == (b.dtype, len(b.shape))
    return type(a) in (int, float) or bool(a == b)


def _spec(tensor: Tensor | RecordedValue) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _text(entry: Entry) -> str:
    if entry[0] == "results":
        return f"the results {_arguments(entry[1])}"
    keywords = [f"{k}={v!r}" for k, v in entry[2]]
    return f"{entry[0]}({', '.join([_arguments(entry[1]), *keywords]).strip(', ')})"


def _arguments(values: Sequence[Any]) -> str:
    return ", ".join(repr(v) for v in values)
