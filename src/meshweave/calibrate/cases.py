"""The ops that a calibration times: matmuls, attention, and memory work by kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes of matmuls: all combinations of `sizes` for m, n and k up to `max_flops`, and the `held_out` shapes (m, n,
    k)."""

    dtype: torch.dtype
    sizes: tuple[int, ...]
    max_flops: float
    held_out: tuple[tuple[int, int, int], ...]


_VECTORS = ((1, 256, 256), (1, 2048, 2048), (4, 768, 768))  # of one or few rows, which no grid has
# Shapes of models (hidden and MLP sizes, vocabularies), odd, skinny and tall shapes, between the sizes of the grids.
SHAPES = (
    (128, 256, 688), (256, 2048, 256), (512, 768, 768), (96, 96, 96), (1000, 1000, 100), (257, 129, 65),
    (1, 1024, 1024), (2048, 64, 64), (48, 1536, 512), (768, 768, 256), (100, 5000, 128), (688, 256, 256),
)  # fmt: skip


def matmul_cases(pool: Pool, grids: Iterable[Grid]) -> Iterator[OpCase]:
    """Matmuls of all sizes of the grids."""
    for grid in grids:
        every = ((m, n, k) for m, n, k in product(grid.sizes, repeat=3))
        sizes = [each for each in every if 2.0 * math.prod(each) <= grid.max_flops]
        sizes += _VECTORS if grid.max_flops > 2.0 * 2048**2 else ()
        yield from (matmul_case(pool, each, grid.dtype) for each in sizes)
        yield from (replace(matmul_case(pool, each, grid.dtype), is_held_out=True) for each in grid.held_out)


def matmul_case(pool: Pool, size: tuple[int, int, int], dtype: torch.dtype) -> OpCase:
    """A matmul of m, n and k, with the operands of a step: x @ w^T forward, g @ w and g^T @ x backward, in turn."""
    factors = _factors(pool, *size, dtype)
    return OpCase(f"matmul {str(dtype).removeprefix('torch.')}", aten.mm.default, factors)


def _factors(pool: Pool, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], ...]:
    def take(rows: int, columns: int, is_transposed: bool) -> Tensor:
        return pool.take((columns, rows), dtype).t() if is_transposed else pool.take((rows, columns), dtype)

    return tuple((take(m, k, a), take(k, n, b)) for a, b in ((False, True), (False, False), (True, False)))


def batched_cases(pool: Pool, dtype: torch.dtype, is_quick: bool) -> Iterator[OpCase]:
    """Batched matmuls of two batch sizes."""
    name = str(dtype).removeprefix("torch.")
    shapes = [(8, 64, 64, 64), (8, 256, 256, 64), (64, 64, 64, 64), (64, 128, 64, 128)]
    held_out = [(16, 128, 128, 64), (32, 96, 96, 48)]
    for b, m, n, k in shapes[:2] if is_quick else shapes:
        yield OpCase(f"matmul {name}", aten.bmm.default, _batches(pool, b, m, n, k, dtype))
    for b, m, n, k in held_out:
        yield OpCase(f"matmul {name}", aten.bmm.default, _batches(pool, b, m, n, k, dtype), True)


def _batches(pool: Pool, b: int, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], ...]:
    return tuple((pool.take((b, m, k), dtype), pool.take((b, k, n), dtype)) for _ in range(2))


_ATTENTION = torch.ops.meshweave.attention.default
_ATTENTION_BACKWARD = torch.ops.meshweave.attention_backward.default
Sizes = tuple[int, int, int, int]  # batch, heads, sequence, head_dim


def attention_cases(
    pool: Pool, dtype: torch.dtype, shapes: Iterable[Sizes], held_out: Iterable[Sizes]
) -> Iterator[OpCase]:
    """Causal and full attention, forward and backward."""
    for is_held_out, chosen in ((False, shapes), (True, held_out)):
        for sizes in chosen:
            for is_causal in (True, False):
                yield from _attention(pool, dtype, sizes, is_causal, is_held_out)


