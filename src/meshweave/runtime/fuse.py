"""Which compute the devices of a process run as compiled regions."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Thread

from torch import fx

from meshweave.interop.lazy import load_inductor
from meshweave.ir.rank import RankGraph
from meshweave.runtime.cluster import on_any
from meshweave.runtime.executor import Fuse, Fused, Step
from meshweave.runtime.regions.compiler import BackendName, Planned, RegionCompiler
from meshweave.runtime.regions.process import give_way
from meshweave.runtime.world import World

_LOOK_AGAIN = 1.2
_LEAST_ELEMENTS = 1_000_000  # smaller updates move few bytes, and such models seldom have regions that pay off


@dataclass(slots=True)
class Look:
    """When steps check whether a background process has compiled: at each of the first steps, then at growing
    intervals, so that the checks cost nothing in long training. Ranks check at the same steps."""

    num_calls: int = 0
    next_call: int = 1

    def is_due(self) -> bool:
        """Whether this call checks. Each call asks once."""
        self.num_calls += 1
        if self.num_calls < self.next_call:
            return False
        self.next_call = max(self.num_calls + 1, int(self.num_calls * _LOOK_AGAIN))
        return True

    @property
    def is_again(self) -> bool:
        return self.num_calls > 1


def compiler_for(backend: BackendName, world: World) -> RegionCompiler:
    """The compiler of a step. Virtual devices share a process and hide nothing: `auto` compiles nothing for them."""
    is_virtual = not world.is_distributed and len(world.devices) > 1
    begin = int(os.environ.get("LOCAL_RANK", "0")) / int(os.environ.get("LOCAL_WORLD_SIZE", "1")) % 1
    return RegionCompiler("eager" if backend == "auto" and is_virtual else backend, partial(on_any, world), begin)


def compiles_for_gpu(backend: BackendName, world: World) -> bool:
    """Whether the steps of a backend may run as compiled regions on a GPU."""
    return world.device.type == "cuda" and compiler_for(backend, world).backend != "eager"


def prepare_compiler(backend: BackendName, world: World, num_elements: int) -> None:
    """Run Inductor's one-time set-up (it tries the C++ compiler) on a thread, during capture and planning, if a model
    of so many elements will probably be compiled. Inductor is imported on this thread, before capture, which compares
    Python's state from beginning to end."""
    if compiler_for(backend, world).backend == "eager" or world.device.type != "cpu" or num_elements < _LEAST_ELEMENTS:
        return
    find = load_inductor().find_instructions

    def beside() -> None:
        give_way()
        find()

    if sys.platform == "linux":
        Thread(target=beside, name="meshweave: C++ compiler", daemon=True).start()


def fuse_for(compiler: RegionCompiler, rank: RankGraph, world: World) -> Fuse:
    """The function with which `compile_tasks` decides which nodes of a rank graph run together on the devices of this
    process."""
    devices = [device for device in world.devices if device in rank.devices]

    def fuse(parts: Sequence[Sequence[fx.Node]], kept: Collection[fx.Node]) -> list[list[Step]]:
        planned = compiler.fuse(rank, devices, world.device, parts, kept)
        return [[_step(item) for item in part] for part in planned]

    return fuse


def _step(item: Planned) -> Step:
    if isinstance(item, fx.Node):
        return item
    region, runner = item
    return Fused(region.nodes, region.inputs, region.outputs, runner)
