"""The unmasked pairs of a causal mask for queries and keys in any order: tables of runs, and blocks to compute.

A device's positions are a few runs of consecutive positions. A causal mask over two such tables consists of rectangles
and triangles, each computed by a kernel without a mask tensor; masked pairs are in none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshweave.ir.pieces import joined_runs

Run = tuple[int, int]  # first position, and length of the run
Runs = tuple[Run, ...]  # in the order in which they are stored


@dataclass(frozen=True, slots=True)
class CausalBlock:
    """Rows of queries and columns of keys: all pairs or, if causal, for row i the columns up to i."""

    rows: slice
    keys: slice
    is_causal: bool

    @property
    def pairs(self) -> int:
        """Number of pairs of a query and a key."""
        rows, keys = (s.stop - s.start for s in (self.rows, self.keys))
        return rows * (rows + 1) // 2 if self.is_causal else rows * keys


@dataclass(frozen=True, slots=True)
class Causal:
    """The positions of queries and of keys."""

    queries: Runs
    keys: Runs

    @staticmethod
    def of(
        num_queries: int, num_keys: int, first_query: int = 0, first_key: int = 0, starts: Sequence[int] | None = None
    ) -> Causal:
        """Queries and keys stored from `first_query` and `first_key` on, of a sequence stored as equal chunks that
        begin at the positions `starts` (None: in order)."""
        return Causal(runs(first_query, num_queries, starts), runs(first_key, num_keys, starts))

    @property
    def is_ascending(self) -> bool:
        """Whether both are stored in order of position."""
        return all(list(table) == sorted(table) for table in (self.queries, self.keys))

    @property
    def ascending(self) -> Causal:
        """The same pairs, stored in order of position."""
        return Causal(joined_runs(sorted(self.queries)), joined_runs(sorted(self.keys)))

    @property
    def blocks(self) -> tuple[CausalBlock, ...]:
        """The blocks to compute, by rows and columns as stored: every unmasked pair is in exactly one block."""
        blocks: list[CausalBlock] = []
        row = 0
        for start, rows in self.queries:
            column = 0
            for first, columns in self.keys:
                for block in _blocks(rows, columns, start - first):
                    _append(blocks, _shifted(block, row, column))
                column += columns
            row += rows
        return tuple(_stacked(blocks))


def runs(first: int, length: int, starts: Sequence[int] | None) -> Runs:
    """The positions of `length` places from `first` on, in a sequence stored as equal chunks that begin at `starts`."""
    if not starts:
        return ((first, length),)
    size = min(start for start in starts if start)
    places = [(max(first - i * size, 0), min(first + length - i * size, size)) for i in range(len(starts))]
    return joined_runs([(starts[i] + low, high - low) for i, (low, high) in enumerate(places) if low < high])


def head_tail(length: int, num_devices: int) -> tuple[int, ...]:
    """Where the chunks of a balanced sequence begin: of 2n equal chunks device r has chunks r and 2n - 1 - r."""
    size, last = length // (2 * num_devices), 2 * num_devices - 1
    return tuple(size * number for r in range(num_devices) for number in (r, last - r))


def _blocks(num_queries: int, num_keys: int, offset: int) -> list[CausalBlock]:
    """The unmasked pairs of queries at `offset` + 0, 1, ... and keys at 0, 1, ...: at most three blocks."""
    first = max(-offset, 0)  # earlier rows see nothing
    diagonal = max(offset, 0)  # all rows see the keys before
    side = min(num_queries - first, num_keys - diagonal)
    blocks = []
    if diagonal > 0 and num_queries:
        blocks.append(CausalBlock(slice(0, num_queries), slice(0, min(diagonal, num_keys)), False))
    if side > 0:
        blocks.append(CausalBlock(slice(first, first + side), slice(diagonal, diagonal + side), True))
        if first + side < num_queries:
            blocks.append(CausalBlock(slice(first + side, num_queries), slice(diagonal, num_keys), False))
    return blocks


def _shifted(block: CausalBlock, row: int, column: int) -> CausalBlock:
    rows, keys = block.rows, block.keys
    return CausalBlock(
        slice(rows.start + row, rows.stop + row), slice(keys.start + column, keys.stop + column), block.is_causal
    )


def _append(blocks: list[CausalBlock], block: CausalBlock) -> None:
    """Add a block, merged into the last block if both contain all pairs of the same rows and their keys are
    consecutive."""
    last = blocks[-1] if blocks else block
    is_full = not (last.is_causal or block.is_causal)
    if is_full and last.rows == block.rows and last.keys.stop == block.keys.start:
        blocks[-1] = CausalBlock(block.rows, slice(last.keys.start, block.keys.stop), False)
    else:
        blocks.append(block)


def _stacked(blocks: Sequence[CausalBlock]) -> list[CausalBlock]:
    """Blocks of all pairs over the same keys with consecutive rows, merged."""
    stacked: list[CausalBlock] = []
    for block in blocks:
        above = [
            i
            for i, b in enumerate(stacked)
            if not (b.is_causal or block.is_causal) and b.keys == block.keys and b.rows.stop == block.rows.start
        ]
        if above:
            stacked[above[0]] = CausalBlock(slice(stacked[above[0]].rows.start, block.rows.stop), block.keys, False)
        else:
            stacked.append(block)
    return stacked
