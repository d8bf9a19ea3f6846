"""Pieces: the boxes of the global index space on devices. The only definition of offsets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod


def chunk(size: int, parts: int, index: int, unit: int = 1) -> tuple[int, int]:
    """Offset and size of part `index` when `size` elements are cut into `parts`, never inside a block of `unit`.

    Every part but the last non-empty one has ceil(blocks / parts) blocks, as in `torch.chunk`; later parts may
    be empty (their offset is then `size`).
    """
    blocks = -(-size // unit)
    step = -(-blocks // parts) * unit
    start = min(index * step, size)
    return start, min(step, size - start)


def nested_chunk(size: int, cuts: Sequence[tuple[int, int]], unit: int = 1) -> tuple[int, int]:
    """Offset and size after cutting in turn by each (parts, index) of `cuts`, outermost first."""
    offset = 0
    for parts, index in cuts:
        start, size = chunk(size, parts, index, unit)
        offset += start
    return offset, size


def largest_chunk(size: int, parts: Sequence[int], unit: int = 1) -> int:
    """Size of the largest piece, which is always the first."""
    blocks = -(-size // unit)
    for n in parts:
        blocks = -(-blocks // n)
    return min(size, blocks * unit)


def is_even(size: int, parts: Sequence[int], unit: int = 1) -> bool:
    """Whether all pieces have the same size."""
    num_pieces = prod(parts)
    return num_pieces == 1 or size % (num_pieces * unit) == 0


def unit_matters(size: int, parts: Sequence[int], unit: int) -> bool:
    """Whether cutting by `parts` in blocks of `unit` gives other pieces than cutting in single elements.

    At every level only two sizes occur (a full chunk and the remainder of each size above), so the cost does not grow
    with the number of pieces.
    """
    sizes = {size} - {0}
    for num_parts in parts:
        full = {s: chunk(s, num_parts, 0)[1] for s in sizes}
        if any(chunk(s, num_parts, 0, unit)[1] != full[s] for s in sizes):
            return True
        sizes = {t for s in sizes for t in (full[s], s % full[s])} - {0}
    return False


@dataclass(frozen=True, slots=True)
class Box:
    """A piece of a tensor: offset and size per dim, in elements of the global tensor."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return prod(self.size)

    def slices(self) -> tuple[slice, ...]:
        """The index that cuts the box out of the global tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.size, strict=True))

    def contains(self, other: Box) -> bool:
        """Whether the other box, even if empty, begins and ends inside this box."""
        pairs = zip(self.offset, self.size, other.offset, other.size, strict=True)
        return all(a <= b and b + t <= a + s for a, s, b, t in pairs)

    def intersect(self, other: Box) -> Box:
        """The intersection of both boxes; sizes are 0 if they do not meet."""
        lo = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        hi = (min(a + s, b + t) for a, s, b, t in zip(self.offset, self.size, other.offset, other.size, strict=True))
        return Box(lo, tuple(max(0, h - o) for o, h in zip(lo, hi, strict=True)))


def joined_runs(runs: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Runs (start, size), with neighbours merged of which one ends where the other begins."""
    joined: list[tuple[int, int]] = []
    for start, size in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return tuple(joined)
