"""The memory of a role's device over time: every storage from the task that allocates it to the last that uses it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf

from torch import fx

from meshweave.cost.simulate.clock import Times
from meshweave.cost.simulate.result import LiveTensor
from meshweave.cost.simulate.storage_intervals import IN_PLACE, Key, Ledger, Life, LifetimeRules
from meshweave.cost.simulate.tasks import RoleTasks, Tasks
from meshweave.ir.collectives import ALL_GATHER, REDUCE_SCATTER, STARTS, WAIT
from meshweave.ir.graph import PARTS, fold_numbers, origin_of
from meshweave.ir.liveness import live_bytes
from meshweave.ir.rank import RankGraph
from meshweave.ir.values import Values

_STEPS = 3  # steps after which an allocator no longer grows, if all steps are equal


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes over time of a device, the peak, and the tensors alive then."""

    curve: tuple[tuple[float, int], ...]
    peak_bytes: int
    peak_at: float
    reserved_bytes: int
    persistent_bytes: int
    at_peak: tuple[LiveTensor, ...]


def memory_of(tasks: Tasks, index: int, times: Times, holding: LifetimeRules) -> MemoryUse:
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
    gradients = gradients_of(role.role, role.local.values)
    shown = with_twins(_live_tensor(life, gradients) for life in alive)
    reserved = reserved_bytes(_allocations(lives))
    curve = tuple(zip(moments, levels, strict=True))
    return MemoryUse(curve, peak, curve[at][0] if curve else 0.0, reserved, lasting, shown)


def least_bytes(role: RoleTasks) -> int:
    """Bytes that the first device of a role holds at once in any order of the step that keeps kernels in their part:
    inputs, and what kernels of one part compute and kernels of a later part read. A lower bound of `memory_of`.

    Results of communications do not count, because they may be requested again, nor do sums of gradients and new values
    of inputs, which may be in place."""
    values, graph = role.local.values, role.role.graph
    sizes = {x.storage: x.storage_bytes for results in values.values() for x in results}

    def storages(nodes: Iterable[fx.Node]) -> set[int]:
        return {x.storage for n in nodes for x in values.get(n, ())}

    inputs = storages(node for node, item in role.role.sources.items() if item.kind != "acc")
    received = storages(n for n in graph.nodes if n.target in STARTS or n.target is WAIT)
    in_place = storages(node for (kind, _), node in role.role.results.items() if kind in IN_PLACE)
    parts = [(PARTS[origin_of(kernel.node).phase], kernel) for kernel in role.kernels]
    least = 0
    for later in (PARTS["backward"], PARTS["update"]):
        written = storages(n for part, kernel in parts if part < later for n in kernel.writes)
        read = storages(n for part, kernel in parts if part >= later for n in kernel.reads)
        live = ((written - received - in_place) | inputs) & read
        least = max(least, sum(sizes[storage] for storage in live))
    return least


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


def _live_tensor(life: Life, gradients: Collection[fx.Node]) -> LiveTensor:
    origin, kind = origin_of(life.node), life.kind or kind_of(life.node, life.crosses, gradients)
    return LiveTensor(life.node.name, life.bytes, kind, origin.module, origin.source)


def with_twins(tensors: Iterable[LiveTensor]) -> tuple[LiveTensor, ...]:
    """Tensors, the largest first, with their twins in repeated layers combined; those with the most bytes first."""
    groups: dict[tuple[str, str, str], LiveTensor] = {}
    for live in tensors:
        module = fold_numbers(live.module)
        same = groups.setdefault((live.kind, module, live.line), live)
        if same is not live:
            total = same.bytes + live.bytes
            live = replace(same, bytes=total, module=module, count=same.count + live.count)
        groups[live.kind, module, live.line] = live
    return tuple(sorted(groups.values(), key=lambda live: (-live.bytes, live.name)))


def kind_of(node: fx.Node, crosses: bool, gradients: Collection[fx.Node]) -> str:
    """The kind of a computed value. `crosses`: it is computed in forward and read in backward."""
    name = getattr(node.target, "__name__", str(node.target))
    if "all_gather" in name:
        return "gathered"
    if crosses:
        return "activation"
    return "grad" if node in gradients else "temporary"


