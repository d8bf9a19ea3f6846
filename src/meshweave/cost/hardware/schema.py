"""The schema of a machine profile. Every class is a table of the TOML file, every field a key of it.

Seconds, bytes, bytes per second and floating point operations per second throughout. The metadata of a field has its
range; `load` reads files by it, and `docs/hardware.md` lists the fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from meshweave.ir.collectives import RECEIVED
from meshweave.ir.work import MEMORY_KINDS

DTYPES = (
    "bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip
LEVELS = ("node", "net")  # links inside a node, and between nodes

Metadata = Mapping[str, Any]
Point = tuple[float, ...]


def figure(expected: str, low: float, high: float = math.inf, *, above: bool = False) -> Metadata:
    """A finite number from `low` (exclusive if `above`) to `high`."""
    return MappingProxyType({"expected": expected, "low": low, "high": high, "above": above})


def points(columns: str, *, low: float = 0, rising: bool = False) -> Metadata:
    """Rows of figures, each as long as `columns`: the last figure is above 0, the others at least `low`.
    `rising`: the first column rises from row to row, and the last never falls."""
    return MappingProxyType(
        {"expected": f"rows [{columns}]", "columns": columns.split(", "), "low": low, "rising": rising}
    )


def choice_of(*names: str) -> Metadata:
    return MappingProxyType({"expected": f"one of {', '.join(names)}", "names": names})


def table_of(names: tuple[str, ...], value: Metadata) -> Metadata:
    """A table from some of `names` to figures, stored as sorted pairs."""
    return MappingProxyType({"expected": f"a table over {', '.join(names)}", "keys": names, "value": value})


SECONDS = figure("seconds, 0 or more", 0)
POSITIVE = figure("a number above 0", 0, above=True)
COUNT = figure("a whole number, 1 or more", 1)
SHARE = figure("a share above 0, 1 at most", 0, 1, above=True)
SLOWDOWN = figure("a factor of 1 or more", 1)
RATES = table_of(DTYPES, POSITIVE)
_TEXT: Metadata = MappingProxyType({"expected": "text"})


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Measured: a kernel of a kind of work takes `seconds`, overhead included, for `bytes` read and written."""

    kind: str = field(metadata=choice_of(*MEMORY_KINDS))
    points: tuple[Point, ...] = field(metadata=points("bytes, seconds", rising=True))


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Device memory. `bytes` is the device's total as a process sees it; of that `reserved_bytes` go to the context and
    to the communication library, and `reserved_fraction` to fragmentation. A kernel without a curve takes the launch
    time and its bytes / (bandwidth * efficiency of its kind)."""

    bytes: float = field(metadata=POSITIVE)
    reserved_bytes: float = field(metadata=figure("bytes, 0 or more", 0))
    reserved_fraction: float = field(metadata=figure("a share from 0 to below 1", 0, 0.999))
    bandwidth: float = field(metadata=POSITIVE)
    efficiency: tuple[tuple[str, float], ...] = field(default=(), metadata=table_of(MEMORY_KINDS, SHARE))
    measured: tuple[MemoryCurve, ...] = ()


@dataclass(frozen=True, slots=True)
class Power:
    """The effect of a power limit: the file's sustained rates hold at `reference_watts`. Clocks, and with them rates,
    go as (watts - static_watts) to the power of `exponent`; see `compute.power_share`."""

    watts: float = field(metadata=POSITIVE)
    reference_watts: float = field(metadata=POSITIVE)
    static_watts: float = field(metadata=figure("watts, 0 or more", 0))
    exponent: float = field(metadata=SHARE)


@dataclass(frozen=True, slots=True)
class MatmulPoints:
    """Measured: a matmul of `dtype` of m x n x k, `batch` of them, takes `seconds` (overhead included)."""

    dtype: str = field(metadata=choice_of(*DTYPES))
    points: tuple[Point, ...] = field(metadata=points("m, n, k, batch, seconds", low=1))


@dataclass(frozen=True, slots=True)
class MatmulModel:
    """Matmuls in tiles over `num_units` multiprocessors: see `compute.matmul_seconds`.

    `sustained` is the share of the peak that a multiprocessor sustains in the main loop of the best tile, at the
    reference power. `tiles` are rows (rows, columns, share of that rate); `k_ramp_bytes` is the cost of filling the
    pipeline and writing a tile, in bytes along k. Dtypes in `measured` are interpolated instead. `float8_copies` of a
    value in 8 bits are needed to multiply with it and with its transpose.
    """

    num_units: int = field(default=1, metadata=COUNT)
    k_ramp_bytes: float = field(default=0.0, metadata=figure("bytes, 0 or more", 0))
    tiles: tuple[Point, ...] = field(default=(), metadata=points("rows, columns, share", low=1))
    sustained: tuple[tuple[str, float], ...] = field(default=(), metadata=table_of(DTYPES, SHARE))
    measured: tuple[MatmulPoints, ...] = ()
    float8_copies: int = field(default=1, metadata=COUNT)


_RATES = points("head_dim, causal, half_keys, rate")


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """A kernel's rates on long sequences (flops as work.Attention counts them), by head_dim and mask (`causal` 0 or 1),
    and the number of keys at which half of the rate is reached."""

    name: str = field(metadata=_TEXT)
    forward: tuple[Point, ...] = field(metadata=_RATES)
    backward: tuple[Point, ...] = field(metadata=_RATES)


@dataclass(frozen=True, slots=True)
class AttentionPoints:
    """Measured: attention of `dtype` takes `seconds` (overhead included); `causal` is 0 or 1."""

    dtype: str = field(metadata=choice_of(*DTYPES))
    direction: str = field(metadata=choice_of("forward", "backward"))
    points: tuple[Point, ...] = field(metadata=points("heads, queries, keys, head_dim, causal, seconds"))


@dataclass(frozen=True, slots=True)
class AttentionModel:
    """Fused attention: see `compute.attention_seconds`.

    `kernel` names the entry of `kernels` in use. Their rates are for `dtype`; another dtype has the same share of its
    own peak. A kernel without rows for a causal mask uses its other rates, and reaches half of them at twice as many
    keys. A block of `block` queries (in backward: keys) runs on a multiprocessor. Dtypes in `measured` are interpolated
    instead.
    """

    dtype: str = field(default="bfloat16", metadata=choice_of(*DTYPES))
    kernel: str = field(default="flash2", metadata=_TEXT)
    block: int = field(default=128, metadata=COUNT)
    kernels: tuple[AttentionKernel, ...] = ()
    measured: tuple[AttentionPoints, ...] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """The links of a level, per device and direction (for the level `net`: per network adapter of a node).

    `bandwidth` is the line rate, which nothing exceeds; large messages reach `efficiency` of it. Compute takes
    `compute_slowdown` times as long while a collective runs on the level. `ports` is the number of adapters of a node,
    0 for one per device.
    """

    bandwidth: float = field(metadata=POSITIVE)
    efficiency: float = field(metadata=SHARE)
    compute_slowdown: float = field(default=1.0, metadata=SLOWDOWN)
    ports: int = field(default=0, metadata=figure("a whole number, 0 or more", 0))


@dataclass(frozen=True, slots=True)
class Links:
    """The levels of links of the machine. Without `net` there is a single node."""

    node: Link
    net: Link | None = None


_TRIPLE = points("LL, LL128, Simple")


@dataclass(frozen=True, slots=True)
class Nccl:
    """The constants of NCCL's own model (tuning.cc): latencies in seconds, triples are (LL, LL128, Simple). `ll_cap`
    are the highest rates of LL, in bytes per second, on 1, 2 and more nodes. `nvls_efficiency` 0: no NVLink SHARP.
    `nvls_channels` of `nvls_chunk_bytes` per device are in flight in NVLink SHARP; see `nccl` for all formulas.
    """

    base_ring: Point = field(metadata=_TRIPLE)
    base_tree: Point = field(metadata=_TRIPLE)
    node_ring: Point = field(metadata=_TRIPLE)
    node_tree: Point = field(metadata=_TRIPLE)
    net_ring: Point = field(metadata=_TRIPLE)
    net_tree: Point = field(metadata=_TRIPLE)
    ll_cap: Point = field(metadata=points("1 node, 2 nodes, more nodes"))
    net_overhead: float = field(metadata=SECONDS)
    pat_base: float = field(metadata=SECONDS)
    pat_per_device: float = field(metadata=SECONDS)
    node_nvls: float = field(default=0.0, metadata=SECONDS)
    net_nvls_tree: float = field(default=0.0, metadata=SECONDS)
    nvls_efficiency: float = field(default=0.0, metadata=figure("a share from 0 to 1", 0, 1))
    nvls_channels: int = field(default=0, metadata=figure("a whole number, 0 or more", 0))
    nvls_chunk_bytes: float = field(default=0.0, metadata=figure("bytes, 0 or more", 0))


@dataclass(frozen=True, slots=True)
class Fit:
    """Measured: `op` in groups of `group_size` on links of `level` takes `seconds` for a local input of `local_bytes`.

    Linear between the points; below the first it takes the time of the first, above the last it is extrapolated from
    the last two. Groups of another size: see `fitted`. Of that time the caller spends `host_s`, whatever the size, and
    the share `host` on starting it and, when the bytes have arrived, on finishing it: work that compute does not hide.
    """

    op: str = field(metadata=choice_of(*RECEIVED))
    level: str = field(metadata=choice_of(*LEVELS))
    group_size: int = field(metadata=figure("a whole number, 2 or more", 2))
    points: tuple[Point, ...] = field(metadata=points("local_bytes, seconds", rising=True))
    host: float = field(default=0.0, metadata=figure("a share from 0 to 1", 0, 1))
    host_s: float = field(default=0.0, metadata=SECONDS)


@dataclass(frozen=True, slots=True)
class MeasuredLinks:
    """The communications of a job, measured: what the built-in profile of its devices does not say."""

    version: str = field(metadata=_TEXT)
    devices_per_node: int = field(metadata=COUNT)
    collectives: tuple[Fit, ...] = ()
