"""The time of work on a device: matmuls in tiles and waves, fused attention, and memory-bound kernels."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING

import torch

from meshweave.cost.hardware.fitted import along, interpolate_seconds
from meshweave.cost.hardware.schema import Power
from meshweave.errors import MeshweaveError
from meshweave.ir.work import Attention, Matmul, MemoryWork, Work

if TYPE_CHECKING:
    from meshweave.cost.hardware.profile import MachineProfile

_SPLITS = (1, 2, 4, 8, 16)  # parts that k is cut into if there are too few tiles to fill the device (split-k of cuBLAS)
_PARTIAL_BYTES = 4  # split-k adds partial results in float32


@lru_cache(maxsize=65536)
def compute_seconds(profile: MachineProfile, work: Work) -> float:
    """Seconds of `work` alone on a device, launches included. Raises MeshweaveError for a figure that the profile
    lacks."""
    if isinstance(work, Matmul):
        return matmul_seconds(profile, work)
    return attention_seconds(profile, work) if isinstance(work, Attention) else memory_seconds(profile, work)


def power_share(power: Power | None) -> float:
    """The share of the sustained rates under a power limit; 1 without a limit, or at the reference.

    Dynamic power goes as f * V^2, so the clock as its cube root where voltage must rise with it, and faster where
    voltage is at its floor; the profile has the exponent.
    """
    if power is None or power.watts >= power.reference_watts:
        return 1.0
    spare, reference = power.watts - power.static_watts, power.reference_watts - power.static_watts
    return float((spare / reference) ** power.exponent)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def peak_flops(profile: MachineProfile, dtype: torch.dtype) -> float:
    return _entry(profile, "peak", profile.peak, _priced_as(dtype, dict(profile.peak), bool(profile.matmul.measured)))


def _priced_as(dtype: torch.dtype, known: Collection[str], is_measured: bool) -> str:
    """The dtype whose figures price `dtype`. A calibration measures few: the nearest of them stands for each other, the
    narrowest that is not narrower, or else the widest. In figures that were not measured, each dtype has its own."""
    name = name_of(dtype)
    if name in known or not known or not is_measured:
        return name
    return min(known, key=lambda each: _distance(dtype, each))


def _distance(dtype: torch.dtype, name: str) -> tuple[bool, int]:
    wider = getattr(torch, name).itemsize - dtype.itemsize
    return wider < 0, abs(wider)


def matmul_seconds(profile: MachineProfile, work: Matmul) -> float:
    """The longer of math and memory, after a launch.

    The result is computed in tiles, each on a multiprocessor, in waves of as many tiles as there are multiprocessors; a
    tile takes the time of its products along k and a ramp (filling the pipeline, writing the tile). The fastest of all
    tile shapes and splits of k counts, as the library chooses.
    """
    work, model = work.in_reals(), profile.matmul
    if not work.flops:
        return profile.launch_s
    known = {*(table.dtype for table in model.measured), *dict(model.sustained)}
    dtype = _priced_as(work.dtype, known, bool(model.measured))
    for table in model.measured:
        if table.dtype == dtype:
            points = [(m, n, k, b, 2.0 * m * n * k * b, seconds) for m, n, k, b, seconds in table.points]
            return max(interpolate_seconds(points, (work.m, work.n, work.k, work.batch), work.flops), profile.launch_s)
    sustained = _entry(profile, "matmul.sustained", model.sustained, dtype)
    unit = peak_flops(profile, work.dtype) * sustained * power_share(profile.power) / model.num_units
    ramp = model.k_ramp_bytes / work.dtype.itemsize
    rate = profile.memory.bandwidth * _entry(profile, "memory.efficiency", profile.memory.efficiency, "copy")
    if not model.tiles:
        raise _missing(profile, "matmul.tiles", "tiles", ())
    best = min(
        _tile_seconds(work, (int(rows), int(columns)), splits, model.num_units, unit * share, ramp)
        + (splits > 1) * _PARTIAL_BYTES * 2 * splits * work.batch * work.m * work.n / rate
        for rows, columns, share in model.tiles
        for splits in _SPLITS
    )
    return profile.launch_s + max(best, work.bytes / rate)


def _tile_seconds(work: Matmul, tile: tuple[int, int], splits: int, num_units: int, unit: float, ramp: float) -> float:
    rows, columns = tile
    num_tiles = ceil(work.m / rows) * ceil(work.n / columns) * work.batch * splits
    waves = ceil(num_tiles / num_units)
    return waves * 2.0 * rows * columns * (ceil(work.k / splits) + ramp) / unit


def attention_seconds(profile: MachineProfile, work: Attention) -> float:
    """The longer of math and memory, after a launch; the math fills multiprocessors in waves of blocks of queries."""
    model = profile.attention
    if not work.flops:
        return profile.launch_s
    direction = "backward" if work.is_backward else "forward"
    measured = {table.dtype: table for table in model.measured if table.direction == direction}
    dtype = _priced_as(work.dtype, measured, not model.kernels)
    if dtype in measured:
        table = measured[dtype]
        chosen = [p for p in table.points if bool(p[4]) == work.is_causal] or list(table.points)
        features = (work.heads, work.queries, work.keys, work.head_dim)
        seconds = interpolate_seconds([_with_flops(p, work) for p in chosen], features, work.flops)
        if dtype != name_of(work.dtype):
            seconds *= peak_flops(profile, getattr(torch, dtype)) / peak_flops(profile, work.dtype)
        return max(seconds, profile.launch_s)
    rate, half = _attention_rate(profile, work)
    if dtype != model.dtype:
        rate *= peak_flops(profile, work.dtype) / _entry(profile, "peak", profile.peak, model.dtype)
    units, rows = profile.matmul.num_units, work.keys if work.is_backward else work.queries
    blocks = work.heads * ceil(rows / model.block)
    filled = blocks / (ceil(blocks / units) * units)
    math = work.flops / (rate * power_share(profile.power) * filled) * (1 + half / work.keys)
    copy = _entry(profile, "memory.efficiency", profile.memory.efficiency, "copy")
    return profile.launch_s + max(math, work.bytes / (profile.memory.bandwidth * copy))


def _attention_rate(profile: MachineProfile, work: Attention) -> tuple[float, float]:
    """The rate of the profile's kernel for the head_dim, mask and direction of `work` (linear between the head_dims of
    the table, the nearest beyond them), and the number of keys at which half of it is reached."""
    model = profile.attention
    kernel = next((k for k in model.kernels if k.name == model.kernel), None)
    rows = () if kernel is None else kernel.backward if work.is_backward else kernel.forward
    if not rows:
        raise _missing(profile, "attention.kernels", model.kernel, tuple(k.name for k in model.kernels))
    masked = [row for row in rows if bool(row[1]) == work.is_causal]
    stretch = 1 if masked or not work.is_causal else 2
    table = sorted(masked or rows)
    half, rate = (_interpolate([(row[0], row[column]) for row in table], work.head_dim) for column in (2, 3))
    return rate, stretch * half


def _interpolate(table: Sequence[tuple[float, float]], x: float) -> float:
    """Linear between the points of `table`, the nearest point's value beyond them."""
    if x <= table[0][0] or x >= table[-1][0]:
        return table[0][1] if x <= table[0][0] else table[-1][1]
    return along(table, x)


