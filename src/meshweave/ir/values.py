"""Local shapes and storages of the values of a rank graph, on one device of its role."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch import fx

from meshweave.errors import VerifyError
from meshweave.interop.storages import storage_key
from meshweave.ir.collectives import COLLECTIVES, TABLE, WAIT, transfer
from meshweave.ir.graph import map_nodes, op_name, origin_of
from meshweave.ir.rank import SYMBOLS, RankGraph, bind_symbols
from meshweave.ir.traits import FACTORIES

NOTHING: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor as a device holds it. `storage` numbers what it lives in: views share that of their base.

    `storage_bytes` is the size of what it lives in, `bytes` that of the elements that it shows (an expanded dim is held
    once).
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
        held = prod(size for size, stride in zip(self.shape, self.stride, strict=True) if stride or size == 0)
        return held * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


Values = tuple[Value, ...]  # of a node: one, or one per result; none for symbols and for what a device does not receive


@dataclass(frozen=True, slots=True)
class Local:
    """What every node of a rank graph makes on `device`. `is_single` says that a node makes one tensor, not a tuple."""

    device: int
    values: dict[fx.Node, Values]
    symbols: dict[fx.Node, Any]

    def one(self, node: fx.Node) -> Value | None:
        """The tensor that a node makes; None where the device gets none."""
        made = self.values[node]
        assert len(made) <= 1, f"{node.name} makes {len(made)} tensors"
        return made[0] if made else None


@dataclass(slots=True)
class _Inference:
    """Runs every op on meta tensors, equal calls once."""

    role: RankGraph
    device: int
    values: dict[fx.Node, Values] = field(default_factory=dict)
    known: dict[Any, tuple[tuple[Any, ...], ...]] = field(default_factory=dict)
    num_storages: int = 0

    def run(self) -> Local:
        graph = self.role.graph
        symbols = bind_symbols(graph, self.role.coordinates(self.device))
        inputs = iter(zip(self.role.inputs, self.role.layouts, strict=True))
        with torch.no_grad():
            for node in graph.nodes:
                if node.op == "placeholder":
                    item, layout = next(inputs)
                    box = layout.box_of(item.spec.shape, self.device) if self.device in layout.mesh else None
                    shape = box.size if box is not None else None
                    self.values[node] = (self.fresh(shape, item.spec.dtype),) if shape is not None else NOTHING
                elif node.op == "call_function":
                    self.values[node] = NOTHING if node.target in SYMBOLS else self.call(node, symbols)
        return Local(self.device, self.values, symbols)

    def fresh(self, shape: tuple[int, ...], dtype: torch.dtype) -> Value:
        self.num_storages += 1
        strides = _contiguous(shape)
        return Value(shape, strides, dtype, self.num_storages - 1, prod(shape) * dtype.itemsize)

    def call(self, node: fx.Node, symbols: dict[fx.Node, Any]) -> Values:
        if node.target is WAIT:
            return self.values[_operand(node)]
        if node.target is transfer:
            return self.transferred(node)
        if node.target in COLLECTIVES:
            (x,) = self.values[_operand(node)]
            args = fx.map_arg(node.args[1:], lambda n: symbols[n])
            return (self.fresh(TABLE[node.target].shape(x.shape, args), x.dtype),)
        if _is_getitem(node):
            made = self.values[_operand(node)]
            index: Any = node.args[1]
            return (made[index],)
        operands: list[Value] = []

        def describe(n: fx.Node) -> Any:
            if n in symbols:
                return symbols[n]
            held = self.values[n]
            if not held:
                return None
            (x,) = held
            operands.append(x)
            return _Operand(x.shape, x.stride, x.dtype)

        args, kwargs = map_nodes(node, describe)
        key = (node.target, _frozen(args), _frozen(kwargs))
        if key not in self.known:
            self.known[key] = self.evaluate(node, args, kwargs)
        return tuple(self.result(one, operands) for one in self.known[key])

    def result(self, made: tuple[Any, ...], operands: list[Value]) -> Value:
        shape, stride, dtype, alias, num_bytes = made
        if alias >= 0:
            return Value(shape, stride, dtype, operands[alias].storage, operands[alias].storage_bytes)
        self.num_storages += 1
        return Value(shape, stride, dtype, self.num_storages - 1, num_bytes)

    def evaluate(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], ...]:
        """(shape, stride, dtype, operand whose storage it is or -1, bytes of its storage) per result."""
        tensors: list[torch.Tensor] = []

        def make(value: Any) -> Any:
            if isinstance(value, _Operand):
                tensors.append(torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta"))
                return tensors[-1]
            if isinstance(value, (list, tuple)):
                return [make(one) for one in value]
            return value

        plain = [make(value) for value in args]
        named = {name: make(value) for name, value in kwargs.items()}
        if node.target in FACTORIES:
            named["device"] = "meta"
        try:
            made = node.target(*plain, **named)  # type: ignore[operator]
        except Exception as error:
            raise VerifyError(
                f"{op_name(node.target)} cannot be followed without data",
                where=str(origin_of(node)),
                got=f"{type(error).__name__}: {error}",
            ) from error
        results = made if isinstance(made, (list, tuple)) else (made,)
        bases = {storage_key(x): i for i, x in enumerate(tensors)}
        absent = ((0,), (1,), torch.float32, -1, 0)  # a gradient that was not asked for
        return tuple(
            absent
            if x is None
            else (
                tuple(x.shape),
                tuple(x.stride()),
                x.dtype,
                bases.get(storage_key(x), -1),
                x.untyped_storage().nbytes(),
            )
            for x in results
        )

    def transferred(self, node: fx.Node) -> Values:
        made = self.role.transfers[str(node.args[1])]
        if self.device not in made.target.mesh:
            return NOTHING
        return (self.fresh(tuple(made.target.box_of(made.spec.shape, self.device).size), made.spec.dtype),)


def local_values(role: RankGraph, device: int | None = None) -> Local:
    """What a device of a role (default: its first, which has the largest pieces) holds at every node.

    Nothing is allocated. Raises VerifyError, naming op and line, for an op that needs data to say its shape.
    """
    return _Inference(role, role.devices[0] if device is None else device).run()


_ABSENT = Value((), (), torch.float32, -1, 0)  # in place of what a device does not receive


def varying(role: RankGraph) -> frozenset[fx.Node]:
    """The nodes whose shapes are not the same on every device of a role."""
    return frozenset(uneven_dims(role))


def uneven_dims(role: RankGraph) -> dict[fx.Node, frozenset[int]]:
    """The nodes whose shapes are not the same on every device of a role, with the dims (of any of its results) that
    differ.

    Pieces follow each other in size along every axis, the last the smallest: equal at the corners of the mesh, they are
    equal everywhere.
    """
    ends: dict[tuple[tuple[str, int], ...], int] = {}
    coordinates = {d: role.coordinates(d) for d in role.devices}
    most: dict[str, int] = {}
    for held in coordinates.values():
        for axis, at in held.items():
            most[axis] = max(most.get(axis, 0), at)
    for device, held in coordinates.items():
        if all(at in (0, most[axis]) for axis, at in held.items()):
            ends.setdefault(tuple(sorted(held.items())), device)
    first = local_values(role).values
    found: dict[fx.Node, frozenset[int]] = {}
    for device in ends.values():
        for node, made in local_values(role, device).values.items():
            pairs = [(x.shape, y.shape) for x, y in zip_longest(made, first[node], fillvalue=_ABSENT)]
            if differing := {d for a, b in pairs for d, (m, n) in enumerate(zip_longest(a, b)) if m != n}:
                found[node] = found.get(node, frozenset()) | differing
    return found


@dataclass(frozen=True, slots=True)
class _Operand:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _operand(node: fx.Node) -> fx.Node:
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    return operand


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(one) for one in value)
    if isinstance(value, dict):
        return tuple((name, _frozen(one)) for name, one in value.items())
    return (type(value), value) if isinstance(value, (bool, int, float)) else value
