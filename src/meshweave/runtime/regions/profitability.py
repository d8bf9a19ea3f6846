"""Whether compiling the regions of a step pays off: estimated before compilation, measured after, and cached."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from meshweave.disk_cache import CacheEntry, cache_directory, machine_of
from meshweave.ir.values import Values
from meshweave.runtime.regions.cut import Region, is_generated, is_view
from meshweave.runtime.regions.trace import RegionFunction, Shape

Compiled = Callable[[list[Any]], Sequence[Any]]  # empties its argument list

# When `auto` compiles a region: if it may save more in so many steps than compiling takes. Figures of 2 cores, torch
# 2.13, 2026-11: a kernel of a 24.6M Llama compiles in about 1 s; a single op costs 5 us of Python, and reads and writes
# memory at 10 GB/s in a thread; fresh memory from the system, 2.5 GB/s.
STEPS = 1000
COMPILE_S = 1.0
OP_S = 5e-6
BYTES_PER_S = 10e9
NEW_BYTES_PER_S = 2.5e9
FORMAT = 1  # version of the cached verdicts
_POOL_BYTES, _ALIGNED = 32 << 20, 64
_ROUNDS = 3  # repetitions of a measurement, of which the fastest counts
_GPU_ROUNDS, _GPU_CALLS = 4, 4  # a GPU is measured over several calls, as in a step: the host runs ahead of it
_COMPILED, _EAGER = "compiled", "eager"
_NOTE = "meshweave"  # subdirectory of Inductor's cache


def saved_seconds(region: Region, values: Mapping[fx.Node, Values]) -> float:
    """What a compiler may save of a region in a step: the bytes that generated ops read and write separately, except
    reads from outside or from library calls, and what library calls read of them; the call of each op; and fresh memory
    for parameters and optimizer state that it writes in place."""
    generated = [node for node in region.nodes if is_generated(node)]
    views = {node for node in generated if is_view(node, values)}
    loops = {node: None for node in generated if node not in views}

    def source(node: fx.Node) -> fx.Node:
        return source(node.all_input_nodes[0]) if node in views else node

    def num_bytes(nodes: Iterable[fx.Node]) -> int:
        return sum(x.bytes for node in nodes for x in values[node])

    read = [n for node in loops for n in node.all_input_nodes]
    others = [node for node in region.nodes if node not in loops and node not in views]
    passed = {source(n) for node in others for n in node.all_input_nodes}.union(region.outputs)
    entering = {n for n in read if source(n) not in loops}
    saved = num_bytes(read) + num_bytes(loops) - num_bytes(entering) - num_bytes(passed.intersection(loops))
    renewed = num_bytes(region.written) / NEW_BYTES_PER_S
    return max(0, saved) / BYTES_PER_S + len(generated) * OP_S + renewed


def gained_seconds(regions: Iterable[tuple[RegionFunction, Compiled | None, int]]) -> tuple[float, list[str]]:
    """How much faster compiled regions are in a step than op by op, each run as often as in the step, measured on
    operands of their forms; and why some could not be measured, about which nothing is known."""
    gained, unknown, pool = 0.0, list[str](), None
    for function, compiled, count in regions:
        assert compiled is not None
        pool = pool or _Pool(function.device)
        try:
            eager = _seconds(lambda operands, run=function: run(*operands), function, pool)  # type: ignore[misc]
            gained += count * (eager - _seconds(compiled, function, pool))
        except Exception as error:  # an op may reject operands of ones
            unknown.append(f"{type(error).__name__}: {error}")
    return gained, unknown


class _Pool:
    """Memory for operands, which share it if there are many: a region may read all gradients of a layer, and measuring
    it must not take more memory than a step. It is larger than a core's caches."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.next = device, 0
        self.memory = torch.empty(_POOL_BYTES, dtype=torch.uint8, device=device)

    def take(self, shape: Shape, stride: Shape, dtype: torch.dtype) -> Tensor:
        """A tensor of ones. Indices and bools have memory of their own: they must stay valid."""
        size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if prod(shape) else 0
        num_bytes = size * dtype.itemsize
        if not dtype.is_floating_point or num_bytes > _POOL_BYTES:
            return torch.empty_strided(shape, stride, dtype=dtype, device=self.device).fill_(1)
        start = self.next if self.next + num_bytes <= _POOL_BYTES else 0
        self.next = -(-(start + num_bytes) // _ALIGNED) * _ALIGNED
        return self.memory[start : start + num_bytes].view(dtype).as_strided(shape, stride).fill_(1)


def _seconds(run: Callable[[list[Any]], Any], function: RegionFunction, pool: _Pool) -> float:
    """The fastest of some runs. Operands are ones, which are valid divisors and indices."""
    rounds, num_calls = (_GPU_ROUNDS, _GPU_CALLS) if function.device.type == "cuda" else (_ROUNDS, 1)
    seconds = []
    for _ in range(rounds):
        operands = [pool.take(*form) for form in function.forms]
        calls = [list(operands) for _ in range(num_calls - 1)] + [operands]
        _wait_for(function.device)
        began = time.perf_counter()
        with torch.no_grad():
            for call in calls:
                run(call)
        _wait_for(function.device)
        seconds.append((time.perf_counter() - began) / num_calls)
    return min(seconds)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Results of earlier starts


def remembered(functions: Sequence[Mapping[int, RegionFunction]]) -> bool | None:
    """Whether the regions of a step, by device, paid off when they were measured on this machine; None if they were
    not, or the cache is damaged."""
    text, _ = _entry(functions).read()
    return {_COMPILED: True, _EAGER: False}.get(text.decode())


def remember(functions: Sequence[Mapping[int, RegionFunction]], pays: bool) -> None:
    """Cache the verdict for the next start. If that is not possible, that start measures again."""
    _entry(functions).write((_COMPILED if pays else _EAGER).encode())


def has_output(functions: Sequence[Mapping[int, RegionFunction]], directory: Path) -> bool:
    """Whether Inductor's cache in `directory` has the compiled regions of a step: an earlier start has left a note
    there, which is lost with the cache."""
    return bool(_entry(functions, directory / _NOTE).read()[0])


def note_output(functions: Sequence[Mapping[int, RegionFunction]], directory: Path) -> None:
    """Note in Inductor's cache that it has the compiled regions of a step. If that is not possible, the next start
    compiles them again in the background."""
    if not has_output(functions, directory):
        _entry(functions, directory / _NOTE).write(_COMPILED.encode())


def _entry(functions: Sequence[Mapping[int, RegionFunction]], directory: Path | None = None) -> CacheEntry:
    device = next(iter(functions[0].values())).device
    counts = Counter(sha256(f.key.encode()).hexdigest() for its in functions for f in its.values())
    key = {
        "format": FORMAT,
        "torch": torch.__version__,
        **machine_of(device),
        "regions": sorted(counts.items()),
    }
    return CacheEntry(directory or cache_directory() / "regions", json.dumps(key), ".txt")
