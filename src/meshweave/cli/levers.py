"""What makes a simulated step fit the machine's memory at the same global batch: options of the command, as simulated.

Every trial compiles and simulates the step with the changed options, but without the passes that are searched, which
take most of the time and stay within the machine's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeVar

from meshweave.cli.job import MachineOptions
from meshweave.cost.simulate.result import Simulation
from meshweave.errors import MeshweaveError
from meshweave.ir.mesh import Mesh
from meshweave.place.plan_text import data_parallel_size, parse_plan
from meshweave.report.tables import bytes_text

AnyOptions = TypeVar("AnyOptions", bound=MachineOptions)
_MOST_TRIALS = 8  # simulations for the advice on a mesh: each takes about as long as the step without passes
_SHARED = 0.9  # at least this part of the memory is shared by more devices, as far as the first trial is concerned
_MUCH = 0.6  # of the memory: with less than that, full recomputation is perhaps more than is needed


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes on the device that needs the most: at once, and for the whole step."""

    bytes: int
    persistent_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The options of a step that levers change. `rows`: of the global batch in a microbatch. `batch` and `local_batch`
    are None where they are not stated: a model's factory may decide the batch."""

    mesh: str
    plan: str
    passes: str
    accumulate: int
    batch: int | None
    local_batch: int | None
    rows: int

    @property
    def num_cuts(self) -> int:
        """Number of devices that have different rows."""
        return data_parallel_size(Mesh(self.mesh), parse_plan(self.plan))

    @property
    def most(self) -> int:
        """How many times fewer rows a microbatch could have on a device."""
        return max(1, self.rows // self.num_cuts)

    def accumulating(self, times: int) -> Setting:
        local = None if self.local_batch is None else self.local_batch // times
        return replace(self, accumulate=self.accumulate * times, local_batch=local, rows=self.rows // times)

    def on(self, mesh: str) -> Setting:
        """The same global batch on another mesh."""
        changed = replace(self, mesh=mesh)
        local = None if self.local_batch is None else self.rows // changed.num_cuts
        return replace(changed, local_batch=local)

    def recomputing(self, policy: str) -> Setting:
        others = [part for part in self.passes.split(",") if part != "none" and not part.startswith("recompute")]
        return replace(self, passes=",".join([*others, f"recompute={policy}"]))

    def text_from(self, first: Setting, is_stated: bool) -> str:
        """The options that lead from another setting to this. `is_stated`: that names its batch."""
        parts = [f"--mesh {self.mesh}"] if self.mesh != first.mesh else []
        if self.batch is not None and not is_stated:
            parts.append(f"--batch {self.batch}")
        if self.local_batch != first.local_batch:
            parts.append(f"--local-batch {self.local_batch}")
        for name in ("accumulate", "passes"):
            if getattr(self, name) != getattr(first, name):
                parts.append(f"--{name} {getattr(self, name)}")
        return " ".join(parts)


@dataclass(slots=True)
class _Search:
    """Trials of settings. `peak_of` raises MeshweaveError for a setting that is impossible."""

    room: int
    devices_per_node: int
    peak_of: Callable[[Setting], Peak]
    known: dict[Setting, Peak | None]
    tried: list[Setting] = field(default_factory=list)

    def peak(self, setting: Setting) -> Peak | None:
        """None if the setting is impossible, or was one too many."""
        if setting not in self.known and len(self.tried) < _MOST_TRIALS:
            try:
                self.known[setting] = self.peak_of(setting)
            except MeshweaveError:
                self.known[setting] = None
            self.tried.append(setting)
        return self.known.get(setting)

    def fits(self, setting: Setting) -> bool:
        peak = self.peak(setting)
        return peak is not None and peak.bytes <= self.room

    def run(self, first: Setting) -> list[Setting]:
        """Settings that fit: those with a single change, else with recomputation, else also with the smallest
        microbatches. What lasts for the whole step is sharded first if it does not fit."""
        peak = self.known[first]
        start = next(self.sharded(first), first) if peak is not None and peak.persistent_bytes > self.room else first
        if start is not first and self.fits(start):
            return [start]
        recomputed = start.recomputing("full")
        smallest = recomputed.accumulating(recomputed.most)
        for base in dict.fromkeys((start, recomputed, smallest)):
            if self.peak(base) is not None and (fitting := self.singles(base)):
                return fitting
        return []

    def singles(self, base: Setting) -> list[Setting]:
        """Settings that fit and differ from `base` in what is recomputed, in the number of microbatches, or in the
        devices: more over fsdp, else over tp."""
        meshes = chain(self.sharded(base), self.meshes(base, "fsdp"), self.meshes(base, "tp"))
        fitting = (
            next(filter(self.fits, way), None) for way in (self.recomputed(base), self.microbatches(base), meshes)
        )
        return [setting for setting in fitting if setting is not None]

    def recomputed(self, base: Setting) -> Iterator[Setting]:
        """Less is recomputed where there is much room."""
        peak, full = self.peak(base), base.recomputing("full")
        if full == base or peak is None or peak.persistent_bytes > self.room:
            return
        after = self.peak(full)
        if after is not None and after.bytes < _MUCH * self.room:
            yield base.recomputing("selective")
        yield full

    def microbatches(self, base: Setting) -> Iterator[Setting]:
        """More microbatches; the first number is the least with which what a step computes could fit."""
        peak = self.peak(base)
        if peak is None or peak.persistent_bytes >= self.room:
            return
        least = (peak.bytes - peak.persistent_bytes) / (self.room - peak.persistent_bytes)
        for times in range(2, base.most + 1):
            if times >= least and base.most % times == 0:
                yield base.accumulating(times)

    def sharded(self, base: Setting) -> Iterator[Setting]:
        """Parameters sharded over the devices that have copies of them."""
        mesh = Mesh(base.mesh)
        if not base.plan and "dp" in mesh.axis_names and "fsdp" not in mesh.axis_names:
            yield base.on(_mesh_text({("fsdp" if name == "dp" else name): mesh.size(name) for name in mesh.axis_names}))

    def meshes(self, base: Setting, axis: str) -> Iterator[Setting]:
        """More devices over fsdp, as many as there are rows, or over tp, within a node."""
        peak, mesh = self.peak(base), Mesh(base.mesh)
        sizes = {name: mesh.size(name) for name in mesh.axis_names}
        size = sizes.get(axis, 1)
        if peak is None or (base.plan and axis not in sizes) or (axis == "fsdp" and axis not in sizes):
            return
        most = base.most if axis == "fsdp" else self.devices_per_node // size
        for times in (2**power for power in range(1, most.bit_length())):
            is_even = axis != "fsdp" or base.rows % (base.num_cuts * times) == 0
            if is_even and times >= _SHARED * peak.bytes / self.room:
                yield base.on(_mesh_text({**sizes, axis: size * times}))


def _mesh_text(sizes: dict[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def levers(
    options: AnyOptions,
    setting: Setting,
    simulation: Simulation,
    simulated: Callable[[AnyOptions, str, str], Simulation],
    known: dict[Setting, Peak | None],
) -> tuple[str, ...]:
    """What makes the step of `simulation` fit at the same global batch: options, and the memory that it then needs.
    `simulated(options, mesh, plan)` simulates the step with other options; `known`: what it said of settings."""

    def peak_of(tried: Setting) -> Peak:
        parts = [part for part in tried.passes.split(",") if part.partition("=")[0] in ("recompute", "prefetch")]
        unsearched = replace(tried, passes=",".join(parts) or "none")
        return _peak(simulated(_with(options, unsearched), tried.mesh, tried.plan))

    search = _Search(max(1, int(options.machine.usable_bytes)), options.machine.devices_per_node, peak_of, known)
    known[setting] = _peak(simulation)
    fitting = search.run(setting)
    is_stated = options.batch is not None
    lines = []
    for lever in fitting:
        needed, times = known[lever], Mesh(lever.mesh).num_devices // Mesh(setting.mesh).num_devices
        assert needed is not None
        more = f" on {times}x the devices" if times > 1 else ""
        lines.append(f"{lever.text_from(setting, is_stated)}: {bytes_text(needed.bytes)}{more}")
    tried = {lever: peak.bytes for lever in search.tried if (peak := known[lever]) is not None}
    if lines or not tried:
        return tuple(lines)
    least = min(tried, key=lambda lever: tried[lever])
    text = least.text_from(setting, is_stated)
    return (f"nothing of what was tried; the least is {bytes_text(tried[least])} with {text}",)


def _peak(simulation: Simulation) -> Peak:
    role = max(simulation.roles, key=lambda role: role.peak_bytes)
    return Peak(role.peak_bytes, role.persistent_bytes)


def _with(options: AnyOptions, setting: Setting) -> AnyOptions:
    return replace(
        options,
        passes=setting.passes,
        accumulate=setting.accumulate,
        batch=setting.batch,
        local_batch=setting.local_batch,
        memory_cap="",
    )
