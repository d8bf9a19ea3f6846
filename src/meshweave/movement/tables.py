"""A device's array as a table: its elements, and the contributions that their values sum up.

Arrays stay products of a table per dim whatever is done to them, so a table costs no more for a large tensor than for a
small tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshweave.ir.pieces import Box, joined_runs

Runs = tuple[tuple[int, int], ...]  # start and size of stretches of elements along a dim, in their order in the array
Parts = Mapping[Box, int]  # boxes of the global index space, with the bit set of contributions to them


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTable:
    """A device's array. Along dim d its positions are the elements of `runs[d]`; `parts` are the elements with values,
    without empty boxes. The rest is the identity of the reduce op."""

    runs: tuple[Runs, ...]
    parts: Parts

    @staticmethod
    def of(box: Box, contributions: int) -> DeviceTable:
        runs = tuple(((o, s),) if s else () for o, s in zip(box.offset, box.size, strict=True))
        return DeviceTable(runs, {box: contributions} if box.num_elements and contributions else {})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple([runs[0][1] if len(runs) == 1 else sum([size for _, size in runs]) for runs in self.runs])

    def is_piece(self, box: Box) -> bool:
        """Whether the array is the box, element by element in order."""
        if not box.num_elements:
            return self.shape == box.size
        return self.runs == tuple(((o, s),) for o, s in zip(box.offset, box.size, strict=True))

    def cut(self, dim: int, start: int, size: int) -> DeviceTable:
        """The array from position `start` on, `size` positions along `dim`. Raises ValueError beyond its end."""
        if start < 0 or size < 0 or start + size > self.shape[dim]:
            raise ValueError(f"positions {start} to {start + size} of {self.shape[dim]} along dim {dim}")
        runs, at = [], 0
        for first, length in self.runs[dim]:
            low, high = max(start, at), min(start + size, at + length)
            if low < high:
                runs.append((first + low - at, high - low))
            at += length
        return DeviceTable((*self.runs[:dim], tuple(runs), *self.runs[dim + 1 :]), _within(self.parts, dim, runs))

    def part(self, box: Box) -> Parts:
        """The parts inside a box."""
        cut = {box.intersect(part): bits for part, bits in self.parts.items()}
        return {part: bits for part, bits in cut.items() if part.num_elements}


def join(members: Sequence[DeviceTable], dim: int) -> DeviceTable:
    """The arrays side by side along `dim`. Raises ValueError if they differ along other dims, or contain an element
    twice."""
    first, shapes = members[0], [table.shape for table in members]
    if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
        raise ValueError(f"arrays of other shapes are joined along dim {dim}")
    filled = [table for table, shape in zip(members, shapes, strict=True) if all(shape)]
    if len({(*table.runs[:dim], *table.runs[dim + 1 :]) for table in filled}) > 1:
        raise ValueError(f"different elements of other dims are joined along dim {dim}")
    runs = [run for table in members for run in table.runs[dim]]
    in_order = sorted(runs)
    if any(a + size > b for (a, size), (b, _) in pairwise(in_order)):
        raise ValueError(f"an element is joined twice along dim {dim}")
    parts = [item for table in members for item in table.parts.items()]
    like = filled[0] if filled else first
    return DeviceTable((*like.runs[:dim], joined_runs(runs), *like.runs[dim + 1 :]), _merged_parts(parts, dim))


def unite(members: Sequence[DeviceTable]) -> DeviceTable:
    """The reduction of the arrays. Raises ValueError if they contain different elements or a contribution twice."""
    first, parts = members[0], dict[Box, int]()
    if len(members) == 1:
        return first
    for table in members:
        if table.runs != first.runs:
            raise ValueError("the devices that reduce have different elements")
        for box, bits in table.parts.items():
            if parts.get(box, 0) & bits:
                raise ValueError("a contribution is counted twice")
            parts[box] = parts.get(box, 0) | bits
    boxes = list(parts)
    for i, box in enumerate(boxes if len(boxes) > 1 else ()):
        for other in boxes[:i]:
            if parts[box] & parts[other] and box.intersect(other).num_elements:
                raise ValueError("a contribution is counted twice")
    return DeviceTable(first.runs, parts)


def is_complete(table: DeviceTable, box: Box, every: int) -> bool:
    """Whether each element of the box has all of the contributions, none of them twice."""
    if len(table.parts) == 1 and table.parts.get(box) == every:
        return True
    inside = table.part(box)
    total = sum(part.num_elements * bits.bit_count() for part, bits in inside.items())
    return total == box.num_elements * every.bit_count() and not any(bits & ~every for bits in inside.values())


def _within(parts: Parts, dim: int, runs: Sequence[tuple[int, int]]) -> Parts:
    """The parts inside the runs along `dim`."""
    inside: dict[Box, int] = {}
    for box, bits in parts.items():
        for start, size in runs:
            low = max(start, box.offset[dim])
            high = min(start + size, box.offset[dim] + box.size[dim])
            if low < high:
                cut = _with_span(box, dim, low, high - low)
                inside[cut] = inside.get(cut, 0) | bits
    return inside


def _with_span(box: Box, dim: int, start: int, size: int) -> Box:
    return Box(
        (*box.offset[:dim], start, *box.offset[dim + 1 :]),
        (*box.size[:dim], size, *box.size[dim + 1 :]),
    )


def _merged_parts(parts: Sequence[tuple[Box, int]], dim: int) -> Parts:
    """Adjacent parts along `dim` merged."""
    rows: dict[tuple[Box, int], list[tuple[int, int]]] = {}
    for box, bits in parts:
        rows.setdefault((_with_span(box, dim, 0, 0), bits), []).append((box.offset[dim], box.size[dim]))
    return {
        _with_span(row, dim, start, size): bits
        for (row, bits), spans in rows.items()
        for start, size in joined_runs(sorted(spans))
    }
