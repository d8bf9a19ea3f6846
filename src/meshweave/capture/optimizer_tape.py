"""Numbers that an optimizer's `step()` computes in Python, and a tape of how, which is replayed before every update.

While `step()` is traced, numbers of its groups, attributes and state are `Number`s: they compute as numbers do, and the
tape records it. Where the code asks whether a number is larger than another, or takes its plain value, the tape records
a guard: a step in which it is another value is another variant of the update. What does not depend on such numbers is
not on the tape.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshweave.errors import CaptureError

_TORCH = str(Path(torch.__file__).parent)
_OPTIM = str(Path(torch.optim.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_WRAPPERS = (f"{_OPTIM}/optimizer.py", f"{_OPTIM}/lr_scheduler.py")
# Functions of tensors whose results do not depend on elements.
_OF_FORM = frozenset({"__hash__", "dim", "numel", "size", "is_complex", "is_floating_point"})


def line_of(error: BaseException) -> str:
    """The innermost line of an optimizer in an error's traceback."""
    trace, line = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if _is_optimizer_code(code.co_filename):
            line = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return line


def _is_optimizer_code(filename: str) -> bool:
    if filename.startswith(_OPTIM):
        return filename not in _WRAPPERS
    return not filename.startswith((_TORCH, _OURS, "<")) and "contextlib" not in filename


def untraceable(what: str, got: str = "", where: str = "") -> CaptureError:
    return CaptureError(what, where=where, got=got)


def flat(*values: Any) -> list[Any]:
    """The values in lists and tuples."""
    items: list[Any] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            items += flat(*value)
        else:
            items.append(value)
    return items


_EXACT = frozenset({float, int, operator.index, hash})  # plain values, rather than comparisons
Owner = str | int | None  # whose a number is: a parameter's (its name), a group's (its index), or all groups'


