"""The work of a device in numbers: a profile turns it into seconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Matmul:
    """`batch` products of [m, k] and [k, n], operands of `dtype`; `bytes` are those of operands and result. A complex
    product is four real products."""

    m: int
    n: int
    k: int
    batch: int
    dtype: torch.dtype
    bytes: int

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k * (4 if self.dtype.is_complex else 1)

    def in_reals(self) -> Matmul:
        """The same work in products of real numbers."""
        return replace(self, batch=4 * self.batch, dtype=self.dtype.to_real()) if self.dtype.is_complex else self


@dataclass(frozen=True, slots=True)
class Attention:
    """Scaled-dot-product attention of `heads` (batch times heads) over `queries` and `keys` of `head_dim`.

    Forward takes 2 matmuls, backward 5 (scores are recomputed, as in flash attention); a causal mask halves both.
    """

    heads: int
    queries: int
    keys: int
    head_dim: int
    is_causal: bool
    is_backward: bool
    dtype: torch.dtype
    bytes: int

    @property
    def flops(self) -> float:
        forward = 2.0 * self.heads * self.queries * self.keys * self.head_dim
        return forward * (5 if self.is_backward else 2) * (0.5 if self.is_causal else 1.0)


@dataclass(frozen=True, slots=True)
class MemoryWork:
    """A memory-bound kernel: `bytes` read and written in a launch.

    `kind` is `pointwise`, `reduction`, `copy` (contiguous), `strided` (a transpose or other strided copy), `gather`
    (embedding, index_select), `scatter` (index_add and the like), `random` or `fill`; `elements` is the largest number
    of elements that one of its ops processes.
    """

    kind: str
    bytes: int
    elements: int
    dtype: torch.dtype


Work = Matmul | Attention | MemoryWork
MEMORY_KINDS = ("pointwise", "reduction", "copy", "strided", "gather", "scatter", "random", "fill")