def _attention(pool: Pool, dtype: torch.dtype, sizes: Sizes, is_causal: bool, is_held_out: bool) -> Iterator[OpCase]:
    name, scale = str(dtype).removeprefix("torch."), sizes[-1] ** -0.5
    q, k, v, grad = (pool.take(sizes, dtype) for _ in range(4))
    out, lse = ops.KERNELS[_ATTENTION](q, k, v, None, is_causal, scale)
    forward, backward = (q, k, v, None, is_causal, scale), (grad, q, k, v, None, out, lse, is_causal, scale)
    yield OpCase(f"attention {name}", _ATTENTION, (forward,), is_held_out)
    yield OpCase(f"attention backward {name}", _ATTENTION_BACKWARD, (backward,), is_held_out)


def memory_cases(pool: Pool, sizes: Sequence[int], held_out: Sequence[int]) -> Iterator[OpCase]:
    """Memory work of every kind that moves about so many bytes, read and written. On a CPU there are two further sizes:
    right below and above the size from which the C library returns the result's memory."""
    for row in _MEMORY:
        cliff = [row.streams * size for size in _AT_CLIFF] if pool.device.type == "cpu" and row.writes else []
        kept = [size for size in sizes if not cliff or not cliff[0] < size < cliff[1]]
        own = [size for size in sorted({*kept, *cliff}) if size <= min(row.most_bytes, max(sizes))]
        for size in own if row.is_fitted else []:
            yield _memory_case(pool, row, size, False)
        for size in held_out:
            if size <= row.most_bytes:
                yield _memory_case(pool, row, size, True)


def _memory_case(pool: Pool, row: _Row, size: int, is_held_out: bool) -> OpCase:
    count = max(64, size // 4 // row.streams)
    operands = pool.sets(size, lambda: row.make(pool, count))
    return OpCase(row.label, row.target, operands, is_held_out, row.kind, row.weight)


def tiny_cases(pool: Pool) -> Iterator[OpCase]:
    """The cost of an op with almost no work."""
    yield OpCase("launch", aten.add.Tensor, tuple((pool.take((4,)), pool.take((4,))) for _ in range(_MAX_SETS)))


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


def _make_parts(pool: Pool, count: int) -> tuple[Any, ...]:
    half = max(1, count // _WIDTH // 2)
    return ([pool.take((half, _WIDTH)), pool.take((half, _WIDTH))], 1)


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
    """An op of memory work: it accesses `streams` tensors of the size passed to `make`; `kind` is the kind that it is
    measured for if that is not the simulator's. An op that is not fitted is held out: its error shows how well the
    fitted ops represent its kind."""

    label: str
    target: Any
    streams: int
    make: Callable[[Pool, int], tuple[Any, ...]]
    kind: str = ""
    most_bytes: int = 1 << 40  # slow kinds, whose time is proportional to bytes at much smaller sizes
    writes: bool = True  # a result of the full size
    is_fitted: bool = True
    weight: float = 1.0


_AT_CLIFF = (28 * _MIB, 34 * _MIB)  # results: glibc maps blocks above 32 MiB anew every time (mallopt(3))
_MEMORY = (
    # An AdamW update, which most pointwise ops of a step belong to, has a square root per 9 cheap ops.
    _Row("pointwise", aten.mul.Tensor, 3, _two, weight=5.0),
    _Row("pointwise", aten.add.Tensor, 3, _two, weight=4.0),
    _Row("pointwise, costly functions", aten.sqrt.default, 2, _single),
    _Row("pointwise", aten.mul.Scalar, 2, lambda pool, n: (pool.take((n,)), 1.5), is_fitted=False),
    _Row("pointwise, costly functions", aten.silu.default, 2, _single, is_fitted=False),
    _Row("reduction", aten.sum.dim_IntList, 1, _make_addends, writes=False),
    _Row("reduction", aten.sum.dim_IntList, 1, lambda pool, n: (_rows(pool, n), [0]), writes=False),
    _Row("reduction", aten.amax.default, 1, _make_addends, writes=False, is_fitted=False),
    _Row("copy", aten.clone.default, 2, _single, "copy"),
    _Row("strided", aten.reshape.default, 2, _heads),
    _Row("strided", aten.cat.default, 2, _make_parts),
    _Row("gather", aten.embedding.default, 3, _looked_up),
    _Row("scatter", aten.embedding_dense_backward.default, 2, _make_scatter, most_bytes=32 * _MIB),
    _Row("random", torch.ops.meshweave.uniform.default, 1, _make_random, most_bytes=4 * _MIB),
    _Row("fill", aten.full.default, 1, lambda pool, n: ([n], 1.0)),
)
