"""Shapes, strides and storages of every value of a graph.

For a rank graph these are on a device of its role, where symbols are numbers and every op runs without data; graphs
with meta["val"] are read in described.py."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch import fx

from meshweave.errors import VerifyError
from meshweave.interop.fake import FakeTensorMode
from meshweave.interop.ops import is_operator
from meshweave.interop.storages import storage_key
from meshweave.ir.collectives import COLLECTIVES, TABLE, WAIT, transfer
from meshweave.ir.graph import Input, map_nodes, op_name, origin_of
from meshweave.ir.grouped import own_rows
from meshweave.ir.layout import Layout
from meshweave.ir.rank import SYMBOLS, RankGraph, bind_symbols
from meshweave.ir.traits import FACTORIES

NOTHING: tuple[Value, ...] = ()
Shape = tuple[int, ...]
# shape, stride, dtype, index of the operand that it is a view of or -1, bytes
_Result = tuple[Shape, Shape, torch.dtype, int, int]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor on a device.

    `storage` numbers its storage: views share that of their base. `storage_bytes` is the size of the storage, `bytes`
    that of the tensor's elements (an expanded dim counts once).
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    storage_bytes: int

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        count = prod(size for size, stride in zip(self.shape, self.stride, strict=True) if stride or size == 0)
        return count * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


# of a node: one Value, or one per result; none for symbols and for values that a device does not receive
Values = tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Local:
    """The values of every node of a rank graph on `device`. `is_single`: the node returns a tensor, not a tuple."""

    device: int
    values: dict[fx.Node, Values]
    symbols: dict[fx.Node, Any]

    def single(self, node: fx.Node) -> Value | None:
        """The single tensor of a node; None if the device gets none."""
        results = self.values[node]
        assert len(results) <= 1, f"{node.name} returns {len(results)} tensors"
        return results[0] if results else None


@dataclass(slots=True)
class Inference:
    """The values of a graph, node by node: views share the storage of their base, a wait returns the value of its
    start. Subclasses define `inputs` and `results`."""

    values: dict[fx.Node, Values] = field(default_factory=dict)
    num_storages: int = 0

    def run(self, graph: fx.Graph) -> dict[fx.Node, Values]:
        with torch.no_grad():
            for node in graph.nodes:
                self.values[node] = self.of(node)
        return self.values

    def of(self, node: fx.Node) -> Values:
        if node.op == "output":
            return NOTHING
        if node.op != "call_function":
            return self.inputs(node)
        if node.target is WAIT:
            operand = node.args[0]
            return self.values[operand] if isinstance(operand, fx.Node) else NOTHING
        return self.results(node)

    def inputs(self, node: fx.Node) -> Values:
        raise NotImplementedError

    def results(self, node: fx.Node) -> Values:
        raise NotImplementedError

    def value(self, shape: Shape, stride: Shape, dtype: torch.dtype, base: Value | None, num_bytes: int) -> Value:
        """A tensor in the storage of `base`, or in its own storage of `num_bytes`."""
        if base is not None:
            return Value(shape, stride, dtype, base.storage, base.storage_bytes)
        self.num_storages += 1
        return Value(shape, stride, dtype, self.num_storages - 1, num_bytes)


@dataclass(slots=True)
class _Run(Inference):
    """A rank graph on a device: symbols are bound, every op runs on meta tensors, equal calls of all graphs once."""

    role: RankGraph = field(kw_only=True)
    device: int = field(kw_only=True)
    symbols: Mapping[fx.Node, Any] = field(kw_only=True)
    feeds: Iterator[tuple[Input, Layout]] = field(kw_only=True)  # of placeholders, in order
    is_balanced: bool = True  # for `ragged`: devices then own more rows than possible

    def fresh(self, shape: Shape, dtype: torch.dtype) -> Values:
        return (self.value(shape, _contiguous(shape), dtype, None, prod(shape) * dtype.itemsize),)

    def inputs(self, node: fx.Node) -> Values:
        item, layout = next(self.feeds)
        if self.device not in layout.mesh:
            return NOTHING
        return self.fresh(layout.box_of(item.spec.shape, self.device).size, item.spec.dtype)

    def results(self, node: fx.Node) -> Values:
        if node.target in SYMBOLS:
            return NOTHING
        if node.target is transfer:
            return self.transferred(node)
        if node.target in COLLECTIVES:
            (x,) = self.values[_operand(node)]
            args = fx.map_arg(node.args[1:], lambda n: self.symbols.get(n, n))
            return self.fresh(TABLE[node.target].shape(x.shape, args), x.dtype)
        if node.target is operator.getitem:
            index: Any = node.args[1]
            return (self.values[_operand(node)][index],)
        operands: list[Value] = []

        def describe(n: fx.Node) -> Any:
            if n in self.symbols:
                return self.symbols[n]
            if not self.values[n]:
                return None
            (x,) = self.values[n]
            operands.append(x)
            return _Operand(x.shape, x.stride, x.dtype)

        args, kwargs = map_nodes(node, describe)
        if node.target is own_rows and not self.is_balanced:
            args = (*args[:-1], 0)
        return tuple(
            self.value(shape, stride, dtype, operands[base] if base >= 0 else None, num_bytes)
            for shape, stride, dtype, base, num_bytes in _evaluate(node, args, kwargs)
        )

    def transferred(self, node: fx.Node) -> Values:
        sent = self.role.transfers[str(node.args[1])]
        if self.device not in sent.target.mesh:
            return NOTHING
        return self.fresh(tuple(sent.target.box_of(sent.spec.shape, self.device).size), sent.spec.dtype)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of an op on operands without data. `key` identifies it, numbers of different types apart."""

    target: Any
    key: Any
    args: Any = field(compare=False)
    kwargs: Any = field(compare=False)
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    def results(self, device: str) -> tuple[_Result, ...]:
        tensors: list[torch.Tensor] = []

        def make(value: Any) -> Any:
            if isinstance(value, _Operand):
                tensors.append(torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=device))
                return tensors[-1]
            if isinstance(value, (list, tuple)):
                return [make(item) for item in value]
            return value

        plain = [make(value) for value in self.args]
        named = {name: make(value) for name, value in self.kwargs.items()}
        if self.target in FACTORIES:
            named["device"] = device
        results = self.target(*plain, **named)
        bases = {storage_key(x): i for i, x in enumerate(tensors)}
        return tuple(_result(x, bases) for x in (results if isinstance(results, (list, tuple)) else (results,)))


