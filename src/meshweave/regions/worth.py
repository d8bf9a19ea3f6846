"""Whether compiling the regions of a step pays: estimated before they are compiled, measured after, and remembered."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import fx

from meshweave.disk_cache import CacheEntry, cache_directory, machine_of
from meshweave.ir.values import Values
from meshweave.regions.cut import Region, is_generated, is_view
from meshweave.regions.trace import RegionFunction, samples

Compiled = Callable[[list[Any]], Sequence[Any]]  # empties the list that it is called with

# When `auto` compiles a region: it may save more in so many steps than compiling takes. Figures of 2 cores, torch 2.13,
# 2026-11: a kernel of a 24.6M Llama compiles in about 1 s; an op by itself costs 5 us of Python, and reads and writes
# memory at 10 GB/s in one thread; into memory that the allocator has from the system anew, 2.5 GB/s.
STEPS = 1000
COMPILE_S = 1.0
OP_S = 5e-6
BYTES_PER_S = 10e9
NEW_BYTES_PER_S = 2.5e9
FORMAT = 1  # of what is remembered
_ROUNDS = 3  # of a measurement, of which the fastest counts
_COMPILED, _EAGER = "compiled", "eager"


def saved_seconds(region: Region, values: Mapping[fx.Node, Values]) -> float:
    """What a compiler may save of a region in a step: the bytes that generated ops read and write one by one, but for
    what they read from outside or from library calls, and what these read of them; the call of each op; and new memory
    for parameters and optimizer state that it writes into the old."""
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
    """How much faster compiled regions are in a step than op by op, each run as often as it says, measured on operands
    of their forms; and why some could not be measured, of which nothing is known."""
    gained, unknown = 0.0, []
    for function, compiled, count in regions:
        assert compiled is not None
        try:
            eager = _seconds(lambda operands, run=function: run(*operands), function)  # type: ignore[misc]
            gained += count * (eager - _seconds(compiled, function))
        except Exception as error:  # operands of ones that an op refuses
            unknown.append(f"{type(error).__name__}: {error}")
    return gained, unknown


def _seconds(run: Callable[[list[Any]], Any], function: RegionFunction) -> float:
    """The fastest of some runs. Operands are ones, which no op divides by zero with and any index may be."""
    seconds = []
    for _ in range(_ROUNDS):
        operands = [x.fill_(1) for x in samples(function.forms, partial(torch.empty_strided, device=function.device))]
        _wait_for(function.device)
        began = time.perf_counter()
        with torch.no_grad():
            run(operands)
        _wait_for(function.device)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# What earlier starts found out


def remembered(functions: Sequence[Mapping[int, RegionFunction]]) -> bool | None:
    """Whether the regions of a step, by device, were worth compiling when they were measured on this machine; None
    where they were not, or what is kept of that is damaged."""
    text, _ = _entry(functions).read()
    return {_COMPILED: True, _EAGER: False}.get(text)


def remember(functions: Sequence[Mapping[int, RegionFunction]], pays: bool) -> None:
    """Keep it for the next start. Where that is not possible, that start measures again."""
    _entry(functions).write(_COMPILED if pays else _EAGER)


def _entry(functions: Sequence[Mapping[int, RegionFunction]]) -> CacheEntry:
    device = next(iter(functions[0].values())).device
    counts = Counter(sha256(f.key.encode()).hexdigest() for its in functions for f in its.values())
    key = {
        "format": FORMAT,
        "torch": torch.__version__,
        **machine_of(device),
        "regions": sorted(counts.items()),
    }
    return CacheEntry(cache_directory() / "regions", json.dumps(key), ".txt")
