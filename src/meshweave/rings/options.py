"""What may be taken apart, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from meshweave.errors import MeshweaveError


@dataclass(frozen=True, slots=True)
class DecomposeOptions:
    """What may be taken apart, and how.

    when: "gain": where the costs say that it is faster; "always": wherever it can be, the first way that can, and costs
        are not asked.
    all_gather, reduce_scatter, all_reduce, all_to_all: the ways that are tried, in this order: names of the table of
        algorithms (an all-reduce has those of a reduce-scatter), or "pipelined": collectives of parts (of all but an
        all-to-all). None: stays as it is.
    num_chunks: the numbers of parts that "pipelined" tries.
    accumulate: the dtype in which sums are taken; None: float32 for half precision, else that of the operand.
    sums: whether a matmul that sums over what was gathered may be taken apart, into a sum of products.
    share: whether equal gathers of one phase become one first.
    most_devices: of a group; the graph grows with it.
    margin: the share of the time before that has to be gained, by taking apart at all and by more steps.
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

    @classmethod
    def of(cls, options: bool | DecomposeOptions | None) -> DecomposeOptions | None:
        """How collectives are taken apart; None: not at all. Raises MeshweaveError for what says neither."""
        if options is None or options is False:
            return None
        if options is True:
            return cls()
        if not isinstance(options, DecomposeOptions):
            raise MeshweaveError(
                "invalid value of decompose",
                got=repr(options),
                expected="True, False or DecomposeOptions(...)",
            )
        return options
