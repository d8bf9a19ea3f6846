"""Measured times as a machine profile: the figures of its file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from meshweave.calibrate.links import Contention, MeasuredLink
from meshweave.calibrate.ops import Measurement
from meshweave.cost.hardware.fitted import along
from meshweave.cost.hardware.schema import DTYPES, Fit
from meshweave.ir.work import MEMORY_KINDS, Attention, Matmul, MemoryWork

Row = tuple[float, ...]
_Key = tuple[str, str, int]  # op, level of links, group size
_MOST_NOISE = 1.3  # between times that are the same, measured briefly on a machine that does other things too
W = TypeVar("W", Matmul, Attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """Known facts of the machine: memory of a process in bytes, and how much of it is in use before any tensor is;
    whether chains of pointwise ops run as a single kernel ("pointwise"), or not ("none")."""

    name: str
    version: str
    summary: str
    command: str
    devices_per_node: int
    memory_bytes: float
    reserved_bytes: float
    fusion: str = "none"


@dataclass(frozen=True, slots=True)
class Measurements:
    """All measurements: the seconds of an op with almost no work, ops, links, and what they cost compute beside them,
    by level."""

    launch: float = 0.0
    ops: tuple[Measurement, ...] = ()
    links: tuple[MeasuredLink, ...] = ()
    contentions: tuple[Contention, ...] = ()


def links_text(machine: MachineFacts, figures: Measurements) -> str:
    """The measured links alone, as TOML (`schema.MeasuredLinks`)."""
    head = f'version = "{machine.version}"\ndevices_per_node = {machine.devices_per_node}\n'
    return "\n".join([head, *_collective_tables(figures)])


def profile_text(machine: MachineFacts, figures: Measurements) -> str:
    """The profile's TOML file."""
    matmuls = [(sample.work, sample.seconds) for sample in figures.ops if isinstance(sample.work, Matmul)]
    attention = [(sample.work, sample.seconds) for sample in figures.ops if isinstance(sample.work, Attention)]
    memory = [(sample.work, sample.seconds) for sample in figures.ops if isinstance(sample.work, MemoryWork)]
    bandwidth = max(work.bytes / seconds for work, seconds in memory if work.kind == "copy")
    parts = [
        f"# Measured by `{machine.command}`.\n# {machine.summary}\n",
        f'name = "{machine.name}"\nversion = "{machine.version}"\nsource = "measured"\n'
        f'summary = "{machine.summary}"\ndevices_per_node = {machine.devices_per_node}\n'
        f'fusion = "{machine.fusion}"\n'
        f"launch_s = {_number(figures.launch)}  # an op on 4 elements\n",
        f"[memory]\nbytes = {_number(machine.memory_bytes)}\n"
        f"reserved_bytes = {_number(machine.reserved_bytes)}  # of the process before it had tensors\n"
        f"reserved_fraction = 0.0\nbandwidth = {_number(bandwidth)}  # the fastest copy, read and written\n",
        *_memory_tables(memory),
        "[peak]  # the fastest matmul\n" + "".join(_peaks(matmuls)),
        "[matmul]\n",
        *_matmul_tables(matmuls),
        "[attention]\n",
        *_attention_tables(attention),
        *_link_tables(figures, bandwidth),
    ]
    return "\n".join(parts)


def _memory_tables(samples: Sequence[tuple[MemoryWork, float]]) -> Iterable[str]:
    for kind in MEMORY_KINDS:
        rows = [(float(work.bytes), seconds) for work, seconds in samples if work.kind == kind]
        if rows:
            yield f'[[memory.measured]]  # bytes read and written, seconds\nkind = "{kind}"\n{_points(_rising(rows))}'


def _peaks(samples: Sequence[tuple[Matmul, float]]) -> Iterable[str]:
    for name, own in _by_dtype(samples):
        yield f"{name} = {_number(max(work.flops / seconds for work, seconds in own))}\n"


def _matmul_tables(samples: Sequence[tuple[Matmul, float]]) -> Iterable[str]:
    for name, own in _by_dtype(samples):
        rows = [(w.m, w.n, w.k, w.batch, seconds) for w, seconds in own]
        yield f'[[matmul.measured]]  # m, n, k, batch, seconds\ndtype = "{name}"\n{_points(rows)}'


