"""Compiles the regions of rank graphs, each distinct region once, and decides where that pays off."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, fx

from meshweave.errors import MeshweaveError
from meshweave.interop.lazy import load_inductor
from meshweave.ir.graph import op_name, origin_of
from meshweave.ir.ops import KERNELS
from meshweave.ir.rank import RankGraph
from meshweave.ir.traits import is_random
from meshweave.ir.values import Values, local_values, ragged
from meshweave.runtime.regions.cut import Parts, Region, cut, written_in_place
from meshweave.runtime.regions.libraries import ATEN, ONEDNN, Libraries
from meshweave.runtime.regions.process import CompilerProcess
from meshweave.runtime.regions.profitability import (
    COMPILE_S,
    STEPS,
    Compiled,
    gained_seconds,
    has_output,
    note_output,
    remember,
    remembered,
    saved_seconds,
)
from meshweave.runtime.regions.trace import RegionFunction, Shape, region_function

BackendName = Literal["eager", "inductor", "auto"]
BACKENDS: tuple[BackendName, ...] = ("eager", "inductor", "auto")
Functions = Mapping[int, RegionFunction]  # of a region, by device

T = TypeVar("T")
_NOTES = logging.getLogger("meshweave")
_SHOWN = 40  # most names of ops in a note


def checked_backend(name: str) -> BackendName:
    """The name of a backend. Raises MeshweaveError for any other."""
    for known in BACKENDS:
        if name == known:
            return known
    raise MeshweaveError("unknown backend", where="backend", got=repr(name), expected=", ".join(BACKENDS))


@dataclass(frozen=True, slots=True, eq=False)
class Runner:
    """Runs a region on the devices of a process. `strides` are those that it was compiled for, by index of the
    operand: operands from other regions have them, other operands are copied. `written` has for every output the
    operand that it was written into, or -1."""

    by_device: Mapping[int, Compiled]
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


Planned = fx.Node | tuple[Region, Runner]


@dataclass(slots=True)
class RegionCompiler:
    """Compiles for a step and its variants. `compiled` are the functions by the region's key, None if the compiler
    failed; `notes` say what failed. `any_rank(flag)` is whether any rank of the job passes True: all ranks decide
    equally, or replicas of a value would diverge. Processes of a host share Inductor's disk cache: each begins at
    another region, at the fraction `begin` (0 <= begin < 1) of the list, and uses the cached results of the others.
    Regions that `auto` has not measured yet, or that Inductor's cache has lost, are compiled by a background process.
    While such a process of any rank runs, `fuse` changes nothing, and `is_waiting` is true. `joins_updates`: loops of
    an update become a few kernels on a GPU: slower than single kernels (1.05 of 2.85 TB/s for 16 parameters of 0.8
    million elements, NVIDIA H100, torch 2.11, 2026-11), but launched sooner by a host that launches each kernel.
    """

    backend: BackendName = "eager"
    any_rank: Callable[[bool], bool] = lambda flag: flag
    begin: float = 0.0
    joins_updates: bool = True
    compiled: dict[str, Compiled | None] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    has_compiler: bool = True
    is_waiting: bool = False
    _processes: dict[frozenset[str], CompilerProcess] = field(default_factory=dict)
    _libraries: Libraries | None = None

    def fuse(
        self, role: RankGraph, devices: Sequence[int], device: torch.device, parts: Parts, kept: Collection[fx.Node]
    ) -> list[list[Planned]]:
        """The parts of a role with its regions compiled, for the role's devices of this process. A region that cannot
        be compiled runs op by op, and so does everything if compiling does not pay off or is not finished."""
        if self.backend == "eager":
            return [list(part) for part in parts]
        lead = role.devices[0] if self.backend == "auto" else devices[0]  # all devices of a role judge by its first
        local = {d: local_values(role, d) for d in {*devices, lead}}
        libraries = self._agreed_libraries(device)
        values = local[devices[0]].values
        sized = ragged(role)  # compiled shapes are static
        refused = {
            n
            for part in parts
            for n in part
            if is_random(n.target) or n in sized or sized.intersection(n.all_input_nodes)
        }
        its_values = {d: local[d].values for d in devices}
        singles: dict[fx.Node, Planned] = {
            n: n if sized.intersection(n.all_input_nodes) else _single(n, its_values, libraries)
            for part in parts
            for n in part
        }
        plain = [[singles[n] for n in part] for part in parts]
        while True:
            steps = cut(parts, kept, values, lambda node: node not in refused)
            steps = written_in_place(steps, _renewed(role) if len(devices) == 1 else {}, kept, values)
            regions = [step for part in steps for step in part if isinstance(step, Region)]
            its = {
                d: [region_function(r, x.values, x.symbols, device, libraries) for r in regions]
                for d, x in local.items()
            }
            if too_small := self._too_small(regions, [function.key for function in its[lead]], local[lead].values):
                refused.update(too_small)
                continue
            functions = [{d: its[d][i] for d in devices} for i in range(len(regions))]
            verdict = self._known_verdict(functions)
            if verdict is False:
                return plain
            is_ready = self.backend == "inductor" or (verdict and self._has_output(functions))
            if not is_ready and self._compiles_beside(functions, device):
                return plain
            pairs = self._in_own_order(list(zip(regions, functions, strict=True)))
            failed = [r for r, its in pairs if not self._compiles(r, its)]
            if not self.any_rank(bool(failed)):
                break
            if self.any_rank(not failed):  # ranks that compile other regions would not stay replicas
                return plain
            refused.update(n for r in failed for n in r.nodes)
        if verdict is None and not self._pays(functions):
            return plain
        if self.backend == "auto" and functions:
            note_output(functions, load_inductor().output_directory())
        known = {n for r in regions for n in r.outputs}
        runners = {r: self._runner(r, its, known) for r, its in zip(regions, functions, strict=True)}
        return [[(s, runners[s]) if isinstance(s, Region) else singles[s] for s in part] for part in steps]

    def _agreed_libraries(self, device: torch.device) -> Libraries:
        if self._libraries is None:
            self._libraries = Libraries.agreed(device, self.any_rank)
            _NOTES.info("float32 matmuls run by %s", self.library)
        return self._libraries

    @property
    def library(self) -> str:
        """The library that runs large float32 matmuls (`regions.libraries`)."""
        return ONEDNN if self._libraries is not None and self._libraries.has_onednn else ATEN

    def _compiles_beside(self, functions: Sequence[Functions], device: torch.device) -> bool:
        """Whether a background process of any rank still compiles new regions, or will once `start` is called. Only on
        CPUs: on a GPU it would take memory of the device."""
        inductor = load_inductor()
        if self.any_rank(device.type != "cpu" or not self.has_compiler or not inductor.has_cache()):
            return False
        distinct = {f.key: f for its in functions for f in its.values() if f.key not in self.compiled}
        keys = frozenset(distinct)
        if keys and keys not in self._processes:
            self._processes[keys] = CompilerProcess(self._in_own_order(list(distinct.values())))
        waits = self.any_rank(self.is_busy)
        self.is_waiting |= waits  # the process may end before the next graph of the step is requested
        if not waits and keys:
            self._note_crash(self._processes[keys])
        return waits

    def _in_own_order(self, items: list[T]) -> list[T]:
        """The items from this process's start position to the end, then the items before it."""
        first = int(self.begin * len(items))
        return [*items[first:], *items[:first]]

    @property
    def is_busy(self) -> bool:
        """Whether a process of this rank compiles."""
        return any(not process.is_done for process in self._processes.values())

    def start(self) -> None:
        """Start the processes of this rank that have not started yet. Steps call it after the first: until then the
        processor is that step's alone."""
        for process in self._processes.values():
            if not process.is_started:
                try:
                    process.start()
                # no process can be started, or options cannot be pickled: compile in this process
                except Exception as error:
                    _NOTES.info("regions are compiled in this process (%s: %s)", type(error).__name__, error)

    def wait(self) -> None:
        """Until no process of this rank compiles that has started."""
        for process in self._processes.values():
            process.wait()

    def _note_crash(self, process: CompilerProcess) -> None:
        """Do not try the region at which a process crashed again: this process would crash, too."""
        left = [f for f in process.functions if f.key not in process.finished]
        if process.crash and left:
            self.compiled[left[0].key] = None
            self._note(
                f"a region of {len(left[0].calls)} ops runs one by one: the process that compiled it ended with signal "
                f"{process.crash}"
            )

    def _compiles(self, region: Region, functions: Functions) -> bool:
        """Whether a region is compiled for all devices, now or before."""
        for function in functions.values():
            if function.key not in self.compiled:
                self.compiled[function.key] = self._compiled(region, function)
            if self.compiled[function.key] is None:
                return False
        return True

    def _compiled(self, region: Region, function: RegionFunction) -> Compiled | None:
        if not self.has_compiler:
            return None
        inductor = load_inductor()  # slow to import, and eager steps do not need it
        try:
            return function.compiled(inductor, self.joins_updates)
        except inductor.InvalidCxxCompiler:
            self.has_compiler = False
            self._note("there is no C++ compiler, so ops run one by one (Inductor needs g++ or clang++, or $CXX)")
        except Exception as error:  # whatever fails in the compiler: the region can run op by op
            names = list(dict.fromkeys(op_name(n.target) for n in region.nodes))
            shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            what = str(error).strip().splitlines()[:1]
            self._note(
                f"a region of {len(region.nodes)} ops runs one by one, for Inductor failed on it ({shown}; from "
                f"{origin_of(region.nodes[0])}): {type(error).__name__}: {''.join(what)}"
            )
        return None

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            _NOTES.warning(text)

    def _runner(self, region: Region, functions: Functions, known: Collection[fx.Node]) -> Runner:
        first = next(iter(functions.values()))
        strides = [(i, form[1]) for i, form in enumerate(first.forms) if region.inputs[i] not in known]
        by_device: dict[int, Compiled] = {}
        for device, function in functions.items():
            compiled = self.compiled[function.key]
            assert compiled is not None
            by_device[device] = compiled
        place = {node: i for i, node in enumerate(region.inputs)}
        written = tuple(place[region.written[n]] if n in region.written else -1 for n in region.outputs)
        return Runner(by_device, tuple(strides), written)

    def _too_small(
        self, regions: Sequence[Region], keys: Sequence[str], values: Mapping[fx.Node, Values]
    ) -> set[fx.Node]:
        """The nodes of regions that may not save in STEPS steps what compiling them takes, summed over regions of equal
        keys: values that stay in registers, and calls of ops."""
        if self.backend == "inductor":
            return set()
        saved = dict.fromkeys(keys, 0.0)
        for key, region in zip(keys, regions, strict=True):
            saved[key] += saved_seconds(region, values) * STEPS
        pairs = zip(keys, regions, strict=True)
        return {node for key, region in pairs if saved[key] <= COMPILE_S for node in region.nodes}

    def _pays(self, functions: Sequence[Functions]) -> bool:
        """Whether compiled regions are faster than single ops over a step: measured, and cached."""
        if self.backend == "inductor":
            return True
        counts = Counter(f.key for its in functions for f in its.values())
        distinct = {f.key: f for its in functions for f in its.values()}
        gained, unknown = gained_seconds([(f, self.compiled[key], counts[key]) for key, f in distinct.items()])
        for what in unknown:
            self._note(f"a compiled region could not be measured ({what})")
        pays = self.any_rank(gained > 0)
        if functions:
            remember(functions, pays)
        return pays

    def _has_output(self, functions: Sequence[Functions]) -> bool:
        """Whether the caches of all ranks have the compiled regions, so that compiling them takes no time."""
        return not self.any_rank(bool(functions) and not has_output(functions, load_inductor().output_directory()))

    def _known_verdict(self, functions: Sequence[Functions]) -> bool | None:
        """Whether compiling these regions paid off when an earlier start measured it; None if any rank does not
        know."""
        if self.backend == "inductor":
            return None
        known = remembered(functions) if functions else False
        return None if self.any_rank(known is None) else self.any_rank(bool(known))


