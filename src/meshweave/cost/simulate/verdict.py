"""Whether a simulated step fits in memory, and what would mostly make it fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshweave.cost.simulate.memory import bytes_by_kind
from meshweave.cost.simulate.result import MEMORY_ERROR, RoleResult, Simulation

_GIB = 2**30


def judged(simulation: Simulation, microbatches: int) -> Simulation:
    """The simulation with its verdict, advice and notes about memory; without an MFU if it does not fit."""
    room = simulation.memory_bytes
    assert room is not None
    verdict, advice = _verdict(simulation.roles, room, microbatches)
    notes = (*_margin(simulation.roles, room), *simulation.notes, *_fragments(simulation.roles, room))
    mfu = None if verdict else simulation.mfu
    return replace(simulation, verdict=verdict, advice=advice, notes=notes, mfu=mfu)


def memory_notes(roles: Sequence[RoleResult], room: int) -> tuple[str, ...]:
    """The notes about memory that `judged` adds."""
    return (*_margin(roles, room), *_fragments(roles, room))


def _verdict(roles: Sequence[RoleResult], room: int, microbatches: int) -> tuple[str, tuple[str, ...]]:
    """What does not fit, "" if all may, and what would mostly make it fit, judged by what the memory is used for."""
    worst = max(roles, key=lambda role: role.peak_bytes)
    if worst.peak_bytes <= room * (1 + MEMORY_ERROR):
        return "", ()
    over = worst.peak_bytes - room
    kinds = bytes_by_kind(worst.at_peak)
    advice = []
    if kinds.get("activation", 0) > over:
        advice.append("recompute activations (--passes recompute=full), or a smaller local batch")
    if worst.persistent_bytes > room // 2:
        advice.append("shard parameters and optimizer state over more devices (a larger fsdp axis)")
    if microbatches > 1 and kinds.get("grad", 0) > over:
        advice.append(
            "gradients of microbatches in shards (zero2), or added in 16 bits: the dtype of stored parameters"
        )
    if not advice:
        advice.append("a smaller local batch or shorter sequences, or more devices")
    most = ", ".join(f"{k} {v / _GIB:.1f} GiB" for k, v in list(kinds.items())[:3])
    return f"does not fit: {_needs(worst, room)} ({most})", tuple(advice)


def _needs(role: RoleResult, room: int) -> str:
    return f"role {role.index} needs {role.peak_bytes / _GIB:.1f} GiB of {room / _GIB:.1f} GiB"


def _margin(roles: Sequence[RoleResult], room: int) -> tuple[str, ...]:
    """A sentence about a step of which the model cannot say whether it fits."""
    worst = max(roles, key=lambda role: role.peak_bytes)
    if not room * (1 - MEMORY_ERROR) < worst.peak_bytes <= room * (1 + MEMORY_ERROR):
        return ()
    return (f"may fit: {_needs(worst, room)}, which is within the model's error of {MEMORY_ERROR:.0%}",)


def _fragments(roles: Sequence[RoleResult], room: int) -> tuple[str, ...]:
    """The verdict if tensors fit, but not with the free blocks between them: c10's CUDACachingAllocator.cpp releases
    free segments and retries before it runs out of memory."""
    worst = max(roles, key=lambda role: role.reserved_bytes)
    if not max(role.peak_bytes for role in roles) <= room < worst.reserved_bytes:
        return ()
    reserved = f"{worst.reserved_bytes / _GIB:.1f} GiB of {room / _GIB:.1f} GiB"
    return (
        f"tensors fit, but with free blocks between them the allocator would reserve {reserved}: it then stops the "
        "device to release segments, and may run out of memory; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
        "leaves fewer",
    )