# Namespaces of ops that do the same until the process ends: users may define theirs again, in a notebook.
_LASTING = frozenset({"aten", "prims", "meshweave", "_c10d_functional"})


@lru_cache(1 << 14)
def _evaluated(call: _Call) -> tuple[_Result, ...]:
    try:
        return call.results("meta")
    except NotImplementedError:  # no meta kernel: fake tensors run the op on zeros
        with FakeTensorMode():
            return call.results("cpu")


def _evaluate(node: fx.Node, args: Any, kwargs: Any) -> tuple[_Result, ...]:
    """The results of an op on operands without data."""
    call = _Call(node.target, (_hashable(args), _hashable(kwargs)), args, kwargs)
    is_lasting = not is_operator(node.target) or node.target.namespace in _LASTING
    evaluated = _evaluated if is_lasting else _evaluated.__wrapped__
    try:
        return evaluated(call)
    except Exception as error:
        raise VerifyError(
            f"{op_name(node.target)} cannot be evaluated without data",
            where=str(origin_of(node)),
            got=f"{type(error).__name__}: {error}",
        ) from error


def _result(x: torch.Tensor | None, bases: Mapping[int, int]) -> _Result:
    if x is None:  # a gradient that is not needed
        return (0,), (1,), torch.float32, -1, 0
    key = storage_key(x)
    return tuple(x.shape), tuple(x.stride()), x.dtype, bases.get(key, -1), x.untyped_storage().nbytes()


def local_values(role: RankGraph, device: int | None = None) -> Local:
    """The values of every node on a device of a role (default: the first, which has the largest pieces). Nothing is
    allocated. Raises VerifyError, with op and line, for an op whose result shape depends on data."""
    return _values(role, role.devices[0] if device is None else device, is_balanced=True)