def _single(node: fx.Node, values: Mapping[int, Mapping[fx.Node, Values]], libraries: Libraries) -> Planned:
    """A node that runs by itself, by the library for its operands on each device. Operands of sizes that are known only
    at run time stay with ATen."""
    kernels = {device: libraries.kernel(node, its) for device, its in values.items()}
    if all(kernel is node.target for kernel in kernels.values()):
        return node
    inputs = tuple(dict.fromkeys(node.args))
    places = [inputs.index(operand) for operand in node.args]

    def bound(kernel: Any) -> Compiled:
        function = KERNELS.get(kernel, kernel)

        def run(operands: list[Any]) -> Sequence[Any]:
            args = [operands[i] for i in places]
            operands.clear()
            return (function(*args),)

        return run

    region = Region((node,), inputs, (node,))  # type: ignore[arg-type]
    return region, Runner({device: bound(kernel) for device, kernel in kernels.items()}, (), (-1,))


def _renewed(role: RankGraph) -> dict[fx.Node, fx.Node]:
    """New parameters and optimizer state by the inputs that they replace, if each has its own tensor: not if a value is
    an output twice, nor if gathered parameters are carried over, which may share memory."""
    if any(item.kind == "carry" for item in role.inputs):
        return {}
    results: Any = next(iter(reversed(role.graph.nodes))).args[0]
    new, counts = dict(zip(role.outputs, results, strict=True)), Counter(results)
    sources = (node for node in role.graph.nodes if node.op == "placeholder")
    keys = {old: (item.kind, item.name) for item, old in zip(role.inputs, sources, strict=True)}
    updated = {old: new[key] for old, key in keys.items() if key[0] in ("param", "state") and key in new}
    return {old: after for old, after in updated.items() if counts[after] == 1}