def _attention_tables(samples: Sequence[tuple[Attention, float]]) -> Iterable[str]:
    for direction in ("forward", "backward"):
        for name, own in _by_dtype([f for f in samples if f[0].is_backward == (direction == "backward")]):
            rows = [(w.heads, w.queries, w.keys, w.head_dim, int(w.is_causal), seconds) for w, seconds in own]
            head = "[[attention.measured]]  # heads (batch times heads), queries, keys, head_dim, causal, seconds"
            yield f'{head}\ndtype = "{name}"\ndirection = "{direction}"\n{_points(rows)}'


def _by_dtype(samples: Sequence[tuple[W, float]]) -> Iterable[tuple[str, list[tuple[W, float]]]]:
    for name in DTYPES:
        own = [(work, seconds) for work, seconds in samples if work.dtype is getattr(torch, name)]
        if own:
            yield name, own


def _link_tables(figures: Measurements, memory_bandwidth: float) -> Iterable[str]:
    beside = {level: Contention(level) for level in ("node", "net")} | {own.level: own for own in figures.contentions}
    for level, contention in beside.items():
        samples = [sample for sample in figures.links if sample.level == level]
        if samples:
            fastest = max(sample.received for sample in samples)
            comment = "the most that a device received"
        elif level == "node":
            fastest, comment = memory_bandwidth, "not measured: no link beats the memory; without collectives no price"
        else:
            continue
        yield (
            f"[links.{level}]\nbandwidth = {_number(fastest)}  # {comment}\nefficiency = 1.0\n"
            f"compute_slowdown = {_number(contention.slowdown)}\n"
        )
    yield from _collective_tables(figures)


def _collective_tables(figures: Measurements) -> Iterable[str]:
    for fit in fits_of(figures):
        head = "[[collectives]]  # bytes of the local input, seconds"
        named = f'{head}\nop = "{fit.op}"\nlevel = "{fit.level}"\ngroup_size = {fit.group_size}\n'
        named += f"host = {_number(fit.host)}\nhost_s = {_number(fit.host_s)}\n"
        yield f"{named}{_points(fit.points)}"


def fits_of(figures: Measurements) -> Iterable[Fit]:
    """The measured links as figures of a profile."""
    samples_of: dict[_Key, list[MeasuredLink]] = {}
    for sample in figures.links:
        samples_of.setdefault((sample.op, sample.level, sample.group_size), []).append(sample)
    curves = {key: _rising([(float(x.local_bytes), x.seconds) for x in own]) for key, own in samples_of.items()}
    beside = {own.level: own.seconds for own in figures.contentions}
    for (op, level, size), own in samples_of.items():
        share, least = _host(own)
        points = tuple(_whole(curves, (op, level, size)))
        yield Fit(op, level, size, points, share, max(least, beside.get(level, 0.0)))


def _whole(curves: Mapping[_Key, list[Row]], key: _Key) -> list[Row]:
    """A curve. An all-reduce takes what a reduce-scatter and an all-gather take without the start-up of one of them,
    unless it is faster, or slower by more than the error of measured times: noise must not make two collectives of
    one."""
    op, level, size = key
    scatter, gather = (curves.get((part, level, size)) for part in ("reduce_scatter", "all_gather"))
    if op != "all_reduce" or not scatter or not gather:
        return curves[key]
    own, rows = curves[key], list[Row]()
    start_up = min(scatter[0][1], gather[0][1])
    for num_bytes in sorted({x for x, _ in (*own, *scatter) if x <= own[-1][0]}):
        seconds, parts = along(own, num_bytes), along(scatter, num_bytes) + along(gather, num_bytes / size)
        if seconds <= parts * _MOST_NOISE:
            seconds = min(seconds, parts - start_up)
        rows.append((num_bytes, max(seconds, rows[-1][1] if rows else 0.0)))
    return rows


def _host(samples: Sequence[MeasuredLink]) -> tuple[float, float]:
    """The caller's share of the time, and its minimum time: that of the size where it is least, and over all sizes the
    caller's time beyond that relative to the total seconds."""
    spent = [sample.host * sample.seconds for sample in samples]
    least = min(spent)
    return sum(own - least for own in spent) / sum(sample.seconds for sample in samples), least


def _rising(rows: Iterable[Row]) -> list[Row]:
    """Bytes and seconds in rising order, monotonic in both."""
    rising: list[Row] = []
    for size, seconds in sorted(rows):
        rising.append((size, max(seconds, rising[-1][1] if rising else 0.0)))
    return rising


def _points(rows: Iterable[Sequence[float]]) -> str:
    lines = "".join(f"  [{', '.join(map(_number, row))}],\n" for row in rows)
    return f"points = [\n{lines}]\n"


def _number(value: float) -> str:
    """Four digits, in TOML syntax; whole numbers unchanged."""
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.4g}"
