"""Compiles the regions of rank graphs by Inductor, each distinct region once."""

from __future__ import annotations

import importlib
import logging
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from meshweave.errors import MeshweaveError
from meshweave.interop.ops import is_operator
from meshweave.ir import grouped
from meshweave.ir.graph import map_nodes, op_name, origin_of
from meshweave.ir.ops import DENSE_OPERANDS, KERNELS
from meshweave.ir.rank import SYMBOLS, RankGraph
from meshweave.ir.traits import FACTORIES, is_random
from meshweave.ir.values import Local, Values, local_values, ragged
from meshweave.runtime.regions.cut import Fused, Parts, Region, cut, written_in_place

# A region as a function of tensors, and its identity: equal regions have equal keys.

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
SEEN_INTO = {
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
class Kernels:
    """How a GPU's kernels are made. `join_updates`: loops of an update become a few kernels: slower than single kernels
    (1.05 of 2.85 TB/s for 16 parameters of 0.8 million elements, NVIDIA H100, torch 2.11, 2026-11), but launched sooner
    by a host that launches each kernel. `are_equal_on_ranks`: sums are in the same order in every process, whatever
    would be fastest at the moment."""

    join_updates: bool = True
    are_equal_on_ranks: bool = False


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

    def compiled(self, inductor: Any, kernels: Kernels) -> CompiledFunction:
        """The function compiled by `interop.inductor`. Raises what that raises."""
        joins = kernels.join_updates and bool(self.writes)
        compiled: CompiledFunction = inductor.compile_graph(
            self, self.forms, self.device, joins_kernels=joins, is_tuned=not kernels.are_equal_on_ranks
        )
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
        calls.append(RegionCall(SEEN_INTO.get(node.target, node.target), args, kwargs))
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


BackendName = Literal["eager", "inductor", "background", "auto"]
BACKENDS: tuple[BackendName, ...] = ("eager", "inductor", "background", "auto")

_NOTES = logging.getLogger("meshweave")
_SHOWN = 40  # most names of ops in a note


def checked_backend(name: str) -> BackendName:
    """The name of a backend. Raises MeshweaveError for any other."""
    for known in BACKENDS:
        if name == known:
            return known
    raise MeshweaveError("unknown backend", where="backend", got=repr(name), expected=", ".join(BACKENDS))


def backend_for(name: BackendName, device: torch.device, num_devices: int) -> BackendName:
    """What "auto" is for a process that runs so many devices of a mesh: "background" for a GPU of its own (if PyTorch's
    deterministic algorithms are on, "inductor": when compiled regions take over depends on time), else "eager" (a
    processor, where compiling takes longer than most runs last, and virtual devices)."""
    if name != "auto":
        return name
    if device.type != "cuda" or num_devices > 1:
        return "eager"
    return "inductor" if torch.are_deterministic_algorithms_enabled() else "background"


def load_inductor() -> Any:
    """`interop.inductor`, which takes a second to import. Importing Inductor draws from Python's random number
    generator, which belongs to the user's script, so its state is restored."""
    state = random.getstate()
    try:
        return importlib.import_module("meshweave.interop.inductor")
    finally:
        random.setstate(state)


@dataclass(frozen=True, slots=True, eq=False)
class Runner:
    """Runs a region on the devices of a process. `strides` are those that it was compiled for, by index of the
    operand: operands from other regions have them, other operands are copied. `written` has for every output the
    operand that it was written into, or -1."""

    by_device: Mapping[int, CompiledFunction]
    strides: tuple[tuple[int, Shape], ...]
    written: tuple[int, ...]

    def __call__(self, operands: list[Any], device: int) -> Sequence[Any]:
        for i, stride in self.strides:
            if operands[i].stride() != stride:
                operands[i] = _restrided(operands[i], stride)
        if max(self.written) < 0:
            return self.by_device[device](operands)
        renewed = [operands[i] if i >= 0 else None for i in self.written]
        rest = iter(self.by_device[device](operands))
        return [next(rest) if x is None else x for x in renewed]


def _restrided(x: Tensor, stride: Shape) -> Tensor:
    """A tensor with other strides: itself if they differ only in dims of one element, else a copy."""
    pairs = zip(x.shape, x.stride(), stride, strict=True)
    if all(size == 1 or a == b for size, a, b in pairs):
        return x.as_strided(x.shape, stride)
    return torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)


