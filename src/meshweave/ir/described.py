"""Graphs that describe their values in meta["val"] (those of torch.compile): all their values, and the meta["val"] of
new nodes."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from meshweave.errors import VerifyError
from meshweave.interop.fake import fake_like, meta_like, without_modes
from meshweave.interop.ops import OpOverload, is_operator
from meshweave.interop.storages import storage_key
from meshweave.ir.aliases import aliases_of
from meshweave.ir.collectives import COLLECTIVES, TABLE, WAIT
from meshweave.ir.graph import place_of
from meshweave.ir.traits import FACTORIES
from meshweave.ir.values import NOTHING, Inference, Value, Values

_META = torch.device("meta")
_SYMBOLIC = 8192  # a size without a hint: what Inductor assumes (config.unbacked_symint_fallback, torch 2.13)


@dataclass(slots=True)
class _Read(Inference):
    """A graph, read by its meta["val"] and the aliases in op schemas."""

    shared: dict[int, Value] = field(default_factory=dict)  # by storage: the value of the first input that lives there

    def inputs(self, node: fx.Node) -> Values:
        """Inputs that are views of the same storage share it: a saved tensor, and a saved view of it."""
        return tuple(map(self.shared_input, _leaves(node.meta.get("val")), self.results(node)))

    def shared_input(self, x: Any, value: Value) -> Value:
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
            return value
        num_bytes = hint(x.untyped_storage().nbytes())
        base = self.shared.setdefault(storage_key(x), replace(value, storage_bytes=num_bytes))
        return replace(value, storage=base.storage, storage_bytes=base.storage_bytes)

    def results(self, node: fx.Node) -> Values:
        value = node.meta.get("val")
        if value is None:
            return _check_described(node)
        if not any(isinstance(x, torch.Tensor) for x in _leaves(value)):
            return NOTHING
        if node.target is operator.getitem and (items := self.item(node)):
            return items
        if isinstance(value, torch.Tensor):
            return (self.describe(node, 0, value),)
        return tuple(self.describe(node, i, x) for i, result in enumerate(value) for x in _leaves(result))

    def item(self, node: fx.Node) -> Values:
        """The values of a single result among several: those of its leaves, after the leaves of earlier results."""
        operand, index = node.args
        several = operand.meta.get("val") if isinstance(operand, fx.Node) else None
        if not (
            isinstance(several, (list, tuple))
            and isinstance(index, int)
            and index in range(-len(several), len(several))
        ):
            return NOTHING
        before, own = (len(list(_leaves(x))) for x in (several[: index % len(several)], several[index]))
        return self.values[operand][before : before + own]  # type: ignore[index]

    def describe(self, node: fx.Node, index: int, x: Any) -> Value:
        """Leaf `x` of result `index`."""
        if not isinstance(x, torch.Tensor):
            return self.value((0,), (1,), torch.float32, None, 0)
        shape = tuple(map(hint, x.shape))
        strided = x.layout is torch.strided
        stride = tuple(map(hint, x.stride())) if strided else (1,) * len(shape)
        base = self.base(node, index, x) if node.op == "call_function" else None
        if base is not None:
            return self.value(shape, stride, x.dtype, base, 0)
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
        whole = x.untyped_storage().nbytes() if strided else 0  # larger for an op that copies a whole storage
        num_bytes = max(extent * x.dtype.itemsize, whole if type(whole) is int else 0)
        return self.value(shape, stride, x.dtype, None, num_bytes)

    def base(self, node: fx.Node, index: int, x: torch.Tensor) -> Value | None:
        """The operand whose storage result `index` aliases, None if it has its own."""
        target = node.target
        if is_operator(target):
            for position, name in aliases_of(target).get(index, ()):
                operand = node.kwargs.get(name, node.args[position] if position < len(node.args) else None)
                if isinstance(operand, (list, tuple)):  # Tensor(a!)[]: the k-th result is the k-th operand
                    operand = operand[index] if index < len(operand) else None
                if isinstance(operand, fx.Node) and self.values[operand] and _shares(x, operand, target):
                    return self.values[operand][0]
            return None
        storage = storage_key(x) if x.layout is torch.strided else None
        for operand in node.all_input_nodes:
            for y, value in zip(_leaves(operand.meta.get("val")), self.values[operand], strict=False):
                if isinstance(y, torch.Tensor) and y.layout is torch.strided and storage_key(y) == storage:
                    return value
        return None


def values_of(graph: fx.Graph) -> dict[fx.Node, Values]:
    """The tensors of every node of a graph that describes its values in meta["val"].

    Results of in-place ops live in the storage that they change. Raises VerifyError for a node whose tensors are not
    described."""
    return _Read().run(graph)


def _check_described(node: fx.Node) -> Values:
    if node.op in ("placeholder", "get_attr") or "val" in node.meta or not node.users:
        return NOTHING
    if "val" not in node.meta and not is_operator(node.target):
        return NOTHING
    raise VerifyError(
        "a node has no meta['val']",
        where=place_of(node),
        got="no meta['val']",
        expected="a fake tensor per node, as torch.compile and make_fx leave it",
        hint="run torch.fx.passes.fake_tensor_prop.FakeTensorProp over the graph first",
    )


def _leaves(value: Any) -> Iterator[Any]:
    """The results of a node, lists flattened. A result that is not a tensor (a gradient that is not needed) keeps its
    index."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _shares(x: torch.Tensor, operand: fx.Node, target: OpOverload) -> bool:
    """Whether the result of an op that may return a view is a view: reshape and contiguous copy only if necessary."""
    if target.name().partition(".")[0] not in _MAY_COPY:
        return True
    base = operand.meta.get("val")
    return not isinstance(base, torch.Tensor) or storage_key(base) == storage_key(x)