@dataclass(frozen=True, slots=True)
class TapeRef:
    """A value of a tape, by its index."""

    index: int


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """`function(*args, **kwargs)`, which is the value `index`, or, for a guard, has to be `expected` before this value
    is computed."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    index: int
    is_guard: bool = False
    expected: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """Computes numbers again from options of groups and attributes (`options`) and values of a parameter's state
    (`slots`). References are indices into the values of inputs and of `entries`, in their order."""

    options: tuple[Any, ...]
    slots: tuple[str, ...]
    entries: tuple[TapeEntry, ...]
    results: Any

    def __call__(self, options: Mapping[Any, Any], state: Mapping[str, Any]) -> Any:
        """The numbers; None where a guard does not hold."""
        values = [*(options[key] for key in self.options), *(state[slot] for slot in self.slots)]
        values = [x.clone() if isinstance(x, Tensor) else x for x in values]
        for entry in self.entries:
            args = [values[x.index] if type(x) is TapeRef else _with_values(x, values) for x in entry.args]
            kwargs = {k: _with_values(v, values) for k, v in entry.kwargs} if entry.kwargs else {}
            result = entry.function(*args, **kwargs)
            if not entry.is_guard:
                values.append(result)
            elif result != entry.expected:
                return None
        return _with_values(self.results, values)

    def differs_exactly(self, other: Replay) -> bool:
        """Whether both take the plain value of the same number, and it was another."""
        taken = {(e.function, repr(e.args)): e.expected for e in self.entries if e.function in _EXACT}
        return any(
            taken.get((e.function, repr(e.args)), e.expected) != e.expected
            for e in other.entries
            if e.function in _EXACT
        )


def _with_values(x: Any, values: Sequence[Any]) -> Any:
    if type(x) is TapeRef:
        return values[x.index]
    return type(x)([_with_values(y, values) for y in x]) if type(x) in (tuple, list) else x


@dataclass(slots=True)
class Tape:
    """What Python computes with numbers and 0-dim tensors during a run. `values` has the results of this run.
    `group_of`: the group of each parameter."""

    group_of: Mapping[str, int]
    values: list[Any] = field(default_factory=list)
    owners: list[Owner] = field(default_factory=list)
    inputs: dict[int, Any] = field(default_factory=dict)  # the option or slot of a value
    begun: dict[int, Tensor] = field(default_factory=dict)  # inputs that are tensors, as the run began
    entries: dict[int, TapeEntry] = field(default_factory=dict)  # that compute values, by index
    guards: dict[Owner, dict[Any, TapeEntry]] = field(default_factory=dict)
    _tensors: dict[int, TapeRef] = field(default_factory=dict)  # by id; `values` keeps them alive
    _computed: dict[Any, Number] = field(default_factory=dict)  # each result of Python's arithmetic once
    _shared: set[int] = field(default_factory=set)  # options, and what Python's arithmetic computes from them alone

    def input(self, key: Any, value: Any, owner: Owner) -> Any:
        """A stand-in for an option, or a parameter's slot of state."""
        self.inputs[len(self.values)] = key
        if not isinstance(value, Tensor) and not isinstance(owner, str):
            self._shared.add(len(self.values))
        if isinstance(value, Tensor):
            self.begun[len(self.values)] = value = value.detach().cpu()
            return self._new(value.clone(), owner)
        return self._new(value, owner)

    def _new(self, value: Any, owner: Owner) -> Any:
        ref = TapeRef(len(self.values))
        self.values.append(value)
        self.owners.append(owner)
        if isinstance(value, Tensor):
            self._tensors[id(value)] = ref
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise untraceable("the optimizer computes a number of another kind", f"a {type(value).__name__}")
        return Number(self, value, ref)

    def ref_of(self, x: Any) -> TapeRef | None:
        """Where a value of the code is on the tape."""
        if type(x) is Number:
            return x.ref
        return self._tensors.get(id(x)) if type(x) is Tensor else None

    def refs(self, x: Any) -> Any:
        """Arguments with references in place of values on the tape."""
        if isinstance(x, (list, tuple)):
            return type(x)(self.refs(y) for y in x)
        ref = self.ref_of(x)
        return x if ref is None else ref

    def owner_of(self, x: Any) -> Owner:
        """The owner of what is computed from values. CaptureError if they are of several parameters or groups."""
        owner: Owner = None
        for ref in flat(x):
            its = self.owners[ref.index] if isinstance(ref, TapeRef) else None
            if its is None or its == owner:
                continue
            if owner is None or (isinstance(its, str) and self.group_of[its] == owner):
                owner = its
            elif not isinstance(owner, str) or self.group_of[owner] != its:
                raise untraceable("the optimizer combines numbers of several parameters or groups", f"{owner}, {its}")
        return owner

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function of torch on numbers and 0-dim tensors. What it computes from those on the tape is, too."""
        leaves = flat(args, *kwargs.values())
        if all(self.ref_of(x) is None for x in leaves):
            return function(*args, **kwargs)
        for x in leaves:  # constants
            if isinstance(x, Tensor) and self.ref_of(x) is None:
                if x.numel() != 1 or x.is_meta:
                    raise untraceable("the optimizer uses a tensor of its own", f"shape {tuple(x.shape)}")
                self._add(x, torch.clone, (x.clone(),), {})
        result = function(*plain(tuple(args)), **{k: plain(v) for k, v in kwargs.items()})
        if isinstance(result, Tensor):
            if result.numel() != 1:
                raise untraceable("the optimizer puts numbers into a tensor", f"shape {tuple(result.shape)}")
            return self._add(result, function, args, kwargs)
        if function is Tensor.item:
            return self._add(result, function, args, kwargs)
        if type(result) in (bool, int, float) and function.__name__ not in _OF_FORM:
            self._guard(function, self.refs(tuple(args)), result, tuple((k, self.refs(v)) for k, v in kwargs.items()))
        return result

    def _add(self, result: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        described = self.refs(tuple(args)), tuple((k, self.refs(v)) for k, v in kwargs.items())
        self.entries[len(self.values)] = TapeEntry(function, *described, len(self.values))
        return self._new(result, self.owner_of((described[0], [v for _, v in described[1]])))

    def compute(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Python's arithmetic."""
        refs = self.refs(tuple(args))
        key = function, repr(refs)
        if key not in self._computed:
            if all(x.index in self._shared for x in refs if isinstance(x, TapeRef)):
                self._shared.add(len(self.values))
            self._computed[key] = self._add(function(*plain(tuple(args))), function, args, {})
        return self._computed[key]

    def guard(self, function: Callable[..., Any], *args: Any) -> Any:
        """The plain result of a function on numbers, which has to be the same in a replay."""
        result = function(*plain(args))
        self._guard(function, self.refs(args), result)
        return result

    def _guard(self, function: Callable[..., Any], refs: tuple[Any, ...], result: Any, kwargs: Any = ()) -> None:
        owner = self.owner_of((refs, [v for _, v in kwargs]))
        key = function, repr((refs, kwargs))
        self.guards.setdefault(owner, {}).setdefault(
            key, TapeEntry(function, refs, kwargs, len(self.values), True, result)
        )

    def replay(self, name: str, results: Any, known: dict[Any, Replay]) -> Replay:
        """What computes `results` (references and constants, in tuples) for a parameter, with the guards on its
        options and state. `known` has each replay once."""
        guards = [x for owner in (None, self.group_of[name], name) for x in self.guards.get(owner, {}).values()]
        needed, stack = set[int](), flat(results, *(g.args for g in guards))
        while stack:
            x = stack.pop()
            if isinstance(x, TapeRef) and x.index not in needed:
                needed.add(x.index)
                if (entry := self.entries.get(x.index)) is not None:
                    stack += flat(entry.args, *(v for _, v in entry.kwargs))
        slots = sorted(i for i in needed if i in self.inputs and self.owners[i] == name)
        options = sorted(i for i in needed if i in self.inputs and self.owners[i] != name)
        entries = [*guards, *(self.entries[i] for i in needed if i in self.entries)]
        entries.sort(key=lambda e: (not self._is_shared(e), e.index, not e.is_guard))
        order = {i: n for n, i in enumerate((*options, *slots, *(e.index for e in entries if not e.is_guard)))}

        def renumbered(x: Any) -> Any:
            if isinstance(x, TapeRef):
                return TapeRef(order[x.index])
            return type(x)(map(renumbered, x)) if isinstance(x, (tuple, list)) else x

        described = tuple(
            TapeEntry(e.function, renumbered(e.args), renumbered(e.kwargs), 0, e.is_guard, e.expected) for e in entries
        )
        read = tuple(self.inputs[i] for i in options), tuple(self.inputs[i] for i in slots)
        replay = Replay(*read, described, renumbered(results))
        again = replay(self._of_inputs(options), self._of_inputs(slots))
        if repr(_digits_of(again)) != repr(_digits_of(_with_values(results, self.values))):
            raise untraceable("the optimizer computes other numbers when the same is computed again", name)
        return known.setdefault(
            repr((read, [(_digits_of(e.args), e) for e in described], _digits_of(replay.results))), replay
        )

    def _of_inputs(self, indices: Sequence[int]) -> dict[Any, Any]:
        """Inputs by option or slot, as the run began."""
        return {self.inputs[i]: self.begun.get(i, self.values[i]) for i in indices}

    def _is_shared(self, entry: TapeEntry) -> bool:
        """Whether all parameters of a group have an entry, wherever on the tape."""
        if entry.is_guard:
            return all(x.index in self._shared for x in flat(entry.args) if isinstance(x, TapeRef))
        return entry.index in self._shared


