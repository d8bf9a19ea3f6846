"""The ops that a calibration times: matmuls, attention, and memory work, an op of each kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from meshweave.calibrate.ops import OpCase
from meshweave.ir import ops

aten = torch.ops.aten
_MIB = 1 << 20
# Operands of an op in a step were mostly computed or read a few MB of traffic earlier: repetitions are so far apart.
_APART_BYTES = 4 * _MIB
_MAX_SETS = 8


@dataclass(slots=True)
class Pool:
    """Memory that operands are cut from, so that a large operand need not be filled for every case: `num_bytes` for
    float32, half of that for each other dtype, of which fewer and smaller cases are measured."""

    device: torch.device
    num_bytes: int
    _tensors: dict[torch.dtype, Tensor] = field(default_factory=dict)
    _at: int = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """A contiguous tensor of values in [0.5, 1.5): other memory on each call until the pool is exhausted."""
        size = 1
        for n in shape:
            size *= n
        tensor = self._tensors.get(dtype)
        if tensor is None:
            random = torch.Generator(self.device).manual_seed(0)
            count = self.num_bytes // (1 if dtype == torch.float32 else 2) // dtype.itemsize
            wide = torch.rand(min(count, _MIB), generator=random, dtype=torch.float32, device=self.device) + 0.5
            tensor = self._tensors[dtype] = wide.to(dtype).repeat(-(-count // len(wide)))
        assert size <= len(tensor), "the pool is too small"
        start = self._at if self._at + size <= len(tensor) else 0
        self._at = start + -(-size // 64) * 64
        return tensor[start : start + size].view(tuple(shape))

    def sets(self, num_bytes: int, make: Callable[[], tuple[Any, ...]]) -> tuple[tuple[Any, ...], ...]:
        """Operands of an op that accesses `num_bytes`, in as many copies as keep repetitions apart."""
        count = max(1, min(_MAX_SETS, _APART_BYTES // max(1, num_bytes)))
        return tuple(make() for _ in range(count))


def matmul_cases(pool: Pool, dtype: torch.dtype, sizes: Sequence[int], max_flops: float) -> Iterator[OpCase]:
    """Matmuls of all combinations of `sizes` for m, n and k up to `max_flops`."""
    for m, n, k in product(sizes, repeat=3):
        if 2.0 * math.prod((m, n, k)) <= max_flops:
            yield matmul_case(pool, (m, n, k), dtype)


def matmul_case(pool: Pool, size: tuple[int, int, int], dtype: torch.dtype) -> OpCase:
    """A matmul of m, n and k, with the operands of a step: x @ w^T forward, g @ w and g^T @ x backward, in turn."""
    return OpCase(aten.mm.default, _factors(pool, *size, dtype))


def _factors(pool: Pool, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], ...]:
    def take(rows: int, columns: int, is_transposed: bool) -> Tensor:
        return pool.take((columns, rows), dtype).t() if is_transposed else pool.take((rows, columns), dtype)

    return tuple((take(m, k, a), take(k, n, b)) for a, b in ((False, True), (False, False), (True, False)))


def batched_cases(pool: Pool, dtype: torch.dtype) -> Iterator[OpCase]:
    """Batched matmuls: the heads of a small attention, and those of a larger one."""
    for b, m, n, k in ((8, 64, 64, 64), (8, 256, 256, 64)):
        yield OpCase(aten.bmm.default, tuple((pool.take((b, m, k), dtype), pool.take((b, k, n), dtype)) for _ in "ab"))


_ATTENTION = torch.ops.meshweave.attention.default
_ATTENTION_BACKWARD = torch.ops.meshweave.attention_backward.default
Sizes = tuple[int, int, int, int]  # batch, heads, sequence, head_dim


def attention_cases(pool: Pool, dtype: torch.dtype, shapes: Iterable[Sizes]) -> Iterator[OpCase]:
    """Causal and full attention, forward and backward."""
    for sizes, is_causal in product(shapes, (True, False)):
        scale = sizes[-1] ** -0.5
        q, k, v, grad = (pool.take(sizes, dtype) for _ in range(4))
        out, lse = ops.KERNELS[_ATTENTION](q, k, v, None, is_causal, scale)
        yield OpCase(_ATTENTION, ((q, k, v, None, is_causal, scale),))
        yield OpCase(_ATTENTION_BACKWARD, ((grad, q, k, v, None, out, lse, is_causal, scale),))


def memory_cases(pool: Pool, sizes: Sequence[int]) -> Iterator[OpCase]:
    """Memory work of every kind that moves about so many bytes, read and written."""
    for row, size in product(_MEMORY, sizes):
        if size <= row.most_bytes:
            count = max(64, size // 4 // row.streams)
            yield OpCase(row.target, pool.sets(size, partial(row.make, pool, count)), row.kind)


def launch_case(pool: Pool) -> OpCase:
    """The cost of an op with almost no work."""
    return OpCase(aten.add.Tensor, tuple((pool.take((4,)), pool.take((4,))) for _ in range(_MAX_SETS)))


_WIDTH = 64  # columns of two-dimensional operands: a row is 256 bytes of float32, a head
_HIDDEN = 512  # columns of reduced operands: a hidden size


def _rows(pool: Pool, count: int) -> Tensor:
    return pool.take((max(1, count // _HIDDEN), min(count, _HIDDEN)))


def _two(pool: Pool, count: int) -> tuple[Any, ...]:
    return (pool.take((count,)), pool.take((count,)))


def _single(pool: Pool, count: int) -> tuple[Any, ...]:
    return (pool.take((count,)),)


def _make_addends(pool: Pool, count: int) -> tuple[Any, ...]:
    return (_rows(pool, count), [1])


def _heads(pool: Pool, count: int) -> tuple[Any, ...]:
    """[tokens, heads, head_dim] seen as [heads, tokens, head_dim], to be made contiguous."""
    rows = max(1, count // (4 * _WIDTH))
    return (pool.take((rows, 4, _WIDTH)).transpose(0, 1), [4 * rows, _WIDTH])


def _index(pool: Pool, rows: int, table: int) -> Tensor:
    random = torch.Generator(pool.device).manual_seed(rows)
    return torch.randint(0, table, (rows,), generator=random, device=pool.device)


def _looked_up(pool: Pool, count: int) -> tuple[Any, ...]:
    rows = max(1, count // _WIDTH)
    return (pool.take((rows, _WIDTH)), _index(pool, rows, rows))


def _make_scatter(pool: Pool, count: int) -> tuple[Any, ...]:
    """The gradient of an embedding with as many rows as tokens."""
    rows = max(1, count // _WIDTH)
    return (pool.take((rows, _WIDTH)), _index(pool, rows, rows), rows, -1, False)


def _make_random(pool: Pool, count: int) -> tuple[Any, ...]:
    step = torch.zeros((), dtype=torch.int64, device=pool.device)
    rows = max(1, count // _WIDTH)
    return (step, 1, 1, [rows, _WIDTH], [0, 0], [rows, _WIDTH])


@dataclass(frozen=True, slots=True)
class _Row:
    """The op that is timed for a kind of memory work: it accesses `streams` tensors of the size passed to `make`."""

    kind: str
    target: Any
    streams: int
    make: Callable[[Pool, int], tuple[Any, ...]]
    most_bytes: int = 1 << 40  # slow kinds, whose time is proportional to bytes at much smaller sizes


_MEMORY = (
    _Row("pointwise", aten.add.Tensor, 3, _two),
    _Row("reduction", aten.sum.dim_IntList, 1, _make_addends),
    _Row("copy", aten.clone.default, 2, _single),
    _Row("strided", aten.reshape.default, 2, _heads),
    _Row("gather", aten.embedding.default, 3, _looked_up),
    _Row("scatter", aten.embedding_dense_backward.default, 2, _make_scatter, 32 * _MIB),
    _Row("random", torch.ops.meshweave.uniform.default, 1, _make_random, 4 * _MIB),
    _Row("fill", aten.full.default, 1, lambda pool, n: ([n], 1.0)),
)
