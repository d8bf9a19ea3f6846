"""Into how many chunks rows are split, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshweave.errors import MeshweaveError


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """How graphs are split.

    num_chunks: the numbers of chunks to try. when: "gain": if the simulated step is faster; "always": wherever
    possible, into the first of `num_chunks`, without costs. positions: whether a batch with fewer sequences than
    chunks is cut along its second dim, positions, with attention whole: more graphs to search, seldom faster.
    """

    num_chunks: tuple[int, ...] = (2, 4)
    when: Literal["gain", "always"] = "gain"
    positions: bool = False

    def __post_init__(self) -> None:
        if not self.num_chunks or any(type(n) is not int or n < 2 for n in self.num_chunks):
            raise MeshweaveError("a batch is split into two or more chunks", got=f"num_chunks={self.num_chunks!r}")
        if self.when not in ("gain", "always"):
            raise MeshweaveError("unknown value of when", got=repr(self.when), expected="gain or always")