_MAY_COPY = frozenset(
    f"aten::{name}" for name in ("reshape", "contiguous", "to", "flatten", "expand_as", "resolve_conj")
)


def hint(size: Any) -> int:
    """A size as a number: a symbolic size has its value at tracing."""
    if type(size) is int:
        return size
    node = getattr(size, "node", None)
    hinted = getattr(node, "hint", None) if node is not None else None
    return int(hinted) if hinted is not None else _SYMBOLIC


def val_of_call(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: Any) -> Any:
    """The meta["val"] of a new node that calls `target`, from those of its operands; `like` is a neighbour's.

    The op runs on meta tensors, whose results are then wrapped as fake tensors of the mode and device of `like` (a
    tenth of the time of fake-tensor dispatch): views share the storage of their base. Raises RuntimeError, as the op
    does, if it rejects its operands.
    """
    if target is WAIT:
        return args[0].meta["val"]
    with without_data():
        return _with_description(_called(target, args, kwargs, {}), like)


@contextmanager
def without_data() -> Iterator[None]:
    """A context in which ops on meta tensors run directly: no mode sees them, and nothing is recorded."""
    with without_modes(), torch.no_grad():
        yield


def describe(node: fx.Node, like: Any, bare: dict[fx.Node, Any]) -> None:
    """Set the meta["val"] of a new node, as `val_of_call`, within `without_data`; `bare` caches the meta tensors of
    nodes."""
    bare[node] = _called(node.target, node.args, node.kwargs, bare)
    is_wait = node.target is WAIT
    node.meta["val"] = node.all_input_nodes[0].meta["val"] if is_wait else _with_description(bare[node], like)


def _called(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], bare: dict[fx.Node, Any]) -> Any:
    def operand(n: fx.Node) -> Any:
        if n not in bare:
            bare[n] = _bare(n.meta["val"])
        return bare[n]

    plain, named = fx.map_arg((args, kwargs), operand)
    if target is WAIT:
        return plain[0]
    if "device" in named or target in FACTORIES:
        named = {**named, "device": _META}
    try:
        return _collective(target, plain) if target in _COLLECTIVES else target(*plain, **named)
    except ValueError as error:  # for ops that torch runs by their decomposition: view, where sizes may be symbolic
        raise RuntimeError(str(error)) from error


def _collective(target: Any, args: tuple[Any, ...]) -> torch.Tensor:
    """The result of a collective, which is contiguous."""
    return args[0].new_empty(TABLE[target].shape(tuple(args[0].shape), args[1:]))


# Collectives of rank graphs, and others that can be merged.
_COLLECTIVES = COLLECTIVES | {op for op, row in TABLE.items() if row.bucket}


def _bare(x: Any) -> Any:
    """Every tensor of an argument as a meta tensor."""
    if isinstance(x, (list, tuple)):
        return type(x)(_bare(item) for item in x)
    return meta_like(x) if isinstance(x, torch.Tensor) else x


def _with_description(value: Any, like: Any) -> Any:
    if isinstance(value, (list, tuple)):
        likes = like if isinstance(like, (list, tuple)) else [like] * len(value)
        return type(value)(_with_description(item, other) for item, other in zip(value, likes, strict=True))
    if isinstance(like, (list, tuple)):
        like = next(item for item in like if isinstance(item, torch.Tensor))
    return fake_like(value, like) if isinstance(value, torch.Tensor) else value


def is_symbolic(x: torch.Tensor) -> bool:
    """Whether a size or stride is symbolic."""
    return any(type(size) is not int for size in (*x.shape, *(x.stride() if x.layout is torch.strided else ())))
