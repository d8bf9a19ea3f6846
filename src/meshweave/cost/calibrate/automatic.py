"""Costs of this machine by default: known by the name of its devices, cached by an earlier job, or measured before the
first step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from meshweave.cost.calibrate.cases import Pool, matmul_case
from meshweave.cost.calibrate.links import LinkTimer, MeasuredGroup, lead_of, local_bytes_of
from meshweave.cost.calibrate.measure import BRIEF, calibrate, peers_of
from meshweave.cost.calibrate.ops import Effort, time_ops, typical
from meshweave.cost.hardware import AlphaBeta, Costs, MachineProfile, load_profile, profile_of_device
from meshweave.cost.hardware.load import parse_profile
from meshweave.disk_cache import CacheEntry, cache_directory, machine_of
from meshweave.errors import MeshweaveError
from meshweave.runtime.cluster import ClusterWorld
from meshweave.runtime.watch import address_towards
from meshweave.runtime.world import World

AUTO, ALPHA_BETA = "auto", "alpha-beta"
FORMAT = 6  # version of the cache; change it when collectives or matmuls are implemented or measured differently
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
T = TypeVar("T")


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

    Cost objects are used unchanged; "alpha-beta" is an AlphaBeta, another name or a file a machine profile. None and
    "auto" are, in a job of several processes, the built-in profile of its GPUs if there is one, else a profile that is
    measured once (about 10 s) and cached in `cache_directory()`, by hosts, devices, addresses, backend, number of
    processes and versions; with None, an AlphaBeta for a step that `is_small` (`SMALL_BYTES`). Virtual devices of a
    process have no links: only relative costs of moves matter, for which an AlphaBeta is enough.
    """
    if isinstance(profile, str) and profile not in (AUTO, ALPHA_BETA):
        costs = load_profile(profile)
        return ChosenCosts(costs, f"profile {costs.name}, as asked")
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
    names = {seat.device for seat in seats}
    known = profile_of_device(next(iter(names))) if len(names) == 1 else None
    if known is not None:
        return ChosenCosts(load_profile(known), f"profile {known}, of devices named {seats[0].device}")
    if is_small:
        return ChosenCosts(
            AlphaBeta(), "alpha-beta: parameters and batch have less than 1 MiB (profile='auto' measures)"
        )
    entry = CacheEntry(cache_directory() / "profiles", _key(seats))
    is_first = dist.get_rank() == 0
    with entry.lock() if is_first else nullcontext():
        with world.guard():
            text, trouble = _gathered(_cached_profile(entry) if is_first else ("", ""))[0]
        if text:
            profile = _parse(text)
            drifts = _drifts(profile, world)
            wrong = [name for name, drift in drifts.items() if not _LEAST_DRIFTS[name] <= drift <= _MOST_DRIFT]
            if not wrong:
                return ChosenCosts(profile, f"measured on this machine: {profile.version}, cached in {entry.path}")
            trouble = f"a {wrong[0]} takes {drifts[wrong[0]]:.2g} times as long as {entry.path} says"
        return _measured(world, entry, trouble, progress)


def _cached_profile(entry: CacheEntry) -> tuple[str, str]:
    """The TOML of a cached profile, and what is wrong with it; both empty if there is none."""
    data, trouble = entry.read()
    text = data.decode(errors="replace")
    try:
        if text:
            _parse(text)
    except MeshweaveError as error:
        return "", f"{entry.path} is not a profile of this version ({error.what})"
    return text, trouble


def _parse(text: str) -> MachineProfile:
    return parse_profile(text, "the profile of this machine")


def _measured(world: ClusterWorld, entry: CacheEntry, trouble: str, progress: Callable[[str], None]) -> ChosenCosts:
    """Costs measured now and cached; an AlphaBeta if that is not possible. `trouble` is why no cached profile was
    used."""
    began = time.perf_counter()
    why = f" ({trouble})" if trouble else ""
    progress(f"calibrate{why}")
    text, failure = "", ""
    try:
        name = f"{world.device.type}, {world.mesh.num_devices} processes"
        text = calibrate(BRIEF, name, "mw.compile", world.device, lambda stage: progress(f"calibrate: {stage}")).text
    except (MeshweaveError, RuntimeError) as error:
        failure = f"{type(error).__name__}: {error}".partition("\n")[0]
    with world.guard():
        outcomes = _gathered((text, failure))
    if failures := [error for _, error in outcomes if error]:
        return ChosenCosts(AlphaBeta(), f"alpha-beta: this machine could not be measured ({failures[0]})")
    text = outcomes[0][0]
    with world.guard():
        kept = _gathered(entry.write(text.encode()) if dist.get_rank() == 0 else "")[0] or f"cached in {entry.path}"
    return ChosenCosts(_parse(text), f"measured on this machine in {time.perf_counter() - began:.0f} s{why}, {kept}")


def _drifts(profile: MachineProfile, world: ClusterWorld) -> dict[str, float]:
    """Measured times of a gather over all ranks and of a matmul, relative to the profile."""
    place = MeasuredGroup("", world.mesh.num_devices, world.mesh, world.mesh.axis_names)
    size = local_bytes_of("all_gather", place.size, _PROBE_BYTES)
    with world.guard():
        links = LinkTimer(world.mesh, world.rank, world.device, peers_of(world))
        start = links.start(place, "all_gather", size)
        links.sample(start, 1)
        turns = _PROBE.turns(_PROBE.rounds, time.perf_counter(), links.peers)
        (gather,) = links.peers.most([typical([links.sample(start, 1, lead_of(_PROBE_BYTES)) for _ in turns])])
        case = matmul_case(Pool(world.device, 4 * _PROBE_BYTES), (_PROBE_SIZE,) * 3, torch.float32)
        (matmul,) = time_ops([case], world.device, _PROBE, links.peers)
    return {
        "gather": gather / profile.seconds("all_gather", world.mesh, place.axes, size),
        "matmul": matmul.seconds / profile.compute_seconds(matmul.work),
    }


def _key(seats: Sequence[Seat]) -> str:
    """The conditions under which a profile is valid, as text."""
    return json.dumps(
        {
            "format": FORMAT,
            "torch": torch.__version__,
            "backend": str(dist.get_backend_config()),
            "seats": [asdict(seat) for seat in seats],
        }
    )


def _gathered(own: T) -> list[T]:
    """A value of every rank, by rank. All ranks call it together."""
    received: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(received, own)
    return received
