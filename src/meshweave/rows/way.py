"""What it is to run an op in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshweave.chunks.cut import Cut

Combine = Literal["sum", "avg", "max", "min", "same", "chain"]  # "same": equal in all chunks; "chain": see RowRule


@dataclass(frozen=True, slots=True)
class RowRule:
    """How an op runs chunk by chunk.

    `operands`: per tensor operand the cut of which chunk c takes chunk c, None where it takes the whole. `results`: per
    result its cut, or how the chunks' results become the whole one; "chain": the first operand of chunk c + 1 is the
    result of chunk c. `shape_at`: the argument that is the shape of the result, -1 without; `splits_at`: arguments that
    are sizes along what is cut, one or a list.
    """

    operands: tuple[Cut | None, ...]
    results: tuple[Cut | Combine, ...]
    shape_at: int = -1
    splits_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """Operand or result `index` of an op."""

    is_result: bool
    index: int
