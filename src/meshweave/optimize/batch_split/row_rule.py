"""How an op runs in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshweave.optimize.decompose.cut import Cut

Combine = Literal["sum", "avg", "max", "min", "same", "chain"]  # "same": equal in all chunks; "chain": see RowRule


@dataclass(frozen=True, slots=True)
class RowRule:
    """How an op runs chunk by chunk.
    `operands`: for each tensor operand the cut whose chunk c is used by chunk c, None if it is used whole. `results`:
    for each result its cut, or how the chunks' results are combined; "chain": the first operand of chunk c + 1 is the
    result of chunk c. `shape_at`: the argument that is the shape of the result, -1 without; `splits_at`: arguments that
    are sizes along the cut dim, a single size or a list."""

    operands: tuple[Cut | None, ...]
    results: tuple[Cut | Combine, ...]
    shape_at: int = -1
    splits_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """Operand or result `index` of an op."""

    is_result: bool
    index: int