def gradients_of(role: RankGraph, values: Mapping[fx.Node, Values]) -> frozenset[fx.Node]:
    """The nodes that share a storage with a gradient that the role returns."""
    storages = {x.storage for (kind, _), n in role.results.items() if kind == "grad" for x in values[n]}
    return frozenset(n for n, results in values.items() if any(x.storage in storages for x in results))


def bytes_by_kind(at_peak: Iterable[LiveTensor]) -> Mapping[str, int]:
    """Bytes per kind of tensor, the largest first."""
    totals: dict[str, int] = {}
    for live in at_peak:
        totals[live.kind] = totals.get(live.kind, 0) + live.bytes
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


# Replays PyTorch's caching allocator: the memory that it reserves for a sequence of allocations. Sizes and rules are
# those of c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13) with its default settings: blocks are rounded up to
# 512 B; below 1 MiB they come from segments of 2 MiB, below 10 MiB from segments of 20 MiB, above from segments of
# their own size rounded up to 2 MiB; the smallest free block that is large enough is taken and split, unless little
# would be left; adjacent free blocks are merged; no segment is returned to the device.

_MIN_BLOCK = 512
_SMALL, _SMALL_SEGMENT = 1 << 20, 2 << 20
_MIN_LARGE, _LARGE_SEGMENT, _ROUND_LARGE = 10 << 20, 20 << 20, 2 << 20


@dataclass(slots=True)
class _Block:
    segment: int
    offset: int
    size: int
    is_free: bool = False
    before: _Block | None = None
    after: _Block | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.size, self.segment, self.offset)


@dataclass(slots=True)
class _BlockPool:
    """Free blocks of small or of large segments, by size."""

    keys: list[tuple[int, int, int]] = field(default_factory=list)
    blocks: dict[tuple[int, int], _Block] = field(default_factory=dict)

    def add(self, block: _Block) -> None:
        block.is_free = True
        insort(self.keys, block.key)
        self.blocks[block.segment, block.offset] = block

    def remove(self, block: _Block) -> None:
        block.is_free = False
        del self.keys[bisect_left(self.keys, block.key)]
        del self.blocks[block.segment, block.offset]

    def best(self, size: int) -> _Block | None:
        at = bisect_left(self.keys, (size, -1, -1))
        return self.blocks[self.keys[at][1:]] if at < len(self.keys) else None


