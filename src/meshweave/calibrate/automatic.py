"""Costs of this machine by default: compute known by the name of its devices, or measured as links are, before the
first step or by an earlier job."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshweave.calibrate.cases import Pool, matmul_case
from meshweave.calibrate.links import LinkTimer, MeasuredGroup, lead_of, local_bytes_of, places
from meshweave.calibrate.measure import BRIEF, BRIEF_GPU, LINKS_GPU, calibrate, peers_of
from meshweave.calibrate.ops import Effort, time_ops, typical
from meshweave.cost.hardware import (
    AlphaBeta,
    Costs,
    MachineProfile,
    load_profile,
    profile_names,
    profile_of_device,
)
from meshweave.cost.hardware.load import parse_profile, parse_table
from meshweave.cost.hardware.schema import Fit, Link, MeasuredLinks
from meshweave.disk_cache import CacheEntry, cache_directory, machine_of
from meshweave.errors import MeshweaveError
from meshweave.runtime.cluster import ClusterWorld
from meshweave.runtime.interfaces import World
from meshweave.runtime.watch import address_towards

AUTO, ALPHA_BETA = "auto", "alpha-beta"
FORMAT = 8  # version of the cache; change it when collectives or matmuls are implemented or measured differently
# The cache is used if a gather and a matmul take between 1/4 and 4 times their stated time: 1 and 10 Gbit/s differ by
# more (8 to 10 times), load of other users mostly by less. No load makes a matmul faster: if it is, the profile was
# measured beside other work. (Gathers on an idle machine vary by a factor of 2.)
_MOST_DRIFT = 4.0
_LEAST_DRIFTS = {"gather": 1 / 4, "matmul": 1 / 1.6}
_PROBE_BYTES = 1 << 20
_PROBE = Effort(5, 0.5, most_seconds=0.5)
_PROBE_SIZE = 512  # of a square matmul
# Parameters and batch of a step that is compiled without measuring: it sends so little that start-up dominates, and is
# mostly a first try, which should start at once.
SMALL_BYTES = 1 << 20
_MOST_ERROR = 1.25  # of a built-in profile: collectives that take longer or shorter by more are taken as measured
T = TypeVar("T")
_NOTES = logging.getLogger("meshweave")


@dataclass(frozen=True, slots=True)
class ChosenCosts:
    """The costs that a program is planned with, and in words where they come from."""

    costs: Costs
    origin: str


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank of a job runs: what its figures depend on."""

    host: str
    machine: str
    device: str
    threads: int
    address: str  # by which it reaches the job's first rank: two links of the same host have two addresses
    per_node: str

    @staticmethod
    def here(device: torch.device) -> Seat:
        address = address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        per_node = os.environ.get("LOCAL_WORLD_SIZE", "")
        return Seat(**machine_of(device), address=address, per_node=per_node)


def costs_for(
    profile: Costs | str | None,
    world: World,
    progress: Callable[[str], None] = lambda stage: None,
    is_small: bool = False,
) -> ChosenCosts:
    """The costs for `profile` on `world`. All ranks of a job call it together and get the same.

    Cost objects are used unchanged; "alpha-beta" is an AlphaBeta, another name or a file a machine profile; a job warns
    if its links are far from those of a file. None and "auto" are, in a job of several processes, measured once (about
    10 s) and cached in `cache_directory()`, by hosts, devices, addresses, backend, number of processes and versions.
    GPUs with a built-in profile have its compute, and only links are measured (at most 5 s): the name of a GPU does not
    tell its network. With None, nothing is measured for a step that `is_small` (`SMALL_BYTES`): it takes the built-in
    profile, that of processors over Gloo among them, or an AlphaBeta. Virtual devices of a process have no links: only
    relative costs of moves matter, for which an AlphaBeta is enough.
    """
    if isinstance(profile, str) and profile not in (AUTO, ALPHA_BETA):
        costs, trouble = load_profile(profile), ""
        if profile not in profile_names() and isinstance(world, ClusterWorld) and world.mesh.num_devices > 1:
            trouble = _trouble(costs, world, False, profile)
        if trouble and dist.get_rank() == 0:
            command = f"torchrun ... -m meshweave calibrate -o {profile}"
            _NOTES.warning("%s: measure again with torchrun's arguments of this job: %s", trouble, command)
        return ChosenCosts(costs, f"profile {costs.name}, as asked" + (f" ({trouble})" if trouble else ""))
    if profile == ALPHA_BETA:
        return ChosenCosts(AlphaBeta(), "alpha-beta, as asked")
    if profile is not None and not isinstance(profile, str):
        return ChosenCosts(profile, f"{profile.name}, as asked")
    if not isinstance(world, ClusterWorld) or world.mesh.num_devices == 1:
        return ChosenCosts(AlphaBeta(), "alpha-beta: virtual devices have no links to measure")
    return _of_job(world, progress, is_small and profile is None)


