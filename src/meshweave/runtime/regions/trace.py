"""A region as a function of tensors, and its identity: equal regions have equal keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from meshweave.interop.ops import is_operator
from meshweave.ir import grouped
from meshweave.ir.graph import map_nodes
from meshweave.ir.ops import KERNELS
from meshweave.ir.rank import SYMBOLS
from meshweave.ir.traits import FACTORIES
from meshweave.ir.values import Values
from meshweave.runtime.regions.cut import Region

aten, ours = torch.ops.aten, torch.ops.meshweave
Shape = tuple[int, ...]
Form = tuple[Shape, Shape, torch.dtype]  # shape, stride and dtype of a tensor
CompiledFunction = Callable[[list[Any]], Sequence[Any]]  # empties its argument list


def _reinterpret(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.view(dtype)`, with casts of bools, which are bytes of 0 and 1: Inductor does not know their size (torch
    2.11)."""
    plain = x.to(torch.uint8) if x.dtype is torch.bool else x
    return plain.view(torch.uint8).to(torch.bool) if dtype is torch.bool else plain.view(dtype)


# Ops whose kernels a compiler traces through, because these call ATen ops. It calls the kernels of other meshweave ops
# as they are: random numbers wrap around in 64 bits, and squares are added in float64 in a particular order.
_SEEN_INTO = {
    op: KERNELS[op]
    for op in (
        aten.native_layer_norm_backward.default,
        ours.attention.default,
        ours.attention_backward.default,
        ours.matmul.default,
    )
} | {
    ours.grouped_mm.default: grouped.seen_mm,
    ours.grouped_outer.default: grouped.seen_outer,
    aten.view.dtype: _reinterpret,
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Represents the value of a node of a region: input or result number `index`."""

    is_input: bool
    index: int


@dataclass(frozen=True, slots=True)
class RegionCall:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RegionFunction:
    """What a region computes on a device, without the names of its nodes: calls in order, whose arguments are inputs,
    results of earlier calls, and numbers. Equal `key`s: equal functions of equal inputs."""

    calls: tuple[RegionCall, ...]
    forms: tuple[Form, ...]  # of the inputs
    outputs: tuple[int, ...]  # which results are returned
    writes: tuple[tuple[int, int], ...]  # (result, input): results that are written into inputs, and not returned
    device: torch.device
    key: str

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The calls, for a tracer to follow."""
        results: list[Any] = []
        for call in self.calls:
            args = [_value(x, inputs, results) for x in call.args]
            kwargs = {name: _value(x, inputs, results) for name, x in call.kwargs.items()}
            results.append(call.function(*args, **kwargs))
        for result, i in self.writes:
            inputs[i].copy_(results[result])
        return tuple(results[i] for i in self.outputs)

    def compiled(self, inductor: Any, joins_updates: bool) -> CompiledFunction:
        """The function compiled by `interop.inductor`. Raises what that raises. `joins_updates`: if it updates
        parameters, its loops become a few kernels, on a GPU."""
        joins = joins_updates and bool(self.writes)
        compiled: CompiledFunction = inductor.compile_graph(self, self.forms, self.device, joins_kernels=joins)
        return compiled


def _value(x: Any, inputs: Sequence[Tensor], results: Sequence[Any]) -> Any:
    if isinstance(x, _Tensor):
        return inputs[x.index] if x.is_input else results[x.index]
    return [_value(item, inputs, results) for item in x] if isinstance(x, (list, tuple)) else x


def region_function(
    region: Region,
    values: Mapping[fx.Node, Values],
    symbols: Mapping[fx.Node, Any],
    device: torch.device,
) -> RegionFunction:
    """A region with the symbols of a device bound. `values` are those of that device."""
    place = {node: _Tensor(True, i) for i, node in enumerate(region.inputs)}
    calls: list[RegionCall] = []
    for i, node in enumerate(region.nodes):
        args, kwargs = map_nodes(node, lambda n: symbols[n] if n.target in SYMBOLS else place[n])
        if node.target in FACTORIES:
            kwargs = {**kwargs, "device": device}
        calls.append(RegionCall(_SEEN_INTO.get(node.target, node.target), args, kwargs))
        place[node] = _Tensor(False, i)
    forms = tuple((x.shape, x.stride, x.dtype) for node in region.inputs for x in values[node])
    outputs = tuple(place[node].index for node in region.outputs if node not in region.written)
    writes = tuple((place[new].index, place[old].index) for new, old in region.written.items())
    lines = [f"{_name(call.function)}{call.args}{dict(call.kwargs)}" for call in calls]
    key = "\n".join([str(device), *map(str, forms), *lines, str(outputs), str(writes)])
    return RegionFunction(tuple(calls), forms, outputs, writes, device, key)


def _name(function: Any) -> str:
    if is_operator(function):
        return str(function)
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"
