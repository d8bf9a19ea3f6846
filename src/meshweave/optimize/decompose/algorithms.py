"""Collectives as data: steps over chunks, in a single table.

A group of n devices, r the index of a device in it; all indices are modulo n. An algorithm is the same on every device
except for r. References: the direct and cyclic gathers are those of nvFuser (PR 5963, host loops with a swizzle), the
bidirectional gather and the ring of sums those of windowed einsum (Wang et al., ASPLOS 2023), the direct scatter that
of Thakur, Rabenseifner and Gropp (IJHPCA 2005).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from meshweave.errors import MeshweaveError
from meshweave.optimize.decompose.writer import Index

Collective = Literal["all_gather", "reduce_scatter"]


OWN = Index(1, 0)


@dataclass(frozen=True, slots=True)
class RingStep:
    """A step on device r.

    `chunk` is what the step computes on: in a gather the received chunk (or its own), in a reduction the chunk of which
    it computes its part. Its message goes from r to r + `shift`; a step with a shift of 0 has none.

    A gather's message carries the chunk of step `of`, and arrives for this step. A reduction's carries the step's part,
    plus the received messages of the steps `adds`; in a step without a message that sum is the result."""

    chunk: Index
    shift: int = 0
    of: int = 0
    adds: tuple[int, ...] = ()

    @property
    def has_message(self) -> bool:
        return self.shift != 0


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm of a collective. `steps(n)` are those of a group of n >= 1; `ahead` messages are in flight while a
    chunk is computed; `numerics` describes the effect on values."""

    name: str
    collective: Collective
    steps: Callable[[int], tuple[RingStep, ...]]
    ahead: int
    numerics: str

    def __str__(self) -> str:
        return f"{self.name} {self.collective}"

    def is_chain(self, n: int) -> bool:
        """Whether sums pass through several devices, each of which adds its part: messages then carry partial sums."""
        return any(step.adds for step in self.steps(n) if step.has_message)

    def num_messages(self, n: int) -> int:
        return sum(step.has_message for step in self.steps(n))


def _gather_direct(n: int) -> tuple[RingStep, ...]:
    return (RingStep(OWN), *(RingStep(Index(1, i), -i) for i in range(1, n)))


def _gather_cyclic(n: int) -> tuple[RingStep, ...]:
    return (RingStep(OWN), *(RingStep(Index(1, -i), 1, i - 1) for i in range(1, n)))


def _gather_both_ways(n: int) -> tuple[RingStep, ...]:
    """Chunks are received alternately from the previous and the next device: r - 1, r + 1, r - 2, ..., two in a
    round."""
    turns = ((k, -1 if k % 2 else 1, (k + 1) // 2) for k in range(1, n))
    return (
        RingStep(OWN),
        *(RingStep(Index(1, direction * hops), -direction, max(k - 2, 0)) for k, direction, hops in turns),
    )


def _scatter_ring(n: int) -> tuple[RingStep, ...]:
    return tuple(RingStep(Index(1, -1 - i), int(i < n - 1), adds=(i - 1,) if i else ()) for i in range(n))


def _scatter_direct(n: int) -> tuple[RingStep, ...]:
    return (*(RingStep(Index(1, i), i) for i in range(1, n)), RingStep(OWN, adds=tuple(range(n - 1))))


_MOVED = "exact: every element is moved once"
_SUMMED = "a single sum in the accumulation dtype, in group order, rounded once: as the collective does"
ALGORITHMS: tuple[Algorithm, ...] = (
    Algorithm("direct", "all_gather", _gather_direct, 1, _MOVED),
    Algorithm("cyclic", "all_gather", _gather_cyclic, 1, _MOVED),
    Algorithm("bidirectional", "all_gather", _gather_both_ways, 2, _MOVED),
    Algorithm("direct", "reduce_scatter", _scatter_direct, 1, _SUMMED),
    Algorithm(
        "ring",
        "reduce_scatter",
        _scatter_ring,
        1,
        "a sum along the ring, which is sent in the accumulation dtype; every chunk has its own order",
    ),
)
# An all-reduce is a reduce-scatter and an all-gather: any algorithm of either.


def algorithm(collective: Collective, name: str) -> Algorithm:
    """The row of the table. Raises MeshweaveError for an unknown algorithm."""
    for row in ALGORITHMS:
        if (row.collective, row.name) == (collective, name):
            return row
    known = [row.name for row in ALGORITHMS if row.collective == collective]
    raise MeshweaveError(f"no algorithm '{name}' for {collective}", got=name, expected=", ".join(known))


@dataclass(frozen=True, slots=True)
class DecomposeOptions:
    """Which collectives may be decomposed, and how.

    when: "gain": where it is faster by the costs; "always": wherever possible, with the first possible algorithm and
        without costs. all_gather, reduce_scatter, all_reduce: the algorithms that are tried, in this order: names of
        the table of algorithms (an all-reduce uses those of a reduce-scatter), or "pipelined": collectives of parts.
        None: unchanged. num_chunks: the numbers of parts that "pipelined" tries. accumulate: the dtype in which sums
        are accumulated; None: float32 for half precision, else that of the operand.
        sums: whether a matmul that sums over the gathered dim may become a sum of products. most_devices: the largest
        group; the graph grows with it. margin: the share of the former time that has to be gained, by decomposition at
        all and by more steps.
    """

    when: Literal["gain", "always"] = "gain"
    all_gather: tuple[str, ...] = ("direct", "cyclic", "bidirectional", "pipelined")
    reduce_scatter: tuple[str, ...] = ("direct", "ring", "pipelined")
    all_reduce: tuple[str, ...] = ("direct", "ring", "pipelined")
    num_chunks: tuple[int, ...] = (2, 4, 8)
    accumulate: torch.dtype | None = None
    sums: bool = True
    most_devices: int = 64
    margin: float = 0.02