def _of_job(world: ClusterWorld, progress: Callable[[str], None], is_small: bool) -> ChosenCosts:
    with world.guard():
        seats = _gathered(Seat.here(world.device))
    num_ranks, names = len(seats), sorted({seat.device for seat in seats})
    known = profile_of_device(names[0]) if len(names) == 1 else None
    built_in = load_profile(known) if known else None
    if is_small:
        known = known or ("cpu-gloo" if world.device.type == "cpu" else None)
        small = "parameters and batch have less than 1 MiB (profile='auto' measures)"
        costs = load_profile(known) if known else AlphaBeta()
        return ChosenCosts(costs, f"{f'profile {known}' if known else 'alpha-beta'}: {small}")
    entry = CacheEntry(cache_directory() / "profiles", _key(seats, built_in))
    is_first = dist.get_rank() == 0
    with entry.lock() if is_first else nullcontext():
        with world.guard():
            text, trouble = _gathered(_cached_profile(entry, built_in, num_ranks) if is_first else ("", ""))[0]
        if text:
            profile, what = _parse(text, built_in, num_ranks)
            trouble = _trouble(profile, world, built_in is None, entry.path)
            if not trouble:
                return ChosenCosts(profile, f"{what}, cached in {entry.path}")
        return _measured(world, entry, built_in, trouble, progress)


def _cached_profile(entry: CacheEntry, built_in: MachineProfile | None, num_ranks: int) -> tuple[str, str]:
    """The cached TOML, and what is wrong with it; both empty if there is none."""
    data, trouble = entry.read()
    text = data.decode(errors="replace")
    try:
        if text:
            _parse(text, built_in, num_ranks)
    except MeshweaveError as error:
        return "", f"{entry.path} is not a profile of this version ({error.what})"
    return text, trouble


def _parse(text: str, built_in: MachineProfile | None, num_ranks: int) -> tuple[MachineProfile, str]:
    """The costs that were measured as `text`, and in words what they are."""
    if built_in is None:
        profile = parse_profile(text, "the profile of this machine")
        return profile, f"measured on this machine: {profile.version}"
    links = parse_table(MeasuredLinks, text, "the links of this machine")
    profile = with_links(built_in, links, num_ranks)
    taken = ", ".join(dict.fromkeys(f"{fit.op} in a {fit.level}" for fit in profile.collectives))
    outcome = f"as measured: {taken}" if taken else "within 25% of those measured"
    return profile, f"profile {built_in.name} by the name of the devices; its links {outcome} ({links.version})"


def with_links(built_in: MachineProfile, measured: MeasuredLinks, num_ranks: int) -> MachineProfile:
    """A built-in profile with the measured collectives of each op and level where one takes more than 25% longer or
    shorter than the profile says."""
    groups = {(place.level, place.size): place for place in places(num_ranks, measured.devices_per_node)}
    fits = [fit for fit in measured.collectives if (fit.level, fit.group_size) in groups]
    links = built_in.links
    if links.net is None and any(fit.level == "net" for fit in fits):
        links = replace(links, net=Link(max(fit.points[-1][0] / fit.points[-1][1] for fit in fits), 1.0))
    profile = replace(
        built_in,
        name=f"{built_in.name} with measured links",
        version=f"{built_in.version}, {measured.version}",
        devices_per_node=measured.devices_per_node,
        links=links,
    )

    def differs(fit: Fit) -> bool:
        place = groups[fit.level, fit.group_size]
        ratios = [s / profile.seconds(fit.op, place.mesh, place.axes, size) for size, s in fit.points]
        return max(*ratios, *(1 / ratio for ratio in ratios)) > _MOST_ERROR

    taken = {(fit.op, fit.level) for fit in fits if differs(fit)}
    return replace(profile, collectives=tuple(fit for fit in fits if (fit.op, fit.level) in taken))


