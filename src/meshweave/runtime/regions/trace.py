"""A region as a function of tensors, and its identity: equal regions have equal keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from meshweave.interop.ops import is_operator
from meshweave.interop.pytree import tree_leaves
from meshweave.ir import grouped
from meshweave.ir.graph import map_nodes
from meshweave.ir.ops import KERNELS
from meshweave.ir.rank import SYMBOLS
from meshweave.ir.traits import FACTORIES
from meshweave.ir.values import Values
from meshweave.runtime.regions.cut import Region
from meshweave.runtime.regions.libraries import Form, Libraries

aten, ours = torch.ops.aten, torch.ops.meshweave
Shape = tuple[int, ...]

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
} | {ours.grouped_mm.default: grouped.seen_mm, ours.grouped_outer.default: grouped.seen_outer}


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
    dead: tuple[tuple[int, ...], ...] = field(init=False, repr=False)  # by call: the results that nothing reads later

    def __post_init__(self) -> None:
        read = ((x, i) for i, call in enumerate(self.calls) for x in tree_leaves((call.args, dict(call.kwargs))))
        last = {x.index: i for x, i in read if isinstance(x, _Tensor) and not x.is_input}
        last |= dict.fromkeys((*self.outputs, *(result for result, _ in self.writes)), len(self.calls))
        dead: list[list[int]] = [[] for _ in range(len(self.calls) + 1)]
        for i in range(len(self.calls)):
            dead[last.get(i, i)].append(i)
        object.__setattr__(self, "dead", tuple(map(tuple, dead[:-1])))

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run it op by op, through kernels that a tracer can follow."""
        results: list[Any] = []
        for call, dead in zip(self.calls, self.dead, strict=True):
            args = [_value(x, inputs, results) for x in call.args]
            kwargs = {name: _value(x, inputs, results) for name, x in call.kwargs.items()}
            results.append(call.function(*args, **kwargs))
            del args, kwargs
            for i in dead:
                results[i] = None
        for result, i in self.writes:
            inputs[i].copy_(results[result])
        return tuple(results[i] for i in self.outputs)

    def compiled(self, inductor: Any, joins_updates: bool = True) -> Callable[[list[Any]], Sequence[Any]]:
        """The function compiled by `interop.inductor`, which takes a list that it empties. Raises what that raises.
        `joins_updates`: if it updates parameters, its loops become a few kernels, on a GPU."""
        joins = joins_updates and bool(self.writes)
        compiled = inductor.compile_graph(self, self.forms, self.device, joins_kernels=joins)
        return compiled  # type: ignore[no-any-return]


# Not a closure of `__call__`: a recursive closure is a cycle, and keeps the tensors until the garbage collector runs.
def _value(x: Any, inputs: Sequence[Tensor], results: Sequence[Any]) -> Any:
    if isinstance(x, _Tensor):
        return inputs[x.index] if x.is_input else results[x.index]
    return [_value(item, inputs, results) for item in x] if isinstance(x, (list, tuple)) else x


def region_function(
    region: Region,
    values: Mapping[fx.Node, Values],
    symbols: Mapping[fx.Node, Any],
    device: torch.device,
    libraries: Libraries = Libraries(),  # noqa: B008  (immutable)
) -> RegionFunction:
    """A region with the symbols of a device bound. `values` are those of that device."""
    place = {node: _Tensor(True, i) for i, node in enumerate(region.inputs)}
    calls: list[RegionCall] = []
    for i, node in enumerate(region.nodes):
        args, kwargs = map_nodes(node, lambda n: symbols[n] if n.target in SYMBOLS else place[n])
        if node.target in FACTORIES:
            kwargs = {**kwargs, "device": device}
        function = libraries.kernel(node, values)
        calls.append(RegionCall(_SEEN_INTO.get(function, function), args, kwargs))
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