def _with_flops(point: tuple[float, ...], work: Attention) -> tuple[float, ...]:
    """A measured point with its flops, counted in the same way as those of `work`."""
    *sizes, causal, seconds = point
    heads, queries, keys, head_dim = map(int, sizes)
    alike = Attention(heads, queries, keys, head_dim, bool(causal), work.is_backward, work.dtype, 0)
    return heads, queries, keys, head_dim, alike.flops, seconds


def memory_seconds(profile: MachineProfile, work: MemoryWork) -> float:
    """A launch, and bytes at the bandwidth that this kind of work reaches."""
    for curve in profile.memory.measured:
        if curve.kind == work.kind:
            return along(curve.points, work.bytes)
    efficiency = _entry(profile, "memory.efficiency", profile.memory.efficiency, work.kind)
    return profile.launch_s + work.bytes / (profile.memory.bandwidth * efficiency)


def _entry(profile: MachineProfile, table: str, entries: tuple[tuple[str, float], ...], key: str) -> float:
    for name, value in entries:
        if name == key:
            return value
    raise _missing(profile, table, key, tuple(name for name, _ in entries))


def _missing(profile: MachineProfile, table: str, key: str, known: tuple[str, ...]) -> MeshweaveError:
    return MeshweaveError(
        f"the profile has no figure for {key}",
        where=f"profile {profile.name}, [{table}]",
        got=", ".join(known) or "nothing",
        expected=key,
        hint=f"add it to [{table}], or measure it with `meshweave calibrate`",
    )