def _measured(
    world: ClusterWorld,
    entry: CacheEntry,
    built_in: MachineProfile | None,
    trouble: str,
    progress: Callable[[str], None],
) -> ChosenCosts:
    """Costs measured now and cached; the built-in profile or an AlphaBeta if that is not possible. `trouble` is why no
    cached profile was used."""
    began = time.perf_counter()
    why = f" ({trouble})" if trouble else ""
    progress(f"calibrate{why}")
    plan = LINKS_GPU if built_in is not None else BRIEF_GPU if world.device.type == "cuda" else BRIEF
    text, failure = "", ""
    try:
        name = f"{world.device.type}, {world.mesh.num_devices} processes"
        text = calibrate(plan, name, "mw.compile", world.device, lambda stage: progress(f"calibrate: {stage}"))
    except (MeshweaveError, RuntimeError) as error:
        failure = f"{type(error).__name__}: {error}".partition("\n")[0]
    with world.guard():
        outcomes = _gathered((text, failure))
    if failures := [error for _, error in outcomes if error]:
        costs = built_in or AlphaBeta()
        what = "alpha-beta: this machine" if built_in is None else f"profile {built_in.name}: its links"
        return ChosenCosts(costs, f"{what} could not be measured ({failures[0]})")
    text = outcomes[0][0]
    profile, what = _parse(text, built_in, len(outcomes))
    with world.guard():
        kept = _gathered(entry.write(text.encode()) if dist.get_rank() == 0 else "")[0] or f"cached in {entry.path}"
    what = what if built_in is not None else "measured on this machine"
    return ChosenCosts(profile, f"{what} in {time.perf_counter() - began:.0f} s{why}, {kept}")


def _trouble(profile: MachineProfile, world: ClusterWorld, has_compute: bool, path: Path | str) -> str:
    """What takes far longer or shorter now than the profile of a file says; empty if nothing does."""
    for name, drift in _drifts(profile, world, has_compute).items():
        if not _LEAST_DRIFTS[name] <= drift <= _MOST_DRIFT:
            return f"a {name} takes {drift:.2g} times as long as {path} says"
    return ""


def _drifts(profile: MachineProfile, world: ClusterWorld, has_compute: bool) -> dict[str, float]:
    """Measured times of a gather over all ranks and, if compute was measured, of a matmul, relative to the profile."""
    place = MeasuredGroup("", world.mesh.num_devices, world.mesh, world.mesh.axis_names)
    size = local_bytes_of("all_gather", place.size, _PROBE_BYTES)
    with world.guard():
        links = LinkTimer(world.mesh, world.rank, world.device, peers_of(world))
        start = links.start(place, "all_gather", size)
        links.sample(start, 1)
        turns = _PROBE.turns(_PROBE.rounds, time.perf_counter(), links.peers)
        (gather,) = links.peers.most([typical([links.sample(start, 1, lead_of(_PROBE_BYTES)) for _ in turns])])
        links.close()
        drifts = {"gather": gather / profile.seconds("all_gather", world.mesh, place.axes, size)}
        if not has_compute:
            return drifts
        case = matmul_case(Pool(world.device, 4 * _PROBE_BYTES), (_PROBE_SIZE,) * 3, torch.float32)
        (matmul,) = time_ops([case], world.device, _PROBE, links.peers)
    return drifts | {"matmul": matmul.seconds / profile.compute_seconds(matmul.work)}


def _key(seats: Sequence[Seat], built_in: MachineProfile | None) -> str:
    """The conditions under which a profile is valid, as text."""
    return json.dumps(
        {
            "format": FORMAT,
            "torch": torch.__version__,
            "backend": str(dist.get_backend_config()),
            "nccl": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
            "compute": str(built_in),
            "seats": [asdict(seat) for seat in seats],
        }
    )


def _gathered(own: T) -> list[T]:
    """A value of every rank, by rank. All ranks call it together."""
    received: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(received, own)
    return received