def _digits_of(x: Any) -> Any:
    """A value whose text has all digits of tensors."""
    if isinstance(x, Tensor):
        return str(x.dtype), x.shape, x.item()
    return type(x)(map(_digits_of, x)) if isinstance(x, (tuple, list)) else x


def plain(x: Any) -> Any:
    """Values in place of numbers that stand for them."""
    if type(x) is Number:
        return x.value
    return type(x)(map(plain, x)) if type(x) in (list, tuple) else x


class Number(torch.SymFloat):
    """A number of a tape during a trace.

    torch takes it wherever it takes a number (therefore the base class, whose methods are all replaced), and Python
    calls `__float__` where a function of C needs a plain number (so it is no float)."""

    def __init__(self, tape: Tape, value: Any, ref: TapeRef) -> None:
        self.tape, self.value, self.ref = tape, value, ref

    # isinstance(x, float) and isinstance(x, int) answer as for the number
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.value)

    def __bool__(self) -> bool:
        return bool(self.tape.guard(operator.truth, self))

    def __float__(self) -> float:
        return float(self.tape.guard(float, self))

    def __int__(self) -> int:
        return int(self.tape.guard(int, self))

    def __index__(self) -> int:
        return int(self.tape.guard(operator.index, self))

    def __hash__(self) -> int:
        return int(self.tape.guard(hash, self))

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, text: str) -> str:
        return format(self.value, text)

    def __deepcopy__(self, memo: Any) -> Number:
        return self


def _computed(function: Callable[..., Any], *args: Any) -> Any:
    if any(isinstance(x, Tensor) for x in args):
        return NotImplemented
    return next(x.tape for x in args if type(x) is Number).compute(function, args)


def _define() -> None:
    def binary(function: Callable[..., Any]) -> tuple[Any, Any]:
        return (lambda a, b: _computed(function, a, b)), (lambda a, b: _computed(function, b, a))

    def comparison(function: Callable[..., Any]) -> Any:
        return lambda a, b: NotImplemented if isinstance(b, Tensor) else a.tape.guard(function, a, b)

    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        forward, reflected = binary(getattr(operator, name))
        setattr(Number, f"__{name}__", forward)
        setattr(Number, f"__r{name}__", reflected)
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Number, f"__{name}__", comparison(getattr(operator, name)))
    unary = {"neg": operator.neg, "pos": operator.pos, "abs": abs, "round": round}
    for name, function in {**unary, "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc}.items():
        setattr(Number, f"__{name}__", lambda a, *n, function=function: _computed(function, a, *n))


_define()
