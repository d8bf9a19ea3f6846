"""The memory of a role's device over time: every storage from the task that allocates it to the last that uses it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from torch import fx

from meshweave.cost.simulate.allocator import reserved_bytes
from meshweave.cost.simulate.clock import Times
from meshweave.cost.simulate.fsdp2_buffers import hold_flat_buffers
from meshweave.cost.simulate.result import LiveTensor
from meshweave.cost.simulate.storage_intervals import Ledger, Life, LifetimeRules
from meshweave.cost.simulate.tasks import RoleTasks, Tasks
from meshweave.ir.graph import origin_of
from meshweave.ir.liveness import live_bytes

_SHOWN = 40  # tensors shown at the peak, the largest first
_STEPS = 3  # steps after which an allocator no longer grows, if all steps are equal


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes over time of a device, the peak, and the tensors alive then (the largest first)."""

    curve: tuple[tuple[float, int], ...]
    peak_bytes: int
    peak_at: float
    reserved_bytes: int
    persistent_bytes: int
    at_peak: tuple[LiveTensor, ...]


def memory_of(
    tasks: Tasks,
    index: int,
    times: Times,
    holding: LifetimeRules,
    expandable_segments: bool = False,
) -> MemoryUse:
    """Memory of role `index`. If kernels are fused, updates are in place; else (as in meshweave's executor) the new
    tensor exists beside the old tensor. The inputs of a communication live until its wait."""
    role = tasks.roles[index]
    ledger = Ledger(tasks, role, times, holding)
    ledger.run()
    hold_flat_buffers(tasks, role, times, ledger.lives, ledger.start_operands)
    lives = list(ledger.lives.values())
    moments = sorted({moment for life in lives for moment in (life.begin, life.end)} - {inf})
    number = {moment: i for i, moment in enumerate([*moments, inf])}
    ranges = [(number[life.begin], number[life.end], life.bytes) for life in lives]
    levels = live_bytes(ranges, len(moments))
    peak = max(levels, default=0)
    at = levels.index(peak) if levels else 0
    alive = [life for life, (begin, end, _) in zip(lives, ranges, strict=True) if begin <= at < end]
    alive.sort(key=lambda life: (-life.bytes, life.node.name, life.begin))
    lasting = sum(life.bytes for life in lives if life.kind in ("param", "state", "buffer", "constant"))
    gradients = _gradients(role)
    shown = tuple(_live_tensor(life, gradients) for life in alive[:_SHOWN])
    reserved = reserved_bytes(_allocations(lives), expandable_segments)
    curve = tuple(zip(moments, levels, strict=True))
    return MemoryUse(curve, peak, curve[at][0] if curve else 0.0, reserved, lasting, shown)


def _allocations(lives: Sequence[Life]) -> Iterator[tuple[int, int, str]]:
    """The allocations of the first steps of a training.

    Parameters exist from the beginning; optimizers allocate their state in the first update, in whatever room
    activations have left. Functional collectives allocate their results on the stream that issues them, which is that
    of compute."""
    changes = []
    for i, life in enumerate(lives):
        begin = life.used if life.kind == "state" else life.begin
        changes.append((begin, 1, i, life.bytes, life.stream))
        if life.end < inf:
            changes.append((life.end, 0, i, life.bytes, life.stream))
    changes.sort()
    yield from ((i, num_bytes, stream) for _, _, i, num_bytes, stream in changes)
    ended = {i for _, is_allocation, i, _, _ in changes if not is_allocation}
    for _ in range(_STEPS - 1):
        yield from ((i, num_bytes, stream) for _, _, i, num_bytes, stream in changes if i in ended)


def _live_tensor(life: Life, gradients: frozenset[fx.Node]) -> LiveTensor:
    origin = origin_of(life.node)
    return LiveTensor(life.node.name, life.bytes, life.kind or _kind(life, gradients), origin.module, origin.source)


def _kind(life: Life, gradients: frozenset[fx.Node]) -> str:
    name = getattr(life.node.target, "__name__", str(life.node.target))
    if "all_gather" in name:
        return "gathered"
    if life.crosses:
        return "activation"
    return "grad" if life.node in gradients else "temporary"


def _gradients(role: RoleTasks) -> frozenset[fx.Node]:
    """The nodes that share a storage with a gradient that the role returns."""
    values, outputs = role.local.values, role.role.results.items()
    storages = {x.storage for (kind, _), n in outputs if kind == "grad" for x in values[n]}
    return frozenset(n for n, results in values.items() if any(x.storage in storages for x in results))


def bytes_by_kind(at_peak: Iterable[LiveTensor]) -> Mapping[str, int]:
    """Bytes per kind of tensor, the largest first."""
    totals: dict[str, int] = {}
    for live in at_peak:
        totals[live.kind] = totals.get(live.kind, 0) + live.bytes
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))
