"""Replays PyTorch's caching allocator: the memory that it reserves for a sequence of allocations.

Sizes and rules are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13) with its default settings: blocks
are rounded up to 512 B; below 1 MiB they come from segments of 2 MiB, below 10 MiB from segments of 20 MiB, above from
segments of their own size rounded up to 2 MiB; the smallest free block that is large enough is taken and split, unless
little would be left; adjacent free blocks are merged; no segment is returned to the device. With
`expandable_segments:True` (as torchtitan and verl set PYTORCH_CUDA_ALLOC_CONF) a pool has a single segment, which grows
at its end by 2 or 20 MiB at a time, and every block is split.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

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
    """Free blocks of small or of large segments, by size. `last`: the last block of an expandable segment."""

    last: _Block | None = None
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

    is_expandable: bool = False
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
        if block is None and self.is_expandable:
            block = self._grow(pool, size, _SMALL_SEGMENT if is_small else _LARGE_SEGMENT)
        elif block is None:
            self.reserved += _segment_size(size)
            block = self._new_segment(_segment_size(size))
        else:
            pool.remove(block)
        rest = block.size - size
        if rest >= _MIN_BLOCK if is_small or self.is_expandable else rest > _SMALL:
            after = _Block(block.segment, block.offset + size, rest, before=block, after=block.after)
            if block.after is not None:
                block.after.before = after
            block.size, block.after = size, after
            pool.last = after if pool.last is block else pool.last
            pool.add(after)
        self._count += 1
        self._allocated[self._count] = (block, pool)
        return self._count

    def _new_segment(self, size: int) -> _Block:
        self._segments += 1
        return _Block(self._segments, 0, size)

    def _grow(self, pool: _BlockPool, size: int, chunk: int) -> _Block:
        """A free block of at least `size` at the end of the pool's segment, which grows by whole chunks."""
        block, last = pool.last, pool.last
        if last is None:
            block = self._new_segment(0)
        elif last.is_free:
            pool.remove(last)
        else:
            block = last.after = _Block(last.segment, last.offset + last.size, 0, before=last)
        assert block is not None
        grown = -(-(size - block.size) // chunk) * chunk
        block.size, pool.last = block.size + grown, block
        self.reserved += grown
        return block

    def free(self, handle: int) -> None:
        block, pool = self._allocated.pop(handle)
        before, after = block.before, block.after
        if before is not None and before.is_free:
            pool.remove(before)
            before.size, before.after = before.size + block.size, block.after
            pool.last = before if pool.last is block else pool.last
            if block.after is not None:
                block.after.before = before
            block = before
        if after is not None and after.is_free:
            pool.remove(after)
            block.size, block.after = block.size + after.size, after.after
            pool.last = block if pool.last is after else pool.last
            if after.after is not None:
                after.after.before = block
        pool.add(block)


def _segment_size(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    if size < _MIN_LARGE:
        return _LARGE_SEGMENT
    return -(-size // _ROUND_LARGE) * _ROUND_LARGE


def reserved_bytes(changes: Iterable[tuple[int, int, str]], is_expandable: bool = False) -> int:
    """Bytes reserved after `changes`, each (tensor's number, bytes, stream): the first occurrence allocates, the second
    frees."""
    allocator, handles = CachingAllocator(is_expandable), dict[int, int]()
    for number, num_bytes, stream in changes:
        if number in handles:
            allocator.free(handles.pop(number))
        elif num_bytes:
            handles[number] = allocator.allocate(num_bytes, stream)
    return allocator.reserved