def _values(role: RankGraph, device: int, *, is_balanced: bool) -> Local:
    run = _run(role, device, is_balanced)
    return Local(device, run.run(role.graph), dict(run.symbols))


def _run(role: RankGraph, device: int, is_balanced: bool = True) -> _Run:
    symbols = bind_symbols(role.graph, role.coordinates(device))
    feeds = iter(zip(role.inputs, role.layouts, strict=True))
    return _Run(role=role, device=device, symbols=symbols, feeds=feeds, is_balanced=is_balanced)


def _differing_values(role: RankGraph, device: int, first: Local) -> dict[fx.Node, Values]:
    """The values on a device whose shapes, strides or dtypes differ from those of the device of `first`. Only ops that
    read such a value, or a symbol with another number, are evaluated."""
    run = _run(role, device)
    run.values = dict(first.values)
    changed = {node for node, number in run.symbols.items() if first.symbols[node] != number}
    with torch.no_grad():
        for node in role.graph.nodes:
            is_source = node.op not in ("call_function", "output") or node.target is transfer
            if is_source or not changed.isdisjoint(node.all_input_nodes):
                results = run.of(node)
                if _described(results) != _described(first.values[node]):
                    changed.add(node)
                    run.values[node] = results
    return {node: run.values[node] for node in role.graph.nodes if node in changed}


def _described(results: Values) -> list[tuple[Shape, Shape, torch.dtype]]:
    return [(x.shape, x.stride, x.dtype) for x in results]


def ragged(role: RankGraph) -> frozenset[fx.Node]:
    """The nodes whose shapes are known only at run time: those that depend on owned rows."""
    return frozenset(_ragged_dims(role, local_values(role).values)) if _has_own_rows(role) else frozenset()


def _has_own_rows(role: RankGraph) -> bool:
    return any(node.target is own_rows for node in role.graph.nodes)


def _ragged_dims(role: RankGraph, balanced: Mapping[fx.Node, Values]) -> dict[fx.Node, frozenset[int]]:
    """The nodes whose shapes depend on the number of owned rows, with the dims that do."""
    if not _has_own_rows(role):
        return {}
    other = _values(role, role.devices[0], is_balanced=False).values
    return {node: dims for node, results in balanced.items() if (dims := _differing(results, other[node]))}


def _differing(results: Values, previous: Values) -> frozenset[int]:
    pairs = [(x.shape, y.shape) for x, y in zip_longest(results, previous, fillvalue=_ABSENT)]
    return frozenset(d for a, b in pairs for d, (m, n) in enumerate(zip_longest(a, b)) if m != n)


_ABSENT = Value((), (), torch.float32, -1, 0)  # for values that a device does not receive


def varying(role: RankGraph) -> frozenset[fx.Node]:
    """The nodes whose shapes differ between devices of a role."""
    return frozenset(uneven_dims(role))


def uneven_dims(role: RankGraph, local: Local | None = None) -> dict[fx.Node, frozenset[int]]:
    """The nodes whose shapes differ between devices of a role, with the dims (of any result) that differ. Along every
    axis pieces decrease in size: if they are equal at the corners of the mesh, they are equal everywhere. `local`: the
    values on the role's first device, if known."""
    ends: dict[tuple[tuple[str, int], ...], int] = {}
    coordinates = {d: role.coordinates(d) for d in role.devices}
    most: dict[str, int] = {}
    for bound in coordinates.values():
        for axis, at in bound.items():
            most[axis] = max(most.get(axis, 0), at)
    for device, bound in coordinates.items():
        if all(at in (0, most[axis]) for axis, at in bound.items()):
            ends.setdefault(tuple(sorted(bound.items())), device)
    first = local if local is not None else local_values(role)
    uneven = _ragged_dims(role, first.values)
    for device in ends.values():
        if device == first.device:
            continue
        for node, results in _differing_values(role, device, first).items():
            if differing := _differing(results, first.values[node]):
                uneven[node] = uneven.get(node, frozenset()) | differing
    return uneven


@dataclass(frozen=True, slots=True)
class _Operand:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _operand(node: fx.Node) -> fx.Node:
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return operand


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _hashable(item)) for name, item in value.items())
    return (type(value), value) if isinstance(value, (bool, int, float)) else value