@dataclass(slots=True)
class CachingAllocator:
    """Reserved bytes grow as `allocate` is called; `free` returns blocks to the pool of their stream."""

    reserved: int = 0
    _segments: int = 0
    _pools: dict[tuple[str, bool], _BlockPool] = field(default_factory=dict)
    _allocated: dict[int, tuple[_Block, _BlockPool]] = field(default_factory=dict)
    _count: int = 0

    def allocate(self, num_bytes: int, stream: str) -> int:
        """A handle for `num_bytes` from the pool of a stream."""
        size = max(_MIN_BLOCK, -(-num_bytes // _MIN_BLOCK) * _MIN_BLOCK)
        is_small = size <= _SMALL
        pool = self._pools.setdefault((stream, is_small), _BlockPool())
        block = pool.best(size)
        if block is None:
            self.reserved += _segment_size(size)
            self._segments += 1
            block = _Block(self._segments, 0, _segment_size(size))
        else:
            pool.remove(block)
        rest = block.size - size
        if rest >= _MIN_BLOCK if is_small else rest > _SMALL:
            after = _Block(block.segment, block.offset + size, rest, before=block, after=block.after)
            if block.after is not None:
                block.after.before = after
            block.size, block.after = size, after
            pool.add(after)
        self._count += 1
        self._allocated[self._count] = (block, pool)
        return self._count

    def free(self, handle: int) -> None:
        block, pool = self._allocated.pop(handle)
        before, after = block.before, block.after
        if before is not None and before.is_free:
            pool.remove(before)
            before.size, before.after = before.size + block.size, block.after
            if block.after is not None:
                block.after.before = before
            block = before
        if after is not None and after.is_free:
            pool.remove(after)
            block.size, block.after = block.size + after.size, after.after
            if after.after is not None:
                after.after.before = block
        pool.add(block)


def _segment_size(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    if size < _MIN_LARGE:
        return _LARGE_SEGMENT
    return -(-size // _ROUND_LARGE) * _ROUND_LARGE


def reserved_bytes(changes: Iterable[tuple[int, int, str]]) -> int:
    """Bytes reserved after `changes`, each (tensor's number, bytes, stream): the first occurrence allocates, the second
    frees."""
    allocator, handles = CachingAllocator(), dict[int, int]()
    for number, num_bytes, stream in changes:
        if number in handles:
            allocator.free(handles.pop(number))
        elif num_bytes:
            handles[number] = allocator.allocate(num_bytes, stream)
    return allocator.reserved


# What FSDP2 allocates for the collectives of a block: flat buffers, in the memory pools of its streams. A gather writes
# into a buffer of its own stream, and parameters are copied out of it where compute waits for it. In forward the buffer
# is kept until the next gather has been copied out, parameters of a block until their last use in the block. A reduce-
# scatter's input is kept until the next is issued; gradients are allocated in the memory of its stream
# (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py and _fsdp_param_group.py, torch 2.5 to 2.13).

GATHER, REDUCE = ALL_GATHER.op, REDUCE_SCATTER.op


@dataclass(frozen=True, slots=True)
class Flat:
    """Collectives on a flat buffer: what they read and write, when they are issued, when compute first waits."""

    node: fx.Node
    operands: tuple[Key, ...]
    results: tuple[Key, ...]
    issued: float
    waited: float

    @property
    def phase(self) -> str:
        return origin_of(self.node).phase


def hold_flat_buffers(
    tasks: Tasks,
    role_tasks: RoleTasks,
    times: Times,
    lives: MutableMapping[Key, Life],
    operands: Mapping[tuple[fx.Node, int], Sequence[Key]],
) -> None:
    """Give the tensors that a role gathers and reduces over its parameters' storage axes the lifetimes of FSDP2.
    `operands`: what each start reads. No effect if the program is simulated with a collective per tensor."""
    axes = _parameter_axes(role_tasks.role)
    flats = [
        _flat(tasks, role_tasks, times, bucket, operands)
        for bucket in tasks.flat
        if bucket[0][0] in role_tasks.tasks and str(tasks.tasks[bucket[0][0]].node.args[-1]) in axes
    ]
    _hold_gathers(sorted((f for f in flats if f.node.target is GATHER), key=lambda f: f.waited), lives)
    _hold_reductions(sorted((f for f in flats if f.node.target is REDUCE), key=lambda f: f.issued), lives)


def _flat(
    tasks: Tasks,
    role_tasks: RoleTasks,
    times: Times,
    bucket: Sequence[tuple[int, int]],
    operands: Mapping[tuple[fx.Node, int], Sequence[Key]],
) -> Flat:
    """The bucket of starts and waits, which are task numbers."""
    starts = [tasks.tasks[start] for start, _ in bucket]
    read = [key for task in starts for key in operands[task.node, task.microbatch]]
    written = [(x.storage, task.microbatch) for task in starts for x in role_tasks.local.values[task.node]]
    issued = min(times.starts[start] for start, _ in bucket)
    return Flat(starts[0].node, tuple(read), tuple(written), issued, min(times.starts[wait] for _, wait in bucket))


def _hold_gathers(gathers: Sequence[Flat], lives: MutableMapping[Key, Life]) -> None:
    for number, flat in enumerate(gathers):
        following = gathers[number + 1] if number + 1 < len(gathers) else flat
        results = [lives[key] for key in flat.results]
        is_forward = flat.phase == following.phase == "forward"
        copied = following.waited if is_forward else flat.waited
        size = sum(life.bytes for life in results)
        lives[-1 - number, 0] = Life(flat.node, size, "gathered", flat.issued, copied, stream="gather")
        for life in results:
            life.begin, life.end = flat.waited, max(other.end for other in results)


def _hold_reductions(reductions: Sequence[Flat], lives: Mapping[Key, Life]) -> None:
    for flat in reductions:
        for key in flat.results:
            lives[key].stream = "reduce"
    for flat, following in pairwise(reductions):
        for key in flat.operands:
            lives[key].end = max(lives[key].end, following.issued)


def _parameter_axes(role: RankGraph) -> frozenset[str]:
    """The groups over which parameters are gathered."""
    kinds = role.sources

    def is_parameter(node: fx.Node) -> bool:
        while node.op == "call_function" and len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
        return node in kinds and kinds[node].kind == "param"

    gathers: Sequence[fx.Node] = [n for n in role.graph.nodes if n.target is GATHER]
    return frozenset(str(n.args[-1]) for n in gathers if is_parameter(n.all_input_nodes[0]))
