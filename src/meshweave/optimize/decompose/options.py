"""Which collectives may be decomposed, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class DecomposeOptions:
    """Which collectives may be decomposed, and how.

    when: "gain": where it is faster by the costs; "always": wherever possible, with the first possible algorithm and
        without costs. all_gather, reduce_scatter, all_reduce, all_to_all: the algorithms that are tried, in this order:
        names of the table of algorithms (an all-reduce uses those of a reduce-scatter), or "pipelined": collectives of
        parts (not for an all-to-all). None: unchanged. num_chunks: the numbers of parts that "pipelined" tries.
        accumulate: the dtype in which sums are accumulated; None: float32 for half precision, else that of the operand.
        sums: whether a matmul that sums over the gathered dim may become a sum of products. share: whether equal
        gathers of activations in a phase are merged first (in meshweave's own programs; other graphs do not tell
        parameters from activations). most_devices: the largest group; the graph grows with it. margin: the share of the
        former time that has to be gained, by decomposition at all and by more steps.
    """

    when: Literal["gain", "always"] = "gain"
    all_gather: tuple[str, ...] = ("direct", "cyclic", "bidirectional", "broadcast", "pipelined")
    reduce_scatter: tuple[str, ...] = ("direct", "ring", "pipelined")
    all_reduce: tuple[str, ...] = ("direct", "ring", "pipelined")
    all_to_all: tuple[str, ...] = ("peer",)
    num_chunks: tuple[int, ...] = (2, 4, 8)
    accumulate: torch.dtype | None = None
    sums: bool = True
    share: bool = True
    most_devices: int = 64
    margin: float = 0.02