@dataclass(slots=True)
class RegionCompiler:
    """Compiles for a step and its variants. `compiled` are the functions by the region's key, None if the compiler
    failed; `notes` say what failed. `any_rank(flag)` is whether any rank of the job passes True: all ranks decide
    equally, or replicas of a value would diverge.
    """

    backend: BackendName = "eager"
    any_rank: Callable[[bool], bool] = lambda flag: flag
    kernels: Kernels = field(default_factory=Kernels)
    compiled: dict[str, CompiledFunction | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    has_compiler: bool = True

    def fuse(
        self, role: RankGraph, devices: Sequence[int], device: torch.device, parts: Parts, kept: Collection[fx.Node]
    ) -> Sequence[Sequence[fx.Node | Fused]]:
        """The parts of a role with its regions compiled, for the role's devices of this process. A region that cannot
        be compiled on any rank runs op by op."""
        if self.backend == "eager":
            return parts
        local = {d: local_values(role, d) for d in devices}
        refused = set[fx.Node]()
        while True:
            steps, functions = _functions(role, local, device, parts, kept, refused)
            failed = [r for r, its in functions.items() if not self._compiles(r, its.values())]
            if not self.any_rank(bool(failed)):
                break
            if self.any_rank(not failed):  # ranks that compile other regions would not stay replicas
                return parts
            refused.update(n for r in failed for n in r.nodes)
        known = {n for r in functions for n in r.outputs}
        fused = {r: self._fused(r, its, known) for r, its in functions.items()}
        return [[fused[s] if isinstance(s, Region) else s for s in part] for part in steps]

    def _compiles(self, region: Region, functions: Collection[RegionFunction]) -> bool:
        """Whether a region is compiled for all devices, now or before."""
        for function in functions:
            if function.key not in self.compiled:
                self.compiled[function.key] = self._compiled(region, function)
            if self.compiled[function.key] is None:
                return False
        return True

    def _compiled(self, region: Region, function: RegionFunction) -> CompiledFunction | None:
        if not self.has_compiler:
            return None
        inductor = load_inductor()
        try:
            return function.compiled(inductor, self.kernels)
        except inductor.InvalidCxxCompiler:
            self.has_compiler = False
            self.note("there is no C++ compiler, so ops run one by one (Inductor needs g++ or clang++, or $CXX)")
        except Exception as error:  # whatever fails in the compiler: the region can run op by op
            names = list(dict.fromkeys(op_name(n.target) for n in region.nodes))
            shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            what = str(error).strip().splitlines()[:1]
            self.note(
                f"a region of {len(region.nodes)} ops runs one by one, for Inductor failed on it ({shown}; from "
                f"{origin_of(region.nodes[0])}): {type(error).__name__}: {''.join(what)}"
            )
        return None

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            _NOTES.warning(text)

    def _fused(self, region: Region, functions: Mapping[int, RegionFunction], known: Collection[fx.Node]) -> Fused:
        first = next(iter(functions.values()))
        strides = [(i, form[1]) for i, form in enumerate(first.forms) if region.inputs[i] not in known]
        by_device: dict[int, CompiledFunction] = {}
        for device, function in functions.items():
            compiled = self.compiled[function.key]
            assert compiled is not None
            by_device[device] = compiled
        place = {node: i for i, node in enumerate(region.inputs)}
        written = tuple(place[region.written[n]] if n in region.written else -1 for n in region.outputs)
        return Fused(region.nodes, region.inputs, region.outputs, Runner(by_device, tuple(strides), written))


def region_functions(
    role: RankGraph, devices: Sequence[int], device: torch.device, parts: Parts, kept: Collection[fx.Node]
) -> list[RegionFunction]:
    """The functions that `RegionCompiler.fuse` compiles with the same arguments."""
    local = {d: local_values(role, d) for d in devices}
    _, functions = _functions(role, local, device, parts, kept, ())
    return [function for its in functions.values() for function in its.values()]


def _functions(
    role: RankGraph,
    local: Mapping[int, Local],
    device: torch.device,
    parts: Parts,
    kept: Collection[fx.Node],
    refused: Collection[fx.Node],
) -> tuple[list[list[fx.Node | Region]], dict[Region, dict[int, RegionFunction]]]:
    """The parts with regions in them, and what each region computes on each device. `refused` run by themselves, as do
    random numbers, what has sizes that depend on data (compiled shapes are static), and ops that depend on strides,
    which a compiler chooses anew."""
    values = next(iter(local.values())).values
    sized = ragged(role)

    def is_compiled(node: fx.Node) -> bool:
        return not (
            node in refused
            or is_random(node.target)
            or (node.target in DENSE_OPERANDS and node.target not in SEEN_INTO)
            or node in sized
            or sized.intersection(node.all_input_nodes)
        )

    steps = cut(parts, kept, values, is_compiled)
    steps = written_in_place(steps, _renewed(role) if len(local) == 1 else {}, kept, values)
    regions = [step for part in steps for step in part if isinstance(step, Region)]
    return steps, {r: {d: region_function(r, x.values, x.symbols, device) for d, x in local.items()} for r in regions}


def _renewed(role: RankGraph) -> dict[fx.Node, fx.Node]:
    """New parameters and optimizer state by the inputs that they replace, if each has its own tensor: not if a value is
    an output twice."""
    results: Any = next(iter(reversed(role.graph.nodes))).args[0]
    new, counts = dict(zip(role.outputs, results, strict=True)), Counter(results)
    sources = (node for node in role.graph.nodes if node.op == "placeholder")
    keys = {old: (item.kind, item.name) for item, old in zip(role.inputs, sources, strict=True)}
    updated = {old: new[key] for old, key in keys.items() if key[0] in ("param", "state") and key in new}
    return {old: after for old, after in updated.items() if counts[after] == 1}
