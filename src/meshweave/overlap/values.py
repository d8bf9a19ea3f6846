"""What every node of anyone's graph makes: shapes, dtypes, and which storage each tensor lives in, from
`meta["val"]`."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import fx

from meshweave.errors import VerifyError
from meshweave.interop.ops import OpOverload, arguments_of, is_operator, returns_of
from meshweave.interop.storages import storage_key
from meshweave.ir.collectives import WAIT
from meshweave.ir.graph import place_of
from meshweave.ir.values import NOTHING, Value, Values

_MOST_PARTS = 4096  # of an op that returns a list of views
_SYMBOLIC = 8192  # a size without a hint: what Inductor assumes (config.unbacked_symint_fallback, torch 2.13)
_ALIASES = frozenset({"aten::_unsafe_view", "aten::_reshape_alias"})  # views whose schema does not say so


def values_of(graph: fx.Graph) -> dict[fx.Node, Values]:
    """The tensors of every node. Views share the storage of their base, results of in-place ops that of what they
    change, a wait that of its start. Raises VerifyError for a node that makes tensors nobody described."""
    values: dict[fx.Node, Values] = {}
    counter = iter(range(1 << 60))
    inputs: dict[int, Value] = {}
    for node in graph.nodes:
        found = _values(node, values, counter)
        values[node] = _shared_inputs(node, found, inputs) if node.op in ("placeholder", "get_attr") else found
    return values


def _shared_inputs(node: fx.Node, found: Values, inputs: dict[int, Value]) -> Values:
    """Inputs that are views of one storage share it: a saved tensor, and a view of it that is saved too."""
    made = []
    for x, value in zip(_leaves(node.meta.get("val")), found, strict=False):
        if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
            made.append(value)
            continue
        storage = x.untyped_storage()
        size = storage.nbytes()
        held = Value(value.shape, value.stride, value.dtype, value.storage, size if type(size) is int else hint(size))
        base = inputs.setdefault(storage_key(x), held)
        made.append(Value(value.shape, value.stride, value.dtype, base.storage, base.storage_bytes))
    return tuple(made)


def _values(node: fx.Node, values: Mapping[fx.Node, Values], counter: Iterator[int]) -> Values:
    if node.op == "output":
        return NOTHING
    if node.target is WAIT:
        operand = node.args[0]
        return values[operand] if isinstance(operand, fx.Node) else NOTHING
    made = node.meta.get("val")
    if made is None:
        return _undescribed(node)
    if not any(isinstance(x, torch.Tensor) for x in _leaves(made)):
        return NOTHING
    if node.target is operator.getitem and (found := _item(node, values)):
        return found
    if isinstance(made, torch.Tensor):
        return (_describe(node, 0, made, values, counter),)
    return tuple(_describe(node, i, x, values, counter) for i, one in enumerate(made) for x in _leaves(one))


def _item(node: fx.Node, values: Mapping[fx.Node, Values]) -> Values:
    """The values of one result of several: those of its leaves, which stand behind the leaves before it."""
    operand, index = node.args
    several = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    if (
        not isinstance(several, (list, tuple))
        or not isinstance(index, int)
        or not -len(several) <= index < len(several)
    ):
        return NOTHING
    before, own = (len(list(_leaves(x))) for x in (several[: index % len(several)], several[index]))
    return values[operand][before : before + own]  # type: ignore[index]


def _undescribed(node: fx.Node) -> Values:
    if node.op in ("placeholder", "get_attr") or "val" in node.meta or not node.users:
        return NOTHING
    if "val" not in node.meta and not is_operator(node.target):
        return NOTHING
    raise VerifyError(
        "a node does not say what it makes",
        where=place_of(node),
        got="no meta['val']",
        expected="a fake tensor per node, as torch.compile and make_fx leave it",
        hint="run torch.fx.passes.fake_tensor_prop.FakeTensorProp over the graph first",
    )


def _leaves(made: Any) -> Iterator[Any]:
    """What a node makes, lists flattened. A result that is no tensor (a gradient that was not asked for) keeps its
    place."""
    if isinstance(made, (list, tuple)):
        for one in made:
            yield from _leaves(one)
    else:
        yield made


def _describe(node: fx.Node, index: int, x: Any, values: Mapping[fx.Node, Values], counter: Iterator[int]) -> Value:
    """Leaf `x` of result `index`."""
    if not isinstance(x, torch.Tensor):
        return Value((0,), (1,), torch.float32, next(counter), 0)
    shape = tuple(size if type(size) is int else hint(size) for size in x.shape)
    strided = x.layout is torch.strided
    stride = tuple(step if type(step) is int else hint(step) for step in x.stride()) if strided else (1,) * len(shape)
    base = _base(node, index, x, values) if node.op == "call_function" else None
    if base is not None:
        return Value(shape, stride, x.dtype, base.storage, base.storage_bytes)
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    held = x.untyped_storage().nbytes() if strided else 0  # more, of an op that copies a storage as it is
    return Value(
        shape, stride, x.dtype, next(counter), max(extent * x.dtype.itemsize, held if type(held) is int else 0)
    )


def _base(node: fx.Node, index: int, x: torch.Tensor, values: Mapping[fx.Node, Values]) -> Value | None:
    """The operand whose storage result `index` lives in, None where it has its own."""
    target = node.target
    if is_operator(target):
        for position, name in aliases_of(target).get(index, ()):
            operand = node.kwargs.get(name, node.args[position] if position < len(node.args) else None)
            if isinstance(operand, (list, tuple)):  # Tensor(a!)[]: the k-th result is the k-th operand
                operand = operand[index] if index < len(operand) else None
            if isinstance(operand, fx.Node) and values[operand] and _shares(x, operand, target):
                return values[operand][0]
        return None
    storage = storage_key(x) if x.layout is torch.strided else None
    for operand in node.all_input_nodes:
        for one, held in zip(_leaves(operand.meta.get("val")), values[operand], strict=False):
            if isinstance(one, torch.Tensor) and one.layout is torch.strided and storage_key(one) == storage:
                return held
    return None


def _shares(x: torch.Tensor, operand: fx.Node, target: OpOverload) -> bool:
    """Whether an op whose result may be a view made one: reshape and contiguous copy where they must."""
    if target.name().partition(".")[0] not in _MAY_COPY:
        return True
    base = operand.meta.get("val")
    return not isinstance(base, torch.Tensor) or storage_key(base) == storage_key(x)


_MAY_COPY = frozenset(
    f"aten::{name}" for name in ("reshape", "contiguous", "to", "flatten", "expand_as", "resolve_conj")
)


@cache
def aliases_of(target: OpOverload) -> Mapping[int, tuple[tuple[int, str], ...]]:
    """Per result the arguments (position, name) that it may be a view of, or is written into, by the op's schema."""
    arguments, returns = arguments_of(target), returns_of(target)
    if target.name().partition(".")[0] in _ALIASES:
        return {0: ((0, arguments[0].name),)}
    found = {}
    for i, result in enumerate(returns):
        if result.alias_info is None:
            continue
        sets = result.alias_info.before_set
        found[i] = tuple(
            (p, a.name)
            for p, a in enumerate(arguments)
            if a.alias_info is not None and (a.alias_info.before_set & sets or "*" in sets)
        )
    if len(returns) == 1 and str(returns[0].type).startswith("List"):  # split, unbind: every part is of the one operand
        annotated = tuple((p, a.name) for p, a in enumerate(arguments) if a.alias_info is not None)
        return dict.fromkeys(range(_MOST_PARTS), annotated) if annotated else {}
    return found


@cache
def written_of(target: Any) -> tuple[tuple[int, str], ...]:
    """The arguments (position, name) that an op writes into, by its schema."""
    if not is_operator(target):
        return ()
    arguments = enumerate(arguments_of(target))
    return tuple((p, a.name) for p, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def is_view_op(target: Any) -> bool:
    """Whether an op makes views, by its schema, and writes nothing."""
    return is_operator(target) and bool(aliases_of(target)) and not written_of(target)


def hint(size: Any) -> int:
    """A symbolic size as the number that it had when the graph was traced."""
    node = getattr(size, "node", None)
    found = getattr(node, "hint", None) if node is not None else None
    return int(found) if found is not None else _SYMBOLIC
